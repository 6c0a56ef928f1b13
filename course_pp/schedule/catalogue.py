"""The schedules by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from course_pp.schedule.families.dualpipe import dualpipe_v
from course_pp.schedule.families.looped import interleaved_1f1b, looped_bfs
from course_pp.schedule.families.pipedream import pipedream
from course_pp.schedule.families.single import gpipe, naive, one_f_one_b
from course_pp.schedule.families.v_shape import zb_v
from course_pp.schedule.families.zero_bubble import zb_h1, zb_h2
from course_pp.schedule.schedule import Schedule


@dataclass(frozen=True)
class _Entry:
    """How to build a schedule, how many stages a rank it has, and which other numbers it accepts."""

    order: Callable[..., Schedule]
    n_chunks: int = 1
    any_chunks: bool = False
    torch_name: str = ""


_CATALOGUE = {
    "naive": _Entry(naive),
    "gpipe": _Entry(gpipe, torch_name="GPipe"),
    "1f1b": _Entry(one_f_one_b, torch_name="1F1B"),
    "interleaved_1f1b": _Entry(interleaved_1f1b, 2, any_chunks=True, torch_name="Interleaved1F1B"),
    "looped_bfs": _Entry(looped_bfs, 2, any_chunks=True, torch_name="LoopedBFS"),
    "zb_h1": _Entry(zb_h1, 1, any_chunks=True, torch_name="InterleavedZeroBubble"),
    "zb_h2": _Entry(zb_h2),
    "zb_v": _Entry(zb_v, 2, torch_name="ZBVZeroBubble"),
    "dualpipe_v": _Entry(dualpipe_v, 2, torch_name="DualPipeV"),
    "pipedream": _Entry(pipedream),
}

# torch's get_schedule_class takes "GPipe" in any case; its class is ScheduleGPipe.
_ALIASES = {
    prefix + entry.torch_name.lower(): name
    for name, entry in _CATALOGUE.items()
    for prefix in ("", "schedule")
    if entry.torch_name
}


def names() -> tuple[str, ...]:
    """The names that :func:`build` knows, simplest first."""
    return tuple(_CATALOGUE)


def build(
    name: str,
    n_ranks: int,
    n_microbatches: int,
    n_chunks: int | None = None,
    *,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """The schedule called ``name``.

    Args:
        name: one of :func:`names`, or torch's name for it: ``"Interleaved1F1B"`` or ``"ScheduleInterleaved1F1B"``.
        n_ranks: p, the pipeline-parallel size.
        n_microbatches: m.
        n_chunks: stages a rank. Two for the interleaved, breadth-first and V-shaped schedules, else one, unless given.
        replicas: for ``pipedream`` only: how many ranks share each stage.

    Raises:
        ValueError: for an unknown name and for sizes the schedule does not allow; says which ones it does.
    """
    known = _canonical(name)
    entry = _CATALOGUE[known]
    n_chunks = entry.n_chunks if n_chunks is None else n_chunks
    for what, value in (("n_ranks", n_ranks), ("n_microbatches", n_microbatches), ("n_chunks", n_chunks)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{what} is {value!r}: {known} needs an integer of at least 1")
    if n_chunks != entry.n_chunks and not entry.any_chunks:
        able = ", ".join(other for other, e in _CATALOGUE.items() if e.any_chunks)
        raise ValueError(
            f"n_chunks is {n_chunks}: {known} has {entry.n_chunks} a rank; "
            f"leave n_chunks out, or take one of {able} for another number"
        )
    if replicas is not None:
        if known != "pipedream":
            raise ValueError(
                f"replicas {replicas!r} given for {known}: only pipedream shares a stage; leave replicas out"
            )
        return pipedream(n_ranks, n_microbatches, replicas)
    sizes = (n_ranks, n_microbatches, n_chunks) if entry.any_chunks else (n_ranks, n_microbatches)
    return entry.order(*sizes)


def _canonical(name: str) -> str:
    lowered = str(name).lower()
    known = _ALIASES.get(lowered, lowered)
    if known not in _CATALOGUE:
        raise ValueError(f"unknown schedule {name!r}: use one of {', '.join(_CATALOGUE)}, or torch's name for it")
    return known
