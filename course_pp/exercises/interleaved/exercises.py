"""Notebook 04: the warm-up with chunks, their number, rounds, places of stages, a clinic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.bench import Bench, Findings, Gradients, Outcome, Seat, same
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import expect_int, expect_list
from course_pp.exercises.formula import Formula, flawed
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, Stopped, explained, why
from course_pp.exercises.orders import Orders, judge_orders, read_order
from course_pp.launch import on_ranks
from course_pp.schedule import Action, Costs, Schedule, build, check, simulate
from course_pp.schedule.schedule import looped


def warm_up_forwards(rank: int, p: int, v: int) -> int:
    """How many forwards this rank does before forward and backward take turns: p ranks, v chunks each."""
    earlier_chunks = (v - 1) * p
    to_the_last_rank = p - 1 - rank
    return earlier_chunks + to_the_last_rank


_LAST_CHUNK = (
    "The first backward is in the *last* chunk. Before it a rank does a round of p forwards in each"
    " other chunk, and some in the last."
)
_WRONG_WARM_UPS: tuple[tuple[Callable[..., int], str], ...] = (
    (lambda rank, p, v: (v - 1) * p + 2 * (p - 1 - rank),
     "That is Megatron-LM's count: 2 for each rank behind. One is enough as long as messages take"
     " no time; what the other is for comes next."),
    (lambda rank, p, v: v * p - rank,
     "The forward of the first pair is no warm-up: the last rank of 1F1B has none at all."),
    (lambda rank, p, v: v * p - 1, "Not every rank is as far from the last one."),
    (lambda rank, p, v: v * p,
     "That fills all chunks, as breadth first does. Not every rank is as far from the last."),
    (lambda rank, p, v: v * (p - 1) + (v - 1) * p,
     "In the last chunk a rank needs one forward for each rank behind it, not one for each in every"
     " chunk."),
    (lambda rank, p, v: v * (p - 1 - rank), _LAST_CHUNK),
    (lambda rank, p, v: (v - 1) * p + rank,
     "The last rank turns back first, so warm-ups get *shorter* from rank to rank."),
)  # fmt: skip


_OTHER_WARM_UP: Cause = (
    (
        lambda case, got, enough: got < 0,
        "No rank can do fewer than no forwards: count the ranks behind this one.",
    ),
    (lambda case, got, enough: got < (case[2] - 1) * case[1], _LAST_CHUNK),
    (
        lambda case, got, enough: got < enough,
        "While the first microbatch is on its way to the last rank, each rank behind needs one to"
        " work on.",
    ),
    (
        OTHERWISE,
        "A round of p in each chunk but the last, and in the last chunk one for each rank behind"
        " this one.",
    ),
)


def _with_that_warm_up(case: tuple[Any, ...], got: int, enough: int) -> str:
    rank, p, v = case
    m = 3 * p
    schedule = with_warm_up(
        lambda r: max(0, got) if r == rank else warm_up_forwards(r, p, v), p, m, v
    )
    if problems := check(schedule):
        return (
            f"If the other ranks do as many as they should, that order cannot run: {problems[0]}."
        )
    run = simulate(schedule)
    if got < enough:
        return (
            f"{m} microbatches then take {run.makespan:g} units; {3 * (m * v + p - 1)} are enough."
        )
    return (
        f"It then holds {run.peak_activations[rank]} activations of a chunk at its peak, and is no"
        " faster."
    )


_GRADE_WARM_UP = Formula(
    warm_up_forwards,
    [
        (rank, p, v)
        for p, v in ((4, 2), (2, 2), (4, 3), (3, 4), (4, 1), (1, 3), (6, 2))
        for rank in range(p)
    ],
    _WRONG_WARM_UPS,
    _OTHER_WARM_UP,
    read=partial(expect_int, remedy="A count of forwards is whole."),
    example=_with_that_warm_up,
)


def best_chunks(
    p: int, m: int, layers: int, forward: float, backward: float, latency: float
) -> int:
    """The number of chunks a rank with the shortest step; it divides the number of a rank's layers."""
    steps = {}
    for v in range(1, layers + 1):
        if layers % v == 0:
            costs = Costs(forward / v, backward / v, 0, latency)
            steps[v] = simulate(build("interleaved_1f1b", p, m, v), costs).makespan
    return min(steps, key=lambda v: steps[v])


def _steps(
    p: int, m: int, layers: int, forward: float, backward: float, latency: float
) -> dict[int, float]:
    """Return the time of a step with each number of chunks, by the formula of the text."""
    return {
        v: (m * v + p - 1) * (forward + backward) / v + 2 * (v * p - 1) * latency * (p > 1)
        for v in range(1, layers + 1)
        if layers % v == 0
    }


def _nearest_to_root(
    p: int, m: int, layers: int, forward: float, backward: float, latency: float
) -> int:
    root = ((p - 1) / p * (forward + backward) / (2 * latency)) ** 0.5 if latency else layers
    return min((v for v in range(1, layers + 1) if layers % v == 0), key=lambda v: abs(v - root))


_BOTH = (
    "More chunks shorten the bubble, and each adds 2 p messages to the way in and out. Weigh the"
    " two."
)
_NO_LATENCY = "Without latency every chunk more shortens the bubble."
_WRONG_CHUNKS: tuple[tuple[Callable[..., int], str], ...] = (
    (lambda p, m, layers, *_: layers, _BOTH),
    (lambda *row: 1,
     f"{_NO_LATENCY} `forward` and `backward` are the times of all layers of a rank: a chunk takes"
     " a v-th of them. With the times of a whole rank, more chunks would mean more work."),
    (_nearest_to_root,
     "The divisor nearest to the root need not have the shortest step, which grows faster below the"
     " root than above it: compare the steps."),
)  # fmt: skip


def _why_other_chunks(case: tuple[Any, ...], v: int, best: int) -> str:
    layers = case[2]
    latency = case[-1]
    steps = _steps(*case)
    if v not in steps:
        return f"A rank's {layers} layers cannot be cut into {v} equal chunks."
    causes = (
        (
            steps[v] <= steps[best] * (1 + 1e-9),
            "If several are equal, take the fewest: each chunk more costs messages.",
        ),
        (v == layers and latency > 0, _BOTH),
        (not latency, _NO_LATENCY),
        (
            OTHERWISE,
            "Add up the work, (m v + p - 1) turns of a chunk, and what latency adds, 2 (v p - 1)"
            " messages.",
        ),
    )
    return why(causes)


_GRADE_CHUNKS = Formula(
    best_chunks,
    (
        *((8, 16, 8, 48, 96, latency) for latency in (0, 12, 2, 192)),
        (4, 8, 4, 12, 24, 12), (4, 32, 6, 48, 48, 4), (4, 4, 12, 60, 120, 8), (1, 4, 4, 12, 24, 3),
        (2, 2, 12, 6, 9, 0), (8, 16, 4, 7, 14, 1.5), (4, 12, 16, 24, 72, 4),
    ),
    _WRONG_CHUNKS,
    _why_other_chunks,
    read=partial(expect_int, remedy="A number of chunks is whole: round, and try both neighbours."),
    example=lambda case, got, best: "\n".join(
        f"v = {v}: {step:g}" for v, step in _steps(*case).items()),
)  # fmt: skip


def order_in_rounds(rank: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """The actions of this rank, in order: v chunks, rounds of n microbatches."""
    forwards, backwards = list[Action](), list[Action]()
    for first in range(0, m, n):
        in_round = range(first, min(first + n, m))
        for chunk in range(v):
            forwards += [Action(chunk * p + rank, "F", i) for i in in_round]
        for chunk in reversed(range(v)):
            backwards += [Action(chunk * p + rank, "B", i) for i in in_round]
    warm_up = min(m * v, (v - 1) * n + 2 * (p - 1 - rank))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[m * v - warm_up :]


def with_warm_up(warm_up: Callable[[int], int], p: int, m: int, v: int) -> Schedule:
    """Return interleaved 1F1B in rounds of p, with a warm-up of ``warm_up(r)`` on rank r."""
    rows = []
    for rank in range(p):
        order = order_in_rounds(rank, p, m, v, p)
        forwards = [action for action in order if action.kind == "F"]
        backwards = [action for action in order if action.kind == "B"]
        ahead = min(m * v, warm_up(rank))
        row = forwards[:ahead]
        for pair in zip(forwards[ahead:], backwards, strict=False):
            row += pair
        rows.append(tuple(row + backwards[m * v - ahead :]))
    return Schedule("interleaved_1f1b", looped(p, v), tuple(rows))


_SIZES = [
    (4, 8, 2, 4),
    (4, 16, 2, 8),
    (4, 8, 2, 8),
    (2, 6, 3, 3),
    (1, 4, 2, 2),
    (3, 9, 3, 3),
    (4, 4, 2, 4),
]
_UNEVEN = [(4, 10, 2, 6), (2, 5, 2, 4)]
_MOST = "The warm-up is all forwards at most: `min(m * v, (v - 1) * n + 2 * (p - 1 - rank))`."


def _grade_order(answer: Answer) -> None:
    _grade_orders_of(answer, _SIZES)
    try:
        _grade_orders_of(answer, _UNEVEN)
    except Mistake as e:
        cause = (
            "n need not divide m: the last round takes what is left, `range(first, min(first + n,"
            " m))`."
        )
        raise Mistake(
            e.symptom, cause if "microbatches are 0" in e.cause else e.cause or cause, e.example
        ) from None


def _grade_orders_of(answer: Answer, sizes: Sequence[tuple[int, int, int, int]]) -> None:
    values = iter(answer.calls([(rank, *size) for size in sizes for rank in range(size[0])]))
    for p, m, v, n in sizes:
        rows = [_read_order(next(values), rank, p, m, v, n) for rank in range(p)]
        reference = Schedule(
            "rounds", looped(p, v), tuple(tuple(order_in_rounds(r, p, m, v, n)) for r in range(p))
        )
        impossible = (
            (n != p and _warms_up_by_p(rows, m, v), _WARM_UP_OF_P),
            (OTHERWISE, f"{_COUNT} After it come pairs, each a forward and then a backward."),
        )
        judge_orders(
            f"With p={p}, m={m}, v={v}, rounds of {n} and messages that take 1",
            rows,
            reference,
            impossible=impossible,
            crowded=_CROWDED,
            slow=_SLOW,
            costs=[Costs(latency=1)],
        )


def _read_order(value: Any, rank: int, p: int, m: int, v: int, n: int) -> tuple[Action, ...]:
    """The actions that were meant, each once, forwards and backwards each in rounds."""
    held = [chunk * p + rank for chunk in range(v)]
    wanted = order_in_rounds(rank, p, m, v, n)
    warm_up = (
        next(at for at, action in enumerate([*wanted, Action(0, "B", 0)]) if action.kind == "B") - 1
    )

    cut_short = (v - 1) * n + 2 * (p - 1 - rank) > m * v

    def foreign(action: Action) -> str:
        if action.kind in "FB" and action.stage in held:
            return f"The microbatches are 0 to {m - 1}."
        return f"Rank {rank} holds the stages {held}: chunk c of it is stage `c * p + rank`."

    def lacking(action: Action) -> str:
        if cut_short:
            return _MOST
        if wanted.index(action) >= len(wanted) - warm_up:
            return "After the last forward, as many backwards are left as the warm-up had forwards."
        return (
            "A round adds the forwards and the backwards of its microbatches, in each of the v"
            " chunks."
        )

    def repeated(action: Action) -> str:
        return _MOST if cut_short else "Each phase goes on where the one before stopped."

    what = f"order_in_rounds({rank}, {p}, {m}, {v}, {n})"
    row, _ = read_order(value, what, wanted, foreign, lacking, repeated)
    for kind, word in (("F", "forwards"), ("B", "backwards")):
        mine = [action for action in row if action.kind == kind]
        theirs = [action for action in wanted if action.kind == kind]
        if mine != theirs:
            both = f"yours   {' '.join(map(str, mine))}\nrounds  {' '.join(map(str, theirs))}"
            raise Mistake(
                f"`{what}` has its {word} in another order.",
                why(_NOT_IN_ROUNDS, mine, theirs),
                both,
            )
    return row


_NOT_IN_ROUNDS: Cause = (
    (
        lambda mine, theirs: theirs[0].kind == "B" and mine[0].microbatch > theirs[0].microbatch,
        "The microbatch that went first through the last chunk comes back first: microbatches keep"
        " their order in backward.",
    ),
    (
        lambda mine, theirs: theirs[0].kind == "B" and mine[0].stage != theirs[0].stage,
        "A gradient begins at the end of the model: in backward the last chunk comes first.",
    ),
    (
        lambda mine, theirs: [a.stage for a in mine] != [a.stage for a in theirs],
        "A round is n microbatches through one chunk, then the same n through the next; then comes"
        " the next round.",
    ),
    (
        OTHERWISE,
        "The first round takes microbatches 0 to n - 1 in their order, each later one those that"
        " come next.",
    ),
)


def _warms_up_by_p(rows: Sequence[Sequence[Action]], m: int, v: int) -> bool:
    """Return whether each rank's warm-up is as long as rounds of p microbatches make it."""
    p = len(rows)
    for rank, row in enumerate(rows):
        kinds = [action.kind for action in row]
        if kinds.index("B") != min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1):
            return False
    return True


_COUNT = "Count the warm-up: n in each chunk but the last, then 2 for each rank behind."
_WARM_UP_OF_P = (
    "The first backward is in the last chunk: before it come rounds of n, not of p, in every other"
    " chunk."
)
_CROWDED: Cause = (
    (
        Orders.holds_everything,
        "That is everything: a backward has to come as soon as it can be done.",
    ),
    (OTHERWISE, _COUNT),
)
_SLOW = "Some warm-up is too short: with Megatron-LM's room it has 2 forwards for each rank behind."


def stages_of_rank(rank: int, p: int, v: int, shape: str) -> list[int]:
    """The v stages that this rank holds, in the order of the model; shape is "loop" or "V"."""
    stages = []
    for chunk in range(v):
        place = p - 1 - rank if shape == "V" and chunk % 2 == 1 else rank
        stages.append(chunk * p + place)
    return stages


_DEALT = (
    "Stages are dealt round, like cards: stage s is on rank s % p, so chunk c of rank r is stage c"
    " * p + r."
)
_WRONG_STAGES: tuple[tuple[Callable[..., list[int]], str], ...] = (
    (lambda rank, p, v, shape: list(range(rank * v, rank * v + v)),
     "Neighbours in the model are then on one rank: a microbatch visits each rank once, and the way"
     " in is as long as without chunks."),
    (lambda rank, p, v, shape: stages_of_rank(rank, p, v, "loop"),
     "That is the loop. In a V the second chunk goes back: its first stage is on the *last* rank."),
    (lambda rank, p, v, shape: [c * v + rank for c in range(v)], _DEALT),
    (lambda rank, p, v, shape: [c * p + rank + 1 for c in range(v)],
     "Stages, like ranks, are counted from 0."),
)  # fmt: skip


_OTHER_STAGES: Cause = (
    (
        lambda case, stages, wanted: len(stages) != case[2],
        lambda case, stages, wanted: f"A rank holds v = {case[2]} stages, one of each chunk.",
    ),
    (
        lambda case, stages, wanted: sorted(stages) == wanted,
        "Put them in the order of the model.",
    ),
    (lambda case, stages, wanted: case[3] == "loop", _DEALT),
    (
        lambda case, stages, wanted: stages[:2] == wanted[:2],
        "The first two chunks are right. The third goes down the ranks again, and the fourth back:"
        " a zigzag.",
    ),
    (
        OTHERWISE,
        "Every second chunk goes back: chunk 1 begins where chunk 0 ended, on the last rank, and"
        " ends on rank 0.",
    ),
)


def _read_stages(value: Any, call: str) -> list[int]:
    return [
        expect_int(stage, f"{call}[{chunk}]")
        for chunk, stage in enumerate(expect_list(value, call))
    ]


_GRADE_STAGES = Formula(
    stages_of_rank,
    [
        (rank, p, v, shape)
        for shape in ("loop", "V")
        for p, v in ((4, 2), (2, 2), (3, 1), (1, 2), (4, 3), (3, 4))
        for rank in range(p)
    ],
    _WRONG_STAGES,
    _OTHER_STAGES,
    read=_read_stages,
)


@dataclass(frozen=True)
class Ring:
    """The messages of this rank when stage s is on rank ``s % n_ranks``.

    Messages from one rank to another arrive in the order in which they were sent. Nothing else
    tells for which chunk a message is. Activations and gradients are kept apart, also where both
    neighbours are one rank.

    Attributes:
        shape: shape of one microbatch's activation, and of its gradient.
        dtype: dtype of both.
        n_stages: stages of the whole model.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    n_stages: int

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def n_ranks(self) -> int:
        return dist.get_world_size()

    @property
    def last_stage(self) -> int:
        return self.n_stages - 1

    def recv_activation(self) -> Tensor:
        """The next activation from the rank before this one."""
        return self._recv(self.rank - 1, tag=0).requires_grad_()

    def recv_gradient(self) -> Tensor:
        """The next gradient from the rank after this one."""
        return self._recv(self.rank + 1, tag=1)

    def send_activation(self, y: Tensor) -> dist.Work:
        """Start to send y to the next rank. Raises ValueError for any value but an activation."""
        if y.shape != self.shape:
            raise ValueError(
                f"an activation has shape {self.shape}, not {tuple(y.shape)}: the last stage sends"
                " none"
            )
        return self._send(y.detach(), self.rank + 1, tag=0)

    def send_gradient(self, dx: Tensor | None) -> dist.Work:
        """Start to send dL/dx to the rank before this one. Raises ValueError if there is none."""
        if dx is None:
            raise ValueError(
                "there is no gradient to send: stage 0 has none, for nobody waits for it; any other"
                " has one after a backward from a `y` that was computed from this `x`"
            )
        return self._send(dx, self.rank - 1, tag=1)

    def _recv(self, source: int, tag: int) -> Tensor:
        received = torch.empty(self.shape, dtype=self.dtype)
        dist.recv(received, source % self.n_ranks, tag=tag)
        return received

    def _send(self, message: Tensor, to: int, tag: int) -> dist.Work:
        work = dist.isend(message.contiguous(), to % self.n_ranks, tag=tag)
        assert work is not None, "a rank of the group sends"
        return work


def healed_chunks_step(
    chunks: list[nn.Module],
    order: list[Action],
    microbatches: list[torch.Tensor],
    targets: list[torch.Tensor],
    loss_fn: nn.Module,
    ring: Ring,
) -> None:
    """One step on this rank, in the given order."""
    m, kept, sends = len(microbatches), dict[tuple, tuple](), []
    for action in order:
        stage, i = action.stage, action.microbatch
        if action.kind == "F":
            x = microbatches[i] if stage == 0 else ring.recv_activation()
            y = chunks[stage // ring.n_ranks](x)
            if stage == ring.last_stage:
                y = loss_fn(y, targets[i])
            else:
                sends.append(ring.send_activation(y))
            kept[stage, i] = x, y
        else:
            x, y = kept.pop((stage, i))
            dy = torch.full_like(y, 1 / m) if stage == ring.last_stage else ring.recv_gradient()
            y.backward(dy)
            if stage > 0:
                sends.append(ring.send_gradient(x.grad))
    for send in sends:
        send.wait()


def _call(step: Callable[..., Any], seat: Seat) -> tuple[list[str], list[str]]:
    """Call the step; return the order that it was given, and what it did."""
    p = dist.get_world_size()
    v = len(seat.stages)
    rank = dist.get_rank()
    order = list(build("interleaved_1f1b", p, seat.m, v).actions[rank])
    done: list[str] = []
    ring = Ring(seat.link.shape, seat.link.dtype, p * v)
    # A stage is one block.
    model = replace(BENCH, n_blocks=p * v).model()

    def watch(stage: int, chunk: nn.Module) -> None:
        inputs = [model[:stage](x).detach() for x in seat.microbatches]

        def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            i = next((i for i, x in enumerate(inputs) if torch.allclose(x, args[0])), "?")
            done.append(f"{stage}F{i}")
            output.register_hook(lambda _: done.append(f"{stage}B{i}"))

        chunk.register_forward_hook(note)

    for c, chunk in enumerate(seat.stages):
        watch(c * p + rank, chunk)
    with unchanged(order=order):
        step(list(seat.stages), order, seat.microbatches, seat.parts, seat.loss_fn, ring)
    return list(map(str, order)), done


BENCH = Bench(_call, rows=2)
# By ranks: chunks a rank and microbatches of each step.
_STEPS = {4: ((2, 8), (2, 4)), 3: ((2, 6), (3, 3)), 2: ((2, 4), (4, 2))}


def _stepped(
    rank: int, step: Callable[..., Any], sizes: Sequence[tuple[int, int]], dealt: bool = True
) -> list[Outcome]:
    """Run a step with v chunks on this rank, for each v and m.

    The chunks are every p-th stage if ``dealt``, else neighbours in the model.
    """
    p = dist.get_world_size()
    outcomes = []
    for v, m in sizes:
        stages = [c * p + rank if dealt else rank * v + c for c in range(v)]
        bench = replace(BENCH, n_blocks=p * v)
        outcomes.append(bench.outcome(rank, step, bench.seat(rank, m, stages, p * v)))
    return outcomes


def _by_chunk(ranks: Sequence[Outcome], v: int, m: int) -> tuple[FoundByChunk, dict[str, Tensor]]:
    """Compare the gradients of each chunk with one process; return its gradients, too."""
    loss, expected = replace(BENCH, n_blocks=len(ranks) * v).one_process(m)
    found = []
    for outcome in ranks:
        # The name of a parameter begins with the number of its block.
        blocks = groupby(outcome.gradients.items(), key=lambda item: item[0].split(".")[0])
        found.append(
            {f"chunk {c}": _finding(dict(block), expected) for c, (_, block) in enumerate(blocks)}
        )
    return FoundByChunk(tuple(found), mean(ranks[-1].losses or [0.0]), loss), expected


def _finding(gradients: Gradients, expected: Mapping[str, Tensor]) -> str:
    if all(gradient is None for gradient in gradients.values()):
        return "none"
    right = all(same(gradient, expected[name]) for name, gradient in gradients.items())
    return "right" if right else "wrong"


class FoundByChunk(Findings):
    """Findings of which ``by_rank`` says for each chunk of a rank what became of its gradients."""

    def __str__(self) -> str:
        last = len(self.by_rank) - 1
        lines = [
            f"loss {self.value:.4f}, one process {self.of_one:.4f}; gradients on ranks 0 to {last}:"
        ]
        for chunk in self.by_rank[0]:
            lines.append(
                f"  {chunk}: {', '.join(f'{found[chunk]:5}' for found in self.by_rank)}".rstrip()
            )
        return "\n".join(lines)


_WHY_RAISED = {
    "IndexError": (
        "`chunks` has the v stages of this rank: that of stage s is `chunks[s // ring.n_ranks]`."
    ),
    "KeyError": (
        "A backward looks up what the forward of its own stage and microbatch kept: the same key,"
        " `stage, i`."
    ),
}


def _grade_healed_step(answer: Answer) -> None:
    for p, sizes in _STEPS.items():
        try:
            ranks = answer.on_ranks(p, _stepped, sizes)
        except Stopped as stopped:
            if stopped.error in _WHY_RAISED:
                raise Mistake(
                    stopped.symptom, _WHY_RAISED[stopped.error], stopped.example
                ) from None
            raise explained(stopped) from None
        for index, (v, m) in enumerate(sizes):
            _judge_step([rank[index] for rank in ranks], v, m)


def _judge_step(ranks: Sequence[Outcome], v: int, m: int) -> None:
    found, expected = _by_chunk(ranks, v, m)
    where = f"On {len(ranks)} ranks with {v} chunks each and {m} microbatches"
    if not found.equal:
        each = [finding for chunks in found.by_rank for finding in chunks.values()]
        lines = []
        for rank, chunks in enumerate(found.by_rank):
            findings = [f"{chunk} {finding}" for chunk, finding in chunks.items()]
            lines.append(f"rank {rank}: {', '.join(findings)}")
        table = "\n".join(lines)
        ill = len(each) - each.count("right")
        symptom = f"{where}, {ill} of {len(each)} chunks do not have the gradients of one process."
        raise Mistake(symptom, _why_ill(found, ranks, expected, m), table)
    for rank, outcome in enumerate(ranks):
        order, done = outcome.returned
        if done != order:
            example = (
                f"rank {rank} was given {' '.join(order[:8])} …\nand did {' '.join(done[:8])} …"
            )
            cause = (
                "Go through `order`, one action after the other: it says what comes when, and so"
                " what is held."
            )
            raise Mistake(
                f"{where} the gradients are right, but rank {rank} works in another order.",
                cause,
                example,
            )


def _why_ill(
    found: FoundByChunk, ranks: Sequence[Outcome], expected: Mapping[str, Tensor], m: int
) -> str:
    gradients = {name: g for outcome in ranks for name, g in outcome.gradients.items()}
    kinds = {finding for chunks in found.by_rank for finding in chunks.values()}

    def all_are(factor: float) -> bool:
        return all(same(gradient, expected[name], factor) for name, gradient in gradients.items())

    causes = (
        (kinds == {"none"}, "No backward has run: it begins from `y`, with `y.backward(dy)`."),
        ("none" in kinds,
         "Some chunk was never used, so another was used in its place. Which of its chunks does a"
         " rank need for stage s, if it holds stages r, r + p, r + 2p and so on?"),
        (all_are(m),
         "Each is m times too large: the last stage begins its backward with 1/m, once a"
         " microbatch."),
        (all_are(1 / m),
         "Each is m times too small: the last stage begins its backward with 1/m, once a"
         " microbatch."),
        (all([*chunks.values()][-1] == "right" for chunks in found.by_rank),
         "Every last chunk is right, the earlier ones are not: the gradient is lost where it goes"
         " from rank 0 round to the last rank. Ends are stages, not ranks: the last rank receives a"
         " gradient for its earlier chunks, and rank 0 sends one for its later ones."),
        (OTHERWISE,
         "Follow one microbatch: does each stage get what the stage before it sent, and does each"
         " backward take the x and y of its own stage and microbatch?"),
    )  # fmt: skip
    return why(causes)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(warm_up_forwards, _GRADE_WARM_UP, "04", "the warm-up with chunks", 2, 6, (
        "Begin with v = 1: that is 1F1B, and 03 has its warm-up. What must happen before the"
        " *first* backward if v is 2?",
        "The first backward is in the last chunk. Before it, a round of p microbatches goes through"
        " each chunk before the last: p forwards for each of those.",
        "In the last chunk it is as in 1F1B: one forward for each of the `p - 1 - rank` ranks"
        " behind this one.",
    )),
    Exercise(best_chunks, _GRADE_CHUNKS, "04", "the best number of chunks for a latency", 2, 7, (
        "Try every v that divides `layers`, and keep the one with the shortest step. `simulate`"
        " gives a makespan, or use the formula of the text.",
        "A chunk takes a v-th of the time of a rank's layers: `Costs(forward / v, backward / v, 0,"
        " latency)`. The third number, the weight gradients' time, is already in `backward`.",
        '`simulate(build("interleaved_1f1b", p, m, v), costs).makespan` for each v, then the least;'
        ' of equal ones the smallest v.',
    )),
    Exercise(order_in_rounds, _grade_order, "04", "an order in rounds", 3, 10, (
        "First make the list of all forwards: for each round, for each chunk, for each microbatch"
        " of the round. Then that of all backwards, which begin in the last chunk.",
        "The warm-up takes the first so many forwards. Then the next forward and the next backward"
        " take turns, and the backwards that are left come last.",
        "How many? One round in every chunk but the last, which is now `(v - 1) * n`, and 2 for"
        " each of the `p - 1 - rank` ranks behind; never more than there are.",
    )),
    Exercise(stages_of_rank, _GRADE_STAGES, "04", "a loop and a V", 1, 4, (
        "Chunk c has the stages `c * p` to `c * p + p - 1`, one on each rank. In a loop, which is"
        " on rank r?",
        "In a V the second chunk begins where the first one ended: it runs from rank p - 1 back to"
        " rank 0.",
        "So in chunks 1, 3 and so on rank r stands at place `p - 1 - rank`, else at place `rank`;"
        " its stage is `c * p + place`.",
    )),
    Exercise(healed_chunks_step, _grade_healed_step, "04", "bug clinic", 3, 8, (
        "Four ranks with two chunks: rank 1 holds stages 1 and 5. Which of its two modules does the"
        " step take for stage 1, and which for stage 5?",
        "Now follow a gradient from stage 4, on rank 0, to stage 3, on the last rank. Who sends,"
        " who receives it?",
        "The chunk of stage s is `s // p`. A step begins and ends at a *stage*: compare `stage`"
        " with 0 and with `ring.last_stage`, and no rank with anything.",
    )),
)  # fmt: skip


PATIENTS: dict[str, Callable[..., None]] = {
    # Its ranks hold stages that are neighbours in the model.
    "A": flawed(healed_chunks_step),
    "B": flawed(healed_chunks_step, ("stage // ring.n_ranks", "stage % len(chunks)")),
    "C": flawed(
        healed_chunks_step,
        ("1 / m) if stage == ring.last_stage", "1 / m) if ring.rank == ring.n_ranks - 1"),
        ("if stage > 0", "if ring.rank > 0"),
    ),
}
"""Interleaved steps that run and raise nothing, each with another bug."""


def examine(step: Callable[..., Any], n_ranks: int = 4, n_microbatches: int = 8) -> FoundByChunk:
    """Run ``step(chunks, order, microbatches, targets, loss_fn, ring)`` on real ranks, beside one
    process.

    Each rank has two chunks.
    """
    dealt = step is not PATIENTS["A"]
    ranks = [each for [each] in on_ranks(n_ranks, _stepped, step, [(2, n_microbatches)], dealt)]
    return _by_chunk(ranks, 2, n_microbatches)[0]


def lean(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B with the shortest warm-up that costs no time where messages take none."""
    return with_warm_up(lambda rank: warm_up_forwards(rank, p, v), p, m, v)


def turns(schedule: Schedule) -> int:
    """Return the most often that any rank turns to another chunk, its first one included."""
    most = 0
    for row in schedule.actions:
        stages = [part.stage for action in row for part in action.parts]
        most = max(most, 1 + sum(a != b for a, b in pairwise(stages)))
    return most
