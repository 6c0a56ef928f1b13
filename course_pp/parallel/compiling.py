"""Compilation: ``torch.compile`` for each block by itself, so that one compilation serves all blocks that are alike.

    FSDP2 gathers ─► compiled forward of a block ─► FSDP2 frees        hooks stay outside
                  or checkpoint ( compiled forward )        what is recomputed is compiled too

Compiling a whole stage at once would take that time again for every layer, and FSDP2's work between blocks would break
it into the same pieces.

Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", ASPLOS.
"""

from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from course_pp.arguments import checked
from course_pp.parallel.blocks import Blocks, find_blocks, listed, nearest
from course_pp.parallel.forwards import Compiled, Recomputed, has_replaced, replaced_forwards
from course_pp.parallel.order import check_order

__all__ = ["apply_compile"]


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
        ValueError: for an unknown backend, if compilation or FSDP2 was applied already, for blocks that
            :func:`find_blocks` refuses, or blocks that tensor parallelism has cut and ``"selective"`` checkpoints in
            part.
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
        _check_checkpointing(name, block)
    for block in found.values():
        _compile(block, backend)
    return tuple(found)


def _check_checkpointing(name: str, block: nn.Module) -> None:
    """Refuse what torch 2.13 would compile into a graph that cannot run: it saves the mesh as if it were a tensor.

    Raises:
        ValueError: for a block that tensor parallelism has cut and that is recomputed in part.
    """
    inner = next((n for n, part in block.named_modules() if part is not block and has_replaced(part, Recomputed)), None)
    if inner is not None and any(isinstance(parameter, DTensor) for parameter in block.parameters()):
        raise ValueError(
            f"block {name!r} is cut by tensor parallelism and its {inner!r} is recomputed, which torch cannot compile "
            "in one piece: use apply_ac(..., 'full') or 'none'"
        )


def _compile(block: nn.Module, backend: str) -> None:
    """Compile what a block recomputes, if it is recomputed as a whole, and the block itself if not."""
    around = next(replaced_forwards(block.forward), None)
    if isinstance(around, Recomputed):
        around.forward = Compiled(around.forward, backend).run
    else:
        Compiled(block.forward, backend).put_on(block)


@cache
def _problem_of(backend: str, device: str) -> str | None:
    """Return what keeps ``backend`` from compiling for ``device``, tried out on one addition."""
    if device == "meta":
        return None
    ones = torch.ones(2, device=device)
    try:
        torch.compile(_double, backend=backend)(ones)
    except Exception as error:  # whatever a foreign compiler raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (
            f"torch.compile with backend={backend!r} does not work for {device} here ({type(error).__name__}: "
            f"{lines[0] if lines else 'no message'}): install what is missing (g++ and Python's headers for a CPU, "
            "Triton for a GPU), or leave apply_compile out"
        )
    return None


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x
