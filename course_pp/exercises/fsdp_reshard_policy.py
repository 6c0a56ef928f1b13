"""Exercises of notebook 08: gathers by reshard policy, bytes a rank keeps, the crossover, HSDP, and a bug clinic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.exercise import Exercise, Mistake
from course_pp.exercises.expect import close, expect_list, expect_number
from course_pp.exercises.fsdp_clinic import accumulate_sharded, grade_accumulate_sharded

__all__ = ["EXERCISES"]

_Formula = Callable[..., Any]
_Wrong = Sequence[tuple[_Formula, str]]


def gathers(reshard: bool, m: int, groups: int, pipeline: bool) -> int:
    """All-gathers that a rank begins in one step of m microbatches."""
    per_group = 2 * m if reshard else m
    if pipeline:
        per_group = m + 1 if reshard else 1
    return groups * per_group


_WRONG_GATHERS: _Wrong = (
    (lambda again, m, groups, pp: groups * (2 * m if again else 1 if pp else m),
     "Under a pipeline a backward keeps what it gathered, so the next forward finds it: with True only what comes "
     "after a forward gathers."),
    (lambda again, m, groups, pp: groups * (m if again and pp else 2 * m if again else 1 if pp else m),
     "m forwards free the group m times, and each time it is gathered again. The very first gather comes on top."),
    (lambda again, m, groups, pp: groups * (m + 1 if again else 1),
     "`pipeline` makes no difference in your answer. In a loop of forward and backward, each backward frees."),
    (lambda again, m, groups, pp: groups * (2 * m if again else m),
     "`pipeline` makes no difference in your answer. In a pipeline nothing is freed by a backward before the last."),
    (lambda again, m, groups, pp: groups * ((m + 1 if again else 1) if pp else (2 * m if again else 1)),
     "False keeps what *forward* gathered. Without a pipeline backward frees it, and the next microbatch gathers."),
    (lambda again, m, groups, pp: groups * ((m + 1 if again else 1) if pp else (m + 1 if again else m)),
     "Without a pipeline every forward and every backward with True starts from shards: two gathers a microbatch."),
    (lambda again, m, groups, pp: (m + 1 if again else 1) if pp else (2 * m if again else m),
     "That is for one group. Every group is gathered by itself."),
    (lambda again, m, groups, pp: groups * ((1 if again else m + 1) if pp else (m if again else 2 * m)),
     "The policies have changed places: True frees after forward, and has to gather more often."),
    (lambda again, m, groups, pp: groups * ((2 * m if again else m) if pp else (m + 1 if again else 1)),
     "The two loops have changed places: it is the pipeline in which backward keeps what it gathered."),
)  # fmt: skip


def _grade_gathers(answer: Answer) -> None:
    sizes = [(8, 4), (1, 7), (3, 1), (5, 2)]
    cases = [(again, m, groups, pp) for m, groups in sizes for again in (True, False) for pp in (True, False)]
    _match(answer, cases, gathers, _WRONG_GATHERS)


def rank_bytes(layers: int, layer: int, root: int, n: int, reshard: bool, pipeline: bool) -> float:
    """Most bytes of parameters, gradients and AdamW's moments on one of n ranks."""
    model = layers * layer + root
    shard = model / n
    if pipeline:
        return 3 * shard + model + model  # parameters and gradients are whole until the last microbatch
    gathered = root + (min(2, layers) if reshard else layers) * layer
    return 4 * shard + gathered


def _bytes_with(
    shards: float = 3,
    plain: _Formula = lambda layers, layer, root, again: root + (min(2, layers) if again else layers) * layer,
    pipelined: _Formula = lambda layers, layer, root, again: root + layers * layer,
    whole_gradients: _Formula = lambda pp: pp,
) -> _Formula:
    """``rank_bytes``, but for what is given."""

    def formula(layers: int, layer: int, root: int, n: int, again: bool, pp: bool) -> float:
        model = layers * layer + root
        gathered = (pipelined if pp else plain)(layers, layer, root, again)
        return float(shards * model / n + gathered + (model if whole_gradients(pp) else model / n))

    return formula


def _two_layers(layers: int, layer: int, root: int, again: bool) -> int:
    return root + (min(2, layers) if again else layers) * layer


_WRONG_BYTES: _Wrong = (
    (_bytes_with(pipelined=_two_layers),
     "Under a pipeline True does not lower the peak: what a backward gathers stays until the last microbatch."),
    (_bytes_with(whole_gradients=lambda pp: False),
     "Under a pipeline gradients are reduced once, after the last microbatch. Until then they are whole."),
    (_bytes_with(plain=lambda layers, layer, root, again: root + (2 if again else layers) * layer,
                 whole_gradients=lambda pp: False),
     "Under a pipeline gradients are whole until the last microbatch; and a model of one layer gathers one."),
    (_bytes_with(pipelined=_two_layers, whole_gradients=lambda pp: False),
     "`pipeline` makes no difference in your answer: there all layers are gathered at the peak, and gradients are "
     "whole until the last microbatch."),
    (_bytes_with(plain=lambda layers, layer, root, again: root + (1 if again else layers) * layer),
     "With True *two* layers are there in backward: one computes while the next is gathered."),
    (_bytes_with(plain=lambda layers, layer, root, again: root + (2 if again else layers) * layer),
     "A model of one layer cannot have two of them gathered."),
    (_bytes_with(plain=lambda layers, layer, root, again: (min(2, layers) if again else layers) * layer),
     "The root is gathered as well, and with it the embedding and the head."),
    (_bytes_with(plain=lambda layers, layer, root, again: root + layers * layer),
     "`reshard` makes no difference in your answer; without a pipeline it does."),
    (_bytes_with(plain=lambda *_: 0, pipelined=lambda *_: 0, whole_gradients=lambda pp: False),
     "Those are the shards, between steps. In a step, gathered parameters come on top."),
    (_bytes_with(shards=2),
     "One kind of shard is missing: the parameters' own stay beside what is gathered, and AdamW has two moments."),
    (_bytes_with(shards=1), "The optimizer's state counts: AdamW keeps two moments for each parameter."),
)  # fmt: skip


def _grade_rank_bytes(answer: Answer) -> None:
    sizes = [(6, 1000, 300, 4), (1, 512, 64, 2), (12, 4096, 0, 8), (2, 10, 4, 2), (5, 7, 3, 4)]
    cases = [(*size, again, pp) for size in sizes for again in (True, False) for pp in (False, True)]
    _match(answer, cases, rank_bytes, _WRONG_BYTES)


def choose_reshard(
    room: float, layers: int, layer: float, forward: float, gather: float, pipeline: bool
) -> bool | None:
    """The faster policy that fits; if equally fast, the one that keeps less; None if neither fits."""
    fits = layers * layer <= room
    if pipeline:
        return False if fits else None
    hidden = gather <= forward
    if fits and not hidden:
        return False
    return True if min(2, layers) * layer <= room else None


def _choice(
    hidden: Callable[[float, float], bool] = lambda forward, gather: gather <= forward,
    least: float = 2,
    pipelined: _Formula = lambda room, all_layers, layer: False if all_layers <= room else None,
    looks_at_room: bool = True,
) -> _Formula:
    """``choose_reshard``, but for what is given."""

    def formula(room: float, layers: int, layer: float, forward: float, gather: float, pp: bool) -> bool | None:
        if not looks_at_room:
            return not pp and hidden(forward, gather)
        if pp:
            return pipelined(room, layers * layer, layer)
        if layers * layer <= room and not hidden(forward, gather):
            return False
        return True if least * layer <= room else None

    return formula


_WRONG_CHOICES: _Wrong = (
    (_choice(pipelined=lambda room, all_layers, layer: all_layers > room),
     "Under a pipeline True does not lower the peak: if everything gathered does not fit, neither policy does."),
    (_choice(pipelined=lambda room, all_layers, layer: False),
     "Under a pipeline both policies keep all layers: do they fit?"),
    (_choice(pipelined=lambda room, all_layers, layer: False if all_layers <= room else True if 2 * layer <= room
             else None),
     "Under a pipeline True does not lower the peak: if everything gathered does not fit, neither policy does."),
    (lambda room, layers, layer, forward, gather, pp: not pp,
     "That is what \"auto\" does, which knows neither your memory nor your network. Here both are given."),
    (_choice(looks_at_room=False), "`room` makes no difference in your answer."),
    (_choice(hidden=lambda forward, gather: True),
     "True is not always free: a gather that takes longer than what computes meanwhile is waited for."),
    (_choice(hidden=lambda forward, gather: False),
     "If the gathers are hidden behind computing, both are equally fast, and True keeps less."),
    (_choice(hidden=lambda forward, gather: gather <= 2 * forward),
     "In backward, which lasts 2 forwards, a layer is gathered *and* another's gradients are reduced: 2 gathers in 2 "
     "forwards."),
    (_choice(hidden=lambda forward, gather: gather < forward),
     "Where a gather takes exactly as long as a forward it is just hidden: equally fast, and True keeps less."),
    (_choice(least=1), "With True two layers are there in backward: one computes while the next is gathered."),
    (_choice(least=0), "With True two layers have to fit; if they do not, answer None."),
)  # fmt: skip


def _grade_choose_reshard(answer: Answer) -> None:
    cases = [
        (room, 8, 10, forward, gather, pp)
        for room in (100, 80, 79, 20, 19, 9)
        for forward, gather in ((4, 1), (4, 4), (4, 6), (4, 8), (4, 40))
        for pp in (False, True)
    ]
    cases += [(room, 8, 1, 1, 1, False) for room in (8, 2, 1)]
    answers = answer.calls(cases)
    for case, got in zip(cases, answers, strict=True):
        if got is not None and not isinstance(got, bool):
            call = written_call(answer.name, *case)
            raise Mistake(f"`{call}` is {got!r:.60}; True, False or None is asked for.", "Is it a comparison?")
    if answers == [choose_reshard(*case) for case in cases]:
        return
    causes = [cause for formula, cause in _WRONG_CHOICES if answers == [formula(*case) for case in cases]]
    case, got = next((case, got) for case, got in zip(cases, answers, strict=True) if got is not choose_reshard(*case))
    symptom = f"`{written_call(answer.name, *case)}` gave {got}, which should be {choose_reshard(*case)}."
    room, layers, layer, forward, gather, _ = case
    sizes = f"room {room}, all layers {layers * layer}, two of them {2 * layer}"
    example = f"{sizes}; a forward takes {forward}, a gather {gather}"
    raise Mistake(symptom, causes[0] if causes else "", example)


def hsdp_bytes(model: float, replicate: int, shard: int, reshard: bool) -> tuple[float, float]:
    """Bytes that a rank sends over dp_shard and over dp_replicate in one step, with rings."""
    rounds = 3 if reshard else 2
    over_shard = rounds * model * (shard - 1) / shard
    over_replicate = 2 * (model / shard) * (replicate - 1) / replicate
    return over_shard, over_replicate


def _ring(n: int) -> float:
    return (n - 1) / n


_WRONG_HSDP: _Wrong = (
    (lambda b, r, s, again: ((3 if again else 2) * b * _ring(s), 2 * b * _ring(r)),
     "When replicas add up, the gradient is reduced and scattered already: each rank has a shard of it."),
    (lambda b, r, s, again: ((3 if again else 2) * b * _ring(s), b / s * _ring(r)),
     "An all-reduce is a reduce-scatter and an all-gather: twice (n - 1)/n."),
    (lambda b, r, s, again: ((3 if again else 2) * b * _ring(s), b * _ring(r)),
     "When replicas add up, the gradient is reduced and scattered already: each rank has a shard of it."),
    (lambda b, r, s, again: (2 * b / s * _ring(r), (3 if again else 2) * b * _ring(s)),
     "The two have changed places: parameters are gathered over `dp_shard`, shards of gradients are added over "
     "`dp_replicate`."),
    (lambda b, r, s, again: ((2 if again else 1) * b * _ring(s), 2 * b / s * _ring(r)),
     "Over `dp_shard` the gradients pass, too: one reduce-scatter."),
    (lambda b, r, s, again: (3 * b * _ring(s), 2 * b / s * _ring(r)),
     "`reshard` makes no difference in your answer; True gathers once more."),
    (lambda b, r, s, again: ((2 if again else 3) * b * _ring(s), 2 * b / s * _ring(r)),
     "The policies have changed places: True gathers once more."),
    (lambda b, r, s, again: ((3 if again else 2) * b, 2 * b / s),
     "A rank already has its own part: with a ring of n ranks it sends (n - 1)/n of the whole."),
    (lambda b, r, s, again: ((3 if again else 2) * b * _ring(r * s), 2 * b / s * _ring(r)),
     "A group is gathered from the ranks of `dp_shard` alone, not from all."),
    (lambda b, r, s, again: ((4 if again else 3) * b * _ring(s), 2 * b / s * _ring(r)),
     "A reduce-scatter is half an all-reduce: (n - 1)/n, once."),
)  # fmt: skip


def _grade_hsdp_bytes(answer: Answer) -> None:
    cases = [(b, r, s, again) for b, r, s in ((1200, 2, 2), (4096, 1, 4), (960, 3, 8), (70, 4, 1), (1001, 3, 4))
             for again in (True, False)]  # fmt: skip
    _match(answer, cases, hsdp_bytes, _WRONG_HSDP)


def _match(answer: Answer, cases: Sequence[tuple[Any, ...]], right: _Formula, wrong: _Wrong) -> None:
    """Compare numbers, or tuples of numbers; what equals one of ``wrong`` in every case is told why it is wrong."""
    found = [
        _numbers(got, written_call(answer.name, *case), len(_tuple(right(*case))))
        for case, got in zip(cases, answer.calls(cases), strict=True)
    ]

    def first_difference(formula: _Formula) -> int | None:
        for i, (case, got) in enumerate(zip(cases, found, strict=True)):
            if not all(close(a, b) for a, b in zip(got, _tuple(formula(*case)), strict=True)):
                return i
        return None

    if (index := first_difference(right)) is None:
        return
    causes = [cause for formula, cause in wrong if first_difference(formula) is None]
    case = cases[index]
    symptom = f"`{written_call(answer.name, *case)}` gave {_told(found[index])}, which should be"
    raise Mistake(f"{symptom} {_told(_tuple(right(*case)))}.", causes[0] if causes else "")


def _numbers(value: Any, call: str, length: int) -> tuple[float, ...]:
    if length == 1:
        return (expect_number(value, call),)
    return tuple(expect_number(each, f"{call}[{i}]") for i, each in enumerate(expect_list(value, call, length)))


def _tuple(value: Any) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _told(numbers: tuple[float, ...]) -> str:
    return " and ".join(f"{number:.12g}" for number in numbers)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "gathers", "08", "gathers by policy", 2, 6,
        (
            "Count for one group: in which state does each action find it, and in which does it leave it?",
            "Without a pipeline a backward always frees the group. In a pipeline it does not.",
            "With True each of the m forwards frees. In the loop every forward and every backward gathers, 2m; in the "
            "pipeline the first forward, and whatever comes after a forward, m + 1.",
        ),
        gathers, _grade_gathers,
    ),
    Exercise(
        "rank_bytes", "08", "bytes a rank keeps", 2, 7,
        (
            "Parameters and two moments are shards, P/n each. What is whole at the peak comes on top.",
            "Without a pipeline: gradients are shards; gathered are the root and two layers with True, all with False.",
            "Under a pipeline: 3P/n of shards, P of gathered parameters, P of whole gradients, whatever the policy.",
        ),
        rank_bytes, _grade_rank_bytes,
    ),
    Exercise(
        "choose_reshard", "08", "memory and bandwidth are given", 3, 8,
        (
            "Decide first what fits. False keeps all layers. What does True keep, without a pipeline and with one?",
            "True is as fast as False if the gathers are hidden: a gather behind a forward, and in backward a gather "
            "and a reduction behind two forwards.",
            "Pipeline: False if layers * layer fits, else None. Otherwise: False if it fits and gather > forward; else "
            "True if 2 * layer fits; else None.",
        ),
        choose_reshard, _grade_choose_reshard,
    ),
    Exercise(
        "hsdp_bytes", "08", "what HSDP sends where", 2, 5,
        (
            "Over `dp_shard`: how often is the model gathered with each policy, and how often are gradients reduced?",
            "All-gather and reduce-scatter send (n - 1)/n of the whole each, an all-reduce twice as much.",
            "What is all-reduced over `dp_replicate` is model / shard bytes.",
        ),
        hsdp_bytes, _grade_hsdp_bytes,
    ),
    Exercise(
        "accumulate_sharded", "08", "bug clinic", 3, 8,
        (
            "Who has taken the mean over the ranks when backward returns? And how often was it taken?",
            "FSDP averages gradients over its ranks. Reductions wait if the model was told so before the backward: "
            "`model.set_requires_gradient_sync(False)`.",
            "Before the forward of microbatch i: `model.set_requires_gradient_sync(i == m - 1)`. Drop the division.",
        ),
        accumulate_sharded, grade_accumulate_sharded, limit_s=20.0,
    ),
)  # fmt: skip
