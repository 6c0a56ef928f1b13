"""One scale for a whole mesh: ten steps with infinities on one stage equal one process's."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, Transformer
from course_pp.parallel import (
    DistributedConfig,
    MeshGradScaler,
    PipelineSchedule,
    build_pipeline_schedule,
    build_pipeline_stage,
    clip_grad_norm_,
    get_dp_rank,
    get_dp_size,
    init_distributed,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.step.loss import attach_loss
from tests.equality import PARAMETER_TOLERANCE, adamw, full, sharded_adamw
from tests.parallel.stack import (
    CONFIG,
    N_MICROBATCHES,
    ROWS,
    SEQ_LEN,
    Recipe,
    batches,
    build_modules,
)

pytestmark = pytest.mark.timeout(120)

STEPS = 10
SCALING = {"init_scale": 1024.0, "growth_interval": 3}
INFINITE = {1: "layers.0.attn_norm.weight", 6: "layers.6.mlp.up_proj.weight"}
"""By step: whose gradient is infinite, on the first of all ranks that hold it."""
MAX_NORM = 0.05

DATA = batches(CONFIG, ROWS, SEQ_LEN, STEPS)


class Seen(NamedTuple):
    """After each step: the loss, attached losses, scale, and the weights; and the last state."""

    losses: list[float]
    attached: list[dict[str, float]]
    scales: list[float]
    weights: list[dict[str, Tensor]]
    state: dict[str, Any]


def attach_to(layers: nn.ModuleDict, tell: Callable[[Tensor, Tensor, str], Tensor | None]) -> None:
    """Give layers 1 and 5 a loss of their own, the same on all ranks of tensor parallelism."""
    for name in {"1", "5"} & {*layers}:
        layers[name].register_forward_hook(
            lambda _, __, x, name=name: tell(x, 0.1 * x.square().mean(), name)
        )


def make_infinite(modules: list[nn.Module], name: str) -> None:
    for parameter in (p for m in modules for n, p in m.named_parameters() if n == name):
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        is_first = not isinstance(parameter, DTensor) or not any(
            parameter.device_mesh.get_coordinate()
        )
        if is_first:
            local.view(-1)[0] = math.inf


def on_rank(rank: int, engine: str, recipe: Recipe, fused: bool) -> Seen:
    mesh = init_distributed(recipe.layout, seed=0)
    modules = build_modules(recipe, mesh)
    for module in modules:
        attach_to(module.layers, attach_loss)
    optimizer = (sharded_adamw if fused else adamw)(modules)
    scaler = MeshGradScaler(**SCALING)
    seen = Seen([], [], [], [], {})
    rows = slice(get_dp_rank(mesh), None, get_dp_size(mesh))
    if engine == "parallel":
        sizes = mesh, "cpu", ROWS // get_dp_size(mesh) // N_MICROBATCHES, SEQ_LEN
        stages: Any = [build_pipeline_stage(module, *sizes) for module in modules]
        pipeline: Any = build_pipeline_schedule(
            stages, N_MICROBATCHES, CrossEntropy(), recipe.schedule, scaler=scaler
        )
    else:
        schedule = build(recipe.schedule, 2, N_MICROBATCHES)
        stages = {module.stage_id: module for module in modules}
        pipeline = Pipeline(
            schedule, stages, CrossEntropy(), group=mesh.get_group("pp"), scaler=scaler
        )
    for i, (inputs, targets) in enumerate(DATA):
        optimizer.zero_grad()
        seen.losses.append(pipeline.step(inputs[rows], target=targets[rows]).item())
        if i in INFINITE:
            make_infinite(modules, INFINITE[i])
        if not fused:  # else step unscales
            scaler.unscale_(optimizer)
            clip_grad_norm_(modules, MAX_NORM, device_mesh=mesh)
        scaler.step(optimizer)
        scaler.update()
        seen.attached.append(dict(sorted(pipeline.attached.items())))
        seen.scales.append(scaler.get_scale())
        seen.weights.append({n: full(p) for m in modules for n, p in m.named_parameters()})
    seen.state.update(scaler.state_dict())
    return seen


def in_one_process(clips: bool) -> Seen:
    torch.manual_seed(0)
    model = Transformer(CONFIG).double()
    losses = {}
    attach_to(model.layers, lambda _, loss, name: losses.update({name: loss}))
    optimizer = adamw([model])
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    seen = Seen([], [], [], [], {})
    for i, (inputs, targets) in enumerate(DATA):
        optimizer.zero_grad()
        loss = CrossEntropy()(model(inputs), targets)
        scaler.scale(loss + sum(losses.values())).backward()
        if i in INFINITE:
            model.get_parameter(INFINITE[i]).grad.view(-1)[0] = math.inf
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        seen.losses.append(loss.item())
        seen.attached.append({name: each.item() for name, each in sorted(losses.items())})
        seen.scales.append(scaler.get_scale())
        seen.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    seen.state.update(scaler.state_dict())
    return seen


CASES = [
    ("parallel", Recipe(DistributedConfig(pp=2)), True),
    ("parallel", Recipe(DistributedConfig(pp=2), "zb_v"), False),
    ("parallel", Recipe(DistributedConfig(pp=2, dp_shard=2)), False),
    ("parallel", Recipe(DistributedConfig(pp=2, dp_shard=2)), True),
    ("parallel", Recipe(DistributedConfig(pp=2, tp=2)), False),
    ("parallel", Recipe(DistributedConfig(pp=2, dp_replicate=2)), False),
    ("runtime", Recipe(DistributedConfig(pp=2), "interleaved_1f1b"), False),
    ("runtime", Recipe(DistributedConfig(pp=2, dp_shard=2), "zb_h1"), False),
]


@pytest.mark.parametrize(("engine", "recipe", "fused"), CASES, ids=str)
def test_ten_steps_with_infinities_on_one_stage_are_one_processs(
    engine: str, recipe: Recipe, fused: bool
) -> None:
    layout = recipe.layout
    n_ranks = layout.pp * layout.tp * layout.dp_replicate * max(1, layout.dp_shard)
    ranks = on_ranks(n_ranks, on_rank, engine, recipe, fused, timeout_s=100)
    expected = in_one_process(clips=not fused)
    assert expected.scales == [1024, 512, 512, 512, 1024, 1024, 512, 512, 512, 1024]
    for seen in ranks:
        assert seen.scales == expected.scales
        assert seen.state == expected.state
        torch.testing.assert_close(seen.losses, expected.losses, rtol=1e-11, atol=0)
        torch.testing.assert_close(seen.attached, expected.attached, rtol=1e-11, atol=0)
        for weights, theirs in zip(seen.weights, expected.weights, strict=True):
            for name, weight in weights.items():
                torch.testing.assert_close(weight, theirs[name], rtol=0, atol=PARAMETER_TOLERANCE)
    assert {name for seen in ranks for name in seen.weights[0]} == {*expected.weights[0]}


def refusals(rank: int) -> dict[str, list[str]]:
    """Return what a rank of two is told, before any message of a step."""
    mesh = init_distributed(DistributedConfig(pp=2))
    said = {}
    module = nn.Linear(4, 4)
    x = torch.zeros(8, 4)

    def in_parallel(scaler: Any, loss_fn: Any = F.mse_loss) -> PipelineSchedule:
        stage = build_pipeline_stage(module, mesh, "cpu", inputs=torch.empty(2, 4))
        return build_pipeline_schedule(stage, 4, loss_fn, scaler=scaler)

    def in_runtime(scaler: Any, loss_fn: Any = F.mse_loss) -> Pipeline:
        return Pipeline(build("1f1b", 2, 4), module, loss_fn, scaler=scaler)

    def attempt(name: str, what: Callable[[], object]) -> None:
        with pytest.raises((ValueError, RuntimeError)) as refusal:
            what()
        said[name] = str(refusal.value)

    for build_here in (in_parallel, in_runtime):
        on_one = MeshGradScaler() if rank == 1 else None
        attempt(
            f"{build_here.__name__}, one rank", lambda make=build_here, scaler=on_one: make(scaler)
        )
        attempt(
            f"{build_here.__name__}, torch's",
            lambda make=build_here: make(torch.amp.GradScaler("cpu")),
        )
    pipeline = in_parallel(MeshGradScaler())
    scaler = MeshGradScaler()
    optimizer = adamw([module])
    attempt(
        "unscales alone", lambda: scaler.unscale_(optimizer) if rank else pipeline.step(x, target=x)
    )
    other = MeshGradScaler(init_scale=2.0**rank)
    attempt("loaded on one", lambda: other.unscale_(optimizer))
    attempt("given to none", lambda: MeshGradScaler().unscale_(optimizer))
    other = MeshGradScaler()
    twice = in_runtime(other, lambda output, target: other.scale(F.mse_loss(output, target)))
    attempt("scaled twice", lambda: twice.step(x, target=x))
    pipedream = {"optimizers": {rank: optimizer}, "versions": "stash"}
    attempt(
        "asynchronous",
        lambda: Pipeline(
            build("pipedream", 2, 4), module, F.mse_loss, scaler=MeshGradScaler(), **pipedream
        ),
    )
    if rank == 1:
        module.half()
    module(x.to(next(module.parameters()).dtype)).sum().backward()
    attempt("float16", lambda: MeshGradScaler().unscale_(optimizer))
    return said


def test_what_would_hang_or_be_wrong_is_one_sentence_on_every_rank() -> None:
    first, second = on_ranks(2, refusals, timeout_s=60)
    expected = {
        "in_parallel, one rank": "rank 1 was given scaler={'scale': 65536.0",
        "in_parallel, torch's": "scaler is a GradScaler: pass a MeshGradScaler or None",
        "in_runtime, one rank": "rank 1 was given scaler={'scale': 65536.0",
        "in_runtime, torch's": "scaler is a GradScaler: pass a MeshGradScaler or None",
        "unscales alone": "rank 0 is in step(), rank 1 in unscale_()",
        "loaded on one": "MeshGradScaler: rank 1 was given scale=2.0, rank 0 1.0",
        "given to none": "has scaled no loss: build the pipeline with scaler=",
        "scaled twice": "scale() of a scaler that a pipeline was given would scale its loss twice",
        "asynchronous": (
            "scaler with versions='stash': no stage sees that another's gradient overflows"
        ),
        "float16": "gradients in float16 cannot be unscaled",
    }
    for said in (first, second):
        assert {*said} == {*expected}
        for name, words in expected.items():
            assert words in said[name], (name, said[name])


def overflow(rank: int) -> list[tuple[bool, float, bool]]:
    """Return each engine's loss, scale and weights after a forward that overflows."""
    mesh = init_distributed(DistributedConfig(pp=2))
    module = nn.Linear(4, 4)
    found = []
    x = torch.full((8, 4), math.inf)
    before = module.weight.detach().clone()
    for engine in ("parallel", "runtime"):
        scaler = MeshGradScaler(init_scale=8.0)
        optimizer = adamw([module])
        if engine == "parallel":
            stage = build_pipeline_stage(module, mesh, "cpu", inputs=torch.empty(2, 4))
            pipeline: Any = build_pipeline_schedule(stage, 4, F.mse_loss, scaler=scaler)
        else:
            pipeline = Pipeline(build("1f1b", 2, 4), module, F.mse_loss, scaler=scaler)
        loss = pipeline.step(x, target=x).item()
        scaler.step(optimizer)
        scaler.update()
        found.append((math.isfinite(loss), scaler.get_scale(), not module.weight.equal(before)))
    return found


def test_a_loss_that_is_not_finite_is_skipped_under_either_engine() -> None:
    assert on_ranks(2, overflow, timeout_s=60) == [[(False, 4.0, False)] * 2] * 2


def infinite_input(rank: int) -> list[bool]:
    """Return each engine's losses of ``step`` and ``eval`` without a scaler, if finite."""
    mesh = init_distributed(DistributedConfig(pp=2))
    module = nn.Linear(4, 4)
    x = torch.full((8, 4), math.inf)
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=torch.empty(2, 4))
    pipelines = [
        build_pipeline_schedule(stage, 4, F.mse_loss),
        Pipeline(build("1f1b", 2, 4), module, F.mse_loss),
    ]
    losses = []
    for pipeline in pipelines:
        losses += [pipeline.step(x, target=x), pipeline.eval(x, target=x)]
    return [bool(loss.isfinite()) for loss in losses]


def test_a_loss_that_is_not_finite_is_returned_on_every_rank_by_either_engine() -> None:
    assert on_ranks(2, infinite_input, timeout_s=60) == [[False] * 4] * 2


def frozen_stage(rank: int) -> tuple[float, bool]:
    """Return the scale, and whether weights moved, if the other rank has no gradient at all."""
    module = nn.Linear(1, 1)
    optimizer = adamw([module])
    scaler = MeshGradScaler(init_scale=8.0)
    before = module.weight.detach().clone()
    if rank == 1:
        scaler.scale(module(torch.full((1, 1), math.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), bool(module.weight == before)


def test_a_rank_without_gradients_skips_with_the_others() -> None:
    assert on_ranks(2, frozen_stage, timeout_s=60) == [(4.0, True), (4.0, True)]


def test_alone_and_disabled_it_is_torchs() -> None:
    module = nn.Linear(2, 2)
    optimizer = adamw([module])
    scaler = MeshGradScaler(enabled=False)
    loss = module(torch.ones(1, 2)).sum()
    assert scaler.scale(loss) is loss
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state
