"""A bench on which hand-written steps are tried: a small model, its batch, and real ranks.

A step is compared with one process. Graders, labs and clinics of all notebooks use it.
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

# A factor such as 1/m may be rounded to float32: that is no mistake.
TOLERANCE = 1e-6
Step = Callable[..., Any]
Demand = Callable[[int, int, str], None]
Gradients = Mapping[str, Tensor | None]


class LopsidedLoss(nn.Module):
    """A mean over rows, like `nn.MSELoss`, in which an error counts more where the target is large.

    So the loss changes when output and target change places.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square() * target.exp()).mean()


class Seat(NamedTuple):
    """The arguments of a step on one rank.

    Attributes:
        stages: stages of this rank, in the order of the model; one, unless there are chunks.
        inputs: inputs of the whole batch.
        targets: targets of the whole batch.
        m: microbatches.
        loss_fn: loss of a microbatch, a mean over its rows.
        link: messages to and from the neighbours.
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
    """The result of a step on one rank.

    Attributes:
        returned: value that the step returned.
        losses: values of the loss function on this rank, call by call.
        gradients: {name in the whole model: gradient that the step added, None for no gradient}.
        events: ``F`` where a forward ended, ``B`` where a backward through the stage's output
            began, ``W`` where the gradient of its first weight was computed: ``"FFBWFBW"``.
        places: the largest number of the stage's inputs that had memory at once.
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
        changes = [{"F": 1, "B": -1}[kind] for kind in self.order]
        return max(accumulate(changes, initial=0))


def two_layers(width: int) -> nn.Module:
    """A block with a tanh between its layers."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def with_norm(width: int) -> nn.Module:
    """A block that ends in a norm, so that activations keep their size from block to block."""
    wide = 4 * width
    return nn.Sequential(
        nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width), nn.LayerNorm(width)
    )


@dataclass(frozen=True)
class Bench:
    """A model of equal blocks in float64, its batch, and the way in which a notebook calls a step.

    Attributes:
        call: ``call(step, seat)`` calls a step on a rank.
        loss_fn: loss of a microbatch, a mean over its rows.
        width: width of every activation.
        block: ``block(width)`` makes a block of the model.
        rows: rows of a microbatch.
        n_blocks: blocks of the model, shared out over the stages as evenly as can be.
        before: number that every entry of each `.grad` holds before a step, and to which the step
            has to add; None for no gradient.
    """

    call: Callable[[Step, Seat], Any]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = field(default_factory=LopsidedLoss)
    width: int = 4
    block: Callable[[int], nn.Module] = two_layers
    rows: int = 3
    n_blocks: int = 4
    before: float | None = None

    def model(self) -> nn.Sequential:
        """Return the whole model, the same in every process."""
        torch.manual_seed(0)
        blocks = [self.block(self.width) for _ in range(self.n_blocks)]
        return nn.Sequential(*blocks).double()

    def batch(self, m: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of m microbatches."""
        seeded = torch.Generator().manual_seed(m)
        inputs, targets = torch.randn(
            2, m * self.rows, self.width, dtype=torch.float64, generator=seeded
        )
        return inputs, targets

    def one_process(self, m: int) -> tuple[float, dict[str, Tensor]]:
        """Return the loss of m microbatches in one process, and the gradients by name."""
        model = self.model()
        inputs, targets = self.batch(m)
        loss = self.loss_fn(model(inputs), targets)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return loss.item(), gradients

    def seat(
        self, rank: int, m: int, stages: Sequence[int] | None = None, n_stages: int | None = None
    ) -> Seat:
        """Return the arguments of a step on ``rank``.

        Args:
            rank: this rank.
            m: microbatches.
            stages: stages that the rank holds; the one of its own number if None.
            n_stages: stages of the model; one a rank if None.
        """
        model = self.model()
        n = n_stages or dist.get_world_size()
        held: list[nn.Module] = [partition_model(model, n, index) for index in stages or [rank]]
        inputs, targets = self.batch(m)
        link = Link((self.rows, self.width), torch.float64)
        return Seat(held, inputs, targets, m=m, loss_fn=self.loss_fn, link=link)

    def on_rank(
        self,
        rank: int,
        step: Step,
        sizes: Sequence[int],
        demand: Demand | None = None,
        stagger_s: float = 0.0,
    ) -> list[Outcome]:
        """Run the step on this rank, which has one stage, once for each number of microbatches."""
        outcomes = []
        for m in sizes:
            # A late rank shows faults that a fast one hides, such as writing to memory too early.
            if stagger_s:
                dist.barrier()
                time.sleep(stagger_s * rank)
            outcomes.append(self.outcome(rank, step, self.seat(rank, m)))
            if demand is not None:
                demand(rank, m, outcomes[-1].order)
        return outcomes

    def outcome(self, rank: int, step: Step, seat: Seat) -> Outcome:
        """Run the step on this rank.

        Raises:
            Mistake: the step changes its arguments, or may lose its last message.
        """
        losses: list[float] = []
        events: list[str] = []
        inputs = Memory()
        for stage in seat.stages:
            _watch(stage, events, inputs)
            for parameter in stage.parameters():
                parameter.grad = None
                if self.before is not None:
                    parameter.grad = torch.full_like(parameter, self.before)

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

        gradients = {}
        for stage in seat.stages:
            for name, parameter in stage.named_parameters():
                gradients[name] = self._added(parameter)
        # A graph cannot be sent to the process that judges.
        if isinstance(returned, Tensor):
            returned = returned.detach()
        return Outcome(
            returned,
            tuple(losses),
            gradients=gradients,
            events="".join(events),
            places=inputs.most_bytes // (self.rows * self.width * 8),
        )

    def _added(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None or self.before is None:
            return gradient
        if bool((gradient == self.before).all()):
            return None
        return gradient - self.before

    def tried(
        self, answer: Answer, sizes: Mapping[int, Sequence[int]], demand: Demand | None = None
    ) -> Iterator[tuple[str, int, list[Outcome]]]:
        """Run an answer on each number of ranks.

        Args:
            answer: a step.
            sizes: {number of ranks: numbers of microbatches}.
            demand: ``demand(rank, m, order)`` may raise `Mistake` on a rank whose order would leave
                the other ranks waiting.

        Yields:
            The sizes as a message begins, m, and the outcome of each rank.

        Raises:
            Mistake: the answer hangs or stops. The cause speaks of the messages of a step.
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
        """Run a step on real ranks; return the outcome of each.

        Each rank starts ``stagger_s`` seconds after the rank before it.
        """
        ranks = on_ranks(n_ranks, self.on_rank, step, [m], None, stagger_s, timeout_s=timeout_s)
        return [outcome for [outcome] in ranks]

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
        """Compare the losses and the gradients of each rank with those of one process."""
        right_loss, expected = self.one_process(m)
        found = []
        for _, gradients in ranks:
            found.append({name: _finding(g, expected[name]) for name, g in gradients.items()})
        losses, _ = ranks[-1]
        mean = sum(losses) / len(losses) if losses else None
        return Findings(tuple(found), mean, right_loss)


@dataclass(frozen=True)
class Findings:
    """A step's loss and gradients beside those of one process.

    Attributes:
        by_rank: for each rank {name in the whole model: ``"right"``, ``"none"`` or ``"wrong"``}.
        value: value of the step, the mean loss unless ``what`` names another; None if it has none.
        of_one: value of one process.
        what: name of the value.
    """

    by_rank: tuple[Mapping[str, str], ...]
    value: float | None
    of_one: float
    what: str = "loss"

    @property
    def equal(self) -> bool:
        """Whether every gradient is that of one process."""
        return all(set(found.values()) <= {"right"} for found in self.by_rank)

    def __str__(self) -> str:
        value = f"no {self.what}" if self.value is None else f"{self.what} {self.value:.6g}"
        rows = [f"  rank {rank}: {_counted(found)}" for rank, found in enumerate(self.by_rank)]
        return "\n".join([f"{value}, one process {self.of_one:.6g}; gradients:", *rows])


def _counted(found: Mapping[str, str]) -> str:
    kinds = list(found.values())
    counts = [f"{kinds.count(kind)} {kind}" for kind in ("right", "none", "wrong") if kind in kinds]
    text = ", ".join(counts)
    wrong = [name for name, finding in found.items() if finding == "wrong"]
    if 0 < len(wrong) < len(found):
        text += f" ({', '.join(wrong)})"
    return text


def same(found: Tensor | None, expected: Tensor, factor: float = 1.0) -> bool:
    """Whether a gradient is ``factor`` times the right one, except for rounding."""
    if found is None:
        return False
    away = float((found - factor * expected).abs().max())
    return away <= TOLERANCE * factor * float(expected.abs().max())


def shifted(found: Tensor, right: Tensor) -> bool:
    """Whether all numbers are off by the same: the value from before is lost, or scaled."""
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
        """The factor by which the first wrong gradient is too large."""
        return _factor(*self.pairs[0])

    def are_times(self, *factors: float) -> bool:
        """Whether each wrong gradient is the right one, times one of the factors."""

        def is_times_one(found: Tensor, right: Tensor) -> bool:
            return any(same(found, right, factor) for factor in factors)

        return all(is_times_one(*pair) for pair in self.pairs)

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
        """Whether each wrong gradient is the right one, times a factor of its own."""
        return all(same(found, right, _factor(found, right)) for found, right in self.pairs)

    def are_shifted(self) -> bool:
        return all(shifted(found, right) for found, right in self.pairs)

    def replace_what_was_there(self) -> bool:
        """Whether the step cleared `.grad`, and did not add to it."""
        return all(same(found + self.before, right) for found, right in self.pairs)

    def multiply_received_inputs(self) -> bool:
        """Whether all wrong ones belong to weights that multiply an input from another rank."""
        return all(rank > 0 and name.endswith(".0.weight") for rank, name in self.wrong)

    def spare_the_last_rank(self) -> bool:
        return all(rank < self.p - 1 for rank, _ in self.wrong)


def _finding(gradient: Tensor | None, expected: Tensor) -> str:
    if gradient is None:
        return "none"
    return "right" if same(gradient, expected) else "wrong"


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


class _KeptForBackward:
    """An object that autograd keeps in place of a tensor as long as a backward may need it."""

    def __init__(self, tensor: Tensor, forward: int) -> None:
        self.tensor = tensor
        self.forward = forward


class ForwardWatch:
    """Watches the forwards of a model and the tensors that autograd keeps of them.

    Attributes:
        most_rows: the most rows that one forward was given.
        most_forwards: the most forwards of which autograd kept a tensor at once.
    """

    def __init__(self) -> None:
        self.most_rows = 0
        self.most_forwards = 0
        self._forward = 0
        # Weak: autograd alone decides how long a tensor lives.
        self._saved: WeakSet[_KeptForBackward] = WeakSet()

    def watching(self) -> AbstractContextManager[None]:
        """Watch the tensors that autograd keeps in the block."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def begin_forward(self, rows: int) -> None:
        self.most_rows = max(self.most_rows, rows)
        self._forward += 1

    def _pack(self, tensor: Tensor) -> _KeptForBackward:
        saved = _KeptForBackward(tensor, self._forward)
        self._saved.add(saved)
        forwards = {each.forward for each in self._saved}
        self.most_forwards = max(self.most_forwards, len(forwards))
        return saved


class Memory:
    """Counts the memory of the tensors that it was told of, for as long as that memory lives."""

    def __init__(self) -> None:
        self.most_bytes = 0
        # A storage keeps its Python object for as long as it lives.
        self._alive: WeakSet[torch.UntypedStorage] = WeakSet()

    def note(self, tensor: Tensor) -> None:
        self._alive.add(tensor.untyped_storage())
        n_bytes = sum(storage.nbytes() for storage in self._alive)
        self.most_bytes = max(self.most_bytes, n_bytes)


def _watch(stage: nn.Module, events: list[str], inputs: Memory) -> None:
    """Note the events and the inputs of a stage.

    The hooks are functions, and not methods of an object: a deep copy of the stage shares them.
    """

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.note(args[0])

    def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        events.append("F")
        if output.requires_grad:
            output.register_hook(lambda _: events.append("B"))

    stage.register_forward_pre_hook(before)
    stage.register_forward_hook(after)
    # A hook of the tensor, because `torch.autograd.grad` calls no other.
    next(stage.parameters()).register_hook(lambda _: events.append("W"))


@contextmanager
def _received_from(source: int, note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``note`` with each tensor that receives a message of rank ``source`` in the block."""
    # Every way to receive ends in this method, also those of `Link` and of the learner's own lines.
    recv = dist.ProcessGroup.recv

    def noted(self: Any, tensors: list[Tensor], peer: int, *args: Any, **kwargs: Any) -> Any:
        if peer == source:
            for tensor in tensors:
                note(tensor)
        return recv(self, tensors, peer, *args, **kwargs)

    with patch.object(dist.ProcessGroup, "recv", noted):
        yield
