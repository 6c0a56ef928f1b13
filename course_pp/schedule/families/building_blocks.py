"""V-Half and V-Min: the block of one microbatch, repeated, then squeezed into the gaps at both ends.

Qi et al. 2024, "Pipeline parallelism with controllable memory" (arXiv 2405.15362), section 3: how long a block holds
its activations over how often it repeats is the memory of the whole. A V keeps short on every rank what a loop keeps
long on the first.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from course_pp.schedule.action import Action
from course_pp.schedule.schedule import Schedule, v_shaped

_INTERVAL = 6
"""Units of time from a block to the next: a microbatch needs ``F``, ``I`` and ``W`` of two chunks from each rank."""

_Step = tuple[str, int, int]
"""The kind of an action, the chunk it is of (0 down the V, 1 up) and its microbatch."""

_Row = dict[_Step, int]
"""When one rank does each step, in units."""

_Block = Sequence[tuple[int, int, int, int]]
"""For each rank when a microbatch that enters at 0 passes: down and up forward, then down and up backward."""


def v_half(n_ranks: int, n_microbatches: int) -> Schedule:
    """Half of 1F1B's memory, for a longer way down the V (section 3.2, table 1 and figure 3)."""
    p, aside = n_ranks, 0 if n_ranks % 2 else 3
    block = [(2 * r, 3 * p - 2 - r, 3 * p + aside + 2 * r - 1, 6 * p + aside - 2 - r) for r in range(p)]
    return _repeated("v_half", block, n_microbatches)


def v_min(n_ranks: int, n_microbatches: int) -> Schedule:
    """A third of 1F1B's memory, the least that a V of two chunks can have (section 3.2, table 1 and figure 3)."""
    p, aside = n_ranks, 0 if n_ranks % 3 else 2
    block = [(r, 2 * p - 1 - r, 2 * p + aside + r, 4 * p + aside - 1 - r) for r in range(p)]
    return _repeated("v_min", block, n_microbatches)


def _repeated(name: str, block: _Block, n_microbatches: int) -> Schedule:
    rows: list[_Row] = []
    for times in block:
        kinds = zip((("F", 0), ("F", 1), ("I", 1), ("I", 0)), times, strict=True)
        row = {(*kind, i): at + _INTERVAL * i for kind, at in kinds for i in range(n_microbatches)}
        rows.append(row | _weight_gradients(row))
    most = max(max(_held(row)) for row in rows)
    steady = rows[0]["I", 0, 0]
    _squeeze(rows, lambda rank, step, at: at < steady, most)
    # After its last forward a rank only gives memory back, so its weight gradients may give way to what others need.
    lasts = [max(at for (kind, _, _), at in row.items() if kind == "F") for row in rows]
    for row, last in zip(rows, lasts, strict=True):
        for step in [step for step, at in row.items() if step[0] == "W" and at > last]:
            del row[step]
    _squeeze(rows, lambda rank, step, at: at > lasts[rank])
    actions = []
    for rank, row in enumerate(rows):
        row |= _weight_gradients(row)
        stages = (rank, 2 * len(rows) - 1 - rank)
        actions.append(tuple(Action(stages[chunk], kind, i) for kind, chunk, i in sorted(row, key=row.__getitem__)))
    return Schedule(name, v_shaped(len(rows)), tuple(actions))


def _weight_gradients(row: _Row) -> _Row:
    """The steps ``W`` that ``row`` lacks, oldest first, each in the first free unit after its ``I``."""
    taken, found, at = set(row.values()), {}, 0
    for begun, chunk, i in sorted((at, chunk, i) for (kind, chunk, i), at in row.items() if kind == "I"):
        if ("W", chunk, i) not in row:
            at = max(at, begun) + 1
            while at in taken:
                at += 1
            found["W", chunk, i] = at
    return found


def _held(row: _Row) -> list[int]:
    """The activations held in each unit, from the start of an ``F`` to that of its ``W``."""
    changes = [0] * (1 + max(row.values()))
    for (kind, _, _), at in row.items():
        changes[at] += {"F": 1, "W": -1}.get(kind, 0)
    return list(accumulate(changes))


def _squeeze(rows: list[_Row], may_move: Callable[[int, _Step, int], bool], most: int | None = None) -> None:
    """Do each step in the first free unit that its inputs allow, going through all of them in order of time.

    Args:
        may_move: whether a rank's step, now at some unit, may move.
        most: activations that no rank may hold more of; None where there is no forward to move.
    """
    taken = [set(row.values()) for row in rows]
    held = [_held(row) for row in rows] if most is not None else []
    order = sorted((at, rank, step) for rank, row in enumerate(rows) for step, at in row.items())
    for at, rank, step in order:
        if not may_move(rank, step, at):
            continue
        begin = max((1 + rows[maker][need] for maker, need in _needs(rank, step, len(rows))), default=0)
        if most is not None and step[0] == "F":
            begin = next((unit for unit in range(at, begin, -1) if held[rank][unit - 1] >= most), begin)
        begin = next(unit for unit in range(begin, at + 1) if unit == at or unit not in taken[rank])
        rows[rank][step] = begin
        taken[rank] ^= {at, begin} if begin < at else set()
        if most is not None and step[0] in "FW":
            for unit in range(begin, at):
                held[rank][unit] += 1 if step[0] == "F" else -1


def _needs(rank: int, step: _Step, n_ranks: int) -> Iterator[tuple[int, _Step]]:
    """What a step comes after: its inputs, and the same of the microbatch before."""
    kind, chunk, i = step
    if i:
        yield rank, (kind, chunk, i - 1)
    if kind == "W":
        yield rank, ("I", chunk, i)
        return
    if kind == "I":
        yield rank, ("F", chunk, i)
    # Forwards go down in chunk 0 and up in chunk 1; backwards begin where forwards end.
    goes_down = (kind == "F") == (chunk == 0)
    before = rank - 1 if goes_down else rank + 1
    if 0 <= before < n_ranks:
        yield before, (kind, chunk, i)
    elif kind == "F" and chunk == 1:
        yield rank, ("F", 0, i)
    elif kind == "I" and chunk == 0:
        yield rank, ("I", 1, i)
