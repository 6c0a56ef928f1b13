"""The bench on which hand-written steps are tried: a small model, its batch, one process's
gradients, and real ranks.

Graders, labs and clinics of all notebooks use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import Cause, Mistake, Stopped, explained_in_line, why
from course_pp.exercises.traffic import last_message_waited_for
from course_pp.launch import on_ranks
from course_pp.runtime import Link, partition_model

__all__ = [
    "Bench",
    "Findings",
    "ForwardWatch",
    "LopsidedLoss",
    "Outcome",
    "Seat",
    "WrongGradients",
    "same",
    "shifted",
    "with_norm",
]

# Of a factor like 1/m in float32, which is no mistake.
TOLERANCE = 1e-6
Step = Callable[..., Any]
Demand = Callable[[int, int, str], None]
Gradients = Mapping[str, Tensor | None]


class LopsidedLoss(nn.Module):
    """A mean over rows, like `nn.MSELoss`; an error counts more where the target is large.

    So it notices when output and target have changed places.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square() * target.exp()).mean()


class Seat(NamedTuple):
    """What a rank has before a step.

    Attributes:
        stages: its stages, in the order of the model; one, unless there are chunks.
        inputs: of the whole batch, like the targets.
        m: microbatches.
        loss_fn: the mean over a microbatch.
        link: to its neighbours.
    """

    stages: list[nn.Module]
    inputs: Tensor
    targets: Tensor
    m: int
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    link: Link

    @property
    def microbatches(self) -> tuple[Tensor, ...]:
        return self.inputs.chunk(self.m)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The targets of each microbatch."""
        return self.targets.chunk(self.m)


class Outcome(NamedTuple):
    """What a step left on one rank.

    Attributes:
        returned: by the step.
        losses: what the loss function gave here, call by call.
        gradients: what was added to those that were there before, by name in the whole model; None
            for nothing.
        events: ``F`` where a forward ended, ``B`` where a backward through the stage's output
            began, ``W`` where the gradient of its first weight was computed: ``"FFBWFBW"``.
        places: the most memory that held inputs of the stage at once, in inputs.
    """

    returned: Any
    losses: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    events: str
    places: int

    @property
    def order(self) -> str:
        """Forwards and backwards as they began."""
        return self.events.replace("W", "")

    @property
    def peak(self) -> int:
        """The most forwards in flight."""
        return max(accumulate((1 if kind == "F" else -1 for kind in self.order), initial=0))


def two_layers(width: int) -> nn.Module:
    """A block with a tanh between its layers."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def with_norm(width: int) -> nn.Module:
    """A block that ends in a norm, so that what comes out is as large as what goes in."""
    wide = 4 * width
    return nn.Sequential(
        nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width), nn.LayerNorm(width)
    )


@dataclass(frozen=True)
class Bench:
    """A model of equal blocks in float64, the batch it is given, and how this notebook's steps are
    called.

    Attributes:
        call: ``call(step, seat)`` calls a step on a rank.
        loss_fn: the mean over a microbatch.
        width: of every activation.
        block: ``block(width)`` makes a block of the model.
        rows: of a microbatch.
        n_blocks: they are shared out as evenly as can be.
        before: what each number of each gradient is before a step, which has to add to it; None for
            no gradient.
    """

    call: Callable[[Step, Seat], Any]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = field(default_factory=LopsidedLoss)
    width: int = 4
    block: Callable[[int], nn.Module] = two_layers
    rows: int = 3
    n_blocks: int = 4
    before: float | None = None

    def model(self) -> nn.Sequential:
        """The whole model, the same wherever it is made."""
        torch.manual_seed(0)
        return nn.Sequential(*(self.block(self.width) for _ in range(self.n_blocks))).double()

    def batch(self, m: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of m microbatches."""
        seeded = torch.Generator().manual_seed(m)
        inputs, targets = torch.randn(
            2, m * self.rows, self.width, dtype=torch.float64, generator=seeded
        )
        return inputs, targets

    def one_process(self, m: int) -> tuple[float, dict[str, Tensor]]:
        """The loss of m microbatches in one process, and the gradients by name."""
        model, (inputs, targets) = self.model(), self.batch(m)
        loss = self.loss_fn(model(inputs), targets)
        loss.backward()
        return loss.item(), {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }

    def seat(
        self, rank: int, m: int, stages: Sequence[int] | None = None, n_stages: int | None = None
    ) -> Seat:
        """What ``rank`` has; of ``n_stages`` stages, one a rank unless given, it holds ``stages``."""
        model, n = self.model(), n_stages or dist.get_world_size()
        held: list[nn.Module] = [partition_model(model, n, index) for index in stages or [rank]]
        return Seat(
            held, *self.batch(m), m, self.loss_fn, Link((self.rows, self.width), torch.float64)
        )

    def on_rank(
        self,
        rank: int,
        step: Step,
        sizes: Sequence[int],
        demand: Demand | None = None,
        stagger_s: float = 0.0,
    ) -> list[Outcome]:
        """Run the step on this rank, one stage on each, once for each number of microbatches."""
        outcomes = []
        for m in sizes:
            if stagger_s:
                dist.barrier()
                time.sleep(stagger_s * rank)
            outcomes.append(self.outcome(rank, step, self.seat(rank, m)))
            if demand is not None:
                demand(rank, m, outcomes[-1].order)
        return outcomes

    def outcome(self, rank: int, step: Step, seat: Seat) -> Outcome:
        """Run the step on this rank. Refuses one that changes what it is given, or loses its last message."""
        losses: list[float] = []
        events: list[str] = []
        inputs = Memory()
        for stage in seat.stages:
            _watch(stage, events, inputs)
            for parameter in stage.parameters():
                parameter.grad = (
                    None if self.before is None else torch.full_like(parameter, self.before)
                )

        def noted_loss(output: Tensor, target: Tensor) -> Tensor:
            loss: Tensor = self.loss_fn(output, target)
            losses.append(float(loss.detach()))
            return loss

        weights = [[p.detach() for p in stage.parameters()] for stage in seat.stages]
        with (
            _received_from(rank - 1, inputs.note),
            unchanged(microbatches=seat.microbatches, targets=seat.parts, stage=weights),
            last_message_waited_for(rank, rank - 1),
        ):
            returned = self.call(step, seat._replace(loss_fn=noted_loss))
        gradients = {
            name: self._added(p) for stage in seat.stages for name, p in stage.named_parameters()
        }
        returned = returned.detach() if isinstance(returned, Tensor) else returned
        places = inputs.most_bytes // (self.rows * self.width * 8)
        return Outcome(returned, tuple(losses), gradients, "".join(events), places)

    def _added(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None or self.before is None:
            return gradient
        return None if bool((gradient == self.before).all()) else gradient - self.before

    def tried(
        self, answer: Answer, sizes: Mapping[int, Sequence[int]], demand: Demand | None = None
    ) -> Iterator[tuple[str, int, list[Outcome]]]:
        """Run an answer on each number of ranks; yield for each m where it was, m, and the outcome
        of each rank.

        ``demand(rank, m, order)`` may refuse on a rank what would leave the others waiting.

        Raises:
            Mistake: the answer does not end, or stops, told in terms of what a step sends.
        """
        for p, tries in sizes.items():
            try:
                ranks = answer.on_ranks(p, self.on_rank, tries, demand)
            except Stopped as stopped:
                raise explained_in_line(stopped) from None
            for index, m in enumerate(tries):
                where = f"On {p} rank{'s' * (p > 1)} with {m} microbatch{'es' * (m > 1)}"
                yield where, m, [rank[index] for rank in ranks]

    def ran(
        self, step: Step, n_ranks: int, m: int, stagger_s: float = 0.0, timeout_s: float = 60.0
    ) -> list[Outcome]:
        """Run a step on real ranks, each starting ``stagger_s`` after the one before; return the outcome of each."""
        return [
            each
            for [each] in on_ranks(
                n_ranks, self.on_rank, step, [m], None, stagger_s, timeout_s=timeout_s
            )
        ]

    def judge_gradients(
        self, where: str, ranks: Sequence[Outcome], m: int, missing: str, wrong: Cause
    ) -> None:
        """Refuse gradients that are not those of one process.

        Args:
            where: the sizes, as a message begins: ``"On 2 ranks with 4 microbatches"``.
            ranks: the outcome of the step on each rank.
            m: argument of `batch`.
            missing: the likely cause of a gradient that is None.
            wrong: the likely cause of gradients that differ, of `WrongGradients`.

        Raises:
            Mistake: with a list of the gradients that differ.
        """
        _, expected = self.one_process(m)
        differ = {}
        for rank, outcome in enumerate(ranks):
            for name, gradient in outcome.gradients.items():
                if gradient is None:
                    raise Mistake(f"{where}, `{name}` on rank {rank} has no gradient.", missing)
                if not same(gradient, expected[name]):
                    differ[rank, name] = gradient
        if not differ:
            return
        facts = WrongGradients(differ, expected, m, len(ranks), self.before or 0.0)
        raise Mistake(
            f"{where}, {len(differ)} of {len(expected)} gradients differ from those of one"
            " process.",
            why(wrong, facts),
            f"These differ:\n{_shown_by_rank(differ, ranks)}",
        )

    def compared(self, ranks: Sequence[tuple[Sequence[float], Gradients]], m: int) -> Findings:
        """Compare with one process the losses and the gradients of each rank."""
        loss, expected = self.one_process(m)
        found = tuple(
            {name: _finding(g, expected[name]) for name, g in gradients.items()}
            for _, gradients in ranks
        )
        losses = ranks[-1][0]
        return Findings(found, sum(losses) / len(losses) if losses else None, loss)


@dataclass(frozen=True)
class Findings:
    """A step's loss and gradients beside those of one process.

    Attributes:
        by_rank: for each rank its parameters, by name in the whole model, and what became of their
            gradients: ``"right"``, ``"none"`` or ``"wrong"``.
        value: the mean loss of the step, or what else ``what`` says; None if there was none.
        of_one: that of one process.
    """

    by_rank: tuple[Mapping[str, str], ...]
    value: float | None
    of_one: float
    what: str = "loss"

    @property
    def equal(self) -> bool:
        """Whether every gradient is that of one process."""
        return all(finding == "right" for found in self.by_rank for finding in found.values())

    def __str__(self) -> str:
        value = f"no {self.what}" if self.value is None else f"{self.what} {self.value:.6g}"
        rows = [f"  rank {rank}: {_counted(found)}" for rank, found in enumerate(self.by_rank)]
        return "\n".join([f"{value}, one process {self.of_one:.6g}; gradients:", *rows])


def _counted(found: Mapping[str, str]) -> str:
    kinds = list(found.values())
    counts = [f"{kinds.count(kind)} {kind}" for kind in ("right", "none", "wrong") if kind in kinds]
    wrong = [name for name, finding in found.items() if finding == "wrong"]
    listed = f" ({', '.join(wrong)})" if 0 < len(wrong) < len(found) else ""
    return ", ".join(counts) + listed


def same(found: Tensor | None, expected: Tensor, factor: float = 1.0) -> bool:
    """Whether a gradient is ``factor`` times the right one, but for rounding."""
    if found is None:
        return False
    return float((found - factor * expected).abs().max()) <= TOLERANCE * factor * float(
        expected.abs().max()
    )


def shifted(found: Tensor, right: Tensor) -> bool:
    """Whether each number is off by the same: what stood there before is lost, or scaled."""
    return float((found - right).std()) < 1e-9


def _factor(found: Tensor, right: Tensor) -> float:
    """Return the factor by which the right gradient comes nearest to the one found."""
    return float((found * right).sum() / right.square().sum())


@dataclass(frozen=True)
class WrongGradients:
    """The gradients of a step that differ from those of one process: facts for a table of causes.

    Attributes:
        wrong: {(rank, name): gradient}.
        expected: {name: gradient in one process}, the right ones included.
        m: microbatches.
        p: ranks.
        before: number that each `.grad` held before the step, in every entry.
    """

    wrong: Mapping[tuple[int, str], Tensor]
    expected: Mapping[str, Tensor]
    m: int
    p: int
    before: float

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each wrong gradient and the right one."""
        return [(gradient, self.expected[name]) for (_, name), gradient in self.wrong.items()]

    @property
    def factor(self) -> float:
        """The factor by which the first of them is too large."""
        return _factor(*self.pairs[0])

    def are_times(self, *factors: float) -> bool:
        """Whether each of them is the right one, times one of the factors."""
        return all(
            any(same(found, right, factor) for factor in factors) for found, right in self.pairs
        )

    def are_all(self) -> bool:
        """Whether no gradient is right."""
        return len(self.wrong) == len(self.expected)

    def all_are_times_m(self) -> bool:
        return self.are_all() and self.are_times(self.m)

    def all_are_an_mth(self) -> bool:
        return self.are_all() and self.are_times(1 / self.m)

    def are_powers_of_m(self) -> bool:
        """Whether 1/m entered on several ranks: the chain rule multiplies them."""
        return self.m > 1 and self.are_times(*(self.m**-k for k in range(1, self.p + 1)))

    def are_scaled(self) -> bool:
        """Whether each of them is the right one, times a factor of its own."""
        return all(same(found, right, _factor(found, right)) for found, right in self.pairs)

    def are_shifted(self) -> bool:
        return all(shifted(found, right) for found, right in self.pairs)

    def replace_what_was_there(self) -> bool:
        """Whether the step cleared `.grad`, and did not add to it."""
        return all(same(found + self.before, right) for found, right in self.pairs)

    def multiply_received_inputs(self) -> bool:
        """Whether they are all of weights that multiply an input received from another rank."""
        return all(rank > 0 and name.endswith(".0.weight") for rank, name in self.wrong)

    def spare_the_last_rank(self) -> bool:
        return all(rank < self.p - 1 for rank, _ in self.wrong)


def _finding(gradient: Tensor | None, expected: Tensor) -> str:
    return "none" if gradient is None else "right" if same(gradient, expected) else "wrong"


def _shown_by_rank(wrong: Mapping[tuple[int, str], Tensor], ranks: Sequence[Outcome]) -> str:
    """Return a line for each rank with the names of its wrong gradients."""
    lines = []
    for rank, outcome in enumerate(ranks):
        names = [name for name in outcome.gradients if (rank, name) in wrong]
        listed = ", ".join(names) or "none"
        if len(names) == len(outcome.gradients):
            listed = "all"
        lines.append(f"rank {rank}: {listed}")
    return "\n".join(lines)


class _SavedTensor:
    """What autograd keeps in place of a tensor: it lives for as long as the backward may still need it."""

    def __init__(self, tensor: Tensor, forward: int) -> None:
        self.tensor, self.forward = tensor, forward


class ForwardWatch:
    """Watches the forwards of a model and what autograd keeps of them.

    Attributes:
        most_rows: the most rows that one forward was given.
        most_forwards: the most forwards of which something was kept at once.
    """

    def __init__(self) -> None:
        self.most_rows = self.most_forwards = self._forward = 0
        self._saved: WeakSet[_SavedTensor] = WeakSet()

    def watching(self) -> AbstractContextManager[None]:
        """Watch what autograd keeps in the block."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def begin_forward(self, rows: int) -> None:
        self.most_rows, self._forward = max(self.most_rows, rows), self._forward + 1

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor, self._forward)
        self._saved.add(saved)
        self.most_forwards = max(self.most_forwards, len({each.forward for each in self._saved}))
        return saved


class Memory:
    """The memory of the tensors that were noted, for as long as it is there."""

    def __init__(self) -> None:
        self.most_bytes = 0
        # A storage keeps its Python object for as long as it lives.
        self._alive: WeakSet[torch.UntypedStorage] = WeakSet()

    def note(self, tensor: Tensor) -> None:
        self._alive.add(tensor.untyped_storage())
        self.most_bytes = max(self.most_bytes, sum(storage.nbytes() for storage in self._alive))


def _watch(stage: nn.Module, events: list[str], inputs: Memory) -> None:
    """Note the events and the inputs of a stage. Functions, which a copy of the stage shares with it."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.note(args[0])

    def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        events.append("F")
        if output.requires_grad:
            output.register_hook(lambda _: events.append("B"))

    stage.register_forward_pre_hook(before)
    stage.register_forward_hook(after)
    # A hook of the tensor, which `torch.autograd.grad` calls, too.
    next(stage.parameters()).register_hook(lambda _: events.append("W"))


@contextmanager
def _received_from(source: int, note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``note`` with each tensor into which a message of rank ``source`` is received in the block."""
    recv = dist.ProcessGroup.recv

    def noted(self: Any, tensors: list[Tensor], peer: int, *args: Any, **kwargs: Any) -> Any:
        if peer == source:
            for tensor in tensors:
                note(tensor)
        return recv(self, tensors, peer, *args, **kwargs)

    with patch.object(dist.ProcessGroup, "recv", noted):
        yield
