"""Notebook 07: a layer cut in two ways, its backward, its bytes, the mesh, and one norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import linear

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import close, expect_int, expect_list, expect_number, expect_tensor
from course_pp.exercises.formula import Formula, flawed
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import OTHERWISE, Mistake, why
from course_pp.exercises.traffic import watched_traffic


def shard_linear(
    weight: torch.Tensor, bias: torch.Tensor, how: str, rank: int, n: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's (weight, bias) of a linear layer cut into n by "column" or by "row"."""
    if how == "column":
        return weight.chunk(n, dim=0)[rank], bias.chunk(n)[rank]
    return weight.chunk(n, dim=1)[rank], bias if rank == 0 else None


_Shards = list[tuple[Tensor, Tensor | None]]


def _grade_shard_linear(answer: Answer) -> None:
    sizes = ((6, 4, 2), (4, 6, 2), (9, 6, 3), (4, 4, 4), (3, 5, 1))
    cuts = [(how, *size) for how in ("column", "row") for size in sizes]
    rows = [
        (*_layer(n_out, n_in)[:2], how, rank, n)
        for how, n_out, n_in, n in cuts
        for rank in range(n)
    ]
    values = iter(answer.calls(rows))
    for how, n_out, n_in, n in cuts:
        what = f'shard_linear(weight, bias, "{how}", rank, {n})'
        given = f"With a weight of {n_out} × {n_in}, cut by {how} over {n} rank{'s' * (n > 1)},"
        shards = [_read_shard(next(values), what) for _ in range(n)]
        _judge_shapes(shards, how, (n_out, n_in), given)
        _judge_product(shards, how, _layer(n_out, n_in), given)


def _layer(n_out: int, n_in: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and three inputs."""
    seeded = torch.Generator().manual_seed(n_out)
    weight, bias, x = (
        torch.randint(-9, 10, shape, generator=seeded)
        for shape in ((n_out, n_in), (n_out,), (3, n_in))
    )
    return weight.double(), bias.double() + 0.5, x.double()


def _read_shard(value: Any, what: str) -> tuple[Tensor, Tensor | None]:
    if isinstance(value, Tensor):
        raise Mistake(
            f"`{what}` is one tensor; (weight, bias) is asked for.",
            "Return both, or `None` for no bias.",
        )
    weight, bias = expect_list(value, what, 2)
    if isinstance(bias, Tensor) and bias.dim() == 2:
        raise Mistake(
            f"`{what}[1]` is a matrix; a bias has one number for each output.",
            "The weight comes first.",
        )
    return expect_tensor(weight, f"{what}[0]"), (
        None if bias is None else expect_tensor(bias, f"{what}[1]")
    )


def _judge_shapes(shards: _Shards, how: str, whole: tuple[int, int], given: str) -> None:
    n_out, n_in = whole
    by_column = (n_out // len(shards), n_in)
    by_row = (n_out, n_in // len(shards))
    want, other = (by_column, by_row) if how == "column" else (by_row, by_column)
    for rank, (weight, bias) in enumerate(shards):
        shape = tuple(weight.shape)
        if shape != want:
            cause = why(
                (
                    (shape == other,
                     "That is the other cut. PyTorch keeps a weight as (outputs, inputs) and"
                     " computes x Wᵀ: the columns of the matrix on paper are the rows of"
                     " `weight`."),
                    (shape == whole, "It is whole: each rank keeps one of n parts."),
                )
            )  # fmt: skip
            spelled, wanted = (" × ".join(map(str, each)) for each in (shape, want))
            raise Mistake(f"{given} rank {rank} has a weight of {spelled}, not {wanted}.", cause)
        if bias is not None and tuple(bias.shape) != want[:1]:
            cause = (
                "A bias has one number for each output, and this rank makes only some of the"
                " outputs: cut it alike."
                if how == "column"
                else (
                    "Every rank makes all outputs, each a part of a sum: the bias has to stay as"
                    " long as these."
                )
            )
            raise Mistake(
                f"{given} rank {rank} makes {want[0]} outputs, but its bias has the shape"
                f" {tuple(bias.shape)}.",
                cause,
            )


def _judge_product(
    shards: _Shards, how: str, layer: tuple[Tensor, Tensor, Tensor], given: str
) -> None:
    weight, bias, x = layer
    n = len(shards)
    by_row = how == "row"
    shards = [(w.to(x.dtype), None if b is None else b.to(x.dtype)) for w, b in shards]
    whole = linear(x, weight, bias)
    inputs = list(x.chunk(n, dim=-1)) if by_row else [x] * n
    parts = [linear(part, *shard) for part, shard in zip(inputs, shards, strict=True)]
    found = torch.stack(parts).sum(0) if by_row else torch.cat(parts, dim=-1)
    if torch.allclose(found, whole):
        return
    joined = torch.cat([shard[0] for shard in shards], dim=int(by_row))
    n_biased = sum(shard[1] is not None for shard in shards)
    who = "Every rank adds" if n_biased == n else f"{n_biased} ranks add"
    cause = why(
        (
            (n > 1 and all(torch.equal(shard[0], shards[0][0]) for shard in shards),
             "Every rank has the same part: use `rank`."),
            (by_row and n_biased > 1 and torch.allclose(found, whole + (n_biased - 1) * bias),
             f"{who} the whole bias, and the sum has it {n_biased} times: it must enter once."),
            (torch.allclose(found, whole - bias), "No rank has the bias; it must enter once."),
            (not by_row and torch.allclose(found.sort(-1).values, whole.sort(-1).values),
             "The outputs are all there, in another order: each rank takes consecutive ones, rank 0"
             " the first."),
            (by_row and torch.allclose(joined.sort().values, weight.sort().values),
             "All of the weight is there, but not where x is: rank r gets the r-th of n consecutive"
             " parts of x."),
        )
    )  # fmt: skip
    row = int((found - whole).abs().sum(-1).argmax())
    right, yours = (
        ", ".join(f"{number:g}" for number in each[row].tolist()) for each in (whole, found)
    )
    how_joined = "added up" if by_row else "side by side"
    symptom = f"{given} the ranks' outputs, {how_joined}, are not those of the whole layer."
    raise Mistake(symptom, cause, f"row {row}: whole {right}, yours {yours}")


def enter(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The whole input of a block: as it is in forward; in backward its gradients are summed over the group."""

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    here = x.view_as(x)
    here.register_hook(summed)
    return here


_N_RANKS, _TP = 4, 2
_BESIDE = 99
"""The seed of the branch beside the block, which every rank has whole."""


def _grade_enter(answer: Answer) -> None:
    ranks = answer.on_ranks(_N_RANKS, _entered_on_rank)
    inside = [_gradient(r) for r in range(_N_RANKS)]
    beside = _gradient(_BESIDE)
    for rank, (gradient, spoiled) in enumerate(ranks):
        first = rank - rank % _TP
        total = torch.stack(inside[first : first + _TP]).sum(0)
        if not torch.allclose(gradient, total + beside):
            causes = (
                (inside[rank] + beside,
                 "Each rank has only the gradient of its own part of the block: nothing is added"
                 " up."),
                (total / _TP + beside,
                 "The gradients are averaged. Each is a part of the sum over the block's outputs:"
                 " add."),
                (total + _TP * beside,
                 "A hook on x itself also sees the gradient of whatever else uses x, here the"
                 " branch beside the block, which every rank has whole: put it on a view of x."),
                (_TP * total + beside, "The gradients are added up twice."),
                (torch.stack(inside).sum(0) + beside, "The sum is over all ranks: pass `group`."),
                (beside, "Nothing comes back from the block: backward has to return the sum."),
            )  # fmt: skip
            share = gradient - beside
            yours, away = (float(part.norm() / total.norm()) for part in (share, share - total))
            raise Mistake(
                "The gradient of x is wrong.",
                why([(torch.allclose(gradient, wrong), cause) for wrong, cause in causes]),
                f"norms over that of the right gradient from the block: yours {yours:.3f}, the"
                f" difference {away:.3f}",
            )
        if spoiled:
            raise Mistake(
                "The sum is right, but it is written into the tensor that backward was given.",
                "Autograd may have given the same tensor to another branch, such as the residual:"
                " sum a clone.",
            )


def _entered_on_rank(rank: int, fn: Callable[..., Any]) -> tuple[Tensor, bool]:
    """Return the gradient of x, and whether the gradient that backward was given was overwritten.

    The block and a branch beside it use x.
    """
    groups = [dist.new_group(list(range(first, first + _TP))) for first in range(0, _N_RANKS, _TP)]
    group = groups[rank // _TP]
    x = torch.arange(1, 13, dtype=torch.float64).reshape(3, 4).requires_grad_()
    with watched_traffic() as traffic:
        here = fn(x, group)
    expect_tensor(here, "enter(x, group)", tuple(x.shape))
    if traffic.collectives and torch.allclose(here, _TP * x):
        raise Mistake(
            "In forward the ranks' inputs come out added up.",
            "They all hold the same x: the sum belongs in backward. A sum in forward is what"
            " `Leave` is for.",
        )
    if not torch.equal(here, x):
        raise Mistake("`enter(x, group)` is not equal to x.", "Forward changes nothing.")
    if traffic.collectives:
        cause = "Forward needs no message: every rank has x already."
        raise Mistake(f"Forward begins {', '.join(traffic.collectives)}.", cause)
    if not here.requires_grad:
        cause = (
            "`detach`, `torch.no_grad` or a new tensor cuts x off from what the block made of it."
        )
        raise Mistake("After backward x has no gradient.", cause)
    ((here * _gradient(rank)).sum() + (x * _gradient(_BESIDE)).sum()).backward()
    given = torch.ones_like(x)
    fn(x.detach().requires_grad_(), group).backward(given)
    assert x.grad is not None  # the branch beside has one
    return x.grad, not torch.equal(given, torch.ones_like(x))


def _gradient(seed: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sent_bytes(n_layers: int, activation: int, m: int, tp: int) -> tuple[float, float]:
    """Bytes that a rank of a middle stage sends in one step: (tensor parallel, pipeline)."""
    all_reduces = 4 * n_layers * m
    per_all_reduce = 2 * (tp - 1) / tp * activation
    return all_reduces * per_all_reduce, 2 * m * activation


_WRONG_TP = (
    (lambda n, a, m, tp: 4 * n * m * a,
     "A ring all-reduce of A bytes sends 2 (tp - 1) / tp of them on each rank."),
    (lambda n, a, m, tp: 4 * n * m * a * (tp - 1) / tp,
     "That is half. An all-reduce is two rounds of (tp - 1) / tp each; and a layer has two blocks,"
     " each with a sum in forward and one in backward."),
    (lambda n, a, m, tp: 4 * n * a * 2 * (tp - 1) / tp, "That is one microbatch; a step has m."),
    (lambda n, a, m, tp: 4 * n * m * a * 2 * (tp - 1) / tp**2,
     "Each rank holds 1 / tp of the weights, but the sums are of whole activations."),
    (lambda n, a, m, tp: 4 * n * m * a * 2 * (tp - 1),
     "That is what all ranks of the group send together."),
    (lambda n, a, m, tp: 4 * m * a * 2 * (tp - 1) / tp,
     "That is one layer; the stage has n_layers."),
    (lambda n, a, m, tp: 8 * n * m * a * 2 * (tp - 1) / tp,
     "One sum for two matrices is enough: what lies between a column and a row cut is not sent."),
)  # fmt: skip
_WRONG_PP = (
    (lambda n, a, m, tp: m * a, "A middle stage sends an activation down and a gradient up."),
    (lambda n, a, m, tp: 4 * m * a,
     "Other ranks send the messages that it receives: count the two that it sends itself."),
    (lambda n, a, m, tp: 2 * a, "That is one microbatch; a step has m."),
    (lambda n, a, m, tp: 2 * m * a / tp,
     "Each tensor-parallel rank holds the whole activation after the sum, and sends it whole."),
    (lambda n, a, m, tp: 2 * n * m * a,
     "Only at the end of a stage is there a boundary, not after each layer."),
)  # fmt: skip


_SIZES = [
    (1, 1000, 1, 2),
    (4, 1000, 8, 2),
    (4, 1200, 3, 4),
    (7, 64, 5, 8),
    (3, 500, 2, 1),
    (3, 1001, 1, 4),
]


def _sent(index: int, wrongs: Sequence[tuple[Callable[..., float], str]]) -> Formula:
    """Return the grader of one entry of the answer."""
    swapped = (
        lambda *case: sent_bytes(*case)[1 - index],
        "The two have changed places: tensor parallel comes first.",
    )
    return Formula(
        lambda *case: sent_bytes(*case)[index],
        _SIZES,
        (swapped, *wrongs),
        (
            "Each microbatch crosses the stage's two ends: an activation down and a gradient up,"
            " both whole."
            if index
            else (
                "A layer has two blocks, each with one all-reduce in forward and one in backward;"
                " each of these sends 2 (tp - 1) / tp of the activation, for every microbatch and"
                " layer."
            )
        ),
        read=lambda value, call: expect_number(expect_list(value, call[:-3], 2)[index], call),
        call=lambda *case: f"{written_call('sent_bytes', *case)}[{index}]",
    )


def _grade_sent_bytes(answer: Answer) -> None:
    values = answer.calls(_SIZES)
    _sent(0, _WRONG_TP).judge(answer.name, values)
    _sent(1, _WRONG_PP).judge(answer.name, values)


def neighbours(rank: int, pp: int, tp: int) -> tuple[list[int], list[int]]:
    """(ranks of its tensor-parallel group, ranks of its pipeline), itself included, on a mesh of pp × tp."""
    stage, place = divmod(rank, tp)
    return [stage * tp + i for i in range(tp)], [s * tp + place for s in range(pp)]


_WRONG_GROUPS = (
    (lambda rank, pp, tp: neighbours(rank, pp, tp)[::-1],
     "The two have changed places: `tp` comes first."),
    (lambda rank, pp, tp: neighbours(rank, tp, pp)[::-1],
     "That is a mesh of tp × pp: here `tp` is the last dimension, so its ranks follow one"
     " another."),
    (lambda rank, pp, tp: ([*range(tp)], [*range(pp)]),
     "These are places in a group. Which ranks stand there?"),
    (lambda rank, pp, tp: [[r for r in row if r != rank] for row in neighbours(rank, pp, tp)],
     "A rank belongs to its own groups: leave it in."),
    (lambda rank, pp, tp: (neighbours(rank, pp, tp)[0], [r for r in (rank - tp, rank, rank + tp) if 0 <= r < pp * tp]),
     "The pipeline has all stages, not only the one before and the one after."),
    (lambda rank, pp, tp: (neighbours(rank, pp, tp)[0], [*range(rank % pp, pp * tp, pp)]),
     "Two ranks of a pipeline are tp apart, not pp."),
    (lambda rank, pp, tp: ([rank // pp * pp + i for i in range(tp)], neighbours(rank, pp, tp)[1]),
     "A stage has tp ranks: divide by tp to get its number."),
)  # fmt: skip

_MESH_SIZES = ((2, 2), (2, 4), (4, 2), (3, 2), (1, 4), (4, 1), (2, 8))


def _read_groups(value: Any, call: str) -> tuple[list[int], ...]:
    """Return the groups, each sorted: any order is right."""
    groups = []
    for i, row in enumerate(expect_list(value, call, 2)):
        if isinstance(row, range | set | frozenset):
            row = list(row)
        ranks = expect_list(row, f"{call}[{i}]")
        groups.append(sorted(expect_int(rank, f"{call}[{i}][{j}]") for j, rank in enumerate(ranks)))
    return tuple(groups)


_GRADE_NEIGHBOURS = Formula(
    neighbours,
    [(rank, *size) for size in _MESH_SIZES for rank in range(size[0] * size[1])],
    _WRONG_GROUPS,
    "Rank = stage × tp + place: its tensor-parallel group has its stage and every place, its"
    " pipeline every stage and its place.",
    read=_read_groups,
)


def whole_norm(
    cut: list[torch.Tensor], copied: list[torch.Tensor], mesh: DeviceMesh
) -> torch.Tensor:
    """The norm of the whole model's gradient, from this rank's: parts, and copies that all ranks of the stage have."""
    total = torch.stack([g.square().sum() for g in cut]).sum()
    dist.all_reduce(total, group=mesh.get_group("tp"))
    total += torch.stack([g.square().sum() for g in copied]).sum()
    dist.all_reduce(total, group=mesh.get_group("pp"))
    return total.sqrt()


_COPIES = "total += torch.stack([g.square().sum() for g in copied]).sum()"
_OVER_TP, _OVER_PP = (
    f'dist.all_reduce(total, group=mesh.get_group("{dimension}"))' for dimension in ("tp", "pp")
)
_WITH_THE_CUT = (("in cut]", "in cut + copied]"), (_COPIES, "pass"))
_THREE_FOUR_FIVE = "Norms do not add up, their squares do: 3 and 4 make 5."

_WRONG_NORMS = (
    (flawed(whole_norm, *_WITH_THE_CUT),
     "Every rank of a stage has the same `copied`, and each adds them: they count tp times instead"
     " of once."),
    (flawed(whole_norm, (_COPIES, "pass")), "`copied` is missing."),
    (flawed(whole_norm, (f"{_COPIES}\n    {_OVER_PP}", f"{_OVER_PP}\n    {_COPIES}")),
     "Other stages have other `copied`: sum these over `pp` as well."),
    (flawed(whole_norm, (_OVER_PP,
        "pass")), "That is the norm of one stage: sum over `pp` as well."),
    (flawed(whole_norm, *_WITH_THE_CUT, (_OVER_PP, "pass")),
     "That is the norm of one stage, in which `copied` counts tp times: sum `cut` over `tp`, and"
     " all over `pp`."),
    (flawed(whole_norm, (_OVER_TP, "pass")),
     "The other ranks of `tp` hold other parts of the same weights: sum `cut` over `tp`."),
    (flawed(whole_norm, (_OVER_TP, "pass"), (_OVER_PP, "pass")),
     "That is what this rank alone holds: nothing is added up over ranks."),
    (flawed(whole_norm, (".sqrt()", "")), "The root is missing."),
    (flawed(whole_norm, (
        ".sqrt()", ""), (_OVER_PP, f"total = total.sqrt(); {_OVER_PP}")), _THREE_FOUR_FIVE),
    (flawed(whole_norm, (
        ".sqrt()", ""), *_WITH_THE_CUT, (_OVER_TP, f"total = total.sqrt(); {_OVER_TP}")),
     _THREE_FOUR_FIVE),
    (flawed(whole_norm, *_WITH_THE_CUT, (_OVER_PP, f"total /= dist.get_world_size(); {_OVER_PP}")),
     "The squares are averaged over the ranks; they are to be summed."),
)  # fmt: skip

_ONCE = (
    "Every weight counts once: sum the squares of `cut` over `tp`, add those of this rank's"
    " `copied`, sum that over `pp`, and take the root last, the same on every rank."
)
_MESHES = ((2, 2), (4, 1), (1, 4))


def _grade_whole_norm(answer: Answer) -> None:
    ranks = answer.on_ranks(_N_RANKS, _norms_on_rank, [whole_norm])
    for index, (pp, tp) in enumerate(_MESHES):
        where = f"pp × tp = {pp} × {tp}"
        found = [
            expect_number(norms[index][-1], f"whole_norm on a mesh of {where}") for norms in ranks
        ]
        right = ranks[0][index][0]
        if all(close(norm, right) for norm in found):
            continue
        known = answer.on_ranks(_N_RANKS, _norms_on_rank, [formula for formula, _ in _WRONG_NORMS])
        causes = []
        for i, (_, cause) in enumerate(_WRONG_NORMS):
            wrong = [norms[index][i] for norms in known]
            causes.append((all(map(close, found, wrong)), cause))
        if all(close(norm, found[0]) for norm in found):
            symptom = f"With {where} every rank says {found[0]:.8g}; the norm is {right:.8g}."
        else:
            per_rank = ", ".join(f"{norm:.8g}" for norm in found)
            symptom = (
                f"With {where} the ranks say {per_rank}; the norm is {right:.8g} on all of them."
            )
        raise Mistake(symptom, why([*causes, (OTHERWISE, _ONCE)]))


def _norms_on_rank(
    rank: int, fn: Callable[..., Any], others: Sequence[Callable[..., Tensor]]
) -> list[list[Any]]:
    """Return for each mesh the norms of the other formulas, and last the norm of the answer.

    The others come first, so that no answer can disturb them.
    """
    held = [
        (
            *_gradients(*divmod(rank, tp)),
            init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp")),
        )
        for pp, tp in _MESHES
    ]
    norms: list[list[Any]] = [[float(other(*each)) for other in others] for each in held]
    for row, (cut, copied, mesh) in zip(norms, held, strict=True):
        with unchanged(cut=cut, copied=copied):
            value = fn(cut, copied, mesh)
        row.append(value.detach().clone() if isinstance(value, Tensor) else value)
    return norms


def _gradients(stage: int, place: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of rank (stage, place): parts that differ by place, and copies."""

    def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [
            (1 + stage) * torch.randn(shape, dtype=torch.float64, generator=generator)
            for shape in shapes
        ]

    return drawn(10 * stage + place, (4, 3), (3, 4)), drawn(100 + stage, (5,), (3,))


EXERCISES: tuple[Exercise, ...] = (
    Exercise(shard_linear, _grade_shard_linear, "07", "two cuts of a layer", 2, 6, (
        "PyTorch keeps `weight` as (outputs, inputs). Cut by column, a rank makes some of the"
        " outputs.",
        "`weight.chunk(n, dim=0)[rank]` has some outputs, `dim=1` takes some inputs.",
        "By column the bias is cut like the outputs. By row the outputs are added up over the"
        " ranks, so one rank has the bias and the others `None`.",
    )),
    Exercise(enter, _grade_enter, "07", "the other operator", 2, 8, (
        "`tensor.register_hook(fn)` calls `fn(gradient)` in backward and goes on with what it"
        " returns.",
        "Put the hook on `x.view_as(x)`: `x` itself is used by the residual, too.",
        "The hook: clone the gradient, `dist.all_reduce` the clone over `group`, return it.",
    ), limit_s=10.0),
    Exercise(sent_bytes, _grade_sent_bytes, "07", "bytes of both", 2, 6, (
        "A layer is attention and feed-forward, each a column and a row cut: how many sums for each"
        " microbatch?",
        "Two in forward and two in backward. In a ring, a rank sends `2 * (tp - 1) / tp` of the"
        " bytes of each.",
        "A middle stage sends one activation down and one gradient up for each microbatch, whole.",
    )),
    Exercise(neighbours, _GRADE_NEIGHBOURS, "07", "who is next to whom", 1, 4, (
        "Write the ranks of 2 × 4 as two rows, 0 1 2 3 and 4 5 6 7. What are rows and columns?",
        "The row of a rank is `rank // tp`, its place there `rank % tp`.",
    )),
    Exercise(whole_norm, _grade_whole_norm, "07", "bug clinic", 3, 10, (
        "Squares add up. Of which gradients does a rank of the same stage hold another part, of"
        " which the same?",
        'First the squares of `cut`, summed over the group `mesh.get_group("tp")`.',
        'Then add the squares of `copied`, which every rank of the stage has; sum this over'
        ' `mesh.get_group("pp")`, and take the root.',
    ), limit_s=10.0),
)  # fmt: skip
