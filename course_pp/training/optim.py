"""Optimizers of `torch.optim` over parameter groups, and learning rates that warm up and then fall."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from course_pp.model import Transformer
from course_pp.training.config import SettingError, TrainConfig

__all__ = ["OptimizerFactory", "build_optimizer", "build_scheduler", "lr_factor", "parameter_groups"]

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer of parameter groups, each with ``params``, ``lr`` and ``weight_decay``: ``torch.optim.AdamW``, or
``partial(torch.optim.SGD, momentum=0.9)``. It must treat each number alone: a rank holds only a part of the model."""

# Those whose weight may have more than one dimension; every other norm's is a vector.
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def build_optimizer(
    modules: Iterable[nn.Module],
    config: TrainConfig,
    factory: OptimizerFactory | None = None,
    tied: Iterable[Mapping[int, str]] = (),
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters of this rank's stages, in the groups of :func:`parameter_groups`.

    Build it after FSDP2 has replaced the parameters. No rank needs another's state: each updates what it holds.

    Args:
        factory: None takes what ``config`` names, by default AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).
        tied: as for :func:`parameter_groups`.

    Raises:
        SettingError: for an option that the optimizer does not take, or refuses.
    """
    groups = parameter_groups(modules, config.weight_decay, tied)
    for group in groups:
        group["lr"] = config.lr
    return _from_config(groups, config) if factory is None else factory(groups)


def parameter_groups(
    modules: Iterable[nn.Module], weight_decay: float, tied: Iterable[Mapping[int, str]] = ()
) -> list[dict[str, Any]]:
    """Return the parameters of any modules, each once: those that decay, and those that do not.

    Matrices decay. Norms, biases, embeddings, and whatever else is a vector do not: pulling a norm's weight towards 0
    shrinks what the layer passes on, and the rows of rare tokens would decay without being trained. A matrix tied to an
    embedding is an embedding.

    Args:
        tied: ties between stages, each the parameter's name by stage, as :class:`course_pp.runtime.Pipeline` takes
            them. Ties within these modules, and those of our own model, are found.
    """
    modules = list(modules)
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    kept = _without_decay(modules, {name for tie in tied for name in tie.values()})
    groups = [
        {"params": [p for p in parameters if id(p) not in kept], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) in kept], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]  # torch takes an empty group, but not none


def _without_decay(modules: Iterable[nn.Module], tied_names: set[str]) -> set[int]:
    """Return the ids of the parameters that do not decay."""
    found: list[Tensor | None] = []
    for module in modules:
        found += [p for name, p in module.named_parameters() if p.dim() < 2 or name in tied_names]
        for part in module.modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag, *_NORMS)):
                found += part.parameters(recurse=False)
            if isinstance(part, Transformer):
                found.append(part.tied_weight)
    return {id(p) for p in found if p is not None}


def _from_config(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, config.optimizer)
    given = {name: value for name in ("betas", "eps") if (value := getattr(config, name)) is not None}
    takes = set(inspect.signature(kind).parameters) - {"params", "lr", "weight_decay", "foreach", "fused"}
    if strangers := sorted(given.keys() - takes):
        name = strangers[0]
        raise SettingError(
            f"{{{name}}} is nothing that {{optimizer}} takes, which is {', '.join(sorted(takes))}: leave it out",
            {name: given[name], "optimizer": config.optimizer},
        )
    options = {"optimizer_options": dict(config.optimizer_options), "optimizer": config.optimizer}
    if strangers := sorted(config.optimizer_options.keys() - (takes - {"betas", "eps"})):
        raise SettingError(
            f"{{optimizer_options}} hold {strangers[0]!r}, and {{optimizer}} takes {', '.join(sorted(takes))}", options
        )
    try:
        optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr, **given, **config.optimizer_options)
    except (TypeError, ValueError) as error:
        raise SettingError(f"{{optimizer}} refuses {{optimizer_options}}: {error}", options) from error
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LambdaLR:
    """Return the learning rate of every step, as a factor on the optimizer's."""

    # A plain function: LambdaLR would put the attributes of anything else into its state.
    def factor(step: int) -> float:
        return lr_factor(step, config)

    return LambdaLR(optimizer, factor)


def lr_factor(step: int, config: TrainConfig) -> float:
    """Return the learning rate of ``step``, counted from 0, as a share of the peak.

    With w the warm-up and n all steps it rises linearly, (step + 1) / w, so that no step is wasted at 0 (Goyal et
    al. 2017, arXiv:1706.02677, section 2.2). Then, by ``config.lr_schedule``:

        cosine     falls along half a cosine to ``min_lr`` (Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5)
        linear     falls along a line to ``min_lr``
        wsd        stays at the peak, and falls along a line in the last ``decay`` steps: warm-up, stable, decay
                   (Hu et al. 2024, MiniCPM, arXiv:2404.06395; Hägele et al. 2024, arXiv:2405.18392)
        constant   stays at the peak

    After the last step it stays where it is.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.lr_schedule == "constant":
        return 1.0
    begin = config.warmup if config.lr_schedule != "wsd" else max(config.warmup, config.steps - config.decay)
    progress = min(1.0, max(0, step - begin) / max(1, config.steps - begin))
    left = (1 + math.cos(math.pi * progress)) / 2 if config.lr_schedule == "cosine" else 1 - progress
    return config.min_lr + (1 - config.min_lr) * left
