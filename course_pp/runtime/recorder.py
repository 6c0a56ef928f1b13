"""Measure when each rank of a real run computes.

The result is the same :class:`~course_pp.schedule.Timeline` that a simulation gives, so it is drawn,
summed up and explained by the same functions.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from course_pp.schedule import Action, Overlap, Span, Timeline

_NANOSECONDS = 10**9


class Stage(Protocol):
    """What the recorder uses of a ``torch.distributed.pipelining`` stage; any object like it will do."""

    stage_index: int
    forward_one_chunk: Callable[..., Any]
    backward_one_chunk: Callable[..., Any]
    backward_weight_one_chunk: Callable[..., Any]


class Recorder:
    """Records the actions of this rank, and gathers those of all ranks into a timeline.

    Around your own code::

        with recorder.span(Action(stage, "F", microbatch)):
            output = module(input)

    or around every stage of a run of torch's schedules::

        with recorder.attach(stage):
            schedule.step(inputs, target=targets)
        timeline = recorder.timeline()

    The clock is ``time.monotonic_ns``, which all processes of one host share. Ranks on several hosts are
    not aligned yet: their spans are shifted by the difference between the hosts' clocks.

    On CUDA the device is synchronised at both ends of each span: without it a span would measure how long
    it took to launch the kernels. It forbids the overlap of an action with the next one's launches, so a
    recorded step is slower than an unrecorded one. On a CPU a span costs two clock readings.

    Args:
        device: where the actions run; None means the device of the first attached stage, or else the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._done: list[tuple[Action | Overlap, int, int]] = []
        self._running: Action | Overlap | None = None
        self._restore: list[Callable[[], None]] = []

    @contextmanager
    def span(self, action: Action | Overlap) -> Iterator[None]:
        """Record the body as ``action``; a body that raises is not recorded.

        Raises:
            RuntimeError: inside another span, since a rank does one thing at a time.
        """
        if self._running is not None:
            raise RuntimeError(
                f"{action} starts while {self._running} is being recorded: end the outer span first, "
                "and do not wrap a stage that is attached"
            )
        self._running = action
        try:
            start = self._now()
            yield
            self._done.append((action, start, self._now()))
        finally:
            self._running = None

    def attach(self, *stages: Stage) -> "Recorder":
        """Record every forward and backward of ``stages`` until :meth:`detach` or the end of a ``with``.

        A backward with ``full_backward=False`` is recorded as ``I``, the rest of it as ``W``. Where torch
        has nothing to do for ``I`` (stage 0 needs no input gradient) its span is nearly empty and ``W``
        has all the work. The loss and the messages lie outside the spans.

        Raises:
            ValueError: for a stage that is attached already or named twice, or lacks one of the three methods;
                no stage is attached then.
        """
        for i, stage in enumerate(stages):
            _refuse_unsuitable(stage)
            if any(stage is other for other in stages[:i]):
                raise ValueError(f"stage {stage.stage_index} is named twice: attach each stage once")
        for stage in stages:
            if self._device is None:
                self._device = getattr(stage, "device", None)
            for name, record in (
                ("forward_one_chunk", self._forward),
                ("backward_one_chunk", self._backward),
                ("backward_weight_one_chunk", self._backward_weight),
            ):
                wrapped = partial(record, stage, getattr(stage, name))
                setattr(stage, name, wrapped)
                self._restore.append(partial(delattr, stage, name))
        return self

    def detach(self) -> None:
        """Give the attached stages their own methods back; does nothing if there are none."""
        while self._restore:
            self._restore.pop()()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def clear(self) -> None:
        """Forget what was recorded, for example a warm-up step."""
        self._done.clear()

    def timeline(self, group: dist.ProcessGroup | None = None) -> Timeline:
        """What every rank of ``group`` recorded, the same timeline on each of them.

        Every rank of the group must call it. Time 0 is the earliest start on any rank, the unit is seconds,
        and ranks are numbered within the group. Without a process group there is one rank.

        Raises:
            RuntimeError: inside a span.
        """
        if self._running is not None:
            raise RuntimeError(f"{self._running} is still being recorded: ask for the timeline afterwards")
        everyone = [self._done]
        if dist.is_available() and dist.is_initialized():
            everyone = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everyone, self._done, group=group)
        zero = min((start for done in everyone for _, start, _ in done), default=0)
        spans = tuple(
            Span(rank, action, (start - zero) / _NANOSECONDS, (end - zero) / _NANOSECONDS)
            for rank, done in enumerate(everyone)
            for action, start, end in done
        )
        return Timeline(len(everyone), spans, unit="s")

    def _now(self) -> int:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()

    # The three wrappers have the positions and names of torch's methods, which schedules call either way.

    def _forward(self, stage: Stage, run: Callable[..., Any], fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.span(Action(stage.stage_index, "F", fwd_chunk_id)):
            return run(fwd_chunk_id, *args, **kwargs)

    def _backward(
        self,
        stage: Stage,
        run: Callable[..., Any],
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        **kwargs: Any,
    ) -> Any:
        if not getattr(stage, "has_backward", True):
            return run(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)
        with self.span(Action(stage.stage_index, "B" if full_backward else "I", bwd_chunk_id)):
            return run(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)

    def _backward_weight(
        self, stage: Stage, run: Callable[..., Any], bwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not getattr(stage, "has_backward", True):
            return run(bwd_chunk_id, *args, **kwargs)
        with self.span(Action(stage.stage_index, "W", bwd_chunk_id)):
            return run(bwd_chunk_id, *args, **kwargs)


def _refuse_unsuitable(stage: Stage) -> None:
    for name in ("stage_index", "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        if not hasattr(stage, name):
            raise ValueError(
                f"cannot record {type(stage).__name__}, which has no {name}: attach a pipeline stage of "
                "torch.distributed.pipelining, or use span() around your own code"
            )
    if isinstance(vars(stage).get("forward_one_chunk"), partial):
        raise ValueError(f"stage {stage.stage_index} is recorded already: detach() its recorder first")
