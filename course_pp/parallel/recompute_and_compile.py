"""What is done to the blocks of a model one by one: they are recomputed in backward, and compiled.

    none        every activation is kept
    selective   attention is recomputed, the feed-forward block's activations are kept
    full        only the input of each block is kept: least memory, one more forward

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; recomputing attention alone:
Korthikanti et al. 2022, arXiv:2205.05198, section 5.

Each block is compiled by itself, so that one compilation serves all blocks that are alike; FSDP2's work between blocks
would break a larger graph into the same pieces.

    FSDP2 gathers ─► compiled forward of a block ─► FSDP2 frees        hooks stay outside
                  or checkpoint ( compiled forward )        what is recomputed is compiled too
"""

from functools import cache
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from course_pp.arguments import check_arguments, checked
from course_pp.collective import on_every_rank
from course_pp.parallel.blocks import Blocks, check_order, find_blocks, listed, modules_matching, nearest
from course_pp.parallel.replaced_forward import Compiled, Recomputed, has_replaced, replaced_forwards


def apply_ac(
    model: nn.Module,
    mode: Literal["none", "full", "selective"],
    *,
    blocks: Blocks = None,
    attention: str | None = None,
    device_mesh: DeviceMesh | None = None,
) -> tuple[str, ...]:
    """Checkpoint the blocks of ``model`` in place: after tensor parallelism, before compilation and FSDP2.

    Results do not change. Each microbatch keeps the state of the random number generators it was computed with, so
    dropout is recomputed as it was. Under a schedule that splits backward (``zb_v``, ``interleaved_zb``,
    ``dualpipe_v``) torch runs a checkpointed module's forward again for each of its parameters, not just once.

    Args:
        model: any model, or one stage of it.
        mode: ``"none"``, a no-op; ``"full"``, every block; ``"selective"``, the attention of every block.
        blocks: see :func:`find_blocks`.
        attention: a name pattern inside a block, for ``"selective"``; None is the part whose class is named
            ``…Attention…``, as in this package, transformers and torch.
        device_mesh: call on all its ranks; if one refuses, all refuse. None asks no other rank.

    Returns:
        The names of the modules that are recomputed.
    """
    given = locals()

    def look() -> dict[str, nn.Module]:
        check_arguments(apply_ac, given)
        if mode == "none":
            return {}
        check_order(model, "activation checkpointing")
        found = find_blocks(model, blocks)
        return found if mode == "full" else dict(_attention_of(name, block, attention) for name, block in found.items())

    found = on_every_rank(device_mesh, look)
    for module in found.values():
        Recomputed(module.forward).put_on(module)
    return tuple(found)


def _attention_of(name: str, block: nn.Module, pattern: str | None) -> tuple[str, nn.Module]:
    found = _outermost_attention(block) if pattern is None else modules_matching(block, pattern)
    if len(found) != 1:
        sought = "whose class is named …Attention…" if pattern is None else f"that attention={pattern!r} matches"
        which = f" ({listed(found)})" if found else ""
        kinds = ", ".join(f"{child!r} ({type(part).__name__})" for child, part in block.named_children())
        raise ValueError(
            f"block {name!r} has {len(found)} parts {sought}{which}, but 'selective' recomputes one: pass attention=, "
            f"the name of one in the block, which has {kinds or 'no parts'}, or mode='full'"
        )
    [(inner, module)] = found.items()
    return ".".join(filter(None, (name, inner))), module


def _outermost_attention(block: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for child, part in block.named_children():
        if "Attention" in type(part).__name__:
            found[prefix + child] = part
        else:
            found |= _outermost_attention(part, f"{prefix}{child}.")
    return found


@checked
def apply_compile(model: nn.Module, *, blocks: Blocks = None, backend: str = "inductor") -> tuple[str, ...]:
    """Compile the blocks of ``model`` in place: after activation checkpointing, before FSDP2.

    Parameters keep their names. Results differ by rounding, because products and sums are done in another order. Random
    numbers, as in dropout, are drawn differently. Each rank compiles a block when it first runs, and again for other
    shapes, for evaluation and without gradients: allow minutes for the first step. If a schedule splits backward, a
    stage with compiled blocks does both halves in the first.

    Args:
        model: any model, or one stage of it, on its device.
        blocks: see :func:`find_blocks`.
        backend: one of ``torch.compiler.list_backends(exclude_tags=())``.

    Returns:
        The names of the blocks.

    Raises:
        ValueError: also for blocks that tensor parallelism has cut and ``"selective"`` checkpoints in part.
        RuntimeError: if the backend does not work on this machine; says what is missing.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f"backend={backend!r} must be one of {listed(nearest(backend, known) or known)}")
    check_order(model, "compile")
    found = find_blocks(model, blocks)
    problem = _problem_of(backend, next((p.device.type for p in model.parameters()), "cpu"))
    if problem is not None:
        raise RuntimeError(problem)
    for name, block in found.items():
        inner = next((n for n, part in block.named_modules() if n and has_replaced(part, Recomputed)), None)
        # torch 2.13 would compile a graph that cannot run: it saves the mesh as if it were a tensor.
        if inner is not None and any(isinstance(parameter, DTensor) for parameter in block.parameters()):
            raise ValueError(
                f"block {name!r} is cut by tensor parallelism and its {inner!r} is recomputed, which torch cannot "
                "compile in one piece: use apply_ac(..., 'full') or 'none'"
            )
    for block in found.values():
        around = next(replaced_forwards(block.forward), None)
        if isinstance(around, Recomputed):
            around.forward = Compiled(around.forward, backend).run
        else:
            Compiled(block.forward, backend).put_on(block)
    return tuple(found)


@cache
def _problem_of(backend: str, device: str) -> str | None:
    """Return what keeps ``backend`` from compiling for ``device``, tried out on one addition."""
    if device == "meta":
        return None
    ones = torch.ones(2, device=device)
    try:
        torch.compile(lambda x: x + x, backend=backend)(ones)
    except Exception as error:  # whatever a foreign compiler raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (
            f"torch.compile with backend={backend!r} does not work for {device} here ({type(error).__name__}: "
            f"{lines[0] if lines else 'no message'}): install what is missing (g++ and Python's headers for a CPU, "
            "Triton for a GPU), or leave apply_compile out"
        )
    return None
