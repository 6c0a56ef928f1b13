"""The one place that touches private names of torch, which move between releases."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage

__all__ = ["LocalNeighboursStage", "set_timeout"]


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Limit how long messages of ``group`` may take: a mesh gives its groups torch's default of half an hour."""
    distributed_c10d._set_pg_timeout(timeout, group)


class LocalNeighboursStage(PipelineStage):
    """A stage whose neighbours may live on its own rank, as under V placements or on a single rank.

    torch before 2.12 opens connections by a message to every neighbour, itself included, which gloo refuses.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]
