"""Exercises of notebook 07: a layer cut in two ways, its backward, its bytes, the mesh, and one norm of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise, Mistake
from course_pp.exercises.expect import close, expect_int, expect_list, expect_number, expect_tensor
from course_pp.exercises.tp_pp_clinic import grade_whole_norm, whole_norm
from course_pp.exercises.traffic import watched_traffic

__all__ = ["EXERCISES"]


def shard_linear(
    weight: torch.Tensor, bias: torch.Tensor, how: str, rank: int, n: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's (weight, bias) of a linear layer cut into n by "column" or by "row"."""
    if how == "column":
        return weight.chunk(n, dim=0)[rank], bias.chunk(n)[rank]
    return weight.chunk(n, dim=1)[rank], bias if rank == 0 else None


def _grade_shard_linear(answer: Answer) -> None:
    sizes = ((6, 4, 2), (4, 6, 2), (9, 6, 3), (4, 4, 4), (3, 5, 1))
    cuts = [(how, *size) for how in ("column", "row") for size in sizes]
    rows = [(*_linear(n_out, n_in)[:2], how, rank, n) for how, n_out, n_in, n in cuts for rank in range(n)]
    values = iter(answer.calls(rows))
    for how, n_out, n_in, n in cuts:
        what = f'shard_linear(weight, bias, "{how}", rank, {n})'
        given = f"With a weight of {n_out} × {n_in}, cut by {how} over {n} rank{'s' * (n > 1)},"
        shards = [_read_shard(next(values), what) for _ in range(n)]
        _judge_shapes(shards, how, (n_out, n_in), n, given)
        _judge_product(shards, how, _linear(n_out, n_in), given)


def _linear(n_out: int, n_in: int) -> tuple[Tensor, Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(n_out)
    weight, bias, x = (torch.randint(-9, 10, shape, generator=seeded) for shape in ((n_out, n_in), (n_out,), (3, n_in)))
    return weight.double(), bias.double() + 0.5, x.double()


def _read_shard(value: Any, what: str) -> tuple[Tensor, Tensor | None]:
    weight, bias = expect_list(value, what, 2)
    if isinstance(bias, Tensor) and bias.dim() == 2:
        raise Mistake(f"`{what}[1]` is a matrix; a bias has one number for each output.", "The weight comes first.")
    return expect_tensor(weight, f"{what}[0]"), None if bias is None else expect_tensor(bias, f"{what}[1]")


def _judge_shapes(
    shards: Sequence[tuple[Tensor, Tensor | None]], how: str, size: tuple[int, int], n: int, given: str
) -> None:
    n_out, n_in = size
    by_column, by_row = (n_out // n, n_in), (n_out, n_in // n)
    want, other = (by_column, by_row) if how == "column" else (by_row, by_column)
    for rank, (weight, bias) in enumerate(shards):
        shape, cause = tuple(weight.shape), ""
        if shape != want:
            if shape == other:
                cause = (
                    "That is the other cut. PyTorch keeps a weight as (outputs, inputs) and computes x Wᵀ: the columns "
                    "of the matrix on paper are the rows of `weight`."
                )
            elif shape == (n_out, n_in):
                cause = "It is whole: each rank keeps one of n parts."
            raise Mistake(f"{given} rank {rank} has a weight of {_spelled(shape)}, not {_spelled(want)}.", cause)
        if bias is not None and tuple(bias.shape) != want[:1]:
            cause = (
                "A bias has one number for each output, and this rank makes only some of the outputs: cut it alike."
                if how == "column"
                else "Every rank makes all outputs, each a part of a sum: the bias has to stay as long as these."
            )
            raise Mistake(f"{given} rank {rank} makes {want[0]} outputs and has {tuple(bias.shape)} biases.", cause)


def _judge_product(
    shards: Sequence[tuple[Tensor, Tensor | None]], how: str, data: tuple[Tensor, Tensor, Tensor], given: str
) -> None:
    weight, bias, x = data
    n, whole = len(shards), linear(x, weight, bias)
    inputs = [x] * n if how == "column" else list(x.chunk(n, dim=-1))
    parts = [linear(part, *shard) for part, shard in zip(inputs, shards, strict=True)]
    found = torch.cat(parts, dim=-1) if how == "column" else torch.stack(parts).sum(0)
    if torch.allclose(found, whole):
        return
    joined = "side by side" if how == "column" else "added up"
    symptom = f"{given} the ranks' outputs, {joined}, are not those of the whole layer."
    row = int((found - whole).abs().sum(-1).argmax())
    example = f"row {row}: whole {_numbers(whole[row])}, yours {_numbers(found[row])}"
    raise Mistake(symptom, _why_no_product(shards, how, (weight, bias, x), found), example)


def _why_no_product(
    shards: Sequence[tuple[Tensor, Tensor | None]], how: str, data: tuple[Tensor, Tensor, Tensor], found: Tensor
) -> str:
    weight, bias, x = data
    n, whole = len(shards), linear(x, weight, bias)
    if n > 1 and all(torch.equal(shard[0], shards[0][0]) for shard in shards):
        return "Every rank has the same part: use `rank`."
    n_biased = sum(shard[1] is not None for shard in shards)
    if how == "row" and n_biased > 1 and torch.allclose(found, whole + (n_biased - 1) * bias):
        who = "Every rank adds" if n_biased == n else f"{n_biased} ranks add"
        return f"{who} the whole bias, and the sum has it {n_biased} times: it must enter once."
    if torch.allclose(found, whole - bias):
        return "No rank has the bias; it must enter once."
    if how == "column" and torch.allclose(found.sort(-1).values, whole.sort(-1).values):
        return "The outputs are all there, in another order: each rank takes consecutive ones, rank 0 the first."
    if how == "row" and torch.allclose(
        torch.cat([shard[0] for shard in shards], dim=1).sort().values, weight.sort()[0]
    ):
        return "All of the weight is there, but not where x is: rank r gets the r-th of n consecutive parts of x."
    return ""


def _spelled(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _numbers(row: Tensor) -> str:
    return ", ".join(f"{number:g}" for number in row.tolist())


def enter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole input of a block: as it is in forward; in backward its gradients are summed over the group."""

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    here = x.view_as(x)
    here.register_hook(summed)
    return here


class _Entered(NamedTuple):
    """What ``enter`` did on one rank.

    Attributes:
        same: whether forward gave x.
        summed: whether forward gave the sum over the group.
        collectives: those of forward.
        gradient: of x, which the block and a branch beside it have used; None if there is none.
        spoiled: whether the tensor given to backward was overwritten.
    """

    same: bool
    summed: bool
    collectives: list[str]
    gradient: Tensor | None
    spoiled: bool


_N_RANKS, _TP = 4, 2


def _grade_enter(answer: Answer) -> None:
    ranks = answer.on_ranks(_N_RANKS, _enter_on_rank)
    for result in ranks:
        if result.summed:
            raise Mistake(
                "In forward the ranks' inputs come out added up.",
                "They all hold the same x: the sum belongs in backward. A sum in forward is what `Leave` is for.",
            )
        if not result.same:
            raise Mistake("`enter(x, group)` is not equal to x.", "Forward changes nothing.")
        if result.collectives:
            cause = "Forward needs no message: every rank has x already."
            raise Mistake(f"Forward begins {', '.join(result.collectives)}.", cause)
    for rank, result in enumerate(ranks):
        _judge_gradient(rank, result)


def _judge_gradient(rank: int, result: _Entered) -> None:
    inside, beside = [_gradient_inside(r) for r in range(_N_RANKS)], _gradient_beside()
    first = rank - rank % _TP
    total = torch.stack(inside[first : first + _TP]).sum(0)
    if result.gradient is None:
        cause = "`detach`, `torch.no_grad` or a new tensor cuts x off from what the block made of it."
        raise Mistake("After backward x has no gradient.", cause)
    known = (
        (inside[rank] + beside, "Each rank has only the gradient of its own part of the block: nothing is added up."),
        (total / _TP + beside, "The gradients are averaged. Each is a part of the sum over the block's outputs: add."),
        (
            total + _TP * beside,
            "A hook on x itself also sees the gradient of whatever else uses x, here the branch beside the block, "
            "which every rank has whole: put it on a view of x.",
        ),
        (_TP * total + beside, "The gradients are added up twice."),
        (torch.stack(inside).sum(0) + beside, "The sum is over all ranks: pass `group`."),
        (beside, "Nothing comes back from the block: backward has to return the sum."),
    )
    if not torch.allclose(result.gradient, total + beside):
        cause = next((why for wrong, why in known if torch.allclose(result.gradient, wrong)), "")
        share = result.gradient - beside
        yours, away = (float(part.norm() / total.norm()) for part in (share, share - total))
        example = f"norms over that of the right gradient from the block: yours {yours:.3f}, the difference {away:.3f}"
        raise Mistake("The gradient of x is wrong.", cause, example)
    if result.spoiled:
        raise Mistake(
            "The sum is right, but it is written into the tensor that backward was given.",
            "Autograd may have given the same tensor to another branch, such as the residual: sum a clone.",
        )


def _enter_on_rank(rank: int, fn: Callable[..., Any]) -> _Entered:
    groups = [dist.new_group(list(range(first, first + _TP))) for first in range(0, _N_RANKS, _TP)]
    group, x = groups[rank // _TP], _shared_input().requires_grad_()
    with watched_traffic() as traffic:
        here = fn(x, group)
    expect_tensor(here, "enter(x, group)", tuple(x.shape))
    if not here.requires_grad:
        return _Entered(torch.equal(here, x), False, traffic.collectives, None, False)
    ((here * _gradient_inside(rank)).sum() + (x * _gradient_beside()).sum()).backward()
    same, summed = torch.equal(here, x), bool(traffic.collectives) and torch.allclose(here, _TP * x)
    given = torch.ones_like(x)
    again = x.detach().requires_grad_()
    fn(again, group).backward(given)
    return _Entered(same, summed, traffic.collectives, x.grad, not torch.equal(given, torch.ones_like(x)))


def _shared_input() -> Tensor:
    return torch.arange(1, 13, dtype=torch.float64).reshape(3, 4)


def _gradient_inside(rank: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def _gradient_beside() -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(99))


def sent_bytes(n_layers: int, activation: int, m: int, tp: int) -> tuple[float, float]:
    """Bytes that a rank of a middle stage sends in one step: (tensor parallel, pipeline)."""
    all_reduces = 4 * n_layers * m
    per_all_reduce = 2 * (tp - 1) / tp * activation
    return all_reduces * per_all_reduce, 2 * m * activation


_Formula = Callable[[int, int, int, int], float]

_WRONG_TP: tuple[tuple[_Formula, str], ...] = (
    (lambda n, a, m, tp: 4 * n * m * a, "A ring all-reduce of A bytes sends 2 (tp - 1) / tp of them on each rank."),
    (lambda n, a, m, tp: 4 * n * m * a * (tp - 1) / tp,
     "That is half. An all-reduce is two rounds of (tp - 1) / tp each; and a layer has two blocks, each with a sum in "
     "forward and one in backward."),
    (lambda n, a, m, tp: 4 * n * a * 2 * (tp - 1) / tp, "That is one microbatch; a step has m."),
    (lambda n, a, m, tp: 4 * n * m * a * 2 * (tp - 1) / tp**2,
     "Each rank holds 1 / tp of the weights, but the sums are of whole activations."),
    (lambda n, a, m, tp: 4 * n * m * a * 2 * (tp - 1), "That is what all ranks of the group send together."),
    (lambda n, a, m, tp: 4 * m * a * 2 * (tp - 1) / tp, "That is one layer; the stage has n_layers."),
    (lambda n, a, m, tp: 8 * n * m * a * 2 * (tp - 1) / tp,
     "One sum for two matrices is enough: what lies between a column and a row cut is not sent."),
)  # fmt: skip
_WRONG_PP: tuple[tuple[_Formula, str], ...] = (
    (lambda n, a, m, tp: m * a, "A middle stage sends an activation down and a gradient up."),
    (lambda n, a, m, tp: 4 * m * a, "What it receives, others send: count the two messages that it sends itself."),
    (lambda n, a, m, tp: 2 * a, "That is one microbatch; a step has m."),
    (lambda n, a, m, tp: 2 * m * a / tp,
     "Each tensor-parallel rank holds the whole activation after the sum, and sends it whole."),
    (lambda n, a, m, tp: 2 * n * m * a, "Only at the end of a stage is there a boundary, not after each layer."),
)  # fmt: skip


def _grade_sent_bytes(answer: Answer) -> None:
    cases = [(1, 1000, 1, 2), (4, 1000, 8, 2), (4, 1200, 3, 4), (7, 64, 5, 8), (3, 500, 2, 1)]
    pairs = [expect_list(got, f"sent_bytes{case}", 2) for case, got in zip(cases, answer.calls(cases), strict=True)]
    kinds = (("tensor parallel", _WRONG_TP), ("pipeline", _WRONG_PP))
    for index, (kind, wrong) in enumerate(kinds):
        found = [
            expect_number(pair[index], f"sent_bytes{case}[{index}]") for case, pair in zip(cases, pairs, strict=True)
        ]
        right = [sent_bytes(*case)[index] for case in cases]
        bad = next((i for i in range(len(cases)) if not close(found[i], right[i])), None)
        if bad is None:
            continue
        causes = [why for formula, why in wrong if all(map(close, found, (formula(*case) for case in cases)))]
        if all(close(got, sent_bytes(*case)[1 - index]) for case, got in zip(cases, found, strict=True)):
            causes = ["The two have changed places: tensor parallel comes first."]
        symptom = f"`sent_bytes{cases[bad]}` gives {found[bad]:g} for {kind}, which should be {right[bad]:g}."
        raise Mistake(symptom, causes[0] if causes else "")


def neighbours(rank: int, pp: int, tp: int) -> tuple[list[int], list[int]]:
    """(ranks of its tensor-parallel group, ranks of its pipeline), itself included, on a mesh of pp × tp."""
    stage, place = divmod(rank, tp)
    return [stage * tp + i for i in range(tp)], [s * tp + place for s in range(pp)]


def _grade_neighbours(answer: Answer) -> None:
    sizes = [(2, 2), (2, 4), (4, 2), (3, 2), (1, 4), (4, 1), (2, 8)]
    cases = [(rank, pp, tp) for pp, tp in sizes for rank in range(pp * tp)]
    found = []
    for case, got in zip(cases, answer.calls(cases), strict=True):
        what = f"neighbours{case}"
        rows = [sorted(expect_list(_as_list(row), f"{what}[{i}]")) for i, row in enumerate(expect_list(got, what, 2))]
        found.append([[expect_int(each, f"{what}[{i}]") for each in row] for i, row in enumerate(rows)])
    right = [[sorted(row) for row in neighbours(*case)] for case in cases]
    bad = next((i for i in range(len(cases)) if found[i] != right[i]), None)
    if bad is None:
        return
    causes = [why for rule, why in _WRONG_GROUPS if all(map(_same_groups, found, (rule(*case) for case in cases)))]
    (rank, pp, tp), (tp_group, pp_group) = cases[bad], found[bad]
    example = f"with {pp} stages of {tp}, rank {rank} has the neighbours {right[bad][0]} and {right[bad][1]}"
    raise Mistake(
        f"`neighbours({rank}, {pp}, {tp})` is {tp_group} and {pp_group}.", causes[0] if causes else "", example
    )


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, range | set | frozenset) else value


def _same_groups(found: list[list[int]], wrong: Sequence[Sequence[int]]) -> bool:
    return found == [sorted(row) for row in wrong]


def _transposed(rank: int, pp: int, tp: int) -> tuple[list[int], list[int]]:
    place, stage = divmod(rank, pp)
    return [i * pp + stage for i in range(tp)], [place * pp + s for s in range(pp)]


_WRONG_GROUPS: tuple[tuple[Callable[[int, int, int], Sequence[Sequence[int]]], str], ...] = (
    (lambda rank, pp, tp: neighbours(rank, pp, tp)[::-1], "The two have changed places: `tp` comes first."),
    (_transposed, "That is a mesh of tp × pp: here `tp` is the last dimension, so its ranks follow one another."),
    (lambda rank, pp, tp: (range(tp), range(pp)), "These are places in a group. Which ranks stand there?"),
    (lambda rank, pp, tp: tuple([r for r in row if r != rank] for row in neighbours(rank, pp, tp)),
     "A rank belongs to its own groups: leave it in."),
    (lambda rank, pp, tp: (neighbours(rank, pp, tp)[0], [r for r in (rank - tp, rank, rank + tp) if 0 <= r < pp * tp]),
     "The pipeline has all stages, not only the one before and the one after."),
    (lambda rank, pp, tp: (range(rank // tp * tp, rank // tp * tp + tp), range(rank % pp, pp * tp, pp)),
     "Two ranks of a pipeline are tp apart, not pp."),
    (lambda rank, pp, tp: (range(rank // pp * pp, rank // pp * pp + tp), range(rank % tp, pp * tp, tp)),
     "A stage has tp ranks: divide by tp to get its number."),
)  # fmt: skip


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "shard_linear", "07", "two cuts of a layer", 2, 6,
        (
            "PyTorch keeps `weight` as (outputs, inputs). Cut by column, a rank makes some of the outputs.",
            "`weight.chunk(n, dim=0)[rank]` has some outputs, `dim=1` takes some inputs.",
            "By column the bias is cut like the outputs. By row the outputs are added up over the ranks, so one rank "
            "has the bias and the others `None`.",
        ),
        shard_linear, _grade_shard_linear,
    ),
    Exercise(
        "enter", "07", "the other operator", 2, 8,
        (
            "`tensor.register_hook(fn)` calls `fn(gradient)` in backward and goes on with what it returns.",
            "Put the hook on `x.view_as(x)`: `x` itself is used by the residual, too.",
            "The hook: clone the gradient, `dist.all_reduce` the clone over `group`, return it.",
        ),
        enter, _grade_enter, limit_s=10.0,
    ),
    Exercise(
        "sent_bytes", "07", "bytes of both", 2, 6,
        (
            "A layer is attention and feed-forward, each a column and a row cut: how many sums for each microbatch?",
            "Two in forward and two in backward. In a ring, a rank sends `2 * (tp - 1) / tp` of the bytes of each.",
            "A middle stage sends one activation down and one gradient up for each microbatch, whole.",
        ),
        sent_bytes, _grade_sent_bytes,
    ),
    Exercise(
        "neighbours", "07", "who is next to whom", 1, 4,
        (
            "Write the ranks of 2 × 4 as two rows, 0 1 2 3 and 4 5 6 7. What are rows and columns?",
            "The row of a rank is `rank // tp`, its place there `rank % tp`.",
        ),
        neighbours, _grade_neighbours,
    ),
    Exercise(
        "whole_norm", "07", "bug clinic", 3, 10,
        (
            "Squares add up. Of which gradients does a rank of the same stage hold another part, of which the same?",
            "First the squares of `cut`, summed over the group `mesh.get_group(\"tp\")`.",
            "Then add the squares of `copied`, which every rank of the stage has; sum this over "
            "`mesh.get_group(\"pp\")`, and take the root.",
        ),
        whole_norm, grade_whole_norm, limit_s=10.0,
    ),
)  # fmt: skip
