"""The actions of one rank, one after another: receive, compute, send."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from course_pp.runtime.emulation import Emulator
from course_pp.runtime.mailbox import Mailbox
from course_pp.runtime.payload import map_tensors
from course_pp.runtime.plan import Content, Plan
from course_pp.runtime.recorder import Recorder
from course_pp.runtime.rng import get_random_state, set_random_state
from course_pp.runtime.stage import Stage
from course_pp.runtime.versions import VersionedStage
from course_pp.schedule import Action, Overlap, Product, Schedule
from course_pp.schedule.products import round_of
from course_pp.tied import add_up

__all__ = ["Batch", "Executor"]

_RANDOM_STATE = "state of the random number generators"


@dataclass(slots=True)
class Batch:
    """What the actions of a step work on.

    Attributes:
        inputs: each microbatch, where the first stage is; else empty.
        loss: where the last stage is: a microbatch's share of the loss, from its number and output.
        seeds: for each microbatch, if its random numbers are to be reproduced.
        products: what actions have left for other actions, whether they are on this rank or on others.
        shares: the losses so far, by microbatch.
    """

    inputs: Sequence[Any]
    loss: Callable[[int, Any], Tensor] | None
    seeds: Sequence[int] | None
    products: dict[Content, Any] = field(default_factory=dict)
    shares: dict[int, Tensor] = field(default_factory=dict)


class Executor:
    """Does the actions of a plan.

    Attributes:
        trains: whether there is anything but forwards.
        current: the action in progress; None before the first; ``"the end of the step"`` after the last.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        stages: Mapping[int, Stage],
        mailbox: Mailbox,
        recorder: Recorder | None,
        device: torch.device,
        emulator: Emulator | None = None,
        weights: Mapping[int, VersionedStage] | None = None,
    ) -> None:
        self.current: Action | Overlap | str | None = None
        self._plan, self._stages, self._mailbox = plan, stages, mailbox
        self._weights = {} if weights is None else weights
        self._mates = {
            part: round_of(part.microbatch, len(schedule.placement[part.stage]), schedule.n_microbatches)
            for part in schedule.parts
            if part.kind == "U"
        }
        self._recorder, self._device, self._emulator = recorder, device, emulator
        self._last = schedule.n_stages - 1
        self.trains = any(part.kind != "F" for part in schedule.parts)
        self._split = {(part.stage, part.microbatch) for part in schedule.parts if part.kind == "I"}
        self._leaving = {message.content for row in plan.outgoing.values() for message in row}
        self._do = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weight,
            "U": self._update,
        }

    def run(self, batch: Batch) -> None:
        """Do every action of this rank; afterwards ``batch.shares`` has the losses computed here."""
        products, mailbox, emulator = batch.products, self._mailbox, self._emulator
        if emulator is not None:
            emulator.begin()
        for step in self._plan.steps:
            self.current = step.action
            for message in step.receives:
                with self._receiving(message.content):
                    products[message.content] = mailbox.take(message)
                if emulator is not None:
                    products[message.content] = emulator.opened(message, products[message.content])
            mailbox.arrived(step.arrived)
            with self._span(step.action):
                for part in step.action.parts:
                    self._do[part.kind](part, batch)
            for number, message in enumerate(step.sends, 1):
                # Bound to no name here, which would keep an output alive until the next is sent.
                more = any(other.content == message.content for other in step.sends[number:])
                take = products.__getitem__ if more else products.pop
                mailbox.send(message, self._stamped(take(message.content)))
        self.current = "the end of the step"
        if emulator is not None and self._recorder is not None:
            self._recorder.add_emulated(emulator.done, emulator.received)

    def _stamped(self, value: Any) -> Any:
        return value if self._emulator is None else self._emulator.stamped(value)

    def _forward(self, action: Action, batch: Batch) -> None:
        stage, microbatch = action.stage, action.microbatch
        value = (
            batch.inputs[microbatch] if stage == 0 else batch.products.pop(Product("activation", stage - 1, microbatch))
        )
        value = self._with_its_random_state(stage, value, None if batch.seeds is None else batch.seeds[microbatch])
        loss = None
        if stage == self._last and batch.loss is not None:
            share_of = batch.loss
            loss = lambda output: share_of(microbatch, output)  # noqa: E731
        worker = self._stages[stage]
        output = (
            worker.forward(microbatch, value, loss, (stage, microbatch) in self._split)
            if self.trains
            else worker.evaluate(value, loss)
        )
        if stage == self._last:
            batch.shares[microbatch] = output.detach()
            return
        product = Product("activation", stage, microbatch)
        if product not in self._leaving:
            output = map_tensors(_as_if_received, output)
        if batch.seeds is not None:
            output = {"output": output, _RANDOM_STATE: get_random_state(self._device)}
        batch.products[product] = output

    def _with_its_random_state(self, stage: int, value: Any, seed: int | None) -> Any:
        if stage == 0:
            if seed is not None:
                torch.manual_seed(seed)
            return value
        seeded = isinstance(value, dict) and _RANDOM_STATE in value
        if seeded != (seed is not None):
            raise ValueError("some ranks were given seeds and others none: give every rank the same seeds")
        if not seeded:
            return value
        set_random_state(value[_RANDOM_STATE], self._device)
        return value["output"]

    def _backward(self, action: Action, batch: Batch) -> None:
        self._backward_input(action, batch)
        self._backward_weight(action, batch)

    def _backward_input(self, action: Action, batch: Batch) -> None:
        stage, microbatch = action.stage, action.microbatch
        gradients = None if stage == self._last else batch.products.pop(Product("gradient", stage + 1, microbatch))
        of_input = self._stages[stage].backward_input(microbatch, gradients)
        if stage > 0:
            batch.products[Product("gradient", stage, microbatch)] = of_input

    def _backward_weight(self, action: Action, batch: Batch) -> None:
        self._stages[action.stage].backward_weight(action.microbatch)
        product = Product("weight gradient", action.stage, action.microbatch)
        if product in self._leaving:
            weights = self._weights.get(action.stage)
            batch.products[product] = [] if weights is None else weights.gradients

    def _update(self, action: Action, batch: Batch) -> None:
        """With what waits here, and what the other replicas have sent, in the order of microbatches."""
        weights = self._weights.get(action.stage)
        parts = [
            batch.products.pop(Product("weight gradient", action.stage, mate), None) for mate in self._mates[action]
        ]
        if weights is not None:
            own = weights.gradients
            weights.update([add_up(each) for each in zip(*(own if p is None else p for p in parts), strict=True)])

    def _span(self, action: Action | Overlap) -> AbstractContextManager[None]:
        if self._emulator is not None:
            return self._emulator.action(action)
        return nullcontext() if self._recorder is None else self._recorder.span(action)

    def _receiving(self, content: Content) -> AbstractContextManager[None]:
        if self._recorder is None or self._emulator is not None or isinstance(content, str):
            return nullcontext()
        return self._recorder.receiving(content)


def _as_if_received(tensor: Tensor) -> Tensor:
    """A leaf, so that the next stage's graph ends there although it is on the same rank."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
