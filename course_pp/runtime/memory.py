"""Bytes that a rank keeps for backward, counted as they come and go; no GPU is needed."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks

from course_pp.base.torch_private import version_of

Kind = Literal["activation", "buffer", "queued", "version"]

KINDS: tuple[str, ...] = get_args(Kind)
TOTAL = "total"

_NANOSECONDS = 10**9

_Entry = tuple[str, int, int]  # kind, identity of a storage, its bytes
_Event = tuple[int, int, tuple[_Entry, ...]]  # nanoseconds, +1 or -1, the storages


@dataclass(frozen=True)
class RankMemory:
    """The memory that rank ``rank`` kept for backward.

    Attributes:
        curves: the (seconds, bytes) at each change, first at 0, for each kind (``activation``,
            ``buffer``, ``queued``, ``version``) and for ``total``. A storage that is kept as two
            kinds at once counts once in the total.
    """

    rank: int
    curves: Mapping[str, tuple[tuple[float, int], ...]]

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes kept at once, of each kind and in total."""
        peaks = {}
        for kind, curve in self.curves.items():
            peaks[kind] = max(amount for _, amount in curve)
        return peaks


@dataclass(frozen=True)
class MeterLog:
    """The record of a meter.

    Attributes:
        first: bytes of each kind at the beginning.
        changes: (nanoseconds, kind, change in bytes) of each change.
    """

    first: Mapping[str, int]
    changes: Sequence[tuple[int, str, int]]

    def seen_from(self, rank: int, zero: int) -> RankMemory:
        """Return the log in seconds from ``zero``, in nanoseconds; earlier changes count there."""
        amounts = dict(self.first)
        curves = {kind: [(0.0, amount)] for kind, amount in amounts.items()}
        for when, kind, change in self.changes:
            amounts[kind] += change
            curves[kind].append((max(when - zero, 0) / _NANOSECONDS, amounts[kind]))
        return RankMemory(rank, {kind: tuple(curve) for kind, curve in curves.items()})


class Hold:
    """Keeps storages, and counts them, until it is released or collected."""

    __slots__ = ("_entries", "_meter", "_storages")

    def __init__(
        self, meter: "Meter", kind: Kind, storages: Sequence[torch.UntypedStorage]
    ) -> None:
        self._meter = meter
        self._storages = storages
        # A storage keeps its Python object, and so its id, for as long as it lives.
        self._entries = tuple((kind, id(storage), storage.nbytes()) for storage in storages)
        if self._entries:
            meter._events.append((meter._clock(), 1, self._entries))

    def release(self) -> None:
        """Stop counting and keeping the storages; a second call does nothing."""
        entries, self._entries = self._entries, ()
        if entries:
            self._meter._events.append((self._meter._clock(), -1, entries))
        self._storages = ()

    def __del__(self) -> None:
        self.release()


class _SavedTensor:
    """The object that autograd keeps in place of a tensor.

    It has the tensor and its version, by which a change in place is found.
    """

    __slots__ = ("hold", "stage_and_microbatch", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, hold: Hold, stage_and_microbatch: tuple[int, int]
    ) -> None:
        # An output that a graph node saves has the node as its grad_fn: kept as it is, neither
        # would ever be freed.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = version_of(tensor)
        self.hold = hold
        self.stage_and_microbatch = stage_and_microbatch


class Meter:
    """Counts the bytes that this rank keeps for backward.

    A storage counts once, however many tensors share it. The meter sees tensors that autograd saves
    within :meth:`saving`, and tensors given to :meth:`hold`. It does not see tensors that live only
    during an action, nor tensors that a checkpointed part of a stage saves while backward runs it
    again. Sparse tensors have no single storage and count nothing. Times are the host's, in
    nanoseconds, on a GPU too: memory is taken when the host asks for it.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        # Autograd's threads and garbage collection release storages at any moment, so events are
        # only appended (a deque is safe for that) and counted later.
        self._events: deque[_Event] = deque()
        self._ignored: WeakSet[torch.UntypedStorage] = WeakSet()
        self._holders: Counter[tuple[str, int]] = Counter()
        self._sizes: dict[tuple[str, int], int] = {}
        self._amounts = dict.fromkeys((*KINDS, TOTAL), 0)
        self._changes: list[tuple[int, str, int]] = []
        self._first = dict(self._amounts)

    def saving(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Count the tensors that autograd saves in the body, a forward, until it frees them.

        With hooks autograd no longer checks that saved tensors were not changed in place since; the
        meter does.
        """

        def pack(tensor: torch.Tensor) -> _SavedTensor:
            return _SavedTensor(tensor, self.hold(tensor), (stage, microbatch))

        return saved_tensors_hooks(pack, _unpack)

    def hold(self, tensor: torch.Tensor, kind: Kind = "activation") -> Hold:
        """Count and keep ``tensor``'s storage until the result is released or collected.

        The kind is ``"activation"`` for a stage's input, ``"buffer"`` for a message posted or in
        flight, ``"queued"`` for an output gradient that waits for ``W``, ``"version"`` for weights
        kept besides the newest.
        """
        counted = [each for each in _storages(tensor) if each not in self._ignored]
        return Hold(self, kind, counted)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count the storages that ``tensors`` have now, without keeping them alive."""
        for tensor in tensors:
            self._ignored.update(_storages(tensor))

    def clear(self) -> None:
        """Forget the past; what is kept now stays counted."""
        self._count()
        self._changes.clear()
        self._first = dict(self._amounts)

    @property
    def kept(self) -> dict[str, int]:
        """The bytes kept now, of each kind and in total."""
        self._count()
        return dict(self._amounts)

    def log(self) -> "MeterLog":
        """Return what happened since the beginning or :meth:`clear`."""
        self._count()
        return MeterLog(dict(self._first), tuple(self._changes))

    def _count(self) -> None:
        while self._events:
            when, sign, entries = self._events.popleft()
            for kind, storage, n_bytes in entries:
                for each in (kind, TOTAL):
                    self._holders[each, storage] += sign
                    n_holders = self._holders[each, storage]
                    if sign > 0 and n_holders == 1:
                        self._sizes[each, storage] = n_bytes
                        self._change(when, each, n_bytes)
                    elif not n_holders:
                        del self._holders[each, storage]
                        # Subtract the size that was added: the storage may be resized by now.
                        self._change(when, each, -self._sizes.pop((each, storage)))

    def _change(self, when: int, kind: str, n_bytes: int) -> None:
        self._amounts[kind] += n_bytes
        self._changes.append((when, kind, n_bytes))


def _unpack(saved: _SavedTensor) -> torch.Tensor:
    tensor = saved.tensor
    version = version_of(tensor)
    if version != saved.version:
        stage, microbatch = saved.stage_and_microbatch
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward of microbatch {microbatch} in"
            f" stage {stage} needs was changed in place after its forward: it was saved at version"
            f" {saved.version} and is at version {version}; change a clone of it instead"
        )
    return tensor


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages behind ``tensor``, or behind the parts of a wrapper such as DTensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor.untyped_storage()] if tensor.layout == torch.strided else []
    storages = []
    names, _ = flatten()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            storages += _storages(part)
    return storages
