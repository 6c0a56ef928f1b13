"""The order in which a model is transformed, and what tells that a step was taken.

    stage ─► tensor parallel ─► activation checkpointing ─► compile ─► FSDP2

Each step builds on the ones before it. Tensor parallelism cuts the matrices that FSDP2 then shards once more, and could
not find them inside FSDP2's shards. Checkpointing has to lie inside FSDP2's hooks: outside them, recomputing a block
would gather its parameters a second time. Compilation sees what checkpointing has put in place, and not the hooks that
FSDP2 adds.
"""

from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from course_pp.parallel.replaced_forward import Compiled, Recomputed, has_replaced

__all__ = ["Step", "applied_steps", "check_order"]

Step = Literal["tensor parallel", "activation checkpointing", "compile", "FSDP2"]

_CALLS: dict[Step, str] = {
    "tensor parallel": "apply_tensor_parallel",
    "activation checkpointing": "apply_ac",
    "compile": "apply_compile",
    "FSDP2": "apply_fsdp2",
}


def applied_steps(model: nn.Module) -> list[Step]:
    """Return the steps ``model`` has been through, in order."""
    tensor_parallel = any(
        isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ()) for p in model.parameters()
    )
    found: dict[Step, bool] = {
        "tensor parallel": tensor_parallel,
        "activation checkpointing": has_replaced(model, Recomputed),
        "compile": has_replaced(model, Compiled),
        "FSDP2": any(isinstance(module, FSDPModule) for module in model.modules()),
    }
    return [step for step in _CALLS if found[step]]


def check_order(model: nn.Module, step: Step) -> None:
    """Refuse to take ``step`` a second time, or after a step that must follow it.

    Raises:
        ValueError: naming what was applied, the order, and the remedy.
    """
    order = list(_CALLS)
    too_late = [done for done in applied_steps(model) if order.index(done) >= order.index(step)]
    if too_late:
        raise ValueError(
            f"{_CALLS[step]} was called on a model that already has {' and '.join(too_late)}, but the order is stage → "
            f"{' → '.join(order)}, each at most once: build the stage anew and call {', '.join(_CALLS.values())}"
        )
