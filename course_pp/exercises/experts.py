"""Exercises of notebook 12: routing, the splits of the exchange, the balance loss, the bias, and a bug clinic."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import expect_int, expect_list, expect_number, expect_tensor
from course_pp.exercises.formula import Formula, flawed, why
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import Mistake


def route(logits: list[float], k: int) -> list[tuple[int, float]]:
    """The k experts of one token with their weights, best first; the weights sum to 1."""
    best = sorted(range(len(logits)), key=lambda expert: -logits[expert])[:k]
    total = sum(math.exp(logits[expert]) for expert in best)
    return [(expert, math.exp(logits[expert]) / total) for expert in best]


_OF_ALL = "for expert in best)"

_WRONG_ROUTES = (
    ((_OF_ALL, "for expert in range(len(logits)))"),
     "The softmax over all experts leaves the chosen ones less than 1 together: divide by their sum."),
    (("math.exp(logits[expert]) / total) for", "1 / k) for"),
     "The better expert counts more: weigh by the softmax."),
    ((_OF_ALL, "for expert in best[:1])"),
     "Each weight is over the best one's: divide by the sum of the chosen."),
    (lambda logits, k: sorted(route(logits, k)), "They are in the order of their numbers: give the best first."),
    (lambda logits, k: route(logits, k)[::-1], "The order is the worst first."),
    (lambda logits, k: route([-each for each in logits], k), "Those are the experts with the least scores."),
    (lambda logits, k: [(e, logits[e] / sum(logits[i] for i, _ in route(logits, k))) for e, _ in route(logits, k)],
     "Logits may be negative: take the softmax first."),
    (lambda logits, k: route(logits, 1), "`k` makes no difference in your answer."),
)  # fmt: skip

_LOGITS = ([0.5, 2.0, -1.0, 1.0], [-3.0, -1.0, -2.0, -0.5, -4.0], [1.0, 0.0], [0.25, 3.0, 2.5, -2.0, 0.75, 1.5])
_ROUTES = [(logits, k) for logits, k in product(_LOGITS, (2, 1, 3)) if k <= len(logits)]


def _read_route(value: Any, call: str) -> list[tuple[int, float]]:
    pairs = []
    for i, pair in enumerate(expect_list(value, call)):
        expert, weight = expect_list(pair, f"{call}[{i}]", 2)
        pairs.append((expect_int(expert, f"{call}[{i}][0]", _PAIR), expect_number(weight, f"{call}[{i}][1]")))
    return pairs


_PAIR = "A list of pairs (expert, weight) is asked for: the number of the expert comes first."


def splits(counts: list[list[int]], rank: int) -> tuple[list[int], list[int]]:
    """Rows that `rank` sends to each rank, and rows that it gets from each."""
    n = len(counts)
    each = len(counts[0]) // n
    sends = [sum(counts[rank][other * each : (other + 1) * each]) for other in range(n)]
    gets = [sum(row[rank * each : (rank + 1) * each]) for row in counts]
    return sends, gets


_WRONG_SPLITS = (
    (lambda counts, rank: splits(counts, rank)[::-1], "The two have changed places."),
    (lambda counts, rank: (splits(counts, rank)[0],) * 2,
     "What it gets is not what it sends: look at the columns of its own experts, in every row."),
    (lambda counts, rank: (
        [sum(counts[rank][other :: len(counts)]) for other in range(len(counts))],
        [sum(row[rank :: len(counts)]) for row in counts]),
     "Experts lie on ranks in blocks: with 4 experts on 2 ranks, rank 0 has 0 and 1."),
    (lambda counts, rank: ([0 if i == rank else n for i, n in enumerate(splits(counts, rank)[0])],
                           [0 if i == rank else n for i, n in enumerate(splits(counts, rank)[1])]),
     "A rank's own rows belong to the exchange: it copies them to itself."),
    (lambda counts, rank: (splits(counts, rank)[0], [row[rank] for row in counts]),
     "A rank has several experts: add up the columns of all of them."),
    (lambda counts, rank: (list(counts[rank]), [row[rank] for row in counts]),
     "Count by rank, not by expert: a rank has several."),
    (lambda counts, rank: (list(counts[rank]), splits(counts, rank)[1]),
     "Count what it sends by rank, not by expert: a rank has several."),
    (lambda counts, rank: splits(counts, 0), "`rank` makes no difference in your answer."),
)  # fmt: skip


def _counts(n_ranks: int, n_experts: int, seed: int) -> list[list[int]]:
    draw = Random(seed)
    return [[draw.choice((0, 1, 3, 7, 12)) for _ in range(n_experts)] for _ in range(n_ranks)]


_SPLITS = [
    (_counts(n, e, seed), rank) for n, e, seed in ((2, 4, 1), (3, 6, 2), (2, 8, 3), (4, 4, 4)) for rank in range(n)
]


def _read_splits(value: Any, call: str) -> tuple[list[int], ...]:
    return tuple(
        [expect_int(number, f"{call}[{i}]") for number in expect_list(each, f"{call}[{i}]")]
        for i, each in enumerate(expect_list(value, call, 2))
    )


def balance(scores: list[list[float]], k: int) -> tuple[float, list[list[float]]]:
    """The balance loss of a microbatch, and its gradient for every score."""
    n_tokens, n_experts = len(scores), len(scores[0])
    chosen = [0] * n_experts
    for row in scores:
        for expert in sorted(range(n_experts), key=lambda e: -row[e])[:k]:
            chosen[expert] += 1
    fractions = [count / (n_tokens * k) for count in chosen]
    means = [sum(row[expert] for row in scores) / n_tokens for expert in range(n_experts)]
    loss = n_experts * sum(f * p for f, p in zip(fractions, means, strict=True))
    gradient = [n_experts * f / n_tokens for f in fractions]
    return loss, [gradient for _ in scores]


_GRADIENT = "n_experts * f / n_tokens"

_WRONG_BALANCES = (
    (("(n_tokens * k)", "n_tokens"),
     "f is a fraction of all choices, of which each token has k: the f sum to 1."),
    (("loss = n_experts * ", "loss = "), (_GRADIENT, "f / n_tokens"),
     "The factor N is missing, which makes a balanced layer's loss 1."),
    ((_GRADIENT, "n_experts * f"),
     "P is a mean over the tokens, so each score enters with 1/T."),
    ((_GRADIENT, "n_experts / n_tokens"),
     "An expert's gradient is in proportion to its f: the full one is pushed down most."),
    ((_GRADIENT, "f / n_tokens"), "The loss has the factor N, and so has its gradient."),
    (("f * p for f, p in zip(fractions, means", "p * p for f, p in zip(fractions, means"),
     "The loss is N times the sum of f · P: the fraction of choices and the mean score, not the score twice."),
    (("f * p for f, p in zip(fractions, means", "f * f for f, p in zip(fractions, means"),
     "f alone has no gradient: a count does not change a little. The loss is N times the sum of f · P."),
    (lambda scores, k: (balance(scores, k)[0], [
        [g if e in sorted(range(len(row)), key=lambda i: -row[i])[:k] else 0.0 for e, g in enumerate(grads)]
        for row, grads in zip(scores, balance(scores, k)[1], strict=True)]),
     "P is the mean of the scores of all tokens, also of those that chose another expert: all have the gradient."),
    (lambda scores, k: balance(scores, 1), "`k` makes no difference in your answer."),
)  # fmt: skip


_ROWS_OF_SCORES = {4: [0.1, 0.2, 0.3, 0.4], 5: [0.05, 0.1, 0.2, 0.25, 0.4]}


def _scores(n_tokens: int, n_experts: int, seed: int) -> list[list[float]]:
    draw = Random(seed)
    return [draw.sample(_ROWS_OF_SCORES[n_experts], n_experts) for _ in range(n_tokens)]


_BALANCES = [(_scores(n, e, 10 * n + e), k) for n, e in ((3, 4), (2, 5), (5, 4)) for k in (2, 1)]


def _read_balance(value: Any, call: str) -> tuple[float, list[list[float]]]:
    loss, gradient = expect_list(value, call, 2)
    rows = [
        [expect_number(each, f"{call}[1][{i}][{j}]") for j, each in enumerate(expect_list(row, f"{call}[1][{i}]"))]
        for i, row in enumerate(expect_list(gradient, f"{call}[1]"))
    ]
    return expect_number(loss, f"{call}[0]"), rows


def moved(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    """The bias of each expert after a step; `counts` has a row for each microbatch on each data rank."""
    tokens = [sum(column) for column in zip(*counts, strict=True)]
    mean = sum(tokens) / len(tokens)
    return [b + step * ((n < mean) - (n > mean)) for b, n in zip(bias, tokens, strict=True)]


def _moved_each_time(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    for row in counts:
        bias = moved(bias, [row], step)
    return bias


_WRONG_MOVES = (
    (_moved_each_time,
     "It moves after every microbatch. Once a step, by the counts of all: routing must not change within a step."),
    (lambda bias, counts, step: moved(bias, counts[-1:], step), "Only the last microbatch counts in your answer."),
    (lambda bias, counts, step: moved(bias, counts[:1], step), "Only the first microbatch counts in your answer."),
    (lambda bias, counts, step: moved(bias, counts, -step),
     "The wrong way: an expert with too many tokens must be chosen less."),
    (("((n < mean) - (n > mean))", "(mean - n)"),
     "By `step`, up or down, however far the count is off: only the sign of the difference counts."),
    (("((n < mean) - (n > mean))", "(1 if n < mean else -1)"),
     "An expert that has just the mean stays where it is."),
    (("((n < mean) - (n > mean))", "(-1 if n > mean else 1)"),
     "An expert that has just the mean stays where it is."),
    (("b + step * ", "step * "), "The bias is kept from step to step: add to it."),
)  # fmt: skip

_MOVES = [
    ([0.0, 0.0, 0.0, 0.0], [[8, 1, 2, 1], [2, 2, 7, 1]], 0.1),
    ([0.5, -0.25, 0.0], [[1, 5, 0], [5, 0, 1], [3, 1, 2]], 0.125),
    ([0.0, 1.0], [[4, 4]], 0.01),
    ([0.0, 0.0, 0.0], [[1, 2, 2]], 0.25),
    ([0.1, 0.2, 0.3, 0.4], [[0, 0, 12, 0], [3, 3, 3, 3]], 0.5),
]


def _read_numbers(value: Any, call: str) -> list[float]:
    return [expect_number(each, f"{call}[{i}]") for i, each in enumerate(expect_list(value, call))]


def mixture(x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
    """Each token's experts, weighed and added up: x (tokens, dim), chosen and weights (tokens, k) -> (tokens, dim)."""
    k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    sizes = chosen.flatten().bincount(minlength=len(experts)).tolist()
    parts = [expert(rows) for expert, rows in zip(experts, x[order // k].split(sizes), strict=True)]
    computed = torch.cat(parts)
    pairs = torch.zeros_like(computed).index_copy(0, order, computed)
    return (pairs.view(len(x), k, -1) * weights[..., None]).sum(1)


class _Mixed(NamedTuple):
    """What a mixture left: its output, gradients by name, None for no gradient, and of each expert's calls the rows."""

    output: Any
    gradients: dict[str, Tensor | None]
    calls: list[list[int]]


_DIM, _TOKENS = 3, 10


def _experts(n: int) -> list[nn.Module]:
    torch.manual_seed(n)
    return [nn.Sequential(nn.Linear(_DIM, 4), nn.Tanh(), nn.Linear(4, _DIM)).double() for _ in range(n)]


def _tokens(n: int, k: int, taken: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose choices fall on the first ``taken`` of n experts; the last of these gets most."""
    drawn = torch.Generator().manual_seed(7 * n + k)
    scores = torch.rand(_TOKENS, taken, generator=drawn, dtype=torch.float64)
    scores[: _TOKENS // 2, -1] += 1
    weights, chosen = scores.topk(k)
    x = torch.randn(_TOKENS, _DIM, generator=drawn, dtype=torch.float64)
    return x, chosen, weights / weights.sum(-1, keepdim=True)


def _mixed(rank: int, fn: Callable[..., Any], n: int, k: int, taken: int) -> _Mixed:
    experts, (x, chosen, weights) = _experts(n), _tokens(n, k, taken)
    x.requires_grad_()
    weights.requires_grad_()
    calls: list[list[int]] = [[] for _ in experts]
    for expert, seen in zip(experts, calls, strict=True):
        expert.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args[0])))
    with unchanged(x=x, chosen=chosen, weights=weights):
        output = fn(x, experts, chosen, weights)
    if not isinstance(output, Tensor) or not output.requires_grad:
        return _Mixed(output.detach() if isinstance(output, Tensor) else output, {}, calls)
    (output * torch.arange(1.0, output.numel() + 1).view_as(output)).sum().backward()
    named = {"x": x, "weights": weights}
    named |= {f"expert {i}'s {name}": p for i, e in enumerate(experts) for name, p in e.named_parameters()}
    return _Mixed(output.detach(), {name: each.grad for name, each in named.items()}, calls)


def _grade_mixture(answer: Answer) -> None:
    for n, k, taken in ((4, 2, 4), (4, 2, 3), (6, 1, 4), (3, 3, 3)):
        where = f"With {n} experts, k = {k} and {_TOKENS} tokens{f', none for expert {n - 1}' * (taken < n)},"
        [found], right = answer.on_ranks(1, _mixed, n, k, taken), _mixed(0, mixture, n, k, taken)
        output = expect_tensor(found.output, f"{answer.name}(…)", right.output.shape)
        if not torch.allclose(output, right.output):
            raise Mistake(
                f"{where} the output is not the weighted sum.", _why_output(output, right.output, n, k, taken)
            )
        if not found.gradients:
            raise Mistake(f"{where} the output has no gradient.", "Leave out `detach`, `no_grad` and `.data`.")
        for name, got in found.gradients.items():
            gradient = right.gradients[name]
            if got is None or gradient is None:  # the solution's are all there
                idle = (
                    "An expert that no token chose must be called with no rows: then its gradient is zeros. If it is "
                    "None, FSDP2 or an exchange on another rank waits for it for ever."
                )
                cause = f"Something is detached from {name}." if name in ("x", "weights") else idle
                raise Mistake(f"{where} {name} {'has' if name == 'x' else 'have'} no gradient at all.", cause)
            if not torch.allclose(got, gradient):
                raise Mistake(f"{where} the output is right, but the gradient of {name} is not.", "What is detached?")
        if found.calls != right.calls:
            i = next(i for i, rows in enumerate(right.calls) if found.calls[i] != rows)
            raise Mistake(
                f"{where} expert {i} was called with {found.calls[i]} rows, not with {right.calls[i]}.",
                "One call each, with the rows of the tokens that chose it: that is what sparse means.",
            )


def _why_output(got: Tensor, right: Tensor, n: int, k: int, taken: int) -> str:
    x, chosen, weights = _tokens(n, k, taken)

    def with_flaw(*changes: tuple[str, str]) -> bool:
        with torch.no_grad():
            return torch.allclose(got, flawed(mixture, *changes)(x, _experts(n), chosen, weights))

    close, rows = torch.allclose, torch.isclose(got, right).all(1)
    with torch.no_grad():
        first = mixture(x, _experts(n), chosen[:, :1], weights[:, :1])
    back = "The rows are not in the order of the tokens: row i of what was computed belongs at `order[i]`."
    return why(
        (
            (close(got.sum(0), right.sum(0)), back),
            (with_flaw(("torch.zeros_like(computed).index_copy(0, order, computed)", "computed")), back),
            (with_flaw(("torch.zeros_like(computed).index_copy(0, order, computed)", "computed[order]")), back),
            (with_flaw((" * weights[..., None]", "")), "The weights are not in it."),
            (k > 1 and close(got, first), "Only each token's first choice counts in your answer."),
            (bool(rows.any()), f"{int((~rows).sum())} of {_TOKENS} rows differ: are some dropped, as over a capacity?"),
        ),
        "Sort (token, choice) pairs by expert, compute, put them back in the tokens' order, weigh, add up k rows each.",
    )


EXERCISES: tuple[Exercise, ...] = (
    Exercise(route, Formula(route, _ROUTES, _WRONG_ROUTES, read=_read_route), "12", "a token chooses", 1, 5, (
        "The experts with the k largest logits; `sorted(…, key=…)[:k]`.",
        "The softmax of all logits, divided by the chosen ones' sum, is the softmax of the chosen ones.",
        "Weight of an expert: `exp` of its logit, over the sum of `exp` over the chosen k.",
    )),
    Exercise(splits, Formula(splits, _SPLITS, _WRONG_SPLITS, read=_read_splits), "12", "who gets how many rows", 2, 7, (
        "With E experts on n ranks, rank r has those from r * E / n to (r + 1) * E / n, excluded.",
        "What it sends to rank s is its own row, summed over the experts of s.",
        "What it gets from rank s is row s, summed over its own experts.",
    )),
    Exercise(balance, Formula(balance, _BALANCES, _WRONG_BALANCES, read=_read_balance), "12", "a loss", 3, 9, (
        "Count the choices of each expert first: each token chooses the k with the largest scores.",
        "f has no gradient, because a count does not change a little. P is a mean: each score enters with 1/T.",
        "The gradient of scores[t][e] is N * f[e] / T, the same for all tokens.",
    )),
    Exercise(moved, Formula(moved, _MOVES, _WRONG_MOVES, read=_read_numbers), "12", "a bias", 1, 5, (
        "Add up the counts of all rows first.",
        "Compare each expert's tokens with the mean over the experts.",
        "Fewer than the mean: + step. More: - step. Just the mean: as it is.",
    )),
    Exercise(mixture, _grade_mixture, "12", "bug clinic", 3, 12, (
        "In which order are the rows when the experts have computed them, and in which do the tokens expect them?",
        "`order` says which (token, choice) pair each row is: row i of what was computed belongs at `order[i]`.",
        "Call every expert, also with no rows; cut nothing off; `out[order] = computed`, as `index_copy` does it.",
    )),
)  # fmt: skip
