"""How verdicts, hints and solutions look: in a notebook and as plain text. Colour never says anything alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any, Literal, Self

from course_pp.base.arguments import checked
from course_pp.launch.surroundings import shell

Status = Literal["pending", "not yet", "correct"]

# Okabe and Ito's colours; the symbol and the word say the same.
_LOOKS: dict[str, tuple[str, str]] = {
    "pending": ("○", "#767676"),
    "not yet": ("✗", "#D55E00"),
    "correct": ("✓", "#009E73"),
}


class Shown:
    """A value that a notebook shows where the call stands, in a loop or under an ``if`` too, and
    once a cell.

    Anywhere else it is shown as every value is.
    """

    _shown_in = -1

    def show(self) -> Self:
        """Show it, if this is a notebook; return it."""
        if (notebook := _notebook()) is not None:
            from IPython.display import display

            display(self)
            # Not a field, so that two that say the same stay equal; hence past the frozen
            # dataclass.
            object.__setattr__(self, "_shown_in", notebook.execution_count)
        return self

    def _ipython_display_(self) -> None:
        """IPython asks this first. NotImplementedError means: show it as usual."""
        notebook = _notebook()
        if notebook is None or notebook.execution_count != self._shown_in:
            raise NotImplementedError


class MessageOnly:
    """An exception of which a notebook shows the message alone: its traceback is the course's own code."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class Interrupted(MessageOnly, KeyboardInterrupt):
    """A check was interrupted, and its processes have ended. Still an interrupt: what was to run next does not."""

    def __init__(self) -> None:
        super().__init__("○ interrupted · run the cell again.")


@checked
@dataclass(frozen=True)
class Verdict(Shown):
    """What a check found.

    Attributes:
        status: ``"pending"`` (still the stub), ``"not yet"`` or ``"correct"``.
        heading: which exercise this is about.
        symptom: what was seen; what to do while pending; empty when correct.
        cause: what probably led to it.
        example: a counter-example.
        printed: what the answer printed.
        next_step: where help is to be had.
        note: anything else, such as progress that could not be kept.
    """

    status: Status
    heading: str
    symptom: str = ""
    cause: str = ""
    example: str = ""
    printed: str = ""
    next_step: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        """All of it as plain text."""
        symbol, _ = _LOOKS[self.status]
        parts = [
            f"{symbol} {self.status} · {self.heading}",
            *(text for _, text in self._sentences()),
        ]
        parts += [_under(title, text) for title, text in self._blocks()]
        return "\n".join(parts + [part for part in (self.next_step, self.note) if part])

    def __repr__(self) -> str:
        return self.text

    def _sentences(self) -> list[tuple[str, str]]:
        cause = f"Likely cause: {self.cause}" if self.cause else ""
        return [
            (kind, text) for kind, text in (("symptom", self.symptom), ("cause", cause)) if text
        ]

    def _blocks(self) -> list[tuple[str, str]]:
        return [
            (title, text)
            for title, text in (("Example", self.example), ("It printed", self.printed))
            if text
        ]

    def _repr_html_(self) -> str:
        symbol, colour = _LOOKS[self.status]
        parts = [f"<div><b>{symbol} {self.status}</b> · {_html(self.heading)}</div>"]
        parts += [f"<div>{_html(text)}</div>" for _, text in self._sentences()]
        wrapped = "margin:0 0 0 1.5em;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
        parts += [
            f'<div>{title}:</div><pre style="{wrapped}">{escape(text)}</pre>'
            for title, text in self._blocks()
        ]
        parts += [
            f'<div style="opacity:0.8">{_html(text)}</div>'
            for text in (self.next_step, self.note)
            if text
        ]
        style = f"border-left:5px solid {colour};padding:0.2em 0 0.2em 0.8em;max-width:60em"
        return f'<div role="status" style="{style}">{"".join(parts)}</div>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self._repr_html_()}


@dataclass(frozen=True)
class Note(Shown):
    """A hint or a solution: Markdown in a notebook, the same text elsewhere."""

    text: str
    markdown: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text, "text/markdown": self.markdown}


def _notebook() -> Any:
    """The shell of the notebook that this runs in; None in a script, a terminal, a test."""
    found = shell()
    return found if hasattr(found, "kernel") else None


def shows_widgets() -> bool:
    """Whether this is a notebook whose kernel has ipywidgets."""
    return _notebook() is not None and find_spec("ipywidgets") is not None


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Rows of texts as plain text, a line each, in columns as wide as need be."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _under(title: str, text: str) -> str:
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    return f"{title}:\n{indented}"


def _html(text: str) -> str:
    """Escaped, with what stands in backticks as code and every line end kept."""
    coded = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text, quote=False))
    return coded.replace("\n", "<br>")
