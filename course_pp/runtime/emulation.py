"""Chosen times for real work: the clock of an emulated cluster, and the timeline that it leaves.

An action starts when its rank is free and its inputs have arrived. It ends its chosen time later, or when the real work
is done if that takes longer. The rank sleeps until then, and stamps the end on the messages it sends. A receiver adds
the link's time to that stamp, not to the moment it woke up, so the scheduling noise of many ranks on a few cores does
not add up. To show that this is no replay of the simulator, the real times are kept beside the emulated ones.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from course_pp.arguments import checked
from course_pp.runtime.cluster import EmulatedCluster
from course_pp.runtime.payload import tensors_of
from course_pp.runtime.plan import Message
from course_pp.schedule import Action, Overlap, Product, Schedule, Timeline
from course_pp.schedule.edges import Lane
from course_pp.schedule.span import format_time

__all__ = ["Emulated", "EmulatedTimeline", "Emulator", "Overrun"]

_NANOSECONDS = 10**9
# A run that lost more than this part of its time to overruns is not the one that was asked for.
_TOLERATED = 0.005


@checked
@dataclass(frozen=True, slots=True)
class Overrun:
    """An action whose real work took ``seconds`` longer than its chosen time."""

    rank: int
    action: Action | Overlap
    seconds: float


@checked
@dataclass(frozen=True, repr=False)
class EmulatedTimeline(Timeline):
    """What an emulated cluster did, in chosen times, and what really happened meanwhile.

    Attributes:
        wall: the same actions, when they were really computed; same time 0.
        overruns: the actions whose real work took longer than their chosen time.
    """

    wall: Timeline = field(default_factory=lambda: Timeline(1, ()))
    overruns: tuple[Overrun, ...] = ()

    @cached_property
    def lateness(self) -> tuple[float, ...]:
        """For each rank the largest delay of an action's real start behind its chosen start, in seconds.

        The rank was still asleep, or waited for a core. A delay does no harm if the work ends within its chosen time.
        """
        late = [0.0] * self.n_ranks
        for chosen, real in zip(self.by_rank, self.wall.by_rank, strict=True):
            for planned, began in zip(chosen, real, strict=True):
                late[planned.rank] = max(late[planned.rank], float(began.start - planned.start))
        return tuple(late)

    @cached_property
    def trouble(self) -> str:
        """Why this is not the run that was asked for; empty if it is, to half a percent."""
        # In all, because overruns add up along a chain of actions even if each is on another rank.
        lost = sum(overrun.seconds for overrun in self.overruns)
        share = lost / self.makespan if self.makespan else 0.0
        if share <= _TOLERATED:
            return ""
        longest = max(span.duration for span in self.wall.spans)
        return (
            f"not the cluster that was asked for: {len(self.overruns)} of {len(self.spans)} actions outlasted their "
            f"chosen time, by {share:.1%} of the run in all. Real work takes up to "
            f"{format_time(longest, 's')} an action here: choose times of twice that, or compute less"
        )

    def __repr__(self) -> str:
        told = f"{len(self.overruns)} overruns, late by {format_time(max(self.lateness), 's')} at most"
        told += f", {format_time(self.wall.makespan, 's')} of real time"
        trouble = f"; {self.trouble}" if self.trouble else ""
        return f"Emulated{super().__repr__()[:-1]}, {told}{trouble})"


class Emulated(NamedTuple):
    """One action of an emulated rank: chosen and real times, in nanoseconds of the host's clock."""

    action: Action | Overlap
    start: int
    end: int
    real_start: int
    real_end: int
    overrun: int


class Emulator:
    """The clock of one rank.

    Args:
        cluster: the one that ``schedule`` runs on.
        wait_for_device: returns when the device has finished its work.
    """

    def __init__(
        self, cluster: EmulatedCluster, schedule: Schedule, rank: int, wait_for_device: Callable[[], None]
    ) -> None:
        self._cluster, self._schedule = cluster, schedule
        self._durations = [round(seconds * _NANOSECONDS) for seconds in cluster.durations(schedule, rank)]
        self._wait_for_device = wait_for_device
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self.done: list[Emulated] = []
        self.received: list[tuple[Product, int, int]] = []
        self._index, self._begun = 0, time.monotonic_ns()
        self._free: int | None = None
        self._arrivals: list[tuple[Product, int]] = []

    def stamped(self, value: Any) -> Any:
        """Return ``value`` with the time at which it was ready, as it is sent."""
        return {"value": value, "ready": torch.tensor(self._free)}

    def opened(self, message: Message, stamped: Any) -> Any:
        """Return the value in what was received, and note when it arrives."""
        value, product = stamped["value"], message.content
        assert isinstance(product, Product)
        nbytes = sum(tensor.nbytes for tensor in tensors_of(value))
        on_its_way = self._cluster.transfer(
            message.source, message.target, self._crossed(product, message.target), nbytes, self._schedule
        )
        self._arrivals.append((product, int(stamped["ready"]) + round(on_its_way * _NANOSECONDS)))
        return value

    def _crossed(self, product: Product, target: int) -> int | Lane | str | None:
        """Return the boundary or edge that a product crosses; ``"token"`` for one that goes back to the first stage."""
        if product.what == "token":
            return "token"
        if not product.name:
            return {"activation": product.stage, "gradient": product.stage - 1}.get(product.what)
        number, edge = next((i, e) for i, e in enumerate(self._schedule.edges) if e.name == product.name)
        reader = product.stage
        if product.what == "value":  # the first reader there has received it
            there = (stage for stage in edge.readers if self._schedule.rank_of(stage, product.microbatch) == target)
            reader = next(there)
        return Lane(number, edge.writer, reader)

    @contextmanager
    def action(self, action: Action | Overlap) -> Iterator[None]:
        """Run the real work of ``action`` in the body of a ``with``, and sleep until its chosen end."""
        start = self._start()
        _sleep_until(start)
        real_start = time.monotonic_ns()
        yield
        self._wait_for_device()
        real_end, due = time.monotonic_ns(), start + self._durations[self._index]
        _sleep_until(due)
        end = self._free = max(due, real_end)
        self.done.append(Emulated(action, start, end, real_start, real_end, end - due))
        self._index += 1

    def _start(self) -> int:
        arrivals, self._arrivals = self._arrivals, []
        if self._free is None and not arrivals:
            return time.monotonic_ns()
        # A rank that was late for the step is taken to have been there: that is noise of this machine too.
        free = min(self._begun, *(arrival for _, arrival in arrivals)) if self._free is None else self._free
        for product, arrival in arrivals:
            if arrival > free:
                self.received.append((product, free, arrival))
                free = arrival
        return free


def _sleep_until(moment: int) -> None:
    remaining = moment - time.monotonic_ns()
    if remaining > 0:
        time.sleep(remaining / _NANOSECONDS)
