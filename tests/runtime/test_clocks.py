import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.launch import on_ranks
from course_pp.runtime import Recorder
from course_pp.runtime.clocks import Alignment, DeviceClock, HostClock, align
from course_pp.runtime.memory import RankMemory
from course_pp.schedule import Action, Product, Timeline

SECOND = 10**9


def clock_ahead(offset_ns: int) -> int:
    """The clock of a host that was booted at another time."""
    return time.monotonic_ns() + offset_ns


def align_planted(rank: int, hosts: list[str], ahead: list[int], slow_there: float) -> Alignment:
    """Align clocks that are ``ahead``; messages to rank 0 take ``slow_there`` seconds longer."""
    send = dist.send

    def send_slowly(*args: Any, **kwargs: Any) -> None:
        if rank != 0:
            time.sleep(slow_there)
        send(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", send_slowly)
        return align(clock=partial(clock_ahead, ahead[rank]), host=hosts[rank])


@pytest.mark.parametrize(
    "slow_there", [0, 0.002], ids=["as quick there as back", "slower there than back"]
)
def test_the_clocks_of_other_hosts_are_found_within_the_reported_error(slow_there: float) -> None:
    hosts = ["a", "b", "a", "c"]
    ahead = [0, 3 * SECOND, 0, -5 * SECOND]
    alignments = on_ranks(4, align_planted, hosts, ahead, slow_there, timeout_s=60.0)
    for alignment, offset in zip(alignments, ahead, strict=True):
        assert abs(alignment.offset_ns - offset) <= alignment.error_ns
    assert alignments[0] == alignments[2] == Alignment(0, 0)
    assert all(alignments[rank].error_ns >= slow_there * SECOND / 2 for rank in (1, 3))
    assert all(alignments[rank].error_ns < SECOND / 2 for rank in (1, 3))


def test_the_ranks_of_another_host_share_one_measurement() -> None:
    first, *others = on_ranks(
        3, align_planted, ["a", "b", "b"], [0, SECOND, SECOND], 0, timeout_s=60.0
    )
    assert first == Alignment(0, 0)
    assert others[0] == others[1]
    assert others[0].error_ns > 0


def align_without_messages(rank: int) -> Alignment:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist, "send")
        return align()


def test_on_one_host_nothing_is_measured() -> None:
    assert on_ranks(3, align_without_messages, timeout_s=60.0) == [Alignment(0, 0)] * 3


def align_some(rank: int) -> Alignment | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    return align(group, clock=partial(clock_ahead, rank * SECOND), host=str(rank))


def test_a_group_is_aligned_to_its_own_first_rank() -> None:
    _, first, second = on_ranks(3, align_some, timeout_s=60.0)
    assert first == Alignment(0, 0)
    assert abs(second.offset_ns - SECOND) <= second.error_ns


def pass_on(recorder: Recorder, rank: int, microbatch: int) -> None:
    """Rank 0 computes, then rank 1: no action of theirs overlaps."""
    token = torch.zeros(1)
    if rank == 0:
        with recorder.span(Action(0, "F", microbatch)):
            pass
        dist.send(token, 1)
        dist.recv(token, 1)
    else:
        with recorder.receiving(Product("activation", 0, microbatch)):
            dist.recv(token, 0)
        with recorder.span(Action(1, "F", microbatch)):
            assert recorder.meter is not None
            recorder.meter.hold(token).release()
        dist.send(token, 0)


def record_on_two_hosts(rank: int, ahead: int) -> tuple[Timeline, tuple[RankMemory, ...], float]:
    clock = partial(clock_ahead, ahead * rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostClock, "mark", staticmethod(clock))
        patch.setattr(
            "course_pp.runtime.recorder.align", partial(align, clock=clock, host=str(rank))
        )
        recorder = Recorder(memory=True)
        for microbatch in range(3):
            pass_on(recorder, rank, microbatch)
        memory = recorder.memory()
        return recorder.timeline(), memory, recorder.clock_error


@pytest.mark.parametrize("ahead", [3 * SECOND, -5 * SECOND])
def test_the_timeline_of_two_hosts_is_in_order_within_the_reported_error(ahead: int) -> None:
    (tl, memories, error), other = on_ranks(2, record_on_two_hosts, ahead, timeout_s=60.0)
    assert other == (tl, memories, error)
    assert 0 < error < 0.5
    spans = [
        span
        for microbatch in range(3)
        for span in tl.spans
        if span.action.parts[0].microbatch == microbatch
    ]
    assert [span.rank for span in spans] == [0, 1] * 3
    for before, after in pairwise(spans):
        assert after.start >= before.end - error
    for receive, span in zip(tl.receives, tl.by_rank[1], strict=True):
        assert receive.rank == 1
        assert receive.end <= span.start
    changes = [seconds for seconds, _ in memories[1].curves["activation"][1:]]
    for i, span in enumerate(tl.by_rank[1]):
        assert all(span.start <= seconds <= span.end for seconds in changes[2 * i : 2 * i + 2])


def test_the_clock_error_is_known_once_the_clocks_were_compared() -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="ask for the timeline first"):
        _ = recorder.clock_error
    recorder.timeline()
    assert recorder.clock_error == 0.0
    recorder.clear()
    with pytest.raises(RuntimeError, match="ask for the timeline first"):
        _ = recorder.clock_error


class Event:
    """An event on the stream of a :class:`FakeCuda`; times in milliseconds."""

    def __init__(self, cuda: "FakeCuda", enable_timing: bool) -> None:
        assert enable_timing
        self.cuda = cuda

    def record(self, stream: str) -> None:
        assert stream == "current stream"
        self.reached = max(self.cuda.now, self.cuda.done)

    def elapsed_time(self, end: "Event") -> float:
        return end.reached - self.reached


class FakeCuda:
    """A device that runs kernels in order while the host goes on; times in milliseconds."""

    def __init__(self, now: float) -> None:
        self.now = self.done = now
        self.n_waits = 0

    def Event(self, enable_timing: bool) -> Event:  # noqa: N802 as torch calls it
        return Event(self, enable_timing)

    def current_stream(self, device: torch.device) -> str:
        assert device.type == "cuda"
        return "current stream"

    def synchronize(self, device: torch.device) -> None:
        self.now = max(self.now, self.done)
        self.n_waits += 1

    def launch(self, duration: float) -> None:
        self.done = max(self.now, self.done) + duration

    def host(self) -> int:
        return round(self.now * 1e6)


def test_marks_of_a_device_are_times_of_the_host() -> None:
    cuda = FakeCuda(now=1000)
    clock = DeviceClock(torch.device("cuda"), cuda, cuda.host)
    first = clock.mark()
    cuda.launch(20)
    second = clock.mark()
    cuda.now += 50
    third = clock.mark()
    assert cuda.n_waits == 0
    assert clock.nanoseconds([third, first, second]) == [
        1_050_000_000,
        1_000_000_000,
        1_020_000_000,
    ]
    assert clock.nanoseconds([]) == []


def test_on_a_device_spans_last_as_long_as_the_kernels_and_recording_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(now=500)
    monkeypatch.setattr(
        "course_pp.runtime.recorder.clock_of",
        lambda device: DeviceClock(torch.device("cuda"), cuda, cuda.host),
    )
    recorder = Recorder("cuda")
    for microbatch, duration in enumerate((5, 7)):  # launched at once, done one after the other
        with recorder.span(Action(0, "F", microbatch)):
            cuda.launch(duration)
    with recorder.receiving(Product("gradient", 1, 0)):
        cuda.launch(3)
    assert cuda.n_waits == 0
    tl = recorder.timeline()
    assert [(span.start, span.end) for span in tl.spans] == [(0, 0.005), (0.005, 0.012)]
    assert [(receive.start, receive.end) for receive in tl.receives] == [(0.012, 0.015)]
    waits = cuda.n_waits
    assert recorder.timeline() == tl
    assert cuda.n_waits == waits
