"""What one rank refuses, all ranks of its mesh refuse.

A rank that raises alone leaves the others in the next collective, until their time limit. So whatever can be wrong with
the arguments of one rank is looked at before the first message, and settled by all.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import WrongArgument
from course_pp.collective import Ranks

__all__ = ["on_every_rank"]

T = TypeVar("T")


def on_every_rank(device_mesh: DeviceMesh | None, look: Callable[[], T]) -> T:
    """Check this rank's arguments; if any rank of ``device_mesh`` refuses its own, all refuse. A collective.

    Args:
        device_mesh: None is this rank alone. Anything else that is not a mesh counts as a mesh of all ranks.
        look: checks the arguments and returns a result; raises ValueError or TypeError if they are wrong. Sends
            nothing.

    Raises:
        ValueError: on every rank, if ``look`` fails on any, in the words of the lowest rank on which it does.
        RankMissing: if a rank has ended or does not come.
    """
    if device_mesh is None or not dist.is_initialized():
        return look()
    look = partial(_looked, look)
    if not isinstance(device_mesh, DeviceMesh) or device_mesh.size() == dist.get_world_size():
        return Ranks().collectively(look)
    for dimension in range(device_mesh.ndim):  # each row of ranks tells the next: after the last, all know
        look = partial(Ranks(device_mesh.get_group(dimension)).collectively, look)
    return look()


def _looked(look: Callable[[], T]) -> T:
    try:
        return look()
    except TypeError as error:  # on the other ranks, too, whoever expects a TypeError is to catch it
        raise error if isinstance(error, ValueError) else WrongArgument(str(error)) from error
