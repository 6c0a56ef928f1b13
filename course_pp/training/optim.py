"""The parts of an update: optimizers over parameter groups, learning rates and number formats."""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from course_pp.model import Transformer
from course_pp.parallel.replaced_forward import EightBits, compute_dtypes, has_replaced
from course_pp.training.config import Precision, SettingError, TrainConfig

# Norm layers whose weight may be a matrix, so the rule "vectors do not decay" misses them.
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def build_optimizer(
    modules: Iterable[nn.Module], config: TrainConfig, tied: Iterable[Mapping[int, str]] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer that ``config`` names, over the groups of :func:`parameter_groups`.

    Call it after FSDP2 was applied, which replaces the parameters.
    """
    groups = parameter_groups(modules, config.weight_decay, tied)
    kind: Any = getattr(torch.optim, config.optimizer)
    given: dict[str, Any] = {}
    if config.betas is not None:
        given["betas"] = config.betas
    if config.eps is not None:
        given["eps"] = config.eps
    given |= config.optimizer_options

    # foreach and fused are left to torch, which knows the device and FSDP2's tensors.
    ours = {"params", "lr", "weight_decay", "foreach", "fused"}
    takes = set(inspect.signature(kind).parameters) - ours
    strangers = sorted(given.keys() - takes)
    if strangers:
        what = f"takes {', '.join(sorted(takes))}, and not {strangers[0]}"
        raise SettingError(f"{{optimizer}} {what}: leave it out", optimizer=config.optimizer)
    try:
        optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr, **given)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"{{optimizer}} refuses its options: {error}", optimizer=config.optimizer
        ) from error
    return optimizer


def parameter_groups(
    modules: Iterable[nn.Module], weight_decay: float, tied: Iterable[Mapping[int, str]] = ()
) -> list[dict[str, Any]]:
    """Return the parameters of modules, each once, in a group that decays and one that does not.

    Matrices decay. Vectors, norms, biases and embeddings do not: to pull a norm's weight towards 0
    shrinks the output of the layer, and the rows of rare tokens would decay without being trained.
    A matrix tied to an embedding is an embedding.

    Args:
        tied: ties between stages, each as ``{stage: parameter name}``. Ties within a module, and
            our own model's, are found.
    """
    modules = list(modules)
    tied_names = {name for tie in tied for name in tie.values()}
    undecayed: list[Tensor | None] = []
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.dim() < 2 or name in tied_names:
                undecayed.append(parameter)
        for part in module.modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag, *_NORMS)):
                undecayed += part.parameters(recurse=False)
            if isinstance(part, Transformer):
                undecayed.append(part.tied_weight)

    # By identity: one parameter may stand in several modules, and == compares values.
    ids = {id(parameter) for parameter in undecayed}
    parameters = {id(p): p for module in modules for p in module.parameters()}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for key, parameter in parameters.items():
        if key in ids:
            others.append(parameter)
        else:
            decaying.append(parameter)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # torch takes an empty group, but not an empty list of groups.
    return [group for group in groups if group["params"]] or groups[:1]


def build_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LambdaLR:
    """Return the learning rate of every step, as a factor on the optimizer's."""
    # A lambda, because LambdaLR would put the attributes of any other callable into its state.
    return LambdaLR(optimizer, lambda step: lr_factor(step, config))


def lr_factor(step: int, config: TrainConfig) -> float:
    """Return the learning rate of ``step``, counted from 0, as a share of the peak.

    With w steps of warm-up it rises linearly, (step + 1) / w, so that no step is wasted at 0 (Goyal
    et al. 2017, arXiv:1706.02677, section 2.2). Then, by ``config.lr_schedule``:

        cosine     falls along half a cosine to ``min_lr``
                   (Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5)
        linear     falls along a line to ``min_lr``
        wsd        stays at the peak, and falls along a line in the last ``decay`` steps: warm-up,
                   stable, decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395; Hägele et al. 2024,
                   arXiv:2405.18392)
        constant   stays at the peak

    After the last step it stays as it is.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.lr_schedule == "constant":
        return 1.0
    begin = config.warmup
    if config.lr_schedule == "wsd":
        begin = max(config.warmup, config.steps - config.decay)
    progress = min(1.0, max(0, step - begin) / max(1, config.steps - begin))
    left = 1 - progress
    if config.lr_schedule == "cosine":
        left = (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (1 - config.min_lr) * left


DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # for all but the products of linear layers
}


def precision_of(dtype: torch.dtype) -> Precision:
    """Return the name of stages that compute in ``dtype``; a wider format counts as ``"fp32"``."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    return "fp32"


def check_precision(precision: Precision, modules: Iterable[nn.Module]) -> None:
    """Refuse stages that compute in another format than ``precision`` names."""
    asked = DTYPES[precision]
    for module in modules:
        found = next(iter(compute_dtypes(module)), asked)
        kept = {parameter.dtype for parameter in module.parameters()}
        # "fp32" stands for the parameters' own format, but float16 needs the loss to be scaled.
        is_their_own = asked == torch.float32 and found in kept and found != torch.float16
        if found != asked and not is_their_own:
            raise SettingError(
                f"{{precision}}, and a stage computes in {found}: call compute_in(stage, dtype), or"
                " under FSDP2 apply_fsdp2 with default_mp_policy(dtype)",
                precision=precision,
            )
        if precision == "fp8" and not has_replaced(module, EightBits):
            raise SettingError(
                "{precision}, and a stage has no product in eight bits: apply_float8",
                precision=precision,
            )
