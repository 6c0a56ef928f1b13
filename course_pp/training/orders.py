"""Orders of one's own: a file in place of a schedule's name."""

from pathlib import Path

from course_pp.schedule import Schedule, check, from_torch_csv

__all__ = ["FILE", "is_file", "read_order", "written"]

FILE = "schedule.csv"
"""What an order of one's own is called beside a checkpoint."""

_HOW = "give a CSV file with a row a rank, as course_pp.schedule.to_torch_csv and a board's to_csv() write it"


def is_file(schedule: str) -> bool:
    """Whether ``schedule`` names a file and no schedule of the catalogue."""
    return schedule.casefold().endswith(".csv")


def read_order(path: str) -> Schedule:
    """The order in a file of :func:`course_pp.schedule.to_torch_csv`, which has the placement: each stage is on the
    ranks in whose rows it is.

    Raises:
        ValueError: saying, without the file's name, that it cannot be read, or what keeps its order from training.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror}): {_HOW}") from None
    except UnicodeDecodeError:
        raise ValueError(f"it is not text: {_HOW}") from None
    order = from_torch_csv(text, name=Path(path).stem)
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
        raise ValueError(f"it gives rank {idle} nothing to do: give every rank a stage")
    return order


def written(order: Schedule) -> str:
    """The text of a file from which :func:`read_order` reads ``order``; unlike torch's, also with several replicas."""
    return "".join(",".join(map(str, row)) + "\n" for row in order.actions)
