"""Parallel styles beside torch's own, for the plans of tensor parallelism."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from course_pp.parallel.vocab_parallel import gather_vocabulary

__all__ = ["GatheredColwiseParallel", "PartOfSequence", "SequencesDivide", "WholeOutputs", "check_sequence_divides"]


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


class PartOfSequence(ParallelStyle):
    """Hands a module its rank's part of a first argument (batch, seq, …) that every rank has whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(_TakePart(device_mesh), with_kwargs=True)
        return module


class WholeOutputs(ParallelStyle):
    """Cuts nothing; refuses keywords that need whole sequences, of which each rank has a part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(_refuse_parts, with_kwargs=True)
        return module


_WITHOUT = "build the plan with partial(llama_plan, sequence_parallel=False)"


def _refuse_parts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name in ("logits_to_keep", "output_hidden_states"):
        asked = kwargs.get(name)
        if isinstance(asked, Tensor) or asked:
            raise ValueError(f"{name}={asked} needs whole sequences, of which each rank of tp holds a part: {_WITHOUT}")


def check_sequence_divides(seq_len: int, tp: int, otherwise: str = "") -> None:
    """Refuse a sequence that the ranks of ``tp`` cannot share equally: DTensor would pad it, our residuals not.

    Args:
        otherwise: what to do where it cannot be padded.

    Raises:
        ValueError: naming the next length that works.
    """
    if seq_len % tp:
        raise ValueError(
            f"seq_len={seq_len} must be a multiple of tp={tp} for sequence-parallel norms: "
            f"pad it to {-(-seq_len // tp) * tp}{otherwise}"
        )


class _TakePart:
    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole: Tensor = args[0]
        check_sequence_divides(whole.shape[1], self.mesh.size(), f", or {_WITHOUT}")
        placed = DTensor.from_local(whole, self.mesh, (Replicate(),), run_check=False)
        return (placed.redistribute(placements=(Shard(1),)).to_local(), *args[1:]), kwargs


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
