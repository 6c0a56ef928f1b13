"""What a check says, and how checks are run: side by side, each alone with its errors, all under one time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from course_pp.arguments import checked

LIMIT_S = 18.0


@checked
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
        if self.ok:
            return f"ok    {self.name}: {_in_one_line(self.says)}"
        breaks = f" What fails: {_in_one_line(self.breaks)}." if self.breaks else ""
        remedy = f" Mend it: {_in_one_line(self.remedy)}." if self.remedy else ""
        return f"WRONG {self.name}: {_in_one_line(self.says)}.{breaks}{remedy}"


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


def run_checks(checks: Sequence[Check], limit_s: float = LIMIT_S) -> list[Finding]:
    """Run ``checks`` at once and return their findings in the order of the checks.

    A check that raises becomes a finding that names its exception, one that is not done after ``limit_s`` seconds a
    finding that says so. It is left to itself: a dead network file system cannot be interrupted.
    """
    answers: queue.SimpleQueue[tuple[int, list[Finding]]] = queue.SimpleQueue()

    def run(number: int, check: Check) -> None:
        answers.put((number, _asked(check)))

    for number, check in enumerate(checks):
        threading.Thread(target=run, args=(number, check), daemon=True).start()
    found: dict[int, list[Finding]] = {}
    limit = time.monotonic() + limit_s
    while len(found) < len(checks):
        try:
            number, findings = answers.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            break
        found[number] = findings
    return [finding for number, check in enumerate(checks) for finding in found.get(number, [_late(check, limit_s)])]


def _asked(check: Check) -> list[Finding]:
    try:
        answer = check.ask()
    except Exception as error:
        says = f"could not be checked ({type(error).__name__}: {error})"
        return [Finding(check.name, False, says, check.breaks, "see the reason in parentheses")]
    return answer if isinstance(answer, list) else [answer]


def _late(check: Check, limit_s: float) -> Finding:
    says = f"no answer within {limit_s:.0f} s"
    return Finding(check.name, False, says, check.breaks, "look for a file system or a service that hangs")


def _in_one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
