"""``python -m course_pp report FOLDER``: what a class has learned, from the exports of its people."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from course_pp.exercises.inventory.report import ClassReport, class_report

HELP = "say what a class has learned, from a folder of progress().to_json(...) files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with one file a person, .json or .csv")
    parser.add_argument("--json", action="store_true", help="print the report as one object")


def run(arguments: argparse.Namespace) -> None:
    """Print the report. Raises ValueError if there is no export in the folder."""
    report = class_report(arguments.folder)
    print(json.dumps(_data(report), indent=1) if arguments.json else report)


def _data(report: ClassReport) -> dict[str, object]:
    gains = [{**asdict(line), "gain": line.gain} for line in report.concepts]
    exercises = [{**asdict(line), "hard": line.hard} for line in report.exercises]
    return {**asdict(report), "concepts": gains, "exercises": exercises}
