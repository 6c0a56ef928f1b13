"""A layout on paper: where each rank is, which stages and shards it holds, in which dtypes. Nothing is built."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_pp.model import ModelConfig, compute_layer_assignment
from course_pp.parallel.fsdp import ReshardPolicy, policy_of_dtypes, reshard_policy_of_sizes
from course_pp.parallel.mesh import DistributedConfig
from course_pp.parallel.plans import shards_head
from course_pp.parallel.schedules import get_stage_indices

__all__ = [
    "Coordinates",
    "Dtypes",
    "StagePlan",
    "coordinates_of",
    "dtypes_of",
    "gathered_elements",
    "reshard_policy_of",
    "stages_of",
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

    Args:
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
        """Those that own parameters."""
        return [*([self.root] if self.root else []), *[self.layer] * self.n_layers]


@dataclass(frozen=True)
class Dtypes:
    """In which parameters are kept, in which they are gathered and used, in which FSDP2 reduces gradients."""

    kept: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype


def coordinates_of(layout: DistributedConfig) -> list[Coordinates]:
    """Each global rank's place in the mesh, the last dimension running fastest.

    Raises:
        ValueError: if ``dp_shard`` is -1.
    """
    if layout.dp_shard == -1:
        raise ValueError(
            "dp_shard=-1 stands for the ranks that are left, but on paper there are none yet: say how many, 1 for no "
            "sharding"
        )
    sizes = layout.sizes(layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp)
    coordinates = []
    for rank in range(prod(sizes.values())):
        place = {}
        for name, size in reversed(sizes.items()):
            rank, place[name] = divmod(rank, size)
        coordinates.append(Coordinates(**place))
    return coordinates


def stages_of(config: ModelConfig, layout: DistributedConfig, schedule: str, pp_rank: int) -> list[StagePlan]:
    """The stages that a pipeline rank holds under ``schedule``, layers split evenly.

    Raises:
        ValueError: for an unknown schedule, or fewer layers than stages.
    """
    indices = get_stage_indices(schedule, pp_rank, layout.pp) if layout.pp > 1 else [0]
    n_stages = layout.pp * len(indices)
    ranges = compute_layer_assignment(config.n_layers, n_stages)
    n_layers = [end - start for start, end in ranges]
    layer = _layer(config, layout.tp)
    return [StagePlan(i, n_stages, _root(config, layout.tp, i, n_stages), layer, n_layers[i]) for i in indices]


def gathered_elements(group: Sequence[Shape], n_shards: int) -> int:
    """Elements of a group gathered from ``n_shards`` shards: each parameter's rows are padded to a multiple of them."""
    return sum(-(-shape[0] // n_shards) * n_shards * prod(shape[1:]) for shape in group)


def dtypes_of(dtype: torch.dtype, mp_policy: MixedPrecisionPolicy | None, layout: DistributedConfig) -> Dtypes:
    """What :func:`apply_fsdp2` makes of a model in ``dtype``; without it a policy has no effect."""
    if layout.dp_replicate * layout.dp_shard == 1:
        return Dtypes(dtype, dtype, dtype)
    mp_policy = policy_of_dtypes({dtype}) if mp_policy is None else mp_policy
    computed = mp_policy.param_dtype or dtype
    return Dtypes(dtype, computed, mp_policy.reduce_dtype or computed)


def reshard_policy_of(policy: ReshardPolicy, layout: DistributedConfig) -> bool | int:
    """:func:`resolve_reshard_after_forward` for a mesh that is not there yet."""
    return reshard_policy_of_sizes(policy, pp=layout.pp, dp_shard=layout.dp_shard, tp=layout.tp)


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
    feed_forward: Group = ((hidden // tp, dim), (hidden // tp, dim), (dim, hidden // tp))
    return ((dim,), *attention, (dim,), *feed_forward)
