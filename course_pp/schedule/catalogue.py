"""The schedules by name: the only list of names, sizes and placements, for both engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from course_pp.base.arguments import checked
from course_pp.schedule import families
from course_pp.schedule.costs import Costs
from course_pp.schedule.heuristics import filled, splits_every_backward
from course_pp.schedule.schedule import MOST_FORWARDS, Schedule, both_ways, in_waves, looped


@dataclass(frozen=True)
class Entry:
    """A schedule of the catalogue before it has a size.

    Attributes:
        name: the name that :func:`names` lists, also for an entry found under an alias.
        order: the function that makes the schedule of given sizes.
        n_chunks: stages a rank, unless another number is asked for.
        any_chunks: whether another number is allowed.
        chunks_in: the number of chunks must be a multiple of this: 2 where they go down the ranks
            and up again.
        updates: whether stages update their own weights within the schedule (``U``).
        options: the options of :func:`build` that it takes.
        placed: the function from a number of ranks and of chunks to the ranks of each stage; for
            ``pipedream``, without replicas.
        torch_name: torch's name, empty where torch has none: ``"GPipe"`` is the class
            ``ScheduleGPipe``.
    """

    name: str
    order: Callable[..., Schedule]
    n_chunks: int = 1
    any_chunks: bool = False
    placed: Callable[[int, int], tuple[tuple[int, ...], ...]] = looped
    torch_name: str = ""
    chunks_in: int = 1
    updates: bool = False
    options: tuple[str, ...] = ()

    def placement(self, n_ranks: int, n_chunks: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Return for each stage the ranks that hold it, as :attr:`Schedule.placement` has them."""
        return self.placed(_whole("n_ranks", n_ranks, self.name), self.chunks(n_chunks))

    def chunks(self, n_chunks: int | None = None) -> int:
        """Return the stages a rank: ``n_chunks`` if the schedule allows it, or the usual number."""
        n_chunks = self.n_chunks if n_chunks is None else _whole("n_chunks", n_chunks, self.name)
        if n_chunks != self.n_chunks and not self.any_chunks:
            able = ", ".join(entry.name for entry in _CATALOGUE.values() if entry.any_chunks)
            raise ValueError(
                f"n_chunks is {n_chunks}: {self.name} has {self.n_chunks} a rank; "
                f"leave n_chunks out, or take one of {able} for another number"
            )
        if n_chunks % self.chunks_in:
            below = n_chunks - n_chunks % self.chunks_in
            nearest = f"{below} or {below + self.chunks_in}" if below else str(self.chunks_in)
            raise ValueError(
                f"n_chunks is {n_chunks}: {self.name} goes down the ranks and up again,"
                f" {self.chunks_in} chunks a wave; give {nearest}"
            )
        return n_chunks


_CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry("naive", families.naive),
        Entry("gpipe", families.gpipe, torch_name="GPipe"),
        Entry("1f1b", families.one_f_one_b, torch_name="1F1B"),
        Entry("1f1b_eager", families.eager_1f1b),
        Entry(
            "interleaved_1f1b",
            families.interleaved_1f1b,
            n_chunks=2,
            any_chunks=True,
            torch_name="Interleaved1F1B",
            options=("round_size",),
        ),
        Entry(
            "looped_bfs", families.looped_bfs, n_chunks=2, any_chunks=True, torch_name="LoopedBFS"
        ),
        Entry("hanayo", families.hanayo, n_chunks=2, any_chunks=True, placed=in_waves, chunks_in=2),
        Entry("zb_h1", families.zb_h1, any_chunks=True, torch_name="InterleavedZeroBubble"),
        Entry("zb_h2", families.zb_h2),
        Entry("zb_v", families.zb_v, n_chunks=2, placed=in_waves, torch_name="ZBVZeroBubble"),
        Entry("v_half", families.v_half, n_chunks=2, placed=in_waves),
        Entry("v_min", families.v_min, n_chunks=2, placed=in_waves),
        Entry("chimera", families.chimera, placed=lambda p, _: both_ways("chimera", p)),
        Entry("dualpipe", families.dualpipe, placed=lambda p, _: both_ways("dualpipe", p)),
        Entry(
            "dualpipe_v", families.dualpipe_v, n_chunks=2, placed=in_waves, torch_name="DualPipeV"
        ),
        Entry("pipedream", families.pipedream, updates=True, options=("replicas", "group")),
    )
}

# torch's get_schedule_class takes "GPipe" in any case; its class is ScheduleGPipe.
_ALIASES = {entry.torch_name.lower(): entry for entry in _CATALOGUE.values() if entry.torch_name}
# torch calls ZB-H1 with several stages a rank InterleavedZeroBubble: it has the same order, action
# by action.
_INTERLEAVED_ZB = replace(_CATALOGUE["zb_h1"], n_chunks=2)
_ALIASES |= dict.fromkeys(("interleaved_zb", "interleavedzerobubble"), _INTERLEAVED_ZB)


def names() -> tuple[str, ...]:
    """Return the names that :func:`build` knows, simplest first."""
    return tuple(_CATALOGUE)


@checked
def find(name: str, offered: Callable[[], Sequence[str]] = names) -> Entry:
    """Return the entry of a schedule, by its own name or by torch's.

    ``"Interleaved1F1B"`` and ``"ScheduleInterleaved1F1B"`` are torch's names of one schedule.
    ``"interleaved_zb"`` is ``zb_h1`` with two stages a rank, as torch's InterleavedZeroBubble is.

    Args:
        offered: returns the names that the caller can run, for the refusal of an unknown name.
    """
    lowered = name.lower()
    entry = _ALIASES.get(lowered.removeprefix("schedule")) or _CATALOGUE.get(lowered)
    if entry is None:
        raise ValueError(
            f"unknown schedule {name!r}: use one of {', '.join(offered())}, or torch's name for it"
        )
    return entry


@checked
def build(
    name: str,
    n_ranks: int,
    n_microbatches: int,
    n_chunks: int | None = None,
    *,
    replicas: Sequence[int] | None = None,
    group: int | None = None,
    round_size: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Return the schedule called ``name``.

    Sizes that the schedule does not allow are refused, with the nearest sizes that it allows.

    Args:
        name: one of :func:`names`, or torch's name for it: see :func:`find`.
        n_ranks: p, the pipeline-parallel size.
        n_microbatches: m.
        n_chunks: stages a rank. By default two for the interleaved, breadth-first, wave and
            V-shaped schedules, else one; ``hanayo`` has two a wave.
        replicas: for ``pipedream`` only: the number of ranks that share each stage.
        group: for ``pipedream`` only: microbatches whose gradients make one update; by default each
            rank updates after every backward.
        round_size: for ``interleaved_1f1b`` only: microbatches that pass through a chunk before the
            rank turns to its next. ``n_ranks`` is Megatron's order, ``n_microbatches`` takes the
            forwards breadth first. By default as near to ``n_ranks`` as divides
            ``n_microbatches``.
        costs: for schedules that split every backward: weight gradients go where these times leave
            gaps, see :func:`~course_pp.schedule.heuristics.filled`. Without it the order is the
            published one.
    """
    entry = find(name)
    _whole("n_ranks", n_ranks, entry.name)
    _whole("n_microbatches", n_microbatches, entry.name)
    n_chunks = entry.chunks(n_chunks)
    n_forwards = n_ranks * n_microbatches * n_chunks
    if n_forwards > MOST_FORWARDS:
        raise ValueError(
            f"n_ranks × n_microbatches × n_chunks is {n_forwards:,}: a schedule names each action,"
            f" so keep it at {MOST_FORWARDS:,} or below"
        )
    options = {"replicas": replicas, "group": group, "round_size": round_size}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for option, value in given.items():
        if option not in entry.options:
            taker = next(name for name, each in _CATALOGUE.items() if option in each.options)
            raise ValueError(
                f"{option} {value!r} given for {entry.name}: only {taker} takes it; leave"
                f" {option} out"
            )
    if round_size is not None:
        _whole("round_size", round_size, entry.name)
    if entry.any_chunks:
        given["n_chunks"] = n_chunks
    schedule = entry.order(n_ranks, n_microbatches, **given)
    if costs is None:
        return schedule
    if not splits_every_backward(schedule):
        raise ValueError(
            f"costs given for {name}: only schedules that split every backward, such as zb_h1 or"
            " zb_v, place weight gradients by them; leave costs out"
        )
    return filled(schedule, costs)


def _whole(what: str, value: int, name: str) -> int:
    """Return ``value``, or refuse it unless it is an integer that a schedule can have."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{what} is {value!r}: {name} needs an integer of at least 1")
    if value > MOST_FORWARDS:
        raise ValueError(
            f"{what} is {value}: a schedule names each action, so give at most {MOST_FORWARDS:,}"
        )
    return value
