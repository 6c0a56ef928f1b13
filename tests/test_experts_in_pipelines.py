"""A pipeline with experts is one process with experts: losses of routers, gradients, loads, moved biases.

The one process computes the losses of the same pieces, a microbatch on a data rank each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from course_pp.launch import on_ranks
from course_pp.loss import Attached
from course_pp.model import CrossEntropy, ModelConfig, Router, Transformer
from course_pp.model.experts import ExpertLoad, count_over_data_ranks, expert_loads, update_router_bias
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_dp_rank,
    get_dp_size,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from tests.equality import Trained, adamw, assert_same_training, batches, sharded_adamw, train
from tests.grids import crossed
from tests.parallel import stack
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stage_modules

pytestmark = pytest.mark.timeout(120)

ROWS, SEQ_LEN, M = 8, 6, 4
CONFIG = ModelConfig(
    dim=16, n_layers=4, n_heads=2, vocab_size=23, max_seq_len=SEQ_LEN, n_experts=4, expert_dim=8, moe_every=1,
    balance_coef=0.1, z_coef=0.05,
)  # fmt: skip
BIAS = replace(CONFIG, balance="bias", z_coef=0.0, router="sigmoid", moe_every=2, n_shared_experts=1)
TIGHT = replace(CONFIG, balance="sequence", capacity_factor=0.75, moe_every=2)
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v")
TWO_COPIES = "chimera"  # of each stage, which share the microbatches


@dataclass
class Routed:
    """A training run, and by step what losses were attached and how experts were used."""

    trained: Trained
    attached: list[dict[str, float]] = field(default_factory=list)
    loads: list[dict[str, ExpertLoad]] = field(default_factory=list)
    biases: dict[str, list[float]] = field(default_factory=dict)


def data(config: ModelConfig, pieces: int, accumulated: int = 1, even: bool = False) -> list[Any]:
    """Three steps of ``accumulated`` batches of at least a row a piece, of which unequally many tokens count."""
    found = batches(config, max(ROWS, pieces), config.max_seq_len, 3 * accumulated)
    for _, target in found:
        target[: None if even else 3, :4] = -100
    return [found[i : i + accumulated] for i in range(0, len(found), accumulated)]


def routed(
    modules: Sequence[nn.Module],
    mesh: Any,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Any],
    run: Callable[[Any, int], tuple[float, dict[str, float]]],
    crowded: bool = False,
) -> Routed:
    """Train by ``run(batch, divisor)``, which adds gradients and returns the loss and the attached losses.

    Args:
        crowded: every token goes to the first experts, by a bias.
    """
    result = Routed(Trained([], {}, {}))
    for router in (part for module in modules for part in module.modules() if crowded and isinstance(part, Router)):
        router.get_buffer("bias")[: router.config.top_k] = 100.0

    def step(i: int) -> float:
        divisor = sum(int(CrossEntropy().count(target)) for _, target in steps[i])
        done = [run(batch, divisor) for batch in steps[i]]
        result.attached.append({name: sum(each[name] for _, each in done) for name in done[0][1]})
        result.loads.append(expert_loads(modules, mesh))
        pairs = modules[0].config.top_k * sum(tokens.numel() for tokens, _ in steps[i])
        assert all(sum(load.tokens) == pairs for load in result.loads[-1].values())
        update_router_bias(modules, result.loads[-1])
        return sum(loss for loss, _ in done)

    result.trained = train(modules, len(steps), step, optimizer)
    for module in modules:
        result.biases |= {name: buffer.tolist() for name, buffer in module.named_buffers() if name.endswith("bias")}
    return result


def one_process(
    config: ModelConfig, pieces: int, accumulated: int = 1, joined: int = 1, crowded: bool = False
) -> Routed:
    """Each batch in ``pieces``, a microbatch of a data rank each; or those of ``joined`` data ranks in one."""
    torch.manual_seed(0)
    model = Transformer(config).double()

    def run(batch: Any, divisor: int) -> tuple[float, dict[str, float]]:
        total, sums = 0.0, dict[str, float]()
        m = pieces // joined
        pairs = [[torch.cat(part.chunk(pieces)[i::m]) for part in batch] for i in range(m)]
        for tokens, target in pairs:
            attached = Attached(int(CrossEntropy().count(target)) / divisor)
            with attached:
                loss = CrossEntropy().total(model(tokens), target) / divisor
            loss.backward()
            total += loss.item()
            for name, value in attached.sums()[0].items():
                sums[name] = sums.get(name, 0.0) + value.item()
        return total, sums

    return routed([model], None, adamw([model]), data(config, pieces, accumulated, joined > 1), run, crowded)


def assert_same(ranks: Sequence[Routed], expected: Routed) -> None:
    assert_same_training([each.trained for each in ranks], expected.trained)
    for each in ranks:
        torch.testing.assert_close(each.attached, expected.attached, rtol=1e-12, atol=0)
        assert each.loads == expected.loads
        assert each.biases.items() <= expected.biases.items()


def in_runtime(rank: int, name: str, config: ModelConfig, recompute: bool) -> Routed:
    schedule = build(name, 2, M)
    modules = stage_modules(rank, schedule, config)
    pipeline = Pipeline(schedule, modules, CrossEntropy(), recompute=recompute, timeout_s=20)

    def run(batch: Any, divisor: int) -> tuple[float, dict[str, float]]:
        losses = pipeline.step(*for_rank(rank, schedule, *batch), divisor=divisor)
        return sum(losses), pipeline.attached

    held = list(modules.values())
    return routed(held, None, adamw(held), data(config, M), run)


@pytest.mark.parametrize(
    ("name", "recompute", "config"),
    crossed(
        [*SCHEDULES, TWO_COPIES],
        [False, True],
        [pytest.param(CONFIG, id="loss"), pytest.param(BIAS, id="bias"), pytest.param(TIGHT, id="sequence, capacity")],
    ),
)
def test_runtime(name: str, recompute: bool, config: ModelConfig) -> None:
    with no_process_left():
        ranks = on_ranks(2, in_runtime, name, config, recompute, timeout_s=60.0)
    assert_same(ranks, one_process(config, M))


@dataclass(frozen=True)
class Case:
    schedule: str
    config: ModelConfig = CONFIG
    ac: Any = "none"
    layout: DistributedConfig = field(default_factory=lambda: DistributedConfig(pp=2, dp_shard=1))
    accumulated: int = 1
    joined: bool = False  # whether the loss counts over data ranks
    crowded: bool = False

    @property
    def n_microbatches(self) -> int:
        return max(M, self.layout.pp)

    @property
    def pieces(self) -> int:
        return self.n_microbatches * self.layout.dp_replicate * self.layout.dp_shard


CASES = [
    *(Case(name, config) for name in SCHEDULES for config in (CONFIG, BIAS)),
    *(Case(name, TIGHT, "full") for name in SCHEDULES),
    Case("zb_v", CONFIG, "full", accumulated=2),
    Case("1f1b", BIAS, "selective", accumulated=2),
]
SHARDED = [
    *(
        Case(name, config, layout=DistributedConfig(pp=2, dp_shard=2))
        for name in ("1f1b", "zb_v")
        for config in (CONFIG, BIAS)
    ),
    Case("1f1b", BIAS, "full", DistributedConfig(pp=2, dp_replicate=2, dp_shard=1), accumulated=2),
    Case("zb_v", CONFIG, "full", DistributedConfig(pp=2, dp_shard=2), joined=True),
    *(Case(name, CONFIG, layout=DistributedConfig(pp=2, dp_shard=2, ep=2)) for name in ("zb_v", "dualpipe_v")),
]


def in_parallel(rank: int, cases: Sequence[Case]) -> list[Routed]:
    return [in_one_layout(case) for case in cases]


def in_one_layout(case: Case) -> Routed:
    m, steps = case.n_microbatches, data(case.config, case.pieces, case.accumulated, case.joined)
    recipe = stack.Recipe(case.layout, case.schedule, case.ac, n_microbatches=m)
    mesh = stack._mesh(case.layout)
    modules = stack.build_modules(recipe, mesh, case.config)
    if case.joined:
        count_over_data_ranks(modules, mesh)
    n_data, rows = get_dp_size(mesh), len(steps[0][0][0]) // case.pieces
    stages = [build_pipeline_stage(module, mesh, "cpu", rows, case.config.max_seq_len) for module in modules]
    pipeline = build_pipeline_schedule(stages, m, CrossEntropy(), case.schedule)

    def run(batch: Any, divisor: int) -> tuple[float, dict[str, float]]:
        mine, theirs = (part.chunk(n_data)[get_dp_rank(mesh)] for part in batch)
        loss = pipeline.step(mine, target=theirs, divisor=divisor)
        pipeline.eval(mine, target=theirs)
        return loss.item(), pipeline.attached

    return routed(modules, mesh, sharded_adamw(modules), steps, run, case.crowded)


@pytest.mark.parametrize(("n_ranks", "cases"), [(2, CASES), (4, SHARDED)], ids=["pp", "with FSDP2"])
def test_parallel(n_ranks: int, cases: list[Case], subtests: Any) -> None:
    with no_process_left():
        ranks = on_ranks(n_ranks, in_parallel, cases, timeout_s=110.0)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(case)):
            joined = case.pieces // case.n_microbatches if case.joined else 1
            assert_same(found, one_process(case.config, case.pieces, case.accumulated, joined))
