"""What an update is made of: optimizers over parameter groups, learning rates and number formats."""

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

# Those whose weight may have more than one dimension; every other norm's is a vector.
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def build_optimizer(
    modules: Iterable[nn.Module], config: TrainConfig, tied: Iterable[Mapping[int, str]] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer that ``config`` names in the groups of :func:`parameter_groups`, after FSDP2 was applied."""
    groups = parameter_groups(modules, config.weight_decay, tied)
    kind: Any = getattr(torch.optim, config.optimizer)
    given = {
        name: value for name in ("betas", "eps") if (value := getattr(config, name)) is not None
    }
    takes = set(inspect.signature(kind).parameters) - {
        "params",
        "lr",
        "weight_decay",
        "foreach",
        "fused",
    }
    given |= config.optimizer_options
    if strangers := sorted(given.keys() - takes):
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
    """Return the parameters of any modules, each once: those that decay, and those that do not.

    Matrices decay. Norms, biases, embeddings, and whatever else is a vector do not: pulling a
    norm's weight towards 0 shrinks what the layer passes on, and the rows of rare tokens would
    decay without being trained. A matrix tied to an embedding is an embedding.

    Ties between stages are given as ``tied``, the parameter's name by stage; others, and our own
    model's, are found.
    """
    modules = list(modules)
    names = {name for tie in tied for name in tie.values()}
    kept: list[Tensor | None] = []
    for module in modules:
        kept += [p for name, p in module.named_parameters() if p.dim() < 2 or name in names]
        for part in module.modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag, *_NORMS)):
                kept += part.parameters(recurse=False)
            if isinstance(part, Transformer):
                kept.append(part.tied_weight)
    ids = {id(p) for p in kept}
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    groups = [
        {"params": [p for p in parameters if id(p) not in ids], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) in ids], "weight_decay": 0.0},
    ]
    # torch takes an empty group, but not none
    return [group for group in groups if group["params"]] or groups[:1]


def build_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LambdaLR:
    """Return the learning rate of every step, as a factor on the optimizer's."""

    # A plain function: LambdaLR would put the attributes of anything else into its state.
    return LambdaLR(optimizer, lambda step: lr_factor(step, config))


def lr_factor(step: int, config: TrainConfig) -> float:
    """Return the learning rate of ``step``, counted from 0, as a share of the peak.

    With w the warm-up and n all steps it rises linearly, (step + 1) / w, so that no step is wasted
    at 0 (Goyal et al. 2017, arXiv:1706.02677, section 2.2). Then, by ``config.lr_schedule``:

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
    begin = (
        config.warmup
        if config.lr_schedule != "wsd"
        else max(config.warmup, config.steps - config.decay)
    )
    progress = min(1.0, max(0, step - begin) / max(1, config.steps - begin))
    left = (
        (1 + math.cos(math.pi * progress)) / 2 if config.lr_schedule == "cosine" else 1 - progress
    )
    return config.min_lr + (1 - config.min_lr) * left


DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # but for the products of linear layers
}


def precision_of(dtype: torch.dtype) -> Precision:
    """Return the name for stages that compute in ``dtype``; ``"fp32"`` for more than that."""
    return next((name for name, known in DTYPES.items() if known == dtype), "fp32")


def check_precision(precision: Precision, modules: Iterable[nn.Module]) -> None:
    """Refuse stages that compute in another format than ``precision`` names."""
    asked = DTYPES[precision]
    for module in modules:
        found, kept = (
            next(iter(compute_dtypes(module)), asked),
            {p.dtype for p in module.parameters()},
        )
        # Others may be what the parameters are in, but float16 needs the loss to be scaled.
        if found != asked and (
            asked != torch.float32 or found == torch.float16 or found not in kept
        ):
            how = (
                "call compute_in(stage, dtype), or under FSDP2 apply_fsdp2 with"
                " default_mp_policy(dtype)"
            )
            raise SettingError(
                f"{{precision}}, and a stage computes in {found}: {how}", precision=precision
            )
        if precision == "fp8" and not has_replaced(module, EightBits):
            raise SettingError(
                "{precision}, and a stage has no product in eight bits: apply_float8",
                precision=precision,
            )
