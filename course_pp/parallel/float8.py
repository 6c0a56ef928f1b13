"""Linear layers whose three products are taken in eight bits; parameters stay in full precision.

    input, weight,          ──► scaled into float8's range, ──► product ──► scaled back
    gradient of the output      rounded

A number in float8 (e4m3) has three bits behind the point, so a rounding is off by at most 1/16 of
it. What keeps that bearable is the scale: the largest value of the whole tensor, or of each row,
becomes float8's largest. It is found anew in every forward and backward. The products and their
autograd are torchao's; on a CPU it emulates them, with the same rounding, in float32.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from course_pp.base.arguments import check_arguments
from course_pp.base.imports import imports_of_extra, imports_that_warn
from course_pp.base.ranks import refusing_together
from course_pp.parallel.blocks import listed
from course_pp.parallel.replaced_forward import EightBits, check_order

# The head and routers need their bits. Qwen2-MoE's gate of shared experts has a single output.
_SKIPPED = ("head", "lm_head", "router", "gate", "shared_expert_gate", "experts")
_MULTIPLE = 16  # of both sizes of a matrix, for the tensor cores
_FIRST_WITH_FLOAT8 = (8, 9)  # compute capability of Ada; Hopper is (9, 0)


def apply_float8(
    model: nn.Module,
    device_mesh: DeviceMesh | None,
    recipe: Literal["tensorwise", "rowwise"] = "tensorwise",
    *,
    skip: Collection[str] = (),
) -> tuple[str, ...]:
    """Let the linear layers of ``model`` multiply in eight bits, in place.

    Call it after tensor and expert parallelism, before activation checkpointing, compilation and
    FSDP2, on all ranks of the mesh at once. Names and values of parameters stay, so checkpoints do.
    Needs torchao: ``course_pp[fp8]``.

    Args:
        model: any model, or one stage of it, with parameters in float32 or bfloat16. Its
            ``nn.Linear`` are converted, their subclasses are not.
        recipe: one scale for a whole tensor, or one for each row (more exact, slower).
        skip: parts of dotted names; a layer with one of them in its name is left as it is. So is
            always a layer with ``head``, ``lm_head``, ``router``, ``gate``, ``shared_expert_gate``
            or ``experts``.

    Returns:
        The names of the layers.

    Raises:
        ImportError: without torchao.
        ValueError: on every rank of the mesh, for a wrong order, a model without such layers,
            another dtype, a size that is no multiple of 16, or a GPU without float8.
    """
    with refusing_together(device_mesh):
        check_arguments(apply_float8, locals())
        check_order(model, "float8")
        skipped = {*_SKIPPED, *skip}
        layers = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and skipped.isdisjoint(name.split("."))
        }
        if not layers:
            raise ValueError(
                f"apply_float8 finds no nn.Linear in {type(model).__name__} beside those it skips,"
                f" with {listed(sorted(skipped))} in their name: shorten skip=, or leave"
                " apply_float8 out"
            )
        for name, layer in layers.items():
            _check_layer(name, layer)
        config = _config_of(recipe, next(iter(layers.values())).weight.device)

    for layer in layers.values():
        EightBits(layer, config).put_on(layer)
    return tuple(layers)


def _check_layer(name: str, layer: nn.Linear) -> None:
    weight = layer.weight
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{name!r} is in {weight.dtype}: apply_float8 rounds float32 and bfloat16; convert the"
            " model first"
        )
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if any(size % _MULTIPLE for size in local.shape):
        raise ValueError(
            f"{name!r} has a weight of {tuple(local.shape)} on this rank, but products in float8"
            f" need multiples of {_MULTIPLE}: change the sizes, or add {name.split('.')[-1]!r} to"
            " skip="
        )
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < _FIRST_WITH_FLOAT8:
        raise ValueError(
            f"{torch.cuda.get_device_name(weight.device)} has no products in float8, which came"
            " with compute capability 8.9: compute in bfloat16 there"
        )


def _config_of(recipe: str, device: torch.device) -> Any:
    with imports_of_extra("fp8"), imports_that_warn():
        from torchao.float8 import Float8LinearConfig
    # Weight gradients multiply along the tokens, of which there may be any number.
    return replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=device.type != "cuda",
        pad_inner_dim=True,
    )
