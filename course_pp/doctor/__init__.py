"""What will fail on this machine, before a room finds out: ``python -m course_pp doctor``.

Each check is a function that returns a :class:`Finding`, or several; :func:`examine` runs them all, side by side, each
alone with its errors, all under one time limit. Importing this imports no torch, and nothing here needs it, Slurm, a
home folder or /proc.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Finding", "examine"]

_LIMIT_S = 18.0


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: what was looked at: "open files".
        ok: whether the course works with it as it is.
        says: what was found, in a few words.
        breaks: what will fail, and in which notebooks; empty if ``ok``.
        remedy: how to mend it; empty if ``ok``.
    """

    name: str
    ok: bool
    says: str
    breaks: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return one line, whatever was put into it."""
        says, breaks, remedy = (" ".join(text.split()).rstrip(".") for text in (self.says, self.breaks, self.remedy))
        if self.ok:
            return f"ok    {self.name}: {says}"
        breaks = breaks and f" What fails: {breaks}."
        remedy = remedy and f" Mend it: {remedy}."
        return f"WRONG {self.name}: {says}.{breaks}{remedy}"


@dataclass(frozen=True)
class Check:
    """A question to the machine.

    Attributes:
        name: as in its findings.
        ask: returns what it found: one finding, or several.
        breaks: what is in danger when the check itself cannot be made.
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


def examine() -> list[Finding]:
    """Run every check and return the findings in a fixed order, after at most 18 seconds."""
    from course_pp.doctor import machine, packages, running

    return run_checks([*machine.CHECKS, *packages.CHECKS, *running.CHECKS])


def run_checks(checks: Sequence[Check], limit_s: float = _LIMIT_S) -> list[Finding]:
    """Run ``checks`` at once and return their findings in the order of the checks.

    A check that is not done after ``limit_s`` seconds becomes a finding that says so. It is left to itself: a dead
    network file system cannot be interrupted.
    """
    answers: queue.SimpleQueue[tuple[Check, list[Finding]]] = queue.SimpleQueue()
    for check in checks:
        threading.Thread(target=lambda check=check: answers.put((check, check.findings())), daemon=True).start()
    late = f"no answer within {limit_s:.0f} s", "look for a file system or a service that hangs"
    found = {check: [Finding(check.name, False, late[0], check.breaks, late[1])] for check in checks}
    limit, answered = time.monotonic() + limit_s, 0
    while answered < len(checks):
        try:
            check, findings = answers.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            break
        found[check] = findings
        answered += 1
    return [finding for check in checks for finding in found[check]]
