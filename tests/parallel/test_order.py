"""Transformations have one order, and every rank refuses any other.

Tensor → expert parallel → activation checkpointing → compile → FSDP2.
"""

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer
from course_pp.parallel import apply_ac, apply_compile, apply_fsdp2, apply_tensor_parallel

RANKS_IMPORT = ("torch._dynamo.backends.debugging",)

CONFIG = ModelConfig(
    dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=20, max_seq_len=16
)

Step = Callable[[nn.Module, DeviceMesh], None]
STEPS: dict[str, Step] = {
    "tensor parallel": apply_tensor_parallel,
    "full": lambda model, mesh: apply_ac(model, "full"),
    "selective": lambda model, mesh: apply_ac(model, "selective"),
    "compile": lambda model, mesh: apply_compile(model, backend="eager"),
    "FSDP2": apply_fsdp2,
}
WRONG = [
    ("compile", "tensor parallel", "compile"),
    ("compile", "selective", "compile"),
    ("FSDP2", "compile", "FSDP2"),
    ("compile", "compile", "compile"),
    ("full", "tensor parallel", "activation checkpointing"),
    ("selective", "tensor parallel", "activation checkpointing"),
    ("FSDP2", "tensor parallel", "FSDP2"),
    ("FSDP2", "full", "FSDP2"),
    ("FSDP2", "selective", "FSDP2"),
    ("tensor parallel", "tensor parallel", "tensor parallel"),
    ("full", "selective", "activation checkpointing"),
    ("selective", "selective", "activation checkpointing"),
    ("FSDP2", "FSDP2", "FSDP2"),
]


def refusals_on_rank(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    messages = []
    for first, second, _ in WRONG:
        model = Transformer(CONFIG)
        STEPS[first](model, mesh)
        try:
            STEPS[second](model, mesh)
            messages.append(f"{second} after {first} was not refused")
        except ValueError as refusal:
            messages.append(str(refusal))
    return messages


def test_a_wrong_order_is_refused_with_what_was_applied_and_the_order() -> None:
    first, second = on_ranks(2, refusals_on_rank)
    assert second == first
    for message, (_, _, applied) in zip(first, WRONG, strict=True):
        assert (
            f"was called on a model that already has {applied}, but the order is stage → tensor"
            " parallel" in message
        )
        calls = (
            "apply_tensor_parallel, apply_expert_parallel, apply_float8, apply_ac, apply_compile,"
            " apply_fsdp2"
        )
        assert message.endswith(f"build the stage anew and call {calls}")


def test_steps_that_do_nothing_can_be_repeated() -> None:
    model = Transformer(CONFIG)
    for _ in range(2):
        apply_tensor_parallel(model, None)
        apply_ac(model, "none")
        apply_fsdp2(model, None)
    apply_ac(model, "selective")
    apply_fsdp2(model, None)
