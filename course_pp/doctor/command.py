"""``python -m course_pp doctor``: what works here, and what will fail in which notebook."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from course_pp.doctor import examine

HELP = "say what works on this machine, what will fail in which notebook, and how to mend it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of objects, one a finding")
    parser.add_argument("--short", action="store_true", help="print only what is wrong, and one line of summary")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if something is wrong, else 0."""
    findings = examine()
    wrong = [finding for finding in findings if not finding.ok]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return bool(wrong)
    for finding in wrong if arguments.short else findings:
        print(finding)
    if wrong:
        print(f"{len(wrong)} of {len(findings)} lines are wrong.")
    else:
        print(f"All {len(findings)} lines are right.")
    return bool(wrong)
