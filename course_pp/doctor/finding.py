"""What a check of the doctor is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: the name of the thing that was looked at: "open files".
        ok: True if the course works with it as it is.
        says: the state of the thing.
        breaks: the parts of the course that will fail, and in which notebooks.
        remedy: a way to mend it.
    """

    name: str
    ok: bool
    says: str
    breaks: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        says, breaks, remedy = (
            " ".join(text.split()).rstrip(".") for text in (self.says, self.breaks, self.remedy)
        )
        if self.ok:
            return f"ok    {self.name}: {says}"
        breaks = breaks and f" What fails: {breaks}."
        remedy = remedy and f" Mend it: {remedy}."
        return f"WRONG {self.name}: {says}.{breaks}{remedy}"


@dataclass(frozen=True)
class Check:
    """A question to the machine.

    Attributes:
        name: the name of its findings, if it cannot be asked.
        ask: the function that looks.
        breaks: the parts of the course that are in danger if it cannot be asked.
    """

    name: str
    ask: Callable[[], Finding | list[Finding]]
    breaks: str = "unknown"

    def findings(self) -> list[Finding]:
        """Ask; a check that raises becomes a finding that names its exception."""
        try:
            answer = self.ask()
        except Exception as error:
            says = f"could not be checked ({type(error).__name__}: {error})"
            return [Finding(self.name, False, says, self.breaks, "see the reason in parentheses")]
        return answer if isinstance(answer, list) else [answer]
