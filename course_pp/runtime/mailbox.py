"""One rank's messages of a step: values in, values out, over a
:class:`~course_pp.runtime.wire.Wire`.

Every message has the size that the receiver expects, and a trailer. The first byte of the trailer
says how to read it:

    SAME      the value, with the shapes and dtypes of the last step
    CHANGED   nothing yet: the value follows in a second message with its spec, whose sizes are in
              the trailer
    FAILED    no value: the sender's step has failed, and the text says how it began

With a gradient, the last bytes of the trailer are the weight of its microbatch in the batch, which
the last stage knows and :func:`course_pp.step.loss.attach_loss` needs.

So shapes are agreed on when they change, and cost nothing when they do not. A rank that fails puts
the news into the very messages for which other ranks wait. Receives are posted ahead, so that
messages arrive while the rank computes: two on each channel, and more as long as they are small,
however many microbatches there are.
"""

import pickle
import re
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.runtime.memory import Hold, Meter
from course_pp.runtime.messages import Message, RankPlan
from course_pp.runtime.payload import NOTHING, Spec, describe, only_tensor, pack, places_in, unpack
from course_pp.runtime.wire import Wire
from course_pp.schedule import Action, Overlap, Product

_SAME, _CHANGED, _FAILED = range(3)
_TRAILER = 512
_WEIGHT = 8
# Bytes of receive buffers to post ahead on a channel.
_AHEAD = 1 << 16
# How long a rank that has lost a message waits for the others to take the news.
_NEWS_S = 5.0


@dataclass(frozen=True)
class Origin:
    """The origin of a failure: rank, action, and the exception's ``"Type: message"``."""

    rank: int
    at: Action | Overlap | str
    what: str

    def __str__(self) -> str:
        at = self.at
        if not isinstance(at, str):
            parts = [f"stage {p.stage}, microbatch {p.microbatch}, action {p}" for p in at.parts]
            at = " and ".join(parts)
        return f"rank {self.rank}, {at}: {self.what}"

    def encode(self) -> str:
        # The text comes last, as it may have several lines itself.
        return f"{self.rank}\n{self.at}\n{self.what}"

    @staticmethod
    def decode(text: str) -> "Origin":
        rank, at, what = text.split("\n", 2)
        for parse in (Action.parse, Overlap.parse):
            try:
                return Origin(int(rank), parse(at), what)
            except ValueError:
                continue
        return Origin(int(rank), at, what)


class MessageLost(RuntimeError):
    """A message did not come or could not be sent: its peer is gone, or missed the time limit."""


class PeerFailed(RuntimeError):
    """The peer's step has failed, as ``origin`` says."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(str(origin))
        self.origin = origin


class _Packet:
    """A send buffer whose trailer says SAME, and the places in it for the tensors of a value."""

    __slots__ = ("buffer", "places", "weight")

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.buffer = torch.empty(spec.nbytes + _TRAILER, dtype=torch.uint8, device=device)
        self.buffer[spec.nbytes] = _SAME
        self.weight = self.buffer[-_WEIGHT:]
        self.places = places_in(spec, self.buffer)


@dataclass(slots=True)
class _Format:
    """The spec by which a value is sent, and the packets that are free to carry the next one."""

    spec: Spec
    free: list[_Packet] = field(default_factory=list)


class _Outgoing:
    """The channel to one other rank.

    Attributes:
        next: the number of the next message to dispatch.
        ready: values that came before their turn, by message number.
        in_flight: buffers that are being sent, by message number.
    """

    def __init__(self, row: tuple[Message, ...]) -> None:
        self.row = row
        self.expected = [_Format(NOTHING)] * len(row)
        self.begin()

    def begin(self) -> None:
        self.next = 0
        self.ready: dict[int, Any] = {}
        self.in_flight: dict[int, list[_Sent]] = {}


class _Incoming:
    """The channel from one other rank.

    Attributes:
        next: the number of the next message to take.
        posted: receives that wait for a message, in order.
        full: the number of receives after the last posting.
    """

    def __init__(self, row: tuple[Message, ...]) -> None:
        self.row = row
        self.expected = [NOTHING] * len(row)
        self.begin()

    def begin(self) -> None:
        self.next = 0
        self.posted: deque[_Sent] = deque()
        self.full = 0


@dataclass(slots=True)
class _Sent:
    """A buffer that the backend reads or writes, and the call to make when it has."""

    buffer: Tensor
    work: dist.Work
    hold: Hold | None
    then: Callable[[], None] | None = None


class Mailbox:
    """Sends and takes the messages of this rank's plan, step after step; values lie on ``device``.

    Attributes:
        weights: the weight of each microbatch in the batch, as the bytes of a float64. The last
            stage's rank knows them; the other ranks receive them with gradients.
    """

    def __init__(
        self,
        plan: RankPlan,
        wire: Wire,
        device: torch.device,
        timeout: timedelta,
        meter: Meter | None,
    ) -> None:
        self._rank = plan.rank
        self._wire = wire
        self._device = device
        self._timeout = timeout
        self._meter = meter
        self.weights: dict[int, Tensor] = {}
        self._incoming = {source: _Incoming(row) for source, row in plan.incoming.items()}
        self._outgoing = {target: _Outgoing(row) for target, row in plan.outgoing.items()}

    def begin(self) -> None:
        """Start a step."""
        self.weights.clear()
        for outgoing in self._outgoing.values():
            outgoing.begin()
        for incoming in self._incoming.values():
            incoming.begin()

    def send(self, message: Message, value: Any) -> None:
        """Hand over a value. It is sent as soon as the messages before it in the channel are.

        The bytes are copied, so the tensors may be changed or freed at once.
        """
        channel = self._outgoing[message.target]
        channel.ready[message.number] = value
        while channel.next in channel.ready:
            following = channel.row[channel.next]
            self._dispatch(channel, following, channel.ready.pop(channel.next))
            channel.next += 1

    def take(self, message: Message) -> Any:
        """Wait for a value and return it.

        Its tensors are leaves, which require grad if they did where they were made.

        Raises:
            PeerFailed: if the sender's step has failed.
            MessageLost: if the sender is gone, or nothing came within the time limit.
        """
        source, number = message.source, message.number
        channel = self._incoming[source]
        # Posting takes about as long as a small message. There is time for it before a wait, but
        # not before every one.
        if 2 * len(channel.posted) <= channel.full:
            self._post(source, channel)
        buffer = notice = self._wait(channel.posted.popleft(), message)
        spec = channel.expected[number]
        kind = buffer[spec.nbytes].item()
        if kind == _FAILED:
            channel.posted.clear()
            channel.next = len(channel.row)  # nothing more will come
            raise PeerFailed(Origin.decode(_read_text(buffer)))
        if kind == _CHANGED:
            value_bytes, spec_bytes = map(int, _read_text(buffer).split())
            second = self._receive(source, 2 * number + 1, value_bytes + spec_bytes)
            buffer = self._wait(second, message)
            spec = channel.expected[number] = pickle.loads(bytes(buffer[value_bytes:].tolist()))
        channel.next += 1
        if not channel.posted:
            self._post(source, channel)
        if (microbatch := _weighed(message)) is not None:
            self.weights[microbatch] = notice[-_WEIGHT:].clone()
        return unpack(spec, buffer, self._device)

    def arrived(self, messages: Iterable[Message]) -> None:
        """Let go of the buffers of messages that have been taken."""
        for message in messages:
            for sent in self._outgoing[message.target].in_flight.pop(message.number, ()):
                self._wait(sent, message)
                if sent.then is not None:
                    sent.then()

    def end(self) -> None:
        """Wait until every message is sent."""
        for channel in self._outgoing.values():
            self.arrived([channel.row[number] for number in sorted(channel.in_flight)])

    def fail(self, origin: Origin, lost: bool) -> None:
        """Tell every rank that still expects a message how the failure began, and hear all others.

        The other ranks will fail too and say so. Then no message is left on its way, and the
        process group stays usable: gloo closes the connections of a process that gives up waiting.
        If a message was ``lost``, a rank is gone, and nobody waits for the others' news.
        """
        news = []
        for target, channel in self._outgoing.items():
            if channel.next < len(channel.row):
                buffer = self._buffer(channel.expected[channel.next].spec.nbytes + _TRAILER)
                buffer[-_TRAILER] = _FAILED
                _write_text(buffer, origin.encode())
                with suppress(RuntimeError):
                    news.append((buffer, self._wire.isend(buffer, target, 2 * channel.next)))
        for incoming in () if lost else self._incoming.values():
            with suppress(RuntimeError):
                while incoming.next < len(incoming.row):
                    self.take(incoming.row[incoming.next])
        patience = min(self._timeout, timedelta(seconds=_NEWS_S)) if lost else self._timeout
        for _, work in news:
            with suppress(RuntimeError):
                work.wait(patience)

    def _dispatch(self, channel: _Outgoing, message: Message, value: Any) -> None:
        number = message.number
        microbatch = _weighed(message)
        weight = None if microbatch is None else self.weights.get(microbatch)
        style = channel.expected[number]

        # Most values are one tensor like that of the last step, and need no description.
        tensor = only_tensor(style.spec, value)
        if tensor is not None:
            spec, tensors = style.spec, [tensor]
        else:
            spec, tensors = describe(value)
        if tensor is None and not spec.is_same(style.spec):
            notice, whole = self._changed(style.spec, spec, tensors)
            if weight is not None:
                notice[-_WEIGHT:] = weight
            # Messages of one format share their free packets.
            known = (other for other in channel.expected if other.spec.is_same(spec))
            channel.expected[number] = next(known, None) or _Format(spec)
            channel.in_flight[number] = [
                self._isend(notice, message, 0),
                self._isend(whole, message, 1),
            ]
            return
        packet = style.free.pop() if style.free else _Packet(style.spec, self._wire.device)
        for place, each in zip(packet.places, tensors, strict=True):
            place.copy_(each.detach())
        if weight is not None:
            packet.weight.copy_(weight)
        sent = self._isend(packet.buffer, message, 0)
        # The packet can carry another value once the receiver has this one.
        sent.then = partial(style.free.append, packet)
        channel.in_flight[number] = [sent]

    def _isend(self, buffer: Tensor, message: Message, part: int) -> _Sent:
        try:
            work = self._wire.isend(buffer, message.target, 2 * message.number + part)
        except RuntimeError as error:
            raise MessageLost(
                f"{message} cannot be sent to rank {message.target}: {_first_line(error)}"
            ) from error
        return _Sent(buffer, work, self._hold(buffer))

    def _changed(self, expected: Spec, spec: Spec, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return a message that announces the value, and the value with its spec."""
        described = pickle.dumps(spec)
        notice = self._buffer(expected.nbytes + _TRAILER)
        notice[expected.nbytes] = _CHANGED
        _write_text(notice, f"{spec.nbytes} {len(described)}")
        whole = self._buffer(spec.nbytes + len(described))
        pack(spec, tensors, whole)
        whole[spec.nbytes :] = torch.frombuffer(bytearray(described), dtype=torch.uint8)
        return notice, whole

    def _post(self, source: int, channel: _Incoming) -> None:
        """Post receives for the next messages: two, or more as long as they are small.

        The wire may allow fewer.
        """
        posted = channel.posted
        ahead = sum(sent.buffer.nbytes for sent in posted)
        while (number := channel.next + len(posted)) < len(channel.row):
            size = channel.expected[number].nbytes + _TRAILER
            ahead += size
            if len(posted) >= self._wire.window or (len(posted) >= 2 and ahead > _AHEAD):
                break
            posted.append(self._receive(source, 2 * number, size))
        channel.full = len(posted)

    def _receive(self, source: int, number: int, size: int) -> _Sent:
        buffer = self._buffer(size)
        try:
            return _Sent(buffer, self._wire.irecv(buffer, source, number), self._hold(buffer))
        except RuntimeError as error:
            raise MessageLost(
                f"rank {source} cannot be heard any more: {_first_line(error)}"
            ) from error

    def _wait(self, sent: _Sent, message: Message) -> Tensor:
        try:
            sent.work.wait(self._timeout)
        except RuntimeError as error:
            what = f"sending {message}"
            if message.target == self._rank:
                what = f"{message} from rank {message.source}"
            raise MessageLost(
                f"waited for {what}, at most {self._timeout.total_seconds():g} s:"
                f" {_first_line(error)} (does every rank call step as often?)"
            ) from error
        finally:
            if sent.hold is not None:
                sent.hold.release()
        return sent.buffer

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._wire.device)

    def _hold(self, buffer: Tensor) -> Hold | None:
        return None if self._meter is None else self._meter.hold(buffer, "buffer")


def _weighed(message: Message) -> int | None:
    """Return the microbatch whose weight a message carries, or None."""
    content = message.content
    if isinstance(content, Product) and content.what == "gradient":
        return content.microbatch
    return None


def _write_text(buffer: Tensor, text: str) -> None:
    """Put ``text`` into the trailer between its first byte and the weight, as far as it fits."""
    # A longer text is cut, maybe within a character, which the reader ignores. The rank where the
    # failure began raises the whole text.
    room = _TRAILER - 1 - _WEIGHT
    line = text.encode()[:room].ljust(room, b"\0")
    buffer[-room - _WEIGHT : -_WEIGHT] = torch.frombuffer(bytearray(line), dtype=torch.uint8)


def _read_text(buffer: Tensor) -> str:
    return bytes(buffer[-_TRAILER + 1 : -_WEIGHT].tolist()).rstrip(b"\0").decode(errors="ignore")


def _first_line(error: BaseException) -> str:
    """Return the first line of a message, without the place in gloo's source."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0])
