"""The graders of notebook 01: what learners really write, and what they are told."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.exercise import find
from course_pp.exercises.formula import flawed
from course_pp.exercises.naive_split.exercises import (
    empty_activation,
    loss_fn,
    recv_activation,
    recv_gradient,
    send_gradient,
    two_rank_step,
    untrained,
)
from course_pp.model import partition_by_cost
from tests.exercises.grading import accepts, hangs, refuses

# assign_layers


def from_cumulated(n_layers, n_stages):
    bounds = [-(-n_layers * stage // n_stages) for stage in range(n_stages + 1)]
    sizes = sorted((b - a for a, b in itertools.pairwise(bounds)), reverse=True)
    return [[sum(sizes[:i]), sum(sizes[: i + 1])] for i in range(n_stages)]


def by_formula(n_layers, n_stages):
    share, extras = divmod(n_layers, n_stages)
    starts = [i * share + min(i, extras) for i in range(n_stages + 1)]
    return list(itertools.pairwise(starts))


def extras_last(n_layers, n_stages):
    share = n_layers // n_stages
    starts = [i * share for i in range(n_stages)]
    return list(zip(starts, [*starts[1:], n_layers], strict=True))


def extras_on_later(n_layers, n_stages):
    bounds = [n_layers * stage // n_stages for stage in range(n_stages + 1)]
    return list(itertools.pairwise(bounds))


def drops_the_rest(n_layers, n_stages):
    share = n_layers // n_stages
    return [(i * share, (i + 1) * share) for i in range(n_stages)]


def rounds_up(n_layers, n_stages):
    share = -(-n_layers // n_stages)
    return [(min(i * share, n_layers), min((i + 1) * share, n_layers)) for i in range(n_stages)]


def end_included(n_layers, n_stages):
    return [(start, end - 1) for start, end in by_formula(n_layers, n_stages)]


def overlapping(n_layers, n_stages):
    return [(start, min(end + 1, n_layers)) for start, end in by_formula(n_layers, n_stages)]


def lists_of_layers(n_layers, n_stages):
    return [list(range(start, end)) for start, end in by_formula(n_layers, n_stages)]


def a_dictionary(n_layers, n_stages):
    return dict(enumerate(by_formula(n_layers, n_stages)))


def floats(n_layers, n_stages):
    return [(i * n_layers / n_stages, (i + 1) * n_layers / n_stages) for i in range(n_stages)]


def a_gap(n_layers, n_stages):
    (start, end), *rest = by_formula(n_layers, n_stages)
    return [(start, end), *((n_layers, n_layers + size) for size, _ in rest)]


def one_too_few(n_layers, n_stages):
    return by_formula(n_layers, n_stages)[:-1]


@pytest.mark.parametrize("answer", [by_formula, from_cumulated])
def test_an_even_split_is_correct_however_it_is_written(answer: Callable[..., Any]) -> None:
    accepts("assign_layers", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (extras_last, ["All extras went to the last stage", "n_layers % n_stages"]),
        (extras_on_later, ["not on the earlier stages"]),
        (drops_the_rest, ["covers layers 0 to 9, not 0 to 11", "`//` leaves some over"]),
        (rounds_up, ["stage 4 has no layer"]),
        (end_included, ["layers 3 to 3 are on no stage", "Is `end` included?"]),
        (a_gap, ["layers 4 to 7 are on no stage", "starts where this one ends"]),
        (overlapping, ["layer 4 is on two stages"]),
        (lists_of_layers, ["`assign_layers(8, 2)[0]` has 4 entries, not 2", "(start, end)"]),
        (a_dictionary, ["is a dict; a list is asked for"]),
        (floats, ["a float; a whole number"]),
        (one_too_few, ["has 1 entry, not 2"]),
    ],
)
def test_an_uneven_split_is_told_why(answer: Callable[..., Any], words: list[str]) -> None:
    refuses("assign_layers", answer, *words)


# two_rank_step


def with_plain_messages(rank, stage, tokens, targets):
    other = 1 - rank
    shape = (*tokens.shape, stage.config.dim)
    if rank == 0:
        output = stage(tokens)
        dist.send(output.detach(), other)
        gradient = torch.empty(shape, dtype=output.dtype)
        dist.recv(gradient, other)
        torch.autograd.backward(output, gradient)
    else:
        x = torch.empty(shape, dtype=torch.float64, requires_grad=True)
        dist.recv(x.data, other)
        loss = loss_fn(stage(x), targets)
        loss.backward()
        dist.send(x.grad, other)
        return loss


def with_asynchronous_messages(rank, stage, tokens, targets):
    if rank == 0:
        output = stage(tokens)
        sending = dist.isend(output.detach(), 1)
        gradient = recv_gradient(output, 1)
        sending.wait()
        (output * gradient).sum().backward()
        return 0.0
    x = recv_activation(empty_activation(stage, tokens), 0)
    loss = loss_fn(stage(x), targets)
    loss.backward()
    send_gradient(x, 0)
    return float(loss)


BACK, OUTPUT = "output.backward(recv_gradient(output, 1))", "output = stage(tokens)"
SENT, LAST = "        send_activation(output, 1)\n", "    return loss.item()"
X = "x = recv_activation(empty_activation(stage, tokens), 0)"
GRADS = "torch.autograd.grad(output, list(stage.parameters()), recv_gradient(output, 1))"


def step_with(*changes: tuple[str, str]) -> Callable[..., Any]:
    return flawed(two_rank_step, *changes)


WRONG_STEPS = [
    (step_with((OUTPUT, f"{OUTPUT}.detach().requires_grad_()")),
     "on rank 0 has no gradient", "detached"),
    (hangs(step_with(("    send_gradient(x, 0)\n", ""))),
     "rank 0 waits in recv for rank 1", "Rank 1 has returned"),
    (step_with((BACK, "recv_gradient(output, 1); output.backward(torch.ones_like(output))")),
     "rank 0: ", "takes what came from rank 1", "one process"),
    (step_with((BACK, "[output.backward(dy, retain_graph=True) for dy in [recv_gradient(output, 1)] * 2]")),
     "rank 1: none", "are 2 times what they should be"),
    (step_with((BACK, "output.backward()")),
     "grad can be implicitly created only for scalar outputs"),
    (hangs(step_with((f"{SENT}        {BACK}\n", f"        {BACK}\n{SENT}"))), "none can move"),
    (step_with((X, "x = empty_activation(stage, tokens); dist.recv(x, 0)")),
     "raised", "in line", "`.grad` is None until a backward has run"),
    (step_with(("(output, 1)\n", "(output.transpose(0, 1), 1)\n")),
     "in line", "`.contiguous()` makes a copy in one piece"),
    (step_with(("stage(x), targets)", "stage(x), targets[:1])")),
     "in line", "targets that do not belong to this output"),
    (step_with((LAST, "")), "is None", "Is a `return` missing?"),
    (step_with((LAST, f"{LAST} * tokens.numel()")), "All gradients are right", "loss.item()"),
    (step_with(("    if rank", "    stage.zero_grad()\n    if rank")), "up to the caller"),
    (step_with((BACK, f"for p, p.grad in zip(stage.parameters(), {GRADS}): pass")),
     "up to the caller"),
    (step_with((LAST, f"    torch.optim.SGD(stage.parameters(), lr=0.1).step()\n{LAST}")),
     "changed its argument `stage", "The optimizer is the caller's business"),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("answer", [with_plain_messages, with_asynchronous_messages])
def test_a_step_is_correct_however_it_is_written(answer: Callable[..., Any]) -> None:
    accepts("two_rank_step", answer)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_STEPS])
def test_a_step_that_is_wrong_is_told_why(answer: Callable[..., Any], words: list[str]) -> None:
    refuses("two_rank_step", answer, *words)


# balanced_cut


def by_limit(costs, n_stages):
    def filled(limit):
        ranges, start, used = [], 0, 0.0
        for i, cost in enumerate(costs):
            if i > start and used + cost > limit:
                ranges, start, used = [*ranges, (start, i)], i, 0.0
            used += cost
        return [*ranges, (start, len(costs))]

    sums = sorted(
        {sum(costs[i:j]) for i in range(len(costs)) for j in range(i + 1, len(costs) + 1)}
    )
    limit = next(s for s in sums if s >= max(costs) and len(filled(s)) <= n_stages)
    ranges = filled(limit)
    while len(ranges) < n_stages:
        k = next(k for k, (start, end) in enumerate(ranges) if end - start > 1)
        start, end = ranges[k]
        ranges[k : k + 1] = [(start, start + 1), (start + 1, end)]
    return ranges


def by_the_package(costs, n_stages):
    return partition_by_cost(costs, n_stages)


def filled_up_to(limit, costs, n_stages):
    ranges, start = [], 0
    for i in range(len(costs)):
        if i > start and (
            sum(costs[start : i + 1]) > limit or n_stages - len(ranges) - 1 == len(costs) - i
        ):
            ranges.append((start, i))
            start = i
    return [*ranges, (start, len(costs))]


def by_bisection(costs, n_stages):
    """As a well-known puzzle asks for it, where all numbers are whole."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(filled_up_to(middle, costs, n_stages)) <= n_stages:
            high = middle
        else:
            low = middle + 1
    return filled_up_to(low, costs, n_stages)


def by_bisection_to_a_thousandth(costs, n_stages):
    low, high = 0, sum(costs)
    while high - low > 1e-3:
        middle = (low + high) / 2
        if len(filled_up_to(middle, costs, n_stages)) <= n_stages and middle >= max(costs):
            high = middle
        else:
            low = middle
    return filled_up_to(high, costs, n_stages)


def by_number(costs, n_stages):
    return by_formula(len(costs), n_stages)


def up_to_the_average(costs, n_stages):
    average, ranges, start = sum(costs) / n_stages, [], 0
    for end in range(1, len(costs) + 1):
        left = n_stages - len(ranges) - 1
        if left and (sum(costs[start:end]) >= average or len(costs) - end == left):
            ranges.append((start, end))
            start = end
    return [*ranges, (start, len(costs))]


def of_least_squares(costs, n_stages):
    inner = itertools.combinations(range(1, len(costs)), n_stages - 1)
    cuts = [list(itertools.pairwise((0, *bounds, len(costs)))) for bounds in inner]
    return min(cuts, key=lambda cut: sum(sum(costs[a:b]) ** 2 for a, b in cut))


def all_but_one_alone(costs, n_stages):
    return [*((i, i + 1) for i in range(n_stages - 1)), (n_stages - 1, len(costs))]


@hangs
def tries_all(costs, n_stages):
    from itertools import combinations

    cuts = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), n_stages - 1))
    best = min(cuts, key=lambda cut: max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)))
    return list(itertools.pairwise(best))


def sorts_first(costs, n_stages):
    costs.sort()
    return by_the_package(costs, n_stages)


def only_the_cost(costs, n_stages):
    return max(sum(costs[a:b]) for a, b in by_the_package(costs, n_stages))


def leaves_stages_empty(costs, n_stages):
    ranges = partition_by_cost(costs, 1)
    return ranges + [(len(costs), len(costs))] * (n_stages - 1)


def best_of_fewer(costs, n_stages):
    """As the hints lead to it."""
    best = {0: (0.0, [])}
    for _ in range(n_stages):
        longer = {}
        for end in range(1, len(costs) + 1):
            options = [
                (max(worst, sum(costs[start:end])), [*ranges, (start, end)])
                for start, (worst, ranges) in best.items()
                if start < end
            ]
            if options:
                longer[end] = min(options)
        best = longer
    return best[len(costs)][1]


def test_the_hints_lead_to_the_solution() -> None:
    exercise = find("balanced_cut")
    steps = ["best = {0: (0.0, [])}", "max(worst, sum(costs[start:end])), [*ranges, (start, end)]"]
    assert [
        step for step in steps if step not in "".join(exercise.hints) or step not in exercise.source
    ] == []
    assert "limit" not in "".join(exercise.hints)


@pytest.mark.parametrize("answer", [by_limit, best_of_fewer, by_the_package])
def test_a_best_cut_is_correct_however_it_is_found(answer: Callable[..., Any]) -> None:
    accepts("balanced_cut", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            by_number,
            [
                "`balanced_cut([1, 1, 1, 1, 4], 2)`",
                "costs 5; 4 is possible",
                "same number of layers",
            ],
        ),
        (up_to_the_average, ["is possible", "costs of the stages", "filled up to the average"]),
        (
            all_but_one_alone,
            ["costs 3; 2 is possible", "take the one whose largest sum is smallest"],
        ),
        (
            by_bisection,
            [
                "`balanced_cut([0.3, 0.4, 0.5, 0.6], 2)`",
                "costs 1.2; 1.1 is possible",
                "whole numbers",
            ],
        ),
        (by_bisection_to_a_thousandth, ["`balanced_cut([0.0007,", "nor near 1"]),
        (
            of_least_squares,
            ["([3, 1, 1, 5, 1], 3)`", "costs 6; 5 is possible", "Only the largest sum counts"],
        ),
        (sorts_first, ["changed its argument `costs`"]),
        (only_the_cost, ["a list is asked for"]),
        (leaves_stages_empty, ["stage 1 has no layer"]),
    ],
)
def test_a_cut_that_is_not_the_best_is_told_why(
    answer: Callable[..., Any], words: list[str]
) -> None:
    refuses("balanced_cut", answer, *words)


def test_trying_all_cuts_is_told_that_there_are_too_many() -> None:
    refuses("balanced_cut", tries_all, "The small cases are right", "10^11 cuts", here=False)


# untrained


def with_a_loop(stage):
    names = []
    for name, parameter in stage.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None or parameter.grad.abs().sum() == 0:
            names.append(name)
    return names


def by_the_largest(stage):
    wanted = ((name, p.grad) for name, p in stage.named_parameters() if p.requires_grad)
    return [name for name, grad in wanted if grad is None or grad.abs().max() == 0]


def as_a_set(stage):
    wanted = {name: p.grad for name, p in stage.named_parameters() if p.requires_grad}
    return {name for name, grad in wanted.items() if grad is None or torch.count_nonzero(grad) == 0}


def zeroes_what_is_missing(stage):
    names = with_a_loop(stage)
    for parameter in stage.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return names


def clears_them_all(stage):
    names = with_a_loop(stage)
    stage.zero_grad(set_to_none=False)
    return names


@pytest.mark.parametrize("answer", [with_a_loop, by_the_largest, as_a_set])
def test_a_search_for_the_untrained_is_correct_however_it_is_written(
    answer: Callable[..., Any],
) -> None:
    accepts("untrained", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda s: [n for n, p in s.named_parameters() if p.requires_grad and p.grad is None],
            ["set_to_none=False"],
        ),
        (
            lambda s: [n for n, p in s.named_parameters() if p.grad is None or not p.grad.any()],
            ["layer 2 is frozen"],
        ),
        (lambda s: [n for n, p in s.named_parameters() if not p.grad], ["Boolean value of Tensor"]),
        (
            lambda s: [p for p in s.parameters() if p.grad is None],
            ["not names", "named_parameters()"],
        ),
        (
            lambda s: [
                n
                for n, p in s.named_parameters()
                if p.requires_grad and (p.grad is None or not p.grad.all() or p.grad.sum() == 0)
            ],
            ["only some numbers are zero is healthy"],
        ),
        (
            lambda s: [
                n
                for n, p in s.named_parameters()
                if p.requires_grad and (p.grad is None or p.grad.sum() == 0)
            ],
            ["1 and -1 cancel", "add up to zero"],
        ),
        (lambda s: sum(p.grad is None for p in s.parameters()), ["is an int; a list is asked for"]),
        (
            lambda s: all(p.grad is not None for p in s.parameters()),
            ["is a bool; a list is asked for"],
        ),
        (
            lambda s: [
                n
                for n, p in s.named_parameters()
                if p.requires_grad and (p.grad is None or p.grad.norm() < 1e-3)
            ],
            ["each number of a gradient is 1e-6", "Small is not zero"],
        ),
        (
            zeroes_what_is_missing,
            ["layer 0 has `grad` None, `untrained` changed the gradient of 0.weight"],
        ),
        (
            clears_them_all,
            ["every gradient is there, `untrained` changed the gradient of 0.weight"],
        ),
        (
            lambda s: [n for n, p in s.named_parameters() if p.grad is not None],
            ["every gradient is there"],
        ),
        (
            lambda s: untrained(s[:2]),
            ["the last bias has `grad` None, `untrained` gave [], not ['2.bias']"],
        ),
    ],
)
def test_a_search_that_misses_is_told_what(answer: Callable[..., Any], words: list[str]) -> None:
    refuses("untrained", answer, *words)
