"""The table of docs/schedules.md: the sizes that a schedule takes, and the engines that run it.

`make images` writes the table.
"""

import re
from pathlib import Path

from course_pp.parallel import schedule_names
from course_pp.schedule import build, find, names

PAGE = Path(__file__).parent / "schedules.md"
HEADER = (
    "| schedule | stages a rank | ranks | microbatches on 4 ranks | `runtime` | `parallel` |",
    "|---|---|---|---|---|---|",
)


def microbatches(name: str) -> str:
    """Return the numbers of microbatches that a schedule takes on 4 ranks."""
    allowed = [m for m in range(1, 33) if is_allowed(name, 4, m)]
    first = allowed[0]
    if first == 1 and allowed == list(range(1, 33)):
        return "any"
    if allowed == list(range(first, 33)):
        return f"{first} or more"
    if allowed == list(range(first, 33, 2)):
        return f"even, {first} or more"
    examples = ", ".join(str(m) for m in allowed if 8 <= m <= 16)
    return f"{examples}, …; any with `round_size`"


def is_allowed(name: str, p: int, m: int) -> bool:
    try:
        build(name, p, m)
    except ValueError:
        return False
    return True


def row(name: str) -> str:
    entry = find(name)
    stages = str(entry.n_chunks)
    if entry.any_chunks:
        stages = "2 a wave" if entry.chunks_in == 2 else f"{entry.n_chunks}, or another number"
    ranks = "any" if is_allowed(name, 3, 48) else "even"

    # An asynchronous schedule has updates (U) among its actions.
    asynchronous = any(part.kind == "U" for part in build(name, 2, 8).parts)
    runtime = "yes, with optimizers" if asynchronous else "yes"
    if name not in schedule_names():
        parallel = "no: asynchronous" if asynchronous else "no: two copies of a stage"
    elif entry.torch_name:
        parallel = f"torch's `Schedule{entry.torch_name}`"
    else:
        parallel = "torch's executor"
    return f"| `{name}` | {stages} | {ranks} | {microbatches(name)} | {runtime} | {parallel} |"


def table() -> str:
    """Return the table by the catalogue and torch as they are now."""
    return "\n".join((*HEADER, *map(row, names())))


def written() -> str:
    """Return the table that stands on the page."""
    found = re.search(rf"{re.escape(HEADER[0])}\n(\|[^\n]*\n)+", PAGE.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(
            f"docs/schedules.md has no table that begins with {HEADER[0]!r}: put that line back"
        )
    return found[0].rstrip()


def write() -> None:
    """Put the table into the page, in place of the one there."""
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written(), table()), encoding="utf-8")
