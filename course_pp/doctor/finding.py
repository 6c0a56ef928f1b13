"""The checks of the doctor, and their findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: name of the thing that was looked at: "open files".
        ok: whether the course works with this thing as it is.
        says: state of the thing.
        breaks: parts of the course that will fail, and the notebooks in which they stand.
        remedy: a way to mend the thing.
    """

    name: str
    ok: bool
    says: str
    breaks: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        if self.ok:
            return f"ok    {self.name}: {_one_line(self.says)}"
        line = f"WRONG {self.name}: {_one_line(self.says)}."
        if self.breaks:
            line += f" What fails: {_one_line(self.breaks)}."
        if self.remedy:
            line += f" Mend it: {_one_line(self.remedy)}."
        return line


def _one_line(text: str) -> str:
    # Messages of exceptions come with line ends and full stops.
    return " ".join(text.split()).rstrip(".")


def right(name: str, says: str) -> Finding:
    """Return the finding that the course works with the thing as it is."""
    return Finding(name, True, says)


def wrong(name: str, says: str, *, breaks: str, remedy: str) -> Finding:
    """Return the finding that the thing must be mended."""
    return Finding(name, False, says, breaks=breaks, remedy=remedy)


@dataclass(frozen=True)
class Check:
    """A question to the machine.

    Attributes:
        name: name of the finding if ``ask`` raises.
        ask: function that looks at the machine.
        breaks: parts of the course that are in danger if ``ask`` raises.
    """

    name: str
    ask: Callable[[], Finding | list[Finding]]
    breaks: str = "unknown"

    def findings(self) -> list[Finding]:
        """Ask, and return the findings. An exception becomes a finding that names it."""
        try:
            answer = self.ask()
        except Exception as error:
            says = f"could not be checked ({type(error).__name__}: {error})"
            remedy = "see the reason in parentheses"
            return [wrong(self.name, says, breaks=self.breaks, remedy=remedy)]
        return answer if isinstance(answer, list) else [answer]
