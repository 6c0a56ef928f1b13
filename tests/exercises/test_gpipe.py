"""The graders of notebook 02, by what learners hand in."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from course_pp.exercises.formula import flawed
from course_pp.exercises.gpipe.exercises import (
    PATIENTS,
    accumulate,
    examine,
    mended_step,
    time_cuts,
)
from course_pp.schedule import Action
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


def bubble_with_times(p: int, m: int) -> float:
    forward, backward = 3, 5
    makespan = (m + p - 1) * (forward + backward)
    return 1 - m * (forward + backward) / makespan


def bubble_as_a_tensor_of_float32(p: int, m: int) -> torch.Tensor:
    return torch.tensor((p - 1) / (m + p - 1))


@pytest.mark.parametrize(
    "answer",
    [bubble_with_times, bubble_as_a_tensor_of_float32, lambda p, m: Fraction(p - 1, m + p - 1)],
)
def test_another_way_to_the_bubble_is_correct(answer: Answer) -> None:
    accepts("bubble", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, m: torch.tensor((p - 1) / (m + p - 1)) + 1e-4, "not 0.5"),
        (lambda p, m: 0.25, "`bubble(2, 1)` is 0.25, not 0.5"),
        (lambda p, m: None, "None"),
    ],
)
def test_a_wrong_bubble_is_told_what_it_is_instead(answer: Answer, words: str) -> None:
    refuses("bubble", answer, words)


def order(p: int, row: Callable[[int], list[Any]]) -> list[list[Any]]:
    return [row(rank) for rank in range(p)]


def both(rank: int, microbatches: Any) -> list[Action]:
    return [Action(rank, kind, i) for kind in "FB" for i in microbatches]


def newest_first(p: int, m: int) -> list[list[Action]]:
    rows: list[list[Action]] = [[] for _ in range(p)]
    for i in range(m):
        for rank in range(p):
            rows[rank].append(Action(rank, "F", i))
    for i in reversed(range(m)):
        for rank in range(p):
            rows[rank].append(Action(rank, "B", i))
    return rows


def last_rank_newest_first(p: int, m: int) -> list[list[Action]]:
    rows = order(p, lambda rank: both(rank, range(m)))
    rows[-1][m:] = reversed(rows[-1][m:])
    return rows


def last_rank_forwards_newest_first(p: int, m: int) -> list[list[Action]]:
    rows = order(p, lambda rank: both(rank, range(m)))
    rows[-1][:m] = reversed(rows[-1][:m])
    return rows


def in_halves(p: int, m: int) -> list[list[Action]]:
    return order(p, lambda rank: [Action(rank, kind, i) for kind in "FIW" for i in range(m)])


@pytest.mark.parametrize(
    "answer", [newest_first, lambda p, m: tuple(order(p, lambda r: both(r, range(m))))]
)
def test_every_order_of_all_forwards_then_all_backwards_is_correct(answer: Answer) -> None:
    accepts("afab_order", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, m: order(p, lambda r: [Action(i, k, r) for k in "FB" for i in range(m)]),
         "Have stage and microbatch changed places?"),
        (lambda p, m: order(p, lambda r: [Action(r, "F", i) for i in range(m)]), "lacks `0B0`"),
        (lambda p, m: order(p, lambda r: both(r, range(1, m + 1))),
         "number the microbatches from 0"),
        (lambda p, m: order(p, lambda r: [Action(r, k, i) for i in range(m) for k in "FB"]),
         "all forwards before"),
        (in_halves, "are the halves of a backward"),
        (last_rank_newest_first, "different orders"),
        (last_rank_forwards_newest_first, "different orders"),
        (lambda p, m: both(0, range(m)), "gave one list of actions"),
        (lambda p, m: order(p, lambda r: both(r, range(max(1, m - 1)))), "m is 3"),
        (lambda p, m: order(p, lambda r: [f"{a.kind}{r}" for a in both(r, range(m))]), "no action"),
        (lambda p, m: order(1, lambda r: both(r, range(m))), "gave 1 of 2 lists"),
        (lambda p, m: order(p, lambda r: both(0, range(m))), "Rank 1 holds stage 1"),
        (lambda p, m: None, "is None; a list is asked for"),
    ],
)  # fmt: skip
def test_a_wrong_order_is_told_what_is_wrong(answer: Answer, words: str) -> None:
    refuses("afab_order", answer, words)


SHARE, ONCE_MORE = "loss_fn(model(x), target) * len(x) / rows", "        share.backward()\n"


def accumulating(share: str = SHARE, backward: str = ONCE_MORE) -> Answer:
    return flawed(accumulate, (SHARE, share), (ONCE_MORE, backward))


def one_backward(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> Any:
    shares = [
        len(x) * loss_fn(model(x), target) for x, target in zip(microbatches, targets, strict=True)
    ]
    loss = torch.stack(shares).sum() / sum(map(len, targets))
    loss.backward()
    return loss


def scaled_afterwards(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    before = [p.grad for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    for x, target in zip(microbatches, targets, strict=True):
        loss = loss_fn(model(x), target) * len(x)
        loss.backward()
        total += loss.item()
    rows = sum(map(len, microbatches))
    for p, old in zip(model.parameters(), before, strict=True):
        p.grad = p.grad / rows if old is None else p.grad / rows + old
    return total / rows


def forward_again_for_the_loss(
    model: Any, microbatches: Any, targets: Any, loss_fn: Any
) -> torch.Tensor:
    accumulate(model, microbatches, targets, loss_fn)
    with torch.no_grad():
        shares = [len(x) * loss_fn(model(x), y) for x, y in zip(microbatches, targets, strict=True)]
    return sum(shares) / sum(map(len, targets))


@pytest.mark.parametrize(
    "answer",
    [
        scaled_afterwards,
        forward_again_for_the_loss,
        flawed(accumulate, ("return mean", "return torch.tensor(mean)")),
        flawed(accumulate, ("share.item()", "share")),
    ],
)
def test_gradients_may_be_accumulated_in_several_ways(answer: Answer) -> None:
    accepts("accumulate", answer)


CLEARED = f"        model.zero_grad()\n{ONCE_MORE}"
SCALED = ("    return mean", "    for p in model.parameters(): p.grad /= rows\n    return mean")


def all_at_once(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    loss = loss_fn(model(torch.cat(microbatches)), torch.cat(targets))
    loss.backward()
    return float(loss)


def no_backward(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    return float(mse_loss(model(torch.cat(microbatches)), torch.cat(targets)))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            accumulating("loss_fn(model(x), target) / len(targets)"),
            "counts the same, whatever its size",
        ),
        (accumulating("loss_fn(model(x), target)"), "never divided"),
        (accumulating("loss_fn(model(x), target) * len(x)"), "not divided by all rows"),
        (accumulating("loss_fn(model(x), target) / rows"), "multiply it by n first"),
        (accumulating(f"{SHARE} / len(targets)"), "one of the two"),
        (accumulating(backward=CLEARED), "do not zero gradients in between"),
        (
            flawed(accumulate, ("    mean = 0.0", "    model.zero_grad(); mean = 0.0")),
            "do not clear or scale what is there",
        ),
        (flawed(accumulate, (" / rows", ""), SCALED), "do not clear or scale what is there"),
        (one_backward, "microbatches were held at once"),
        (
            accumulating(
                backward=(
                    "        share.backward(retain_graph=True); kept = [share,"
                    " *locals().get('kept', [])]\n"
                )
            ),
            "without `retain_graph`",
        ),
        (all_at_once, "all rows at once"),
        (
            flawed(accumulate, ("share.item()", "share.item() * rows / len(x) / len(targets)")),
            "the loss returned is",
        ),
        (no_backward, "no gradient"),
    ],
)
def test_wrong_gradients_of_unequal_microbatches_are_told_why(answer: Answer, words: str) -> None:
    refuses("accumulate", answer, words)


def bytes_one_by_one(m: int, boundary: int, inside: int, recompute: bool) -> int:
    kept = [boundary if recompute else boundary + inside for _ in range(m)]
    kept[0] = boundary + inside
    return sum(kept)


def test_bytes_may_be_added_one_by_one() -> None:
    accepts("peak_bytes", bytes_one_by_one)


DY, OLDEST = "y.backward(recv_gradient(y, m, link))", "for x, y in in_flight:"


def step_with(*changes: tuple[str, str]) -> Answer:
    return flawed(mended_step, *changes)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "answer", [mended_step, step_with((OLDEST, "for x, y in reversed(in_flight):"))]
)
def test_the_step_may_be_mended_with_the_oldest_or_the_newest_first(answer: Answer) -> None:
    accepts("mended_step", answer)


NOT_IN_THE_LOSS = (
    ("y = loss_fn(y, target) / m", "y = loss_fn(y, target)"),
    ("sum(losses)", "sum(losses) / m"),
)
SCALED_AT_LAST = ("    return sum", "    for p in stage.parameters(): p.grad /= m\n    return sum")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            PATIENTS["A"],
            (
                "belongs to another microbatch. Compare the order in which the ranks do their"
                " backwards"
            ),
        ),
        (PATIENTS["B"], "how inputs and targets are cut"),
        (PATIENTS["C"], "Exactly m times too large"),
        (step_with(*NOT_IN_THE_LOSS), "Exactly m times too large"),
        (step_with(("y.backward()", "(y / m).backward()")), "1/m enters twice"),
        (
            step_with((DY, "y.backward(recv_gradient(y, m, link) / m)")),
            "1/m enters on more than one rank; the chain rule already",
        ),
        (step_with((DY, "y.backward(3 * recv_gradient(y, m, link))")), "Wrong by a factor"),
        (step_with(("sum(losses)", "m * sum(losses)")), "return their mean"),
        (step_with(("sum(losses)", "losses[0]")), "what a single microbatch adds"),
        (step_with(("sum(losses) if link.is_last else None", "None")), "None"),
        (step_with(("y = stage(x)", "y = stage(x).detach().requires_grad_()")), "has no gradient"),
        (step_with(*NOT_IN_THE_LOSS, SCALED_AT_LAST), "do not clear or scale what is there"),
        (
            step_with(("in_flight, losses", "stage.zero_grad(); in_flight, losses")),
            "do not clear or scale what is there",
        ),
    ],
)
def test_a_step_that_is_still_ill_is_told_from_its_symptom(answer: Answer, words: str) -> None:
    refuses("mended_step", answer, words)


@pytest.mark.ranks
def test_a_healthy_step_has_the_loss_and_the_gradients_of_one_process() -> None:
    findings = examine(mended_step, 4)
    assert findings.loss == pytest.approx(findings.loss_of_one, rel=1e-12)
    assert findings.sizes == pytest.approx((1, 1, 1), rel=1e-12)
    assert findings.largest < 1e-12


@pytest.mark.ranks
def test_each_patient_has_a_symptom_of_its_own() -> None:
    a, b, c = (examine(PATIENTS[name], 4) for name in "ABC")
    assert c.sizes == pytest.approx((4, 4, 4))
    assert c.cosines == pytest.approx((1, 1, 1))
    assert b.loss != pytest.approx(b.loss_of_one, rel=1e-6)
    assert a.loss == pytest.approx(a.loss_of_one)
    assert a.cosines[2] == pytest.approx(1)
    assert max(a.cosines[:2]) < 0.99


def test_cuts_are_timed_on_one_rank_and_on_two() -> None:
    slots = time_cuts((1, 2), rows=16, repeats=1)
    assert slots.best in (1, 2)
    assert slots.shared[2].n_ranks == 2
    assert slots.slot_ms(2) == pytest.approx(500 * float(slots.alone[2].makespan))
    assert str(slots).startswith("m =  1: m + 1 slots of ")
