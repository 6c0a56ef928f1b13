"""Experts shared out over ranks train as in one process, in every layout."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_compile,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_dp_rank,
    get_ep_mesh,
    get_pp_rank,
    init_distributed,
)
from course_pp.parallel.mesh import get_efsdp_mesh
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.step.loss import average_over
from tests.equality import (
    LEARNING_RATE,
    assert_same_training,
    batches,
    sharded_adamw,
    snapshot_gradients,
)
from tests.parallel import layouts, stack
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stage_modules, take_step
from tests.step.test_experts_in_pipelines import (
    BIAS,
    TIGHT,
    Case,
    M,
    Routed,
    assert_same,
    data,
    in_parallel,
    one_process,
    routed,
)
from tests.step.test_experts_in_pipelines import CONFIG as SMALL

# Heads, experts and widths fit every tp and ep up to 8 but 5 and 7. There are layers for 8 stages,
# half of them without experts. The experts' outputs count much: AdamW makes whole steps of tiny
# gradients, and so of their rounding errors.
CONFIG = ModelConfig(
    dim=48, n_layers=8, n_heads=24, ffn_dim=24, vocab_size=24, max_seq_len=24, n_experts=24, expert_dim=24, moe_every=2,
    n_shared_experts=1, router_scale=16.0, balance_coef=0.1, z_coef=0.05,
)  # fmt: skip


def n_ranks(layout: DistributedConfig) -> int:
    return layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp


ONE_CHOICE = replace(BIAS, top_k=1, normalize_top_k=False)
SHARED_OUT = DistributedConfig(dp_shard=2, ep=2)
PIPED = DistributedConfig(pp=2, dp_shard=2, ep=2)
SAMPLE = [
    Case("1f1b", SMALL, layout=SHARED_OUT),
    # one expert has all tokens, one rank none
    Case("1f1b", ONE_CHOICE, layout=SHARED_OUT, crowded=True),
    Case("1f1b", TIGHT, "full", layout=DistributedConfig(dp_shard=4, ep=2)),
    Case("zb_v", BIAS, layout=PIPED, crowded=True),
]
MORE = [
    Case("1f1b", SMALL, layout=PIPED),
    Case("1f1b", BIAS, layout=DistributedConfig(dp_replicate=2, dp_shard=2, ep=2), accumulated=2),
    Case("1f1b", SMALL, layout=DistributedConfig(dp_shard=2, ep=2, tp=2)),
    # no rank's first stage has experts
    Case("interleaved_1f1b", replace(TIGHT, n_dense_layers=2), layout=PIPED),
    Case("zb_v", BIAS, "full", layout=PIPED, accumulated=2),  # recomputed for each parameter
    Case("dualpipe_v", TIGHT, layout=PIPED),
]


def assert_equal(cases: list[Case], subtests: Any) -> None:
    for n in sorted({n_ranks(case.layout) for case in cases}):
        here = [case for case in cases if n_ranks(case.layout) == n]
        with no_process_left():
            ranks = on_ranks(n, in_parallel, here, timeout_s=60 + 10.0 * len(here))
        for case, found in zip(here, zip(*ranks, strict=True), strict=True):
            with subtests.test(str(case)):
                assert_same(
                    found,
                    one_process(case.config, case.pieces, case.accumulated, crowded=case.crowded),
                )


@pytest.mark.parametrize(
    "cases", [SAMPLE, pytest.param(MORE, marks=pytest.mark.long)], ids=["sample", "more"]
)
def test_experts_shared_out_equal_one_process(cases: list[Case], subtests: Any) -> None:
    assert_equal(cases, subtests)


NO_LOSS = {"n_experts": 8, "expert_dim": 16, "moe_every": 2, "balance": "none"}
CLIPPED = [
    layouts.Case(dp_shard=4, ep=2, reshard=True),
    layouts.Case(dp_replicate=2, dp_shard=2, ep=2, reshard=False),
    layouts.Case(dp_shard=2, tp=2, ep=2),
    layouts.Case(pp=2, schedule="1f1b", dp_shard=2, ep=2),
]


def jobs(case: layouts.Case) -> list[layouts.Job]:
    config = replace(layouts.model_config(case, tied=case.pp > 1), **NO_LOSS)
    return [(layouts.PLAIN, config, *layouts.data_of(config, case.batch, False))]


def clipped(rank: int, cases: Sequence[layouts.Case]) -> list[layouts.Run]:
    return [run for case in cases for run in layouts.train_variants_on_rank(rank, case, jobs(case))]


def test_one_norm_clips_parts_of_every_mesh_and_evaluation_equals_one_process(
    subtests: Any,
) -> None:
    ranks = on_ranks(4, clipped, CLIPPED, timeout_s=110)
    for case, runs in zip(CLIPPED, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(case)):
            [(_, config, *_)] = jobs(case)
            layouts.assert_runs_equal(runs, layouts.reference(config, case.batch, False), config)


def gradients(rank: int) -> dict[str, Tensor]:
    """Return the gradients of one backward over two rows a rank, averaged by hand without FSDP2."""
    mesh = init_distributed(DistributedConfig(dp_shard=4, ep=2), seed=0)
    assert mesh is not None
    model = Transformer(replace(SMALL, balance="none", z_coef=0.0)).double()
    apply_expert_parallel(model, mesh)
    tokens, target = (part.chunk(4)[rank] for part in batches(SMALL, 8, SMALL.max_seq_len, 1)[0])
    CrossEntropy()(model(tokens), target).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        if isinstance(parameter, DTensor):  # which is a mean over ep
            average_over(
                [get_efsdp_mesh(mesh).get_group()], cast(DTensor, parameter.grad).to_local()
            )
        else:
            average_over([mesh.get_group("dp_shard")], parameter.grad)
    return snapshot_gradients([model])


def test_gradients_of_experts_are_means_over_all_data_ranks_where_nothing_is_sharded() -> None:
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, balance="none", z_coef=0.0)).double()
    tokens, target = batches(SMALL, 8, SMALL.max_seq_len, 1)[0]
    CrossEntropy()(model(tokens), target).backward()
    for found in on_ranks(4, gradients, timeout_s=60):
        for name, expected in snapshot_gradients([model]).items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12, msg=name)


def test_grouped_products_in_float32_are_near_one_process_in_float64() -> None:
    """Parameters need only be close, because AdamW makes whole steps of tiny gradients."""
    recipe = stack.Recipe(DistributedConfig(dp_shard=2, ep=2), dtype=torch.float32)
    ranks = on_ranks(2, stack.train_on_rank, [recipe], stack.EXPERTS, timeout_s=60)
    found = [trained for [trained] in ranks]
    assert_same_training(
        found, stack.reference(stack.EXPERTS), tolerances=(1e-5, 4 * LEARNING_RATE)
    )


def in_runtime(rank: int, names: Sequence[str]) -> list[Routed]:
    return [under_runtime(name) for name in names]


def under_runtime(name: str) -> Routed:
    """Train under the runtime. Losses are of this data rank's rows, and averaged here."""
    mesh = init_distributed(PIPED, seed=0)
    schedule = build(name, 2, M)
    modules = stage_modules(get_pp_rank(mesh), schedule, SMALL)
    for module in modules.values():
        apply_expert_parallel(module, mesh)
        apply_fsdp2(module, mesh)
    assert mesh is not None
    pipeline = Pipeline(schedule, modules, CrossEntropy(), group=mesh.get_group("pp"), timeout_s=20)

    def averaged(value: float) -> float:
        return average_over(
            [mesh.get_group("dp_shard")], torch.tensor(value, dtype=torch.float64)
        ).item()

    def run(batch: Any, divisor: int) -> tuple[float, dict[str, float]]:
        mine = [part.chunk(2)[get_dp_rank(mesh)] for part in batch]
        loss = take_step(
            pipeline, *for_rank(get_pp_rank(mesh), schedule, *mine), divisor=divisor
        ).item()
        return averaged(loss), {name: averaged(value) for name, value in pipeline.attached.items()}

    held = list(modules.values())
    return routed(held, mesh, sharded_adamw(held), data(SMALL, 2 * M), run)


def test_the_runtime_runs_experts_that_are_shared_out(subtests: Any) -> None:
    names = ("1f1b", "zb_v")
    with no_process_left():
        ranks = on_ranks(4, in_runtime, names, timeout_s=60)
    for name, found in zip(names, zip(*ranks, strict=True), strict=True):
        with subtests.test(name):
            assert_same(found, one_process(SMALL, 2 * M))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", sorted({case.n_ranks for case in layouts.cases_with_experts()}))
def test_every_layout_equals_one_process(n: int, subtests: Any) -> None:
    every = [case.distributed for case in layouts.cases_with_experts() if case.n_ranks == n]
    assert_equal([Case("1f1b", CONFIG, layout=layout) for layout in every], subtests)


class Skipping(nn.Module):
    """Experts that compute only where they have rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 6, dtype=torch.float64))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        first = 0
        for expert, n in enumerate(counts.tolist()):
            if n:
                out[first : first + n] = x[first : first + n] @ self.weight[expert]
            first += n
        return out


class Mixture(nn.Module):
    """A layer, and experts of which the first ``used`` get the tokens, by turns."""

    def __init__(self, used: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = used
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.experts = Skipping()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        n = len(h) // self.used
        counts = torch.tensor([n] * self.used + [0] * (4 - self.used))
        return (h + self.experts(h, counts)).square()


def skipped(rank: int, cases: list[tuple[int, bool]]) -> list[dict[str, Tensor]]:
    return [gradients_of_mixture(rank, *case) for case in cases]


def gradients_of_mixture(rank: int, used: int, sharded: bool) -> dict[str, Tensor]:
    """Return the gradients of one backward over two data ranks."""
    mesh = init_distributed(SHARED_OUT, seed=0)
    assert mesh is not None
    model = Mixture(used)
    apply_expert_parallel(model, mesh, experts=Skipping)
    if sharded:
        apply_fsdp2(model, mesh, blocks="layer")
    model(mixed()[rank]).mean().backward()
    if not sharded:
        for parameter in model.layer.parameters():
            average_over([mesh.get_group("dp_shard")], parameter.grad)
    return snapshot_gradients([model])


def mixed() -> Tensor:
    return torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_experts_that_skip_what_has_no_rows_equal_one_process(subtests: Any) -> None:
    cases = [(used, sharded) for used in (1, 3) for sharded in (False, True)]
    ranks = on_ranks(2, skipped, cases, timeout_s=60)
    for (used, sharded), found in zip(cases, zip(*ranks, strict=True), strict=True):
        model = Mixture(used)
        torch.stack([model(x).mean() for x in mixed()]).mean().backward()
        with subtests.test(f"{used} experts, sharded={sharded}"):
            for each in found:
                torch.testing.assert_close(each, snapshot_gradients([model]), rtol=0, atol=1e-12)


class Beside(nn.Module):
    """A first stage that returns what experts make beside what a layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture(4)
        self.plain = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.plain(x), self.mixture(x)


class Choosing(nn.Module):
    """A last stage that may use the experts' output."""

    def __init__(self, uses_experts: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.uses_experts = uses_experts
        self.layer = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, plain: Tensor, mixed: Tensor) -> Tensor:
        return self.layer(plain + mixed if self.uses_experts else plain)


def rows_of_choosing(data_rank: int) -> Tensor:
    return torch.randn(
        8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(data_rank)
    )


def experts_used_by_one_data_rank(rank: int) -> Tensor | None:
    """Return the gradient of this rank's experts, where the first stage is."""
    mesh = init_distributed(PIPED, seed=0)
    data_rank = get_dp_rank(mesh)
    is_first = get_pp_rank(mesh) == 0
    module: Any = Beside() if is_first else Choosing(data_rank == 0)
    apply_expert_parallel([module], mesh, experts=Skipping)
    rows = torch.empty(4, 6, dtype=torch.float64)
    outputs = (rows, rows) if is_first else ()
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=rows, outputs=outputs)
    pipeline = build_pipeline_schedule(stage, 2, nn.MSELoss())
    x = rows_of_choosing(data_rank)
    pipeline.step(x, target=x.cos())
    return module.mixture.experts.weight.grad.full_tensor() if is_first else None


def test_experts_whose_output_one_data_rank_leaves_unused_equal_one_process() -> None:
    found = on_ranks(4, experts_used_by_one_data_rank, timeout_s=40)
    torch.manual_seed(0)
    first = Beside()
    x = rows_of_choosing(0)
    # data rank 1 adds zeros
    (nn.MSELoss()(Choosing(True)(*in_parts(first, x)), x.cos()) / 2).backward()
    gradients = [gradient for gradient in found if gradient is not None]
    assert len(gradients) == 2
    for gradient in gradients:
        torch.testing.assert_close(gradient, first.mixture.experts.weight.grad, rtol=0, atol=1e-12)


def in_parts(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return a stage's outputs for the two microbatches of ``x``, put together."""
    return [torch.cat(parts) for parts in zip(*map(module, x.chunk(2)), strict=True)]


class Foreign(nn.Module):
    """A layer of another package, perhaps with one expert a row."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        raise NotImplementedError


class CutsExperts(ParallelStyle):
    """A style of a plan that makes DTensors over ``tp`` of experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


def applied(rank: int, mesh: DeviceMesh, what: str) -> None:
    model: Any = Transformer(
        SMALL if rank == 1 or what != "one rank" else replace(SMALL, n_experts=3)
    )
    match what:
        case "dense":
            model = Transformer(replace(SMALL, n_experts=0))
        case "foreign":
            model = nn.Sequential(nn.Linear(4, 4))
        case "indivisible":
            model = Transformer(replace(SMALL, n_experts=3))
        case "recomputed":
            apply_ac(model, "full")
        case "compiled":
            apply_compile(model, backend="eager")
        case "sharded":
            apply_fsdp2(model, mesh)
        case "twice":
            apply_expert_parallel(model, mesh)
        case "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        case "rows":
            model = nn.Sequential(Foreign(2, 4), Foreign())
        case "buffer":
            model.layers["0"].mlp.experts.register_buffer("scale", torch.ones(SMALL.n_experts))
        case "by hand":
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    named: dict[str, Any] = {"called": "*.*.attn", "nearest": "layers.*.expert", "rows": Foreign}
    named["one of two"] = ["layers.*.mlp.experts", "layers.*.expert"]
    apply_expert_parallel(model, mesh, named.get(what))


REFUSED = {
    "dense": "finds no experts on any stage: name them with experts=.* or leave ep at 1",
    "foreign": "finds no experts on any stage",
    "indivisible": (
        r"ep=2 must divide the 3 experts of 'layers.0.mlp.experts' \(Experts\).*: use ep=1 or 3"
    ),
    "one rank": "ep=2 must divide the 3 experts",
    "recomputed": (
        "apply_expert_parallel was called on a model that already has activation checkpointing"
    ),
    "compiled": "already has compile",
    "sharded": "already has FSDP2",
    "twice": "already has expert parallel",
    "DDP": "the model is wrapped in DistributedDataParallel",
    "called": (
        r"'layers.0.attn' \(Attention\) is called with \(x, cos, .*\): experts are called with \(x,"
        r" counts\) or"
    ),
    "nearest": "experts='layers.*.expert' matches no module of Transformer: the nearest names are",
    "one of two": "experts='layers.*.expert' matches no module of Transformer",
    "buffer": "holds the buffer 'scale' of",
    "by hand": r"must be named .*; ep lies within dp_shard, DistributedConfig\(ep=…\)",
    "rows": r"'1' \(Foreign\) holds weight \(\): each must have one expert in each row",
}


def refusals(rank: int) -> dict[str, str]:
    mesh = init_distributed(DistributedConfig(ep=2), seed=0)
    assert mesh is not None
    told = {}
    for what in REFUSED:
        try:
            applied(rank, mesh, what)
            told[what] = "nothing"
        except ValueError as refusal:
            told[what] = str(refusal)
    return told


def test_what_cannot_be_shared_out_is_refused_on_every_rank() -> None:
    ranks = on_ranks(2, refusals, timeout_s=60)
    assert ranks[0] == ranks[1]
    for what, expected in REFUSED.items():
        assert re.search(expected, ranks[0][what]), ranks[0][what]


def cut_by_plan(rank: int) -> str:
    mesh = init_distributed(DistributedConfig(dp_shard=2, ep=2, tp=2), seed=0)
    model = Transformer(SMALL)
    apply_tensor_parallel(model, mesh, {"layers.0.mlp.experts": CutsExperts()})
    with pytest.raises(ValueError, match="which tensor parallelism has cut") as refusal:
        apply_expert_parallel(model, mesh)
    return str(refusal.value)


def test_experts_that_a_plan_has_cut_are_refused_on_every_rank() -> None:
    ranks = on_ranks(4, cut_by_plan, timeout_s=60)
    assert len(set(ranks)) == 1
    assert ranks[0].startswith("'layers.0.mlp.experts' (Experts) holds 'gate_proj', which")


def one_stage_has_none(rank: int) -> tuple[str, ...]:
    mesh = init_distributed(DistributedConfig(ep=2), seed=0)
    stages = [Transformer(SMALL if has else replace(SMALL, n_experts=0)) for has in (False, True)]
    return apply_expert_parallel(stages, mesh, "layers.0.mlp.experts")


def test_a_stage_may_lack_the_experts_that_are_named() -> None:
    assert on_ranks(2, one_stage_has_none, timeout_s=60) == [("layers.0.mlp.experts",)] * 2


def without_ep(rank: int) -> tuple[Any, ...]:
    mesh = init_distributed(DistributedConfig(), seed=0)
    return get_ep_mesh(mesh), apply_expert_parallel(Transformer(replace(SMALL, n_experts=0)), mesh)


def test_without_ep_nothing_is_done() -> None:
    assert on_ranks(2, without_ep, timeout_s=60) == [(None, ())] * 2
