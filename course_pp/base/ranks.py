"""The one place where ranks agree, gather and refuse together.

A rank that raises alone leaves its peers waiting for a message that never comes. So before the next
message, ranks tell one another whether anything went wrong, and either all go on or all raise the
same sentence:

    ranks = Ranks(group)
    data = ranks.collectively(lambda: load(path))      # fails on one: all raise
    ranks.require_equal({"n_microbatches": 8})         # differs anywhere: all raise
    ranks.refuse(None if fits else "batch of 7 …")     # one has a problem: all raise
    with ranks.refusing_together():                    # raises on one: all raise
        check_arguments(save, locals())
    sizes = ranks.gather(len(data))                    # everyone's value, by rank
    most = ranks.largest(len(data))                    # the largest of them, for less

Each of these begins with one small all-reduce of the same size, in which ranks see whether all are
in the same public function of this package. If one saves while another steps, all are told so. Each
raises :class:`RankMissing` if a rank has ended or the time limit is over.
"""

import pickle
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.arguments import WrongArgument, checked, refuse_bad_timeout

T = TypeVar("T")

_WAITED = "course_pp has waited on rank "
_ROLL_CALL_S = 1.0
_CALL_BYTES = 256
_GO_BETWEENS = (__name__, checked.__module__, "course_pp.training.checkpoint.manifest")
MEETING_BYTES = 3 * torch.int64.itemsize
"""The bytes a rank gives to the all-reduce with which each exchange begins."""


class RankMissing(RuntimeError):
    """A rank of the group has ended, or did not come within the time limit.

    The group is of no use afterwards.

    Attributes:
        rank: the rank that noticed, numbered within the group of ``n_ranks``, after ``waited_s``
            seconds.
        missing: the ranks that have not reported that they waited too; empty if nobody can tell. If
            they are several, one of them is the cause, and the others may still be waiting for it.
        began_elsewhere: True, so that a report on the failures of all ranks names the failure of
            the missing rank first.
    """

    began_elsewhere = True

    def __init__(
        self, rank: int, n_ranks: int, waited_s: float, missing: Sequence[int] = ()
    ) -> None:
        self.rank, self.n_ranks, self.waited_s, self.missing = (
            rank,
            n_ranks,
            waited_s,
            tuple(missing),
        )
        if len(self.missing) == 1:
            who = f"rank {self.missing[0]}, ended or did not come: look at what was printed there"
        elif missing:  # a rank that itself waits for the rank that is gone cannot report either
            named = ", ".join(map(str, self.missing))
            who = (
                f"ranks {named}: one of them ended or did not come, and the others may be waiting "
                "for it as this one did: look at what was printed there"
            )
        else:
            who = "the others, and one of them has ended or did not come: look at what they printed"
        super().__init__(
            f"rank {rank} of {n_ranks} waited {waited_s:.1f} s for {who}, and make this call on"
            " every rank of the group"
        )

    def __reduce__(self) -> tuple[type["RankMissing"], tuple[int, int, float, tuple[int, ...]]]:
        return type(self), (self.rank, self.n_ranks, self.waited_s, self.missing)


@checked
@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group.

    A process without a group is alone, and every method works there, too.

    Call each method on all ranks of the group, in the same order. A refusal is a ValueError on
    every rank (in a subclass, its ``refusal``).

    Attributes:
        group: the process group; None is the default group.
        alone: whether this process keeps to itself although there is a process group.
        limit_s: the longest that a rank waits for the others, in seconds; None is the group's own
            limit.
    """

    group: dist.ProcessGroup | None = None
    alone: bool = False
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.limit_s is not None:
            refuse_bad_timeout("Ranks", self.limit_s, "limit_s")

    refusal: ClassVar[type[Exception]] = ValueError

    @property
    def rank(self) -> int:
        return 0 if self._is_alone else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self._is_alone else dist.get_world_size(self.group)

    @property
    def _is_alone(self) -> bool:
        return self.alone or not (dist.is_available() and dist.is_initialized())

    def gather(self, value: T) -> list[T]:
        """Return everyone's ``value``, by rank, on every rank. Values travel pickled."""
        if self.size == 1:
            return [value]
        mine = pickle.dumps(value)
        parts = self._all_gather(mine, self._meet(len(mine)))
        return [pickle.loads(part) for part in parts]  # loads ignores the padding

    def largest(self, number: int) -> int:
        """Return on every rank the largest ``number`` that any passes: one small all-reduce."""
        return number if self.size == 1 else self._meet(number)

    def refuse(self, problem: str | Exception | None) -> None:
        """Raise on every rank if any has a problem: the problem of the lowest such rank.

        A problem is a sentence, or the exception to raise.
        """
        if self.size > 1 and not self.largest(int(problem is not None)):
            return
        for found in self.gather(problem):
            if found is not None:
                raise found if isinstance(found, Exception) else self.refusal(found)

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Raise on every rank unless all pass equal ``facts``; name the first fact that differs."""
        problem = difference(self.gather(dict(facts)))
        if problem is not None:
            raise self.refusal(problem)

    def collectively(self, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank and return its result on this one.

        If it fails on any rank, every rank raises an error with the words of that failure.
        """
        result: list[T] = []
        failure: Exception | None = None
        try:
            result.append(work())
        except RankMissing:  # the other ranks notice it by themselves
            raise
        except Exception as error:  # a bug too: the others must not wait for this rank
            failure = error
        problem: str | Exception | None = None
        if failure is not None:
            problem = failure if self._travels(failure) else self.sentence(failure)
        try:
            self.refuse(problem)
        except self.refusal as refusal:
            raise refusal from failure
        return result[0]

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank, as :meth:`collectively`; return everyone's result, by rank."""
        return self.gather(self.collectively(work))

    def refusing_together(self) -> "RefusingTogether":
        """Return a block that raises on every rank if it raises on any: `RefusingTogether`."""
        return RefusingTogether([self])

    def _travels(self, error: Exception) -> bool:
        """Return whether ``error`` can be raised on all ranks as it is, with its fields."""
        try:
            return isinstance(error, self.refusal) and str(
                pickle.loads(pickle.dumps(error))
            ) == str(error)
        except Exception:
            return False

    @staticmethod
    def sentence(error: Exception) -> str:
        """Return the words for a failure of :meth:`collectively` on the other ranks."""
        return (
            str(error)
            if isinstance(error, OSError | TypeError | ValueError)
            else f"{type(error).__name__}: {error}"
        )

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self.group or dist.group.WORLD
        assert group is not None  # there is a default group once torch.distributed is initialised
        return group

    @property
    def _device(self) -> torch.device:
        """The device of small messages: the CPU if the group can, so that they wait for no GPU."""
        return torch.device("cpu" if "cpu" in dist.get_backend_config(self.group) else "cuda")

    def _meet(self, number: int) -> int:
        """Return the largest ``number`` if all ranks are in the same call; else refuse on all."""
        call, tag = _call()
        most = torch.tensor([number, tag, -tag], device=self._device)
        self._wait(
            lambda timeout: self._group.allreduce([most], dist.ReduceOp.MAX, timeout=timeout)
        )
        if dist.get_backend(self.group) == "fake":  # a dry run, whose tensors have no values
            return number
        largest, highest, lowest = most.tolist()
        if highest != -lowest:
            told = self._all_gather(call.encode()[:_CALL_BYTES], _CALL_BYTES)
            raise self.refusal(
                _difference_of_calls([part.rstrip(b"\0").decode(errors="replace") for part in told])
            )
        return int(largest)

    def _all_gather(self, mine: bytes, size: int) -> list[bytes]:
        """Return everyone's bytes, by rank, filled up with zeros to ``size``."""
        padded = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8).to(
            self._device
        )
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(lambda timeout: self._group.allgather(everyone, padded, timeout=timeout))
        return [part.cpu().numpy().tobytes() for part in everyone]

    def _wait(self, begin: Callable[[timedelta | None], dist.Work]) -> None:
        """Begin a collective with the time limit, and wait for it."""
        started = time.monotonic()
        try:
            begin(None if self.limit_s is None else timedelta(seconds=self.limit_s)).wait()
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            raise RankMissing(self.rank, self.size, waited_s, self._missing()) from error

    def _missing(self) -> tuple[int, ...]:
        """Return the ranks that do not report within a moment that they waited too.

        There are none if the store cannot be asked.
        """
        try:
            store, ends = self._group.get_group_store(), time.monotonic() + _ROLL_CALL_S
            store.set(f"{_WAITED}{self.rank}", "")
            while absent := [
                rank for rank in range(self.size) if not store.check([f"{_WAITED}{rank}"])
            ]:
                if time.monotonic() > ends:
                    break
                time.sleep(_ROLL_CALL_S / 20)
        except (AttributeError, RuntimeError):
            # not in this release of torch; or the store was the missing rank's
            return ()
        return tuple(absent)


def _call() -> tuple[str, int]:
    """Return the public functions of this package that the user's code is in, and a tag.

    The outermost function comes first.

    The tag is of the innermost, which exchanges something: ranks may come to it by different ways.
    """
    names: list[str] = []
    innermost = ""
    frame = sys._getframe(1)
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith(
        "course_pp."
    ):
        name = frame.f_code.co_name
        if name[0] not in "_<" and module not in _GO_BETWEENS:
            names.insert(0, name)
            innermost = innermost or frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]
    return " ".join(names), zlib.crc32(innermost.encode())


def _difference_of_calls(calls: Sequence[str]) -> str:
    """Return a sentence on the first rank that is in another call than rank 0."""
    rank = next(rank for rank, call in enumerate(calls) if call != calls[0])
    both = next(
        pair for pair in zip_longest(calls[0].split(), calls[rank].split()) if pair[0] != pair[1]
    )
    here, there = (f"{name}()" if name else "another call" for name in both)
    return (
        f"rank 0 is in {here}, rank {rank} in {there}: make the same calls on every rank, in the"
        " same order"
    )


class RefusingTogether:
    """A ``with`` block in which each rank checks the arguments it was given.

    Its end is a collective: all ranks raise, or all go on.

        with refusing_together(device_mesh):
            check_arguments(apply_fsdp2, locals())
            found = find_blocks(model, blocks)

    Send nothing inside. If several ranks raise, all raise what the lowest one does.

    Args:
        groups: this rank's groups, asked one after another, which together reach every rank. If
            there are none, this rank is alone.
    """

    def __init__(self, groups: Sequence[Ranks]) -> None:
        self._groups = groups

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._groups or not isinstance(error, Exception | None):
            return  # alone; or an interrupt, which is no refusal

        def end() -> None:
            # Whoever expects a TypeError is to catch it on the other ranks, too.
            if isinstance(error, TypeError) and not isinstance(error, ValueError):
                raise WrongArgument(str(error)) from error
            if error is not None:
                raise error

        told: Callable[[], None] = end
        for ranks in self._groups:
            told = partial(ranks.collectively, told)
        told()


def refusing_together(device_mesh: DeviceMesh | None) -> RefusingTogether:
    """Return a block that raises on every rank of a mesh if it raises on any.

    See :class:`RefusingTogether`.

    Args:
        device_mesh: None is this rank alone. Anything else that is not a mesh counts as a mesh of
            all ranks.
    """
    if device_mesh is None or not dist.is_initialized():
        return RefusingTogether([])
    if not isinstance(device_mesh, DeviceMesh) or device_mesh.size() == dist.get_world_size():
        return RefusingTogether([Ranks()])
    # Each row of ranks tells the next: after the last, all know.
    return RefusingTogether(
        [Ranks(device_mesh.get_group(dimension)) for dimension in range(device_mesh.ndim)]
    )


def difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the first of each rank's ``facts`` that differs from rank 0's.

    None if all are equal.
    """
    for rank, theirs in enumerate(facts):
        for name, value in facts[0].items():
            if theirs[name] != value:
                return (
                    f"rank {rank} was given {name}={theirs[name]!r}, rank 0 {value!r}: give every"
                    " rank the same"
                )
    return None


def rank_by_stage(held: Sequence[Iterable[int]]) -> dict[int, int]:
    """Return which rank holds each stage of a pipeline, from the stages that each rank holds."""
    found: dict[int, int] = {}
    for rank, theirs in enumerate(held):
        for stage in theirs:
            if stage in found:
                raise ValueError(
                    f"ranks {found[stage]} and {rank} both hold stage {stage}: give it to one of"
                    " them"
                )
            found[stage] = rank
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"stages {sorted(found)} are held: number them from 0 without gaps")
    return found
