"""How fast training is: tokens a second, and the share of the hardware's arithmetic that the model gets.

    model FLOPs utilisation = tokens/s · FLOPs a token / (peak FLOPs/s of all devices)

Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B. The FLOPs are those the model needs, forward and backward;
recomputation, as in activation checkpointing, does not count, so wasted arithmetic cannot raise the figure.
"""

import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from course_pp.arguments import checked
from course_pp.collective import Ranks
from course_pp.model import ModelConfig, layer_costs

__all__ = ["Peak", "Speed", "find_peak", "matmul_flops", "training_flops"]


def training_flops(config: ModelConfig, seq_len: int) -> float:
    """Return the FLOPs of one training step on one sequence, forward and backward.

    Three times the forward's (:func:`course_pp.model.layer_costs`): for each matrix product backward has two, for the
    gradient of its input and of its weight. PaLM's formula counts all query-key pairs; here only those that causal
    attention looks at, so this is at most PaLM's figure.
    """
    return 3 * layer_costs(config, seq_len).total


@checked
@dataclass(frozen=True)
class Peak:
    """The most that the devices of a run can do.

    Attributes:
        flops: floating-point operations a second, over all ranks.
        source: given (from a data sheet), or measured with a matrix product on all ranks at once.
    """

    flops: float
    source: Literal["given", "measured"]


@checked
@dataclass(frozen=True)
class Speed:
    """How fast steps of one size went.

    Attributes:
        tokens_of_a_step: positions of its batch; padding counts, as it costs the same.
        flops_of_a_step: what the model needs for it.
        peak: what the utilisation is measured against.
        steps, seconds: how many, and the wall time spent in them.
    """

    tokens_of_a_step: int
    flops_of_a_step: float
    peak: Peak
    steps: int = 0
    seconds: float = 0.0

    def after(self, seconds: float) -> "Speed":
        """Return the speed with one more step, which took ``seconds``."""
        return replace(self, steps=self.steps + 1, seconds=self.seconds + seconds)

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        return self.steps * self.tokens_of_a_step / self.seconds if self.steps else 0.0

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation, 1 at the peak; 0 before the first step."""
        return self.steps * self.flops_of_a_step / self.seconds / self.peak.flops if self.steps else 0.0


def find_peak(given: float | None, device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of all ranks together; call it on every rank.

    Args:
        given: FLOPs a second of one rank's device. None measures instead, on all ranks at the same time, so that ranks
            that share a processor are not promised all of it each.
        dtype: in which the model multiplies.
    """
    if given is not None:
        return Peak(given * dist.get_world_size(), "given")
    dist.barrier()
    return Peak(sum(Ranks().gather(matmul_flops(device, dtype))), "measured")


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 5) -> float:
    """Return the FLOPs a second of the fastest of `repeats` products of two matrices (size, size): 2 · size³ each."""
    if size is None:
        on_cpu = 768 if dtype.itemsize >= 4 else 256  # half precision is slow there
        size = 8192 if device.type == "cuda" else on_cpu
    a, b = torch.ones(2, size, size, device=device, dtype=dtype)
    product = a @ b  # the first also loads the library
    seconds = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        torch.mm(a, b, out=product)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
