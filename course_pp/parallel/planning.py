"""A layout on paper: where each rank is, which stages and shards it holds, in which dtypes. Nothing is built."""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_pp.model import ModelConfig
from course_pp.parallel.fsdp import ReshardPolicy, policy_of_dtypes, reshard_policy_of_sizes
from course_pp.parallel.mesh import DistributedConfig
from course_pp.parallel.schedules import get_stage_indices
from course_pp.plan.shapes import Coordinates, StagePlan, coordinates, gathered_elements, stage_plans

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


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a model.

    Attributes:
        kept: of the parameters.
        computed: in which parameters are gathered and used.
        reduced: in which FSDP2 reduces gradients.
    """

    kept: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype


def coordinates_of(layout: DistributedConfig) -> list[Coordinates]:
    """Return each global rank's place in the mesh, the last dimension running fastest.

    Raises:
        ValueError: if ``dp_shard`` is -1.
    """
    if layout.dp_shard == -1:
        raise ValueError(
            "dp_shard=-1 stands for the ranks that are left, but on paper there are none yet: say how many, 1 for no "
            "sharding"
        )
    n_ranks = layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp
    sizes = layout.sizes(n_ranks)
    return [coordinates(rank, **sizes) for rank in range(n_ranks)]


def stages_of(config: ModelConfig, layout: DistributedConfig, schedule: str, pp_rank: int) -> list[StagePlan]:
    """Return the stages that a pipeline rank holds under ``schedule``, layers split evenly.

    Raises:
        ValueError: for an unknown schedule, or fewer layers than stages.
    """
    indices = get_stage_indices(schedule, pp_rank, layout.pp) if layout.pp > 1 else [0]
    n_stages = layout.pp * len(indices)
    return stage_plans(config, indices, n_stages, layout.tp)


def dtypes_of(dtype: torch.dtype, mp_policy: MixedPrecisionPolicy | None, layout: DistributedConfig) -> Dtypes:
    """Return what :func:`apply_fsdp2` makes of a model in ``dtype``; without it a policy has no effect."""
    if layout.dp_replicate * layout.dp_shard == 1:
        return Dtypes(dtype, dtype, dtype)
    mp_policy = policy_of_dtypes({dtype}) if mp_policy is None else mp_policy
    computed = mp_policy.param_dtype or dtype
    return Dtypes(dtype, computed, mp_policy.reduce_dtype or computed)


def reshard_policy_of(policy: ReshardPolicy, layout: DistributedConfig) -> bool | int:
    """:func:`resolve_reshard_after_forward` for a mesh that is not there yet."""
    return reshard_policy_of_sizes(policy, pp=layout.pp, dp_shard=layout.dp_shard, tp=layout.tp)
