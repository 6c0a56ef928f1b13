"""Count what a rank communicates: number and bytes of each collective, by mesh dimension.

``bytes`` are those of the whole: the larger of a collective's input and output on this rank.

    all_gather, reduce_scatter   the gathered output, the input to be reduced
    all_reduce, broadcast        the tensor
    send, recv                   the message

:func:`wire_factor` says how many of these bytes a rank sends. Collectives over a group of one rank move nothing and are
not counted.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import checked
from course_pp.parallel._torch import CollectiveWatcher

__all__ = ["CollectiveCounter", "CollectiveCounts", "Entered", "Tally", "count_collectives", "wire_factor"]

# How torch spells them, underscores left out; the first that an operator's name starts with is what it is.
_KINDS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "monitoredbarrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "isend": "send",
    "send": "send",
    "irecv": "recv",
    "recv": "recv",
}


@checked
@dataclass(frozen=True)
class Tally:
    """A number of collectives, and their bytes in all."""

    number: int = 0
    n_bytes: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.number + other.number, self.n_bytes + other.n_bytes)

    def __mul__(self, times: int) -> "Tally":
        return Tally(self.number * times, self.n_bytes * times)


@checked
@dataclass(frozen=True)
class CollectiveCounts:
    """What one rank communicates: a tally for each (mesh dimension, collective).

    Equal if all tallies are equal; adds up with ``+``; repeats with ``* times``; prints as a table. A dimension is
    ``pp``, ``dp_replicate``, ``dp_shard`` or ``tp``, ``"dp_shard:2"`` for a group of two of the ranks of ``dp_shard``
    (an integer reshard policy makes one), ``"world"`` for all ranks, or ``"other"``.
    """

    tallies: Mapping[tuple[str, str], Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = {key: self.tallies[key] for key in sorted(self.tallies) if self.tallies[key].number}
        object.__setattr__(self, "tallies", kept)

    @classmethod
    @checked
    def of(cls, dimension: str, collective: str, number: int, n_bytes_each: int) -> "CollectiveCounts":
        """Return ``number`` collectives of one kind and size."""
        return cls({(dimension, collective): Tally(1, n_bytes_each) * number})

    def __add__(self, other: "CollectiveCounts") -> "CollectiveCounts":
        keys = {*self.tallies, *other.tallies}
        return CollectiveCounts({key: self[key] + other[key] for key in keys})

    def __mul__(self, times: int) -> "CollectiveCounts":
        return CollectiveCounts({key: tally * times for key, tally in self.tallies.items()})

    def __getitem__(self, key: tuple[str, str]) -> Tally:
        """Return the tally of (mesh dimension, collective); zero where there was none."""
        return self.tallies.get(key, Tally())

    @checked
    def total(self, dimension: str | None = None, collective: str | None = None) -> Tally:
        """Return the tally over all dimensions, or one, and over all collectives, or one."""
        return sum(
            (t for (d, c), t in self.tallies.items() if dimension in (None, d) and collective in (None, c)), Tally()
        )

    def __str__(self) -> str:
        rows = [("dimension", "collective", "number", "bytes")]
        rows += [(d, c, f"{t.number:,}", f"{t.n_bytes:,}") for (d, c), t in self.tallies.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{d:<{widths[0]}}  {c:<{widths[1]}}  {number:>{widths[2]}}  {size:>{widths[3]}}"
            for d, c, number, size in rows
        )


class Entered(NamedTuple):
    """One collective or message that a rank began: over which dimension of the mesh, its kind, bytes of the whole."""

    dimension: str
    collective: str
    n_bytes: int


@checked
def wire_factor(collective: str, n_ranks: int) -> float:
    """Return the bytes that a rank of ``n_ranks`` sends for each byte counted, with ring algorithms.

    An all-reduce is a reduce-scatter and an all-gather: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 7.1.

    Raises:
        ValueError: for a collective whose ranks do not all send the same, and for fewer than one rank.
    """
    if n_ranks < 1:
        raise ValueError(f"n_ranks is {n_ranks}: give an integer of at least 1")
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
    if collective in rounds:
        return rounds[collective] * (n_ranks - 1) / n_ranks
    if collective in ("send", "recv"):
        return float(collective == "send")
    raise ValueError(
        f"collective is {collective!r}, whose ranks send unequal amounts: use one of {', '.join(rounds)}, send, recv"
    )


@checked
def count_collectives(fn: Callable[[], object], device_mesh: DeviceMesh | None = None) -> CollectiveCounts:
    """Call ``fn`` and count every collective and message that this process begins meanwhile, on any process group.

    What backward begins is counted as well. The first step of a model does more than later ones (it opens connections):
    for the steady state count the second.

    Args:
        fn: called without arguments; its result is dropped.
        device_mesh: the mesh whose dimensions' names to use; without it there are ``"world"`` and ``"other"``.

    Raises:
        RuntimeError: if there is no process group.
    """
    with CollectiveCounter(device_mesh) as counter:
        fn()
    return counter.counts


@checked
class CollectiveCounter:
    """Counts in a ``with`` block, as :func:`count_collectives` does during a call.

    Attributes:
        entered: what was counted, one by one, in its order.
    """

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("no process group, so nothing to count: call init_distributed(config) first")
        self._dimensions = _ranks_by_dimension(device_mesh)
        self._tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self.entered: list[Entered] = []
        self._watcher = CollectiveWatcher(self._note)

    @property
    def counts(self) -> CollectiveCounts:
        """What was counted so far."""
        return CollectiveCounts(self._tallies)

    def __enter__(self) -> "CollectiveCounter":
        self._watcher.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watcher.__exit__(kind, error, traceback)

    def _note(self, operator: str, group: dist.ProcessGroup, n_bytes: int) -> None:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            each = Entered(self._dimension_of(ranks), _kind_of(operator), n_bytes)
            self._tallies[each.dimension, each.collective] += Tally(1, n_bytes)
            self.entered.append(each)

    def _dimension_of(self, ranks: Iterable[int]) -> str:
        members = frozenset(ranks)
        for name, whole in self._dimensions.items():
            if members == whole:
                return name
        for name, whole in self._dimensions.items():
            if members < whole and name != "world":
                return f"{name}:{len(members)}"
        return "other"


def _ranks_by_dimension(device_mesh: DeviceMesh | None) -> dict[str, frozenset[int]]:
    """Return this rank's group along each dimension, then the world, which a mesh of one dimension is too."""
    names = () if device_mesh is None else device_mesh.mesh_dim_names or ()
    found = {
        name: frozenset(dist.get_process_group_ranks(device_mesh.get_group(name)))
        for name in names
        if device_mesh is not None
    }
    return found | {"world": frozenset(range(dist.get_world_size()))}


def _kind_of(operator: str) -> str:
    spelled = operator.replace("_", "")
    return next((kind for prefix, kind in _KINDS.items() if spelled.startswith(prefix)), operator)
