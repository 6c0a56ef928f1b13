"""One norm for the whole model, whatever part of it a rank holds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from course_pp.launch import on_ranks
from course_pp.model import (
    CrossEntropy,
    ModelConfig,
    PipelineStageModule,
    Transformer,
    build_stage_module,
)
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_stage,
    clip_grad_norm_,
    get_pp_rank,
    init_distributed,
)
from tests.equality import full
from tests.parallel.layouts import Case, Data, build_modules, build_pipeline, data_of, model_config

Kinds = Sequence[tuple[float, bool]]
KINDS: Kinds = (
    (2.0, True),
    (2.0, False),
    (1.0, True),
    (3.0, False),
    (0.5, True),
    (math.inf, False),
)
"""Every ``norm_type`` with every way to compute it and to scale: foreach or not."""
CONFIG = ModelConfig(
    dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, vocab_size=20, max_seq_len=16
)
STAGED = Case(pp=2, dp_shard=2, schedule="interleaved_1f1b", reshard=False)

Norms = list[tuple[float, bool, float, dict[str, Tensor]]]


def norms_on_rank(
    rank: int, case: Case, jobs: Sequence[tuple[ModelConfig, Data, Kinds]]
) -> list[Norms]:
    """Return the norm and the clipped gradients of every kind for each model.

    Every kind starts from the same gradients.
    """
    mesh = init_distributed(case.distributed, seed=0)
    found: list[Norms] = []
    for config, [(inputs, target), *_], kinds in jobs:
        modules = build_modules(case, config, mesh)
        build_pipeline(case, modules, mesh, len(inputs), CrossEntropy()).step(inputs, target=target)
        parameters = {name: p for module in modules for name, p in module.named_parameters()}
        before = {name: p.grad.clone() for name, p in parameters.items()}
        found.append([])
        for norm_type, foreach in kinds:
            for name, parameter in parameters.items():
                parameter.grad = before[name].clone()
            norm = clip_grad_norm_(modules, 0.1, foreach, device_mesh=mesh, norm_type=norm_type)
            clipped = {name: full(p.grad) for name, p in parameters.items()}
            found[-1].append((norm_type, foreach, norm.item(), clipped))
    return found


@pytest.mark.parametrize(
    "case",
    [
        STAGED,
        pytest.param(Case(pp=2, schedule="zb_v", tp=2), marks=pytest.mark.long),
        pytest.param(Case(tp=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_norm_equals_that_of_one_process(case: Case) -> None:
    configs = [replace(model_config(case, tied), n_layers=4) for tied in (False, True)]
    jobs = [
        (config, data_of(config, case.n_microbatches, padded=False)[0], kinds)
        for config, kinds in zip(configs, (KINDS[:2], KINDS), strict=True)
    ]
    for rank in on_ranks(case.n_ranks, norms_on_rank, case, jobs):
        for config, norms in zip(configs, rank, strict=True):
            for norm_type, foreach, norm, clipped in norms:
                expected, gradients = expected_norm(config, case.n_microbatches, norm_type)
                assert norm == pytest.approx(expected, rel=1e-12), f"{norm_type=} {foreach=}"
                for name, gradient in clipped.items():
                    source = (
                        "embed.weight" if config.tie_embeddings and name == "head.weight" else name
                    )
                    torch.testing.assert_close(gradient, gradients[source], rtol=0, atol=1e-14)


@cache
def expected_norm(
    config: ModelConfig, batch: int, norm_type: float
) -> tuple[float, dict[str, Tensor]]:
    """Return the norm before clipping and the gradients after it, in one process."""
    [(inputs, target), *_], _ = data_of(config, batch, padded=False)
    torch.manual_seed(0)
    model = Transformer(config).double()
    CrossEntropy()(model(inputs), target).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item()
    return norm, {name: p.grad for name, p in model.named_parameters()}


def fill(
    modules: Sequence[PipelineStageModule], gradient: Callable[[str, Tensor], Tensor | None]
) -> None:
    """Give each parameter the gradient ``gradient(name, shard)``."""
    for module in modules:
        for name, p in module.named_parameters():
            local = gradient(name, p.to_local())
            p.grad = (
                None
                if local is None
                else DTensor.from_local(
                    local,
                    p.device_mesh,
                    p.placements,
                    shape=p.shape,
                    stride=p.stride(),
                    run_check=False,
                )
            )


def special_gradients_on_rank(rank: int, norm_types: Sequence[float]) -> list[dict[str, Any]]:
    """Return norms of special gradients for each type.

    They are zero, absent, or not a number on one shard of one parameter.
    """
    mesh = init_distributed(STAGED.distributed, seed=0)
    modules = build_modules(STAGED, model_config(STAGED, tied=False), mesh)
    return [_special_norms(rank, modules, mesh, norm_type) for norm_type in norm_types]


def _special_norms(
    rank: int, modules: list[PipelineStageModule], mesh: Any, norm_type: float
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    options = {"norm_type": norm_type}
    fill(modules, lambda name, shard: torch.zeros_like(shard))
    found["zero"] = clip_grad_norm_(
        modules, 1.0, device_mesh=mesh, error_if_nonfinite=True, **options
    ).item()
    found["stays zero"] = all(not p.grad.to_local().any() for m in modules for p in m.parameters())
    fill(modules, lambda name, shard: None)
    found["none"] = clip_grad_norm_(
        modules, 1.0, device_mesh=mesh, error_if_nonfinite=True, **options
    ).item()
    fill(modules, lambda name, shard: torch.ones_like(shard) if "head" in name else None)
    found["head alone"] = clip_grad_norm_(modules, math.inf, device_mesh=mesh, **options).item()
    for value in (math.nan, math.inf):
        fill(modules, lambda name, shard, v=value: torch.full_like(shard, v if rank == 3 else 1.0))
        with pytest.raises(RuntimeError) as refusal:
            clip_grad_norm_(modules, 1.0, device_mesh=mesh, error_if_nonfinite=True, **options)
        kept = rank == 3 or all(
            (p.grad.to_local() == 1).all() for m in modules for p in m.parameters()
        )
        norm = clip_grad_norm_(modules, 1.0, device_mesh=mesh, **options).item()
        found[f"{value}"] = str(refusal.value), kept, norm
    return found


def test_gradients_that_are_zero_absent_or_not_finite() -> None:
    config, norm_types = model_config(STAGED, tied=False), (2.0, math.inf)
    ranks = on_ranks(4, special_gradients_on_rank, norm_types)
    for norm_type, found in [pair for rank in ranks for pair in zip(norm_types, rank, strict=True)]:
        assert found["zero"] == 0
        assert found["stays zero"]
        assert found["none"] == 0
        entries = config.vocab_size * config.dim
        assert found["head alone"] == pytest.approx(1.0 if norm_type == math.inf else entries**0.5)
        for value in ("nan", "inf"):
            refusal, kept, norm = found[value]
            assert f"the {norm_type}-norm of the whole model's gradient is {value}" in refusal
            assert "pass error_if_nonfinite=False" in refusal
            assert kept, "gradients were scaled before the refusal"
            assert str(norm) == value


def parts_on_rank(rank: int, dtype: torch.dtype) -> list[float]:
    """Return the norm of a pipeline's gradients, all ones, for each way to pass the stage."""
    mesh = init_distributed(DistributedConfig(pp=2))
    module = build_stage_module(CONFIG, get_pp_rank(mesh), 2).to(dtype)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    stage = build_pipeline_stage(module, mesh, "cpu", 1, 8, dtype)
    forms: Sequence[Any] = (module, stage, [module], (stage,), iter([stage]))
    return [clip_grad_norm_(form, math.inf, device_mesh=mesh).item() for form in forms]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stage_may_be_its_module_or_itself_alone_or_in_a_list(dtype: torch.dtype) -> None:
    expected = CONFIG.n_parameters**0.5
    for norms in on_ranks(2, parts_on_rank, dtype):
        assert norms == pytest.approx([expected] * 5, rel=1e-6)
        assert len(set(norms)) == 1


def test_all_stages_on_one_rank_need_no_mesh() -> None:
    modules = [build_stage_module(CONFIG, i, 2) for i in range(2)]
    for module in modules:
        for p in module.parameters():
            p.grad = torch.ones_like(p)
    assert clip_grad_norm_(modules, 1.0).item() == pytest.approx(CONFIG.n_parameters**0.5)


def test_stages_without_a_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match=r"given 1 of 2 stages, .* and device_mesh="):
        clip_grad_norm_(build_stage_module(CONFIG, 0, 2), 1.0)
    with pytest.raises(ValueError, match="holds part of the model but device_mesh is None"):
        clip_grad_norm_(Transformer(CONFIG, has_head=False), 1.0)
    with pytest.raises(ValueError, match="given 2 of 3 stages"):
        clip_grad_norm_([build_stage_module(ModelConfig(8, 3, 2, 5), i, 3) for i in (0, 2)], 1.0)


def missing_stages_on_rank(rank: int) -> list[str]:
    mesh = init_distributed(DistributedConfig(pp=2))
    modules = [build_stage_module(model_config(STAGED, False), i, 4) for i in (rank, 2 + rank)]
    messages = []
    for given in (modules[:1] if rank else modules, Transformer(CONFIG)):
        with pytest.raises(ValueError, match="norm") as refusal:
            clip_grad_norm_(given, 1.0, device_mesh=mesh)
        messages.append(str(refusal.value))
    return messages


def test_a_stage_left_out_and_a_whole_model_on_a_pipeline_are_refused_on_every_rank() -> None:
    first, second = on_ranks(2, missing_stages_on_rank)
    assert first == second
    assert "was given 3 of 4 stages" in first[0]
    assert "the list of all of this rank's stages on every rank" in first[0]
    assert "holds the whole model, but the mesh has pp=2 ranks of stages" in first[1]


def norms_alone_on_rank(rank: int) -> tuple[float, float]:
    """Return norms of a whole model, on a mesh with one pipeline rank and without a mesh."""
    model = Transformer(CONFIG)
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp_shard"))
    return float(clip_grad_norm_(model, math.inf, device_mesh=mesh)), float(
        clip_grad_norm_(model, math.inf)
    )


def test_a_pipeline_of_one_rank_holds_the_whole_model() -> None:
    [(on_mesh, without)] = on_ranks(1, norms_alone_on_rank)
    assert on_mesh == without > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_type": 0}, "norm_type=0 must be above 0"),
        ({"max_norm": math.nan}, "max_norm=nan must be 0 or more: use math.inf"),
        ({"model_or_stages": []}, "model_or_stages holds nothing: pass a model, a stage"),
    ],
)
def test_a_norm_or_a_model_that_is_none_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        clip_grad_norm_(**{"model_or_stages": nn.Linear(2, 2), "max_norm": 1.0, **options})
