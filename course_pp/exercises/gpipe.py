"""Notebook 02: the bubble, all forwards then all backwards, the 1/m, and memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise, Mistake
from course_pp.exercises.expect import close, expect_number
from course_pp.exercises.gpipe_clinic import grade_mended_step, mended_step
from course_pp.exercises.gpipe_order import afab_order, grade_afab_order
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.lopsided import LopsidedLoss

__all__ = ["EXERCISES"]

_Formula = Callable[..., float]


def bubble(p: int, m: int) -> float:
    """Share of the time in which a rank idles: p ranks, m microbatches."""
    return (p - 1) / (m + p - 1)


_WRONG_BUBBLES: tuple[tuple[_Formula, str], ...] = (
    (lambda p, m: (p - 1) / m, "That is idle time over useful time. Divide by all of the time, m + p - 1 slots."),
    (lambda p, m: m / (m + p - 1), "That is the share in which a rank works. The bubble is the rest."),
    (lambda p, m: (p - 1) / p, "That is the bubble of one microbatch: m has to lower it."),
    (lambda p, m: p / (m + p), "A rank idles for p - 1 slots, not p: a rank alone waits for nobody."),
    (lambda p, m: (p - 1) / (m + p), "The step is m + p - 1 slots long: the last rank begins only p - 1 slots late."),
    (lambda p, m: 2 * (p - 1) / (m + p - 1), "Of forwards and backwards, 2 (m + p - 1) slots, 2 (p - 1) are idle."),
    (
        lambda p, m: (p - 1) / (2 * (m + p - 1)),
        "Forwards and backwards each have a bubble: of 2 (m + p - 1), 2 (p - 1).",
    ),
    (lambda p, m: 100 * (p - 1) / (m + p - 1), "Give a share from 0 to 1, not per cent."),
    (lambda p, m: (p - 1) // (m + p - 1), "`//` drops what comes after the point: divide with `/`."),
)


def _grade_bubble(answer: Answer) -> None:
    cases = [(2, 1), (2, 2), (4, 3), (4, 8), (8, 8), (3, 50), (1, 4)]
    _match(answer, cases, bubble, _WRONG_BUBBLES)


def _match(
    answer: Answer, cases: Sequence[tuple[Any, ...]], right: _Formula, wrong: Sequence[tuple[_Formula, str]]
) -> None:
    """Compare with ``right``; what equals one of the ``wrong`` formulas in every case is told why it is wrong."""
    results = [expect_number(got, f"{answer.name}{case}") for case, got in zip(cases, answer.calls(cases), strict=True)]

    def first_difference(formula: _Formula) -> int | None:
        pairs = enumerate(zip(cases, results, strict=True))
        return next((i for i, (case, got) in pairs if not close(got, formula(*case))), None)

    if (index := first_difference(right)) is None:
        return
    causes = [cause for formula, cause in wrong if first_difference(formula) is None]
    case, got = cases[index], results[index]
    raise Mistake(
        f"`{answer.name}{case}` gave {got:.12g}, which should be {right(*case):.12g}.", causes[0] if causes else ""
    )


def accumulate(
    model: torch.nn.Module, microbatches: list[torch.Tensor], targets: list[torch.Tensor], loss_fn: torch.nn.Module
) -> float:
    """Add the gradient of the mean loss over all rows to .grad, one microbatch at a time; return that mean."""
    rows = sum(len(microbatch) for microbatch in microbatches)
    mean = 0.0
    for x, target in zip(microbatches, targets, strict=True):
        share = loss_fn(model(x), target) * len(x) / rows
        share.backward()
        mean += share.item()
    return mean


class _Accumulated(NamedTuple):
    """What one call of the answer left behind, and a second; of how many forwards autograd kept activations at once."""

    loss: Any
    gradient: Tensor | None
    after_two: Tensor | None
    most_rows: int
    most_kept: int


_SHARES: tuple[tuple[Callable[[Sequence[int]], list[float]], str], ...] = (
    (lambda n: [1 / len(n)] * len(n),
     "Each microbatch counts the same, whatever its size: a row of a small one weighs more than a row of a large one."),
    (lambda n: [1.0] * len(n),
     "The microbatches' gradients are added up and never divided."),
    (lambda n: [float(k) for k in n],
     "Each microbatch is weighted by its rows, but the sum is not divided by all rows."),
    (lambda n: [1 / sum(n)] * len(n),
     "A mean over n rows is divided by all rows: multiply it by n first."),
    (lambda n: [k / sum(n) / len(n) for k in n],
     "The weights are n / (all rows), and then everything is divided by m as well: one of the two."),
    (lambda n: [n[0] / sum(n)] + [0.0] * (len(n) - 1),
     "Only the first microbatch's gradient is there: is the `return` inside the loop?"),
    (lambda n: [0.0] * (len(n) - 1) + [n[-1] / sum(n)],
     "Only the last microbatch's gradient is there: do not zero gradients in between, and call backward for each."),
    (lambda n: [0.0] * (len(n) - 1) + [1.0],
     "Only the last microbatch's gradient is there: do not zero gradients in between, and call backward for each."),
)  # fmt: skip


def _grade_accumulate(answer: Answer) -> None:
    cases = [(1, 2, 5), (4, 4), (3, 1), (6,)]
    (results,) = answer.on_ranks(1, _accumulated, cases)
    for sizes, result in zip(cases, results, strict=True):
        what = f"With microbatches of {_spelled(sizes)} rows"
        parts = _gradients_of_each(sizes)
        right = _weighted(parts, [n / sum(sizes) for n in sizes])
        if result.gradient is None:
            raise Mistake(f"{what} the parameters have no gradient.", "Call backward on each microbatch's share.")
        if not _close(result.gradient, right):
            cause = next((why for share, why in _SHARES if _close(result.gradient, _weighted(parts, share(sizes)))), "")
            ratio = float(result.gradient.norm() / right.norm())
            away = float((result.gradient - right).norm() / right.norm())
            example = f"norms over that of the right gradient: yours {ratio:.3f}, the difference {away:.3f}"
            raise Mistake(f"{what} the gradients differ from those of the whole batch.", cause, example)
        if len(sizes) > 1 and result.most_rows == sum(sizes):
            cause = "Give it one microbatch at a time: the whole batch at once is what does not fit."
            raise Mistake(f"{what} the gradients are right, but the model was given all rows at once.", cause)
        if result.most_kept > 1:
            cause = (
                "A backward frees what its forward has kept. Call it for each microbatch's share before the next "
                "forward, not once for the sum of all losses, and without `retain_graph`."
            )
            kept = f"the activations of {result.most_kept} microbatches were held at once"
            raise Mistake(f"{what} the gradients are right, but {kept}.", cause)
        if not _close(result.after_two, 2 * right):
            cause = "Add to `.grad`, as `loss.backward()` does: do not clear or scale what is there."
            raise Mistake(f"{what} a second call does not add its gradients to the first's.", cause)
        loss = expect_number(result.loss, f"accumulate with microbatches of {_spelled(sizes)} rows")
        inputs, outputs = _rows(sizes)
        whole = LopsidedLoss()(_small_model()(inputs), outputs).item()
        if not close(loss, whole):
            cause = "Return the mean over all rows, with the same weights as in the gradient."
            raise Mistake(
                f"{what} the gradients are right, but the loss returned is {loss:.8g}, not {whole:.8g}.", cause
            )


def _accumulated(rank: int, fn: Callable[..., Any], cases: Iterable[Sequence[int]]) -> list[_Accumulated]:
    results = []
    for sizes in cases:
        model, (x, y), kept = _small_model(), _rows(sizes), _Kept()
        model.register_forward_pre_hook(lambda _, args, kept=kept: kept.begin_forward(len(args[0])))
        microbatches, targets = list(x.split(list(sizes))), list(y.split(list(sizes)))
        weights = {name: p.detach() for name, p in model.named_parameters()}
        with unchanged(microbatches=microbatches, targets=targets, model=weights):
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, _SavedTensor.unpack):
                loss = fn(model, microbatches, targets, LopsidedLoss())
            once = _flat_gradient(model)
            fn(model, microbatches, targets, LopsidedLoss())
        results.append(_Accumulated(loss, once, _flat_gradient(model), kept.most_rows, kept.most_forwards))
    return results


class _SavedTensor:
    """What autograd keeps in place of a tensor: it lives for as long as the backward may still need it."""

    def __init__(self, tensor: Tensor, forward: int) -> None:
        self.tensor, self.forward = tensor, forward

    def unpack(self) -> Tensor:
        return self.tensor


class _Kept:
    """Watches the forwards of a model and what autograd keeps of them."""

    def __init__(self) -> None:
        self.most_rows = self.most_forwards = self._forward = 0
        self._saved: WeakSet[_SavedTensor] = WeakSet()

    def begin_forward(self, rows: int) -> None:
        self.most_rows, self._forward = max(self.most_rows, rows), self._forward + 1

    def pack(self, tensor: Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor, self._forward)
        self._saved.add(saved)
        self.most_forwards = max(self.most_forwards, len({each.forward for each in self._saved}))
        return saved


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def _rows(sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    return (
        torch.randn(sum(sizes), 3, dtype=torch.float64, generator=seeded),
        torch.randn(sum(sizes), 2, dtype=torch.float64, generator=seeded),
    )


def _flat_gradient(model: nn.Module) -> Tensor | None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients]).clone() if gradients else None


def _gradients_of_each(sizes: Sequence[int]) -> list[Tensor]:
    """The gradient of each microbatch's own mean loss."""
    parts = []
    for x, y in zip(*(t.split(list(sizes)) for t in _rows(sizes)), strict=True):
        model = _small_model()
        LopsidedLoss()(model(x), y).backward()
        gradient = _flat_gradient(model)
        assert gradient is not None
        parts.append(gradient)
    return parts


def _weighted(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)


def _close(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=1e-10)


def _spelled(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def peak_bytes(m: int, boundary: int, inside: int, recompute: bool) -> int:
    """Bytes of activations that a rank keeps at its peak under GPipe with m microbatches."""
    if recompute:
        return m * boundary + inside
    return m * (boundary + inside)


_WRONG_PEAKS: tuple[tuple[_Formula, str], ...] = (
    (lambda m, x, a, again: m * (x + a), "`recompute` makes no difference in your answer."),
    (lambda m, x, a, again: m * x if again else m * (x + a),
     "While a backward runs, its microbatch has been computed again: the inside of one is there, too."),
    (lambda m, x, a, again: x + a if again else m * (x + a),
     "To compute a forward again its input must be there: every microbatch keeps that."),
    (lambda m, x, a, again: m * a + x if again else m * (x + a),
     "The other way round: kept are the inputs, what lies inside is computed again."),
    (lambda m, x, a, again: m * x + a if again else m * a,
     "Without recomputation the input is kept as well: the first layer's weight gradient needs it."),
    (lambda m, x, a, again: m * x + a if again else x + a,
     "All forwards come before the first backward: then m microbatches are in flight."),
    (lambda m, x, a, again: m * (x + a) if again else m * x + a, "The two cases are swapped."),
)  # fmt: skip


def _grade_peak_bytes(answer: Answer) -> None:
    cases = [(1, 10, 70, False), (4, 10, 70, False), (4, 10, 70, True), (1, 8, 30, True), (32, 4096, 90_000, True)]
    _match(answer, cases, peak_bytes, _WRONG_PEAKS)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "bubble", "02", "the bubble of GPipe", 1, 3,
        (
            "Count in slots, each as long as one forward and one backward of one microbatch.",
            "Every rank works in m slots. How many slots after the first rank does the last one begin?",
            "A rank idles for p - 1 of the m + p - 1 slots.",
        ),
        bubble, _grade_bubble,
    ),
    Exercise(
        "afab_order", "02", "all forwards, all backwards", 2, 6,
        (
            "One list for each rank; rank r holds stage r.",
            'First `Action(rank, "F", i)` for every microbatch i, then `Action(rank, "B", i)` for every i.',
            "All ranks take the microbatches in the same order, forward and backward.",
        ),
        afab_order, grade_afab_order,
    ),
    Exercise(
        "accumulate", "02", "unequal microbatches", 2, 6,
        (
            "`loss_fn` gives a mean over the rows of a microbatch. Which factor makes it a part of the mean over all?",
            "Its share: rows of this microbatch / rows of all of them.",
            "Of each microbatch: `share = loss_fn(model(x), target) * len(x) / rows`, then `share.backward()`. Return "
            "the sum of the shares.",
        ),
        accumulate, _grade_accumulate,
    ),
    Exercise(
        "peak_bytes", "02", "bytes at the peak", 2, 4,
        (
            "Before the first backward all m microbatches are in flight. What is kept of each?",
            "With recomputation only what the stage received is kept, and one microbatch at a time is unfolded again.",
        ),
        peak_bytes, _grade_peak_bytes,
    ),
    Exercise(
        "mended_step", "02", "bug clinic", 3, 10,
        (
            "Take one symptom at a time. A wrong loss cannot come from a backward. A factor of exactly m has to do "
            "with m. A last rank that is right sends the right gradients.",
            "Are inputs and targets cut in the same way? Where is the mean over the microbatches? Which microbatch "
            "does each rank take first in its backwards?",
            "`targets.chunk(m)`; `loss_fn(y, target) / m`, and the sum of these is returned; the other ranks take the "
            "oldest microbatch first: `in_flight.pop(0)`.",
        ),
        mended_step, grade_mended_step, limit_s=10.0,
    ),
)  # fmt: skip
