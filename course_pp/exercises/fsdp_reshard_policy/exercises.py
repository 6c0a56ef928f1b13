"""Notebook 08: gathers by reshard policy, bytes of a rank, the crossover, HSDP, a clinic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.bench import TOLERANCE, Bench, ForwardWatch
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import expect_list, expect_number
from course_pp.exercises.formula import Formula
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import OTHERWISE, Mistake, why


def gathers(reshard: bool, m: int, groups: int, pipeline: bool) -> int:
    """All-gathers that a rank begins in one step of m microbatches."""
    per_group = 2 * m if reshard else m
    if pipeline:
        per_group = m + 1 if reshard else 1
    return groups * per_group


_WRONG_GATHERS = (
    (lambda again, m, groups, pp: groups * (2 * m if again else 1 if pp else m),
     "Under a pipeline a backward keeps what it gathered, so the next forward finds it: with True"
     " only what comes after a forward gathers."),
    (lambda again, m, groups, pp: groups * (m if again and pp else 2 * m if again else 1 if pp else m),
     "m forwards free the group m times, and each time it is gathered again. The very first gather"
     " comes on top."),
    (lambda again, m, groups, pp: groups * (m + 1 if again else 1),
     "`pipeline` makes no difference in your answer. In a loop of forward and backward, each"
     " backward frees."),
    (lambda again, m, groups, pp: groups * (2 * m if again else m),
     "`pipeline` makes no difference in your answer. In a pipeline nothing is freed by a backward"
     " before the last."),
    (lambda again, m, groups, pp: groups * ((m + 1 if again else 1) if pp else (2 * m if again else 1)),
     "False keeps what *forward* gathered. Without a pipeline backward frees it, and the next"
     " microbatch gathers."),
    (lambda again, m, groups, pp: groups * ((m + 1 if again else 1) if pp else (m + 1 if again else m)),
     "Without a pipeline every forward and every backward with True starts from shards: two gathers"
     " a microbatch."),
    (lambda again, m, groups, pp: gathers(again, m, 1, pp),
     "That is for one group. Every group is gathered by itself."),
    (lambda again, m, groups, pp: gathers(not again, m, groups, pp),
     "The policies have changed places: True frees after forward, and has to gather more often."),
    (lambda again, m, groups, pp: gathers(again, m, groups, not pp),
     "The two loops have changed places: it is the pipeline in which backward keeps what it"
     " gathered."),
)  # fmt: skip

_EITHER = (True, False)
_GATHERS = [
    (again, *size, pp)
    for size, again, pp in product(((8, 4), (1, 7), (3, 1), (5, 2)), _EITHER, _EITHER)
]
_GRADE_GATHERS = Formula(gathers, _GATHERS, _WRONG_GATHERS)


def rank_bytes(layers: int, layer: int, root: int, n: int, reshard: bool, pipeline: bool) -> float:
    """Most bytes of parameters, gradients and AdamW's moments on one of n ranks."""
    model = layers * layer + root
    shard = model / n
    if pipeline:
        # parameters and gradients are whole until the last microbatch
        return 3 * shard + model + model
    gathered = root + (min(2, layers) if reshard else layers) * layer
    return 4 * shard + gathered


_IN_PIPELINE = "3 * shard + model + model"
_LIKE_PLAIN = "root + (min(2, layers) if reshard else layers) * layer"

_WRONG_BYTES = (
    ((_IN_PIPELINE, f"3 * shard + model + {_LIKE_PLAIN}"),
     "Under a pipeline True does not lower the peak: what a backward gathers stays until the last"
     " microbatch."),
    ((_IN_PIPELINE, "4 * shard + model"),
     "Under a pipeline gradients are reduced once, after the last microbatch. Until then they are"
     " whole."),
    ((_IN_PIPELINE, "4 * shard + model"), ("min(2, layers)", "2"),
     "Under a pipeline gradients are whole until the last microbatch; and a model of one layer"
     " gathers one."),
    (("if pipeline", "if False"),
     "`pipeline` makes no difference in your answer: there all layers are gathered at the peak, and"
     " gradients are whole until the last microbatch."),
    (("min(2, layers)", "1"),
     "With True *two* layers are there in backward: one computes while the next is gathered."),
    (("min(2, layers)", "2"), "A model of one layer cannot have two of them gathered."),
    (("gathered = root + ", "gathered = "),
     "The root is gathered as well, and with it the embedding and the head."),
    (("min(2, layers) if reshard else layers", "layers"),
     "`reshard` makes no difference in your answer; without a pipeline it does."),
    (lambda layers, layer, root, n, again, pp: 4 * (layers * layer + root) / n,
     "Those are the shards, between steps. In a step, gathered parameters come on top."),
    (("3 * shard", "2 * shard"), ("4 * shard", "3 * shard"),
     "One kind of shard is missing: the parameters' own stay beside what is gathered, and AdamW has"
     " two moments."),
    (("3 * shard", "shard"), ("4 * shard", "2 * shard"),
     "The optimizer's state counts: AdamW keeps two moments for each parameter."),
)  # fmt: skip

_MODELS = ((6, 1000, 300, 4), (1, 512, 64, 2), (12, 4096, 0, 8), (2, 10, 4, 2), (5, 7, 3, 4))
_RANK_BYTES = [(*model, again, pp) for model, again, pp in product(_MODELS, _EITHER, _EITHER)]
_GRADE_RANK_BYTES = Formula(rank_bytes, _RANK_BYTES, _WRONG_BYTES)


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


_NEITHER = (
    "Under a pipeline True does not lower the peak: if everything gathered does not fit, neither"
    " policy does."
)

_WRONG_CHOICES = (
    (("False if fits else None", "not fits"), _NEITHER),
    (("False if fits else None", "False"),
     "Under a pipeline both policies keep all layers: do they fit?"),
    (("False if fits else None", "not fits if 2 * layer <= room else None"), _NEITHER),
    (lambda *sizes: not sizes[-1],
     "That is what \"auto\" does, which knows neither your memory nor your network. Here both are"
     " given."),
    (lambda room, layers, layer, forward, gather, pp: not pp and gather <= forward,
     "`room` makes no difference in your answer."),
    (("gather <= forward", "True"),
     "True is not always free: a gather that takes longer than what computes meanwhile is waited"
     " for."),
    (("gather <= forward", "False"),
     "If the gathers are hidden behind computing, both are equally fast, and True keeps less."),
    (("gather <= forward", "gather <= 2 * forward"),
     "In backward, which lasts 2 forwards, a layer is gathered *and* another's gradients are"
     " reduced: 2 gathers in 2 forwards."),
    (("gather <= forward", "gather < forward"),
     "Where a gather takes exactly as long as a forward it is just hidden: equally fast, and True"
     " keeps less."),
    (("min(2, layers)", "1"),
     "With True two layers are there in backward: one computes while the next is gathered."),
    (("min(2, layers)", "0"), "With True two layers have to fit; if they do not, answer None."),
)  # fmt: skip

_TIMES = ((4, 1), (4, 4), (4, 6), (4, 8), (4, 40))
_CHOICES = [
    (room, 8, 10, *times, pp)
    for room, times, pp in product((100, 80, 79, 20, 19, 9), _TIMES, _EITHER)
]
_CHOICES += [(room, 8, 1, 1, 1, False) for room in (8, 2, 1)]


def _read_choice(value: Any, call: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise Mistake(
            f"`{call}` is {value!r:.60}; True, False or None is asked for.", "Is it a comparison?"
        )
    return value


def _sizes_of_choice(case: tuple[Any, ...], got: Any, right: Any) -> str:
    room, layers, layer, forward, gather, _ = case
    sizes = f"room {room}, all layers {layers * layer}, two of them {2 * layer}"
    return f"{sizes}; a forward takes {forward}, a gather {gather}"


_GRADE_CHOOSE_RESHARD = Formula(
    choose_reshard, _CHOICES, _WRONG_CHOICES, read=_read_choice, example=_sizes_of_choice
)


def hsdp_bytes(model: float, replicate: int, shard: int, reshard: bool) -> tuple[float, float]:
    """Bytes that a rank sends over dp_shard and over dp_replicate in one step, with rings."""
    rounds = 3 if reshard else 2
    over_shard = rounds * model * (shard - 1) / shard
    over_replicate = 2 * (model / shard) * (replicate - 1) / replicate
    return over_shard, over_replicate


_ADDED_UP = "2 * (model / shard)"
_ROUNDS = "3 if reshard else 2"
_REDUCED = (
    "When replicas add up, the gradient is reduced and scattered already: each rank has a shard"
    " of it."
)

_WRONG_HSDP = (
    ((_ADDED_UP, "2 * model"), _REDUCED),
    ((_ADDED_UP, "model / shard"),
     "An all-reduce is a reduce-scatter and an all-gather: twice (n - 1)/n."),
    ((_ADDED_UP, "model"), _REDUCED),
    (("over_shard, over_replicate", "over_replicate, over_shard"),
     "The two have changed places: parameters are gathered over `dp_shard`, shards of gradients are"
     " added over `dp_replicate`."),
    ((_ROUNDS, "2 if reshard else 1"),
     "Over `dp_shard` the gradients pass, too: one reduce-scatter."),
    ((_ROUNDS, "3"), "`reshard` makes no difference in your answer; True gathers once more."),
    ((_ROUNDS, "2 if reshard else 3"), "The policies have changed places: True gathers once more."),
    ((" * (shard - 1) / shard", ""), (" * (replicate - 1) / replicate", ""),
     "A rank already has its own part: with a ring of n ranks it sends (n - 1)/n of the whole."),
    (("(shard - 1) / shard", "(replicate * shard - 1) / (replicate * shard)"),
     "A group is gathered from the ranks of `dp_shard` alone, not from all."),
    ((_ROUNDS, "4 if reshard else 3"), "A reduce-scatter is half an all-reduce: (n - 1)/n, once."),
)  # fmt: skip

_MESHES = ((1200, 2, 2), (4096, 1, 4), (960, 3, 8), (70, 4, 1), (1001, 3, 4))
_HSDP_BYTES = [(*mesh, again) for mesh, again in product(_MESHES, _EITHER)]


def _read_pair(value: Any, call: str) -> list[float]:
    return [
        expect_number(each, f"{call}[{i}]") for i, each in enumerate(expect_list(value, call, 2))
    ]


_GRADE_HSDP_BYTES = Formula(hsdp_bytes, _HSDP_BYTES, _WRONG_HSDP, read=_read_pair)


def accumulate_sharded(
    model: nn.Module,
    microbatches: list[torch.Tensor],
    targets: list[torch.Tensor],
    loss_fn: nn.Module,
) -> None:
    """Leave in .grad the gradient of the mean loss over all microbatches of all ranks."""
    m = len(microbatches)
    for i, (x, target) in enumerate(zip(microbatches, targets, strict=True)):
        model.set_requires_gradient_sync(i == m - 1)  # type: ignore[operator]
        (loss_fn(model(x), target) / m).backward()


_N_RANKS = 2
_ROWS_EACH = 3


def _one_layer(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


_BENCH = Bench(
    lambda step, seat: None, width=6, block=_one_layer, rows=_N_RANKS * _ROWS_EACH, n_blocks=3
)


class _Step(NamedTuple):
    """The result of one step of the answer on one rank.

    Attributes:
        gradients: {name of the parameter: whole gradient}.
        reductions: reduce-scatters that were begun; a right step has one for each block.
        most_rows: the most rows that one forward was given.
        most_kept: the most forwards whose activations were held at once.
    """

    gradients: dict[str, Tensor | None]
    reductions: int
    most_rows: int
    most_kept: int


def _grade_accumulate_sharded(answer: Answer) -> None:
    for m in (3, 1):
        where = f"With {m} microbatch{'es' * (m > 1)} on each of {_N_RANKS} ranks"
        first, second = answer.on_ranks(_N_RANKS, _stepped, m)[0]
        _judge_step(where, m, first)
        try:
            _judge_step(
                f"{where}, the first step is right. In the second, after `model.zero_grad()`,",
                m,
                second,
            )
        except Mistake as e:
            cause = (
                "The first step left something behind: look at what it tells the model, and what it"
                " keeps."
            )
            raise Mistake(e.symptom, cause, e.example) from None


def _stepped(rank: int, fn: Callable[..., Any], m: int) -> list[_Step]:
    """Return the first step of a new model, and a second one after its gradients are cleared."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from course_pp.parallel import CollectiveCounter

    mesh = init_device_mesh("cpu", (_N_RANKS,))
    model = _BENCH.model()
    kept = ForwardWatch()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.register_forward_pre_hook(lambda _, args: kept.begin_forward(len(args[0])))
    rows, aims = _BENCH.batch(m)
    microbatches = list(rows.chunk(_N_RANKS)[rank].chunk(m))
    targets = list(aims.chunk(_N_RANKS)[rank].chunk(m))
    steps = []
    for _ in range(2):
        model.zero_grad()
        given = unchanged(microbatches=microbatches, targets=targets)
        with given, kept.watching(), CollectiveCounter() as counter:
            fn(model, microbatches, targets, _BENCH.loss_fn)
        gradients: dict[str, Tensor | None] = dict.fromkeys(dict(model.named_parameters()))
        for name, p in model.named_parameters():
            if p.grad is not None:
                gradients[name] = p.grad.full_tensor().clone()  # type: ignore[attr-defined]
        reductions = counter.counts.total(collective="reduce_scatter").number
        steps.append(_Step(gradients, reductions, kept.most_rows, kept.most_forwards))
    return steps


def _judge_step(where: str, m: int, step: _Step) -> None:
    groups = _BENCH.n_blocks
    right = _BENCH.one_process(m)[1]
    missing = [name for name, gradient in step.gradients.items() if gradient is None]
    if missing:
        cause = (
            "Either no backward has run, or its gradients were never reduced, so that no shard of"
            " them is left: before the last microbatch's backward,"
            " `model.set_requires_gradient_sync(True)`."
        )
        if step.reductions:
            cause = (
                "Parameters are gathered still, and the gradient is the shards': let the last"
                " backward free them."
            )
        raise Mistake(f"{where} `{missing[0]}.grad` is None after the step.", cause)
    ratio = _common_ratio(step.gradients, right)
    if ratio is None:
        symptom = f"{where} the gradients differ from one process's, and by no single factor."
        raise Mistake(symptom, _why_no_factor(step, m))
    if abs(ratio - 1) > TOLERANCE:
        causes = [(abs(ratio - factor(m)) < TOLERANCE, cause) for factor, cause in _WRONG_FACTORS]
        raise Mistake(
            f"{where} the gradients are {ratio:.4g} times one process's.",
            why([*causes, (OTHERWISE, "Look where it is scaled.")]),
        )
    if step.reductions != groups:
        raise Mistake(
            f"{where} the gradients are right, but {step.reductions} reduce-scatters were begun for"
            f" {groups} groups.",
            "Each backward reduces, unless the model was told before that its gradients are not"
            " complete: `model.set_requires_gradient_sync(…)`.",
        )
    if m > 1 and step.most_rows > _ROWS_EACH:
        cause = "Give it one microbatch at a time: the whole batch at once is what does not fit."
        raise Mistake(
            f"{where} the gradients are right, but the model was given {step.most_rows} rows at"
            " once.",
            cause,
        )
    if step.most_kept > 1:
        raise Mistake(
            f"{where} the gradients are right, but the activations of {step.most_kept} microbatches"
            " were held at once.",
            "Call backward for each microbatch before the next forward, not once for the sum of all"
            " losses.",
        )


def _common_ratio(found: dict[str, Tensor | None], right: dict[str, Tensor]) -> float | None:
    """The factor between all gradients and the right ones, if it is one factor."""
    gradients = torch.cat([g.flatten() for name in sorted(right) if (g := found[name]) is not None])
    expected = torch.cat([right[name].flatten() for name in sorted(right)])
    factor = float((gradients * expected).sum() / expected.square().sum())
    away = float((gradients - factor * expected).abs().max())
    return factor if away <= TOLERANCE * float(expected.abs().max()) else None


def _why_no_factor(step: _Step, m: int) -> str:
    for name, index in (("first", 0), ("last", -1)):
        model = _BENCH.model()
        # The microbatch of every rank.
        x, target = (
            torch.cat([part.chunk(m)[index] for part in rows.chunk(_N_RANKS)])
            for rows in _BENCH.batch(m)
        )
        _BENCH.loss_fn(model(x), target).backward()
        part = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if m > 1 and _common_ratio(step.gradients, part) is not None:
            return (
                f"Only the {name} microbatch is in them. Gradients add up over microbatches unless"
                " they are cleared, and what `model.set_requires_gradient_sync(…)` says holds for"
                " the backwards after it."
            )
    if _BENCH.n_blocks < step.reductions < m * _BENCH.n_blocks:
        return (
            "Some backwards reduce and some do not: it is the last microbatch's, and no other, that"
            " has to."
        )
    if step.reductions > _BENCH.n_blocks and m > 1:
        return (
            "Gradients that are divided or cleared after one backward are divided again with, or"
            " lost for, the next."
        )
    return (
        "Every microbatch counts, with its own target and 1/m, and the gradients of all of them are"
        " reduced."
    )


# Where two factors are equal, as m and the number of ranks may be, the first row speaks.
_WRONG_FACTORS: tuple[tuple[Callable[[int], float], str], ...] = (
    (
        lambda m: 1 / (m * _N_RANKS),
        "Once 1/m is enough, and the mean over the ranks is FSDP's business.",
    ),
    (lambda m: 1 / m, "1/m enters twice."),
    (
        lambda m: m / _N_RANKS,
        "FSDP averages over ranks, not over microbatches: divide by m, and not by the number of"
        " ranks.",
    ),
    (lambda m: m, "1/m is missing: each microbatch adds the gradient of its own mean."),
    (lambda m: _N_RANKS, "The mean over the ranks is FSDP's business: leave it alone."),
    (
        lambda m: 1 / _N_RANKS,
        "FSDP averages over its ranks while it reduces. Dividing by their number is the second"
        " time.",
    ),
)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(gathers, _GRADE_GATHERS, "08", "gathers by policy", 2, 6, (
        "Count for one group: in which state does each action find it, and in which does it leave"
        " it?",
        "Without a pipeline a backward always frees the group. In a pipeline it does not.",
        "With True each of the m forwards frees. In the loop every forward and every backward"
        " gathers, 2m; in the pipeline the first forward, and whatever comes after a forward, m +"
        " 1.",
    )),
    Exercise(rank_bytes, _GRADE_RANK_BYTES, "08", "bytes a rank keeps", 2, 7, (
        "Parameters and two moments are shards, P/n each. What is whole at the peak comes on top.",
        "Without a pipeline: gradients are shards; gathered are the root and two layers with True,"
        " all with False.",
        "Under a pipeline: 3P/n of shards, P of gathered parameters, P of whole gradients, whatever"
        " the policy.",
    )),
    Exercise(choose_reshard, _GRADE_CHOOSE_RESHARD, "08", "memory and bandwidth are given", 3, 8, (
        "Decide first what fits. False keeps all layers. What does True keep, without a pipeline"
        " and with one?",
        "True is as fast as False if the gathers are hidden: a gather behind a forward, and in"
        " backward a gather and a reduction behind two forwards.",
        "Pipeline: False if layers * layer fits, else None. Otherwise: False if it fits and gather"
        " > forward; else True if 2 * layer fits; else None.",
    )),
    Exercise(hsdp_bytes, _GRADE_HSDP_BYTES, "08", "what HSDP sends where", 2, 5, (
        "Over `dp_shard`: how often is the model gathered with each policy, and how often are"
        " gradients reduced?",
        "All-gather and reduce-scatter send (n - 1)/n of the whole each, an all-reduce twice as"
        " much.",
        "What is all-reduced over `dp_replicate` is model / shard bytes.",
    )),
    Exercise(accumulate_sharded, _grade_accumulate_sharded, "08", "bug clinic", 3, 8, (
        "Who has taken the mean over the ranks when backward returns? And how often was it taken?",
        "FSDP averages gradients over its ranks. Reductions wait if the model was told so before"
        " the backward: `model.set_requires_gradient_sync(False)`.",
        "Before the forward of microbatch i: `model.set_requires_gradient_sync(i == m - 1)`. Drop"
        " the division.",
    ), limit_s=20.0),
)  # fmt: skip
