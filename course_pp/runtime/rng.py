"""The state of the random number generators, so that dropout draws what it would draw in one process.

Seeded, a microbatch carries the generators' state from stage to stage: each goes on where the one before left off, and
the masks do not depend on where the model is cut.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["RandomState", "get_random_state", "random_state_kept", "set_random_state"]

RandomState = tuple[Tensor, Tensor | None]
"""State of the CPU's generator, and of the CUDA device's if that is where stages compute."""


def get_random_state(device: torch.device) -> RandomState:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: RandomState, device: torch.device) -> None:
    on_cpu, on_cuda = state
    # Clones: torch reads a state from the beginning of its storage, which for one that was received is elsewhere.
    torch.set_rng_state(on_cpu.cpu().clone())
    if on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda.cpu().clone(), device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Put the generators back to where they were, whatever is drawn inside."""
    before = get_random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
