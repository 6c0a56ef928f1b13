"""The bug clinic of notebook 08: three patients on four ranks, and a step of gradient accumulation to be healed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.lopsided import LopsidedLoss

if TYPE_CHECKING:  # the other graders need not wait for these
    from torch.distributed.fsdp import FSDPModule

    from course_pp.model import ModelConfig, Transformer

__all__ = ["PATIENTS", "Symptoms", "accumulate_sharded", "grade_accumulate_sharded"]


def accumulate_sharded(
    model: nn.Module, microbatches: list[torch.Tensor], targets: list[torch.Tensor], loss_fn: nn.Module
) -> None:
    """Leave in .grad the gradient of the mean loss over all microbatches of all ranks."""
    m = len(microbatches)
    for i, (x, target) in enumerate(zip(microbatches, targets, strict=True)):
        model.set_requires_gradient_sync(i == m - 1)  # type: ignore[operator]
        (loss_fn(model(x), target) / m).backward()


class Symptoms(NamedTuple):
    """What one step shows: gathers and reductions of each FSDP group, and the size of gradients over the right one."""

    gathers: float
    reductions: float
    ratio: float

    def __str__(self) -> str:
        often = f"a group is gathered {self.gathers:.0f} ×, reduced {self.reductions:.0f} ×"
        return f"{often}; gradients {self.ratio:.2f} of the right ones"


_N_MICROBATCHES, _SEQ_LEN, _ROWS = 8, 16, 32


def _patient_a(rank: int) -> Symptoms:
    """A pipeline whose ranks free parameters after forward."""
    return _pipelined(reshard=True)


def _patient_b(rank: int) -> Symptoms:
    """A loop that reduces gradients after every microbatch."""
    return _accumulated(reduce_each=True, divisor=1)


def _patient_c(rank: int) -> Symptoms:
    """A loop that averages over the ranks what is averaged already."""
    return _accumulated(reduce_each=False, divisor=dist.get_world_size())


PATIENTS: dict[str, Callable[[int], Symptoms]] = {"A": _patient_a, "B": _patient_b, "C": _patient_c}
"""Steps of eight microbatches on four ranks, each ill in another way; called with the rank."""


def _pipelined(reshard: bool) -> Symptoms:
    from course_pp.model import CrossEntropy, build_stage_module
    from course_pp.parallel import (
        DistributedConfig,
        apply_fsdp2,
        build_pipeline_schedule,
        build_pipeline_stage,
        get_dp_rank,
        get_pp_rank,
        init_distributed,
    )

    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2), seed=0)
    assert mesh is not None
    module = build_stage_module(_config(), get_pp_rank(mesh), 2).double()
    apply_fsdp2(module, mesh, reshard_after_forward=reshard)
    inputs, targets = (rows.chunk(2)[get_dp_rank(mesh)] for rows in _tokens())
    size = len(inputs) // _N_MICROBATCHES
    stage = build_pipeline_stage(module, mesh, "cpu", size, _SEQ_LEN, torch.float64)
    pipeline = build_pipeline_schedule(stage, _N_MICROBATCHES, CrossEntropy())
    return _symptoms(module, lambda: pipeline.step(inputs, target=targets))


def _accumulated(reduce_each: bool, divisor: int) -> Symptoms:
    from course_pp.model import CrossEntropy, Transformer
    from course_pp.parallel import DistributedConfig, apply_fsdp2, get_dp_rank, init_distributed

    mesh, loss_fn = init_distributed(DistributedConfig(), seed=0), CrossEntropy()
    module = Transformer(_config()).double()
    apply_fsdp2(module, mesh, reshard_after_forward=False)
    inputs, targets = (rows.chunk(dist.get_world_size())[get_dp_rank(mesh)] for rows in _tokens())

    def step() -> None:
        parts = zip(inputs.chunk(_N_MICROBATCHES), targets.chunk(_N_MICROBATCHES), strict=True)
        for i, (x, target) in enumerate(parts):
            cast("FSDPModule", module).set_requires_gradient_sync(reduce_each or i == _N_MICROBATCHES - 1)
            (loss_fn(module(x), target) / _N_MICROBATCHES / divisor).backward()

    return _symptoms(module, step)


def _symptoms(module: Transformer, step: Callable[[], Any]) -> Symptoms:
    from course_pp.parallel import count_collectives

    counts = count_collectives(step)
    n_groups = len(module.layers) + 1  # the root owns the ends that are here
    right = _gradients_of_one_process()
    ratios = [_whole(p.grad).norm() / right[name].norm() for name, p in module.named_parameters() if p.grad is not None]
    number = {kind: counts.total(collective=kind).number / n_groups for kind in ("all_gather", "reduce_scatter")}
    return Symptoms(number["all_gather"], number["reduce_scatter"], float(torch.stack(ratios).mean()))


def _config() -> ModelConfig:
    from course_pp.model import ModelConfig

    return ModelConfig(dim=32, n_layers=2, n_heads=2, vocab_size=64, max_seq_len=_SEQ_LEN)


def _tokens() -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (_ROWS, _SEQ_LEN + 1), generator=seeded)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _gradients_of_one_process() -> dict[str, Tensor]:
    from course_pp.model import CrossEntropy, Transformer

    torch.manual_seed(0)
    model, (inputs, targets) = Transformer(_config()).double(), _tokens()
    CrossEntropy()(model(inputs), targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


_N_RANKS, _WIDTH = 2, 6


class _Step(NamedTuple):
    """What one step of the answer left on one rank.

    Attributes:
        gradients: whole, by the parameter's name.
        reductions: reduce-scatters that were begun.
        n_groups: FSDP groups of the model.
        most_rows: the most rows that one forward was given.
    """

    gradients: dict[str, Tensor | None]
    reductions: int
    n_groups: int
    most_rows: int


def grade_accumulate_sharded(answer: Answer) -> None:
    for m in (3, 1):
        where = f"With {m} microbatch{'es' * (m > 1)} on each of {_N_RANKS} ranks"
        first, second = answer.on_ranks(_N_RANKS, _stepped, m)[0]
        _judge_step(where, m, first)
        try:
            _judge_step(f"{where}, the first step is right. In the second, after `model.zero_grad()`,", m, second)
        except Mistake as e:
            cause = "The first step left something behind: look at what it tells the model, and what it keeps."
            raise Mistake(e.symptom, cause, e.example) from None


def _judge_step(where: str, m: int, step: _Step) -> None:
    model, (x, target) = _model(), _rows(m)
    LopsidedLoss()(model(x), target).backward()
    right = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    missing = [name for name, gradient in step.gradients.items() if gradient is None]
    if missing:
        cause = (
            "Either no backward has run, or its gradients were never reduced, so that no shard of them is left: before "
            "the last microbatch's backward, `model.set_requires_gradient_sync(True)`."
        )
        if step.reductions:
            cause = "Parameters are gathered still, and the gradient is the shards': let the last backward free them."
        raise Mistake(f"{where} `{missing[0]}.grad` is None after the step.", cause)
    ratio = _common_ratio(step.gradients, right)
    if ratio is None:
        raise Mistake(
            f"{where} the gradients differ from one process's, and by no single factor.", _why_no_factor(step, m)
        )
    if abs(ratio - 1) > 1e-9:
        raise Mistake(f"{where} the gradients are {ratio:.4g} times one process's.", _why(ratio, m))
    if step.reductions != step.n_groups:
        raise Mistake(
            f"{where} the gradients are right, but {step.reductions} reduce-scatters were begun for {step.n_groups} "
            "groups.",
            "Each backward reduces, unless the model was told before that its gradients are not complete: "
            "`model.set_requires_gradient_sync(…)`.",
        )
    if m > 1 and step.most_rows > _ROWS_EACH:
        cause = "Give it one microbatch at a time: the whole batch at once is what does not fit."
        raise Mistake(f"{where} the gradients are right, but the model was given {step.most_rows} rows at once.", cause)


def _why_no_factor(step: _Step, m: int) -> str:
    for name, index in (("first", 0), ("last", -1)):
        part = _gradients_of_microbatch(m, index)
        if m > 1 and _common_ratio(step.gradients, part) is not None:
            return (
                f"Only the {name} microbatch is in them. Gradients add up over microbatches unless they are cleared, "
                "and what `model.set_requires_gradient_sync(…)` says holds for the backwards after it."
            )
    if step.n_groups < step.reductions < m * step.n_groups:
        return "Some backwards reduce and some do not: it is the last microbatch's, and no other, that has to."
    if step.reductions > step.n_groups and m > 1:
        return "What is divided or cleared after one backward is lost for, or divided again with, the next."
    return "Every microbatch counts, with its own target and 1/m, and the gradients of all of them are reduced."


def _why(ratio: float, m: int) -> str:
    causes = {
        1 / _N_RANKS: "FSDP averages over its ranks while it reduces. Dividing by their number is the second time.",
        float(_N_RANKS): "The mean over the ranks is FSDP's business: leave it alone.",
        float(m): "1/m is missing: each microbatch adds the gradient of its own mean.",
        m / _N_RANKS: "FSDP averages over ranks, not over microbatches: divide by m, and not by the number of ranks.",
        1 / m: "1/m enters twice.",
        1 / (m * _N_RANKS): "Once 1/m is enough, and the mean over the ranks is FSDP's business.",
    }
    return next((cause for factor, cause in causes.items() if abs(ratio - factor) < 1e-9), "Look where it is scaled.")


_ROWS_EACH = 3


def _stepped(rank: int, fn: Callable[..., Any], m: int) -> tuple[_Step, _Step]:
    """The first step of a new model, and a second one as training takes it: gradients are cleared in between."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, target = (rows.chunk(dist.get_world_size())[rank] for rows in _rows(m))
    microbatches, targets = list(x.chunk(m)), list(target.chunk(m))
    first = _one_step(fn, model, microbatches, targets)
    model.zero_grad()
    return first, _one_step(fn, model, microbatches, targets)


def _one_step(fn: Callable[..., Any], model: nn.Sequential, microbatches: list[Tensor], targets: list[Tensor]) -> _Step:
    from course_pp.parallel import CollectiveCounter

    seen = [0]
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with unchanged(microbatches=microbatches, targets=targets), CollectiveCounter() as counter:
        fn(model, microbatches, targets, LopsidedLoss())
    hook.remove()
    reductions = counter.counts.total(collective="reduce_scatter").number
    gradients = {name: None if p.grad is None else _whole(p.grad).clone() for name, p in model.named_parameters()}
    return _Step(gradients, reductions, len(model), max(seen))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(3))).double()


def _rows(m: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    both = torch.randn(2, _N_RANKS * m * _ROWS_EACH, _WIDTH, dtype=torch.float64, generator=seeded)
    return both[0], both[1]


def _gradients_of_microbatch(m: int, index: int) -> dict[str, Tensor]:
    """Return the gradients of the mean loss over one microbatch of every rank."""
    model, (x, target) = _model(), _rows(m)
    chunks = [torch.cat([part.chunk(m)[index] for part in rows.chunk(_N_RANKS)]) for rows in (x, target)]
    LopsidedLoss()(model(chunks[0]), chunks[1]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _common_ratio(found: dict[str, Tensor | None], right: dict[str, Tensor]) -> float | None:
    """The factor between all gradients and the right ones, if it is one factor."""
    gradients = torch.cat([g.flatten() for name in sorted(right) if (g := found[name]) is not None])
    expected = torch.cat([right[name].flatten() for name in sorted(right)])
    factor = float((gradients * expected).sum() / expected.square().sum())
    return factor if torch.allclose(gradients, factor * expected, rtol=0, atol=1e-10) else None
