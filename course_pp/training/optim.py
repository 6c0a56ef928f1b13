"""AdamW, and a learning rate that warms up and then falls along a cosine."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from course_pp.training.config import TrainConfig

__all__ = ["build_optimizer", "build_scheduler", "warmup_cosine"]


def build_optimizer(modules: Iterable[nn.Module], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over the parameters of this rank's stages.

    Build it after FSDP2 has replaced the parameters. No rank needs another's state: each updates what it holds.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)


def build_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LambdaLR:
    """The learning rate of every step, as a factor on the optimizer's."""

    # A plain function: LambdaLR would put the attributes of anything else into its state.
    def factor(step: int) -> float:
        return warmup_cosine(step, config)

    return LambdaLR(optimizer, factor)


def warmup_cosine(step: int, config: TrainConfig) -> float:
    """Learning rate of `step`, counted from 0, as a share of the peak.

    With w the warm-up and n all steps it rises linearly, (step + 1) / w, so that no step is wasted at 0 (Goyal et
    al. 2017, arXiv:1706.02677, section 2.2), then falls along half a cosine from 1 to `min_lr` (Loshchilov & Hutter
    2017, arXiv:1608.03983, equation 5, without restarts). After the last step it stays at `min_lr`.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    return config.min_lr + (1 - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2
