"""A layout on paper: where each rank is, and the shapes that its stages' parameters have there. Nothing is built."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from course_pp.sizes import ModelConfig, compute_layer_assignment

__all__ = [
    "Coordinates",
    "Group",
    "Shape",
    "StagePlan",
    "coordinates",
    "gathered_elements",
    "held_elements",
    "shards_head",
    "stage_plans",
    "unsharded_elements",
]

Shape = tuple[int, ...]
Group = tuple[Shape, ...]


@dataclass(frozen=True)
class Coordinates:
    """Where a rank is in the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int


@dataclass(frozen=True)
class StagePlan:
    """One stage on one rank: the shapes that tensor parallelism leaves of its parameters, in FSDP2's groups.

    Attributes:
        index: which stage, of ``n_stages``.
        root: embedding, final norm and head, where they are here.
        layer: one decoder layer, of ``n_layers``, all alike.
    """

    index: int
    n_stages: int
    root: Group
    layer: Group
    n_layers: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.n_stages - 1

    @property
    def groups(self) -> list[Group]:
        """The groups that own parameters."""
        return [*([self.root] if self.root else []), *[self.layer] * self.n_layers]

    def total(self, of: Callable[[Group], int]) -> int:
        """Return the sum over the groups of what is 0 for an empty one; layers, being alike, are asked once."""
        return of(self.root) + self.n_layers * of(self.layer)


def coordinates(rank: int, *, pp: int, dp_replicate: int, dp_shard: int, tp: int) -> Coordinates:
    """Return a global rank's place in a mesh of these sizes, the last dimension running fastest."""
    rest, at_tp = divmod(rank, tp)
    rest, at_shard = divmod(rest, dp_shard)
    at_pp, at_replicate = divmod(rest, dp_replicate)
    if not 0 <= at_pp < pp:
        raise ValueError(f"rank {rank} of {pp * dp_replicate * dp_shard * tp}: give 0 to one less")
    return Coordinates(at_pp, at_replicate, at_shard, at_tp)


def stage_plans(config: ModelConfig, indices: Iterable[int], n_stages: int, tp: int) -> list[StagePlan]:
    """Return the stages ``indices`` of ``n_stages``, layers split evenly.

    Raises:
        ValueError: for fewer layers than stages.
    """
    n_layers = [end - start for start, end in compute_layer_assignment(config.n_layers, n_stages)]
    layer = _layer(config, tp)
    return [StagePlan(i, n_stages, _root(config, tp, i, n_stages), layer, n_layers[i]) for i in indices]


def gathered_elements(group: Sequence[Shape], n_shards: int) -> int:
    """Return the elements of a group gathered from ``n_shards`` shards: rows are padded to a multiple of that."""
    return sum(-(-shape[0] // n_shards) * n_shards * prod(shape[1:]) for shape in group)


def held_elements(group: Sequence[Shape], n_shards: int, at: int) -> int:
    """Return the elements of a group that shard ``at`` of ``n_shards`` holds: the last ones may be short, or empty."""
    held = 0
    for shape in group:
        rows = -(-shape[0] // n_shards)
        held += max(0, min(rows, shape[0] - at * rows)) * prod(shape[1:])
    return held


def unsharded_elements(stages: Iterable[StagePlan], n_shards: int, policy: bool | int, *, pipelined: bool) -> int:
    """Return the most elements of gathered parameters alive in a step (``parallel.traffic_and_memory``).

    Args:
        policy: what becomes of a group after forward: freed (True), kept (False), kept on so many ranks.
        pipelined: whether the step is a pipeline's, whose backward keeps what it gathered.
    """
    left = Fraction(not policy) if isinstance(policy, bool) else Fraction(1, policy)
    n_elements = Fraction(0)
    for stage in stages:
        root, layer = (gathered_elements(group, n_shards) for group in (stage.root, stage.layer))
        # A layer in use, and one gathered ahead; from one shard there is nothing to gather.
        full = stage.n_layers if pipelined else min(2 if n_shards > 1 else 1, stage.n_layers)
        n_elements += root + layer * (full + left * (stage.n_layers - full))
    return int(n_elements)


def shards_head(config: ModelConfig, tp: int) -> bool:
    """Return whether the head is cut over the vocabulary; a head that is, or mirrors, a replicated embedding is not."""
    return not config.tie_embeddings and config.vocab_size % tp == 0


def _root(config: ModelConfig, tp: int, index: int, n_stages: int) -> Group:
    matrix: Shape = (config.vocab_size, config.dim)
    root: list[Shape] = [matrix] if index == 0 else []
    if index == n_stages - 1:
        root.append((config.dim,))
        if shards_head(config, tp):
            root.append((config.vocab_size // tp, config.dim))
        elif n_stages > 1 or not config.tie_embeddings:  # a whole tied model has one matrix for both ends
            root.append(matrix)
    return tuple(root)


def _layer(config: ModelConfig, tp: int) -> Group:
    """Column-wise matrices lose rows, row-wise ones columns, norms nothing."""
    dim, hidden, kv_dim = config.dim, config.hidden_dim, config.kv_heads * config.head_dim
    attention: Group = ((dim // tp, dim), (kv_dim // tp, dim), (kv_dim // tp, dim), (dim, dim // tp))
    if config.qkv_bias:
        attention += ((dim // tp,), (kv_dim // tp,), (kv_dim // tp,))
    feed_forward: Group = ((hidden // tp, dim),) * (config.n_ffn_matrices - 1) + ((dim, hidden // tp),)
    return ((dim,), *attention, (dim,), *feed_forward)
