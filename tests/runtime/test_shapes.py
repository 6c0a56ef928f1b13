"""Shapes are agreed on when they change and cost nothing else; any tensors may cross."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.runtime.messages import plan_messages
from course_pp.schedule import Product, Schedule, build
from tests.grids import crossed
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stages_of, take_step
from tests.runtime.stepping import (
    Done,
    Stages,
    Step,
    assert_equal_steps,
    gradients,
    in_one_process,
    run_steps,
)

pytestmark = pytest.mark.timeout(60)

WIDTH, M = 4, 4
TRAILER = 512
TRANSPORTS = ["gloo", "gloo without tags"]


class Block(nn.Module):
    """Linear layers on whatever arrives, which leaves in the form that ``form`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.form: Callable[[Tensor], Any] = as_tensor

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        h = torch.tanh(self.layer(x))
        return self.form(h if skip is None else h + skip)


def as_tensor(h: Tensor) -> Any:
    return h


def as_dict(h: Tensor) -> Any:
    return {"skip": h.sin(), "x": h}


def blocks(
    n: int, form: Callable[[Tensor], Any] = as_tensor, dtype: torch.dtype = torch.float64
) -> Stages:
    torch.manual_seed(0)
    stages = [Block().to(dtype) for _ in range(n)]
    set_form(form, stages)
    return stages


def set_form(form: Callable[[Tensor], Any], stages: Stages) -> None:
    """For every boundary; the loss wants a tensor."""
    for stage in stages[:-1]:
        stage.form = form  # type: ignore[union-attr]


def batch(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, **circumstances: Any
) -> Step:
    """One shape is that of the batch, several are those of its microbatches."""
    torch.manual_seed(sum(map(sum, shapes)))
    inputs, targets = (
        [torch.randn(*shape, WIDTH, dtype=dtype) for shape in shapes] for _ in range(2)
    )
    return Step(
        *((inputs, targets) if len(shapes) > 1 else (inputs[0], targets[0])), **circumstances
    )


def crossing(schedule: Schedule) -> int:
    """Products that one rank makes and another needs."""
    return sum(
        isinstance(m.content, Product)
        for p in plan_messages(schedule)
        for row in p.outgoing.values()
        for m in row
    )


def closing(schedule: Schedule) -> int:
    """Messages that end a step."""
    return 2 * (schedule.n_ranks - 1)


def messages(found: Sequence[Sequence[Done]], step: int) -> int:
    return sum(len(rank[step].sent) for rank in found)


@pytest.mark.parametrize(
    ("schedule", "transport"),
    crossed(
        [
            pytest.param(build("1f1b", 3, M), id="1f1b on 3"),
            pytest.param(build("zb_v", 2, M), id="zb_v on 2"),
        ],
        TRANSPORTS,
    ),
)
def test_the_first_step_sends_each_product_after_a_header_and_later_steps_send_it_alone(
    schedule: Schedule, transport: str
) -> None:
    make = partial(blocks, schedule.n_stages)
    steps = [batch((2 * M, 3)) for _ in range(3)]
    with no_process_left():
        found = run_steps(schedule, make, steps, transport=transport)
    assert_equal_steps(found, in_one_process(M, make, steps))
    once = crossing(schedule) + closing(schedule)
    assert [messages(found, step) for step in range(3)] == [2 * once, once, once]
    product = 2 * 3 * WIDTH * 8 + TRAILER
    losses = M * 8 + TRAILER
    for step in (1, 2):
        sizes = sorted(size for rank in found for size in rank[step].sent)
        assert sizes == sorted([product] * crossing(schedule) + [losses] * closing(schedule))


LENGTHS = [(2, 5), (2, 3), (2, 7), (2, 2)]
CHANGES = {
    "a larger batch, then a smaller": [batch((2 * M, 3)), batch((5 * M, 3)), batch((M, 3))],
    "a longer sequence": [batch((2 * M, 3)), batch((2 * M, 5)), batch((2 * M, 1))],
    "another number of dimensions": [batch((2 * M,)), batch((2 * M, 5)), batch((2 * M, 2, 3))],
    "microbatches of different lengths": [
        batch((2 * M, 3)),
        batch(*LENGTHS),
        batch(*reversed(LENGTHS)),
    ],
    "no samples in a microbatch": [batch((2 * M, 3)), batch((3, 3), (0, 3), (1, 3), (4, 3))],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "steps", "transport"),
    crossed(
        ["1f1b", "zb_h1"],
        [pytest.param(steps, id=what) for what, steps in CHANGES.items()],
        TRANSPORTS,
    ),
)
def test_another_shape_is_agreed_on_again_and_is_then_free(
    name: str, steps: list[Step], transport: str
) -> None:
    schedule = build(name, 3, M)
    make = partial(blocks, schedule.n_stages)
    twice = [step for step in steps for _ in range(2)]
    found = run_steps(schedule, make, twice, loss_fn=summed, transport=transport)
    assert_equal_steps(found, in_one_process(M, make, twice, summed))
    once = crossing(schedule) + closing(schedule)
    for step in range(1, len(twice), 2):
        assert messages(found, step) == once


def summed(output: Tensor, target: Tensor) -> Tensor:
    """The mean of nothing is not a number."""
    return (output - target).square().sum()


def test_a_ragged_last_microbatch_costs_a_header_for_itself_alone() -> None:
    schedule = build("1f1b", 2, M)
    make = partial(blocks, 2)
    ragged = batch((4, 3), (4, 3), (4, 3), (1, 3))
    steps = [batch(*[(4, 3)] * M), ragged, ragged]
    found = run_steps(schedule, make, steps)
    assert_equal_steps(found, in_one_process(M, make, steps))
    once = crossing(schedule) + closing(schedule)
    assert [messages(found, step) for step in range(3)] == [2 * once, once + 2, once]


def test_a_batch_that_does_not_divide_is_cut_as_evenly_as_can_be_and_weighted_by_samples() -> None:
    schedule = build("1f1b", 2, M)
    make = partial(blocks, 2)
    step = batch((2 * M + 3, 3))
    found = run_steps(schedule, make, [step])
    assert_equal_steps(found, in_one_process(M, make, [step]))
    # The losses of the microbatches, weighted, make that of the batch in one piece.
    assert_equal_steps(
        [[Done([sum(rank[0].losses)], rank[0].gradients)] for rank in found],
        in_one_process(1, make, [step]),
    )


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_autocast_in_one_step_alone_changes_what_crosses_in_that_step_alone(transport: str) -> None:
    schedule = build("1f1b", 3, M)
    make = partial(layers, 3)
    circumstances = [nullcontext, bfloat16, bfloat16, nullcontext, nullcontext]
    steps = [batch((2 * M, 3), dtype=torch.float32, around=around) for around in circumstances]
    found = run_steps(schedule, make, steps, half_as_large, transport=transport)
    assert_equal_steps(found, in_one_process(M, make, steps, half_as_large), tolerance=0)
    assert max(found[0][2].sent) == 2 * 3 * WIDTH * 2 + TRAILER
    assert max(found[0][4].sent) == 2 * 3 * WIDTH * 4 + TRAILER
    assert messages(found, 2) == messages(found, 4) == crossing(schedule) + closing(schedule)
    # The batch is the same in all steps.
    losses = [step.losses for step in found[0]]
    assert losses[0] == losses[3] == losses[4] != losses[1] == losses[2]


def layers(n: int) -> Stages:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(n)]


def half_as_large(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target) / 2


@pytest.mark.parametrize(("name", "transport"), crossed(["1f1b", "zb_h1"], TRANSPORTS))
def test_what_crosses_may_change_from_tensor_to_dict_to_tuple_between_steps(
    name: str, transport: str
) -> None:
    schedule = build(name, 3, M)
    make = partial(blocks, 3)
    as_tuple = lambda h: (h, 2 * h)  # noqa: E731
    forms = [as_tensor, as_dict, as_dict, as_tuple, as_tuple, as_tensor]
    steps = [batch((2 * M, 3), prepare=partial(set_form, form)) for form in forms]
    found = run_steps(schedule, make, steps, transport=transport)
    assert_equal_steps(found, in_one_process(M, make, steps))
    once = crossing(schedule) + closing(schedule)
    for step in (2, 4):
        assert messages(found, step) == once


class First(nn.Module):
    """Tokens to everything that may cross."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)

    def forward(self, tokens: Tensor) -> Any:
        h = self.embed(tokens)
        return {
            "h": h,
            "unused": h.exp(),
            "detached": h.detach().cos(),
            "tokens": tokens,
            "mask": tokens > 2,
            "count": torch.tensor(3),
            "none": None,
            "number": 2,
            "nested": [h.sin(), (tokens + 1, {"deep": h * 2})],
        }


class Middle(nn.Module):
    """Passes most of it on, some of it changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, h: Tensor, tokens: Tensor, mask: Tensor, count: Tensor, nested: Any, **rest: Any
    ) -> Any:
        assert h.requires_grad
        assert rest["unused"].requires_grad
        assert not rest["detached"].requires_grad
        assert rest["none"] is None
        h = torch.tanh(self.layer(h)) * rest["number"] + rest["detached"]
        count += 1
        mask.logical_not_()
        return h, tokens, mask, count, nested


class Idle(nn.Module):
    """A stage that changes nothing, with a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, **everything: Any) -> Any:
        return everything


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, h: Tensor, tokens: Tensor, mask: Tensor, count: Tensor, nested: Any
    ) -> Tensor:
        sine, (next_tokens, deep) = nested
        h = self.layer(h).masked_fill(mask[..., None], 0) * count + tokens[..., None]
        return h + sine * deep["deep"] + next_tokens[..., None]


def all_kinds(n: int) -> Stages:
    torch.manual_seed(0)
    return [
        stage.double() for stage in (First(), *(Idle() for _ in range(n - 3)), Middle(), Last())
    ]


def token_batch(n: int, length: int) -> Step:
    torch.manual_seed(n)
    return Step(torch.randint(7, (n, length)), torch.randn(n, length, WIDTH, dtype=torch.float64))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("schedule", "recompute", "transport"),
    crossed(
        [
            pytest.param(build("1f1b", 3, M), id="1f1b on 3"),
            pytest.param(build("gpipe", 4, M), id="gpipe on 4"),
            pytest.param(build("zb_v", 2, M), id="zb_v on 2"),
            pytest.param(build("interleaved_1f1b", 1, M, 4), id="interleaved on 1"),
        ],
        [False, True],
        TRANSPORTS,
    ),
)
def test_tensors_that_are_used_passed_on_changed_or_ignored_cross_in_dicts_tuples_and_lists(
    schedule: Schedule, recompute: bool, transport: str
) -> None:
    make = partial(all_kinds, schedule.n_stages)
    steps = [token_batch(2 * M, 3), token_batch(2 * M, 3), token_batch(M, 5)]
    found = run_steps(schedule, make, steps, recompute=recompute, transport=transport)
    assert_equal_steps(found, in_one_process(M, make, steps))


class ModelOutputStage(nn.Module):
    """Return an output class of Hugging Face, whose import costs every rank a second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, last_hidden_state: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        h = self.layer(last_hidden_state)
        return BaseModelOutput(last_hidden_state=h, hidden_states=(h,), attentions=None)


def model_output_stages(n: int) -> Stages:
    torch.manual_seed(0)
    return [ModelOutputStage().double() for _ in range(n)]


def loss_of_model_output(output: Any, target: Tensor) -> Tensor:
    """Reads it as only the class itself can be read."""
    return F.mse_loss(output.last_hidden_state, target)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_the_outputs_of_hugging_face_models_cross_and_reach_the_loss_as_they_are(name: str) -> None:
    schedule = build(name, 2, M)
    make = partial(model_output_stages, schedule.n_stages)
    torch.manual_seed(0)
    x, target = (torch.randn(2 * M, 3, WIDTH, dtype=torch.float64) for _ in range(2))
    steps = [Step({"last_hidden_state": x}, target)]
    found = run_steps(schedule, make, steps, loss_of_model_output)
    assert_equal_steps(found, in_one_process(M, make, steps, loss_of_model_output))


def alternating(
    rank: int, schedules: Sequence[Schedule], steps: Sequence[Step], transport: str
) -> list[list[Done]]:
    """Two pipelines with two models of their own, in turns."""
    pipelines = []
    for seed, schedule in enumerate(schedules):
        stages = blocks(schedule.n_stages, (as_tensor, as_dict)[seed])
        mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
        pipelines.append(
            (
                schedule,
                mine,
                Pipeline(schedule, mine, F.mse_loss, transport=transport, timeout_s=20),
            )
        )
    done: list[list[Done]] = [[], []]
    for step in steps:
        for number, (schedule, mine, pipeline) in enumerate(pipelines):
            for module in mine.values():
                if module is not None:
                    module.zero_grad()
            take_step(pipeline, *for_rank(rank, schedule, step.inputs, step.targets))
            done[number].append(Done(list(pipeline.shares), gradients(mine)))
    return done


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_pipelines_of_one_group_take_turns(transport: str) -> None:
    schedules = [build("1f1b", 2, M), build("zb_v", 2, M)]
    steps = [batch((2 * M, 3)), batch((2 * M, 3)), batch((3 * M, 2))]
    found = on_ranks(2, alternating, schedules, steps, transport, timeout_s=30.0)
    for number, schedule in enumerate(schedules):
        make = partial(blocks, schedule.n_stages, (as_tensor, as_dict)[number])
        assert_equal_steps([rank[number] for rank in found], in_one_process(M, make, steps))
