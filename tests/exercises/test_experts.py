"""The graders of notebook 12, by what learners hand in."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


def route_by_softmax_of_all(logits: list[float], k: int) -> list[list[float]]:
    scores = torch.tensor(logits, dtype=torch.float64).softmax(0)
    values, experts = scores.topk(k)
    return [[int(e), float(v)] for e, v in zip(experts, values / values.sum(), strict=True)]


def splits_by_dictionary(counts: list[list[int]], rank: int) -> tuple[list[int], list[int]]:
    n, each = len(counts), len(counts[0]) // len(counts)
    sends, gets = [0] * n, [0] * n
    for source, row in enumerate(counts):
        for expert, number in enumerate(row):
            if source == rank:
                sends[expert // each] += number
            if expert // each == rank:
                gets[source] += number
    return sends, gets


def balance_by_autograd(scores: list[list[float]], k: int) -> tuple[float, list[list[float]]]:
    given = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    n_experts = given.shape[1]
    chosen = torch.zeros_like(given).scatter(1, given.topk(k).indices, 1.0)
    loss = n_experts * (chosen.mean(0) / k * given.mean(0)).sum()
    loss.backward()
    return loss.item(), given.grad.tolist()


def moved_by_sign(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    tokens = torch.tensor(counts, dtype=torch.float64).sum(0)
    return (
        torch.tensor(bias, dtype=torch.float64) + step * (tokens.mean() - tokens).sign()
    ).tolist()


def mixture_by_mask(x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token, choice = (chosen == i).nonzero(as_tuple=True)
        out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
    return out


def route_in_float32(logits: list[float], k: int) -> list[tuple[Tensor, Tensor]]:
    """As tensors, and the last of equal logits first."""
    scores = torch.tensor(logits).flip(0)
    order = scores.argsort(descending=True, stable=True)[:k]
    return list(zip(len(logits) - 1 - order, scores[order].softmax(0), strict=True))


def splits_as_a_tensor(counts: list[list[int]], rank: int) -> Tensor:
    n = len(counts)
    rows = torch.tensor(counts).view(n, n, -1).sum(2)
    return torch.stack([rows[rank], rows[:, rank]])


def balance_as_an_array(scores: list[list[float]], k: int) -> tuple[Any, Any]:
    loss, gradient = balance_by_autograd(scores, k)
    return np.float32(loss), np.array(gradient, dtype=np.float32)


def moved_as_an_array(bias: list[float], counts: list[list[int]], step: float) -> Any:
    tokens = np.sum(counts, 0)
    return np.array(bias) + step * np.sign(tokens.mean() - tokens)


def mixture_into(dtype: torch.dtype) -> Answer:
    """Into memory of a dtype that does not ask for x's."""

    def answer(x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=dtype)
        for i, expert in enumerate(experts):
            token, choice = torch.where(chosen == i)
            out.index_add_(0, token, (expert(x[token]) * weights[token, choice, None]).to(dtype))
        return out

    return answer


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("route", route_by_softmax_of_all),
        ("route", route_in_float32),
        ("splits", splits_as_a_tensor),
        ("balance", balance_as_an_array),
        ("moved", moved_as_an_array),
        ("mixture", mixture_into(torch.float32)),
        ("mixture", mixture_into(torch.float64)),
        ("splits", splits_by_dictionary),
        ("balance", balance_by_autograd),
        ("moved", moved_by_sign),
        ("mixture", mixture_by_mask),
    ],
)
def test_another_way_is_correct(name: str, answer: Answer) -> None:
    accepts(name, answer)


def softmax(logits: list[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(each) / total for each in logits]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda logits, k: sorted(enumerate(softmax(logits)), key=lambda pair: -pair[1])[:k],
            "less than 1 together",
        ),
        (lambda logits, k: route_by_softmax_of_all(logits, k)[::-1], "worst first"),
        (lambda logits, k: sorted(route_by_softmax_of_all(logits, k)), "give the best first"),
        (
            lambda logits, k: [(e, 1 / k) for e, _ in route_by_softmax_of_all(logits, k)],
            "better expert counts more",
        ),
        (
            lambda logits, k: [(w, e) for e, w in route_by_softmax_of_all(logits, k)],
            "the expert comes first",
        ),
        (lambda logits, k: dict(route_by_softmax_of_all(logits, k)), "a list is asked for"),
        (
            lambda logits, k: [e for e, _ in route_by_softmax_of_all(logits, k)],
            "a list is asked for",
        ),
        (
            lambda logits, k: [
                (logits.index(logits[e]), w) for e, w in route_by_softmax_of_all(logits, k)
            ],
            "equal",
        ),
        (lambda logits, k: [(e, w**2) for e, w in route_by_softmax_of_all(logits, k)], "sum to 1"),
    ],
)
def test_a_wrong_route_is_told_why(answer: Answer, words: str) -> None:
    refuses("route", answer, words)


def splits_of_pairs(counts: list[list[int]], rank: int) -> tuple[list[int], list[int]]:
    first, second = 2 * rank, 2 * rank + 2
    sends = [sum(counts[rank][2 * other : 2 * other + 2]) for other in range(len(counts))]
    return sends, [sum(row[first:second]) for row in counts]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda counts, rank: splits_by_dictionary(counts, rank)[::-1], "changed places"),
        (lambda counts, rank: (splits_by_dictionary(counts, rank)[0],) * 2, "is not what it sends"),
        (
            lambda counts, rank: (counts[rank], [row[rank] for row in counts]),
            "Count by rank, not by expert",
        ),
        (
            lambda counts, rank: splits_by_dictionary([row[::-1] for row in counts], rank),
            "`each` experts",
        ),
        (
            lambda counts, rank: ([0] * len(counts), splits_by_dictionary(counts, rank)[1]),
            "What it gets is right",
        ),
        (lambda counts, rank: splits_by_dictionary(counts, rank)[0], "Two lists"),
        (lambda counts, rank: splits_by_dictionary(counts, 0), "`rank` makes no difference"),
        (splits_of_pairs, "takes it to have 2"),
        (
            lambda counts, rank: ([float(n) for n in splits_by_dictionary(counts, rank)[0]], []),
            "a whole number",
        ),
    ],
)
def test_wrong_splits_are_told_why(answer: Answer, words: str) -> None:
    refuses("splits", answer, words)


def balance_of_means_alone(power: int) -> Answer:
    """The mean scores in place of f, as a constant (power 1) or with a gradient of their own (2)."""

    def answer(scores: list[list[float]], k: int) -> tuple[float, list[list[float]]]:
        given = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
        means = given.mean(0)
        loss = given.shape[1] * (means * (means if power == 2 else means.detach())).sum()
        loss.backward()
        return loss.item(), given.grad.tolist()

    return answer


def balance_of_a_softmax(scores: list[list[float]], k: int) -> tuple[float, list[list[float]]]:
    given = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    again = given.softmax(1)
    chosen = torch.zeros_like(given).scatter(1, again.topk(k).indices, 1.0)
    loss = given.shape[1] * (chosen.mean(0) / k * again.mean(0)).sum()
    loss.backward()
    return loss.item(), given.grad.tolist()


def with_gradient(factor: Callable[[list[list[float]], int], float]) -> Answer:
    def answer(scores: list[list[float]], k: int) -> tuple[float, list[list[float]]]:
        loss, rows = balance_by_autograd(scores, k)
        return loss, [[each * factor(scores, k) for each in row] for row in rows]

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (with_gradient(lambda scores, k: len(scores)), "each score enters with 1/T"),
        (with_gradient(lambda scores, k: 1 / len(scores[0])), "has the factor N"),
        (lambda scores, k: balance_by_autograd(scores, 1), "`k` makes no difference"),
        (lambda scores, k: balance_by_autograd(scores, 2), "`k` makes no difference"),
        (lambda scores, k: balance_by_autograd(scores, k)[0], "a list is asked for"),
        (lambda scores, k: balance_by_autograd(scores, k)[::-1], "The loss comes first"),
        (lambda scores, k: (1.0, balance_by_autograd(scores, k)[1]), "The gradient is right"),
        (with_gradient(lambda scores, k: 3), "3 times"),
        (balance_of_means_alone(1), "f is a count"),
        (balance_of_means_alone(2), "f is a count"),
        (balance_of_a_softmax, "no softmax is left"),
        (
            lambda scores, k: (
                k * balance_by_autograd(scores, k)[0],
                with_gradient(lambda s, k: k)(scores, k)[1],
            ),
            "a fraction of all choices",
        ),
    ],
)
def test_a_wrong_balance_is_told_why(answer: Answer, words: str) -> None:
    refuses("balance", answer, words)


def moved_for_each(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    for row in counts:
        bias = moved_by_sign(bias, [row], step)
    return bias


def moved_by(sign: Callable[[int, list[int]], float]) -> Answer:
    """A move whose sign is made of an expert's tokens and those of all."""

    def answer(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
        tokens = np.sum(counts, 0).tolist()
        return [b + step * sign(n, tokens) for b, n in zip(bias, tokens, strict=True)]

    return answer


def toward_mean(tokens: list[int], n: int, within: float = 0.0) -> int:
    mean = sum(tokens) / len(tokens)
    return (n < mean - within) - (n > mean + within)


def one_fullest_and_one_emptiest(
    bias: list[float], counts: list[list[int]], step: float
) -> list[float]:
    tokens = np.sum(counts, 0)
    after = np.array(bias)
    after[tokens.argmin()] += step
    after[tokens.argmax()] -= step
    return after.tolist()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (moved_for_each, "after every microbatch"),
        (moved_by(lambda n, all_: toward_mean(all_, n) if n else 0), "that no token chose"),
        (moved_by(lambda n, all_: toward_mean([m for m in all_ if m], n)), "number of all"),
        (lambda bias, counts, step: moved_by_sign(bias, [*set(map(tuple, counts))], step), "a set"),
        (one_fullest_and_one_emptiest, "Only the fullest and the emptiest"),
        (moved_by(lambda n, all_: toward_mean(all_, n, within=0.5)), "However near the mean"),
        (moved_by(lambda n, all_: toward_mean(all_, n, within=0.49)), "However near the mean"),
        (lambda bias, counts, step: moved_by_sign(bias, counts, -step), "The wrong way"),
        (
            lambda bias, counts, step: moved_by_sign([0.0] * len(bias), counts, step),
            "kept from step to step",
        ),
        (lambda bias, counts, step: bias, "Nothing moves"),
        (lambda bias, counts, step: [b - step for b in bias], "fewer goes up"),
        (
            lambda bias, counts, step: [round(b) for b in moved_by_sign(bias, counts, step)],
            "it goes down by",
        ),
        (
            lambda bias, counts, step: [
                b + step * ((n < m) - (n > m))
                for m in [sum(map(sum, counts)) // len(bias)]
                for b, n in zip(bias, map(sum, zip(*counts, strict=True)), strict=True)
            ],
            "need not be a whole number",
        ),
    ],
)
def test_a_wrong_move_is_told_why(answer: Answer, words: str) -> None:
    refuses("moved", answer, words)


def in_order_of_experts(
    x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor
) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    sizes = chosen.flatten().bincount(minlength=len(experts)).tolist()
    rows = x[order // chosen.shape[1]].split(sizes)
    computed = torch.cat([expert(part) for expert, part in zip(experts, rows, strict=True)])
    return (computed * weights.flatten()[order, None]).view(len(x), -1, x.shape[1]).sum(1)


def without_idle_experts(
    x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor
) -> Tensor:
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token, choice = (chosen == i).nonzero(as_tuple=True)
        if len(token):
            out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
    return out


def on_all_tokens(x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
    parts = [
        expert(x) * (weights * (chosen == i)).sum(1, keepdim=True)
        for i, expert in enumerate(experts)
    ]
    return torch.stack(parts).sum(0)


def over_capacity_dropped(factor: float) -> Answer:
    def answer(x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        most = int(factor * chosen.numel() / len(experts))
        for i, expert in enumerate(experts):
            token, choice = (part[:most] for part in (chosen == i).nonzero(as_tuple=True))
            out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return out

    return answer


def overwritten(x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token, choice = (chosen == i).nonzero(as_tuple=True)
        out[token] = expert(x[token]) * weights[token, choice, None]
    return out


def mean_over_k(x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
    return mixture_by_mask(x, experts, chosen, weights) / chosen.shape[1]


def with_idle_experts_beside(
    x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor
) -> Tensor:
    out = [torch.zeros(x.shape[1]) for _ in x]
    for i, expert in enumerate(experts):
        token, choice = (chosen == i).nonzero(as_tuple=True)
        for t, c, row in zip(token.tolist(), choice.tolist(), expert(x[token]), strict=True):
            out[t] = out[t] + weights[t, c] * row
    return torch.stack(out)


def ill_as_given(x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    rows, expert_of = x[order // chosen.shape[1]], chosen.flatten()[order]
    parts = []
    for e in expert_of.unique():
        mine = rows[expert_of == e]
        parts += [experts[e](mine[:6]), mine[6:] * 0]
    out = torch.cat(parts).view(len(x), chosen.shape[1], -1)
    return (out * weights[..., None]).sum(1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (in_order_of_experts, "not in the order of the tokens"),
        (on_all_tokens, "expert 0 was called with [40] rows"),
        (without_idle_experts, "must be called with no rows"),
        (over_capacity_dropped(1.25), "as over a capacity"),
        (over_capacity_dropped(2), "as over a capacity"),
        (ill_as_given, "two illnesses"),
        (overwritten, "yours overwrites"),
        (with_idle_experts_beside, "must be part of the output"),
        (lambda x, e, c, w: mixture_by_mask(x, e, c, w).tolist(), "a tensor is asked for"),
        (
            lambda x, e, c, w: mixture_by_mask(x, e, c, torch.ones_like(w)),
            "The weights are not in it",
        ),
        (
            lambda x, e, c, w: mixture_by_mask(x, e, c[:, :1], w[:, :1]),
            "Only each token's first choice",
        ),
        (lambda x, e, c, w: mixture_by_mask(x, e, c[:, :2], w[:, :2]), "first two choices"),
        (lambda x, e, c, w: mixture_by_mask(x, e[:-1], c, w), "rows of the last expert"),
        (mean_over_k, "do not divide by k"),
        (lambda x, e, c, w: mixture_by_mask(x, e, c, w).detach(), "has no gradient"),
        (lambda x, e, c, w: mixture_by_mask(x.detach(), e, c, w), "Something is detached from x"),
        (
            lambda x, e, c, w: mixture_by_mask(x, e, c, w.detach()),
            "Something is detached from weights",
        ),
        (lambda x, e, c, w: None, "a tensor is asked for"),
    ],
)
def test_a_wrong_mixture_is_told_why(answer: Answer, words: str) -> None:
    refuses("mixture", answer, words)
