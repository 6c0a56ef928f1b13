"""Activation checkpointing: keep a block's input, and recompute the rest of its activations in backward.

    none        every activation is kept
    selective   attention is recomputed, the feed-forward block's activations are kept
    full        only the input of each block is kept: least memory, one more forward

:func:`find_blocks` decides which modules are blocks.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; recomputing attention alone:
Korthikanti et al. 2022, arXiv:2205.05198, section 5.
"""

from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import check_arguments
from course_pp.collective import on_every_rank
from course_pp.parallel.blocks import Blocks, find_blocks, listed, modules_matching
from course_pp.parallel.forwards import Recomputed
from course_pp.parallel.order import check_order

__all__ = ["apply_ac", "check_mode"]

_MODES = ("none", "full", "selective")


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

    Raises:
        ValueError: for an unknown mode, if checkpointing or FSDP2 was applied already, for blocks that
            :func:`find_blocks` refuses, or for a block that does not have one attention.
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
    """Return the one attention of a block, by its name in the model."""
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


def check_mode(name: str, mode: object) -> None:
    """Refuse what is not one of the modes.

    Raises:
        ValueError: naming the argument, its value and the modes.
    """
    if mode not in _MODES:
        raise ValueError(f"{name}={mode!r} must be one of {', '.join(map(repr, _MODES))}")
