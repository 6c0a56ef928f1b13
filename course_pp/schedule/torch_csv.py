"""Schedules as text: the CSV that torch's schedules load and dump (format ``compute_only``)."""

import csv
import re
from collections.abc import Sequence
from io import StringIO

from course_pp.base.arguments import checked
from course_pp.schedule.action import Action, Overlap
from course_pp.schedule.legality import problems_of_bookkeeping
from course_pp.schedule.schedule import Schedule, implied_placement, normalised

_PAIR = re.compile(r"\([^)]*\)")
"""The part of an overlapped pair that has a semicolon of its own."""


@checked
def to_torch_csv(schedule: Schedule) -> str:
    """Return ``schedule`` as CSV, a row a rank, without idle slots.

    The text does not hold placement and edges. Asynchronous schedules and replicated stages are
    refused: torch has neither.
    """
    if any(part.kind == "U" for part in schedule.parts):
        raise ValueError(
            f"{schedule!r} has optimizer steps (U), which torch's format cannot hold: leave"
            " them out"
        )
    for stage, ranks in enumerate(schedule.placement):
        if len(ranks) > 1:
            raise ValueError(
                f"{schedule!r} has stage {stage} on several ranks, torch only on one: place it"
                " on one"
            )
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule.actions)
    return text.getvalue()


@checked
def from_torch_csv(
    text: str, placement: Sequence[int | Sequence[int]] | None = None, name: str = "csv"
) -> Schedule:
    """Read the text that :func:`to_torch_csv` or torch wrote.

    Args:
        text: one row a rank, its cells separated by commas or, without commas, by semicolons or
            tabs. Blank cells are idle slots and are dropped; a blank line is a rank without
            actions.
        placement: for each stage its rank (or ranks, as in ``Schedule``); by default read off the
            rows.

    Raises:
        ValueError: for a cell that is no action, with its row and column, actions that are missing
            or too many, and a placement that the rows contradict.
    """
    # Where the comma is the decimal sign, spreadsheets write another separator.
    outside = _PAIR.sub("", text)
    separator = next((each for each in ",;\t" if each in outside), ",")
    # Spreadsheets start a file with a byte order mark.
    lines = text.removeprefix("\ufeff").splitlines()
    rows = []
    for rank, cells in enumerate(csv.reader(lines, delimiter=separator)):
        row = [_read(cell, rank, column) for column, cell in enumerate(cells) if cell.strip()]
        rows.append(tuple(row))
    if not any(rows):
        raise ValueError(
            "the CSV text has no actions: give one row a rank, with cells such as 0F0,0F1,0B0,0B1"
        )
    placed = implied_placement(rows) if placement is None else normalised(placement)
    schedule = Schedule(name, placed, tuple(rows))
    if problems := problems_of_bookkeeping(schedule):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(
            f"the rows of the CSV do not make a schedule: {problems[0]}{more}; every stage needs"
            " one forward and one backward (B, or I and W) of every microbatch, or no backward"
            " at all"
        )
    return schedule


def _read(cell: str, rank: int, column: int) -> Action | Overlap:
    try:
        return Overlap.parse(cell) if cell.strip().startswith("(") else Action.parse(cell)
    except ValueError as error:
        raise ValueError(f"row {rank + 1}, column {column + 1} of the CSV text: {error}") from None
