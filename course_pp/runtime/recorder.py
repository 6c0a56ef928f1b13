"""Measure when each rank of a real run computes and waits, and how much memory it keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from course_pp.base.arguments import checked
from course_pp.base.ranks import Ranks
from course_pp.runtime.clocks import Alignment, HostClock, align, clock_of
from course_pp.runtime.emulation import Emulated, EmulatedTimeline, Overrun
from course_pp.runtime.memory import Meter, MeterLog, RankMemory
from course_pp.schedule import Action, Edge, Overlap, Product, Receive, Span, Timeline

_NANOSECONDS = 10**9

_What = Action | Overlap | Product


@dataclass(frozen=True, slots=True)
class _RankRecord:
    """The record of one rank, in nanoseconds of its own clock.

    Attributes:
        done: the rank's actions and waits, with start and end.
        clock: the alignment by which times are shifted to rank 0's clock.
    """

    done: list[tuple[_What, int, int]]
    emulated: list[Emulated]
    memory: MeterLog | None
    clock: Alignment

    def starts(self, *kinds: type) -> list[int]:
        """Return the starts of these kinds, by rank 0's clock."""
        offset = self.clock.offset_ns
        return [start - offset for what, start, _ in self.done if isinstance(what, kinds)]


class _Recording:
    """A ``with`` block that records its body.

    It is a class, because a generator would cost more than twice the time.
    """

    __slots__ = ("_recorder", "_start", "_what")

    def __init__(self, recorder: "Recorder", what: _What) -> None:
        self._recorder = recorder
        self._what = what

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder._running is not None:
            raise RuntimeError(
                f"{_name(self._what)} starts while {_name(recorder._running)} is being recorded:"
                " end the outer one first, and do not wrap a stage that is attached"
            )
        self._start = recorder._mark()
        recorder._running = self._what

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        recorder._running = None
        if kind is None:
            recorder._marked.append((self._what, self._start, recorder._mark()))


@checked
class Recorder:
    """Records the actions and waits of this rank, and gathers all ranks' records into a timeline.

    Around your own code::

        with recorder.receiving(Product("activation", stage - 1, microbatch)):
            input = receive()
        with recorder.span(Action(stage, "F", microbatch)):
            output = module(input)

    or around every stage of a run of torch's schedules::

        with recorder.attach(stage):
            schedule.step(inputs, target=targets)
        timeline = recorder.timeline()

    It records every step until it is read. Call ``clear()`` before the step whose timeline you
    want. A first step does much work that later steps need not do: do not measure it. Ranks on
    several hosts are aligned with messages (:func:`~course_pp.runtime.clocks.align`), with an error
    of at most :attr:`clock_error`.

    On CUDA a span begins when the current stream reaches its first kernel, and ends when the stream
    has done its last. It is measured with a pair of events: recording does not wait for the device.
    Kernels on other streams count only where the current stream waits for them, and all spans of a
    rank must be recorded on one stream. A receive lasts as long as it blocks that stream.

    Args:
        device: device of the actions; None is the device of the pipeline or the first attached
            stage, or else the CPU.
        memory: also count the bytes kept for backward, with :attr:`meter`.
    """

    edges: tuple[Edge, ...] = ()
    feedback: int = 0
    """Both are properties of the schedule, set by the pipeline, and become part of the timeline."""

    def __init__(self, device: torch.device | str | None = None, *, memory: bool = False) -> None:
        self.meter = Meter(HostClock.mark) if memory else None
        self._marked: list[tuple[_What, Any, Any]] = []
        self._done: list[tuple[_What, int, int]] = []
        self._emulated: list[Emulated] = []
        self._running: _What | None = None
        self._restore: list[Callable[[], None]] = []
        self._alignments: WeakKeyDictionary[dist.ProcessGroup, Alignment] = WeakKeyDictionary()
        self._clock_error: float | None = None
        self._time_on(None if device is None else torch.device(device))

    def span(self, action: Action | Overlap) -> _Recording:
        """Record the body of a ``with`` as ``action``, unless it raises.

        A span inside another span or receive raises RuntimeError: a rank does one thing at a time.
        """
        return _Recording(self, action)

    def receiving(self, product: Product) -> _Recording:
        """Record, as :meth:`span` does, that this rank is blocked until ``product`` is there."""
        return _Recording(self, product)

    def run_on(self, device: torch.device | None) -> None:
        """Set the device of the actions, if it was left open."""
        if self._device is None:
            self._settle()
            self._time_on(device)

    def add_emulated(
        self, done: Sequence[Emulated], received: Sequence[tuple[Product, int, int]]
    ) -> None:
        """Take over the actions and waits of a step on an emulated rank."""
        self._done += [(each.action, each.start, each.end) for each in done]
        self._done += received
        self._emulated += done

    def attach(self, *stages: Any) -> "Recorder":
        """Record every forward and backward of ``stages`` until :meth:`detach`, or in a ``with``.

        Give stages of ``torch.distributed.pipelining``, or stages with their methods, one by one or
        in lists. A backward with ``full_backward=False`` is recorded as ``I``, its second half as
        ``W``. In stage 0, which needs no input gradient, ``W`` has all the work. The loss and the
        messages lie outside the spans. A stage of `course_pp.parallel` is recorded as its pipeline
        runs it: build the pipeline first.
        """
        methods = {
            "forward_one_chunk": "F",
            "backward_one_chunk": "B",
            "backward_weight_one_chunk": "W",
        }
        attached: list[Any] = []
        for each in stages:
            attached += each if isinstance(each, list | tuple) else [each]
        for stage in attached:
            if not all(hasattr(stage, name) for name in ("stage_index", *methods)):
                raise ValueError(
                    f"cannot record {type(stage).__name__}: attach a pipeline stage of"
                    " torch.distributed.pipelining, or use span() around your own code"
                )
            if getattr(stage, "runs_as", stage) is None:
                raise ValueError(
                    f"stage {stage.stage_index} is in no pipeline, which would run it as a stage of"
                    " its own: call build_pipeline_schedule first, then attach"
                )
        for given in attached:
            stage = getattr(given, "runs_as", given)
            self.run_on(getattr(stage, "device", None))
            for name, kind in methods.items():
                recorded = partial(self._recorded, stage, kind, getattr(stage, name))
                setattr(stage, name, recorded)
                self._restore.append(partial(delattr, stage, name))
        return self

    def _recorded(
        self,
        stage: Any,
        kind: str,
        run: Callable[..., Any],
        microbatch: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run one of torch's three methods; torch passes the microbatch by position."""
        if kind != "F" and not getattr(stage, "has_backward", True):
            return run(microbatch, *args, **kwargs)
        if kind == "B" and not kwargs.get("full_backward", True):
            kind = "I"
        with self.span(Action(stage.stage_index, kind, microbatch)):
            return run(microbatch, *args, **kwargs)

    def detach(self) -> None:
        """Give the attached stages their own methods back."""
        while self._restore:
            self._restore.pop()()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def clear(self) -> None:
        """Forget the record, as of a warm-up step; memory that is kept now stays counted."""
        self._marked.clear()
        self._done.clear()
        self._emulated.clear()
        self._alignments.clear()
        self._clock_error = None
        if self.meter is not None:
            self.meter.clear()

    @checked
    def timeline(self, group: dist.ProcessGroup | None = None, name: str = "") -> Timeline:
        """Return one timeline of all ranks of ``group``, the same on each of them.

        Every rank of the group must call it, outside spans. Time 0 is the earliest start of a span
        on any rank (receives are cut off there), the unit is seconds, and ranks are numbered within
        the group. Without a process group there is one rank. A run on an emulated cluster gives an
        :class:`~course_pp.runtime.emulation.EmulatedTimeline`.

        Args:
            name: the name of the run, for labels.
        """
        records, zero = self._gather(group)
        spans = []
        receives = []
        wall = []
        overruns = []
        for rank, record in enumerate(records):
            base = record.clock.offset_ns + zero

            def seconds(time: int, base: int = base) -> float:
                return (time - base) / _NANOSECONDS

            for what, start, end in record.done:
                if not isinstance(what, Product):
                    spans.append(Span(rank, what, seconds(start), seconds(end)))
                elif start >= base or end > base:
                    receives.append(Receive(rank, what, max(seconds(start), 0.0), seconds(end)))
            for each in record.emulated:
                began, ended = seconds(each.real_start), seconds(each.real_end)
                wall.append(Span(rank, each.action, began, ended))
                if each.overrun:
                    overruns.append(Overrun(rank, each.action, each.overrun / _NANOSECONDS))
        n_ranks = len(records)
        of_both: dict[str, Any] = {
            "unit": "s",
            "measured": True,
            "edges": self.edges,
            "feedback": self.feedback,
        }
        of_spans: dict[str, Any] = {"receives": tuple(receives), "name": name, **of_both}
        if not wall:
            return Timeline(n_ranks, tuple(spans), **of_spans)
        real = Timeline(n_ranks, tuple(wall), name=f"{name} in real time".strip(), **of_both)
        return EmulatedTimeline(
            n_ranks, tuple(spans), wall=real, overruns=tuple(overruns), **of_spans
        )

    @checked
    def memory(self, group: dist.ProcessGroup | None = None) -> tuple[RankMemory, ...]:
        """Return the memory that every rank kept for backward.

        Call it as :meth:`timeline`, whose time 0 it has.
        """
        records, zero = self._gather(group)
        memories = []
        for rank, record in enumerate(records):
            if record.memory is None:
                raise RuntimeError(
                    f"the recorder of rank {rank} counts no memory: make it with"
                    " Recorder(memory=True)"
                )
            memories.append(record.memory.seen_from(rank, zero + record.clock.offset_ns))
        return tuple(memories)

    @property
    def clock_error(self) -> float:
        """The largest possible error of a rank's clock against rank 0's, in seconds.

        0 if all ranks share a host. Between two ranks on other hosts than rank 0's, the error may
        be twice as large.
        """
        if self._clock_error is None:
            raise RuntimeError("the clocks have not been compared yet: ask for the timeline first")
        return self._clock_error

    def _time_on(self, device: torch.device | None) -> None:
        self._device = device
        self._clock = clock_of(self._device)
        self._mark = self._clock.mark

    def _settle(self) -> None:
        """Turn the clock's marks into nanoseconds."""
        # In one call, as a GPU's clock waits for the device each time.
        marks: list[Any] = []
        for _, start, end in self._marked:
            marks += start, end
        times = iter(self._clock.nanoseconds(marks))
        self._done += [(what, next(times), next(times)) for what, _, _ in self._marked]
        self._marked.clear()

    def _gather(self, group: dist.ProcessGroup | None) -> tuple[list[_RankRecord], int]:
        """Return the record of each rank, and time 0 in nanoseconds of rank 0's clock."""
        if self._running is not None:
            raise RuntimeError(
                f"{_name(self._running)} is still being recorded: ask for what was recorded"
                " afterwards"
            )
        self._settle()
        memory = None if self.meter is None else self.meter.log()
        mine = _RankRecord(self._done, self._emulated, memory=memory, clock=self._align(group))
        records = Ranks(group).gather(mine)
        self._clock_error = max(record.clock.error_ns for record in records) / _NANOSECONDS
        starts: list[int] = []
        for record in records:
            starts += record.starts(Action, Overlap)
        if not starts:  # nothing but receives
            for record in records:
                starts += record.starts(Product)
        return records, min(starts, default=0)

    def _align(self, group: dist.ProcessGroup | None) -> Alignment:
        if not (dist.is_available() and dist.is_initialized()):
            return Alignment(0, 0)
        group = group or dist.group.WORLD
        assert group is not None  # there is a default group once torch.distributed is initialised
        # One alignment until clear(), or timeline and memory would differ in their zero. Ranks may
        # have cleared at different times, and must measure together.
        if not all(Ranks(group).gather(group in self._alignments)):
            self._alignments[group] = align(group)
        return self._alignments[group]


def _name(what: _What) -> str:
    return f"the receive of {what}" if isinstance(what, Product) else str(what)
