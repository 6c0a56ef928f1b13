"""AdamW, and a learning rate that warms up and then falls along a cosine."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from course_pp.model import Transformer
from course_pp.training.config import TrainConfig

__all__ = ["build_optimizer", "build_scheduler", "warmup_cosine"]


def build_optimizer(modules: Iterable[nn.Module], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over the parameters of this rank's stages.

    Matrices decay. Norms, biases and embeddings do not, in a parameter group of their own: pulling a norm's weight
    towards 0 shrinks what the layer passes on, and the rows of rare tokens would decay without being trained.

    Build it after FSDP2 has replaced the parameters. No rank needs another's state: each updates what it holds.
    """
    modules = list(modules)
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    kept = _without_decay(modules)
    groups = [
        {"params": [p for p in parameters if id(p) not in kept], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if id(p) in kept], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr)


def _without_decay(modules: Iterable[nn.Module]) -> set[int]:
    """Ids of the parameters that do not decay: vectors, embeddings, and an output matrix tied to an embedding."""
    parts = [part for module in modules for part in module.modules()]
    vectors = [p for part in parts for p in part.parameters(recurse=False) if p.dim() < 2]
    embeddings = [part.weight for part in parts if isinstance(part, nn.Embedding)]
    tied = [part.tied_weight for part in parts if isinstance(part, Transformer)]
    return {id(p) for p in (*vectors, *embeddings, *tied) if p is not None}


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
