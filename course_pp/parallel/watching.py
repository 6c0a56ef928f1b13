"""Modes that watch torch's dispatcher: its collectives, and the parameters that FSDP2 gathers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from course_pp.base.torch_private import (
    TorchDispatchMode,
    declared_arguments,
    gathered_bytes,
    groups_of,
    is_collective,
    operator_name,
    process_group,
    tree_leaves,
)


class CollectiveWatcher(TorchDispatchMode):
    """Reports every collective and message that this process begins in the ``with`` block.

    The process group does not matter: all of them pass torch's dispatcher, and autograd carries
    this mode to the threads that run backward.

    Args:
        tell: called with the operator's name, such as ``"_allgather_base_"``, the group, and the
            bytes of the larger of what goes in and what comes out on this rank.
    """

    def __init__(self, tell: Callable[[str, dist.ProcessGroup, int], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first; what it calls is seen here in turn
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_collective(func):
            names = [declared.name for declared in declared_arguments(func)]
            arguments = dict(zip(names, args, strict=False)) | kwargs
            group = arguments.get("process_group", arguments.get("group_name"))
            if group is not None:
                results = result if isinstance(result, tuple) else (result,)
                most = max(map(_n_bytes, (*arguments.values(), *results)))
                self._tell(operator_name(func), process_group(group), most)
        return result


def _n_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class GatheredWatcher(TorchDispatchMode):
    """Measures the gathered parameters FSDP2 holds, after each operation in the ``with`` block.

    ``peak`` is the largest number of bytes. A gather counts from its start, whether over all ranks
    of ``dp_shard`` or some, and counts once while it is copied out.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.peak = 0
        all_parts = [part for module in modules for part in module.modules()]
        parts = [part for part in all_parts if isinstance(part, FSDPModule)]
        self._groups = [group for part in parts for group in groups_of(part)]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, sum(map(gathered_bytes, self._groups)))
        return result
