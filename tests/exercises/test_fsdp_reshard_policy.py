"""The graders and measurements of notebook 08: answers of learners, bytes kept and sent."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.fsdp_reshard_policy import lab
from course_pp.launch import on_ranks
from course_pp.model import build_stage_module
from course_pp.parallel import DistributedConfig, apply_fsdp2, init_distributed
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


def gathers_by_following_a_group(reshard: bool, m: int, groups: int, pipeline: bool) -> int:
    whole, number = False, 0
    for _ in range(m):
        for action in "FB":
            number += not whole
            whole = not reshard if action == "F" else pipeline
    return number * groups


def test_another_way_to_the_gathers_is_correct() -> None:
    accepts("gathers", gathers_by_following_a_group)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda a, m, groups, pp: gathers_by_following_a_group(a, m, 1, pp), "for one group"),
        (
            lambda a, m, groups, pp: gathers_by_following_a_group(a, m, groups, not pp),
            "two loops have changed places",
        ),
        (lambda a, m, groups, pp: 5, "`gathers(True, 8, 4, True)` is 5, not 36"),
        (lambda a, m, groups, pp: None, "None"),
    ],
)
def test_a_wrong_number_of_gathers_is_told_why(answer: Answer, words: str) -> None:
    refuses("gathers", answer, words)


def bytes_one_by_one(
    layers: int, layer: int, root: int, n: int, reshard: bool, pipeline: bool
) -> Fraction:
    kept = Fraction(0)
    for i, group in enumerate([root] + [layer] * layers):
        kept += 3 * Fraction(group, n)
        kept += group if pipeline else Fraction(group, n)
        kept += group if pipeline or not reshard or i <= 2 else 0
    return kept


def test_bytes_may_be_added_one_by_one() -> None:
    accepts("rank_bytes", bytes_one_by_one)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda *sizes: bytes_one_by_one(*sizes[:4], False, sizes[5]),
            "`reshard` makes no difference",
        ),
        (lambda *sizes: bytes_one_by_one(*sizes[:5], False), "`pipeline` makes no difference"),
        (lambda *sizes: "many", "a number is asked for"),
    ],
)
def test_wrong_bytes_are_told_why(answer: Answer, words: str) -> None:
    refuses("rank_bytes", answer, words)


def by_comparing_times(
    room: float, layers: int, layer: float, forward: float, gather: float, pipeline: bool
) -> bool | None:
    choices = []
    for policy in (True, False):
        kept = 2 * layer if policy and not pipeline else layers * layer
        seconds = (
            max(forward, gather)
            + max(2 * forward, gather * (1 + policy))
            + pipeline * policy * gather
        )
        if kept <= room:
            choices.append((seconds, kept, policy))
    return min(choices)[2] if choices else None


def test_the_policy_may_be_chosen_by_comparing_times() -> None:
    accepts("choose_reshard", by_comparing_times)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda room, *case: by_comparing_times(1e9, *case), "`room` makes no difference"),
        (lambda *sizes: "auto", "True, False or None is asked for"),
        (
            lambda *sizes: None,
            "room 100, all layers 80, two of them 20; a forward takes 4, a gather 1",
        ),
    ],
)
def test_a_wrong_choice_is_told_why(answer: Answer, words: str) -> None:
    refuses("choose_reshard", answer, words)


def sent_in_rounds(model: int, replicate: int, shard: int, reshard: bool) -> list[Fraction]:
    def ring(size: Fraction, n: int) -> Fraction:
        return sum((size / n for _ in range(n - 1)), start=Fraction(0))

    own = Fraction(model, shard)
    over_shard = [ring(Fraction(model), shard) for _ in range(3 if reshard else 2)]
    return [sum(over_shard, start=Fraction(0)), ring(own, replicate) * 2]


def test_what_hsdp_sends_may_be_added_up_in_rounds() -> None:
    accepts("hsdp_bytes", sent_in_rounds)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *case: sent_in_rounds(*case)[::-1], "The two have changed places"),
        (lambda model, r, s, again: sent_in_rounds(model, r, s, True), "makes no difference"),
        (lambda *case: sent_in_rounds(*case)[0], "a list is asked for"),
        (lambda *case: (0, 0, 0), "3 entries, not 2"),
    ],
)
def test_wrong_bytes_of_hsdp_are_told_why(answer: Answer, words: str) -> None:
    refuses("hsdp_bytes", answer, words)


def accumulating(
    sync: Callable[[int, int], bool] = lambda i, m: i == m - 1,
    share: Callable[[Any, int, int], Any] = lambda loss, m, n: loss / m,
    reshard: Callable[[int, int], bool] = lambda i, m: True,
) -> Answer:
    """The step of the bug clinic, right unless told otherwise."""

    def step(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
        m, n = len(microbatches), dist.get_world_size()
        for i, (x, target) in enumerate(zip(microbatches, targets, strict=True)):
            model.set_requires_gradient_sync(sync(i, m))
            model.set_reshard_after_backward(reshard(i, m))
            share(loss_fn(model(x), target), m, n).backward()

    return step


def one_backward(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    losses = [loss_fn(model(x), target) for x, target in zip(microbatches, targets, strict=True)]
    torch.stack(losses).mean().backward()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "answer",
    [
        accumulating(reshard=lambda i, m: i == m - 1),
        accumulating(share=lambda loss, m, n: loss * torch.tensor(1 / m, dtype=torch.float32)),
    ],
    ids=["gathers once", "1/m in float32"],
)
def test_gradients_may_be_accumulated_in_several_ways(answer: Answer) -> None:
    accepts("accumulate_sharded", answer)


def as_shown(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    for x, target in zip(microbatches, targets, strict=True):
        (loss_fn(model(x), target) / len(microbatches)).backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def all_at_once(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    loss_fn(model(torch.cat(microbatches)), torch.cat(targets)).backward()


def divides_in_the_loop(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    for x, target in zip(microbatches, targets, strict=True):
        loss_fn(model(x), target).backward()
        for parameter in model.parameters():
            parameter.grad /= len(microbatches)


def says_too_late(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    """Its first call leaves two gradients unreduced, which its second one completes."""
    m = len(microbatches)
    for i, (x, target) in enumerate(zip(microbatches, targets, strict=True)):
        (loss_fn(model(x), target) / m).backward()
        model.set_requires_gradient_sync(i == m - 1)


def right_once(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    """It leaves the model as it must not be for the next step."""
    accumulating()(model, microbatches, targets, loss_fn)
    model.set_requires_gradient_sync(False)
    loss_fn(model(microbatches[0]), targets[0]).backward()


def keeps_the_last(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    for x, target in zip(microbatches, targets, strict=True):
        model.zero_grad()
        (loss_fn(model(x), target) / len(microbatches)).backward()


def empties_its_lists(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    accumulating()(model, list(microbatches), list(targets), loss_fn)
    microbatches.clear()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says_too_late, "Only the first microbatch is in them"),
        (keeps_the_last, "Only the last microbatch is in them"),
        (right_once, "In the second, after `model.zero_grad()`, the gradients differ"),
        (
            empties_its_lists,
            "changed its argument `microbatches`, which had 3 entries and now has 0",
        ),
        (as_shown, "0.5 times one process's"),
        (accumulating(share=lambda loss, m, n: loss / m / n), "averages over its ranks"),
        (accumulating(sync=lambda i, m: True), "9 reduce-scatters were begun for 3 groups"),
        (accumulating(share=lambda loss, m, n: loss), "1/m is missing"),
        (accumulating(share=lambda loss, m, n: loss / n), "not over microbatches"),
        (accumulating(share=lambda loss, m, n: loss * n / m), "leave it alone"),
        (accumulating(share=lambda loss, m, n: loss / m / m), "1/m enters twice"),
        (accumulating(sync=lambda i, m: False), "its gradients were never reduced"),
        (accumulating(reshard=lambda i, m: False), "let the last backward free them"),
        (divides_in_the_loop, "divided again"),
        (all_at_once, "rows at once"),
        (one_backward, "the activations of 3 microbatches were held at once"),
    ],
)
def test_a_step_that_is_still_ill_is_told_from_its_symptom(answer: Answer, words: str) -> None:
    refuses("accumulate_sharded", answer, words)


@pytest.mark.long
@pytest.mark.timeout(60)
def test_patients_have_the_symptoms_that_the_notebook_tells() -> None:
    [a, b, c] = (on_ranks(4, patient)[0] for patient in lab.PATIENTS.values())
    assert (a.gathers, a.reductions, round(a.ratio, 9)) == (9, 1, 1)
    assert (b.gathers, b.reductions, round(b.ratio, 9)) == (8, 8, 1)
    assert (c.gathers, c.reductions, round(c.ratio, 9)) == (8, 1, 0.25)


FOUR = DistributedConfig(dp_shard=4)
TWO_BY_TWO = DistributedConfig(pp=2, dp_shard=2)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "often"),
    [
        (TWO_BY_TWO, {True: (9, 1), False: (1, 1)}),
        pytest.param(FOUR, {True: (2, 1), False: (1, 1)}, marks=pytest.mark.full),
    ],
)
def test_gathers_and_reductions_of_a_group_and_the_gathered_bytes(
    layout: DistributedConfig, often: dict[bool, tuple[int, int]]
) -> None:
    counts, n_bytes = lab.count(layout), lab.step_bytes(layout)
    assert {reshard: lab.per_group(counts[reshard], layout) for reshard in counts} == often
    assert (n_bytes[True]["whole parameters"] == n_bytes[False]["whole parameters"]) == (
        layout.pp > 1
    )
    if layout.pp > 1:
        assert all(counts[reshard] == lab.predicted(layout, reshard) for reshard in counts)
        assert n_bytes[True]["whole gradients"] == n_bytes[True]["whole parameters"]
    else:
        assert lab.sent(counts[False][0], layout) == {
            "dp_shard all_gather": 0.75,
            "dp_shard reduce_scatter": 0.75,
        }


def test_a_rank_keeps_its_share_between_steps() -> None:
    kept = lab.kept_between_steps(FOUR)
    assert kept.shares == (0.25,) * 4
    assert "attn.q_proj.weight whole (64, 64), on each rank (16, 64)" in str(kept)


def off_by_a_little(rank: int) -> tuple[float, float]:
    mesh = init_distributed(DistributedConfig(), seed=0)
    module = build_stage_module(lab.CONFIG, 0, 1).double()
    apply_fsdp2(module, mesh)
    lab.step_of(module, mesh)()
    right = lab.one_process().gradients
    wrong = {name: gradient + 0.5 * (name == "norm.weight") for name, gradient in right.items()}
    return lab.largest_difference(module, right), lab.largest_difference(module, wrong)


def test_gradients_of_shards_are_compared_with_one_process() -> None:
    for right, wrong in on_ranks(2, off_by_a_little):
        assert right < 1e-12
        assert wrong == pytest.approx(0.5)


def test_fsdp_before_tensor_parallelism_is_refused_by_name() -> None:
    assert "already has FSDP2" in lab.refused_orders()["this package"]


def test_the_curve_says_where_the_policies_meet() -> None:
    figure = lab.draw_shares(
        lambda tokens, reshard: min(1, tokens / (400 if reshard else 200)), crossing=400
    )
    assert "from 400 tokens on" in figure.alt_text
    assert "up to 2 times" in figure.alt_text
