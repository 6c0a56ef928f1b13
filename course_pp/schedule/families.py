"""How each schedule orders the actions of a rank, family by family.

Most of them are one idea with another number: how many forwards a rank does before its first
backward. Those are written with :func:`merge`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, zip_longest

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
    """Some forwards, then one forward, one backward in turn, then the backwards left over: the
    actions of one rank.

    Args:
        warm_up: how many forwards come before the first pair of one forward and one backward.
        kinds: ``B``; or two letters, such as ``IW``, where the second finishes what the first
            began.
        lag: how many more of the first letter than of the second are done; the second catches up at
            the end.
    """
    begin, finish = kinds[0], kinds[1:]
    actions = [Action(stage, "F", microbatch) for stage, microbatch in forwards[:warm_up]]
    unfinished = list(backwards[::-1])
    for done, (forward, backward) in enumerate(zip_longest(forwards[warm_up:], backwards)):
        if forward:
            actions.append(Action(forward[0], "F", forward[1]))
        actions.append(Action(backward[0], begin, backward[1]))
        if finish and done >= lag:
            stage, microbatch = unfinished.pop()
            actions.append(Action(stage, finish, microbatch))
    if finish:
        actions.extend(
            Action(stage, finish, microbatch) for stage, microbatch in reversed(unfinished)
        )
    return tuple(actions)


# One stage a rank, whole backwards: they differ in how far the forwards run ahead.


def naive(n_ranks: int, n_microbatches: int) -> Schedule:
    """One microbatch at a time, forward and backward, so one rank works at a time."""
    return _running_ahead("naive", n_microbatches, [0] * n_ranks)


def gpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.3)."""
    return _running_ahead("gpipe", n_microbatches, [n_microbatches] * n_ranks)


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Schedule:
    """Warm-up: forwards to fill the ranks behind. Steady state: one forward, one backward. Drain:
    the backwards left.

    PipeDream-Flush in Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training",
    section 3.2; also Fan et al. 2021, "DAPPLE".
    """
    return _running_ahead("1f1b", n_microbatches, [n_ranks - 1 - rank for rank in range(n_ranks)])


def eager_1f1b(n_ranks: int, n_microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, so that messages travel while a rank works on other
    microbatches.

    Eager-1F1B in Zhuang et al. 2023, "On optimizing the communication of model parallelism",
    section 4. Rank r holds up to 2 (p - 1 - r) + 1 microbatches.
    """
    return _running_ahead(
        "1f1b_eager", n_microbatches, [2 * (n_ranks - 1 - rank) for rank in range(n_ranks)]
    )


def _running_ahead(name: str, n_microbatches: int, warm_up: Sequence[int]) -> Schedule:
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
    Megatron-LM", section 2.2. A round is as near to ``n_ranks`` microbatches as divides their
    number (as in torch), unless ``round_size`` says how many: Megatron's microbatch group size per
    virtual pipeline stage, and N in Llama Team 2024, "The Llama 3 herd of models", section 3.3.2.
    The last round takes what is left.
    """
    if round_size is None:
        round_size = microbatches_a_round(n_ranks, n_microbatches, n_chunks)
    else:
        _refuse_impossible_round(n_ranks, n_microbatches, n_chunks, round_size)
    rows = []
    for rank in range(n_ranks):
        forwards, backwards = _in_rounds(rank, n_ranks, n_microbatches, n_chunks, round_size)
        rows.append(
            merge(forwards, backwards, (n_chunks - 1) * round_size + 2 * (n_ranks - 1 - rank))
        )
    return Schedule("interleaved_1f1b", looped(n_ranks, n_chunks), tuple(rows))


def looped_bfs(n_ranks: int, n_microbatches: int, n_chunks: int) -> Schedule:
    """Breadth first: all microbatches through one chunk, then through the next; all backwards in
    reverse.

    Lamy-Poirier 2023, "Breadth-first pipeline parallelism", arXiv:2211.05953.
    """
    rows = []
    for rank in range(n_ranks):
        stages = range(rank, n_ranks * n_chunks, n_ranks)
        forwards = [(stage, microbatch) for stage in stages for microbatch in range(n_microbatches)]
        rows.append(merge(forwards, forwards[::-1], len(forwards)))
    return Schedule("looped_bfs", looped(n_ranks, n_chunks), tuple(rows))


def microbatches_a_round(n_ranks: int, n_microbatches: int, n_chunks: int) -> int:
    """How many microbatches pass through one chunk before the rank turns to its next; all, if there is no other."""
    if n_chunks == 1:
        return n_microbatches

    def rounds(m: int) -> int:
        return max(1, m // n_ranks)

    n_rounds = rounds(n_microbatches)
    if n_microbatches % n_rounds:
        fits = [m for m in range(1, n_microbatches + n_ranks + 1) if m % rounds(m) == 0]
        below, above = (
            max(m for m in fits if m < n_microbatches),
            min(m for m in fits if m > n_microbatches),
        )
        raise ValueError(
            f"{n_microbatches} microbatches on {n_ranks} ranks make {n_rounds} rounds of unequal"
            " size: "
            f"give a multiple of the number of rounds, such as {below} or {above}, or choose"
            " round_size: "
            f'build("interleaved_1f1b", {n_ranks}, {n_microbatches}, {n_chunks},'
            f" round_size={n_microbatches})"
        )
    return n_microbatches // n_rounds


def _refuse_impossible_round(
    n_ranks: int, n_microbatches: int, n_chunks: int, round_size: int
) -> None:
    """Refuse a round size under which ranks would wait in a circle.

    A rank runs 2 (p - 1) forwards further ahead than the last, and needs of the round before what
    the last has not done yet unless two rounds in a row hold as many. One round alone has none
    before it.
    """
    least = 2 * (n_ranks - 1)

    def can_run(size: int) -> bool:
        last = n_microbatches % size or size
        return (
            n_chunks == 1 or size == n_microbatches or (2 * size >= least and size + last >= least)
        )

    if round_size <= n_microbatches and can_run(round_size):
        return
    fits = [size for size in range(1, n_microbatches + 1) if can_run(size)]
    below, above = (
        [size for size in fits if size < round_size],
        [size for size in fits if size > round_size],
    )
    nearest = " or ".join(str(size) for size in (*below[-1:], *above[:1]))
    raise ValueError(
        f"round_size is {round_size} of {n_microbatches} microbatches: on {n_ranks} ranks two"
        f" rounds in a row need {least}, the last included, or ranks wait in a circle: give"
        f" {nearest}"
    )


def _in_rounds(
    rank: int, n_ranks: int, n_microbatches: int, n_chunks: int, round_size: int
) -> tuple[list[Work], list[Work]]:
    """What ``rank`` runs forward and backward, in order."""
    stages = range(rank, n_ranks * n_chunks, n_ranks)

    def one_way(order: range) -> list[Work]:
        return [
            (stage, microbatch)
            for first in range(0, n_microbatches, round_size)
            for stage in order
            for microbatch in range(first, min(first + round_size, n_microbatches))
        ]

    return one_way(stages), one_way(stages[::-1])


# The backward in two halves: the input gradient goes out at once, the weight gradient fills a
# bubble later. Handcrafted in Qi et al. 2024, "Zero bubble pipeline parallelism" (ICLR), section 2.


def zb_h1(n_ranks: int, n_microbatches: int, n_chunks: int = 1) -> Schedule:
    """No more memory than 1F1B, a third of its bubble (section 2.1). With chunks: torch's InterleavedZeroBubble."""
    return _split("zb_h1", n_ranks, n_microbatches, n_chunks, slope=1)


def zb_h2(n_ranks: int, n_microbatches: int) -> Schedule:
    """About twice the memory of 1F1B and no bubble between a rank's first and last action (section 2.2)."""
    return _split("zb_h2", n_ranks, n_microbatches, 1, slope=2)


def _split(name: str, n_ranks: int, n_microbatches: int, n_chunks: int, slope: int) -> Schedule:
    """A rank runs ``slope`` more forwards ahead than the next, and lags less with its weight gradients."""
    in_round = microbatches_a_round(n_ranks, n_microbatches, n_chunks)
    rows = []
    for rank in range(n_ranks):
        forwards, backwards = _in_rounds(rank, n_ranks, n_microbatches, n_chunks, in_round)
        warm_up = (n_chunks - 1) * in_round + slope * (n_ranks - 1 - rank)
        rows.append(merge(forwards, backwards, warm_up, "IW", lag=slope * rank))
    return Schedule(name, looped(n_ranks, n_chunks), tuple(rows))


# Two stages a rank, placed as a V, or every stage twice, in phases: a few letters and how often
# they repeat.

Phase = tuple[str, int]
"""Steps with blanks between them, and how many times to do them. Microbatches number themselves.

``F0`` is the next forward of the rank's first chunk, ``B1`` the next backward of its second,
``F1&B0`` both overlapped; ``W`` finishes the oldest ``I`` that has none yet, ``W0`` the oldest of
that chunk.
"""


def spell_out(phases: Iterable[Phase], stages: Sequence[int]) -> tuple[Action | Overlap, ...]:
    count: Counter[tuple[str, int]] = Counter()
    unfinished: list[Action] = []

    def act(step: str) -> Action:
        kind, chunk = step[0], step[1:]
        if kind == "W":
            half = next(
                action for action in unfinished if not chunk or action.stage == stages[int(chunk)]
            )
            unfinished.remove(half)
            return Action(half.stage, "W", half.microbatch)
        key = ("F" if kind == "F" else "backward", stages[int(chunk)])
        action = Action(key[1], kind, count[key])
        count[key] += 1
        if kind == "I":
            unfinished.append(action)
        return action

    return tuple(
        Overlap(*map(act, step.split("&"))) if "&" in step else act(step)
        for steps, repeats in phases
        for _ in range(repeats)
        for step in steps.split()
    )


def zb_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """No bubble between a rank's first and last action, with the memory of 1F1B; the loss is where
    the data enter.

    Qi et al. 2024, "Zero bubble pipeline parallelism" (arXiv 2401.10241), section 6. The phases
    need ``2 n_ranks - 1`` microbatches to turn into one another; for fewer, those that do not exist
    are left out.
    """
    p, m = n_ranks, max(n_microbatches, 2 * n_ranks - 1)
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
        # Never an overlapped pair, so each is one action of one microbatch.
        actions = spell_out(phases, (rank, 2 * p - 1 - rank))
        rows.append(
            tuple(a for a in actions if isinstance(a, Action) and a.microbatch < n_microbatches)
        )
    return Schedule("zb_v", v_shaped(n_ranks), tuple(rows))


def dualpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """DeepSeek's DualPipe: even microbatches enter at the first rank, odd ones at the last, each
    half as in DualPipeV.

    DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1. The phases are those of
    DeepSeek's published code, which numbers the microbatches of each direction from 0.
    """
    placement = both_ways("dualpipe", n_ranks)
    if n_microbatches < 2 * n_ranks or n_microbatches % 2:
        least = max(2 * n_ranks, n_microbatches - n_microbatches % 2)
        raise ValueError(
            f"dualpipe sends half of the microbatches each way, and at least {n_ranks} to fill its"
            f" {n_ranks} stages, but there are {n_microbatches}: give an even number of at least"
            f" {2 * n_ranks}, such as {least} or {least + 2}"
        )

    def numbered_both_ways(action: Action | Overlap, rank: int) -> Action | Overlap:
        # Stage ``rank`` is on the way down, the other on the way up.
        parts = [
            Action(a.stage, a.kind, 2 * a.microbatch + (a.stage != rank)) for a in action.parts
        ]
        return Overlap(*parts) if len(parts) > 1 else parts[0]

    rows = []
    for rank in range(n_ranks):
        # Seen from its own end, a rank of the lower half does what its mirror image does.
        near, far = sorted((rank, n_ranks - 1 - rank))
        row = spell_out(_dualpipe_phases(n_ranks // 2, n_microbatches // 2, near), (near, far))
        rows.append(tuple(numbered_both_ways(action, rank) for action in row))
    return Schedule("dualpipe", placement, tuple(rows))


def dualpipe_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """DualPipe folded in half, so that no stage is held twice.

    DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1, for the pairs; Qi et al. 2025,
    "DualPipe could be better without the Dual", for the fold. The phases are those of DeepSeek's
    published DualPipeV.
    """
    if n_microbatches < 2 * n_ranks:
        fewer = n_microbatches // 2
        or_fewer = f", or at most {fewer} rank{'s' if fewer > 1 else ''}" if fewer else ""
        raise ValueError(
            f"dualpipe_v fills all {2 * n_ranks} stages before it pairs, but there are"
            f" {n_microbatches} microbatches: give at least {2 * n_ranks} microbatches{or_fewer}"
        )
    rows = (
        spell_out(_dualpipe_phases(n_ranks, n_microbatches, rank), (rank, 2 * n_ranks - 1 - rank))
        for rank in range(n_ranks)
    )
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


# On a grid in which a forward and a backward take one step each. A microbatch goes down the stages
# and back, a stage a step; the next one enters two steps later. Where two stages of a rank lie at
# mirrored places of the pipeline, what one leaves free the other uses: for half as many
# microbatches as there are stages, no rank is ever wanted twice in one step. Then the grid repeats.
# A rank does its actions in the order of their steps, however long they really take.


def chimera(n_ranks: int, n_microbatches: int) -> Schedule:
    """Two pipelines in opposite directions: even microbatches enter at the first rank, odd ones at
    the last.

    Li and Hoefler 2021, "Chimera: efficiently training large-scale neural networks with
    bidirectional pipelines", section 3.1; more than ``n_ranks`` microbatches by direct
    concatenation, as in section 3.5.
    """
    return _on_grid(
        "chimera",
        both_ways("chimera", n_ranks),
        [i // 2 for i in range(n_microbatches)],
        n_ranks // 2,
    )


def hanayo(n_ranks: int, n_microbatches: int, n_chunks: int) -> Schedule:
    """Chimera folded at the last rank, so that no stage is held twice; in ``n_chunks / 2`` waves
    down and up.

    Liu et al. 2023, "Hanayo: harnessing wave-like pipeline parallelism for enhanced large model
    training efficiency", section 3. The paper draws as many microbatches as ranks; more are
    concatenated as in Chimera.
    """
    return _on_grid("hanayo", in_waves(n_ranks, n_chunks), range(n_microbatches), n_ranks)


def _on_grid(
    name: str, placement: Sequence[tuple[int, ...]], turns: Sequence[int], in_unit: int
) -> Schedule:
    """``turns``: each microbatch's place among those that enter at the same end; ``in_unit`` fill the grid once."""
    n_stages = len(placement)
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(1 + max(map(max, placement)))]
    for microbatch, turn in enumerate(turns):
        unit, place = divmod(turn, in_unit)
        entered = 2 * n_stages * unit + 2 * place
        for stage, ranks in enumerate(placement):
            row = rows[ranks[microbatch % len(ranks)]]
            row.append((entered + stage, Action(stage, "F", microbatch)))
            row.append((entered + 2 * n_stages - 1 - stage, Action(stage, "B", microbatch)))
    ordered = (sorted(row, key=lambda step: step[0]) for row in rows)
    return Schedule(
        name, tuple(placement), tuple(tuple(action for _, action in row) for row in ordered)
    )


# The block of one microbatch, repeated, then squeezed into the gaps at both ends. Qi et al. 2024,
# "Pipeline parallelism with controllable memory" (arXiv 2405.15362), section 3: how long a block
# holds its activations over how often it repeats is the memory of the whole. A V keeps short on
# every rank what a loop keeps long on the first.

_INTERVAL = 6
"""Units of time from a block to the next: a microbatch needs ``F``, ``I`` and ``W`` of two chunks from each rank."""

_Step = tuple[str, int, int]
"""The kind of an action, the chunk it is of (0 down the V, 1 up) and its microbatch."""

_Row = dict[_Step, int]
"""When one rank does each step, in units."""


def v_half(n_ranks: int, n_microbatches: int) -> Schedule:
    """Half of 1F1B's memory, for a longer way down the V (section 3.2, table 1 and figure 3)."""
    p, aside = n_ranks, 0 if n_ranks % 2 else 3
    block = [
        (2 * r, 3 * p - 2 - r, 3 * p + aside + 2 * r - 1, 6 * p + aside - 2 - r) for r in range(p)
    ]
    return _repeated("v_half", block, n_microbatches)


def v_min(n_ranks: int, n_microbatches: int) -> Schedule:
    """A third of 1F1B's memory, the least that a V of two chunks can have (section 3.2, table 1 and figure 3)."""
    p, aside = n_ranks, 0 if n_ranks % 3 else 2
    block = [(r, 2 * p - 1 - r, 2 * p + aside + r, 4 * p + aside - 1 - r) for r in range(p)]
    return _repeated("v_min", block, n_microbatches)


def _repeated(
    name: str, block: Sequence[tuple[int, int, int, int]], n_microbatches: int
) -> Schedule:
    """``block``: for each rank when a microbatch that enters at 0 passes: down and up forward, down and up backward."""
    rows: list[_Row] = []
    for times in block:
        kinds = zip((("F", 0), ("F", 1), ("I", 1), ("I", 0)), times, strict=True)
        row = {(*kind, i): at + _INTERVAL * i for kind, at in kinds for i in range(n_microbatches)}
        rows.append(row | _weight_gradients(row))
    most = max(max(_held(row)) for row in rows)
    steady = rows[0]["I", 0, 0]
    _squeeze(rows, lambda rank, step, at: at < steady, most)
    # After its last forward a rank only gives memory back, so its weight gradients may give way to
    # what others need.
    lasts = [max(at for (kind, _, _), at in row.items() if kind == "F") for row in rows]
    for row, last in zip(rows, lasts, strict=True):
        for step in [step for step, at in row.items() if step[0] == "W" and at > last]:
            del row[step]
    _squeeze(rows, lambda rank, step, at: at > lasts[rank])
    actions = []
    for rank, row in enumerate(rows):
        row |= _weight_gradients(row)
        stages = (rank, 2 * len(rows) - 1 - rank)
        actions.append(
            tuple(
                Action(stages[chunk], kind, i)
                for kind, chunk, i in sorted(row, key=row.__getitem__)
            )
        )
    return Schedule(name, v_shaped(len(rows)), tuple(actions))


def _weight_gradients(row: _Row) -> _Row:
    """The steps ``W`` that ``row`` lacks, oldest first, each in the first free unit after its ``I``."""
    taken, found, at = set(row.values()), {}, 0
    for begun, chunk, i in sorted(
        (at, chunk, i) for (kind, chunk, i), at in row.items() if kind == "I"
    ):
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


def _squeeze(
    rows: list[_Row], may_move: Callable[[int, _Step, int], bool], most: int | None = None
) -> None:
    """Do each step that may move in the first free unit that its inputs allow, going through all in
    order of time.

    No rank may hold more than ``most`` activations; None where there is no forward to move.
    """
    taken = [set(row.values()) for row in rows]
    held = [_held(row) for row in rows] if most is not None else []
    order = sorted((at, rank, step) for rank, row in enumerate(rows) for step, at in row.items())
    for at, rank, step in order:
        if not may_move(rank, step, at):
            continue
        begin = max(
            (1 + rows[maker][need] for maker, need in _inputs(rank, step, len(rows))), default=0
        )
        if most is not None and step[0] == "F":
            begin = next(
                (unit for unit in range(at, begin, -1) if held[rank][unit - 1] >= most), begin
            )
        begin = next(unit for unit in range(begin, at + 1) if unit == at or unit not in taken[rank])
        rows[rank][step] = begin
        taken[rank] ^= {at, begin} if begin < at else set()
        if most is not None and step[0] in "FW":
            for unit in range(begin, at):
                held[rank][unit] += 1 if step[0] == "F" else -1


def _inputs(rank: int, step: _Step, n_ranks: int) -> Iterator[tuple[int, _Step]]:
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


# Asynchronous, and generation.


def pipedream(
    n_ranks: int,
    n_microbatches: int,
    replicas: Sequence[int] | None = None,
    group: int | None = None,
) -> Schedule:
    """1F1B that never stops to flush: every stage updates its weights after every backward.
    Round-robin replicas.

    Narayanan et al. 2019, "PipeDream: generalized pipeline parallelism for DNN training", section
    3.2. A microbatch is there called a minibatch, as each has an update of its own.

    Args:
        replicas: how many ranks share each stage, first stage first; one each unless given.
        group: microbatches whose gradients make one update, as in PipeDream-2BW (Narayanan et al.
            2021, arXiv 2006.09503, section 3.1); unless given, each rank updates after every
            backward.
    """
    shares = [1] * n_ranks if replicas is None else list(replicas)
    if any(share < 1 for share in shares) or sum(shares) != n_ranks:
        raise ValueError(
            f"replicas {tuple(shares)} on {n_ranks} ranks: give each stage at least one rank,"
            f" {n_ranks} in all"
        )
    if group is not None and (
        group < 1 or n_microbatches % group or any(group % share for share in shares)
    ):
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
        in_flight = -(-sum(shares[stage:]) // share)
        for replica in range(share):
            work = [(stage, microbatch) for microbatch in range(replica, n_microbatches, share)]
            row = merge(work, work, in_flight - 1, "BU")
            # only the updates behind the replica's last microbatch of each group
            if group is not None:
                row = tuple(
                    a
                    for a in row
                    if a.kind != "U" or (a.microbatch // share + 1) % (group // share) == 0
                )
            rows.append(row)
    return Schedule("pipedream", tuple(placement), tuple(rows))


@checked
def generation(
    n_ranks: int,
    n_groups: int,
    n_tokens: int,
    placement: Sequence[int | Sequence[int]] | None = None,
) -> Schedule:
    """Return the order in which a pipeline makes ``n_tokens`` tokens for each of ``n_groups``
    groups of prompts.

    Microbatch ``token * n_groups + group`` is one token of one group: its forward at the first
    stage needs the token that the last stage has made before it. So one group alone keeps one rank
    busy at a time, and the bubble is not that of training: it goes away when there are as many
    groups as stages, however few tokens are made.

        simulate(generation(4, 1, 16)).utilisation      # 0.25
        simulate(generation(4, 8, 16)).utilisation      # 0.98

    Args:
        placement: for each stage its rank; one stage a rank unless given.
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
                if 0 <= rank < n_ranks:  # or the schedule says what is wrong
                    rows[rank].append(Action(stage, "F", microbatch))
    return Schedule("generation", placed, tuple(map(tuple, rows)), feedback=n_groups)
