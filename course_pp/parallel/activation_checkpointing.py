"""Activation checkpointing: keep a block's input, and recompute the rest of its activations in backward.

    none        every activation is kept
    selective   attention is recomputed, the feed-forward block's activations are kept
    full        only the input of each block is kept: least memory, one more forward

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; recomputing attention alone:
Korthikanti et al. 2022, arXiv:2205.05198, section 5.
"""

from typing import Literal

from torch import nn

from course_pp.parallel.order import check_order, decoder_layers
from course_pp.parallel.recompute import recompute

__all__ = ["apply_ac", "check_mode"]

_MODES = ("none", "full", "selective")


def apply_ac(model: nn.Module, mode: Literal["none", "full", "selective"]) -> None:
    """Checkpoint the blocks of ``model`` in place: after tensor parallelism, before FSDP2.

    Results do not change. Each microbatch keeps the state of the random number generators it was computed with, so
    dropout is recomputed as it was. Under a schedule that splits backward (``zb_v``, ``interleaved_zb``,
    ``dualpipe_v``) torch runs a checkpointed module's forward not once more but again for each of its parameters.

    Args:
        model: a :class:`Transformer` or one stage of it.
        mode: ``"none"``, a no-op; ``"full"``, every block; ``"selective"``, the attention of every block.

    Raises:
        TypeError: if ``model`` is not a Transformer or a stage of one.
        ValueError: for an unknown mode, or if checkpointing or FSDP2 was applied already.
    """
    check_mode("mode", mode)
    if mode == "none":
        return
    for layer in decoder_layers(check_order(model, "activation checkpointing")):
        recompute(layer if mode == "full" else layer.attn)


def check_mode(name: str, mode: object) -> None:
    """Refuse what is not one of the modes.

    Raises:
        ValueError: naming the argument, its value and the modes.
    """
    if mode not in _MODES:
        raise ValueError(f"{name}={mode!r} must be one of {', '.join(map(repr, _MODES))}")
