"""The actions of one rank, one after another: receive, compute, send.

If an action fails, the step fails on every rank with the same account.
"""

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
    """Return the exception of a failure that began at ``origin``.

    Args:
        told: a line about how this rank learned of a failure elsewhere; "" if it began here.
    """
    message = f"{origin}\n{told}" if told else str(origin)
    action = None if isinstance(origin.at, str) else origin.at
    return StepFailed(
        message, origin.rank, what=origin.what, action=action, began_elsewhere=bool(told)
    )


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
    """Carries out one rank's part of ``plans``.

    Each action is worked out once, as a list of calls, so that a step costs Python little time.

    Args:
        schedule: the agreement's schedule, or its forwards alone.
        weights: the versions of each stage that updates its own weights.

    Attributes:
        current: the action in progress; None before the first; ``"the end of the step"`` after the
            last.
        failed: the origin of the last step's failure, or None. An executor that failed cannot go
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
        options = agreement.options
        self.plan = plan = plans[agreement.rank]
        self.current: Action | Overlap | str | None = None
        self.failed: Origin | None = None
        self._schedule = schedule
        self._stages = stages
        self._weights = weights
        self._device = device = agreement.device
        self._meter = options.meter
        self._recorder = options.recorder
        if self._recorder is not None:
            self._recorder.run_on(device)
            self._recorder.edges = schedule.edges
            self._recorder.feedback = schedule.feedback
        self.mailbox = Mailbox(plan, wire, device, options.timeout, self._meter)
        self._emulator = None
        if options.cluster is not None:
            wait = partial(wait_for, device)
            self._emulator = Emulator(options.cluster, schedule, agreement.rank, wait)

        self._last = schedule.n_stages - 1
        self.trains = any(part.kind != "F" for part in schedule.parts)
        self._split = {(part.stage, part.microbatch) for part in schedule.parts if part.kind == "I"}
        # A product that is sent may keep its graph: the receiver gets a copy. Any other product is
        # read on this rank, where graphs must end between stages.
        self._leaving = {message.content for row in plan.outgoing.values() for message in row}
        self._read_here: set[Content] = set()
        for step in plan.steps:
            for part in step.action.parts:
                if part.kind == "F":
                    for write in writes_of(schedule, part.stage, part.microbatch):
                        if write.is_read_here:
                            self._read_here.add(write.value)
        self._turns = [(step.action, self._calls_of(step)) for step in plan.steps]

    def perform(self, step: Callable[[], T]) -> T:
        """Return what ``step`` returns; if it raises on one rank, raise StepFailed on every rank.

        A rank that refuses its arguments, before its first action, raises its own exception.
        """
        self.current = None
        try:
            self.mailbox.begin()
            found = step()
            self.mailbox.end()
        except PeerFailed as error:
            self._fail(error.origin, lost=False)
            told = f"(rank {self.plan.rank} was told at {self.current})"
            # Without a cause: the traceback that helps is the one on the rank of the origin.
            raise failure(error.origin, told) from None
        except Exception as error:
            lost = isinstance(error, MessageLost)
            # A lost message is described by the mailbox, whose class would tell a reader nothing.
            origin = self._origin(str(error) if lost else f"{type(error).__name__}: {error}")
            self._fail(origin, lost)
            if self.current is None:
                raise
            raise failure(origin) from error
        except BaseException:
            # An interrupt may come in the middle of a message, so nothing more is sent.
            self.failed = self._origin("interrupted")
            raise
        return found

    def run(self, state: StepState) -> None:
        """Do every action of this rank."""
        if self._emulator is not None:
            self._emulator.begin()
        if state.weights is not None:
            # As bytes, because the mailbox puts them into trailers of messages.
            in_bytes = state.weights.view(torch.uint8).view(len(state.weights), -1)
            self.mailbox.weights.update(enumerate(in_bytes))
        for action, calls in self._turns:
            self.current = action
            for call in calls:
                call(state)
        self.current = "the end of the step"
        if self._emulator is not None and self._recorder is not None:
            self._recorder.add_emulated(self._emulator.done, self._emulator.received)

    def exchange(self, content: str, mine: Callable[[int], Any]) -> dict[int, Any]:
        """Exchange ``content`` with every rank with which the plan does.

        Args:
            mine: a function from a rank to the value for it.

        Returns:
            The values that came, by rank.
        """
        for target, message in _named(content, self.plan.outgoing).items():
            self.mailbox.send(message, mine(target))
        incoming = _named(content, self.plan.incoming)
        return {source: self.mailbox.take(message) for source, message in incoming.items()}

    def tell_everyone(self, mine: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine the values ``mine`` of all ranks, two by two, and return the result.

        When one rank returns, all ranks have finished their actions.
        """
        # The root receives every report and sends an answer to each rank. Another rank sends its
        # report and receives the answer.
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
        # Activations and graphs of this step are of no use any more.
        for stage in self._stages.values():
            stage.clear()

    def _origin(self, what: str) -> Origin:
        at = "before the first action" if self.current is None else self.current
        return Origin(self.plan.rank, at, what)

    def _calls_of(self, step: Step) -> tuple[_Call, ...]:
        """Return the calls of an action: receive, free buffers of arrived sends, compute, send."""
        calls = [self._receive(message) for message in step.receives]
        if step.arrived:
            calls.append(lambda _: self.mailbox.arrived(step.arrived))
        call_of = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weight,
            "U": self._update,
        }
        work = [call_of[part.kind](part) for part in step.action.parts]
        calls += self._timed(step.action, work)
        for number, message in enumerate(step.sends, 1):
            # A value with several readers goes to several ranks, one message each.
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
        content = message.content
        take = self.mailbox.take
        emulator, recorder = self._emulator, self._recorder
        if emulator is not None:

            def receive_stamped(state: StepState) -> None:
                state.products[content] = emulator.opened(message, take(message))

            return receive_stamped

        def receive(state: StepState) -> None:
            state.products[content] = take(message)

        # A timeline shows waits for products alone, not for the exchanges at the end.
        if recorder is None or isinstance(content, str):
            return receive

        def receive_recorded(state: StepState) -> None:
            with recorder.receiving(content):
                receive(state)

        return receive_recorded

    def _send(self, message: Message, is_needed_again: bool) -> _Call:
        content = message.content
        mailbox = self.mailbox
        emulator = self._emulator

        def send(state: StepState) -> None:
            # The value is bound to no name here, which would keep an output alive too long.
            take = state.products.__getitem__ if is_needed_again else state.products.pop
            if emulator is None:
                mailbox.send(message, take(content))
            else:
                mailbox.send(message, emulator.stamped(take(content)))

        return send

    def _forward(self, action: Action) -> _Call:
        stage, microbatch = action.stage, action.microbatch
        worker = self._stages[stage]
        trains = self.trains
        split = (stage, microbatch) in self._split
        is_last = stage == self._last
        before = Product("activation", stage - 1, microbatch)
        product = Product("activation", stage, microbatch)
        leaves = product in self._leaving

        reads = reads_of(self._schedule, stage, microbatch)
        read_again = [read.value for read in reads if not read.is_last]
        read_for_the_last_time = [read.value for read in reads if read.is_last]
        writes = writes_of(self._schedule, stage, microbatch)
        read_later = [write.value for write in writes if write.is_read_here]
        keep: dict[Product, Callable[[Tensor], Tensor]] = {}
        for write in writes:
            # A value may be the output itself, which the next stage may change in place.
            is_safe = leaves and not write.is_read_here
            keep[write.value] = _as_if_received if is_safe else _as_if_copied

        def forward(state: StepState) -> None:
            value = state.products.pop(before) if stage else state.given.inputs[microbatch]
            loss = None
            if is_last and state.loss is not None:
                loss = partial(state.loss, microbatch)
            self._count(state, read_again)
            read = {each.name: _taken(state.products, each) for each in reads}
            given = state.given.kwargs[microbatch] if state.given.kwargs else {}
            if trains:
                output, values = worker.forward(
                    microbatch, value, loss=loss, split=split, read=read, given=given
                )
            else:
                output, values = worker.evaluate(value, loss=loss, read=read, given=given)

            for write in writes:
                state.products[write.value] = map_plain(keep[write.value], values[write.name])
            self._count(state, read_later)
            for value in read_for_the_last_time:
                for hold in state.held.pop(value, ()):
                    hold.release()

            if is_last and loss is None:
                state.outputs[microbatch] = map_plain(Tensor.detach, output)
            elif is_last:
                state.shares[microbatch] = output.product()
            elif leaves:
                state.products[product] = output
            else:
                state.products[product] = map_plain(_as_if_received, output)

        return forward

    def _count(self, state: StepState, values: Sequence[Product]) -> None:
        """Count values that wait for a stage of this rank; a stage counts its own values itself."""
        meter = self._meter
        if meter is None:
            return
        for value in values:
            if value not in state.held:
                tensors = plain_tensors(state.products[value])
                state.held[value] = [meter.hold(tensor) for tensor in tensors]

    def _backward(self, action: Action) -> _Call:
        of_input, of_weights = self._backward_input(action), self._backward_weight(action)

        def backward(state: StepState) -> None:
            of_input(state)
            of_weights(state)

        return backward

    def _backward_input(self, action: Action) -> _Call:
        stage, microbatch = action.stage, action.microbatch
        worker = self._stages[stage]
        mailbox = self.mailbox
        is_last = stage == self._last
        after = Product("gradient", stage + 1, microbatch)
        product = Product("gradient", stage, microbatch)
        reads = reads_of(self._schedule, stage, microbatch)
        writes = writes_of(self._schedule, stage, microbatch)

        def weight() -> Tensor:
            return mailbox.weights[microbatch].clone().view(torch.float64)[0]

        def backward_input(state: StepState) -> None:
            products = state.products
            of_output = None if is_last else products.pop(after)
            of_values = []
            for write in writes:
                from_readers = [products.pop(gradient) for gradient in write.gradients]
                of_values.append(_added_up(from_readers))
            of_input, *of_read = worker.backward_input(microbatch, of_output, of_values, weight)
            if stage:
                products[product] = of_input
            for read, gradients in zip(reads, of_read, strict=True):
                # Several readers of this rank send one sum.
                earlier = products.get(read.gradient)
                if earlier is not None:
                    gradients = _added_up([earlier, gradients])
                products[read.gradient] = gradients

        return backward_input

    def _backward_weight(self, action: Action) -> _Call:
        microbatch = action.microbatch
        worker = self._stages[action.stage]
        weights = self._weights.get(action.stage)
        product = Product("weight gradient", action.stage, microbatch)
        leaves = product in self._leaving

        def backward_weight(state: StepState) -> None:
            worker.backward_weight(microbatch)
            if leaves:
                state.products[product] = [] if weights is None else weights.gradients

        return backward_weight

    def _update(self, action: Action) -> _Call:
        """Update with the gradients of this rank and of the other replicas.

        The gradients are added up in the order of microbatches, so that replicas stay equal.
        """
        weights = self._weights.get(action.stage)
        replicas = len(self._schedule.placement[action.stage])
        mates = round_of(action.microbatch, replicas, self._schedule.n_microbatches)
        products = [Product("weight gradient", action.stage, mate) for mate in mates]

        def update(state: StepState) -> None:
            parts = [state.products.pop(product, None) for product in products]
            if weights is not None:
                own = weights.gradients  # not sent, and therefore in no product
                rows = [own if part is None else part for part in parts]
                terms = zip(*rows, strict=True)
                weights.update([add_up(each) for each in terms])

        return update


def _taken(products: dict[Content, Any], read: Read) -> Any:
    """Return a value for one of its readers.

    Each reader gets leaves of its own, as each goes backward by itself.
    """
    if read.is_last:
        return map_plain(_as_if_received, products.pop(read.value))
    return map_plain(_as_if_copied, products[read.value])


def _added_up(several: Sequence[Gradients]) -> Gradients:
    """Return the sum of the gradients of one value from several readers, in their order."""
    if len(several) == 1:
        return several[0]
    return tuple(add_up(terms) for terms in zip(*several, strict=True))


def _as_if_received(tensor: Tensor) -> Tensor:
    """Return a leaf, at which the graph of a later stage on the same rank ends."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _as_if_copied(tensor: Tensor) -> Tensor:
    """Return a leaf that a stage may change although others still need the value."""
    if tensor.requires_grad:  # autograd refuses changes in place of a leaf
        return _as_if_received(tensor)
    return tensor.detach().clone()


def _named(content: str, channels: Mapping[int, Sequence[Message]]) -> dict[int, Message]:
    """Return the messages of that content, by the rank at the other end."""
    found = {}
    for peer, row in channels.items():
        for message in row:
            if message.content == content:
                found[peer] = message
    return found
