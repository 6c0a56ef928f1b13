"""How verdicts, hints and solutions look: in a notebook and as plain text.

No meaning is carried by colour alone.
"""

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
    """A value that a notebook shows at the call, also in a loop or under an ``if``, once a cell.

    Outside a notebook it is shown like any other value.
    """

    _shown_in = -1

    def show(self) -> Self:
        """Show it, if this is a notebook; return it."""
        if (notebook := _notebook()) is not None:
            from IPython.display import display

            display(self)
            # This is no field, so that two values with the same text stay equal. A frozen
            # dataclass lets nobody assign to itself, hence the detour.
            object.__setattr__(self, "_shown_in", notebook.execution_count)
        return self

    def _ipython_display_(self) -> None:
        """Do nothing, or raise NotImplementedError if IPython has to show the value itself.

        IPython calls this method first.
        """
        notebook = _notebook()
        if notebook is None or notebook.execution_count != self._shown_in:
            raise NotImplementedError


class MessageOnly:
    """An exception whose message a notebook shows alone.

    Its traceback would be the course's code.
    """

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class Interrupted(MessageOnly, KeyboardInterrupt):
    """A check was interrupted, and its processes have ended.

    It is still a KeyboardInterrupt, so the cells that were to run next do not.
    """

    def __init__(self) -> None:
        super().__init__("○ interrupted · run the cell again.")


@checked
@dataclass(frozen=True)
class Verdict(Shown):
    """The result of a check.

    Attributes:
        status: ``"pending"`` (still the stub), ``"not yet"`` or ``"correct"``.
        heading: number and title of the exercise.
        symptom: sentence on the wrong result; the next step while pending; empty when correct.
        cause: likely cause of the symptom.
        example: a counter-example.
        printed: output of the answer.
        next_step: way to get help.
        note: any other sentence, such as one on progress that could not be kept.
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
        """The verdict as plain text."""
        symbol, _ = _LOOKS[self.status]
        parts = [f"{symbol} {self.status} · {self.heading}"]
        parts += [text for _, text in self._sentences()]
        parts += [_under(title, text) for title, text in self._blocks()]
        parts += [self.next_step, self.note]
        return "\n".join(filter(None, parts))

    def __repr__(self) -> str:
        return self.text

    def _sentences(self) -> list[tuple[str, str]]:
        cause = f"Likely cause: {self.cause}" if self.cause else ""
        both = (("symptom", self.symptom), ("cause", cause))
        return [(kind, text) for kind, text in both if text]

    def _blocks(self) -> list[tuple[str, str]]:
        both = (("Example", self.example), ("It printed", self.printed))
        return [(title, text) for title, text in both if text]

    def _repr_html_(self) -> str:
        symbol, colour = _LOOKS[self.status]
        parts = [f"<div><b>{symbol} {self.status}</b> · {_html(self.heading)}</div>"]
        parts += [f"<div>{_html(text)}</div>" for _, text in self._sentences()]
        wrapped = "margin:0 0 0 1.5em;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
        for title, text in self._blocks():
            parts.append(f'<div>{title}:</div><pre style="{wrapped}">{escape(text)}</pre>')
        for text in filter(None, (self.next_step, self.note)):
            parts.append(f'<div style="opacity:0.8">{_html(text)}</div>')
        style = f"border-left:5px solid {colour};padding:0.2em 0 0.2em 0.8em;max-width:60em"
        return f'<div role="status" style="{style}">{"".join(parts)}</div>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self._repr_html_()}


@dataclass(frozen=True)
class Note(Shown):
    """A hint or a solution: Markdown in a notebook, plain text elsewhere."""

    text: str
    markdown: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text, "text/markdown": self.markdown}


def _notebook() -> Any:
    """Return the shell of the notebook that this runs in; None in a script, terminal or test."""
    found = shell()
    return found if hasattr(found, "kernel") else None


def shows_widgets() -> bool:
    """Whether this is a notebook whose kernel has ipywidgets."""
    return _notebook() is not None and find_spec("ipywidgets") is not None


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of texts as plain text, a line each, in columns as wide as their widest text."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _under(title: str, text: str) -> str:
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    return f"{title}:\n{indented}"


def _html(text: str) -> str:
    """Return a text as HTML: escaped, code for its backticks, every line end kept."""
    coded = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text, quote=False))
    return coded.replace("\n", "<br>")
