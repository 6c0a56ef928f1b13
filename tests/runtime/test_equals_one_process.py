"""A step of any schedule equals a step in one process: loss, every gradient, every parameter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, run_step
from course_pp.schedule import Schedule, build, names
from tests.equality import GRADIENT_TOLERANCE, Trained, assert_same_training, snapshot_gradients
from tests.runtime.small import (
    BATCH,
    LayerRanges,
    even_layers,
    for_rank,
    in_one_process,
    mean_loss,
    model_config,
    run,
    small_batches,
    stage_modules,
    take_step,
    uneven_layers,
    watch_the_node,
)

SIZES = (1, 2, 3, 4, 8)
SYNCHRONOUS = tuple(name for name in names() if name != "pipedream")
TWO_COPIES = ("chimera", "dualpipe")


@dataclass(frozen=True)
class Case:
    """A schedule by name and size, and how the layers are cut."""

    name: str
    pp: int
    m: int
    layers: str

    def __str__(self) -> str:
        return f"{self.name}, pp={self.pp}, m={self.m}, {self.layers}"

    @property
    def schedule(self) -> Schedule:
        return build(self.name, self.pp, self.m)

    @property
    def n_layers(self) -> int:
        """The layers of the whole model: two a rank, or one more."""
        return 2 * self.pp + (self.layers == "uneven")

    @property
    def layer_ranges(self) -> LayerRanges:
        cut = even_layers if self.layers == "even" else uneven_layers
        return cut(self.n_layers, self.schedule.n_stages)


def accepts(name: str, pp: int, m: int) -> bool:
    """Return whether the schedule exists for these sizes, with a large enough batch."""
    try:
        build(name, pp, m)
    except ValueError:
        return False
    return 1 <= m <= BATCH


@cache
def microbatch_counts(name: str, pp: int) -> tuple[int, ...]:
    """Return the numbers of microbatches to try, as far as the schedule accepts them."""
    uneven = next((m for m in range(pp + 1, BATCH) if m % pp and accepts(name, pp, m)), 3)
    return tuple(dict.fromkeys(m for m in (2 * pp, uneven, pp - 1, 1) if accepts(name, pp, m)))


def cases() -> Iterator[Case]:
    for pp in SIZES:
        for name in SYNCHRONOUS:
            for layers in ("even", "uneven"):
                for m in microbatch_counts(name, pp):
                    yield Case(name, pp, m, layers)


def is_sample(case: Case) -> bool:
    """Return a case for each schedule on up to four ranks, and three on eight."""
    usual, *others = microbatch_counts(case.name, case.pp)
    if case.name in TWO_COPIES:
        return (case.pp, case.layers) in ((2, "uneven"), (4, "even")) and case.m == usual
    if case.pp == 8:
        return (case.name, case.layers, case.m) in (
            ("1f1b", "uneven", 9),
            ("zb_v", "even", 7),
            ("zb_h1", "uneven", 16),
        )
    turn = SYNCHRONOUS.index(case.name) + case.pp
    special = others[turn // 2 % len(others)] if others else usual
    return (case.layers, case.m) == (("even", usual), ("uneven", special))[turn % 2]


SAMPLE = [case for case in cases() if is_sample(case)]
THE_REST = [case for case in cases() if not is_sample(case)]


def train_on_rank(rank: int, cases: Sequence[Case]) -> list[Trained]:
    """One case after another: starting ranks takes longer than training so small a model."""
    configs = [model_config(case.n_layers) for case in cases]
    return [
        run(rank, case.schedule, config, small_batches(config), case.layer_ranges)
        for case, config in zip(cases, configs, strict=True)
    ]


@cache
def reference(n_layers: int) -> Trained:
    config = model_config(n_layers)
    return in_one_process(config, small_batches(config))


def assert_all_right(
    pp: int, cases: Sequence[Case], timeout_s: float, subtests: pytest.Subtests
) -> None:
    """Each of the cases on ``pp`` ranks leaves every rank as one process would."""
    mine = [case for case in cases if case.pp == pp]
    ranks = on_ranks(pp, train_on_rank, mine, timeout_s=timeout_s)
    for case, trained in zip(mine, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(case)):
            assert_same_training(list(trained), reference(case.n_layers))


@pytest.mark.parametrize(
    "pp", [pytest.param(pp, marks=pytest.mark.long if pp > 3 else ()) for pp in SIZES]
)
def test_training_equals_one_process(pp: int, subtests: pytest.Subtests) -> None:
    assert_all_right(pp, SAMPLE, 110, subtests)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pp", SIZES)
def test_training_equals_one_process_at_every_size(pp: int, subtests: pytest.Subtests) -> None:
    assert_all_right(pp, THE_REST, 570, subtests)


def test_every_synchronous_schedule_is_tried_on_1_to_4_ranks_with_even_and_uneven_layers() -> None:
    possible = {
        (name, pp) for name in SYNCHRONOUS for pp in SIZES if name not in TWO_COPIES or pp % 2 == 0
    }
    tried = {(case.name, case.pp) for case in SAMPLE}
    assert {(name, pp) for name, pp in possible if pp <= 4} <= tried
    tried = {(case.name, case.layers) for case in SAMPLE if case.pp > 1}
    assert tried == {(name, layers) for name in SYNCHRONOUS for layers in ("even", "uneven")}
    every = {(name, pp, layers) for name, pp in possible for layers in ("even", "uneven")}
    assert every == {(case.name, case.pp, case.layers) for case in (*SAMPLE, *THE_REST)}
    assert any(case.m < case.pp for case in SAMPLE)
    assert any(case.m > case.pp and case.m % case.pp for case in SAMPLE)


def loss_without_graph(logits: Tensor, target: Tensor) -> Tensor:
    assert not logits.requires_grad, "nobody will go backward here"
    return mean_loss(logits, target)


def evaluate_on_rank(
    rank: int, schedules: Sequence[Schedule]
) -> list[tuple[tuple[float, ...], list[str]]]:
    """Return the losses of each schedule's forwards, and the parameters with a gradient."""
    config = model_config(4)
    ((inputs, target),) = small_batches(config, steps=1)
    results = []
    for schedule in schedules:
        modules = stage_modules(rank, schedule, config)
        pipeline = Pipeline(schedule, modules, loss_without_graph)
        take_step(pipeline, *for_rank(rank, schedule, inputs, target))
        with_gradient = [
            n
            for module in modules.values()
            for n, p in module.named_parameters()
            if p.grad is not None
        ]
        results.append((pipeline.shares, with_gradient))
    return results


def test_a_schedule_without_backwards_gives_each_microbatch_s_loss_and_no_gradients() -> None:
    schedules = [build(name, 2, 4).forward_only() for name in SYNCHRONOUS]
    ranks = on_ranks(2, evaluate_on_rank, schedules)
    model = stage_modules(0, build("naive", 1, 4), model_config(4))[0]
    ((inputs, target),) = small_batches(model_config(4), steps=1)
    with torch.no_grad():
        pieces = zip(inputs.chunk(4), target.chunk(4), strict=True)
        expected = [mean_loss(model(x), y).item() / 4 for x, y in pieces]
    for rank, results in enumerate(ranks):
        for schedule, (losses, with_gradient) in zip(schedules, results, strict=True):
            assert losses == pytest.approx(expected, rel=GRADIENT_TOLERANCE), (
                f"{schedule.name} on rank {rank}"
            )
            assert with_gradient == [], f"{schedule.name} on rank {rank}"


def recorded_on_rank(rank: int) -> Any:
    schedule = build("zb_v", 2, 4)
    config = model_config(4)
    modules = stage_modules(rank, schedule, config)
    batch = for_rank(rank, schedule, *small_batches(config, steps=1)[0])
    loss, timeline = run_step(schedule, modules, *batch, mean_loss)
    order = [tuple(span.action for span in row) for row in timeline.by_rank]
    return loss.item(), snapshot_gradients(modules.values()), order == list(schedule.actions)


def test_a_recorded_step_equals_one_process_and_has_the_order_of_its_schedule() -> None:
    expected = reference(4)
    for loss, gradients, in_order in on_ranks(2, recorded_on_rank):
        assert loss == pytest.approx(expected.losses[0], rel=GRADIENT_TOLERANCE)
        assert all(
            (expected.gradients[n] - g).abs().max() <= GRADIENT_TOLERANCE
            for n, g in gradients.items()
        )
        assert in_order


def test_one_process_needs_no_process_group() -> None:
    schedule = build("dualpipe_v", 1, 4)
    config = model_config(3)
    assert not torch.distributed.is_initialized()
    trained_here = run(0, schedule, config, small_batches(config), uneven_layers(3, 2))
    assert_same_training([trained_here], reference(3))


@pytest.mark.parametrize(
    ("name", "kind"), [("looped_bfs", "B"), ("interleaved_1f1b", "B"), ("zb_h1", "W")]
)
def test_a_stage_makes_its_weight_gradients_in_its_own_action_next_to_another_stage(
    name: str, kind: str
) -> None:
    schedule = build(name, 1, 4, 3)
    stages = [nn.Linear(2, 2) for _ in range(3)]
    came: list[int] = []
    watched = []
    for stage, module in enumerate(stages):
        watched.append(watch_the_node(module.weight, lambda *_, stage=stage: came.append(stage)))
    Pipeline(schedule, dict(enumerate(stages)), nn.functional.mse_loss).step(
        torch.ones(4, 2), target=torch.zeros(4, 2)
    )
    assert came == [part.stage for part in schedule.parts if part.kind == kind]
