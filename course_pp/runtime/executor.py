"""The actions of one rank, one after another: receive, compute, send; or the same failure on every rank."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from course_pp.runtime.agreement import Agreement
from course_pp.runtime.batch import Cut
from course_pp.runtime.clocks import wait_for
from course_pp.runtime.emulation import Emulator
from course_pp.runtime.mailbox import Mailbox, MessageLost, Origin, PeerFailed
from course_pp.runtime.memory import Hold
from course_pp.runtime.messages import Content, Message, RankPlan, Read, Step, reads_of, writes_of
from course_pp.runtime.payload import map_plain, plain_tensors
from course_pp.runtime.stage import Gradients, Stage
from course_pp.runtime.versions import VersionedStage
from course_pp.runtime.wire import Wire
from course_pp.schedule import Action, Overlap, Product, Schedule
from course_pp.schedule.precedence import round_of
from course_pp.step.failure import StepFailed
from course_pp.step.loss import Share
from course_pp.step.ties import add_up

T = TypeVar("T")


def failure(origin: Origin, told: str = "") -> StepFailed:
    """Return the exception of a failure that began at ``origin``; ``told`` says how another rank told this one."""
    message = f"{origin}\n{told}" if told else str(origin)
    action = None if isinstance(origin.at, str) else origin.at
    return StepFailed(message, origin.rank, origin.what, action, bool(told))


@dataclass(slots=True)
class StepState:
    """The values that the actions of one step on one rank hand to each other.

    Attributes:
        given: the microbatches that the caller gave.
        loss: where the last stage is, a function from a microbatch's number and its output to its
            share of the loss; None if no loss is asked for.
        weights: where the last stage is, the weight of each microbatch in the batch, (n,) float64.
        means: where the last stage is, if ``shares`` are microbatches' own means: the weight of
            each in the mean loss of the batch, (n,) float64.
        products: results of actions that other actions need, here or on other ranks.
        shares: the losses so far, by microbatch.
        outputs: the last stage's outputs by microbatch, if no loss is made of them.
        held: the recorder's entries for values that wait here for a stage.
    """

    given: Cut
    loss: Callable[[int, Any], Share] | None = None
    weights: Tensor | None = None
    means: Tensor | None = None
    products: dict[Content, Any] = field(default_factory=dict)
    shares: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    held: dict[Content, list[Hold]] = field(default_factory=dict)


_Call = Callable[[StepState], None]
"""Part of an action, with all but the step's values worked out."""


class Executor:
    """Carries out one rank's part of ``plans``, worked out once as a flat list of calls for each
    action.

    Args:
        schedule: that of the agreement, or its forwards alone.
        weights: of the stages that update their own.

    Attributes:
        current: the action in progress; None before the first; ``"the end of the step"`` after the
            last.
        failed: how the last step failed; None while all is well. An executor that failed cannot go
            on.
    """

    def __init__(
        self,
        agreement: Agreement,
        schedule: Schedule,
        plans: Sequence[RankPlan],
        wire: Wire,
        stages: Mapping[int, Stage],
        weights: Mapping[int, VersionedStage],
    ) -> None:
        options, rank, device = agreement.options, agreement.rank, agreement.device
        self.plan = plan = plans[rank]
        self.current: Action | Overlap | str | None = None
        self.failed: Origin | None = None
        self._schedule, self._stages, self._weights, self._device = (
            schedule,
            stages,
            weights,
            device,
        )
        self._recorder, self._meter = options.recorder, options.meter
        if self._recorder is not None:
            self._recorder.run_on(device)
            self._recorder.edges, self._recorder.feedback = schedule.edges, schedule.feedback
        self.mailbox = Mailbox(plan, wire, device, options.timeout, self._meter)
        self._emulator = None
        if options.cluster is not None:
            self._emulator = Emulator(options.cluster, schedule, rank, partial(wait_for, device))
        self._last = schedule.n_stages - 1
        self.trains = any(part.kind != "F" for part in schedule.parts)
        self._split = {(part.stage, part.microbatch) for part in schedule.parts if part.kind == "I"}
        self._leaving = {message.content for row in plan.outgoing.values() for message in row}
        here = [part for step in plan.steps for part in step.action.parts if part.kind == "F"]
        written = (
            write for part in here for write in writes_of(schedule, part.stage, part.microbatch)
        )
        self._read_here = {write.value for write in written if write.is_read_here}
        self._turns = [(step.action, self._calls_of(step)) for step in plan.steps]

    def perform(self, step: Callable[[], T]) -> T:
        """Return what ``step`` returns; raise StepFailed on every rank for whatever it raises on one."""
        self.current = None
        try:
            self.mailbox.begin()
            found = step()
            self.mailbox.end()
        except PeerFailed as error:
            self._fail(error.origin, lost=False)
            told = f"(rank {self.plan.rank} was told at {self.current})"
            raise failure(error.origin, told) from None
        except Exception as error:
            lost = isinstance(error, MessageLost)
            origin = self._origin(str(error) if lost else f"{type(error).__name__}: {error}")
            self._fail(origin, lost)
            if self.current is None:
                raise
            raise failure(origin) from error
        except BaseException:
            self.failed = self._origin("interrupted")
            raise
        return found

    def run(self, state: StepState) -> None:
        """Do every action of this rank."""
        if self._emulator is not None:
            self._emulator.begin()
        if state.weights is not None:
            self.mailbox.weights.update(
                enumerate(state.weights.view(torch.uint8).view(len(state.weights), -1))
            )
        for action, calls in self._turns:
            self.current = action
            for call in calls:
                call(state)
        self.current = "the end of the step"
        if self._emulator is not None and self._recorder is not None:
            self._recorder.add_emulated(self._emulator.done, self._emulator.received)

    def exchange(self, content: str, mine: Callable[[int], Any]) -> dict[int, Any]:
        """Send ``mine(rank)`` to every rank that the plan has for ``content``, and return what these send, by rank."""
        for target, message in _named(content, self.plan.outgoing).items():
            self.mailbox.send(message, mine(target))
        incoming = _named(content, self.plan.incoming)
        return {source: self.mailbox.take(message) for source, message in incoming.items()}

    def tell_everyone(self, mine: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine what all ranks have, two by two, and return it; when one rank returns, all ranks are through."""
        for message in _named("report", self.plan.incoming).values():
            mine = combine(mine, self.mailbox.take(message))
        for content in ("report", "answer"):
            for message in _named(content, self.plan.outgoing).values():
                self.mailbox.send(message, mine)
        for message in _named("answer", self.plan.incoming).values():
            mine = self.mailbox.take(message)
        return mine

    def _fail(self, origin: Origin, lost: bool) -> None:
        self.failed = origin
        self.mailbox.fail(origin, lost)
        for stage in self._stages.values():
            stage.clear()

    def _origin(self, what: str) -> Origin:
        return Origin(
            self.plan.rank,
            "before the first action" if self.current is None else self.current,
            what,
        )

    def _calls_of(self, step: Step) -> tuple[_Call, ...]:
        """Return all that an action takes, in order: receive, free what has arrived elsewhere, compute, send."""
        calls = [self._receive(message) for message in step.receives]
        if step.arrived:
            calls.append(lambda _: self.mailbox.arrived(step.arrived))
        write = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weight,
            "U": self._update,
        }
        calls += self._timed(step.action, [write[part.kind](part) for part in step.action.parts])
        for number, message in enumerate(step.sends, 1):
            again = any(other.content == message.content for other in step.sends[number:])
            calls.append(self._send(message, again or message.content in self._read_here))
        return tuple(calls)

    def _timed(self, action: Action | Overlap, work: list[_Call]) -> list[_Call]:
        """Return ``work`` on the clock of the emulated cluster or the recorder, if there is one."""
        span: Callable[..., AbstractContextManager[None]]
        if self._emulator is not None:
            span = self._emulator.action
        elif self._recorder is not None:
            span = self._recorder.span
        else:
            return work

        def timed(state: StepState) -> None:
            with span(action):
                for call in work:
                    call(state)

        return [timed]

    def _receive(self, message: Message) -> _Call:
        content, take, emulator, recorder = (
            message.content,
            self.mailbox.take,
            self._emulator,
            self._recorder,
        )
        if emulator is not None:

            def receive_stamped(state: StepState) -> None:
                state.products[content] = emulator.opened(message, take(message))

            return receive_stamped

        def receive(state: StepState) -> None:
            state.products[content] = take(message)

        if recorder is None or isinstance(content, str):
            return receive

        def receive_recorded(state: StepState) -> None:
            with recorder.receiving(content):
                receive(state)

        return receive_recorded

    def _send(self, message: Message, is_needed_again: bool) -> _Call:
        content, mailbox, emulator = message.content, self.mailbox, self._emulator

        def send(state: StepState) -> None:
            # Bound to no name here, which would keep an output alive until the next is sent.
            take = state.products.__getitem__ if is_needed_again else state.products.pop
            mailbox.send(
                message, take(content) if emulator is None else emulator.stamped(take(content))
            )

        return send

    def _forward(self, action: Action) -> _Call:
        stage, microbatch = action.stage, action.microbatch
        worker, trains, split = self._stages[stage], self.trains, (stage, microbatch) in self._split
        before, product = (
            Product("activation", stage - 1, microbatch),
            Product("activation", stage, microbatch),
        )
        is_last, leaves = stage == self._last, product in self._leaving
        reads, writes = (
            reads_of(self._schedule, stage, microbatch),
            writes_of(self._schedule, stage, microbatch),
        )
        read_again, done = (
            [each.value for each in reads if not each.is_last],
            [r.value for r in reads if r.is_last],
        )
        read_later = [write.value for write in writes if write.is_read_here]
        # Another value may be the output itself, which the next stage may change in place.
        kept = {
            write.value: _as_if_copied if write.is_read_here or not leaves else _as_if_received
            for write in writes
        }

        def forward(state: StepState) -> None:
            value = state.products.pop(before) if stage else state.given.inputs[microbatch]
            loss = partial(state.loss, microbatch) if is_last and state.loss is not None else None
            self._count(state, read_again)
            read = {each.name: _taken(state.products, each) for each in reads}
            given = state.given.kwargs[microbatch] if state.given.kwargs else {}
            if trains:
                output, values = worker.forward(microbatch, value, loss, split, read, given)
            else:
                output, values = worker.evaluate(value, loss, read, given)
            for write in writes:
                state.products[write.value] = map_plain(kept[write.value], values[write.name])
            self._count(state, read_later)
            for value in done:
                for hold in state.held.pop(value, ()):
                    hold.release()
            if is_last and loss is None:
                state.outputs[microbatch] = map_plain(Tensor.detach, output)
                return
            if is_last:
                state.shares[microbatch] = output.product()
                return
            if not leaves:
                output = map_plain(_as_if_received, output)
            state.products[product] = output

        return forward

    def _count(self, state: StepState, values: Sequence[Product]) -> None:
        """Count values that wait for a stage of this rank; the stages themselves count what they keep."""
        meter = self._meter
        if meter is None:
            return
        for value in values:
            if value not in state.held:
                state.held[value] = [
                    meter.hold(tensor) for tensor in plain_tensors(state.products[value])
                ]

    def _backward(self, action: Action) -> _Call:
        of_input, of_weights = self._backward_input(action), self._backward_weight(action)

        def backward(state: StepState) -> None:
            of_input(state)
            of_weights(state)

        return backward

    def _backward_input(self, action: Action) -> _Call:
        stage, microbatch = action.stage, action.microbatch
        worker, is_last, mailbox = self._stages[stage], stage == self._last, self.mailbox
        after, product = (
            Product("gradient", stage + 1, microbatch),
            Product("gradient", stage, microbatch),
        )
        reads, writes = (
            reads_of(self._schedule, stage, microbatch),
            writes_of(self._schedule, stage, microbatch),
        )

        def weight() -> Tensor:
            return mailbox.weights[microbatch].clone().view(torch.float64)[0]

        def backward_input(state: StepState) -> None:
            products = state.products
            of_output = None if is_last else products.pop(after)
            of_values = [
                _added_up([products.pop(each) for each in write.gradients]) for write in writes
            ]
            of_input, *of_read = worker.backward_input(microbatch, of_output, of_values, weight)
            if stage:
                products[product] = of_input
            for read, gradients in zip(reads, of_read, strict=True):
                earlier = products.get(read.gradient)
                products[read.gradient] = (
                    gradients if earlier is None else _added_up([earlier, gradients])
                )

        return backward_input

    def _backward_weight(self, action: Action) -> _Call:
        microbatch, worker, weights = (
            action.microbatch,
            self._stages[action.stage],
            self._weights.get(action.stage),
        )
        product = Product("weight gradient", action.stage, microbatch)
        leaves = product in self._leaving

        def backward_weight(state: StepState) -> None:
            worker.backward_weight(microbatch)
            if leaves:
                state.products[product] = [] if weights is None else weights.gradients

        return backward_weight

    def _update(self, action: Action) -> _Call:
        """Update with what waits here, and what the other replicas have sent, in the order of microbatches."""
        weights, replicas = (
            self._weights.get(action.stage),
            len(self._schedule.placement[action.stage]),
        )
        mates = round_of(action.microbatch, replicas, self._schedule.n_microbatches)
        products = [Product("weight gradient", action.stage, mate) for mate in mates]

        def update(state: StepState) -> None:
            parts = [state.products.pop(product, None) for product in products]
            if weights is not None:
                own = weights.gradients
                terms = zip(*(own if part is None else part for part in parts), strict=True)
                weights.update([add_up(each) for each in terms])

        return update


def _taken(products: dict[Content, Any], read: Read) -> Any:
    """Return a value for one of its readers: leaves of its own, as each goes backward by itself."""
    if read.is_last:
        return map_plain(_as_if_received, products.pop(read.value))
    return map_plain(_as_if_copied, products[read.value])


def _added_up(several: Sequence[Gradients]) -> Gradients:
    """Return the sum of the gradients of one value from several readers, in their order."""
    return (
        several[0]
        if len(several) == 1
        else tuple(add_up(terms) for terms in zip(*several, strict=True))
    )


def _as_if_received(tensor: Tensor) -> Tensor:
    """Return a leaf, so that a later stage's graph ends there although it is on the same rank."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _as_if_copied(tensor: Tensor) -> Tensor:
    """Return the same where others still need the value: a copy, unless autograd refuses changes in place."""
    return _as_if_received(tensor) if tensor.requires_grad else tensor.detach().clone()


def _named(content: str, channels: Mapping[int, Sequence[Message]]) -> dict[int, Message]:
    """Return the messages of that content, by the rank at the other end."""
    return {
        peer: message
        for peer, row in channels.items()
        for message in row
        if message.content == content
    }
