"""Says what will fail on this machine, before a class finds out: ``python -m course_pp doctor``.

:func:`examine` runs all checks side by side under one time limit. An error of one check does not
stop another. The doctor itself needs no torch, no Slurm, no home folder and no /proc.
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
from course_pp.doctor.finding import Check, Finding, wrong

__all__ = ["Finding", "examine"]

HELP = "say what works on this machine, what will fail in which notebook, and how to mend it"
_LIMIT_S = 18.0


def examine() -> list[Finding]:
    """Run every check and return the findings in a fixed order, after at most 18 seconds."""
    return run_checks([*machine.CHECKS, *packages.CHECKS, *running.CHECKS])


def run_checks(checks: Sequence[Check], limit_s: float = _LIMIT_S) -> list[Finding]:
    """Run ``checks`` at once and return their findings in the order of the checks.

    A check that is late becomes a finding that says so. Its thread goes on: a read from a dead
    network file system cannot be interrupted.
    """
    answers: queue.SimpleQueue[tuple[Check, list[Finding]]] = queue.SimpleQueue()

    def ask(check: Check) -> None:
        answers.put((check, check.findings()))

    for check in checks:
        threading.Thread(target=ask, args=(check,), daemon=True).start()

    found: dict[Check, list[Finding]] = {}
    limit = time.monotonic() + limit_s
    while len(found) < len(checks):
        try:
            check, findings = answers.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            break
        found[check] = findings

    ordered: list[Finding] = []
    for check in checks:
        says = f"no answer within {limit_s:.0f} s"
        remedy = "look for a file system or a service that hangs"
        late = wrong(check.name, says, breaks=check.breaks, remedy=remedy)
        ordered += found.get(check, [late])
    return ordered


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
    bad = [finding for finding in findings if not finding.ok]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return bool(bad)
    for finding in bad if arguments.short else findings:
        print(finding)
    if bad:
        print(f"{len(bad)} of {len(findings)} lines are wrong.")
    else:
        print(f"All {len(findings)} lines are right.")
    return bool(bad)
