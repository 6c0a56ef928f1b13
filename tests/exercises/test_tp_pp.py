"""The graders of notebook 07, and its plans, cut model and patients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from course_pp.exercises.tp_pp import lab
from course_pp.exercises.tp_pp.exercises import whole_norm
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


def by_slices(weight: Any, bias: Any, how: str, rank: int, n: int) -> Any:
    """Each rank adds an equal share of the bias."""
    if how == "column":
        size = len(weight) // n
        return weight[rank * size : (rank + 1) * size], bias[rank * size : (rank + 1) * size]
    size = weight.shape[1] // n
    return weight[:, rank * size : (rank + 1) * size], bias / n


def with_zeros(weight: Any, bias: Any, how: str, rank: int, n: int) -> Any:
    if how == "column":
        return [weight.chunk(n)[rank].clone(), bias.chunk(n)[rank].clone()]
    return [weight.chunk(n, 1)[rank].clone(), bias if rank == n - 1 else torch.zeros_like(bias)]


def in_float32(weight: Any, bias: Any, how: str, rank: int, n: int) -> Any:
    """Into memory that does not ask for the weight's dtype."""
    part = weight.chunk(n, dim=0 if how == "column" else 1)[rank]
    mine = torch.zeros(part.shape)
    mine[:] = part
    return mine, bias.chunk(n)[rank] if how == "column" else torch.zeros(len(bias)) + bias / n


@pytest.mark.parametrize("answer", [by_slices, with_zeros, in_float32])
def test_a_layer_may_be_cut_in_several_ways(answer: Answer) -> None:
    accepts("shard_linear", answer)


def cutting(
    column: Callable[..., Any] = lambda w, b, r, n: (w.chunk(n)[r], b.chunk(n)[r]),
    row: Callable[..., Any] = lambda w, b, r, n: (w.chunk(n, 1)[r], b if r == 0 else None),
) -> Answer:
    """A cut that is right unless told otherwise."""

    def shard_linear(weight: Any, bias: Any, how: str, rank: int, n: int) -> Any:
        return (column if how == "column" else row)(weight, bias, rank, n)

    return shard_linear


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (cutting(column=lambda w, b, r, n: (w.chunk(n, 1)[r], b)), "(outputs, inputs)"),
        (cutting(row=lambda w, b, r, n: (w.chunk(n)[r], b.chunk(n)[r])), "That is the other cut"),
        (cutting(column=lambda w, b, r, n: (w, b)), "It is whole"),
        (cutting(column=lambda w, b, r, n: (w.chunk(n)[r], b)), "cut it alike"),
        (cutting(column=lambda w, b, r, n: (w.chunk(n)[r], None)), "No rank has the bias"),
        (cutting(column=lambda w, b, r, n: (w.chunk(n)[0], b.chunk(n)[0])), "use `rank`"),
        (cutting(column=lambda w, b, r, n: (w[r::n], b[r::n])), "in another order"),
        (cutting(row=lambda w, b, r, n: (w.chunk(n, 1)[r], b)), "the sum has it 2 times"),
        (cutting(row=lambda w, b, r, n: (w.chunk(n, 1)[r], None)), "No rank has the bias"),
        (cutting(row=lambda w, b, r, n: (w.chunk(n, 1)[r], b.chunk(n)[r])), "as long as these"),
        (cutting(row=lambda w, b, r, n: (w[:, r::n], b if r == 0 else None)), "not where x is"),
        (
            cutting(row=lambda w, b, r, n: (w.chunk(n, 1)[r], b if r == 1 else None)),
            "No rank has the bias",
        ),
        (
            cutting(row=lambda w, b, r, n: (b if r == 0 else None, w.chunk(n, 1)[r])),
            "The weight comes first",
        ),
        (cutting(row=lambda w, b, r, n: w.chunk(n, 1)[r]), "is one tensor"),
    ],
)
def test_a_wrong_cut_is_told_why(answer: Answer, words: str) -> None:
    refuses("shard_linear", answer, words)


def total(x: Any, group: Any = None, op: Any = dist.ReduceOp.SUM) -> Any:
    result = x.clone()
    dist.all_reduce(result, op=op, group=group)
    return result


def entering(
    backward: Callable[..., Any], forward: Callable[..., Any] = lambda x, group: x.view_as(x)
) -> Answer:
    """An autograd function with this forward and backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, group: Any) -> Any:
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return backward(gradient, ctx.group), None

    return lambda x, group: Function.apply(x, group)


def hooked(hook: Callable[..., Any], view: Callable[..., Any] = lambda x: x.view_as(x)) -> Answer:
    def enter(x: Any, group: Any) -> Any:
        here = view(x)
        here.register_hook(lambda gradient: hook(gradient, group))
        return here

    return enter


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "answer",
    [
        entering(total),
        hooked(total, view=torch.clone),
        hooked(lambda gradient, group: differentiable.all_reduce(gradient, group=group)),
    ],
)
def test_a_block_may_be_entered_in_several_ways(answer: Answer) -> None:
    accepts("enter", answer)


def in_place(gradient: Any, group: Any) -> Any:
    dist.all_reduce(gradient, group=group)
    return gradient


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x, group: x, "nothing is added up"),
        (entering(lambda gradient, group: gradient, forward=total), "the sum belongs in backward"),
        (
            entering(total, forward=lambda x, group: total(x, group) / 2),
            "Forward begins all_reduce",
        ),
        (entering(lambda gradient, group: total(gradient, group) / 2), "averaged"),
        (entering(lambda gradient, group: total(total(gradient, group), group)), "added up twice"),
        (entering(lambda gradient, group: total(gradient)), "over all ranks"),
        (entering(lambda gradient, group: None), "Nothing comes back"),
        (entering(in_place), "sum a clone"),
        (hooked(total, view=lambda x: x), "put it on a view of x"),
        (lambda x, group: x.detach(), "no gradient"),
        (lambda x, group: 2 * x, "is not equal to x"),
        (lambda x, group: None, "None"),
    ],
)
def test_a_wrong_entrance_is_told_why(answer: Answer, words: str) -> None:
    refuses("enter", answer, words)


def in_two_rounds(n_layers: int, activation: int, m: int, tp: int) -> list[float]:
    """An all-reduce as a reduce-scatter and an all-gather."""
    sums, messages = 0.0, 0.0
    for _ in range(m):
        for _ in range(n_layers * 4):
            sums += (tp - 1) * activation / tp
            sums += (tp - 1) * activation / tp
        messages += activation + activation
    return [sums, messages]


def test_bytes_may_be_added_one_by_one() -> None:
    accepts("sent_bytes", in_two_rounds)


def sending(
    sums: Callable[..., float] | None = None, messages: Callable[..., float] | None = None
) -> Answer:
    def sent_bytes(n_layers: int, activation: int, m: int, tp: int) -> tuple[float, float]:
        right = 8 * n_layers * m * activation * (tp - 1) / tp, 2 * m * activation
        case = n_layers, activation, m, tp
        return sums(*case) if sums else right[0], messages(*case) if messages else right[1]

    return sent_bytes


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sending(lambda n, a, m, tp: 4 * n * m * a), "2 (tp - 1) / tp"),
        (sending(lambda n, a, m, tp: 4 * n * m * a * (tp - 1) / tp), "two rounds"),
        (sending(lambda n, a, m, tp: 8 * n * a * (tp - 1) / tp), "a step has m"),
        (sending(lambda n, a, m, tp: 8 * n * m * a * (tp - 1) / tp**2), "of whole activations"),
        (sending(lambda n, a, m, tp: 8 * n * m * a * (tp - 1)), "all ranks of the group"),
        (sending(lambda n, a, m, tp: 8 * m * a * (tp - 1) / tp), "That is one layer"),
        (sending(lambda n, a, m, tp: 16 * n * m * a * (tp - 1) / tp), "One sum for two matrices"),
        (sending(messages=lambda n, a, m, tp: m * a), "down and a gradient up"),
        (sending(messages=lambda n, a, m, tp: 4 * m * a), "Other ranks send"),
        (sending(messages=lambda n, a, m, tp: 2 * a), "a step has m"),
        (sending(messages=lambda n, a, m, tp: 2 * m * a / tp), "sends it whole"),
        (sending(messages=lambda n, a, m, tp: 2 * n * m * a), "not after each layer"),
        (lambda *case: sending()(*case)[::-1], "changed places"),
        (lambda *case: sending()(*case)[0], "is a float; a list"),
    ],
)
def test_wrong_bytes_are_told_why(answer: Answer, words: str) -> None:
    refuses("sent_bytes", answer, words)


def from_a_grid(rank: int, pp: int, tp: int) -> Any:
    grid = torch.arange(pp * tp).reshape(pp, tp)
    return grid[rank // tp].tolist(), grid[:, rank % tp].tolist()


def as_ranges(rank: int, pp: int, tp: int) -> Any:
    return range(rank - rank % tp, rank - rank % tp + tp), range(rank % tp, pp * tp, tp)


@pytest.mark.parametrize("answer", [from_a_grid, as_ranges])
def test_neighbours_may_be_found_in_several_ways(answer: Answer) -> None:
    accepts("neighbours", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda rank, pp, tp: from_a_grid(rank, tp, pp)[::-1], "tp × pp"),
        (lambda rank, pp, tp: divmod(rank, tp), "is an int; a list"),
        (lambda rank, pp, tp: ([rank], [rank]), "is ([0], [0]), not ([0, 1], [0, 2])"),
    ],
)
def test_wrong_neighbours_are_told_why(answer: Answer, words: str) -> None:
    refuses("neighbours", answer, words)


def square(gradients: Any) -> Any:
    return torch.stack([g.square().sum() for g in gradients]).sum()


def summed(value: Any, mesh: Any, *dimensions: str) -> Any:
    for dimension in dimensions:
        value = total(value, mesh.get_group(dimension))
    return value


def with_a_share_of_copies(cut: Any, copied: Any, mesh: Any) -> Any:
    part = square(cut) + square(copied) / mesh["tp"].size()
    return total(part).sqrt()


def with_one_rank_for_copies(cut: Any, copied: Any, mesh: Any) -> float:
    part = square(cut) + (square(copied) if mesh["tp"].get_local_rank() == 0 else 0.0)
    return float(summed(part, mesh, "pp", "tp")) ** 0.5


@pytest.mark.sample(2)
@pytest.mark.parametrize("answer", [with_a_share_of_copies, with_one_rank_for_copies])
def test_copies_may_be_counted_once_in_several_ways(answer: Answer) -> None:
    accepts("whole_norm", answer)


def scales_in_place(cut: Any, copied: Any, mesh: Any) -> Any:
    for gradient in copied:
        gradient /= mesh["tp"].size() ** 0.5
    return total(square(cut) + square(copied)).sqrt()


def norm_of(cut: Any, copied: Any) -> Any:
    return (square(cut) + square(copied)).sqrt()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda cut, copied, mesh: total(square(cut) + square(copied)).sqrt(),
            "tp times instead of once",
        ),
        (lambda cut, copied, mesh: total(square(cut)).sqrt(), "`copied` is missing"),
        (
            lambda cut, copied, mesh: (total(square(cut)) + square(copied)).sqrt(),
            "Other stages have other `copied`",
        ),
        (
            lambda cut, copied, mesh: (summed(square(cut), mesh, "tp") + square(copied)).sqrt(),
            "the norm of one stage",
        ),
        (
            lambda cut, copied, mesh: summed(square(cut) + square(copied), mesh, "tp").sqrt(),
            "counts tp times",
        ),
        (
            lambda cut, copied, mesh: summed(square(cut) + square(copied), mesh, "pp").sqrt(),
            "other parts of the same",
        ),
        (lambda cut, copied, mesh: norm_of(cut, copied), "this rank alone"),
        (
            lambda cut, copied, mesh: with_a_share_of_copies(cut, copied, mesh) ** 2,
            "The root is missing",
        ),
        (lambda cut, copied, mesh: total(norm_of(cut, copied)), "3 and 4 make 5"),
        (
            lambda cut, copied, mesh: summed(
                (summed(square(cut), mesh, "tp") + square(copied)).sqrt(), mesh, "pp"
            ),
            "3 and 4 make 5",
        ),
        (
            lambda cut, copied, mesh: (total(square(cut) + square(copied)) / 4).sqrt(),
            "are averaged",
        ),
        (scales_in_place, "changed its argument `copied[0]`"),
        (lambda cut, copied, mesh: None, "None"),
    ],
)
def test_a_wrong_norm_is_told_why(answer: Answer, words: str) -> None:
    refuses("whole_norm", answer, words)


def test_only_column_then_row_needs_one_exchange() -> None:
    plans = lab.exchanges_of_plans(2)
    assert plans.pop("column, then row") == 1
    assert set(plans.values()) == {2}


def test_a_cut_model_has_the_gradients_of_one_process_and_sums_whole_activations() -> None:
    traffic = lab.tensor_parallel_step(2)
    assert (traffic.sums, traffic.n_bytes, traffic.sent) == (8, 32768, 262144)
    assert traffic.largest < 1e-12


def test_tensor_parallelism_sends_four_sums_a_layer_for_one_message_a_stage() -> None:
    sent = lab.step_bytes(lab.LLAMA, pp=2, tp=8)
    assert sent["tensor parallel"] / sent["pipeline"] == pytest.approx(4 * 16 * 2 * 7 / 8)


def test_sums_on_the_slow_link_lengthen_the_step() -> None:
    inside, across = (
        lab.step_on_links(lab.LLAMA, 450e9, 50e9, 400e12),
        lab.step_on_links(lab.LLAMA, 50e9, 450e9, 400e12),
    )
    assert across.compute_s == inside.compute_s
    assert across.sums_s == pytest.approx(9 * inside.sums_s)
    assert across.timeline.makespan > inside.timeline.makespan


@pytest.mark.parametrize(
    ("patient", "rows"), [("A", ("wrong, wrong, wrong, wrong", 3)), ("B", ("wrong, right", 2))]
)
def test_a_patient_shows_its_symptom(patient: str, rows: tuple[str, int]) -> None:
    found = lab.examine(lab.PATIENTS[patient])
    assert found.count(rows[0]) == rows[1]
    assert ("the two ranks differ" in found) == (patient == "B")


def test_the_norm_of_the_whole_model_is_that_of_one_process() -> None:
    *right, of_one = lab.norms_by(whole_norm)
    assert right == pytest.approx([of_one] * 4, rel=1e-12)
    assert (
        lab.norms_by(lambda cut, copied, mesh: total(square(cut) + square(copied)).sqrt())[0]
        > of_one * 1.001
    )


def test_clipping_by_stage_leaves_more_than_the_limit() -> None:
    stages = {"a": torch.tensor([3.0, 4.0])}, {"b": torch.tensor([0.0, 1.0])}
    assert lab.norm_of(lab.clip_by_stage(stages, 0.5)) == pytest.approx(0.5 * 2**0.5)
    assert lab.norm_of(lab.clip_by_stage(stages, 9.0)) == pytest.approx(26**0.5)
