"""Half precision equals half precision in one process, within its rounding."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_fsdp2,
    apply_tensor_parallel,
    compute_in,
    default_mp_policy,
    get_pp_rank,
    get_pp_size,
    init_distributed,
)
from course_pp.parallel.replaced_forward import compute_dtypes
from course_pp.training import TrainConfig, Trainer, stages_of_rank
from course_pp.training.checkpoint import load, save
from course_pp.training.data import Batches
from course_pp.training.optim import DTYPES
from course_pp.training.trainer import NonFiniteGradient
from tests.training.small import MODEL, RUN, TIED, rows

BF16 = replace(RUN, precision="bf16", clip_norm=math.inf)
FP16 = replace(RUN, precision="fp16", clip_norm=math.inf)


def lowered(
    config: TrainConfig,
    model: ModelConfig = MODEL,
    layout: DistributedConfig | None = None,
    padded: bool = False,
) -> Trainer:
    """A trainer with float32 parameters that computes in the config's precision."""
    mesh = init_distributed(
        layout or DistributedConfig(pp=torch.distributed.get_world_size()), seed=0
    )
    indices, n_stages = stages_of_rank(config, get_pp_rank(mesh), get_pp_size(mesh))
    modules, dtype = (
        [build_stage_module(model, i, n_stages) for i in indices],
        DTYPES[config.precision],
    )
    for module in modules:
        apply_tensor_parallel(module, mesh)
        apply_ac(module, "selective" if config.schedule == "1f1b" else "none")
        apply_fsdp2(module, mesh, None if dtype == torch.float32 else default_mp_policy(dtype))
        compute_in(module, dtype)
    return Trainer(config, modules, rows(24, padded), rows(17, padded, seed=1), device_mesh=mesh)


Case = tuple[TrainConfig, ModelConfig, DistributedConfig | None, bool]
CASES: dict[str, Case] = {
    "runtime": (replace(BF16, engine="runtime"), MODEL, None, False),
    "parallel, zb_v, tied, padded": (replace(BF16, schedule="zb_v"), TIED, None, True),
    "runtime, zb_v, tied, padded": (
        replace(BF16, engine="runtime", schedule="zb_v"),
        TIED,
        None,
        True,
    ),
    "sharded, accumulated": (
        replace(BF16, accumulation=2),
        TIED,
        DistributedConfig(dp_shard=2),
        True,
    ),
    "tensor": (BF16, MODEL, DistributedConfig(tp=2), False),
    "fp16, sharded": (FP16, MODEL, DistributedConfig(dp_shard=2), False),
    "fp16, runtime, zb_v": (replace(FP16, engine="runtime", schedule="zb_v"), TIED, None, False),
}


def first_steps(
    rank: int, root: Path
) -> dict[str, tuple[list[float], dict[str, Tensor], set[Any], bool]]:
    """Results of a step by case: loss, norm, validation loss, gradient, dtypes.

    Also if a checkpoint resumes exactly.
    """
    found = {}
    for name, case in CASES.items():
        run, again = lowered(*case), lowered(*case)
        result = run.train_step()
        gradients = {
            n: _whole(p.grad)
            for m in run.modules
            for n, p in m.named_parameters()
            if p.grad is not None
        }
        dtypes = {p.dtype for m in run.modules for p in m.parameters()}
        dtypes |= {g.dtype for g in gradients.values()}
        folder = root / name.replace(" ", "")
        save(folder, 1, run.modules, run.optimizer, device_mesh=run._mesh, extra=run.state())
        again.load_state(
            load(folder, again.modules, again.optimizer, device_mesh=again._mesh).extra
        )
        exact = run.train_step().loss == again.train_step().loss
        found[name] = [result.loss, result.grad_norm, result.loss_scale], gradients, dtypes, exact
    return found


def _whole(gradient: Any) -> Tensor:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.clone()


def reference(
    model: ModelConfig, padded: bool, dtype: torch.dtype | None
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, norm and gradient of the first step in one process, in ``dtype`` or float64."""
    torch.manual_seed(0)
    module = Transformer(model)
    if dtype is None:
        module.double()
    else:
        compute_in(module, dtype)
    batch = Batches(rows(24, padded), RUN.batch, RUN.seed)[0]
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    loss = CrossEntropy()(module(batch.inputs, attention_mask=batch.attention_mask), batch.targets)
    (loss * scale).backward()
    gradients = {
        name: p.grad / scale for name, p in module.named_parameters() if p.grad is not None
    }
    return (
        loss.item(),
        torch.cat([g.flatten() for g in gradients.values()]).norm().item(),
        gradients,
    )


def bound(dtype: torch.dtype) -> float:
    """How far, relative to its norm, a gradient may lie from another that was rounded at other
    places.

    With u = 2^-8 in bfloat16 and 2^-11 in float16 half the distance between neighbouring numbers, a
    rounding has a relative error of at most u. A value on its way from the input to the loss is
    rounded at most 8 times in each of the 4 layers (query, key, value and scores, attention,
    output, gate, up, down, residual or boundary) and once in the head; on the way back each product
    rounds twice, for its input and its weight: n = 3 · 33 = 99 roundings. Their errors are
    independent, so that their norms add up as squares: √n · u (Higham & Mary 2019, "A New Approach
    to Probabilistic Rounding Error Analysis", theorem 2.4, with λ = 1; errors of all numbers of a
    matrix are averaged by its norm). Both gradients have such an error, so they are at most √2 · √n
    · u apart: 0.055 and 0.0069.
    """
    return math.sqrt(2 * 99) * torch.finfo(dtype).eps / 2


@pytest.mark.long
def test_a_step_equals_one_process_in_half_precision_within_rounding(tmp_path: Path) -> None:
    ranks = on_ranks(2, first_steps, tmp_path, timeout_s=100)
    for name, (config, model, _, padded) in CASES.items():
        dtype = DTYPES[config.precision]
        loss, norm, expected = reference(model, padded, dtype)
        exact = reference(model, padded, None)[2]
        limit = bound(dtype)
        seen = {}
        for found, gradients, dtypes, goes_on in (rank[name] for rank in ranks):
            assert found[0] == pytest.approx(loss, rel=limit), name
            assert found[1] == pytest.approx(norm, rel=limit), name
            assert found[2] == (2.0**16 if config.precision == "fp16" else 1), name
            assert dtypes == {torch.float32}, name
            assert goes_on, name
            for source, gradient in gradients.items():
                # The output head is tied to the embedding.
                seen[source if source in expected else "embed.weight"] = gradient
        assert set(seen) == set(expected), name
        apart = _distance(seen, expected)
        assert apart <= limit, (name, apart)
        assert _distance(seen, exact) > torch.finfo(dtype).eps / 8, (
            f"{name} was not computed in {dtype}"
        )


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest, over parameters, relative to the parameter's."""
    return max(((one[name] - other[name]).norm() / other[name].norm()).item() for name in other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_in_half_precision_and_norms_and_gradients_are_not(dtype: torch.dtype) -> None:
    module = build_stage_module(MODEL, 1, 2)
    seen = {}
    for name in ("layers.1.attn.q_proj", "layers.1.mlp.down_proj", "layers.1.mlp_norm", "head"):
        part = module.get_submodule(name)
        part.register_forward_hook(
            lambda _, args, output, name=name: seen.update({name: output.dtype})
        )
    compute_in(module, dtype)
    arrived = torch.randn(2, 8, MODEL.dim).to(dtype).requires_grad_()
    sent = module(arrived)
    sent.sum().backward()
    assert (sent.dtype, arrived.grad.dtype) == (dtype, dtype)
    assert seen == {name: torch.float32 if "norm" in name else dtype for name in seen}
    assert len(seen) == 4
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}


def _equal(run: Trainer, before: list[Tensor]) -> bool:
    after = [p for module in run.modules for p in module.parameters()]
    return all(map(torch.equal, after, before))


def until_it_fits(rank: int) -> list[tuple[float, float, bool, bool]]:
    """Scale, norm, skipped and changed of each step, from a scale that overflows on."""
    run = lowered(replace(FP16, loss_scale=2.0**24, steps=20))
    seen = []
    while not seen or seen[-1][2]:
        parameters = [p for module in run.modules for p in module.parameters()]
        before = [p.detach().clone() for p in parameters]
        result = run.train_step()
        changed = not all(map(torch.equal, parameters, before))
        seen.append((result.loss_scale, result.grad_norm, result.skipped, changed))
    run.train_step()
    state = run.state()
    scaler = state["scaler"]
    earlier = {"loss_scale": {"value": scaler["scale"], "good_steps": scaler["_growth_tracker"]}}
    for kept in (state, {n: value for n, value in state.items() if n != "scaler"} | earlier):
        again = lowered(replace(FP16, loss_scale=2.0**24, steps=20))
        again.load_state(kept)
        assert again.state()["scaler"] == scaler
    assert scaler["scale"] < 2.0**24
    return seen


def test_an_overflow_halves_the_scale_and_skips_the_step_on_every_rank() -> None:
    first, second = on_ranks(2, until_it_fits, timeout_s=60)
    assert repr(first) == repr(second)  # NaN is not equal to itself
    assert [scale for scale, *_ in first] == [2.0 ** (24 - i) for i in range(len(first))]
    assert len(first) > 1
    for _, norm, skipped, changed in first:
        assert skipped is not math.isfinite(norm)
        assert changed is not skipped


def with_a_bad_step(rank: int, engine: Any) -> tuple[list[tuple[int, bool, bool]], bool, str]:
    """Results of steps, the second with a NaN on rank 0; if weights stayed; the refusal."""
    run = lowered(replace(RUN, engine=engine, on_nan="skip"))
    weight = next(run.modules[0].parameters())
    results = [run.train_step()]
    before = [p.detach().clone() for m in run.modules for p in m.parameters()]
    if rank == 0:
        weight.data.fill_(math.nan)
    results.append(run.train_step())
    weight.data.copy_(before[0])
    unchanged = _equal(run, before)
    results.append(run.train_step())
    strict = lowered(replace(RUN, engine=engine))
    weight, *others = (p for module in strict.modules for p in module.parameters())
    if rank == 0:
        weight.data.fill_(math.nan)
    before = [p.detach().clone() for p in others]
    with pytest.raises(NonFiniteGradient) as refusal:
        strict.train_step()
    unchanged = unchanged and all(map(torch.equal, others, before))
    return (
        [(r.step, r.skipped, math.isfinite(r.loss)) for r in results],
        unchanged,
        str(refusal.value),
    )


@pytest.mark.parametrize("engine", ["parallel", "runtime"])
def test_a_step_that_is_not_finite_is_skipped_or_refused_on_every_rank(engine: str) -> None:
    for steps, unchanged, refused in on_ranks(2, with_a_bad_step, engine, timeout_s=60):
        assert steps == [(1, False, True), (2, True, False), (3, False, True)]
        assert unchanged
        assert "step 1: the norm of the gradient is nan: go on from a checkpoint" in refused


def infinite_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient is finite."""
    return output.mean() + math.inf


def with_an_infinite_loss(rank: int, engine: Any) -> None:
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    modules = [build_stage_module(MODEL, get_pp_rank(mesh), 2)]
    run = Trainer(
        replace(RUN, engine=engine), modules, rows(), device_mesh=mesh, loss_fn=infinite_loss
    )
    with pytest.raises(NonFiniteGradient):
        run.train_step()


@pytest.mark.parametrize("engine", ["parallel", "runtime"])
def test_an_infinite_loss_with_a_finite_gradient_is_refused_on_every_rank(engine: str) -> None:
    on_ranks(2, with_an_infinite_loss, engine, timeout_s=60)


def refused(rank: int) -> list[str]:
    """What is said of stages that compute in something else than was asked for."""
    said = []
    module = build_stage_module(MODEL, 0, 1)
    init_distributed(DistributedConfig(), seed=0)
    for attempt in (
        lambda: Trainer(BF16, [module], rows(), device_mesh=None),
        lambda: Trainer(RUN, [_in(torch.float16)], rows(), device_mesh=None),
        lambda: Trainer(RUN, [_in(torch.bfloat16)], rows(), device_mesh=None),
        lambda: compute_in(module, torch.float64),
        lambda: compute_in(_in(torch.float16), torch.bfloat16),
        lambda: compute_in(nn.Linear(2, 2).double(), torch.bfloat16),
    ):
        with pytest.raises(ValueError, match=r".") as refusal:
            attempt()
        said.append(str(refusal.value))
    compute_in(module, torch.float32)
    assert compute_dtypes(module) == (torch.float32,)
    auto = replace(RUN, precision="auto")
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        assert Trainer(auto, [_in(dtype)], rows(), device_mesh=None).config.precision == name
    return said


def _in(dtype: torch.dtype) -> Any:
    module = build_stage_module(MODEL, 0, 1)
    compute_in(module, dtype)
    compute_in(module, dtype)  # a second time changes nothing
    return module


def test_formats_that_do_not_fit_are_refused() -> None:
    [said] = on_ranks(1, refused, timeout_s=60)
    assert "precision='bf16', and a stage computes in torch.float32: call compute_in" in said[0]
    assert "precision='fp32', and a stage computes in torch.float16" in said[1]
    assert "precision='fp32', and a stage computes in torch.bfloat16" in said[2]
    assert "compute in torch.bfloat16 or torch.float16, or in torch.float32 as it is" in said[3]
    assert all(
        "cannot compute in torch.bfloat16: keep its parameters in float32" in words
        for words in said[4:]
    )
