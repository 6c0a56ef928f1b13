"""The table of docs/schedules.md: which schedule takes which sizes and runs where. `make images` writes it."""

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
    allowed = [m for m in range(1, 33) if is_allowed(name, 4, m)]
    first = allowed[0]
    if allowed == list(range(first, 33)):
        return "any" if first == 1 else f"{first} or more"
    if allowed == list(range(first, 33, 2)):
        return f"even, {first} or more"
    return f"{', '.join(str(m) for m in allowed if 8 <= m <= 16)}, …; any with `round_size`"


def is_allowed(name: str, p: int, m: int) -> bool:
    try:
        build(name, p, m)
    except ValueError:
        return False
    return True


def row(name: str) -> str:
    entry, asynchronous = find(name), any(part.kind == "U" for part in build(name, 2, 8).parts)
    chosen = "2 a wave" if entry.chunks_in == 2 else f"{entry.n_chunks}, or another number"
    every = chosen if entry.any_chunks else entry.n_chunks
    ranks = "any" if is_allowed(name, 3, 48) else "even"
    of_torch = f"torch's `Schedule{entry.torch_name}`" if entry.torch_name else "torch's executor"
    reason = "no: asynchronous" if asynchronous else "no: two copies of a stage"
    where = of_torch if name in schedule_names() else reason
    runtime = "yes, with optimizers" if asynchronous else "yes"
    return f"| `{name}` | {every} | {ranks} | {microbatches(name)} | {runtime} | {where} |"


def table() -> str:
    """The table as the catalogue and torch say it now."""
    return "\n".join((*HEADER, *map(row, names())))


def written() -> str:
    """The table as the page has it."""
    found = re.search(rf"{re.escape(HEADER[0])}\n(\|[^\n]*\n)+", PAGE.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(
            f"docs/schedules.md has no table that begins with {HEADER[0]!r}: put that line back"
        )
    return found[0].rstrip()


def write() -> None:
    """Put the table into the page, in place of the one there."""
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written(), table()), encoding="utf-8")
