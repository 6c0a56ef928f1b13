"""Notebook 12: routing, splits of the exchange, the balance loss, the bias, and a clinic."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, product
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import close, expect_int, expect_list, expect_number, expect_tensor
from course_pp.exercises.formula import Formula, alike, flawed
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import OTHERWISE, Mistake, why


def route(logits: list[float], k: int) -> list[tuple[int, float]]:
    """The k experts of one token with their weights, best first; the weights sum to 1."""
    best = sorted(range(len(logits)), key=lambda expert: -logits[expert])[:k]
    total = sum(math.exp(logits[expert]) for expert in best)
    return [(expert, math.exp(logits[expert]) / total) for expert in best]


_Route = list[tuple[int, float]]
_OF_ALL = "for expert in best)"
_WEIGHT = "math.exp(logits[expert]) / total) for"
_NO_SUM = (
    "The weights of the chosen experts have to sum to 1: divide each `exp` by the sum over the"
    " chosen."
)


def _softmax(logits: list[float]) -> list[float]:
    return [weight for _, weight in sorted(route(logits, len(logits)))]


def _all_experts(logits: list[float], k: int) -> _Route:
    """All experts, with weights of 0 for those that are not chosen."""
    weights = dict(route(logits, k))
    return [(expert, weights.get(expert, 0.0)) for expert, _ in route(logits, len(logits))]


def _weights_of_weights(logits: list[float], k: int) -> _Route:
    """The chosen experts, weighed by a softmax of their weights."""
    experts, weights = zip(*route(logits, k), strict=True)
    again = [math.exp(weight) for weight in weights]
    return [(expert, each / sum(again)) for expert, each in zip(experts, again, strict=True)]


_WRONG_ROUTES = (
    ((_OF_ALL, "for expert in range(len(logits)))"),
     "The softmax over all experts leaves the chosen ones less than 1 together: divide by their"
     " sum."),
    ((_WEIGHT, "1 / k) for"), "The better expert counts more: weigh by the softmax."),
    ((_OF_ALL, "for expert in best[:1])"),
     "Each weight is over the best one's: divide by the sum of the chosen."),
    ((_WEIGHT, "math.exp(logits[expert])) for"), _NO_SUM),
    ((_WEIGHT, "logits[expert]) for"), "Those are logits: take the softmax over the chosen ones."),
    (lambda logits, k: sorted(route(logits, k)),
     "They are in the order of their numbers: give the best first."),
    (lambda logits, k: route(logits, k)[::-1], "The order is the worst first."),
    (lambda logits, k: route([-each for each in logits], k),
     "Those are the experts with the least scores."),
    (lambda logits, k: [(e, logits[e] / sum(logits[i] for i, _ in route(logits, k))) for e, _ in route(logits, k)],
     "Logits may be negative: take the softmax first."),
    (lambda logits, k: [(e, logits[e] / sum(logits)) for e, _ in route(logits, k)],
     "Logits may be negative: take the softmax first, over the chosen ones."),
    (lambda logits, k: route(logits, 1), "`k` makes no difference in your answer."),
    (lambda logits, k: route(logits, len(logits)),
     "`k` makes no difference in your answer: all experts are chosen."),
    (_all_experts,
     "Only the k best are asked for, with weights that sum to 1 among them."),
    (lambda logits, k: route(_softmax(logits), k),
     "That is a softmax of a softmax: once is enough. What `softmax` has made are weights; divide "
     "them by their sum."),
    (lambda logits, k: route(_softmax(_softmax(logits)), k),
     "That is a softmax of a softmax of a softmax: once is enough."),
    (_weights_of_weights,
     "That is a softmax of a softmax: the weights sum to 1 already after the first."),
    (lambda logits, k: [(e, _softmax(_softmax(logits))[e]) for e, _ in route(logits, k)],
     "That is a softmax of a softmax: once is enough, and over the chosen ones."),
    (("[:k]", "[:k + 1]"), "That is one expert too many: take k of them."),
    (("[:k]", "[:k - 1]"), "That is one expert too few: take k of them."),
    (("[(expert, ", "[(expert + 1, "), "Experts are numbered from 0, as `logits` is."),
    (lambda logits, k: [(i, weight) for i, (_, weight) in enumerate(route(logits, k))],
     "Those are places in the order, best first. Give the number that the expert has in `logits`."),
    (("range(len(logits))", "range(k)"), "Those are the first k experts, not the k best."),
    (("sorted(range(len(logits)), key=lambda expert: -logits[expert])[:k]", "range(k)"),
     "Those are the first k experts, not the k best."),
    ((": -logits[expert]", ": -abs(logits[expert])"),
     "A large negative logit is a bad one: compare without `abs`."),
    (lambda logits, k: [(e, route(logits, k)[-1 - i][1]) for i, (e, _) in enumerate(route(logits, k))],
     "The weights have changed places: the best expert has the largest."),
    (lambda logits, k: [(logits.index(logits[e]), weight) for e, weight in route(logits, k)],
     "Two logits may be equal, and `index` finds the first of them twice: sort the numbers of the "
     "experts instead."),
    (lambda logits, k: route([*dict.fromkeys(logits)], k),
     "Two logits may be equal: a set, or a dictionary with logits as keys, keeps one of them."),
    (lambda logits, k: route([-math.log1p(math.exp(-each)) for each in logits], k),
     "Those are sigmoids over their sum; the router takes a softmax."),
    (lambda logits, k: route([each * math.log(2) for each in logits], k),
     "The softmax takes powers of e, `math.exp`, not of 2."),
    (lambda logits, k: [(e, 100 * weight) for e, weight in route(logits, k)],
     "Weights sum to 1, not to 100."),
    (lambda logits, k: [(e, weight / k) for e, weight in route(logits, k)],
     "The weights sum to 1 already: do not divide them by k."),
)  # fmt: skip

_LOGITS = (
    [0.5, 2.0, -1.0, 1.0],
    [-3.0, -1.0, -2.0, -0.5, -4.0],
    [1.0, 0.0],
    [0.25, 3.0, 2.5, -2.0, 0.75, 1.5],
)
# Where logits are equal, all of these are chosen: which of them would be, is nobody's business.
_EQUAL = [([1.0, 2.0, 1.0], 3), ([0.5, 0.5], 2), ([-1.0, 1.5, 0.0, 1.5], 2)]
_ROUTES = [(logits, k) for logits, k in product(_LOGITS, (2, 1, 3)) if k <= len(logits)] + _EQUAL

_PAIR = "A list of pairs (expert, weight) is asked for: the number of the expert comes first."


def _read_route(value: Any, call: str) -> _Route:
    pairs = []
    for i, pair in enumerate(expect_list(value, call, remedy=_PAIR)):
        expert, weight = expect_list(pair, f"{call}[{i}]", 2, _PAIR)
        pairs.append(
            (expect_int(expert, f"{call}[{i}][0]", _PAIR), expect_number(weight, f"{call}[{i}][1]"))
        )
    return pairs


def _same_route(got: _Route, right: _Route) -> bool:
    """Return whether two routes are equal; experts of equal weight may stand in any order."""
    return alike(_by_number(got), _by_number(right))


def _by_number(pairs: _Route) -> _Route:
    """Return the pairs, with neighbours of equal weight sorted by the number of the expert."""
    runs: list[_Route] = []
    for pair in pairs:
        if runs and close(runs[-1][0][1], pair[1]):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return [pair for run in runs for pair in sorted(run)]


def _why_route(case: tuple[Any, ...], got: _Route, right: _Route) -> str:
    logits, k = case
    experts = [expert for expert, _ in got]
    weights = [weight for _, weight in got]
    causes = (
        (len(got) != k, f"One pair for each of the k best is asked for: here {k}."),
        (not all(0 <= expert < len(logits) for expert in experts),
         "The number of an expert is its place in `logits`."),
        (len(set(experts)) < k, "An expert is chosen twice: two logits may be equal."),
        (sorted(experts) != sorted(expert for expert, _ in right),
         "Those are not the experts with the largest logits."),
        (experts != [expert for expert, _ in right] and alike(sorted(got), sorted(right)),
         "Give the best first."),
        (alike(sorted(weights), sorted(weight for _, weight in right)),
         "The weights are right, but not each belongs to its expert."),
        (not close(sum(weights), 1), _NO_SUM),
        (OTHERWISE,
         "The weight of an expert is `exp` of its logit over the sum of `exp` over the chosen k."),
    )  # fmt: skip
    return why(causes)


def splits(counts: list[list[int]], rank: int) -> tuple[list[int], list[int]]:
    """Rows that `rank` sends to each rank, and rows that it gets from each."""
    n = len(counts)
    each = len(counts[0]) // n
    sends = [sum(counts[rank][other * each : (other + 1) * each]) for other in range(n)]
    gets = [sum(row[rank * each : (rank + 1) * each]) for row in counts]
    return sends, gets


_TWO_LISTS = (
    "Two lists are asked for, each with a number for each rank: the rows it sends, and the rows it"
    " gets."
)
_EXCLUDED = (
    "With `each` experts a rank, rank s has those from `s * each` up to `(s + 1) * each`, which a"
    " slice excludes."
)
_OFFSETS = (
    "Those are offsets, where each part begins or ends. The lengths are asked for: do not add"
    " them up."
)
_ITSELF = "A rank's own rows belong to the exchange: it copies them to itself."
_BLOCKS = "Experts lie on ranks in blocks: with 4 experts on 2 ranks, rank 0 has 0 and 1."
_SENDS = "(other + 1) * each])"
_GETS = "(rank + 1) * each])"


def _starts(counts: list[list[int]], rank: int) -> tuple[list[int], ...]:
    return tuple([0, *accumulate(lengths)][:-1] for lengths in splits(counts, rank))


def _ends(counts: list[list[int]], rank: int) -> tuple[list[int], ...]:
    return tuple([*accumulate(lengths)] for lengths in splits(counts, rank))


def _without_itself(counts: list[list[int]], rank: int) -> tuple[list[int], ...]:
    return tuple(lengths[:rank] + lengths[rank + 1 :] for lengths in splits(counts, rank))


_WRONG_SPLITS = (
    (lambda counts, rank: splits(counts, rank)[::-1], "The two have changed places."),
    (lambda counts, rank: (splits(counts, rank)[0],) * 2,
     "What it gets is not what it sends: look at the columns of its own experts, in every row."),
    (lambda counts, rank: (splits(counts, rank)[1],) * 2,
     "What it sends is not what it gets: look at its own row, at the experts of each rank."),
    (lambda counts, rank: (
        [sum(counts[rank][other :: len(counts)]) for other in range(len(counts))],
        [sum(row[rank :: len(counts)]) for row in counts]),
     _BLOCKS),
    (lambda counts, rank: ([0 if i == rank else n for i, n in enumerate(splits(counts, rank)[0])],
                           [0 if i == rank else n for i, n in enumerate(splits(counts, rank)[1])]),
     _ITSELF),
    (_without_itself,
     "A rank's own rows belong to the exchange, too: a number for each rank, itself included."),
    (lambda counts, rank: (splits(counts, rank)[0], [row[rank] for row in counts]),
     "A rank has several experts: add up the columns of all of them."),
    (lambda counts, rank: (list(counts[rank]), [row[rank] for row in counts]),
     "Count by rank, not by expert: a rank has several."),
    (lambda counts, rank: (list(counts[rank]), splits(counts, rank)[1]),
     "Count what it sends by rank, not by expert: a rank has several."),
    (lambda counts, rank: ([*counts[rank][: len(counts)]], [row[rank] for row in counts]),
     "Count by rank, not by expert: a rank has several."),
    (lambda counts, rank: splits(counts, 0), "`rank` makes no difference in your answer."),
    (lambda counts, rank: splits(counts, (rank + 1) % len(counts)),
     "Those are the lists of another rank, the next one."),
    (lambda counts, rank: splits(counts, (rank - 1) % len(counts)),
     "Those are the lists of another rank: count from 0."),
    (_starts, _OFFSETS),
    (_ends, _OFFSETS),
    ((_SENDS, "(other + 1) * each - 1])"), (_GETS, "(rank + 1) * each - 1])"),
     f"One expert of each rank is missing. {_EXCLUDED}"),
    ((_SENDS, "(other + 1) * each + 1])"), (_GETS, "(rank + 1) * each + 1])"),
     f"That is one expert too many. {_EXCLUDED}"),
    (("other * each :", "other * each + 1 :"), ("rank * each :", "rank * each + 1 :"),
     f"The first expert of each rank is missing. {_EXCLUDED}"),
    (("len(counts[0]) // n", "n"),
     "A rank has E / n experts, not n of them: `len(counts[0]) // len(counts)`."),
    (("len(counts[0]) // n", "2"),
     "A rank has E / n experts, `len(counts[0]) // len(counts)`; your answer takes it to have 2."),
    (("sum(row[rank * each : (rank + 1) * each])", "sum(row)"),
     "What it gets from rank s is what that rank has for *its* experts, not all that rank s has."),
    (("row[rank * each", "counts[rank][rank * each"),
     "What it gets comes from the rows of the other ranks, too."),
    (("sum(row[rank * each : (rank + 1) * each]) for row in counts",
      "sum(row[other * each : (other + 1) * each]) for other, row in enumerate(counts)"),
     "What it gets from rank s is what that rank has for *this* rank's experts, and not for its"
     " own."),
    (("sum(counts[rank][other", "sum(counts[other][other"),
     "What it sends comes from its own row of `counts` alone."),
    (("sum(counts[rank][other * each : (other + 1) * each]) for",
      "sum(sum(row[other * each : (other + 1) * each]) for row in counts) for"),
     "What it sends comes from its own row of `counts` alone: that is what all ranks send."),
)  # fmt: skip


def _why_splits(case: tuple[Any, ...], got: Any, right: Any) -> str:
    counts, rank = case
    n = len(counts)
    each = len(counts[0]) // len(counts)
    sends, gets = got
    right_sends, right_gets = right
    starts, ends = _starts(counts, rank), _ends(counts, rank)
    named = (
        (starts[0], _OFFSETS), (starts[1], _OFFSETS), (ends[0], _OFFSETS), (ends[1], _OFFSETS),
        ([0 if s == rank else length for s, length in enumerate(right_sends)], _ITSELF),
        ([0 if s == rank else length for s, length in enumerate(right_gets)], _ITSELF),
        ([sum(row) for row in counts], "Those are all rows of each rank, whatever their expert."),
        ([sum(counts[rank][s::n]) for s in range(n)], _BLOCKS),
        ([sum(row[rank::n]) for row in counts], _BLOCKS),
        ([sum(sum(row[s * each : (s + 1) * each]) for row in counts) for s in range(n)],
         "That is what each rank gets from all ranks together."),
    )  # fmt: skip
    by_halves = [(half == vector, cause) for half in (sends, gets) for vector, cause in named]
    causes = (
        (len(sends) != n or len(gets) != n,
         f"Each list has a number for each of the {n} ranks, this one included."),
        *((sends != right_sends and holds, cause) for holds, cause in by_halves[: len(named)]),
        *((gets != right_gets and holds, cause) for holds, cause in by_halves[len(named) :]),
        (gets == right_gets,
         "What it gets is right. What it sends to rank s is its own row, over the experts of s."),
        (sends == right_sends,
         "What it sends is right. What it gets from rank s is row s, over the experts of this "
         "rank."),
        (OTHERWISE,
         "It sends its own row, over the experts of each rank, and gets its own experts."
         f" {_EXCLUDED}"),
    )  # fmt: skip
    return why(causes)


def _counts(n_ranks: int, n_experts: int, seed: int) -> list[list[int]]:
    draw = Random(seed)
    return [[draw.choice((0, 1, 3, 7, 12)) for _ in range(n_experts)] for _ in range(n_ranks)]


_SPLITS = [
    (_counts(n, e, seed), rank)
    for n, e, seed in ((2, 4, 1), (3, 6, 2), (2, 8, 3), (4, 4, 4))
    for rank in range(n)
]


def _read_splits(value: Any, call: str) -> tuple[list[int], ...]:
    halves = []
    for i, half in enumerate(expect_list(value, call, 2, _TWO_LISTS)):
        entries = expect_list(half, f"{call}[{i}]", remedy=_TWO_LISTS)
        halves.append([expect_int(each, f"{call}[{i}][{j}]") for j, each in enumerate(entries)])
    return tuple(halves)


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


_LOSS, _GRADIENT = "loss = n_experts * sum", "n_experts * f / n_tokens"
_PRODUCTS = "f * p for f, p in zip(fractions, means"
_SCORE_TWICE = (_PRODUCTS, "p * p for f, p in zip(fractions, means")
_F_IS_A_COUNT = (
    "f is a count of choices, as a fraction of all; your answer takes the mean score, P, in its"
    " place."
)
_NO_SOFTMAX = "The rows are scores already, which sum to 1: no softmax is left to take."
_BOTH = (
    "The loss comes first, one number; then its gradient, rows like `scores`: a number for each"
    " token and expert."
)
_THROUGH_P = (
    "f is a count and stays as it is: the gradient of scores[t][e] comes through P and is N · f[e]"
    " / T."
)


def _chosen(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: -row[e])[:k]


def _means_of_chosen(scores: list[list[float]], k: int, expert: int, per_token: bool) -> float:
    picked = [row[expert] for row in scores if expert in _chosen(row, k)]
    return sum(picked) / (len(scores) if per_token else max(1, len(picked)))


def _of_the_chosen(scores: list[list[float]], k: int) -> Any:
    """The loss, and its gradient for the scores of chosen experts alone."""
    loss, [gradient, *_] = balance(scores, k)
    rows = []
    for row in scores:
        there = _chosen(row, k)
        rows.append([each if expert in there else 0.0 for expert, each in enumerate(gradient)])
    return loss, rows


def _times_scores(scores: list[list[float]], k: int) -> Any:
    """The loss, and its gradient times the scores."""
    loss, [gradient, *_] = balance(scores, k)
    return loss, [[p * g for p, g in zip(row, gradient, strict=True)] for row in scores]


def _through_softmax(scores: list[list[float]], k: int) -> Any:
    """The loss, and its gradient for the logits."""
    loss, [gradient, *_] = balance(scores, k)
    rows = []
    for row in scores:
        mean = sum(p * g for p, g in zip(row, gradient, strict=True))
        rows.append([p * (g - mean) for p, g in zip(row, gradient, strict=True)])
    return loss, rows


_WRONG_BALANCES = (
    (("(n_tokens * k)", "n_tokens"),
     "f is a fraction of all choices, of which each token has k: the f sum to 1."),
    (("(n_tokens * k)", "1"),
     "f is a fraction, not a count: divide by the number of all choices, T · k."),
    (("(n_tokens * k)", "k"),
     "A division by T is missing: f is a fraction of all T · k choices, and P is a mean over T"
     " tokens."),
    ((_LOSS, "loss = sum"), (_GRADIENT, "f / n_tokens"),
     "The factor N is missing, which makes a balanced layer's loss 1."),
    ((_LOSS, "loss = sum"),
     "The gradient has the factor N, and so has the loss: it is no mean over the experts."),
    ((_LOSS, "loss = n_experts**2 * sum"), "The factor is N, once."),
    ((_LOSS, "loss = k * n_experts * sum"), "The factor is N; k is in f already."),
    ((_GRADIENT, "n_experts * f"), "P is a mean over the tokens, so each score enters with 1/T."),
    (("for row in scores) / n_tokens", "for row in scores)"),
     "P is a mean over the tokens: divide the sum by T."),
    ((_GRADIENT, "n_experts / n_tokens"),
     "An expert's gradient is in proportion to its f: the full one is pushed down most."),
    ((_GRADIENT, "f / n_tokens"), "The loss has the factor N, and so has its gradient."),
    ((_GRADIENT, "n_experts * f / n_tokens / k"),
     "f holds the division by k already: the gradient is N · f / T."),
    ((_GRADIENT, "k * n_experts * f / n_tokens"),
     "f is the fraction of all choices in the gradient, too: N · f / T."),
    ((_GRADIENT, "-n_experts * f / n_tokens"),
     "The sign: a larger score makes the loss larger. It is the step of the optimizer that goes the"
     " other way."),
    ((_GRADIENT, "2 * n_experts * f / n_tokens"),
     "Twice too large: only P has a gradient; f counts as a constant."),
    (("for f in fractions]", "for f in means]"), _THROUGH_P),
    (("for f in fractions]", "for f in [a + b for a, b in zip(fractions, means)]]"), _THROUGH_P),
    ((_GRADIENT, "0.0"),
     "P is a mean of scores and has a gradient: N · f[e] / T. Only f has none."),
    (lambda scores, k: (balance(scores, k)[0], [[g] * len(scores) for g in balance(scores, k)[1][0]]),
     "The gradient is transposed: rows like `scores`, a row for each token."),
    (lambda scores, k: (balance(scores, k)[0], balance(scores, k)[1][:1]),
     "The gradient has one row, and there is one for each token, all alike."),
    (_SCORE_TWICE,
     "The loss is N times the sum of f · P: the fraction of choices and the mean score, not the"
     " score twice."),
    (_SCORE_TWICE, ("for f in fractions]", "for f in means]"), _F_IS_A_COUNT),
    (_SCORE_TWICE, ("for f in fractions]", "for f in [2 * p for p in means]]"), _F_IS_A_COUNT),
    ((_PRODUCTS, "f * f for f, p in zip(fractions, means"),
     "f alone has no gradient: a count does not change a little. The loss is N times the sum of f ·"
     " P."),
    (_of_the_chosen,
     "P is the mean of the scores of all tokens, also of those that chose another expert: all have"
     " the gradient."),
    (_times_scores,
     "The gradient of f · P for a score does not hold that score: P is a sum of them over T."),
    (_through_softmax,
     "That is the gradient for the logits. The scores' own is asked for, without the softmax."),
    (("sum(row[expert] for row in scores) / n_tokens", "_means_of_chosen(scores, k, expert, True)"),
     "P is the mean of the scores of all tokens, also of those that chose another expert."),
    (("sum(row[expert] for row in scores) / n_tokens", "_means_of_chosen(scores, k, expert, False)"),
     "P is the mean of the scores of all tokens, also of those that chose another expert."),
    (("key=lambda e: -row[e]", "key=lambda e: row[e]"),
     "Each token chooses the k *largest* scores."),
    (("-row[e])[:k]", "-row[e])[: k + 1]"), (" * k)", " * (k + 1))"),
     "Each token chooses k experts; yours has k + 1."),
    (("-row[e])[:k]", "-row[e])[: k + 1]"), "Each token chooses k experts; yours has k + 1."),
    (lambda scores, k: balance([_softmax(row) for row in scores], k),
     _NO_SOFTMAX),
    (lambda scores, k: _through_softmax([_softmax(row) for row in scores], k), _NO_SOFTMAX),
    (lambda scores, k: balance(scores, 1), "`k` makes no difference in your answer."),
    (lambda scores, k: balance(scores, 2), "`k` makes no difference in your answer."),
    (lambda scores, k: (balance(scores, k)[0] - 1, balance(scores, k)[1]),
     "Nothing is subtracted: a balanced layer's loss is α, here 1."),
)  # fmt: skip


_ROWS_OF_SCORES = {4: [0.1, 0.2, 0.3, 0.4], 5: [0.05, 0.1, 0.2, 0.25, 0.4]}


def _scores(n_tokens: int, n_experts: int, seed: int) -> list[list[float]]:
    draw = Random(seed)
    return [draw.sample(_ROWS_OF_SCORES[n_experts], n_experts) for _ in range(n_tokens)]


_UNEVEN = [[0.4, 0.3, 0.2, 0.1], [0.4, 0.1, 0.3, 0.2], [0.3, 0.4, 0.2, 0.1]]
_BALANCES = [(_UNEVEN, 2), (_UNEVEN, 1)]
_DRAWN = [_scores(n, e, 10 * n + e) for n, e in ((3, 4), (2, 5), (5, 4))]
_BALANCES += [(scores, k) for scores in _DRAWN for k in (2, 1, 3)]


def _read_balance(value: Any, call: str) -> tuple[float, list[list[float]]]:
    loss, gradient = expect_list(value, call, 2, _BOTH)
    try:
        number = expect_number(loss, f"{call}[0]")
    except Mistake as e:
        cause = _BOTH if isinstance(loss, list | tuple) else e.cause
        raise Mistake(e.symptom, cause, e.example) from None
    rows = []
    for t, row in enumerate(expect_list(gradient, f"{call}[1]", remedy=_BOTH)):
        entries = expect_list(row, f"{call}[1][{t}]", remedy=_BOTH)
        rows.append([expect_number(each, f"{call}[1][{t}][{e}]") for e, each in enumerate(entries)])
    return number, rows


def _why_balance(case: tuple[Any, ...], got: Any, right: Any) -> str:
    scores, _ = case
    n_tokens, n_experts = len(scores), len(scores[0])
    factors = []
    for mine, row in zip(got[1], right[1], strict=False):
        factors += [a / b for a, b in zip(mine, row, strict=False) if b]
    one_factor = bool(factors) and all(close(factor, factors[0]) for factor in factors)
    shape = (len(got[1]), *{len(row) for row in got[1]})
    loss_is = "The loss is right."
    if not close(got[0], right[0]):
        loss_is = "The loss is N times the sum of f · P."
    causes = (
        (shape != (n_tokens, n_experts),
         f"The gradient has rows like `scores`: {n_tokens} of them, with {n_experts} numbers "
         "each."),
        (close(got[0], right[0]) and any(not alike(row, got[1][0]) for row in got[1]),
         "The loss is right. All tokens have the same gradient, N · f[e] / T, whichever experts "
         "they chose."),
        (alike(got[1], right[1]),
         f"The gradient is right. {loss_is} f sums to 1 over the experts, and so does P, the mean "
         "score."),
        (one_factor and not close(factors[0], 1),
         f"{loss_is} The gradient of scores[t][e] is N · f[e] / T: yours is {factors[0]:.4g} times "
         "that."),
        (OTHERWISE,
         f"{loss_is} The gradient of scores[t][e] is N · f[e] / T, the same for all tokens."),
    )  # fmt: skip
    return why(causes)


def moved(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    """The bias of each expert after a step; `counts` has a row for each microbatch on each data rank."""
    tokens = [sum(column) for column in zip(*counts, strict=True)]
    mean = sum(tokens) / len(tokens)
    return [b + step * ((n < mean) - (n > mean)) for b, n in zip(bias, tokens, strict=True)]


def _moved_each_time(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    for row in counts:
        bias = moved(bias, [row], step)
    return bias


def _majority(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    votes = _moved_each_time([0.0] * len(bias), counts, 1.0)
    return [b + step * ((vote > 0) - (vote < 0)) for b, vote in zip(bias, votes, strict=True)]


def _centred(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    after = moved(bias, counts, step)
    return [b - sum(after) / len(after) for b in after]


def _first_of_each_end(bias: list[float], counts: list[list[int]], step: float) -> list[float]:
    """The biases after a step of one fullest and one emptiest expert alone."""
    tokens = [sum(column) for column in zip(*counts, strict=True)]
    after = list(bias)
    after[tokens.index(max(tokens))] -= step
    after[tokens.index(min(tokens))] += step
    return after


_SIGN = "((n < mean) - (n > mean))"
_MEAN = "sum(tokens) / len(tokens)"
_ONLY_SIGN = (
    "By `step`, up or down, however far the count is off: only the sign of the difference counts."
)
_NEAR = "However near the mean a count is: only one that has just the mean stays where it is."
_NOT_ROUNDED = "The mean need not be a whole number: divide with `/`, and do not round."
_NOT_ENDS_ALONE = (
    "Only the fullest and the emptiest move in your answer: compare every expert with the mean."
)
_ONE_EACH = (
    "One bias for each expert is asked for, in a list: the counts of all rows are added up for each"
    " expert."
)

_WRONG_MOVES = (
    (_moved_each_time,
     "It moves after every microbatch. Once a step, by the counts of all: routing must not change"
     " within a step."),
    (_majority,
     "Each row has a vote in your answer. Add up the counts of all rows, and compare once."),
    (lambda bias, counts, step: _moved_each_time(bias, counts, step / len(counts)),
     "Each row moves it in your answer, and that is averaged. Add up the counts of all rows, and "
     "compare once."),
    (lambda bias, counts, step: moved(bias, counts[-1:], step),
     "Only the last microbatch counts in your answer."),
    (lambda bias, counts, step: moved(bias, counts[:1], step),
     "Only the first microbatch counts in your answer."),
    (lambda bias, counts, step: moved(bias, [[*row] for row in {*map(tuple, counts)}], step),
     "Two rows may be equal, and a set keeps one of them: add up the counts of all rows."),
    (lambda bias, counts, step: moved(bias, counts, -step),
     "The wrong way: an expert with too many tokens must be chosen less."),
    ((_SIGN, "(mean - n)"), _ONLY_SIGN),
    ((_SIGN, "(n - mean)"),
     f"The wrong way: an expert with too many tokens must be chosen less. {_ONLY_SIGN}"),
    ((_SIGN, "(mean - n) / mean"), _ONLY_SIGN),
    ((_SIGN, "(1 - n / mean)"), _ONLY_SIGN),
    ((_SIGN, "(mean - n) / sum(tokens)"), _ONLY_SIGN),
    ((_SIGN, "(mean - n) / max(1, max(abs(mean - each) for each in tokens))"), _ONLY_SIGN),
    ((_SIGN, "(1 if n < mean else -1)"), "An expert that has just the mean stays where it is."),
    ((_SIGN, "(-1 if n > mean else 1)"), "An expert that has just the mean stays where it is."),
    ((_SIGN, "(n > 0) * ((n < mean) - (n > mean))"),
     "An expert that no token chose has fewer than the mean, too: it goes up."),
    ((_SIGN, "-(n > mean)"),
     "An expert with fewer tokens than the mean goes up; yours moves only the full ones."),
    ((_SIGN, "(n < mean)"),
     "An expert with more tokens than the mean goes down; yours moves only the empty ones."),
    ((_SIGN, "-(n == max(tokens))"),
     "Only the fullest one moves in your answer: every expert with more than the mean goes down,"
     " with fewer up."),
    ((_SIGN, "((n == min(tokens)) - (n == max(tokens)))"), _NOT_ENDS_ALONE),
    (_first_of_each_end, _NOT_ENDS_ALONE),
    ((_SIGN, "((n < mean) - (n >= max(tokens)))"),
     "Every expert with more than the mean goes down, not only the fullest."),
    ((_MEAN, "sorted(tokens)[len(tokens) // 2]"), "The mean is asked for, not the median."),
    ((_MEAN, "(sorted(tokens)[(len(tokens) - 1) // 2] + sorted(tokens)[len(tokens) // 2]) / 2"),
     "The mean is asked for, not the median."),
    ((_MEAN, "sum(tokens) // len(tokens)"), _NOT_ROUNDED),
    ((_MEAN, "round(sum(tokens) / len(tokens))"), _NOT_ROUNDED),
    ((_MEAN, "math.ceil(sum(tokens) / len(tokens))"), _NOT_ROUNDED),
    ((_SIGN, "((n - mean <= -1) - (n - mean >= 1))"), _NEAR),
    ((_SIGN, "((n - mean < -0.5) - (n - mean > 0.5))"), _NEAR),
    ((_SIGN, "((n - mean <= -0.5) - (n - mean >= 0.5))"), _NEAR),
    ((_SIGN, "((n < 0.99 * mean) - (n > 1.01 * mean))"), _NEAR),
    ((_SIGN, "((n < 0.9 * mean) - (n > 1.1 * mean))"), _NEAR),
    ((_SIGN, "((n < 0.95 * mean) - (n > 1.05 * mean))"), _NEAR),
    ((_SIGN, "(0 if math.isclose(n, mean, rel_tol=1e-3) else (n < mean) - (n > mean))"), _NEAR),
    ((_MEAN, "sum(tokens) / len(tokens) / len(counts)"),
     "The counts are of all rows, and the mean is of one: compare sums with the mean of the sums."),
    ((_MEAN, "sum(tokens) / len(counts)"),
     "The mean is over the experts, not over the rows: divide by the number of experts."),
    ((_MEAN, "sum(tokens) / max(1, sum(n > 0 for n in tokens))"),
     "The mean is over all experts, also those that no token chose: divide by the number of all."),
    ((_MEAN, "max(tokens)"), "Compare with the mean over the experts, not with the fullest one."),
    (("b + step * ", "step * "), "The bias is kept from step to step: add to it."),
    (("b + step * ", "b + "), "By `step`: multiply the sign by it."),
    (("b + step * ", "b + len(counts) * step * "), "By `step`, once, however many rows there are."),
    (("b + step * ", "b + b * step * "), "Add `step`; yours multiplies the bias."),
    (("b + step * ", "b + step / len(tokens) * "), "By `step`, and no part of it."),
    (lambda bias, counts, step: list(bias), "Nothing moves in your answer."),
    (_centred,
     "The biases need not sum to 0: leave them as they are after the move."),
)  # fmt: skip

_MOVES = [
    ([0.0, 0.0, 0.0, 0.0], [[8, 1, 2, 1], [2, 2, 7, 1]], 0.1),
    ([0.5, -0.25, 0.0], [[1, 5, 0], [5, 0, 1], [3, 1, 2]], 0.125),
    ([0.0, 1.0], [[4, 4]], 0.01),
    ([0.0, 0.0, 0.0], [[1, 2, 2]], 0.25),
    ([0.1, 0.2, 0.3, 0.4], [[0, 0, 12, 0], [3, 3, 3, 3]], 0.5),
    # Counts so near the mean that a tolerance, or a mean without its fraction, takes them for it.
    ([0.25, 0.0, -0.5, 0.125], [[500, 501, 500, 500], [500, 500, 500, 500]], 0.25),
    ([0.25, 0.0, -0.5, 0.125], [[500, 499, 500, 500], [500, 500, 500, 500]], 0.25),
    # The mean lies in the middle between two counts: rounding takes it for one of them, a tolerance
    # for both.
    ([0.0, 0.0], [[2, 3]], 0.125),
    # No token chose expert 2, and two rows are equal.
    ([0.0, 0.0, 0.0], [[0, 3, 0], [0, 3, 0], [6, 0, 0]], 0.25),
    # Two rows go up with expert 0, and one so far down that all together do.
    ([1.0, 2.0, 3.0], [[1, 2, 3], [2, 3, 4], [30, 9, 0]], 0.5),
]


def _read_numbers(value: Any, call: str) -> list[float]:
    entries = expect_list(value, call, remedy=_ONE_EACH)
    return [expect_number(each, f"{call}[{i}]") for i, each in enumerate(entries)]


def _why_moved(case: tuple[Any, ...], got: list[float], right: list[float]) -> str:
    bias, counts, step = case
    if len(got) != len(bias):
        return _ONE_EACH
    tokens = [sum(column) for column in zip(*counts, strict=True)]
    mean = sum(tokens) / len(tokens)
    e = next(e for e, pair in enumerate(zip(got, right, strict=True)) if not alike(*pair))
    by = got[e] - bias[e]
    about = f"Expert {e} has {tokens[e]} tokens in all rows together, and the mean is {mean:g}"
    causes = (
        (tokens[e] == mean, f"{about}: it stays where it is."),
        (close(by, 0) and tokens[e] > mean, f"{about}: it goes down by `step`."),
        (close(by, 0), f"{about}: it goes up by `step`."),
        (
            not close(abs(by), step),
            f"{about}: it moves by `step`, {step:g}, and yours by {by:.4g}.",
        ),
        (OTHERWISE, f"{about}: an expert with more goes down, one with fewer goes up."),
    )
    return why(causes)


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
    """The result of a mixture.

    Attributes:
        output: the value that it returned.
        gradients: the gradients by name, None for no gradient; empty if the output has none.
        calls: number of rows of each call, for each expert.
    """

    output: Any
    gradients: dict[str, Tensor | None]
    calls: list[list[int]]


class _Crowd(NamedTuple):
    """A size of the mixture.

    Attributes:
        n: the number of experts.
        k: the choices of each token.
        idle: the experts that no token chooses.
    """

    n: int
    k: int
    idle: tuple[int, ...] = ()

    def __str__(self) -> str:
        idle = " and ".join(map(str, self.idle))
        none = f", none for expert{'s' * (len(self.idle) > 1)} {idle}" if self.idle else ""
        return f"With {self.n} experts, k = {self.k} and {_TOKENS} tokens{none},"


_DIM = 3
_TOKENS = 40
_CROWDS = (
    _Crowd(4, 2),
    _Crowd(4, 2, idle=(3,)),
    _Crowd(4, 2, idle=(1,)),
    _Crowd(6, 1, idle=(4, 5)),
    _Crowd(3, 3),
    _Crowd(3, 1, idle=(0, 2)),
)


def _experts(n: int) -> list[nn.Module]:
    torch.manual_seed(n)
    return [nn.Sequential(nn.Linear(_DIM, 4), nn.Tanh(), nn.Linear(4, _DIM)) for _ in range(n)]


def _tokens(crowd: _Crowd) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their choices and weights; the last of the experts that are chosen gets most."""
    drawn = torch.Generator().manual_seed(7 * crowd.n + crowd.k)
    busy = torch.tensor([expert for expert in range(crowd.n) if expert not in crowd.idle])
    scores = torch.rand(_TOKENS, len(busy), generator=drawn)
    scores[: _TOKENS // 2, -1] += 1
    weights, places = scores.topk(crowd.k)
    x = torch.randn(_TOKENS, _DIM, generator=drawn)
    return x, busy[places], weights / weights.sum(-1, keepdim=True)


def _mixed(rank: int, fn: Callable[..., Any], crowd: _Crowd) -> _Mixed:
    experts = _experts(crowd.n)
    x, chosen, weights = _tokens(crowd)
    x.requires_grad_()
    weights.requires_grad_()
    calls: list[list[int]] = [[] for _ in experts]
    for expert, seen in zip(experts, calls, strict=True):
        expert.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args[0])))
    with unchanged(x=x, chosen=chosen, weights=weights):
        output = fn(x, experts, chosen, weights)
    if not isinstance(output, Tensor) or not output.requires_grad:
        return _Mixed(output.detach() if isinstance(output, Tensor) else output, {}, calls)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    named = {"x": x, "weights": weights}
    named |= {
        f"expert {i}'s {name}": p for i, e in enumerate(experts) for name, p in e.named_parameters()
    }
    return _Mixed(output.detach(), {name: each.grad for name, each in named.items()}, calls)


def _near(found: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal but for float32's rounding; ``found`` may have any dtype."""
    if found.shape != right.shape:
        return False
    return float((found.to(right.dtype) - right).abs().max()) <= 1e-4 * float(right.abs().max())


def _grade_mixture(answer: Answer) -> None:
    for crowd in _CROWDS:
        [found] = answer.on_ranks(1, _mixed, crowd)
        right = _mixed(0, mixture, crowd)
        output = _read_mixture(found.output, f"{answer.name}(…)")
        if not _near(output, right.output):
            cause = _why_output(output, right.output, crowd)
            raise Mistake(f"{crowd} the output is not the weighted sum.", cause)
        if not found.gradients:
            raise Mistake(
                f"{crowd} the output has no gradient.", "Leave out `detach`, `no_grad` and `.data`."
            )
        _judge_calls(crowd, found, right)
        for name, got in found.gradients.items():
            gradient = right.gradients[name]
            assert gradient is not None  # the solution's are all there
            if got is None:
                cause = _why_no_gradient(name, crowd)
                raise Mistake(f"{crowd} there is no gradient of {name} at all.", cause)
            if not _near(got, gradient):
                cause = "Part of it was computed from a detached tensor, or under `no_grad`."
                symptom = f"{crowd} the output is right, but the gradient of {name} is not."
                raise Mistake(symptom, cause)


def _why_no_gradient(name: str, crowd: _Crowd) -> str:
    if any(name.startswith(f"expert {i}'s") for i in crowd.idle):
        return (
            "It is called with no rows, and its result must be part of the output, as `cat` or "
            "`index_add` make it: then its gradient is zeros. If it is None, FSDP2 waits for it for"
            " ever."
        )
    return f"Something is detached from {name}."


def _read_mixture(value: Any, what: str) -> Tensor:
    output = expect_tensor(value, what)
    if tuple(output.shape) == (_TOKENS, _DIM):
        return output
    causes = (
        (output.dim() == 3, "Those are the rows of each choice: add up the k rows of each token."),
        (output.dim() == 2 and output.shape[0] % _TOKENS == 0,
         "Each token has k rows there: weigh them and add them up."),
        (output.dim() == 2 and output.shape[0] < _TOKENS,
         "Every token has a row, also one that was dropped."),
        (OTHERWISE, "The output is as large as x: (tokens, dim)."),
    )  # fmt: skip
    symptom = f"`{what}` has shape {tuple(output.shape)}, not {(_TOKENS, _DIM)}."
    raise Mistake(symptom, why(causes))


def _judge_calls(crowd: _Crowd, found: _Mixed, right: _Mixed) -> None:
    """Ask for one call of each expert, with the rows of the tokens that chose it and no others."""
    for i, (calls, wanted) in enumerate(zip(found.calls, right.calls, strict=True)):
        if calls == wanted:
            continue
        idle = (
            "An expert that no token chose must be called with no rows: then its gradient is zeros."
            " If it is None, FSDP2 or an exchange on another rank waits for it for ever."
        )
        causes = (
            (not calls and wanted == [0], idle),
            (not calls,
             "Call the module itself, `expert(rows)`: hooks run only then, and FSDP2 is made of "
             "them."),
            (len(calls) > 1 and sum(calls) == sum(wanted),
             "One call each, with all of its rows at once: small products leave a processor idle."),
            (wanted == [0],
             "No token chose it, so it is called with no rows: `x[:0]`, or what the sorting leaves "
             "it."),
            (calls == [_TOKENS],
             "It computes all tokens: give it those that chose it. That is what sparse means."),
            (OTHERWISE,
             "One call each, with the rows of the tokens that chose it: that is what sparse"
             " means."),
        )  # fmt: skip
        called = f"was called with {calls} rows, not with {wanted}" if calls else "was never called"
        raise Mistake(f"{crowd} expert {i} {called}.", why(causes))


_PUT_BACK = "torch.zeros_like(computed).index_copy(0, order, computed)"
_SORTED_WEIGHTS = " * weights.flatten()[order].view(len(x), k, 1)"
_NOT_BACK = (
    "The rows are not in the order of the tokens: row i of what was computed belongs at `order[i]`."
)
_WEIGHTED = " * weights[..., None]"
_DROPS = (
    "An expert takes {} rows and drops the rest, as over a capacity: let it have all of its rows."
)
_ALREADY = "The weights are used as they are: each token's sum to 1 already."
_NO_MEAN = (
    "Add the k rows of a token up, and do not divide by k: the weights make a mean of them already."
)

_WRONG_MIXTURES: tuple[tuple[Any, ...], ...] = (
    ((_PUT_BACK, "computed"), _NOT_BACK),
    ((_PUT_BACK, "computed[order]"), _NOT_BACK),
    ((_PUT_BACK, "computed[order.argsort().argsort()]"), _NOT_BACK),
    ((_PUT_BACK, "computed"), (_WEIGHTED, ""), f"{_NOT_BACK} And the weights are not in it."),
    ((_PUT_BACK, "computed"), (_WEIGHTED, _SORTED_WEIGHTS), _NOT_BACK),
    ((_WEIGHTED, ""), "The weights are not in it."),
    ((_WEIGHTED, " / k"), "The weights are not in it: the mean counts each choice alike."),
    ((_WEIGHTED, " * weights[..., None] / k"), _NO_MEAN),
    ((_WEIGHTED, " * weights.softmax(-1)[..., None]"), _ALREADY),
    ((_WEIGHTED, " * weights.square()[..., None]"), "The weights are in it twice."),
    ((_WEIGHTED, " * weights.flip(-1)[..., None]"),
     "Each weight belongs to its own choice: they have changed places."),
    ((_WEIGHTED, " * weights[:, :1, None]"),
     "Each choice has a weight of its own; yours has the first one's."),
    ((_WEIGHTED, _SORTED_WEIGHTS),
     "The rows are in the order of the tokens, and so are `weights`: do not sort them again."),
    (("0, order, computed)", "0, order, computed * weights.flatten()[:, None])"), (_WEIGHTED, ""),
     "There the rows are in the order of the experts: the weights need `order`, too,"
     " `weights.flatten()[order]`."),
    (("x[order // k]", "x[order % len(x)]"),
     "Pair i belongs to token `i // k`: each token has k pairs, one after another."),
    (("x[order // k]", "x.repeat(k, 1)[order]"),
     "Pair i belongs to token `i // k`: each token has k pairs, one after another,"
     " `repeat_interleave`."),
    ((".sum(1)", ".mean(1)"), _NO_MEAN),
    ((".sum(1)", "[:, 0]"), "Only each token's first choice counts in your answer."),
    ((".sum(1)", "[:, -1]"), "Only each token's last choice counts in your answer."),
    ((".sum(1)", ".amax(1)"), "Add the k rows of a token up."),
    (lambda x, experts, chosen, weights: mixture(x, experts, chosen[:, :1], weights[:, :1]),
     "Only each token's first choice counts in your answer."),
    (lambda x, experts, chosen, weights: mixture(x, experts, chosen[:, :1], weights[:, :1] ** 0),
     "Only each token's first choice counts in your answer, and its weight is not in it."),
    (lambda x, experts, chosen, weights: mixture(x, experts, chosen[:, :2], weights[:, :2]),
     "Only each token's first two choices count in your answer: `chosen` has k of them."),
    (lambda x, experts, chosen, w: mixture(x, experts, chosen, w * (chosen != len(experts) - 1)),
     "The rows of the last expert are missing in your answer."),
    (lambda x, experts, chosen, w: mixture(x, experts, chosen, w * (chosen == chosen.amax(1, True))),
     "Only the last expert of each token is in it: add, `+=` or `index_add`, where yours "
     "overwrites."),
    (lambda x, experts, chosen, weights: x + mixture(x, experts, chosen, weights),
     "x itself is not in the sum: the caller adds the residual."),
    (lambda x, experts, chosen, weights: mixture(x, experts[::-1], chosen, weights),
     "The rows went to other experts: `experts[e]` has those that chose e."),
    (lambda x, experts, chosen, w: mixture(x, _as_they_come(experts, chosen), chosen, w),
     "The rows went to other experts: an expert that nobody chose counts as one, too."),
)  # fmt: skip


def _as_they_come(experts: list[nn.Module], chosen: Tensor) -> list[nn.Module]:
    """The experts that get the rows if idle ones are not counted."""
    there = chosen.unique().tolist()
    return [experts[there.index(e)] if e in there else experts[e] for e in range(len(experts))]


def _over_capacity(
    x: Tensor, experts: list[nn.Module], chosen: Tensor, weights: Tensor, most: int
) -> Tensor:
    """The mixture whose experts take ``most`` rows each; the other rows are zeros."""
    pairs = chosen.flatten()
    place = torch.stack([(pairs[:i] == expert).sum() for i, expert in enumerate(pairs)])
    return mixture(x, experts, chosen, weights * (place < most).view_as(weights))


_SORTED_OVER_CAPACITY = (
    ("expert(rows) for", "torch.cat([expert(rows[:most]), rows[most:] * 0]) for"),
    (_PUT_BACK, "computed"),
    ("weights: Tensor)", "weights: Tensor, most: int)"),
)


@torch.no_grad()
def _why_output(got: Tensor, right: Tensor, crowd: _Crowd) -> str:
    x, chosen, weights = _tokens(crowd)
    given = x, _experts(crowd.n), chosen, weights
    for *change, cause in _WRONG_MIXTURES:
        wrong = change[0] if callable(change[0]) else flawed(mixture, *change)
        if _near(got, wrong(*given)):
            return str(cause)
    ill = flawed(mixture, *_SORTED_OVER_CAPACITY)
    for most in range(1, _TOKENS):
        if _near(got, _over_capacity(*given, most)):
            return _DROPS.format(most)
        if _near(got, ill(*given, most)):
            return f"It has two illnesses. {_NOT_BACK} {_DROPS.format(most)}"
    wrong_rows = ~torch.isclose(got.to(right.dtype), right, rtol=1e-4, atol=1e-5).all(1)
    ratio = float((got * right).sum() / right.square().sum())
    causes = (
        (bool((got[wrong_rows] == 0).all()),
         f"{int(wrong_rows.sum())} of {_TOKENS} rows are zeros: were they dropped?"),
        (_near(got, ratio * right), f"It is {ratio:.4g} times the right one: {_ALREADY}"),
        (_near(got.sum(0), right.sum(0)), _NOT_BACK),
        (not bool(wrong_rows.all()),
         f"{int(wrong_rows.sum())} of {_TOKENS} rows differ: are some dropped, as over a capacity, "
         "or not put back at their place?"),
        (OTHERWISE,
         "Sort (token, choice) pairs by expert, compute, put them back in the tokens' order, weigh,"
         " add up k rows each."),
    )  # fmt: skip
    return why(causes)


_GRADE_ROUTE = Formula(
    route, _ROUTES, _WRONG_ROUTES, _why_route, read=_read_route, same=_same_route
)
_GRADE_SPLITS = Formula(splits, _SPLITS, _WRONG_SPLITS, _why_splits, read=_read_splits)
_GRADE_BALANCE = Formula(balance, _BALANCES, _WRONG_BALANCES, _why_balance, read=_read_balance)
_GRADE_MOVED = Formula(moved, _MOVES, _WRONG_MOVES, _why_moved, read=_read_numbers)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(route, _GRADE_ROUTE, "12", "a token chooses", 1, 5, (
        "The experts with the k largest logits; `sorted(…, key=…)[:k]`.",
        "The softmax of all logits, divided by the chosen ones' sum, is the softmax of the chosen"
        " ones.",
        "Weight of an expert: `exp` of its logit, over the sum of `exp` over the chosen k.",
    )),
    Exercise(splits, _GRADE_SPLITS, "12", "who gets how many rows", 2, 7, (
        "With E experts on n ranks, rank r has those from r * E / n to (r + 1) * E / n, excluded.",
        "What it sends to rank s is its own row, summed over the experts of s.",
        "What it gets from rank s is row s, summed over its own experts.",
    )),
    Exercise(balance, _GRADE_BALANCE, "12", "a loss", 3, 9, (
        "Count the choices of each expert first: each token chooses the k with the largest scores.",
        "f has no gradient, because a count does not change a little. P is a mean: each score"
        " enters with 1/T.",
        "The gradient of scores[t][e] is N * f[e] / T, the same for all tokens.",
    )),
    Exercise(moved, _GRADE_MOVED, "12", "a bias", 1, 5, (
        "Add up the counts of all rows first.",
        "Compare each expert's tokens with the mean over the experts.",
        "Fewer than the mean: + step. More: - step. Just the mean: as it is.",
    )),
    Exercise(mixture, _grade_mixture, "12", "bug clinic", 3, 12, (
        "In which order are the rows when the experts have computed them, and in which do the"
        " tokens expect them?",
        "`order` says which (token, choice) pair each row is: row i of what was computed belongs at"
        " `order[i]`.",
        "Call every expert, also with no rows; cut nothing off; `out[order] = computed`, as"
        " `index_copy` does it.",
    )),
)  # fmt: skip
