"""Orders of your own: a file in place of a schedule's name."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from course_pp.schedule import Schedule, check, from_torch_csv
from course_pp.schedule.catalogue import find

__all__ = ["FILE", "is_file", "read_order", "what_changed", "written"]

FILE = "schedule.csv"
"""The name of the file that keeps your own order beside a checkpoint."""

_HOW = "give a CSV file with a row a rank, as course_pp.schedule.to_torch_csv and a board's to_csv() write it"


def is_file(schedule: str) -> bool:
    """Return whether ``schedule`` names a file and no schedule of the catalogue."""
    return schedule.casefold().endswith(".csv")


def read_order(path: str) -> Schedule:
    """Read the order in a file of :func:`course_pp.schedule.to_torch_csv`.

    The rows give the placement: each stage is on the ranks in whose rows it is.

    Raises:
        ValueError: if it cannot be read, or its order cannot train; the sentence leaves the file's name out.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror}): {_HOW}") from None
    except UnicodeDecodeError:
        raise ValueError(f"it is not text in UTF-8: {_HOW}") from None
    # An editor or a spreadsheet may have left blank lines at the end, which are no ranks.
    order = from_torch_csv(text.rstrip(" \t\r\n,;"), name=Path(path).stem)
    kinds = {part.kind for part in order.parts}
    if "U" in kinds:
        raise ValueError(
            "its stages update their weights within the step (U), which is for schedule 'pipedream': leave U out"
        )
    if kinds == {"F"}:
        raise ValueError("it has forwards alone, and a run trains: add the backwards (B, or I and W)")
    if problems := check(order):
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise ValueError(f"its order cannot run: {problems[0]}{more}")
    idle = next((rank for rank, row in enumerate(order.actions) if not row), None)
    if idle is not None:
        raise ValueError(
            f"it gives rank {idle} nothing to do, as row {idle + 1} is blank: give every rank a stage, and leave no "
            "line blank"
        )
    return order


def what_changed(saved: Mapping[str, Any], checkpoint: Path, schedule: str, order: Schedule | None) -> str | None:
    """Return a warning if a run goes on in another order than its checkpoint's; None if it is the same.

    A step gives the same result in both, so it is no error. But leaving a flag out must not lose an order unnoticed.

    Args:
        saved: the configuration in the checkpoint's state; one without a schedule says nothing.
        schedule: that of this run.
        order: the order in that file, if it is one.
    """
    before, kept = saved.get("schedule"), checkpoint / FILE
    if before is None:
        return None
    flags = f"--schedule {before}"
    if not is_file(before):
        alike = order is None and _known(before) == _known(schedule)
    else:
        there = kept.read_text(encoding="utf-8") if kept.is_file() else None
        alike = order is not None and there == written(order)
        flags = f"--schedule {before if there is None else kept} --microbatches {saved.get('microbatches')}"
    if alike:
        return None
    return (
        f"schedule {schedule!r} now, {before!r} before: a step gives the same, in other time and memory. "
        f"To keep to the one before: {flags}"
    )


def _known(name: str) -> str:
    """Return the catalogue's own name; or ``name`` as it is, if it comes from another version of the course."""
    with suppress(ValueError):
        return find(name).name
    return name


def written(order: Schedule) -> str:
    """Return the text from which :func:`read_order` reads ``order``; unlike torch's format, also with replicas."""
    return "".join(",".join(map(str, row)) + "\n" for row in order.actions)
