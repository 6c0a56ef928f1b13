"""The graders of notebook 08, by what learners hand in."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.fsdp_clinic import PATIENTS
from course_pp.launch import on_ranks
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


def gathers_by_following_a_group(reshard: bool, m: int, groups: int, pipeline: bool) -> int:
    whole, number = False, 0
    for _ in range(m):
        for action in "FB":
            number += not whole
            whole = not reshard if action == "F" else pipeline
    return number * groups


def test_another_way_to_the_gathers_is_correct() -> None:
    accepts("gathers", gathers_by_following_a_group)


def by_policy(pipelined: Answer, plain: Answer) -> Answer:
    return lambda again, m, groups, pp: groups * (pipelined if pp else plain)(again, m)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_policy(lambda a, m: 2 * m if a else 1, lambda a, m: 2 * m if a else m), "the next forward finds it"),
        (by_policy(lambda a, m: m if a else 1, lambda a, m: 2 * m if a else m), "very first gather"),
        (by_policy(lambda a, m: m + 1 if a else 1, lambda a, m: m + 1 if a else 1), "each backward frees"),
        (by_policy(lambda a, m: 2 * m if a else m, lambda a, m: 2 * m if a else m), "before the last"),
        (by_policy(lambda a, m: m + 1 if a else 1, lambda a, m: 2 * m if a else 1), "False keeps what *forward*"),
        (by_policy(lambda a, m: m + 1 if a else 1, lambda a, m: m + 1 if a else m), "two gathers a microbatch"),
        (by_policy(lambda a, m: 2 * m if a else m, lambda a, m: m + 1 if a else 1), "two loops have changed places"),
        (by_policy(lambda a, m: 1 if a else m + 1, lambda a, m: m if a else 2 * m), "policies have changed places"),
        (lambda a, m, groups, pp: (m + 1 if a else 1) if pp else (2 * m if a else m), "for one group"),
        (lambda a, m, groups, pp: 5, "(True, 8, 4, True)` gave 5, which should be 36"),
        (lambda a, m, groups, pp: None, "None"),
    ],
)
def test_a_wrong_number_of_gathers_is_told_why(answer: Answer, words: str) -> None:
    refuses("gathers", answer, words)


def bytes_one_by_one(layers: int, layer: int, root: int, n: int, reshard: bool, pipeline: bool) -> Fraction:
    kept = Fraction(0)
    for i, group in enumerate([root] + [layer] * layers):
        kept += 3 * Fraction(group, n)
        kept += group if pipeline else Fraction(group, n)
        kept += group if pipeline or not reshard or i <= 2 else 0
    return kept


def test_bytes_may_be_added_one_by_one() -> None:
    accepts("rank_bytes", bytes_one_by_one)


def bytes_with(pipelined: Answer, plain: Answer, shards: int = 3, whole: bool = True) -> Answer:
    def answer(layers: int, layer: int, root: int, n: int, reshard: bool, pipeline: bool) -> float:
        model = layers * layer + root
        gathered = (pipelined if pipeline else plain)(layers, layer, root, reshard)
        return shards * model / n + float(gathered) + (model if whole and pipeline else model / n)

    return answer


def everything(layers: int, layer: int, root: int, reshard: bool) -> int:
    return root + layers * layer


def by_formula(layers: int, layer: int, root: int, reshard: bool) -> int:
    return root + (min(2, layers) if reshard else layers) * layer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (bytes_with(by_formula, by_formula), "does not lower the peak"),
        (bytes_with(everything, by_formula, whole=False), "Until then they are whole"),
        (bytes_with(by_formula, by_formula, whole=False), "makes no difference"),
        (bytes_with(everything, lambda n, b, root, again: root + (1 if again else n) * b), "*two* layers"),
        (bytes_with(everything, lambda n, b, root, again: root + (2 if again else n) * b), "one layer cannot"),
        (bytes_with(everything, lambda n, b, root, again: (min(2, n) if again else n) * b), "root is gathered"),
        (bytes_with(everything, everything), "without a pipeline it does"),
        (bytes_with(lambda *_: 0, lambda *_: 0, whole=False), "between steps"),
        (bytes_with(everything, by_formula, shards=2), "two moments"),
        (bytes_with(everything, by_formula, shards=1), "optimizer's state counts"),
        (lambda *sizes: "many", "a number is asked for"),
    ],
)
def test_wrong_bytes_are_told_why(answer: Answer, words: str) -> None:
    refuses("rank_bytes", answer, words)


def by_comparing_times(
    room: float, layers: int, layer: float, forward: float, gather: float, pipeline: bool
) -> bool | None:
    choices = []
    for policy in (True, False):
        kept = 2 * layer if policy and not pipeline else layers * layer
        seconds = max(forward, gather) + max(2 * forward, gather * (1 + policy)) + pipeline * policy * gather
        if kept <= room:
            choices.append((seconds, kept, policy))
    return min(choices)[2] if choices else None


def test_the_policy_may_be_chosen_by_comparing_times() -> None:
    accepts("choose_reshard", by_comparing_times)


def choosing(hidden: Answer = lambda f, g: g <= f, least: int = 2, pipelined: Answer | None = None) -> Answer:
    def answer(room: float, layers: int, layer: float, forward: float, gather: float, pipeline: bool) -> bool | None:
        fits = layers * layer <= room
        if pipeline:
            return pipelined(room, fits, layer) if pipelined else (False if fits else None)
        if fits and not hidden(forward, gather):
            return False
        return True if least * layer <= room else None

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (choosing(pipelined=lambda room, fits, layer: not fits), "True does not lower the peak"),
        (choosing(pipelined=lambda room, fits, layer: not fits if 2 * layer <= room else None), "does not lower"),
        (choosing(pipelined=lambda room, fits, layer: False), "both policies keep all layers"),
        (lambda *sizes: not sizes[-1], '"auto"'),
        (lambda room, n, b, f, g, pp: g <= f and not pp, "`room` makes no difference"),
        (choosing(hidden=lambda f, g: True), "True is not always free"),
        (choosing(hidden=lambda f, g: False), "True keeps less"),
        (choosing(hidden=lambda f, g: g <= 2 * f), "2 gathers in 2 forwards"),
        (choosing(hidden=lambda f, g: g < f), "just hidden"),
        (choosing(least=1), "two layers are there in backward"),
        (choosing(least=0), "answer None"),
        (lambda *sizes: "auto", "True, False or None is asked for"),
        (lambda *sizes: None, "which should be"),
    ],
)
def test_a_wrong_choice_is_told_why(answer: Answer, words: str) -> None:
    refuses("choose_reshard", answer, words)


def sent_in_rounds(model: int, replicate: int, shard: int, reshard: bool) -> list[Fraction]:
    def ring(size: Fraction, n: int) -> Fraction:
        return sum((size / n for _ in range(n - 1)), start=Fraction(0))

    own = Fraction(model, shard)
    over_shard = [ring(Fraction(model), shard) for _ in range(3 if reshard else 2)]
    return [sum(over_shard, start=Fraction(0)), ring(own, replicate) * 2]


def test_what_hsdp_sends_may_be_added_up_in_rounds() -> None:
    accepts("hsdp_bytes", sent_in_rounds)


def ring(n: int) -> float:
    return (n - 1) / n


def rounds(again: bool) -> int:
    return 3 if again else 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda b, r, s, again: (rounds(again) * b * ring(s), 2 * b * ring(r)), "a shard of it"),
        (lambda b, r, s, again: (rounds(again) * b * ring(s), b * ring(r)), "a shard of it"),
        (lambda b, r, s, again: (rounds(again) * b * ring(s), b / s * ring(r)), "twice (n - 1)/n"),
        (lambda b, r, s, again: (2 * b / s * ring(r), rounds(again) * b * ring(s)), "The two have changed places"),
        (lambda b, r, s, again: ((rounds(again) - 1) * b * ring(s), 2 * b / s * ring(r)), "one reduce-scatter"),
        (lambda b, r, s, again: (3 * b * ring(s), 2 * b / s * ring(r)), "makes no difference"),
        (lambda b, r, s, again: (rounds(not again) * b * ring(s), 2 * b / s * ring(r)), "policies have changed"),
        (lambda b, r, s, again: (rounds(again) * b, 2 * b / s), "already has its own part"),
        (lambda b, r, s, again: (rounds(again) * b * ring(r * s), 2 * b / s * ring(r)), "not from all"),
        (lambda b, r, s, again: ((rounds(again) + 1) * b * ring(s), 2 * b / s * ring(r)), "half an all-reduce"),
        (lambda b, r, s, again: rounds(again) * b * ring(s), "a list is asked for"),
        (lambda b, r, s, again: (0, 0, 0), "3 entries, not 2"),
    ],
)
def test_wrong_bytes_of_hsdp_are_told_why(answer: Answer, words: str) -> None:
    refuses("hsdp_bytes", answer, words)


def accumulating(
    sync: Callable[[int, int], bool] = lambda i, m: i == m - 1,
    share: Callable[[Any, int, int], Any] = lambda loss, m, n: loss / m,
    reshard: Callable[[int, int], bool] = lambda i, m: True,
) -> Answer:
    """The step of the bug clinic, right unless told otherwise."""

    def step(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
        m, n = len(microbatches), dist.get_world_size()
        for i, (x, target) in enumerate(zip(microbatches, targets, strict=True)):
            model.set_requires_gradient_sync(sync(i, m))
            model.set_reshard_after_backward(reshard(i, m))
            share(loss_fn(model(x), target), m, n).backward()

    return step


def one_backward(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    losses = [loss_fn(model(x), target) for x, target in zip(microbatches, targets, strict=True)]
    torch.stack(losses).mean().backward()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "answer", [accumulating(reshard=lambda i, m: i == m - 1), one_backward], ids=["gathers once", "one backward"]
)
def test_gradients_may_be_accumulated_in_several_ways(answer: Answer) -> None:
    accepts("accumulate_sharded", answer)


def as_shown(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    for x, target in zip(microbatches, targets, strict=True):
        (loss_fn(model(x), target) / len(microbatches)).backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def all_at_once(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    loss_fn(model(torch.cat(microbatches)), torch.cat(targets)).backward()


def divides_in_the_loop(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    for x, target in zip(microbatches, targets, strict=True):
        loss_fn(model(x), target).backward()
        for parameter in model.parameters():
            parameter.grad /= len(microbatches)


def says_too_late(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    """Its first call leaves two gradients unreduced, which its second one completes."""
    m = len(microbatches)
    for i, (x, target) in enumerate(zip(microbatches, targets, strict=True)):
        (loss_fn(model(x), target) / m).backward()
        model.set_requires_gradient_sync(i == m - 1)


def right_once(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    """It leaves the model as it must not be for the next step."""
    accumulating()(model, microbatches, targets, loss_fn)
    model.set_requires_gradient_sync(False)
    loss_fn(model(microbatches[0]), targets[0]).backward()


def keeps_the_last(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    for x, target in zip(microbatches, targets, strict=True):
        model.zero_grad()
        (loss_fn(model(x), target) / len(microbatches)).backward()


def empties_its_lists(model: Any, microbatches: Any, targets: Any, loss_fn: Any) -> None:
    accumulating()(model, list(microbatches), list(targets), loss_fn)
    microbatches.clear()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says_too_late, "Only the first microbatch is in them"),
        (keeps_the_last, "Only the last microbatch is in them"),
        (right_once, "In the second, after `model.zero_grad()`, the gradients differ"),
        (empties_its_lists, "changed its argument `microbatches`, which had 3 entries and now has 0"),
        (as_shown, "0.5 times one process's"),
        (accumulating(share=lambda loss, m, n: loss / m / n), "averages over its ranks"),
        (accumulating(sync=lambda i, m: True), "9 reduce-scatters were begun for 3 groups"),
        (accumulating(share=lambda loss, m, n: loss), "1/m is missing"),
        (accumulating(share=lambda loss, m, n: loss / n), "not over microbatches"),
        (accumulating(share=lambda loss, m, n: loss * n / m), "leave it alone"),
        (accumulating(share=lambda loss, m, n: loss / m / m), "1/m enters twice"),
        (accumulating(sync=lambda i, m: False), "its gradients were never reduced"),
        (accumulating(reshard=lambda i, m: False), "let the last backward free them"),
        (divides_in_the_loop, "divided again"),
        (all_at_once, "rows at once"),
    ],
)
def test_a_step_that_is_still_ill_is_told_from_its_symptom(answer: Answer, words: str) -> None:
    refuses("accumulate_sharded", answer, words)


@pytest.mark.long
@pytest.mark.timeout(60)
def test_patients_have_the_symptoms_that_the_notebook_tells() -> None:
    [a, b, c] = (on_ranks(4, patient)[0] for patient in PATIENTS.values())
    assert (a.gathers, a.reductions, round(a.ratio, 9)) == (9, 1, 1)
    assert (b.gathers, b.reductions, round(b.ratio, 9)) == (8, 8, 1)
    assert (c.gathers, c.reductions, round(c.ratio, 9)) == (8, 1, 0.25)
