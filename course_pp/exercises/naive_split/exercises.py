"""Notebook 01: layers of stages, a step across the cut, a check of gradients; bytes, busy ranks."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.bench import Bench, Seat, WrongGradients
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import close, expect_int, expect_list, expect_number
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, Stopped, why
from course_pp.launch import on_ranks
from course_pp.model import (
    CrossEntropy,
    ModelConfig,
    Transformer,
    build_stage_module,
    compute_layer_assignment,
    drop_other_stages,
    partition_by_cost,
)
from course_pp.runtime import Link, Recorder
from course_pp.runtime.memory import Meter
from course_pp.schedule import Timeline


def assign_layers(n_layers: int, n_stages: int) -> list[tuple[int, int]]:
    """One (start, end) a stage, as even as can be; earlier stages take the extras."""
    share, extras = divmod(n_layers, n_stages)
    ranges, start = [], 0
    for stage in range(n_stages):
        end = start + share + (1 if stage < extras else 0)
        ranges.append((start, end))
        start = end
    return ranges


def _as_ranges(value: Any, call: str, n_layers: int, n_stages: int) -> list[tuple[int, int]]:
    """Return the value as ranges that cover all layers in order, one layer a stage at least.

    Raises:
        Mistake: they do not.
    """
    rows = expect_list(value, call, n_stages)
    ranges = []
    for stage, row in enumerate(rows):
        pair = expect_list(row, f"{call}[{stage}]", 2, "Two numbers a stage, (start, end).")
        start, end = (expect_int(bound, f"{call}[{stage}][{i}]") for i, bound in enumerate(pair))
        ranges.append((start, end))
    it_is = f"It is {ranges}."
    for stage, (start, end) in enumerate(ranges):
        if end <= start:
            causes = (
                (any(end < start for start, end in ranges),
                 "A stage is (start, end): the first layer it holds, then the first one after it."),
                (sum(size for _, size in ranges) == n_layers,
                 "The second number is where a stage ends, not how many layers it has."),
                (OTHERWISE, "Each stage holds at least one."),
            )  # fmt: skip
            raise Mistake(f"In `{call}`, stage {stage} has no layer.", why(causes), it_is)
    for stage, ((_, end), (start, _)) in enumerate(pairwise(ranges)):
        if start != end:
            lost = f"layer {start} is on two stages"
            if start > end:
                lost = f"layers {end} to {start - 1} are on no stage"
            cause = "The next stage starts where this one ends."
            if start == end + 1:
                cause = (
                    "Is `end` included? It is the first layer that does not belong to the stage."
                )
            raise Mistake(f"In `{call}`, after stage {stage}, {lost}.", cause, it_is)
    if ranges[0][0] != 0 or ranges[-1][1] != n_layers:
        covered = f"layers {ranges[0][0]} to {ranges[-1][1] - 1}"
        left = n_layers - ranges[-1][1]
        ends = (
            (ranges[0][0] != 0, "The first stage starts with layer 0."),
            (left < 0, "Together the stages have more layers than there are."),
            (
                left == n_layers % n_stages,
                f"The layers do not divide evenly, and `//` leaves some over: here {left}.",
            ),
            (OTHERWISE, "The last stage ends with the last layer."),
        )
        raise Mistake(f"`{call}` covers {covered}, not 0 to {n_layers - 1}.", why(ends), it_is)
    return ranges


def _grade_assign_layers(answer: Answer) -> None:
    cases = [(8, 2), (12, 4), (12, 5), (5, 3), (10, 4), (11, 4), (7, 7), (9, 1), (61, 16)]
    for (n_layers, n_stages), value in zip(cases, answer.calls(cases), strict=True):
        call = f"assign_layers({n_layers}, {n_stages})"
        ranges = _as_ranges(value, call, n_layers, n_stages)
        want = compute_layer_assignment(n_layers, n_stages)
        if ranges == want:
            continue
        sizes, right = ([end - start for start, end in found] for found in (ranges, want))
        example = f"layers a stage  {sizes}\nexpected        {right}"
        if sorted(sizes) == sorted(right):
            cause = "The split is even, but the extras are not on the earlier stages."
        elif sizes[-1] == n_layers - (n_stages - 1) * sizes[0] and sizes[-1] > sizes[0]:
            cause = (
                "All extras went to the last stage: give one each to the first `n_layers %"
                " n_stages` stages."
            )
        else:
            cause = (
                "No stage may have two layers more than another; rounding up for each gives away"
                " too many."
            )
        raise Mistake(f"`{call}` is not the split asked for.", cause, example)


def balanced_cut(costs: list[float], n_stages: int) -> list[tuple[int, int]]:
    """One (start, end) a stage; its costliest stage is as cheap as can be."""
    # best[end] = (cost of the costliest stage, ranges) for the first `end` layers on the stages so
    # far
    best: dict[int, tuple[float, list]] = {0: (0.0, [])}
    for stage in range(n_stages):
        longer = {}
        for end in range(stage + 1, len(costs) - (n_stages - stage - 1) + 1):
            options = [
                (max(worst, sum(costs[start:end])), [*ranges, (start, end)])
                for start, (worst, ranges) in best.items()
                if start < end
            ]
            longer[end] = min(options)
        best = longer
    return best[len(costs)][1]


_CUTS: tuple[tuple[list[float], int], ...] = (
    ([1, 1, 1, 1], 2),
    ([1, 1, 1, 1, 4], 2),
    ([6, 1, 1, 1, 1, 1, 1], 3),
    ([4, 1, 1, 4, 1, 1], 3),
    ([3, 3, 3, 3, 3, 3, 3], 4),
    ([2, 3, 4, 5, 6], 3),
    ([5, 1, 1, 1, 1, 9], 4),
    ([0.5, 0.25, 2, 0.25, 1.5, 1], 6),
    ([1, 9, 1, 1, 9, 1, 1, 1], 3),
    ([7, 2, 5, 10, 8], 2),
    ([3, 1, 1, 5, 1], 3),
    ([2.5], 1),
    # Fractions come last: an answer that is right for all whole numbers may fail here.
    ([0.3, 0.4, 0.5, 0.6], 2),
    ([0.0007, 0.0002, 0.0005, 0.001, 0.0008], 2),
)
_LONG_CUT: tuple[list[float], int] = ([float(1 + (7 * i) % 11) for i in range(60)], 12)


def _grade_balanced_cut(answer: Answer) -> None:
    for (costs, n_stages), value in zip(_CUTS, answer.calls(_CUTS), strict=True):
        _judge_cut(costs, n_stages, value)
    try:
        value = answer(*_LONG_CUT)
    except Stopped as e:
        if e.how != "endless":
            raise
        raise Mistake(
            "The small cases are right, but 60 layers on 12 stages took more than"
            f" {answer.limit_s:g} s.",
            "There are 10^11 cuts: too many to try. Build the best cut of the first layers on k"
            " stages from the best cuts of fewer on k - 1.",
        ) from None
    _judge_cut(*_LONG_CUT, value)


def _judge_cut(costs: list[float], n_stages: int, value: Any) -> None:
    call = written_call("balanced_cut", costs, n_stages)
    ranges = _as_ranges(value, call, len(costs), n_stages)
    want = partition_by_cost(costs, n_stages)
    got, best = ([sum(costs[start:end]) for start, end in found] for found in (ranges, want))
    average = sum(costs) / n_stages
    if max(got) <= max(best) * (1 + 1e-12):
        return
    if ranges == compute_layer_assignment(len(costs), n_stages):
        cause = "The same number of layers is not the same cost."
    elif any(cost % 1 for cost in costs):
        cause = (
            "Costs need not be whole numbers, nor near 1: a limit that goes up in steps jumps over"
            " the best one."
        )
    elif sum(cost**2 for cost in got) < sum(cost**2 for cost in best):
        cause = "Only the largest sum counts, not how even the sums are, nor their squares."
    elif all(
        sum(costs[start : end - 1]) < average < sum(costs[start : end + 1])
        for start, end in ranges[:-1]
    ):
        cause = (
            "One stage after another is filled up to the average: where to cut first depends on"
            " what comes later."
        )
    else:
        cause = (
            "A cut is as good as its costliest stage: of all cuts, take the one whose largest sum"
            " is smallest."
        )
    example = f"costs of the stages  {got}, at {ranges}\npossible             {best}, at {want}"
    raise Mistake(
        f"`{call}` has a stage that costs {max(got):g}; {max(best):g} is possible.", cause, example
    )


def send_activation(output: Tensor, to: int) -> None:
    """Send an activation. This and the four below are the notebook's: an answer is made of them."""
    dist.send(output.detach(), to)


def empty_activation(stage: Any, tokens: Tensor) -> Tensor:
    weight = next(stage.parameters())
    return torch.empty(*tokens.shape, stage.config.dim, dtype=weight.dtype)


def recv_activation(activation: Tensor, source: int) -> Tensor:
    dist.recv(activation, source)
    return activation.requires_grad_()


def send_gradient(activation: Any, to: int) -> None:
    dist.send(activation.grad, to)


def recv_gradient(output: Tensor, source: int) -> Tensor:
    gradient = torch.empty_like(output)
    dist.recv(gradient, source)
    return gradient


loss_fn = CrossEntropy()


def two_rank_step(rank: int, stage: Any, tokens: Tensor, targets: Tensor) -> float | None:
    """Forward and backward of one batch over ranks 0 and 1; returns the loss on rank 1."""
    if rank == 0:
        output = stage(tokens)
        send_activation(output, 1)
        output.backward(recv_gradient(output, 1))
        return None
    x = recv_activation(empty_activation(stage, tokens), 0)
    loss = loss_fn(stage(x), targets)
    loss.backward()
    send_gradient(x, 0)
    return loss.item()


_CONFIG = ModelConfig(dim=32, n_layers=3, n_heads=2, vocab_size=29, max_seq_len=16)


@dataclass(frozen=True)
class _TokenBench(Bench):
    """A bench with a Transformer instead of blocks; m is the number of rows of tokens."""

    loss_fn: Callable[[Tensor, Tensor], Tensor] = field(default_factory=CrossEntropy)
    config: ModelConfig = _CONFIG
    seq_len: int = 8

    def model(self) -> Any:
        torch.manual_seed(0)
        return Transformer(self.config).double()

    def batch(self, m: int) -> tuple[Tensor, Tensor]:
        seeded = torch.Generator().manual_seed(1)
        ids = torch.randint(self.config.vocab_size, (m, self.seq_len + 1), generator=seeded)
        return ids[:, :-1], ids[:, 1:]

    def seat(self, rank: int, m: int, *_: Any) -> Seat:
        torch.manual_seed(0)
        stage = build_stage_module(self.config, rank, dist.get_world_size()).double()
        return Seat(
            [stage],
            *self.batch(m),
            m,
            self.loss_fn,
            Link((m, self.seq_len, self.config.dim), torch.float64),
        )


_BENCH = _TokenBench(
    lambda step, seat: step(dist.get_rank(), *seat.stages, seat.inputs, seat.targets),
    before=1.0,
)


_NO_GRADIENT = (
    "Rank 1 calls `loss.backward()`. On rank 0 backward must start from the `output` that has its"
    " graph: was that output detached?"
)
_WRONG_GRADIENTS: Cause = (
    (
        WrongGradients.replace_what_was_there,
        "`backward` adds to `.grad` by itself; to clear it is up to the caller of the step.",
    ),
    (
        lambda found: found.are_times(found.factor),
        lambda found: (
            f"All of these are {found.factor:.6g} times what they should be: once too often added"
            " up, or scaled?"
        ),
    ),
    (
        lambda found: any(rank == 1 for rank, _ in found.wrong),
        "Rank 0 computes on these tokens and sends what comes out; rank 1 computes on that, with"
        " these targets.",
    ),
    (
        OTHERWISE,
        "Its `backward` takes what came from rank 1, and that is the activation's gradient:"
        " `send_gradient`.",
    ),
)


def _grade_two_rank_step(answer: Answer) -> None:
    for rows in (2, 3):
        try:
            ranks = [each for [each] in answer.on_ranks(2, _BENCH.on_rank, (rows,))]
        except Stopped as e:
            changed_weights = e.how == "changed" and "`stage" in e.symptom
            cause = "The optimizer is the caller's business." if changed_weights else e.cause
            raise Mistake(e.symptom, cause, e.example) from None
        _BENCH.judge_gradients(
            f"With {rows} rows", ranks, rows, missing=_NO_GRADIENT, wrong=_WRONG_GRADIENTS
        )
        loss, _ = _BENCH.one_process(rows)
        got = expect_number(ranks[1].returned, "two_rank_step(1, stage, tokens, targets)")
        if not close(got, loss):
            raise Mistake(
                f"All gradients are right, but on rank 1 the step returned {got:.8g}; the loss is"
                f" {loss:.8g}.",
                "Return the loss itself, `loss.item()`.",
            )


def untrained(stage: nn.Module) -> list[str]:
    """Names of parameters that want a gradient and have none, or one of zeros only."""
    return [
        name
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    ]


_NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def _filled(first: float, others: float) -> Callable[[Tensor], Tensor]:
    """A gradient whose numbers take turns: one is ``first``, the next is as ``others``."""

    def gradient(parameter: Tensor) -> Tensor:
        made = torch.full_like(parameter, others)
        made.view(-1)[::2] = first
        return made

    return gradient


# A row: the special case, the parameters whose gradient is replaced, the gradient in its place, the
# names to be returned, and the cause if the answer returns others.
_STAGES: tuple[
    tuple[str, Sequence[str], Callable[[Tensor], Tensor | None], Sequence[str], str], ...
] = (
    ("every gradient is there", (), torch.zeros_like, (), "Name only what has no gradient."),
    ("layer 0 has `grad` None", _NAMES[:2], lambda p: None, _NAMES[:2],
     "A parameter that backward never reached has `grad is None`."),
    ("the last bias has `grad` None", _NAMES[3:], lambda p: None, _NAMES[3:],
     "Look at every parameter, the last as well."),
    ("the gradients of layer 0 are all zeros", _NAMES[:2], torch.zeros_like, _NAMES[:2],
     "`zero_grad(set_to_none=False)` leaves zeros: a gradient of zeros only trains nothing"
     " either."),
    ("layer 2 is"
     " frozen", _NAMES[2:], lambda p: None, (),
         "With `requires_grad=False` no gradient is wanted."),
    ("half of the numbers of each gradient are zero", _NAMES, _filled(0.0, -1.0), (),
     "A gradient in which only some numbers are zero is healthy."),
    ("the numbers of each gradient add up to zero", _NAMES, _filled(1.0, -1.0), (),
     "1 and -1 cancel, and both train: ask of each number whether it is zero."),
    ("each number of a gradient is 1e-6", _NAMES, _filled(1e-6, 1e-6), (),
     "Small is not zero: ask whether any number differs from 0."),
)  # fmt: skip


def _named_on_rank(rank: int, answer: Callable[..., Any]) -> list[tuple[Any, list[str]]]:
    """Return for each stage the answer, and the parameters whose gradient it changed."""
    found = []
    for what, replaced, gradient, *_ in _STAGES:
        torch.manual_seed(0)
        stage = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        stage(torch.ones(1, 3)).sum().backward()
        parameters = dict(stage.named_parameters())
        for name in replaced:
            parameters[name].grad = gradient(parameters[name].detach())
        stage[2].requires_grad_("frozen" not in what)
        before: dict[str, Tensor | None] = dict.fromkeys(parameters)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                before[name] = parameter.grad.clone()
        value = answer(stage)
        changed = [name for name, p in parameters.items() if not _equal(before[name], p.grad)]
        found.append((value, changed))
    return found


def _equal(before: Tensor | None, after: Tensor | None) -> bool:
    return before is after if before is None or after is None else torch.equal(before, after)


def _grade_untrained(answer: Answer) -> None:
    for (what, _, _, want, cause), (value, changed) in zip(
        _STAGES, answer.on_ranks(1, _named_on_rank)[0], strict=True
    ):
        if changed:
            raise Mistake(
                f"Where {what}, `untrained` changed the gradient of {changed[0]}.",
                "Look at the gradients only: the optimizer still needs them.",
            )
        names = expect_list(
            sorted(value) if isinstance(value, set) else value, f"untrained(stage) where {what}"
        )
        if not all(isinstance(name, str) for name in names):
            raise Mistake(
                f"Where {what}, `untrained` gave {names!r:.80}, not names.",
                "Take them from `named_parameters()`.",
            )
        if sorted(names) != sorted(want):
            raise Mistake(f"Where {what}, `untrained` gave {names}, not {list(want)}.", cause)


EXERCISES = (
    Exercise(assign_layers, _grade_assign_layers, "01", "which layers go where", 1, 5, (
        "`divmod(n_layers, n_stages)` gives the share of every stage and how many layers are left"
        " over.",
        "The first `extras` stages have `share + 1` layers, the others `share`; each starts where"
        " the last ended.",
    )),
    Exercise(two_rank_step, _grade_two_rank_step,
        "01", "forward and backward across the cut", 2, 15, (
        "Write down the two messages: rank 0 sends the activation, and waits; rank 1 sends the"
        " gradient last.",
        "Rank 1 receives into `empty_activation(stage, tokens)`. After `loss.backward()`, the"
        " tensor it received has in `.grad` what rank 0 waits for.",
        "Rank 0 has no loss: it continues with `output.backward(recv_gradient(output, 1))`, from"
        " the output that still has its graph.",
    )),
    Exercise(balanced_cut, _grade_balanced_cut,
        "01", "the costliest stage as cheap as can be", 3, 20, (
        "Solve smaller questions first: what is the best cut of the first `end` layers only, on"
        " fewer stages?",
        "The last stage of such a cut goes from some `start` to `end`. Then the stages before it"
        " are the best cut of the first `start` layers on one stage less, which you know already:"
        " this is dynamic programming.",
        "Keep a dictionary: `best[end]` is the cost of the costliest stage, and the ranges. Begin"
        " with `best = {0: (0.0, [])}`, no layer on no stage.",
        "For each further stage make a new one: `longer[end]` is the smallest, over all `start <"
        " end` in `best`, of `(max(worst, sum(costs[start:end])), [*ranges, (start, end)])`. The"
        " stages to come need a layer each.",
    )),
    Exercise(untrained, _grade_untrained, "01", "the check that would have caught it", 1, 5, (
        "`stage.named_parameters()` gives names and parameters; look at `parameter.grad`.",
        "Three cases: no gradient wanted (`requires_grad` is False), none there (`grad is None`),"
        " or zeros only (`not grad.any()`).",
    )),
)  # fmt: skip


Step = Callable[[nn.Module, Tensor, Tensor, Recorder], Any]
Bytes = dict[str, int]

SMALL = ModelConfig(dim=384, n_layers=8, n_heads=6, vocab_size=2048, max_seq_len=256)
DEEP = replace(SMALL, n_layers=12)
_TINY = replace(SMALL, dim=96, n_layers=5)
BUDGET = 384 * 2**20
"""Bytes of the device that the notebook pretends to have."""


def predicted_bytes(config: ModelConfig, rows: int = 4, seq_len: int = 64) -> Bytes:
    """Return the bytes of one AdamW step in float32, by formula.

    Korthikanti et al. 2022, arXiv:2205.05198, section 4.
    """
    d = config.dim
    h = config.hidden_dim
    n = config.n_parameters
    floats_per_token = config.n_layers * (8 * d + 4 * h) + 2 * d + config.vocab_size
    return {
        "weights": 4 * n,
        "gradients": 4 * n,
        "AdamW state": 8 * n,
        "activations": 4 * rows * seq_len * floats_per_token,
    }


def measured_bytes(config: ModelConfig, rows: int = 4, seq_len: int = 64) -> Bytes:
    """The same, measured."""
    model = Transformer(config)
    tokens, targets = _tokens(rows, seq_len)
    return _bytes_of(model, lambda: loss_fn(model(tokens), targets).backward())


def _bytes_of(model: nn.Module, forward_and_backward: Callable[[], Any]) -> Bytes:
    """Bytes of a step: tensors that can be walked over, and what autograd keeps."""
    optimizer = torch.optim.AdamW(model.parameters())
    meter = _meter(model)
    with meter.saving(0, 0):
        forward_and_backward()
    optimizer.step()
    return {
        **_state_bytes(model, optimizer),
        "activations": meter.log().seen_from(0, 0).peaks["activation"],
    }


def _meter(model: nn.Module) -> Meter:
    """Return a meter of what is kept for backward, without the model's parameters and buffers."""
    meter = Meter()
    meter.ignore([*model.parameters(), *model.buffers()])
    return meter


def second_forward(config: ModelConfig, budget: int) -> None:
    """Run a step, and a second forward that stops behind the first layer with activations over
    ``budget`` bytes.

    Raises:
        MemoryError: names the layer, as an accelerator's allocator would not.
    """
    model = Transformer(config)
    tokens, targets = _tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    meter = _meter(model)
    loss_fn(model(tokens), targets).backward()
    optimizer.step()
    room = budget - sum(_state_bytes(model, optimizer).values())

    def look(name: str) -> None:
        if meter.kept["activation"] > room:
            raise MemoryError(
                f"out of memory in layer {name}, with {room / 2**20:.1f} MiB for activations"
            )

    for name, layer in model.layers.items():
        layer.register_forward_hook(lambda *_, name=name: look(name))
    with meter.saving(0, 0):
        loss_fn(model(tokens), targets)


def peaks_while_building(n_ranks: int = 2) -> dict[str, Bytes]:
    """Return the bytes that rank 0's stage of the deep model keeps, and its peak above them.

    The stage is built in three ways.
    """
    ways = {
        "build all, delete": _keep_only,
        "cut on meta": _cut_on_meta,
        "only the stage": build_stage_module,
    }
    return {
        name: on_ranks(n_ranks, _peak_while_building, build, n_ranks)[0]
        for name, build in ways.items()
    }


class Comparison(NamedTuple):
    """A step on two ranks beside one process, in float64.

    Attributes:
        largest: the largest difference of any gradient.
    """

    loss: float
    loss_of_one: float
    largest: float


def compare(step: Step) -> Comparison:
    """Run ``step(stage, tokens, targets, recorder)`` on two ranks, and compare with one process."""
    ranks = _BESIDE_ONE.ran(step, 2, 4)
    loss, right = _BESIDE_ONE.one_process(4)
    found = [(g, right[name]) for rank in ranks for name, g in rank.gradients.items()]
    largest = max(
        math.inf if g is None else float((g - expected).abs().max()) for g, expected in found
    )
    return Comparison(ranks[1].returned, loss, largest)


_BESIDE_ONE = _TokenBench(
    lambda step, seat: step(*seat.stages, seat.inputs, seat.targets, Recorder()),
    config=_TINY,
    seq_len=64,
)


@dataclass(frozen=True)
class Splits:
    """The deep model cut over 1, 2 and 4 ranks.

    Attributes:
        timelines: {number of ranks: the shortest of three runs}.
        memory: {rank: bytes by kind}.
    """

    timelines: Mapping[int, Timeline]
    memory: Mapping[str, Bytes]

    def speed_up(self, n_ranks: int) -> float:
        """Return the speed on ``n_ranks`` ranks over the speed of one process."""
        return float(self.timelines[1].makespan / self.timelines[n_ranks].makespan)

    def __str__(self) -> str:
        rows = []
        for p, run in self.timelines.items():
            nobody = max(0.0, 1 - p * float(run.utilisation))
            rows.append(
                f"p = {p}: speed-up {self.speed_up(p):.2f}, busy {run.utilisation:.1%}, nobody"
                f" {nobody:.1%}"
            )
        return "\n".join(rows)


def time_splits(step: Step, sizes: Sequence[int] = (1, 2, 4), rounds: int = 3) -> Splits:
    """Time a step of the deep model over each number of ranks in ``sizes``.

    The numbers take turns, ``rounds`` times.
    """
    runs = [{p: on_ranks(p, _timed, step) for p in sizes} for _ in range(rounds)]
    timelines = {}
    for p in sizes:
        measured = [each[p][0][1] for each in runs]
        timelines[p] = min(measured, key=lambda timeline: timeline.makespan)
    memory = {
        f"rank {r} of {p}": kept
        for p, ranks in runs[0].items()
        for r, (kept, _) in enumerate(ranks)
    }
    return Splits(timelines, memory)


def train_two_ranks(step: Step, n_steps: int = 16) -> str:
    """Train a small model for some steps; print its losses and its parameters with a gradient."""
    ranks = on_ranks(2, _train, step, n_steps)
    curve = " ".join(f"{loss:.2f}" for loss in ranks[1][0][::5])
    counts = ", ".join(f"rank {r} {n} of {total}" for r, (_, n, total) in enumerate(ranks))
    return f"loss {curve}; parameters with a gradient: {counts}"


def _tokens(rows: int = 4, seq_len: int = 64) -> tuple[Tensor, Tensor]:
    return replace(_BESIDE_ONE, seq_len=seq_len).batch(rows)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once: several tensors may be views of one."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    parameters = list(model.parameters())
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return {
        "weights": _storage_bytes(parameters),
        "gradients": _storage_bytes(p.grad for p in parameters if p.grad is not None),
        "AdamW state": _storage_bytes(moments),
    }


def _cut_on_meta(config: ModelConfig, stage: int, n_stages: int) -> nn.Module:
    with torch.device("meta"):
        model = _keep_only(config, stage, n_stages)
    model.to_empty(device="cpu")
    model.init_weights_and_freqs()
    return model


def _keep_only(config: ModelConfig, stage: int, n_stages: int) -> Transformer:
    """Build the whole model and delete what other ranks hold."""
    held = compute_layer_assignment(config.n_layers, n_stages)[stage]
    return drop_other_stages(Transformer(config), stage, n_stages, held)


def _peak_while_building(
    rank: int, build: Callable[[ModelConfig, int, int], nn.Module], n_stages: int
) -> Bytes:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )

    build(replace(DEEP, dim=12, vocab_size=16), rank, n_stages)  # first-time costs
    before = peak()
    kept = _storage_bytes(build(DEEP, rank, n_stages).parameters())
    return {"kept": kept, "only while building": max(0, peak() - before - kept)}


def _timed(rank: int, step: Step) -> tuple[Bytes, Timeline]:
    stage = build_stage_module(DEEP, rank, dist.get_world_size())
    recorder = Recorder()
    step(stage, *_tokens(1, 8), recorder)  # a short one, to warm up
    recorder.clear()
    kept = _bytes_of(stage, lambda: step(stage, *_tokens(), recorder))
    return kept, recorder.timeline()


def _train(rank: int, step: Step, n_steps: int) -> tuple[list[Any], int, int]:
    torch.manual_seed(0)
    stage = build_stage_module(_TINY, rank, 2)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        losses.append(step(stage, *_tokens(), Recorder()))
        optimizer.step()
    has_gradient = [p.grad is not None for p in stage.parameters()]
    return losses, sum(has_gradient), len(has_gradient)
