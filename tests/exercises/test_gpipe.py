"""The graders of notebook 02, by what learners hand in."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from course_pp.exercises.gpipe_clinic import PATIENTS
from course_pp.runtime import recv_activation, recv_gradient, send_activation, send_gradient
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
    "answer", [bubble_with_times, bubble_as_a_tensor_of_float32, lambda p, m: Fraction(p - 1, m + p - 1)]
)
def test_another_way_to_the_bubble_is_correct(answer: Answer) -> None:
    accepts("bubble", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, m: (p - 1) / m, "useful time"),
        (lambda p, m: m / (m + p - 1), "share in which a rank works"),
        (lambda p, m: (p - 1) / p, "one microbatch"),
        (lambda p, m: p / (m + p), "p - 1 slots, not p"),
        (lambda p, m: (p - 1) / (m + p), "m + p - 1 slots long"),
        (lambda p, m: 2 * (p - 1) / (m + p - 1), "2 (p - 1) are idle"),
        (lambda p, m: (p - 1) / (2 * (m + p - 1)), "each have a bubble"),
        (lambda p, m: 100 * (p - 1) / (m + p - 1), "not per cent"),
        (lambda p, m: (p - 1) // (m + p - 1), "divide with `/`"),
        (lambda p, m: torch.tensor((p - 1) / (m + p - 1)) + 1e-4, "should be 0.5"),
        (lambda p, m: 0.25, "(2, 1)` gave 0.25, which should be 0.5"),
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


def in_halves(p: int, m: int) -> list[list[Action]]:
    return order(p, lambda rank: [Action(rank, kind, i) for kind in "FIW" for i in range(m)])


@pytest.mark.parametrize("answer", [newest_first, lambda p, m: tuple(order(p, lambda r: both(r, range(m))))])
def test_every_order_of_all_forwards_then_all_backwards_is_correct(answer: Answer) -> None:
    accepts("afab_order", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, m: order(p, lambda r: [Action(i, k, r) for k in "FB" for i in range(m)]), "have changed places"),
        (lambda p, m: order(p, lambda r: [Action(r, "F", i) for i in range(m)]), "has no backward"),
        (lambda p, m: order(p, lambda r: both(r, range(1, m + 1))), "number them from 0"),
        (lambda p, m: order(p, lambda r: [Action(r, k, i) for i in range(m) for k in "FB"]), "all forwards before"),
        (in_halves, "has `0I0`, which is no forward and no backward"),
        (last_rank_newest_first, "different orders"),
        (lambda p, m: both(0, range(m)), "one such list for each rank"),
        (lambda p, m: order(p, lambda r: both(r, range(max(1, m - 1)))), "m is 3"),
        (lambda p, m: order(p, lambda r: [f"{a}" for a in both(r, range(m))]), "something else than actions"),
        (lambda p, m: order(1, lambda r: both(r, range(m))), "gave 1 list for 2 ranks"),
        (lambda p, m: order(p, lambda r: both(0, range(m))), "cannot run: rank 1 has 0F0"),
        (lambda p, m: None, "is None; a list is asked for"),
    ],
)  # fmt: skip
def test_a_wrong_order_is_told_what_is_wrong(answer: Answer, words: str) -> None:
    refuses("afab_order", answer, words)


def both_rows(p: int, m: int) -> list[list[Action]]:
    return order(p, lambda rank: both(rank, range(m)))


def last_rank_forwards_newest_first(p: int, m: int) -> list[list[Action]]:
    rows = both_rows(p, m)
    rows[-1][:m] = reversed(rows[-1][:m])
    return rows


@pytest.mark.parametrize(
    ("answer", "gap"),
    [
        (last_rank_newest_first, "rank 0 idles from 3 to 10: "),
        (last_rank_forwards_newest_first, "rank 1 idles from 0 to 3: "),
    ],
)
def test_the_wait_that_is_shown_is_the_one_that_a_mixed_order_makes(answer: Answer, gap: str) -> None:
    refuses("afab_order", answer, "`afab_order(2, 3)` can run", gap)


def accumulating(share: Callable[..., Any]) -> Answer:
    """Backward for each microbatch from ``share(mean, n, rows, m)``; returns the right loss."""

    def accumulate(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
        rows, mean = sum(map(len, microbatches)), 0.0
        for x, target in zip(microbatches, targets, strict=True):
            loss = loss_fn(model(x), target)
            share(loss, len(x), rows, len(microbatches)).backward()
            mean += loss.item() * len(x) / rows
        return mean

    return accumulate


weighted = accumulating(lambda loss, n, rows, m: loss * n / rows)


def one_backward(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> Any:
    shares = [len(x) * loss_fn(model(x), target) for x, target in zip(microbatches, targets, strict=True)]
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


def forward_again_for_the_loss(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> torch.Tensor:
    weighted(model, microbatches, targets, loss_fn)
    with torch.no_grad():
        shares = [len(x) * loss_fn(model(x), y) for x, y in zip(microbatches, targets, strict=True)]
    return sum(shares) / sum(map(len, targets))


def mean_in_float32(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> torch.Tensor:
    return torch.tensor(weighted(model, microbatches, targets, loss_fn))


def mean_with_its_graph(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> Any:
    mean: Any = 0.0
    for x, target in zip(microbatches, targets, strict=True):
        share = loss_fn(model(x), target) * len(x) / sum(map(len, targets))
        share.backward()
        mean = mean + share
    return mean


@pytest.mark.parametrize(
    "answer", [weighted, scaled_afterwards, forward_again_for_the_loss, mean_in_float32, mean_with_its_graph]
)
def test_gradients_may_be_accumulated_in_several_ways(answer: Answer) -> None:
    accepts("accumulate", answer)


def clears_first(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    model.zero_grad()
    return float(weighted(model, microbatches, targets, loss_fn))


def scales_what_is_there(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    rows = sum(map(len, targets))
    mean = accumulating(lambda loss, n, rows, m: loss * n)(model, microbatches, targets, loss_fn)
    for p in model.parameters():
        p.grad /= rows
    return float(mean)


def keeps_every_graph(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    losses = []
    for x, target in zip(microbatches, targets, strict=True):
        losses.append(loss_fn(model(x), target) * len(x) / sum(map(len, targets)))
        losses[-1].backward(retain_graph=True)
    return float(sum(losses))


def clears_in_between(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    for x, target in zip(microbatches, targets, strict=True):
        model.zero_grad()
        (loss_fn(model(x), target) * len(x) / sum(map(len, targets))).backward()
    return 0.0


def all_at_once(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    loss = loss_fn(model(torch.cat(microbatches)), torch.cat(targets))
    loss.backward()
    return float(loss)


def mean_of_means(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    weighted(model, microbatches, targets, loss_fn)
    with torch.no_grad():
        losses = [loss_fn(model(x), target) for x, target in zip(microbatches, targets, strict=True)]
    return float(sum(losses) / len(losses))


def no_backward(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> float:
    return float(mse_loss(model(torch.cat(microbatches)), torch.cat(targets)))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (accumulating(lambda loss, n, rows, m: loss / m), "counts the same, whatever its size"),
        (accumulating(lambda loss, n, rows, m: loss), "never divided"),
        (accumulating(lambda loss, n, rows, m: loss * n), "not divided by all rows"),
        (accumulating(lambda loss, n, rows, m: loss / rows), "multiply it by n first"),
        (accumulating(lambda loss, n, rows, m: loss * n / rows / m), "one of the two"),
        (clears_in_between, "Only the last microbatch's gradient"),
        (clears_first, "do not clear or scale what is there"),
        (scales_what_is_there, "do not clear or scale what is there"),
        (one_backward, "microbatches were held at once"),
        (keeps_every_graph, "without `retain_graph`"),
        (all_at_once, "all rows at once"),
        (mean_of_means, "the loss returned is"),
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


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda m, x, a, again: m * (x + a), "makes no difference"),
        (lambda m, x, a, again: m * x if again else m * (x + a), "the inside of one is there"),
        (lambda m, x, a, again: x + a if again else m * (x + a), "every microbatch keeps that"),
        (lambda m, x, a, again: m * a + x if again else m * (x + a), "The other way round"),
        (lambda m, x, a, again: m * x + a if again else m * a, "the input is kept as well"),
        (lambda m, x, a, again: m * x + a if again else x + a, "m microbatches are in flight"),
        (lambda m, x, a, again: m * (x + a) if again else m * x + a, "swapped"),
    ],
)
def test_wrong_bytes_are_told_why(answer: Answer, words: str) -> None:
    refuses("peak_bytes", answer, words)


def stepping(
    cut: Callable[..., Any] = torch.chunk,
    take: Callable[[bool], int] = lambda is_last: 0,
    share: Callable[[Any, int], Any] = lambda loss, m: loss / m,
    returned: Callable[..., Any] = lambda losses, m: sum(losses) / m,
    sends_gradients: bool = True,
    detaches: bool = False,
    arriving: Callable[[Any, int], Any] = lambda dy, m: dy,
) -> Answer:
    """A step of the bug clinic, right unless told otherwise."""

    def step(stage: Any, inputs: Any, targets: Any, m: int, loss_fn: Any, link: Any) -> Any:
        in_flight, losses, sends = [], [], []
        for microbatch, target in zip(inputs.chunk(m), cut(targets, m), strict=True):
            x = recv_activation(microbatch, link)
            y = stage(x)
            sends += send_activation(y, link)
            if link.is_last:
                losses.append(loss_fn(y, target))
                y = losses[-1]
            elif detaches:
                y = y.detach().requires_grad_()
            in_flight.append((x, y))
        while in_flight:
            x, y = in_flight.pop(take(link.is_last))
            if link.is_last:
                share(y, m).backward()
            else:
                y.backward(arriving(recv_gradient(y, m, link), m))
            if sends_gradients:
                sends += send_gradient(x.grad, link)
        for send in sends:
            send.wait()
        return returned([loss.detach() for loss in losses], m) if link.is_last else None

    return step


def scales_the_gradients(stage: Any, inputs: Any, targets: Any, m: int, loss_fn: Any, link: Any) -> Any:
    loss = stepping(share=lambda loss, m: loss)(stage, inputs, targets, m, loss_fn, link)
    for p in stage.parameters():
        p.grad /= m
    return loss


def clears_the_gradients(stage: Any, inputs: Any, targets: Any, m: int, loss_fn: Any, link: Any) -> Any:
    stage.zero_grad()
    return stepping()(stage, inputs, targets, m, loss_fn, link)


@pytest.mark.sample(2)
@pytest.mark.parametrize("answer", [stepping(), stepping(take=lambda is_last: -1)])
def test_the_step_may_be_mended_with_the_oldest_or_the_newest_first(answer: Answer) -> None:
    accepts("mended_step", answer)


def strided(targets: Any, m: int) -> list[Any]:
    return [targets[i::m] for i in range(m)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (PATIENTS["A"], "belongs to another microbatch"),
        (PATIENTS["B"], "how inputs and targets are cut"),
        (PATIENTS["C"], "Exactly m times too large"),
        (stepping(cut=strided), "how inputs and targets are cut"),
        (stepping(share=lambda loss, m: loss), "Exactly m times too large"),
        (stepping(share=lambda loss, m: loss / m / m), "1/m enters twice"),
        (stepping(arriving=lambda dy, m: dy / m), "1/m enters on more than one rank; the chain rule already carries"),
        (stepping(arriving=lambda dy, m: dy * 3), "Wrong by a factor"),
        (stepping(take=lambda is_last: 0 if is_last else -1), "order in which the ranks do their backwards"),
        (stepping(returned=lambda losses, m: sum(losses)), "return their mean"),
        (stepping(returned=lambda losses, m: None), "None"),
        (stepping(detaches=True), "has no gradient"),
        (scales_the_gradients, "a second step does not add its gradients"),
        (clears_the_gradients, "do not clear or scale what is there"),
    ],
)
def test_a_step_that_is_still_ill_is_told_from_its_symptom(answer: Answer, words: str) -> None:
    refuses("mended_step", answer, words)
