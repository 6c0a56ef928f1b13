"""Parallel styles beside torch's own, for the plans of tensor parallelism."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from course_pp.parallel.vocab_parallel import gather_vocabulary

__all__ = ["GatheredColwiseParallel", "SequencesDivide", "check_sequence_divides"]


class GatheredColwiseParallel(ColwiseParallel):
    """Column-wise, with the parts put together behind the module: for a head whose whole logits are wanted.

    torch's ``output_layouts=Replicate()`` sums gradients that are equal on every rank, and returns a view, on which
    hooks of FSDP2 can be lost.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__(input_layouts=input_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(_Gather(device_mesh))
        return module


class SequencesDivide(ParallelStyle):
    """Cuts nothing; refuses inputs (batch, seq, …) of a length that the ranks of ``tp`` cannot share equally."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(_LookAtLength(device_mesh.size()))
        return module


def check_sequence_divides(seq_len: int, tp: int) -> None:
    """Refuse a sequence that the ranks of ``tp`` cannot share equally: DTensor would pad it, our residuals not.

    Raises:
        ValueError: naming the next length that works.
    """
    if seq_len % tp:
        raise ValueError(
            f"seq_len={seq_len} must be a multiple of tp={tp} for sequence-parallel norms: "
            f"pad it to {-(-seq_len // tp) * tp}"
        )


class _LookAtLength:
    def __init__(self, tp: int) -> None:
        self.tp = tp

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dim() > 1:
            check_sequence_divides(args[0].shape[1], self.tp)


class _Gather:
    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], part: Tensor) -> Tensor:
        return gather_vocabulary(part, self.mesh.get_group())
