"""Rotary positions (Su et al. 2021): queries and keys are turned by an angle that grows with the position."""

import math

import torch
from torch import Tensor

from course_pp.sizes import ModelConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pair (i, i + head_dim/2) of x (batch, heads, seq, head_dim) by its position's angle.

    The tables are rounded to x's dtype first, as transformers does: FSDP2's mixed precision casts the inputs
    of every layer in the same way, so the result is the same with it and without.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each float32 (max_seq_len, head_dim / 2) on the CPU.

    Angle of position t and pair i: t · theta^(-2i / head_dim) (Su et al. 2021, arXiv:2104.09864, section
    3.2.2). With `rope_factor` f, pairs with a wavelength above rope_original_len / rope_low_freq turn f times slower,
    those below rope_original_len / rope_high_freq as before, and those in between by a mean of both, weighted by where
    the frequency lies (Llama 3.1's `apply_scaling`, github.com/meta-llama/llama-models).
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    if config.rope_factor != 1:
        frequencies = _slowed(frequencies, config)
    positions = torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu")
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def _slowed(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Return the frequencies for longer sequences than the model was trained with."""
    turns = config.rope_original_len * frequencies / (2 * math.pi)
    kept = ((turns - config.rope_low_freq) / (config.rope_high_freq - config.rope_low_freq)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / config.rope_factor
