"""What will fail on this machine, before a room finds out: ``python -m course_pp doctor``.

:func:`examine` runs all checks side by side, each alone with its errors, all under one time limit.
Nothing here needs torch, Slurm, a home folder or /proc.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

from course_pp.doctor import machine, packages, running
from course_pp.doctor.finding import Check, Finding

__all__ = ["Finding", "examine"]

HELP = "say what works on this machine, what will fail in which notebook, and how to mend it"
_LIMIT_S = 18.0


def examine() -> list[Finding]:
    """Run every check and return the findings in a fixed order, after at most 18 seconds."""
    return run_checks([*machine.CHECKS, *packages.CHECKS, *running.CHECKS])


def run_checks(checks: Sequence[Check], limit_s: float = _LIMIT_S) -> list[Finding]:
    """Run ``checks`` at once and return their findings in the order of the checks.

    One that is not done in time becomes a finding that says so, and is left to itself: a dead
    network file system cannot be interrupted.
    """
    answers: queue.SimpleQueue[tuple[Check, list[Finding]]] = queue.SimpleQueue()
    for check in checks:
        threading.Thread(
            target=lambda check=check: answers.put((check, check.findings())), daemon=True
        ).start()
    late = f"no answer within {limit_s:.0f} s", "look for a file system or a service that hangs"
    found = {
        check: [Finding(check.name, False, late[0], check.breaks, late[1])] for check in checks
    }
    limit, answered = time.monotonic() + limit_s, 0
    while answered < len(checks):
        try:
            check, findings = answers.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            break
        found[check] = findings
        answered += 1
    return [finding for check in checks for finding in found[check]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print a list of objects, one a finding"
    )
    parser.add_argument(
        "--short", action="store_true", help="print only what is wrong, and one line of summary"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if something is wrong, else 0."""
    findings = examine()
    wrong = [finding for finding in findings if not finding.ok]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return bool(wrong)
    for finding in wrong if arguments.short else findings:
        print(finding)
    summary = (
        f"{len(wrong)} of {len(findings)} lines are wrong."
        if wrong
        else f"All {len(findings)} lines are right."
    )
    print(summary)
    return bool(wrong)
