"""Memory of gathered parameters: what FSDP2 holds beyond its shards, by reshard policy, predicted and measured.

With L layers of G bytes and the ends of R bytes on a rank, and the fraction f of a group that forward leaves behind,
0 for True, 1 for False, 1/k for an integer k, the most that is alive in a step is

    R + min(2, L) · G + f · max(0, L − 2) · G     without a pipeline
    R + L · G                                     with one, whatever the policy

Without a pipeline backward computes on one layer while the next is gathered, and frees each for good. In a pipeline
backward keeps what it gathered until the last microbatch's gradients are reduced, so True frees and gathers again
without lowering the peak.

Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, stage 3 (True) and stage 2 (False).
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_pp.arguments import checked, refuse_unless
from course_pp.model import ModelConfig
from course_pp.parallel._torch import GatheredWatcher
from course_pp.parallel.fsdp import ReshardPolicy
from course_pp.parallel.mesh import DistributedConfig
from course_pp.parallel.planning import coordinates_of, dtypes_of, reshard_policy_of, stages_of
from course_pp.plan.shapes import unsharded_elements

__all__ = ["measure_unsharded_bytes", "predict_unsharded_bytes"]


@checked
def predict_unsharded_bytes(
    config: ModelConfig,
    layout: DistributedConfig,
    *,
    schedule: str = "1f1b",
    reshard_after_forward: ReshardPolicy = "auto",
    dtype: torch.dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> tuple[int, ...]:
    """Return the most bytes of gathered parameters alive on each rank during a training step.

    Padding is counted, a finished gather's buffer while it is copied out is not. Arguments are those of
    :func:`predict_collectives`.

    Returns:
        One number a global rank; 0 without FSDP2.

    Raises:
        ValueError: for a layout that the model does not allow.
    """
    places = coordinates_of(layout)
    policy, dtypes = reshard_policy_of(reshard_after_forward, layout), dtypes_of(dtype, mp_policy, layout)
    applied = layout.dp_replicate * layout.dp_shard > 1
    peaks = []
    for at in places:
        stages = stages_of(config, layout, schedule, at.pp)
        n_elements = unsharded_elements(stages, layout.dp_shard, policy, pipelined=layout.pp > 1)
        peaks.append(n_elements * dtypes.computed.itemsize if applied else 0)
    return tuple(peaks)


@checked
def measure_unsharded_bytes(fn: Callable[[], object], modules: nn.Module | Iterable[nn.Module]) -> int:
    """Call ``fn`` and return the most bytes of gathered parameters that this rank's ``modules`` held meanwhile.

    Looked at after every operation, which is slow: meant for small models.
    """
    watched = [modules] if isinstance(modules, nn.Module) else list(modules)
    are_modules = bool(watched) and all(isinstance(module, nn.Module) for module in watched)
    refuse_unless(are_modules, "measure_unsharded_bytes", "modules", modules, "pass a module, or several")
    with GatheredWatcher(watched) as watcher:
        fn()
    return watcher.peak
