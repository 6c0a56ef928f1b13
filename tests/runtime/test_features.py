"""Features of models besides layers in a row give the gradients of one process."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy
from course_pp.runtime import Pipeline
from course_pp.schedule import Schedule, build
from tests.grids import crossed
from tests.runtime.small import for_rank, parse, stages_of, take_step
from tests.runtime.stepping import Done, Stages, Step, assert_equal_steps, in_one_process, run_steps

pytestmark = pytest.mark.timeout(60)

WIDTH, M, VOCABULARY = 4, 4, 7


def layers(n: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()).to(dtype)
        for _ in range(n)
    ]


def batch(seed: int = 0, dtype: torch.dtype = torch.float64, **circumstances: Any) -> Step:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (
        torch.randn(2 * M, 3, WIDTH, dtype=dtype, generator=generator) for _ in range(2)
    )
    return Step(inputs, targets, **circumstances)


# Empty stages


def with_empty_stages(pattern: str) -> Stages:
    """``"L-L"`` has an empty stage between two layers."""
    return [
        layer if letter == "L" else None
        for letter, layer in zip(pattern, layers(len(pattern)), strict=True)
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "n", "pattern"),
    [
        ("1f1b", 4, "L--L"),
        ("gpipe", 3, "-L-"),
        ("zb_h1", 3, "LL-"),
        ("zb_v", 2, "--L-"),
        ("zb_v", 2, "L--L"),
    ],
)
def test_an_empty_stage_passes_on_what_it_gets(name: str, n: int, pattern: str) -> None:
    schedule = build(name, n, M)
    make = partial(with_empty_stages, pattern)
    steps = [batch(), batch(1)]
    assert_equal_steps(run_steps(schedule, make, steps), in_one_process(M, make, steps))


# Frozen parameters


def frozen(n: int, names: Sequence[str]) -> Stages:
    """Parameters whose name, ``"stage.name"``, begins with one of ``names`` are frozen."""
    stages = layers(n)
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not any(f"{stage}.{name}".startswith(each) for each in names))
    return stages


FROZEN = {
    "the first stage": ["0."],
    "a stage between": ["1."],
    "the last stage": ["2."],
    "the first two": ["0.", "1."],
    "all": [""],
    "some weights and biases": ["0.1.weight", "1.1.bias", "2.0.weight"],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("names", "name", "recompute"),
    crossed(
        [pytest.param(names, id=what) for what, names in FROZEN.items()],
        ["1f1b", "zb_h1"],
        [False, True],
    ),
)
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(
    names: list[str], name: str, recompute: bool
) -> None:
    schedule = build(name, 3, M)
    make = partial(frozen, 3, names)
    steps = [batch(), batch(1)]
    found = run_steps(schedule, make, steps, recompute=recompute)
    assert_equal_steps(found, in_one_process(M, make, steps))
    for rank in found:
        for parameter, gradient in rank[-1].gradients.items():
            assert (gradient is None) == parameter.startswith(tuple(names))


# Random numbers


def with_dropout(n: int) -> Stages:
    return [nn.Sequential(layer, nn.Dropout(0.3)) for layer in layers(n)]


def seed_ranks(_: Stages) -> None:
    torch.manual_seed(3)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "n"), [("1f1b", 2), ("zb_h1", 3), ("zb_v", 2), ("gpipe", 1)])
def test_a_forward_that_is_computed_again_draws_what_it_drew_first(name: str, n: int) -> None:
    schedule = build(name, n, M)
    make = partial(with_dropout, schedule.n_stages)
    steps = [batch(prepare=seed_ranks), batch(1)]
    kept, recomputed = (
        run_steps(schedule, make, steps, recompute=recompute) for recompute in (False, True)
    )
    for one, other in zip(kept, recomputed, strict=True):
        assert_equal_steps([other], one, tolerance=0)
    # Microbatches and steps draw different masks.
    assert len({loss for step in kept[0] for loss in step.losses}) == 2 * M


# Mixed precision


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


class Autocast(nn.Sequential):
    """Computes in bfloat16 by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with bfloat16():
            return super().forward(x)


def layers_with_autocast(n: int) -> Stages:
    return [Autocast(layer) for layer in layers(n, torch.float32)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "n", "recompute", "inside"),
    crossed(
        [("1f1b", 3), ("zb_h1", 3), ("zb_v", 2), ("gpipe", 1)],
        [False, True],
        [pytest.param(True, id="around the step"), pytest.param(False, id="in each stage")],
    ),
)
def test_autocast_gives_the_bits_of_one_process_under_autocast(
    name: str, n: int, recompute: bool, inside: bool
) -> None:
    schedule = build(name, n, M)
    make: Callable[[], Stages] = partial(layers_with_autocast, schedule.n_stages)
    steps = [batch(seed, torch.float32) for seed in range(2)]
    if inside:
        make = partial(layers, schedule.n_stages, torch.float32)
        steps = [batch(seed, torch.float32, around=bfloat16) for seed in range(2)]
    found = run_steps(schedule, make, steps, mean_square, recompute=recompute)
    reference = in_one_process(M, make, steps, mean_square)
    assert_equal_steps(found, reference, tolerance=0)
    exact = in_one_process(M, partial(layers, schedule.n_stages), [batch()], F.mse_loss)
    assert exact[0].losses != reference[0].losses


# What is saved for backward may be elsewhere meanwhile


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("around", "record_memory", "recompute", "name", "n"),
    crossed(
        [
            pytest.param(torch.autograd.graph.save_on_cpu, False, id="save_on_cpu"),
            pytest.param(nullcontext, True, id="memory recorded"),
        ],
        [False, True],
        [("1f1b", 3), ("zb_h1", 3), ("zb_v", 2)],
    ),
)
def test_hooks_on_saved_tensors_change_no_gradient(
    around: Any, record_memory: bool, recompute: bool, name: str, n: int
) -> None:
    schedule = build(name, n, M)
    make = partial(layers, schedule.n_stages)
    steps = [batch(around=around), batch(1, around=around)]
    found = run_steps(schedule, make, steps, recompute=recompute, record_memory=record_memory)
    assert_equal_steps(found, in_one_process(M, make, steps))


# Accumulation, tied and replicated weights


class Embed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.weight = weight

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(self.norm(h), self.weight)


def language_model(n: int, one_parameter: bool = False) -> Stages:
    """Embedding and head with equal weights, or with the very same."""
    between = layers(n - 2)
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64))
    return [
        Embed(weight),
        *between,
        Head(weight if one_parameter else nn.Parameter(weight.detach().clone())),
    ]


def tokens(seed: int = 0, **circumstances: Any) -> Step:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(VOCABULARY, (2 * M, 4), generator=generator)
    return Step(row[:, :-1].contiguous(), row[:, 1:].contiguous(), **circumstances)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def with_sum_of_tied(reference: Sequence[Done], *names: str) -> list[Done]:
    """The reference where each of ``names`` has the sum of their gradients."""
    changed = []
    for done in reference:
        total = sum(gradient for name in names if (gradient := done.gradients[name]) is not None)
        assert isinstance(total, Tensor)
        changed.append(Done(done.losses, {**done.gradients, **dict.fromkeys(names, total)}))
    return changed


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "n", "one_parameter"),
    crossed(
        [("1f1b", 3), ("zb_v", 2), ("zb_h1", 4), ("zb_v", 1), ("interleaved_1f1b", 2)],
        [pytest.param(False, id="two equal tensors"), pytest.param(True, id="one tensor")],
    ),
)
def test_tied_weights_have_the_sum_of_their_gradients_over_several_steps(
    name: str, n: int, one_parameter: bool
) -> None:
    schedule = build(name, n, M)
    last = schedule.n_stages - 1
    ends = ("0.weight", f"{last}.weight")
    steps = [tokens(), tokens(1, keep_gradients=True), tokens(2, keep_gradients=True), tokens(3)]
    make = partial(language_model, schedule.n_stages, one_parameter)
    found = run_steps(schedule, make, steps, cross_entropy, tied=[{0: "weight", last: "weight"}])
    reference = in_one_process(M, partial(language_model, schedule.n_stages), steps, cross_entropy)
    assert_equal_steps(found, with_sum_of_tied(reference, *ends))
    for step in range(len(steps)):  # or the ends would part, a rounding a step
        first, *others = (g for rank in found for n, g in rank[step].gradients.items() if n in ends)
        assert all(torch.equal(first, other) for other in others)


def halve_into_new_parameters(stages: Stages) -> None:
    for stage in stages:
        assert stage is not None
        stage.load_state_dict(
            {name: value / 2 for name, value in stage.state_dict().items()}, assign=True
        )


def test_tied_weights_may_be_replaced_between_steps() -> None:
    make = partial(language_model, 3)
    steps = [tokens(), tokens(1, prepare=halve_into_new_parameters)]
    found = run_steps(
        build("1f1b", 3, M), make, steps, cross_entropy, tied=[{0: "weight", 2: "weight"}]
    )
    reference = in_one_process(M, make, steps, cross_entropy)
    assert_equal_steps(found, with_sum_of_tied(reference, "0.weight", "2.weight"))


REPLICATED = {
    "one stage on two ranks": parse("0F0 0B0 0F2 0B2", "0F1 0F3 0B1 0B3", placement=[(0, 1)]),
    "the first of two on two ranks": parse(
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
        placement=[(0, 1), (2,)],
    ),
    "the last of two on two ranks": parse(
        "0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2",
        "1F0 1F2 1B0 1B2",
        "1F1 1B1 1F3 1B3",
        placement=[(0,), (1, 2)],
    ),
}


@pytest.mark.parametrize("schedule", REPLICATED.values(), ids=REPLICATED)
def test_replicas_have_the_gradient_of_all_microbatches_over_several_steps(
    schedule: Schedule,
) -> None:
    make = partial(layers, schedule.n_stages)
    steps = [batch(), batch(1, keep_gradients=True), batch(2, keep_gradients=True), batch(3)]
    found = run_steps(schedule, make, steps)
    assert_equal_steps(found, in_one_process(M, make, steps))
    for ranks in schedule.placement:
        for step in range(len(steps)):
            first, *others = (found[rank][step].gradients for rank in ranks)
            for name, gradient in first.items():
                assert gradient is not None
                for other in others:
                    torch.testing.assert_close(other[name], gradient, rtol=0, atol=0)


def test_weights_may_be_tied_and_replicated_at_once() -> None:
    schedule = REPLICATED["the first of two on two ranks"]
    make = partial(language_model, 2)
    steps = [tokens(), tokens(1, keep_gradients=True)]
    found = run_steps(schedule, make, steps, cross_entropy, tied=[{0: "weight", 1: "weight"}])
    reference = in_one_process(M, make, steps, cross_entropy)
    assert_equal_steps(found, with_sum_of_tied(reference, "0.weight", "1.weight"))


# Losses over tokens


@pytest.mark.parametrize(
    ("name", "n", "counts"),
    crossed([("1f1b", 3), ("zb_v", 2)], [[6, 1, 0, 3], [0, 0, 0, 5], [0, 0, 0, 0]]),
)
def test_a_loss_over_tokens_is_the_mean_over_the_counted_tokens_of_the_whole_batch(
    name: str, n: int, counts: list[int]
) -> None:
    schedule = build(name, n, M)
    make = partial(language_model, schedule.n_stages)
    step = tokens()
    loss_fn = CrossEntropy(ignore_index=-1)
    for i, count in enumerate(counts):
        step.targets[2 * i : 2 * i + 2].view(-1)[count:] = -1
    found = run_steps(schedule, make, [step], loss_fn)
    whole = in_one_process(1, make, [step], CrossEntropy(ignore_index=-1).__call__)
    summed = [[Done([sum(done.losses)], done.gradients) for done in rank] for rank in found]
    assert_equal_steps(summed, whole)
    for i, count in enumerate(counts):
        assert (found[0][0].losses[i] > 0) == (count > 0)


@pytest.mark.parametrize(
    "loss_fn", [CrossEntropy(ignore_index=-1), cross_entropy], ids=["tokens", "samples"]
)
def test_with_one_divisor_steps_of_unequal_batches_add_up_to_one_large_batch(loss_fn: Any) -> None:
    make = partial(language_model, 2)
    whole = tokens()
    whole.targets[:3, 1:] = -1 if isinstance(loss_fn, CrossEntropy) else 1
    count = (
        int((whole.targets >= 0).sum()) if isinstance(loss_fn, CrossEntropy) else len(whole.targets)
    )
    steps = [
        Step(whole.inputs[:5], whole.targets[:5], divisor=count),
        Step(whole.inputs[5:], whole.targets[5:], divisor=count, keep_gradients=True),
    ]
    found = run_steps(build("1f1b", 2, 2), make, steps, loss_fn)
    reference = in_one_process(
        1, make, [whole], loss_fn if loss_fn is cross_entropy else loss_fn.__call__
    )
    summed = [
        [Done([sum(sum(done.losses) for done in rank)], rank[-1].gradients)] for rank in found
    ]
    assert_equal_steps(summed, reference)


# Gradients of the batch


def input_gradient(rank: int, schedule: Schedule, as_list: bool, recompute: bool) -> Tensor | None:
    stages = layers(schedule.n_stages)
    step = batch()
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    x = step.inputs.requires_grad_()
    inputs = [piece.detach().requires_grad_() for piece in x.tensor_split(M)] if as_list else x
    pipeline = Pipeline(schedule, mine, F.mse_loss, recompute=recompute, timeout_s=20)
    targets = list(step.targets.tensor_split(M)) if as_list else step.targets
    take_step(pipeline, *for_rank(rank, schedule, inputs, targets))
    if not as_list:
        return x.grad
    return torch.cat([piece.grad for piece in inputs]) if 0 in mine else None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "n", "as_list", "recompute"),
    crossed(
        [("1f1b", 1), ("1f1b", 2), ("zb_h1", 2)],
        [pytest.param(False, id="one tensor"), pytest.param(True, id="microbatches")],
        [False, True],
    ),
)
def test_inputs_that_require_grad_get_their_gradient(
    name: str, n: int, as_list: bool, recompute: bool
) -> None:
    schedule = build(name, n, M)
    step = batch()
    x = step.inputs.requires_grad_()
    for stage in layers(schedule.n_stages):
        step.inputs = stage(step.inputs)
    F.mse_loss(step.inputs, step.targets).backward()
    assert x.grad is not None
    if n == 1:  # here, where warnings are errors
        found = input_gradient(0, schedule, as_list, recompute)
    else:
        found, *others = on_ranks(n, input_gradient, schedule, as_list, recompute, timeout_s=30.0)
        assert others == [None] * (n - 1)
    assert found is not None
    torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-16)
