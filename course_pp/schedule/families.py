"""How each schedule orders the actions of a rank, family by family.

Most schedules are one idea with another number: how many forwards a rank does before its first
backward. Those are written with :func:`merge`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product, zip_longest
from operator import itemgetter

from course_pp.base.arguments import checked, refuse_below
from course_pp.schedule.action import Action, Overlap
from course_pp.schedule.schedule import (
    MOST_FORWARDS,
    Schedule,
    Work,
    both_ways,
    in_waves,
    looped,
    normalised,
    v_shaped,
)


def merge(
    forwards: Sequence[Work],
    backwards: Sequence[Work],
    warm_up: int,
    kinds: str = "B",
    lag: int = 0,
) -> tuple[Action, ...]:
    """Return the actions of one rank: ``warm_up`` forwards, then pairs, then the backwards left.

    A pair is one forward and one backward.

    Args:
        kinds: the letter of a backward, ``B``; or two letters such as ``IW``, where the second
            finishes the work that the first began.
        lag: the number of backwards that are begun before the first one is finished. As many are
            finished at the end.
    """
    begin, finish = kinds[0], kinds[1:]
    actions = [Action(stage, "F", microbatch) for stage, microbatch in forwards[:warm_up]]
    for done, (forward, backward) in enumerate(zip_longest(forwards[warm_up:], backwards)):
        if forward:
            actions.append(Action(forward[0], "F", forward[1]))
        actions.append(Action(backward[0], begin, backward[1]))
        if finish and done >= lag:
            stage, microbatch = backwards[done - lag]
            actions.append(Action(stage, finish, microbatch))
    if finish:
        first_late = max(0, len(backwards) - lag)
        for stage, microbatch in backwards[first_late:]:
            actions.append(Action(stage, finish, microbatch))
    return tuple(actions)


# One stage a rank, whole backwards: they differ in how far the forwards run ahead.


def naive(n_ranks: int, n_microbatches: int) -> Schedule:
    """One microbatch at a time, forward and backward, so one rank works at a time."""
    return _one_stage_a_rank("naive", n_microbatches, [0] * n_ranks)


def gpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.3)."""
    return _one_stage_a_rank("gpipe", n_microbatches, [n_microbatches] * n_ranks)


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Schedule:
    """One forward, one backward in turn, after a warm-up that gives every later rank work.

    The warm-up of a rank is one forward for each rank behind it. PipeDream-Flush in Narayanan et
    al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.2; also Fan et al. 2021,
    "DAPPLE".
    """
    warm_up = [n_ranks - 1 - rank for rank in range(n_ranks)]
    return _one_stage_a_rank("1f1b", n_microbatches, warm_up)


def eager_1f1b(n_ranks: int, n_microbatches: int) -> Schedule:
    """1F1B with twice the warm-up: messages travel while a rank works on other microbatches.

    Eager-1F1B in Zhuang et al. 2023, "On optimizing the communication of model parallelism",
    section 4. Rank r holds up to 2 (p - 1 - r) + 1 microbatches.
    """
    warm_up = [2 * (n_ranks - 1 - rank) for rank in range(n_ranks)]
    return _one_stage_a_rank("1f1b_eager", n_microbatches, warm_up)


def _one_stage_a_rank(name: str, n_microbatches: int, warm_up: Sequence[int]) -> Schedule:
    rows = []
    for rank, forwards_first in enumerate(warm_up):
        work = [(rank, microbatch) for microbatch in range(n_microbatches)]
        rows.append(merge(work, work, forwards_first))
    return Schedule(name, looped(len(rows)), tuple(rows))


# Several stages a rank, dealt round: each rank works for every chunk of the model in turn.


def interleaved_1f1b(
    n_ranks: int, n_microbatches: int, n_chunks: int, round_size: int | None = None
) -> Schedule:
    """Depth first: a round of microbatches through every chunk, then the next round.

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", section 2.2. By default a round has the number of microbatches nearest to
    ``n_ranks`` that divides all of them, as in torch. ``round_size`` sets another number:
    Megatron's microbatch group size per virtual pipeline stage, and N in Llama Team 2024, "The
    Llama 3 herd of models", section 3.3.2. The last round may be shorter.
    """
    if round_size is None:
        round_size = microbatches_a_round(n_ranks, n_microbatches, n_chunks)
    else:
        _refuse_impossible_round(n_ranks, n_microbatches, n_chunks, round_size)
    rows = []
    for rank in range(n_ranks):
        forwards, backwards = _in_rounds(rank, n_ranks, n_microbatches, n_chunks, round_size)
        warm_up = (n_chunks - 1) * round_size + 2 * (n_ranks - 1 - rank)
        rows.append(merge(forwards, backwards, warm_up))
    return Schedule("interleaved_1f1b", looped(n_ranks, n_chunks), tuple(rows))


def looped_bfs(n_ranks: int, n_microbatches: int, n_chunks: int) -> Schedule:
    """Breadth first: all microbatches through one chunk, then all through the next.

    The backwards run in reverse order. Lamy-Poirier 2023, "Breadth-first pipeline parallelism",
    arXiv:2211.05953.
    """
    rows = []
    for rank in range(n_ranks):
        stages = range(rank, n_ranks * n_chunks, n_ranks)
        forwards = list(product(stages, range(n_microbatches)))
        rows.append(merge(forwards, forwards[::-1], warm_up=len(forwards)))
    return Schedule("looped_bfs", looped(n_ranks, n_chunks), tuple(rows))


def microbatches_a_round(n_ranks: int, n_microbatches: int, n_chunks: int) -> int:
    """Return how many microbatches pass through one chunk before the rank turns to the next.

    With one chunk that is all of them.
    """
    if n_chunks == 1:
        return n_microbatches

    def rounds(m: int) -> int:
        return max(1, m // n_ranks)

    n_rounds = rounds(n_microbatches)
    if n_microbatches % n_rounds == 0:
        return n_microbatches // n_rounds
    # The sizes nearest to the one asked for. One above exists within n_ranks: the next multiple.
    below = above = n_microbatches
    while below % rounds(below):
        below -= 1
    while above % rounds(above):
        above += 1
    raise ValueError(
        f"{n_microbatches} microbatches on {n_ranks} ranks make {n_rounds} rounds of unequal size:"
        f" give a multiple of the number of rounds, such as {below} or {above}, or choose"
        f' round_size: build("interleaved_1f1b", {n_ranks}, {n_microbatches}, {n_chunks},'
        f" round_size={n_microbatches})"
    )


def _refuse_impossible_round(
    n_ranks: int, n_microbatches: int, n_chunks: int, round_size: int
) -> None:
    """Refuse a round size under which ranks would wait in a circle.

    The first rank runs 2 (p - 1) forwards further ahead than the last. If two rounds in a row hold
    fewer, the first rank waits for a microbatch of the round before that the last rank has not done
    yet. A single round has no round before it.
    """
    least = 2 * (n_ranks - 1)

    def can_run(size: int) -> bool:
        last = n_microbatches % size or size
        has_no_round_before = n_chunks == 1 or size == n_microbatches
        return has_no_round_before or (2 * size >= least and size + last >= least)

    if round_size <= n_microbatches and can_run(round_size):
        return
    fits = [size for size in range(1, n_microbatches + 1) if can_run(size)]
    below = [size for size in fits if size < round_size][-1:]
    above = [size for size in fits if size > round_size][:1]
    nearest = " or ".join(map(str, below + above))
    raise ValueError(
        f"round_size is {round_size} of {n_microbatches} microbatches: on {n_ranks} ranks two"
        f" rounds in a row need {least}, the last included, or ranks wait in a circle: give"
        f" {nearest}"
    )


def _in_rounds(
    rank: int, n_ranks: int, n_microbatches: int, n_chunks: int, round_size: int
) -> tuple[list[Work], list[Work]]:
    """Return the forwards and the backwards of ``rank``, each in order."""
    stages = range(rank, n_ranks * n_chunks, n_ranks)
    forwards: list[Work] = []
    backwards: list[Work] = []
    for first in range(0, n_microbatches, round_size):
        in_round = range(first, min(first + round_size, n_microbatches))
        forwards += product(stages, in_round)
        backwards += product(stages[::-1], in_round)
    return forwards, backwards


# These run the backward in two halves: the input gradient goes out at once, the weight gradient
# fills a bubble later. Handcrafted in Qi et al. 2024, "Zero bubble pipeline parallelism" (ICLR),
# section 2.


def zb_h1(n_ranks: int, n_microbatches: int, n_chunks: int = 1) -> Schedule:
    """No more memory than 1F1B, a third of its bubble (section 2.1).

    With several chunks it is torch's InterleavedZeroBubble.
    """
    return _split("zb_h1", n_ranks, n_microbatches, n_chunks, slope=1)


def zb_h2(n_ranks: int, n_microbatches: int) -> Schedule:
    """No bubble between a rank's first and last action, for twice 1F1B's memory (section 2.2)."""
    return _split("zb_h2", n_ranks, n_microbatches, n_chunks=1, slope=2)


def _split(name: str, n_ranks: int, n_microbatches: int, n_chunks: int, slope: int) -> Schedule:
    """Order split backwards; each rank runs ``slope`` more forwards ahead than the next rank.

    The later the rank, the later its weight gradients: they fill the time that an earlier rank
    spends on its longer warm-up.
    """
    in_round = microbatches_a_round(n_ranks, n_microbatches, n_chunks)
    rows = []
    for rank in range(n_ranks):
        forwards, backwards = _in_rounds(rank, n_ranks, n_microbatches, n_chunks, in_round)
        warm_up = (n_chunks - 1) * in_round + slope * (n_ranks - 1 - rank)
        rows.append(merge(forwards, backwards, warm_up, kinds="IW", lag=slope * rank))
    return Schedule(name, looped(n_ranks, n_chunks), tuple(rows))


# Two stages a rank, placed as a V, or every stage twice. Such an order is written in phases: a few
# letters and how often they repeat.

Phase = tuple[str, int]
"""Steps with blanks between them, and how many times to do them. Microbatches number themselves.

``F0`` is the next forward of the rank's first chunk, ``B1`` the next backward of its second chunk,
``F1&B0`` an overlapped pair of both. ``W`` finishes the oldest ``I`` that has no ``W`` yet, ``W0``
the oldest ``I`` of the first chunk.
"""


def spell_out(phases: Iterable[Phase], stages: Sequence[int]) -> tuple[Action | Overlap, ...]:
    """Return the actions of one rank, whose chunks are ``stages``."""
    count: Counter[tuple[str, int]] = Counter()
    unfinished: list[Action] = []

    def act(step: str) -> Action:
        kind, chunk = step[0], step[1:]
        if kind == "W":
            able = [half for half in unfinished if not chunk or half.stage == stages[int(chunk)]]
            half = able[0]
            unfinished.remove(half)
            return Action(half.stage, "W", half.microbatch)
        # B and I are numbered together: each microbatch has one of them.
        direction = "forward" if kind == "F" else "backward"
        stage = stages[int(chunk)]
        action = Action(stage, kind, count[direction, stage])
        count[direction, stage] += 1
        if kind == "I":
            unfinished.append(action)
        return action

    row: list[Action | Overlap] = []
    for steps, repeats in phases:
        for step in steps.split() * repeats:
            forward, _, backward = step.partition("&")
            if backward:
                row.append(Overlap(act(forward), act(backward)))
            else:
                row.append(act(step))
    return tuple(row)


def zb_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """No bubble between a rank's first and last action, with the memory of 1F1B, placed as a V.

    The loss is on the rank where the data enter. Qi et al. 2024, "Zero bubble pipeline parallelism"
    (arXiv 2401.10241), section 6. The phases need ``2 n_ranks - 1`` microbatches to turn into one
    another. For fewer, the order is that of ``2 n_ranks - 1`` without the surplus microbatches.
    """
    p = n_ranks
    m = max(n_microbatches, 2 * p - 1)
    rows = []
    for rank in range(p):
        phases = [
            ("F0", 2 * (p - rank) - 1),
            ("F1 F0", rank),
            ("F1 I1 W1", p - rank),
            ("F0 I0 W0 F1 I1 W1", m - 2 * p + 1 + rank),
            ("I0 W0 F1 I1 W1", p - 1 - rank),
            ("I0 I1", rank),
            ("I0 W0", p - rank),
            ("W1", rank),
            ("W0", rank),
        ]
        row = []
        for action in spell_out(phases, (rank, 2 * p - 1 - rank)):
            assert isinstance(action, Action)  # no phase above has an overlapped pair
            if action.microbatch < n_microbatches:
                row.append(action)
        rows.append(tuple(row))
    return Schedule("zb_v", v_shaped(n_ranks), tuple(rows))


def dualpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """DeepSeek's DualPipe: even microbatches enter at the first rank, odd ones at the last.

    Each half goes as in DualPipeV. DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1.
    The phases are those of DeepSeek's published code, which numbers the microbatches of each
    direction from 0.
    """
    placement = both_ways("dualpipe", n_ranks)
    if n_microbatches < 2 * n_ranks or n_microbatches % 2:
        least = max(2 * n_ranks, n_microbatches - n_microbatches % 2)
        raise ValueError(
            f"dualpipe sends half of the microbatches each way, and at least {n_ranks} to fill its"
            f" {n_ranks} stages, but there are {n_microbatches}: give an even number of at least"
            f" {2 * n_ranks}, such as {least} or {least + 2}"
        )
    rows = []
    for rank in range(n_ranks):
        # Seen from its own end, a rank of the lower half does what its mirror image does.
        near, far = sorted((rank, n_ranks - 1 - rank))
        phases = _dualpipe_phases(n_ranks // 2, n_microbatches // 2, near)
        row = []
        for action in spell_out(phases, (near, far)):
            parts = []
            for part in action.parts:
                # Stage ``rank`` is of the pipeline that goes down the ranks, the other one of the
                # pipeline that goes up, which takes the odd microbatches.
                direction = 0 if part.stage == rank else 1
                parts.append(Action(part.stage, part.kind, 2 * part.microbatch + direction))
            row.append(Overlap(*parts) if len(parts) > 1 else parts[0])
        rows.append(tuple(row))
    return Schedule("dualpipe", placement, tuple(rows))


def dualpipe_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """DualPipe folded in half, so that no stage is held twice.

    DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1, for the pairs; Qi et al. 2025,
    "DualPipe could be better without the Dual", for the fold. The phases are those of DeepSeek's
    published DualPipeV.
    """
    if n_microbatches < 2 * n_ranks:
        most_ranks = n_microbatches // 2
        or_fewer = ""
        if most_ranks:
            or_fewer = f", or at most {most_ranks} rank{'s' if most_ranks > 1 else ''}"
        raise ValueError(
            f"dualpipe_v fills all {2 * n_ranks} stages before it pairs, but there are"
            f" {n_microbatches} microbatches: give at least {2 * n_ranks} microbatches{or_fewer}"
        )
    rows = []
    for rank in range(n_ranks):
        phases = _dualpipe_phases(n_ranks, n_microbatches, rank)
        rows.append(spell_out(phases, (rank, 2 * n_ranks - 1 - rank)))
    return Schedule("dualpipe_v", v_shaped(n_ranks), tuple(rows))


def _dualpipe_phases(p: int, m: int, rank: int) -> list[Phase]:
    behind = p - 1 - rank
    pairs = m - 2 * p + rank + 1
    # The turn of the V has its own activation at hand, so a pair there would only delay the
    # backward.
    alone = 1 if behind == 0 else 0
    last = ["B1", "B0"] * (rank + 1)
    return [
        ("F0", 2 * behind),
        ("F0 F1", rank + 1),
        ("I1 W1 F1", behind),
        ("F0 B1 F1&B0", alone),
        ("F0&B1 F1&B0", pairs - alone),
        ("B1 F1&B0", behind),
        # The second half of these backwards is split, so that weight gradients are left for the
        # end.
        (" ".join(last[: rank + 1]), 1),
        (" ".join(last[rank + 1 :]).replace("B", "I"), 1),
        ("W I0", behind),
        ("W", rank + 1),
    ]


# The two schedules below are drawn on a grid: a row for each rank, a column for each step, and one
# step for a forward or a backward. A microbatch goes down the stages and back, a stage a step, and
# the next one enters two steps later. Where two stages of a rank lie at mirrored places of the
# pipeline, one stage uses the steps that the other leaves free. A *unit* is the largest number of
# microbatches of which no two actions want a rank in the same step. The next unit repeats the
# pattern. A rank does its actions in the order of their steps, however long they really take.


def chimera(n_ranks: int, n_microbatches: int) -> Schedule:
    """Two pipelines in opposite directions.

    Microbatches with even numbers go down the ranks, those with odd numbers go up.

    Li and Hoefler 2021, "Chimera: efficiently training large-scale neural networks with
    bidirectional pipelines", section 3.1; more than ``n_ranks`` microbatches by direct
    concatenation, as in section 3.5.
    """
    placement = both_ways("chimera", n_ranks)
    turns = [microbatch // 2 for microbatch in range(n_microbatches)]
    return _on_grid("chimera", placement, turns, in_unit=n_ranks // 2)


def hanayo(n_ranks: int, n_microbatches: int, n_chunks: int) -> Schedule:
    """Chimera folded at the last rank, so that no stage is held twice.

    ``n_chunks`` is two for each wave down the ranks and up. Liu et al. 2023, "Hanayo: harnessing
    wave-like pipeline parallelism for enhanced large model training efficiency", section 3. The
    paper draws as many microbatches as ranks; more are concatenated as in Chimera.
    """
    placement = in_waves(n_ranks, n_chunks)
    return _on_grid("hanayo", placement, range(n_microbatches), in_unit=n_ranks)


def _on_grid(
    name: str, placement: Sequence[tuple[int, ...]], turns: Sequence[int], in_unit: int
) -> Schedule:
    """Order the actions of each rank by their steps on a grid of ranks and steps.

    Args:
        turns: the place of each microbatch among those that enter at the same end.
        in_unit: the number of microbatches of a unit that enter at the same end. The next unit has
            the same pattern, ``2 * n_stages`` steps later.
    """
    n_stages = len(placement)
    n_ranks = 1 + max(map(max, placement))
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(n_ranks)]
    for microbatch, turn in enumerate(turns):
        unit, place = divmod(turn, in_unit)
        entered = 2 * n_stages * unit + 2 * place
        for stage, ranks in enumerate(placement):
            row = rows[ranks[microbatch % len(ranks)]]
            row.append((entered + stage, Action(stage, "F", microbatch)))
            row.append((entered + 2 * n_stages - 1 - stage, Action(stage, "B", microbatch)))
    actions = []
    for row in rows:
        row.sort(key=itemgetter(0))
        actions.append(tuple(action for _, action in row))
    return Schedule(name, tuple(placement), tuple(actions))


# The schedules below repeat the block of one microbatch, then move actions into the gaps at both
# ends of the step. Qi et al. 2024, "Pipeline parallelism with controllable memory" (arXiv
# 2405.15362), section 3: the memory of the whole is the time for which a block holds its
# activations, divided by the time to the next block. On a V every rank holds the activations of one
# chunk for a short time and those of the other for a long time; under a loop the first rank holds
# all of them for a long time.

_INTERVAL = 6
"""Units of time from a block to the next, as a rank does ``F``, ``I`` and ``W`` of two chunks."""

_Step = tuple[str, int, int]
"""The kind of an action, its chunk (0 down the V, 1 up) and its microbatch."""

_Row = dict[_Step, int]
"""When one rank does each step, in units."""

_PASSES = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
"""Kind and chunk of the steps of one microbatch, in their order. Steps ``W`` are added later."""

_HOLDS = {"F": 1, "W": -1}
"""The change in the number of activations that a rank holds."""


def v_half(n_ranks: int, n_microbatches: int) -> Schedule:
    """Half of 1F1B's memory, for a longer way down the V (section 3.2, table 1 and figure 3)."""
    p = n_ranks
    aside = 0 if p % 2 else 3
    block = []
    for r in range(p):
        forwards = (2 * r, 3 * p - 2 - r)
        backwards = (3 * p + aside + 2 * r - 1, 6 * p + aside - 2 - r)
        block.append((*forwards, *backwards))
    return _repeated("v_half", block, n_microbatches)


def v_min(n_ranks: int, n_microbatches: int) -> Schedule:
    """A third of 1F1B's memory, the least that a V of two chunks can have.

    Section 3.2, table 1 and figure 3 of the paper.
    """
    p = n_ranks
    aside = 0 if p % 3 else 2
    block = []
    for r in range(p):
        forwards = (r, 2 * p - 1 - r)
        backwards = (2 * p + aside + r, 4 * p + aside - 1 - r)
        block.append((*forwards, *backwards))
    return _repeated("v_min", block, n_microbatches)


def _repeated(
    name: str, block: Sequence[tuple[int, int, int, int]], n_microbatches: int
) -> Schedule:
    """Repeat a block for each microbatch, then move actions into the gaps at both ends.

    Args:
        block: for each rank the times at which a microbatch that enters at 0 passes it: down and up
            forward, down and up backward.
    """
    rows: list[_Row] = []
    for times in block:
        row: _Row = {}
        for (kind, chunk), first in zip(_PASSES, times, strict=True):
            for i in range(n_microbatches):
                row[kind, chunk, i] = first + _INTERVAL * i
        rows.append(row | _weight_gradients(row))

    # Until the first rank has a backward, units are free in which no earlier block has work.
    most = max(max(_held(row)) for row in rows)
    steady = rows[0]["I", 0, 0]
    _squeeze(rows, lambda rank, step, at: at < steady, most)

    # After its last forward a rank only gives memory back, so its weight gradients may give way to
    # the work that other ranks wait for.
    last_forwards = []
    for row in rows:
        last = max(at for (kind, _, _), at in row.items() if kind == "F")
        last_forwards.append(last)
        for step, at in list(row.items()):
            if step[0] == "W" and at > last:
                del row[step]
    _squeeze(rows, lambda rank, step, at: at > last_forwards[rank])

    actions = []
    for rank, row in enumerate(rows):
        row |= _weight_gradients(row)
        stages = (rank, 2 * len(rows) - 1 - rank)
        steps = sorted(row, key=row.__getitem__)
        actions.append(tuple(Action(stages[chunk], kind, i) for kind, chunk, i in steps))
    return Schedule(name, v_shaped(len(rows)), tuple(actions))


def _weight_gradients(row: _Row) -> _Row:
    """Return the steps ``W`` that ``row`` lacks: oldest first, each in the first free unit."""
    begun = sorted((at, chunk, i) for (kind, chunk, i), at in row.items() if kind == "I")
    taken = set(row.values())
    found: _Row = {}
    at = 0
    for input_gradient_at, chunk, i in begun:
        if ("W", chunk, i) not in row:
            at = max(at, input_gradient_at) + 1
            while at in taken:
                at += 1
            found["W", chunk, i] = at
    return found


def _held(row: _Row) -> list[int]:
    """Return the activations held in each unit, from the start of an ``F`` to that of its ``W``."""
    changes = [0] * (1 + max(row.values()))
    for (kind, _, _), at in row.items():
        changes[at] += _HOLDS.get(kind, 0)
    return list(accumulate(changes))


def _squeeze(
    rows: list[_Row], may_move: Callable[[int, _Step, int], bool], most: int | None = None
) -> None:
    """Move steps, in order of time, to the first free unit that their inputs allow.

    Args:
        may_move: whether a step of a rank at a unit may move.
        most: the activations that a rank may hold. None if no forward may move.
    """
    taken = [set(row.values()) for row in rows]
    held = [] if most is None else [_held(row) for row in rows]
    steps = [(at, rank, step) for rank, row in enumerate(rows) for step, at in row.items()]
    for at, rank, step in sorted(steps):
        if not may_move(rank, step, at):
            continue
        kind = step[0]
        earliest = 0
        for maker, need in _inputs(rank, step, len(rows)):
            earliest = max(earliest, 1 + rows[maker][need])
        if most is not None and kind == "F":
            # A forward holds one more from its new unit on, so it stays behind the last full one.
            full = [unit for unit in range(earliest, at) if held[rank][unit] >= most]
            if full:
                earliest = full[-1] + 1

        begin = earliest
        while begin < at and begin in taken[rank]:
            begin += 1
        rows[rank][step] = begin
        if begin < at:
            taken[rank].remove(at)
            taken[rank].add(begin)
        if most is not None:
            for unit in range(begin, at):
                held[rank][unit] += _HOLDS.get(kind, 0)


def _inputs(rank: int, step: _Step, n_ranks: int) -> Iterator[tuple[int, _Step]]:
    """Yield the steps that must come first: inputs, and the same step one microbatch earlier."""
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


# Asynchronous, and generation.


def pipedream(
    n_ranks: int,
    n_microbatches: int,
    replicas: Sequence[int] | None = None,
    group: int | None = None,
) -> Schedule:
    """1F1B that never stops to flush: every stage updates its weights after every backward.

    Replicas of a stage take the microbatches in turn. Narayanan et al. 2019, "PipeDream:
    generalized pipeline parallelism for DNN training", section 3.2. The paper calls a microbatch a
    minibatch, as each has an update of its own.

    Args:
        replicas: the number of ranks that share each stage, first stage first; by default one each.
        group: microbatches whose gradients make one update, as in PipeDream-2BW (Narayanan et al.
            2021, arXiv 2006.09503, section 3.1). By default each rank updates after every backward.
    """
    shares = [1] * n_ranks if replicas is None else list(replicas)
    if any(share < 1 for share in shares) or sum(shares) != n_ranks:
        raise ValueError(
            f"replicas {tuple(shares)} on {n_ranks} ranks: give each stage at least one rank,"
            f" {n_ranks} in all"
        )
    if group is not None:
        divides = group >= 1 and n_microbatches % group == 0
        if not divides or any(group % share for share in shares):
            raise ValueError(
                f"group is {group}: it must divide {n_microbatches} microbatches, and replicas"
                f" {tuple(shares)} divide it"
            )
    rows: list[tuple[Action, ...]] = []
    placement = []
    for stage, share in enumerate(shares):
        placement.append(tuple(range(len(rows), len(rows) + share)))
        # A stage keeps as many microbatches in flight as there are ranks from it to the end, shared
        # by its replicas (section 3.2 gives it for the first stage and calls it NOAM).
        in_flight = -(-sum(shares[stage:]) // share)  # rounded up
        updates_every = 1 if group is None else group // share
        for replica in range(share):
            work = [(stage, microbatch) for microbatch in range(replica, n_microbatches, share)]
            row = []
            for action in merge(work, work, warm_up=in_flight - 1, kinds="BU"):
                nth_of_replica = action.microbatch // share + 1
                if action.kind != "U" or nth_of_replica % updates_every == 0:
                    row.append(action)
            rows.append(tuple(row))
    return Schedule("pipedream", tuple(placement), tuple(rows))


@checked
def generation(
    n_ranks: int,
    n_groups: int,
    n_tokens: int,
    placement: Sequence[int | Sequence[int]] | None = None,
) -> Schedule:
    """Return the order in which a pipeline makes ``n_tokens`` tokens for ``n_groups`` groups.

    A group is a group of prompts. Microbatch ``token * n_groups + group`` is one token of one
    group: its forward at the first stage needs the token that the last stage has made before it. So
    one group alone keeps one rank busy at a time, and the bubble is not that of training: it goes
    away when there are as many groups as stages, however few tokens are made.

        simulate(generation(4, 1, 16)).utilisation      # 0.25
        simulate(generation(4, 8, 16)).utilisation      # 0.98

    Args:
        placement: for each stage its rank; by default one stage a rank.
    """
    refuse_below(1, "generation", n_ranks=n_ranks, n_groups=n_groups, n_tokens=n_tokens)
    n_stages = n_ranks if placement is None else max(n_ranks, len(placement))
    n_forwards = n_stages * n_groups * n_tokens
    if n_forwards > MOST_FORWARDS:
        raise ValueError(
            f"n_stages × n_groups × n_tokens is {n_forwards:,}: a schedule names each action, so"
            f" keep it at {MOST_FORWARDS:,} or below"
        )
    placed = looped(n_ranks) if placement is None else normalised(placement)
    rows: list[list[Action]] = [[] for _ in range(n_ranks)]
    for token in range(n_tokens):
        for stage, ranks in enumerate(placed):
            for microbatch in range(token * n_groups, (token + 1) * n_groups):
                rank = ranks[microbatch % len(ranks)]
                # Schedule refuses a rank that does not exist, with the reason.
                if 0 <= rank < n_ranks:
                    rows[rank].append(Action(stage, "F", microbatch))
    return Schedule("generation", placed, tuple(map(tuple, rows)), feedback=n_groups)
