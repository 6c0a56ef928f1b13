"""Clocks that can be compared: of the host and of a GPU, of two processes, of two hosts.

All processes of a host share ``time.monotonic_ns``, which counts from its boot. The difference of
two hosts' clocks is measured with messages.
"""

import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from course_pp.base.ranks import Ranks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")
_ROUNDS = 32


class Clock(Protocol):
    """A clock that marks moments cheaply, and gives their ``time.monotonic_ns`` afterwards."""

    def mark(self) -> Any: ...

    def nanoseconds(self, marks: Sequence[Any]) -> list[int]: ...


class HostClock:
    """The clock of the host."""

    mark = staticmethod(time.monotonic_ns)

    def nanoseconds(self, marks: Sequence[int]) -> list[int]:
        return list(marks)


class DeviceClock:
    """The clock of a CUDA device; a mark is an event on the current stream, and waits for nothing.

    Marks are resolved against a reference event, which an idle device reaches as soon as it is
    recorded: between two readings of the host's clock. Until then the device is not synchronised.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        host: Callable[[], int] = time.monotonic_ns,
    ):
        self._device = device
        self._cuda = cuda
        self._host = host

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def nanoseconds(self, marks: Sequence[Any]) -> list[int]:
        if not marks:
            return []
        self._cuda.synchronize(self._device)
        before = self._host()
        reference = self.mark()
        self._cuda.synchronize(self._device)
        now = (before + self._host()) // 2
        # elapsed_time gives milliseconds.
        return [now - round(event.elapsed_time(reference) * 1e6) for event in marks]


def clock_of(device: torch.device | None) -> Clock:
    """Return the clock by which work on ``device`` is timed."""
    if device is not None and device.type == "cuda":
        return DeviceClock(device)
    return HostClock()


def wait_for(device: torch.device) -> None:
    """Return when all work given to ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Alignment:
    """The lead of this rank's clock over rank 0's, and its largest error, in nanoseconds."""

    offset_ns: int
    error_ns: int


def host_identity() -> str:
    """Return a name that two processes share only if they read the same CLOCK_MONOTONIC.

    The host's name is part of it because copies of a virtual machine may share a boot id, and the
    time namespace because it shifts the clocks of its processes. Where there is no boot id, the
    network card's address stands for it.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"{uuid.getnode():x}"
    namespace = os.readlink(_TIME_NAMESPACE) if _TIME_NAMESPACE.exists() else ""
    return " ".join((platform.node(), boot, namespace))


def align(
    group: dist.ProcessGroup | None = None,
    clock: Callable[[], int] = time.monotonic_ns,
    host: str | None = None,
) -> Alignment:
    """Compare this rank's clock with that of rank 0 of ``group``; a collective of the group.

    Ranks of one host share its clock. Ranks on rank 0's host send no message, and on each other
    host the first rank measures for all (Cristian, "Probabilistic clock synchronization",
    Distributed Computing 3, 1989; the formula is that of NTP, RFC 5905, section 8). A message
    leaves at t0 and arrives at t1 by rank 0's clock; its reply leaves at t2 and arrives at t3. With
    equal delays both ways the clock is ahead by ``((t0 - t1) + (t3 - t2)) / 2``. With any delays
    that is wrong by at most half the time that both messages took. The quickest of several rounds
    has the smallest error, and is taken.

    Args:
        host: a name that ranks with one clock share; :func:`host_identity` unless given.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Alignment(0, 0)
    rank = dist.get_rank(group)
    ranks = Ranks(group)
    hosts = ranks.gather(host_identity() if host is None else host)
    first_on_host = [hosts.index(name) for name in hosts]
    measuring = sorted(set(first_on_host) - {0})
    mine = Alignment(0, 0)
    if not measuring:
        return mine
    if rank == 0:
        for other in measuring:
            _answer(other, group, clock)
    elif rank in measuring:
        rounds = [_ask(group, clock) for _ in range(_ROUNDS)]
        mine = min(rounds, key=lambda alignment: alignment.error_ns)
    return ranks.gather(mine)[first_on_host[rank]]


def _ask(group: dist.ProcessGroup | None, clock: Callable[[], int]) -> Alignment:
    times = torch.zeros(2, dtype=torch.int64, device=_message_device(group))
    t0 = clock()
    dist.send(times, group=group, group_dst=0)
    dist.recv(times, group=group, group_src=0)
    t1, t2 = times.tolist()
    t3 = clock()
    on_the_way = (t3 - t0) - (t2 - t1)
    # One more, as both halves are rounded to whole nanoseconds.
    return Alignment((t0 - t1 + t3 - t2) // 2, on_the_way // 2 + 1)


def _answer(other: int, group: dist.ProcessGroup | None, clock: Callable[[], int]) -> None:
    device = _message_device(group)
    question = torch.zeros(2, dtype=torch.int64, device=device)
    for _ in range(_ROUNDS):
        dist.recv(question, group=group, group_src=other)
        question.tolist()  # on a GPU, receiving returns before the message is there
        t1 = clock()
        dist.send(torch.tensor([t1, clock()], device=device), group=group, group_dst=other)


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")
