"""One plan carried out on all ranks, from the first message to the last, or the same failure on every rank."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from course_pp.runtime.clocks import wait_for
from course_pp.runtime.cluster import EmulatedCluster
from course_pp.runtime.emulation import Emulator
from course_pp.runtime.errors import Origin, PipelineError
from course_pp.runtime.executor import Executor
from course_pp.runtime.mailbox import Mailbox, MessageLost, PeerFailed
from course_pp.runtime.plan import Message, Plan
from course_pp.runtime.recorder import Recorder
from course_pp.runtime.settled import Settled
from course_pp.runtime.stage import Stage
from course_pp.runtime.versions import VersionedStage
from course_pp.runtime.wire import Wire, open_wire
from course_pp.schedule import Schedule

__all__ = ["Engine", "build_engine", "wire_for"]

T = TypeVar("T")


class Engine:
    """One rank's part in a plan.

    Attributes:
        failed: how the last step failed; None while all is well. An engine that failed cannot go on.
    """

    def __init__(self, plan: Plan, mailbox: Mailbox, executor: Executor) -> None:
        self.plan, self.mailbox, self.executor = plan, mailbox, executor
        self.failed: Origin | None = None

    def perform(self, step: Callable[[], T]) -> T:
        """Call ``step``, which runs the actions and exchanges all that follows them, and return what it returns.

        Raises:
            PipelineError: on every rank, for whatever was raised on one once it had begun its first action.
        """
        self.executor.current = None
        try:
            self.mailbox.begin()
            found = step()
            self.mailbox.end()
        except PeerFailed as error:
            self._fail(error.origin, lost=False)
            told = f"(rank {self.plan.rank} was told at {self.executor.current})"
            raise PipelineError(error.origin, told) from None
        except Exception as error:
            what = str(error) if isinstance(error, MessageLost) else f"{type(error).__name__}: {error}"
            origin = self._origin(what)
            self._fail(origin, lost=isinstance(error, MessageLost))
            if self.executor.current is None:
                raise
            raise PipelineError(origin) from error
        except BaseException:
            self.failed = self._origin("interrupted")
            raise
        return found

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
        self.executor.clear()

    def _origin(self, what: str) -> Origin:
        current = self.executor.current
        return Origin(self.plan.rank, "before the first action" if current is None else current, what)


def wire_for(
    plans: Sequence[Plan],
    settled: Settled,
    group: dist.ProcessGroup | None,
    transport: str | None,
    timeout: timedelta,
) -> Wire:
    """Return what carries the messages of the plans of all ranks."""
    channels = {(source, each.rank) for each in plans for source in each.incoming}
    return open_wire(group, channels, settled.device, transport, settled.series, timeout)


def build_engine(
    schedule: Schedule,
    plans: Sequence[Plan],
    *,
    rank: int,
    stages: Mapping[int, Stage],
    weights: Mapping[int, VersionedStage],
    wire: Wire,
    device: torch.device,
    timeout: timedelta,
    recorder: Recorder | None,
    cluster: EmulatedCluster | None,
    executor: type[Executor] = Executor,
) -> Engine:
    """Return this rank's engine for a schedule and the plans of all ranks."""
    emulator = None
    if cluster is not None:
        emulator = Emulator(cluster, schedule, rank, partial(wait_for, device))
    mine = plans[rank]
    mailbox = Mailbox(mine, wire, device, timeout, None if recorder is None else recorder.meter)
    return Engine(mine, mailbox, executor(schedule, mine, stages, mailbox, recorder, device, emulator, weights))


def _named(content: str, channels: Mapping[int, Sequence[Message]]) -> dict[int, Message]:
    """Return the messages of that content, by the rank at the other end."""
    return {peer: message for peer, row in channels.items() for message in row if message.content == content}
