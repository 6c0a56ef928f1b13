"""A pipeline with experts is one process with experts: losses of routers, gradients, loads, moved
biases.

The one process computes the losses of the same pieces, a microbatch on a data rank each. It never
sees padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Router, Transformer
from course_pp.model.experts import (
    ExpertLoad,
    count_over_data_ranks,
    expert_loads,
    update_router_bias,
)
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_dp_rank,
    get_dp_size,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.step.loss import Attached
from tests.equality import Trained, adamw, assert_same_training, batches, sharded_adamw, train
from tests.grids import crossed
from tests.parallel import stack
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stage_modules, take_step

pytestmark = pytest.mark.timeout(120)

ROWS, SEQ_LEN, M = 8, 6, 4
CONFIG = ModelConfig(
    dim=16,
    n_layers=4,
    n_heads=2,
    vocab_size=23,
    max_seq_len=SEQ_LEN,
    n_experts=4,
    expert_dim=8,
    moe_every=1,
    balance_coef=0.1,
    z_coef=0.05,
)
BIAS = replace(
    CONFIG, balance="bias", z_coef=0.0, router="sigmoid", moe_every=2, n_shared_experts=1
)
TIGHT = replace(CONFIG, balance="sequence", capacity_factor=0.75, moe_every=2)
LIMITED = replace(CONFIG, capacity_factor=0.75, n_shared_experts=1)
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v")
TWO_COPIES = "chimera"  # of each stage, which share the microbatches


@dataclass
class Routed:
    """A training run, and by step what losses were attached and how experts were used."""

    trained: Trained
    attached: list[dict[str, float]] = field(default_factory=list)
    loads: list[dict[str, ExpertLoad]] = field(default_factory=list)
    biases: dict[str, list[float]] = field(default_factory=dict)


def data(
    config: ModelConfig, pieces: int, accumulated: int = 1, even: bool = False, padded: bool = False
) -> list[Any]:
    """Three steps of ``accumulated`` batches of at least a row a piece, of which unequally many
    tokens count.

    Args:
        even: as many targets count in every row.
        padded: each batch is (inputs, targets, mask), and targets count where the mask is True.
    """
    found: list[Any] = batches(config, max(ROWS, pieces), config.max_seq_len, 3 * accumulated)
    if padded:
        found = [(tokens, target, mask_of(target)) for tokens, target in found]
    else:
        for _, target in found:
            target[: None if even else 3, :4] = -100
    return [found[i : i + accumulated] for i in range(0, len(found), accumulated)]


def mask_of(target: Tensor) -> Tensor:
    """Return a mask with padding before or behind the tokens, and targets that ignore it."""
    n_rows, seq_len = target.shape
    length = torch.arange(n_rows) % seq_len + 1
    length[:2] = 0
    is_token = torch.arange(seq_len) < length[:, None]
    is_token[1::2] = is_token[1::2].flip(1)
    target[~is_token] = -100
    return is_token


def without_padding(
    tokens: Tensor, target: Tensor, is_token: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the tokens of all rows in one row, and the keywords that keep the rows apart."""
    row, position = is_token.nonzero(as_tuple=True)
    keywords = {"attention_mask": (row[:, None] == row)[None, None], "position_ids": position[None]}
    return tokens[is_token][None], target[is_token][None], keywords


def routed(
    modules: Sequence[nn.Module],
    mesh: Any,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Any],
    run: Callable[[Any, int], tuple[float, dict[str, float]]],
    crowded: bool = False,
) -> Routed:
    """Train by ``run(batch, divisor)``, which adds gradients and returns the loss and the attached
    losses.

    Args:
        crowded: every token goes to the first experts, by a bias.
    """
    result = Routed(Trained([], {}, {}))
    for router in (
        part
        for module in modules
        for part in module.modules()
        if crowded and isinstance(part, Router)
    ):
        router.get_buffer("bias")[: router.config.top_k] = 100.0

    def step(i: int) -> float:
        divisor = sum(int(CrossEntropy().count(target)) for _, target, *_ in steps[i])
        done = [run(batch, divisor) for batch in steps[i]]
        result.attached.append({name: sum(each[name] for _, each in done) for name in done[0][1]})
        result.loads.append(expert_loads(modules, mesh))
        n_tokens = sum(
            int(mask[0].sum()) if mask else tokens.numel() for tokens, _, *mask in steps[i]
        )
        pairs = modules[0].config.top_k * n_tokens
        assert all(sum(load.tokens) == pairs for load in result.loads[-1].values())
        update_router_bias(modules, result.loads[-1])
        return sum(loss for loss, _ in done)

    result.trained = train(modules, len(steps), step, optimizer)
    for module in modules:
        result.biases |= {
            name: buffer.tolist()
            for name, buffer in module.named_buffers()
            if name.endswith("bias")
        }
    return result


def one_process(
    config: ModelConfig,
    pieces: int,
    accumulated: int = 1,
    joined: int = 1,
    crowded: bool = False,
    padded: bool = False,
) -> Routed:
    """Return each batch in ``pieces``, or the batches of ``joined`` data ranks in one."""
    torch.manual_seed(0)
    model = Transformer(replace(config, max_seq_len=ROWS * pieces * SEQ_LEN)).double()

    def run(batch: Any, divisor: int) -> tuple[float, dict[str, float]]:
        total = 0.0
        sums = dict[str, float]()
        m = pieces // joined
        microbatches = [[torch.cat(part.chunk(pieces)[i::m]) for part in batch] for i in range(m)]
        for tokens, target, *mask in microbatches:
            keywords = {}
            if mask:
                tokens, target, keywords = without_padding(tokens, target, *mask)
            attached = Attached(int(CrossEntropy().count(target)) / divisor)
            with attached:
                loss = CrossEntropy().total(model(tokens, **keywords), target) / divisor
            loss.backward()
            total += loss.item()
            for name, value in attached.sums()[0].items():
                sums[name] = sums.get(name, 0.0) + value.item()
        return total, sums

    steps = data(config, pieces, accumulated, joined > 1, padded)
    return routed([model], None, adamw([model]), steps, run, crowded)


def assert_same(ranks: Sequence[Routed], expected: Routed) -> None:
    assert_same_training([each.trained for each in ranks], expected.trained)
    for each in ranks:
        torch.testing.assert_close(each.attached, expected.attached, rtol=1e-12, atol=0)
        assert each.loads == expected.loads
        assert each.biases.items() <= expected.biases.items()


def in_runtime(rank: int, name: str, config: ModelConfig, padded: bool, recompute: bool) -> Routed:
    schedule = build(name, 2, M)
    modules = stage_modules(rank, schedule, config)
    pipeline = Pipeline(schedule, modules, CrossEntropy(), recompute=recompute, timeout_s=20)

    def run(batch: Any, divisor: int) -> tuple[float, dict[str, float]]:
        inputs, targets, *mask = batch
        keywords = {"attention_mask": mask[0]} if mask else {}
        given = for_rank(rank, schedule, inputs, targets)
        loss = take_step(pipeline, *given, divisor=divisor, **keywords)
        return loss.item(), pipeline.attached

    held = list(modules.values())
    return routed(held, None, adamw(held), data(config, M, padded=padded), run)


@pytest.mark.parametrize(
    ("name", "recompute", "config", "padded"),
    crossed(
        [*SCHEDULES, TWO_COPIES],
        [False, True],
        [
            pytest.param(CONFIG, False, id="loss"),
            pytest.param(BIAS, False, id="bias"),
            pytest.param(TIGHT, False, id="sequence, capacity"),
            pytest.param(LIMITED, True, id="padded, loss, capacity"),
            pytest.param(BIAS, True, id="padded, bias"),
        ],
    ),
)
def test_runtime(name: str, recompute: bool, config: ModelConfig, padded: bool) -> None:
    with no_process_left():
        ranks = on_ranks(2, in_runtime, name, config, padded, recompute, timeout_s=60.0)
    assert_same(ranks, one_process(config, M, padded=padded))


@dataclass(frozen=True)
class Case:
    schedule: str
    config: ModelConfig = CONFIG
    ac: Any = "none"
    layout: DistributedConfig = field(default_factory=lambda: DistributedConfig(pp=2, dp_shard=1))
    accumulated: int = 1
    joined: bool = False  # whether the loss counts over data ranks
    crowded: bool = False
    mask: Literal["no", "whole", "by microbatch"] = "no"  # what padding is told by

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
    *(Case(name, LIMITED, mask="whole") for name in SCHEDULES),
    Case("zb_v", BIAS, "full", accumulated=2, mask="by microbatch"),
]
SHARDED = [
    *(
        Case(name, config, layout=DistributedConfig(pp=2, dp_shard=2))
        for name in ("1f1b", "zb_v")
        for config in (CONFIG, BIAS)
    ),
    Case("1f1b", BIAS, "full", DistributedConfig(pp=2, dp_replicate=2, dp_shard=1), accumulated=2),
    Case("zb_v", CONFIG, "full", DistributedConfig(pp=2, dp_shard=2), joined=True),
    *(
        Case(name, CONFIG, layout=DistributedConfig(pp=2, dp_shard=2, ep=2))
        for name in ("zb_v", "dualpipe_v")
    ),
    Case("1f1b", LIMITED, "full", layout=DistributedConfig(pp=2, dp_shard=2, ep=2), mask="whole"),
    Case(
        "zb_v",
        CONFIG,
        layout=DistributedConfig(pp=2, dp_shard=2),
        joined=True,
        mask="by microbatch",
    ),
    Case("1f1b", CONFIG, layout=DistributedConfig(dp_shard=2, tp=2), mask="whole"),
    Case("1f1b", LIMITED, layout=DistributedConfig(pp=2, dp_shard=1, tp=2), mask="whole"),
]


def in_parallel(rank: int, cases: Sequence[Case]) -> list[Routed]:
    return [in_one_layout(case) for case in cases]


def in_one_layout(case: Case) -> Routed:
    m = case.n_microbatches
    padded = case.mask != "no"
    steps = data(case.config, case.pieces, case.accumulated, case.joined, padded)
    recipe = stack.Recipe(case.layout, case.schedule, case.ac, n_microbatches=m)
    mesh = stack._mesh(case.layout)
    modules = stack.build_modules(recipe, mesh, case.config)
    if case.joined:
        count_over_data_ranks(modules, mesh)
    n_data = get_dp_size(mesh)
    rows = len(steps[0][0][0]) // case.pieces
    stages = [
        build_pipeline_stage(module, mesh, "cpu", rows, case.config.max_seq_len)
        for module in modules
    ]
    pipeline = build_pipeline_schedule(stages, m, CrossEntropy(), case.schedule)

    def run(batch: Any, divisor: int) -> tuple[float, dict[str, float]]:
        inputs, target, *mask = (part.chunk(n_data)[get_dp_rank(mesh)] for part in batch)
        if case.mask == "by microbatch":
            ready = {
                "arg_mbs": [(each,) for each in inputs.chunk(m)],
                "target_mbs": list(target.chunk(m)),
                "kwarg_mbs": [{"attention_mask": each} for each in mask[0].chunk(m)],
            }
            loss = pipeline.step(**ready, divisor=divisor)
            pipeline.eval(**ready)
        else:
            keywords = {"attention_mask": mask[0]} if mask else {}
            loss = pipeline.step(inputs, target=target, divisor=divisor, **keywords)
            pipeline.eval(inputs, target=target, **keywords)
        return loss.item(), pipeline.attached

    return routed(modules, mesh, sharded_adamw(modules), steps, run, case.crowded)


@pytest.mark.parametrize(("n_ranks", "cases"), [(2, CASES), (4, SHARDED)], ids=["pp", "with FSDP2"])
def test_parallel(n_ranks: int, cases: list[Case], subtests: Any) -> None:
    with no_process_left():
        ranks = on_ranks(n_ranks, in_parallel, cases, timeout_s=110.0)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(case)):
            joined = case.pieces // case.n_microbatches if case.joined else 1
            padded = case.mask != "no"
            assert_same(
                found,
                one_process(case.config, case.pieces, case.accumulated, joined, padded=padded),
            )
