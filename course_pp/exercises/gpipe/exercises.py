"""Notebook 02: the bubble, all forwards then all backwards, the 1/m, memory, and a clinic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from course_pp.exercises.answer import Answer
from course_pp.exercises.bench import (
    Bench,
    ForwardWatch,
    Outcome,
    WrongGradients,
    same,
    shifted,
    with_norm,
)
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import close, expect_list, expect_number
from course_pp.exercises.formula import Formula, flawed
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, why
from course_pp.exercises.orders import judge_orders, read_order
from course_pp.launch import on_ranks
from course_pp.runtime import (
    Link,
    Pipeline,
    Recorder,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
)
from course_pp.schedule import Action, Timeline, build


def bubble(p: int, m: int) -> float:
    """Share of the time in which a rank idles: p ranks, m microbatches."""
    return (p - 1) / (m + p - 1)


_WRONG_BUBBLES = (
    (lambda p, m: (p - 1) / m,
     "That is idle time over useful time. Divide by all of the time, m + p - 1 slots."),
    (lambda p, m: m / (m + p - 1),
     "That is the share in which a rank works. The bubble is the rest."),
    (lambda p, m: (p - 1) / p, "That is the bubble of one microbatch: m has to lower it."),
    (lambda p, m: p / (m + p),
     "A rank idles for p - 1 slots, not p: a rank alone waits for nobody."),
    (lambda p, m: (p - 1) / (m + p),
     "The step is m + p - 1 slots long: the last rank begins only p - 1 slots late."),
    (lambda p, m: 2 * (p - 1) / (m + p - 1),
     "Forwards and backwards take 2 (m + p - 1) slots, and 2 (p - 1) of these are idle."),
    (lambda p, m: (p - 1) / (2 * (m + p - 1)),
     "Forwards and backwards each have a bubble: of 2 (m + p - 1), 2 (p - 1)."),
    (lambda p, m: 100 * (p - 1) / (m + p - 1), "Give a share from 0 to 1, not per cent."),
    (lambda p, m: (p - 1) // (m + p - 1),
     "`//` drops what comes after the point: divide with `/`."),
)  # fmt: skip
_GRADE_BUBBLE = Formula(
    bubble,
    [(2, 1), (2, 2), (4, 3), (4, 8), (8, 8), (3, 50), (1, 4)],
    _WRONG_BUBBLES,
    "Count slots: in how many does a rank work, and how many are there from the first start to the"
    " last end?",
)


def afab_order(p: int, m: int) -> list[list[Action]]:
    """For each of p ranks its actions in order: all m forwards, then all m backwards."""
    rows = []
    for rank in range(p):
        forwards = [Action(rank, "F", i) for i in range(m)]
        backwards = [Action(rank, "B", i) for i in range(m)]
        rows.append(forwards + backwards)
    return rows


def _grade_order(answer: Answer) -> None:
    cases = [(1, 1), (2, 1), (2, 3), (3, 2), (4, 8), (1, 4), (6, 5)]
    for (p, m), value in zip(cases, answer.calls(cases), strict=True):
        call = f"afab_order({p}, {m})"
        lists = expect_list(value, call)
        if len(lists) != p or any(isinstance(each, Action) for each in lists):
            gave = f"{len(lists)} of {p} lists"
            if lists and isinstance(lists[0], Action):
                gave = "one list of actions"
            cause = "Return a list with one list of actions for each rank."
            raise Mistake(f"`{call}` gave {gave}.", cause)
        rows = [_read_row(each, f"{call}[{rank}]", rank, m) for rank, each in enumerate(lists)]
        # An order that _read_row lets pass can run, and holds m activations as the reference does.
        judge_orders(
            f"With p={p} and m={m}",
            rows,
            build("gpipe", p, m),
            impossible="",
            crowded="",
            slow="The ranks take the microbatches in different orders, so one waits for what"
            " another does late.",
        )


def _read_row(value: Any, what: str, rank: int, m: int) -> tuple[Action, ...]:
    def foreign(action: Action) -> str:
        causes = (
            (action.kind in "IW",
             "`I` and `W` are the halves of a backward, for schedules that part them. Here it is"
             " whole: `B`."),
            (action.stage != rank == action.microbatch,
             "Have stage and microbatch changed places? It is `Action(stage, kind, microbatch)`."),
            (action.stage != rank, f"Rank {rank} holds stage {rank}, and does nothing in another."),
            (OTHERWISE, f"m is {m}: number the microbatches from 0 to {m - 1}."),
        )  # fmt: skip
        return why(causes)

    def lacking(action: Action) -> str:
        if action.kind == "B":
            return (
                'After all forwards comes the backward of each microbatch, as `Action(rank, "B",'
                " i)`."
            )
        return (
            f"m is {m}: every rank does the forward and the backward of each microbatch, 0 to"
            f" {m - 1}."
        )

    wanted = [Action(rank, kind, i) for kind in "FB" for i in range(m)]
    row, example = read_order(value, what, wanted, foreign=foreign, lacking=lacking)
    for before, action in pairwise(row):
        if (before.kind, action.kind) == ("B", "F"):
            cause = "GPipe does all forwards before the first backward."
            raise Mistake(f"`{what}` does `{before}` before `{action}`.", cause, example)
    return row


def accumulate(
    model: torch.nn.Module,
    microbatches: list[torch.Tensor],
    targets: list[torch.Tensor],
    loss_fn: torch.nn.Module,
) -> float:
    """Add the gradient of the mean loss over all rows to .grad, one microbatch at a time; return that mean."""
    rows = sum(len(microbatch) for microbatch in microbatches)
    mean = 0.0
    for x, target in zip(microbatches, targets, strict=True):
        share = loss_fn(model(x), target) * len(x) / rows
        share.backward()
        mean += share.item()
    return mean


_SHARES: tuple[tuple[Callable[[Sequence[int]], list[float]], str], ...] = (
    (lambda n: [1 / len(n)] * len(n),
     "Each microbatch counts the same, whatever its size: a row of a small one weighs more than a"
     " row of a large one."),
    (lambda n: [1.0] * len(n), "The microbatches' gradients are added up and never divided."),
    (lambda n: [float(k) for k in n],
     "Each microbatch is weighted by its rows, but the sum is not divided by all rows."),
    (lambda n: [1 / sum(n)] * len(n),
     "A mean over n rows is divided by all rows: multiply it by n first."),
    (lambda n: [k / sum(n) / len(n) for k in n],
     "The weights are n / (all rows), and then everything is divided by m as well: one of the"
     " two."),
    (lambda n: [n[0] / sum(n)] + [0.0] * (len(n) - 1),
     "Only the first microbatch's gradient is there: is the `return` inside the loop?"),
    (lambda n: [0.0] * (len(n) - 1) + [n[-1] / sum(n)],
     "Only the last microbatch's gradient is there: do not zero gradients in between, and call"
     " backward for each."),
    (lambda n: [k / sum(n) for k in n[:-1]] + [0.0],
     "The last microbatch's gradient is missing: every microbatch counts."),
    (lambda n: [sum(n) / k for k in n],
     "The weights are upside down: the rows of this microbatch over all rows."),
    (lambda n: [0.0] * (len(n) - 1) + [1.0],
     "Only the last microbatch's gradient is there: do not zero gradients in between, and call"
     " backward for each."),
)  # fmt: skip
_EACH = (
    "Each microbatch's share is `loss_fn(output, target)`, in this order, times its rows over all"
    " rows."
)
_ADDS = "Add to `.grad`, as `backward` does: do not clear or scale what is there."
BENCH = Bench(
    lambda step, seat: step(
        *seat.stages, seat.inputs, seat.targets, seat.m, seat.loss_fn, seat.link
    ),
    before=1.0,
)


class _Accumulated(NamedTuple):
    """The result of a call.

    Attributes:
        loss: value that it returned.
        gradient: gradient that it added, in one vector; None for none.
        most_rows: the most rows that one forward was given.
        most_kept: the most forwards of which autograd kept activations at once.
    """

    loss: Any
    gradient: Tensor | None
    most_rows: int
    most_kept: int


def _grade_accumulate(answer: Answer) -> None:
    model = BENCH.model()
    cases = [(1, 2, 5), (4, 4), (3, 1), (6,)]
    for sizes, result in zip(cases, answer.on_ranks(1, _accumulated, cases)[0], strict=True):
        cut = f"microbatches of {', '.join(map(str, sizes))} rows"
        microbatches, targets = _cut(sizes)
        pairs = zip(microbatches, targets, strict=True)
        parts = torch.stack([_own_gradient(model, x, target) for x, target in pairs])
        right = _weighted(parts, [n / sum(sizes) for n in sizes])
        if result.gradient is None:
            cause = "Call backward on each microbatch's share."
            raise Mistake(f"With {cut} the parameters have no gradient.", cause)

        if not same(result.gradient, right):
            # An answer that zeroes gradients loses the 1 that stood there before, too.
            found = (result.gradient, result.gradient + 1)
            causes = []
            for share, cause in _SHARES:
                wrong = _weighted(parts, share(sizes))
                causes.append((any(same(each, wrong) for each in found), cause))
            ratio = float(result.gradient.norm() / right.norm())
            away = float((result.gradient - right).norm() / right.norm())
            raise Mistake(
                f"With {cut} the gradients differ from those of the whole batch.",
                why([*causes, (shifted(result.gradient, right), _ADDS), (OTHERWISE, _EACH)]),
                f"norms over that of the right gradient: yours {ratio:.3f}, the difference"
                f" {away:.3f}",
            )

        seen = f"With {cut} the gradients are right, but"
        if len(sizes) > 1 and result.most_rows == sum(sizes):
            cause = (
                "Give it one microbatch at a time: the whole batch at once is what does not fit."
            )
            raise Mistake(f"{seen} the model was given all rows at once.", cause)
        if result.most_kept > 1:
            raise Mistake(
                f"{seen} the activations of {result.most_kept} microbatches were held at once.",
                "A backward frees what its forward has kept. Call it for each microbatch's share"
                " before the next forward, not once for the sum of all losses, and without"
                " `retain_graph`.",
            )

        loss = expect_number(result.loss, f"accumulate with {cut}")
        mean = BENCH.loss_fn(model(torch.cat(microbatches)), torch.cat(targets)).item()
        if not close(loss, mean):
            cause = "Return the mean over all rows, with the same weights as in the gradient."
            raise Mistake(f"{seen} the loss returned is {loss:.8g}, not {mean:.8g}.", cause)


def _cut(sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    inputs, targets = (each[: sum(sizes)] for each in BENCH.batch(3))
    return list(inputs.split(list(sizes))), list(targets.split(list(sizes)))


def _weighted(parts: Tensor, weights: Sequence[float]) -> Tensor:
    return torch.tensor(weights, dtype=parts.dtype) @ parts


def _own_gradient(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Return the gradient of a microbatch's own mean loss, in one vector."""
    gradients = torch.autograd.grad(BENCH.loss_fn(model(x), target), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def _accumulated(
    rank: int, fn: Callable[..., Any], cases: Sequence[Sequence[int]]
) -> list[_Accumulated]:
    results = []
    for sizes in cases:
        model = BENCH.model()
        microbatches, targets = _cut(sizes)
        kept = ForwardWatch()
        model.register_forward_pre_hook(lambda _, args, kept=kept: kept.begin_forward(len(args[0])))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        with unchanged(microbatches=microbatches, targets=targets, model=weights), kept.watching():
            loss = fn(model, microbatches, targets, BENCH.loss_fn)
        grads = [p.grad.flatten() - 1 for p in model.parameters() if p.grad is not None]
        added = torch.cat(grads or [torch.zeros(1)])
        gradient = added if added.any() else None
        results.append(
            _Accumulated(loss, gradient, most_rows=kept.most_rows, most_kept=kept.most_forwards)
        )
    return results


def peak_bytes(m: int, boundary: int, inside: int, recompute: bool) -> int:
    """Bytes of activations that a rank keeps at its peak under GPipe with m microbatches."""
    if recompute:
        return m * boundary + inside
    return m * (boundary + inside)


_WRONG_PEAKS = (
    (lambda m, x, a, again: m * (x + a), "`recompute` makes no difference in your answer."),
    (lambda m, x, a, again: m * x if again else m * (x + a),
     "While a backward runs, its microbatch has been computed again: the inside of one is there,"
     " too."),
    (lambda m, x, a, again: x + a if again else m * (x + a),
     "To compute a forward again its input must be there: every microbatch keeps that."),
    (lambda m, x, a, again: m * a + x if again else m * (x + a),
     "The other way round: kept are the inputs, what lies inside is computed again."),
    (lambda m, x, a, again: m * x + a if again else m * a,
     "Without recomputation the input is kept as well: the first layer's weight gradient needs"
     " it."),
    (lambda m, x, a, again: m * x + a if again else x + a,
     "All forwards come before the first backward: then m microbatches are in flight."),
    (lambda m, x, a, again: m * (x + a) if again else m * x + a, "The two cases are swapped."),
)  # fmt: skip
_GRADE_PEAK_BYTES = Formula(
    peak_bytes,
    [
        (1, 10, 70, False),
        (4, 10, 70, False),
        (4, 10, 70, True),
        (1, 8, 30, True),
        (32, 4096, 90_000, True),
    ],
    _WRONG_PEAKS,
    "When the first backward begins, what is kept of each of the m microbatches, and what of one of"
    " them more?",
)


def mended_step(
    stage: torch.nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    m: int,
    loss_fn: torch.nn.Module,
    link: Link,
) -> torch.Tensor | None:
    """One AFAB step with m microbatches; the mean loss of the batch on the last rank."""
    in_flight, losses, sends = [], [], []
    for microbatch, target in zip(inputs.chunk(m), targets.chunk(m), strict=True):
        x = recv_activation(microbatch, link)
        y = stage(x)
        sends += send_activation(y, link)
        if link.is_last:
            y = loss_fn(y, target) / m
            losses.append(y.detach())
        in_flight.append((x, y))
    for x, y in in_flight:
        if link.is_last:
            y.backward()
        else:
            y.backward(recv_gradient(y, m, link))
        sends += send_gradient(x.grad, link)
    for send in sends:
        send.wait()
    return sum(losses) if link.is_last else None


PATIENTS = {
    "A": flawed(
        mended_step, ("y in in_flight:", "y in in_flight if link.is_last else reversed(in_flight):")
    ),
    "B": flawed(mended_step, ("targets.chunk(m)", "[targets[i::m] for i in range(m)]")),
    "C": flawed(mended_step, ("y.backward()", "(m * y).backward()")),
}
"""Steps that run and give wrong gradients, each for another reason. Called as `mended_step` is."""


_NO_GRADIENT = (
    "Backward has to start from the output that still has its graph, on every rank and for every"
    " microbatch."
)
_WRONG_GRADIENTS: Cause = (
    (
        WrongGradients.all_are_times_m,
        "Exactly m times too large on every rank: each microbatch adds its own mean, and nothing"
        " divides by m.",
    ),
    (
        WrongGradients.all_are_an_mth,
        "Exactly an m-th on every rank: 1/m enters twice. It belongs in one place, the last rank.",
    ),
    (
        WrongGradients.are_powers_of_m,
        "Smaller by another power of m from rank to rank: 1/m enters on more than one rank; the"
        " chain rule already carries it. It belongs on the last one only.",
    ),
    (WrongGradients.are_shifted, f"{_ADDS} 1/m belongs to the loss."),
    (
        WrongGradients.are_scaled,
        "Wrong by a factor: look where gradients are scaled; 1/m enters once, on the last rank.",
    ),
    (
        WrongGradients.spare_the_last_rank,
        "The last rank is right, those before it are not: a gradient arrives, but it belongs to"
        " another microbatch. Compare the order in which the ranks do their backwards.",
    ),
    (
        OTHERWISE,
        "Look at what each backward starts from, and which microbatch it belongs to.",
    ),
)


def _grade_mended_step(answer: Answer) -> None:
    for where, m, ranks in BENCH.tried(answer, {2: (1, 4), 1: (3,), 3: (3, 2)}):
        loss, _ = BENCH.one_process(m)
        _judge_loss(where, m, ranks[-1], loss)
        BENCH.judge_gradients(where, ranks, m, missing=_NO_GRADIENT, wrong=_WRONG_GRADIENTS)


def _judge_loss(where: str, m: int, last: Outcome, right: float) -> None:
    found = expect_number(last.returned, "what mended_step returns on the last rank")
    if close(found, right):
        return
    causes = (
        (close(found, m * right),
         "That is the sum of the microbatches' losses: return their mean."),
        (close(m * found, right), "It is divided by m twice."),
        (close(found, m * m * right),
         "It is multiplied by m; the mean over m microbatches divides by it."),
        (found == 0, "No microbatch's loss is in it."),
        (any(close(found, loss) or close(m * found, loss) for loss in last.losses),
         "That is what a single microbatch adds: sum over all of them."),
        (m == 1,
         "With one microbatch nothing is cut: look at what the stage and `loss_fn(output, target)`"
         " are given."),
        (OTHERWISE,
         "The loss is known before any backward: compare how inputs and targets are cut into"
         " microbatches."),
    )  # fmt: skip
    raise Mistake(f"{where} the loss is {found:.8g}; one process has {right:.8g}.", why(causes))


EXERCISES = (
    Exercise(bubble, _GRADE_BUBBLE, "02", "the bubble of GPipe", 1, 3, (
        "Count in slots, each as long as one forward and one backward of one microbatch.",
        "Every rank works in m slots. How many slots after the first rank does the last one begin?",
        "A rank idles for p - 1 of the m + p - 1 slots.",
    )),
    Exercise(afab_order, _grade_order, "02", "all forwards, all backwards", 2, 6, (
        "One list for each rank; rank r holds stage r.",
        'First `Action(rank, "F", i)` for every microbatch i, then `Action(rank, "B", i)` for every'
        ' i.',
        "All ranks take the microbatches in the same order, forward and backward.",
    )),
    Exercise(accumulate, _grade_accumulate, "02", "unequal microbatches", 2, 6, (
        "`loss_fn` gives a mean over the rows of a microbatch. Which factor makes it a part of the"
        " mean over all?",
        "Its share: rows of this microbatch / rows of all of them.",
        "Of each microbatch: `share = loss_fn(model(x), target) * len(x) / rows`, then"
        " `share.backward()`. Return the sum of the shares.",
    )),
    Exercise(peak_bytes, _GRADE_PEAK_BYTES, "02", "bytes at the peak", 2, 4, (
        "Before the first backward all m microbatches are in flight. What is kept of each?",
        "With recomputation only what the stage received is kept, and one microbatch at a time is"
        " unfolded again.",
    )),
    Exercise(mended_step, _grade_mended_step, "02", "bug clinic", 3, 10, (
        "Take one symptom at a time. A wrong loss cannot come from a backward. A factor of exactly"
        " m has to do with m. A last rank that is right sends the right gradients.",
        "Are inputs and targets cut in the same way? Where is the mean over the microbatches? Which"
        " microbatch does each rank take first in its backwards?",
        "`targets.chunk(m)`; `loss_fn(y, target) / m`, and the sum of these is returned; the other"
        " ranks take the oldest microbatch first: `in_flight.pop(0)`.",
    ), limit_s=10.0),
)  # fmt: skip


class Compared(NamedTuple):
    """A step's loss and gradients beside those of one process.

    Attributes:
        loss: loss of the batch, as the last rank returned it.
        loss_of_one: loss of one process.
        sizes: norm of each rank's gradients over the norm of the right ones.
        cosines: cosine of the angle between the two, for each rank.
        largest: the largest difference of any gradient.
    """

    loss: float
    loss_of_one: float
    sizes: tuple[float, ...]
    cosines: tuple[float, ...]
    largest: float

    def __str__(self) -> str:
        ranks = []
        for rank, (size, cosine) in enumerate(zip(self.sizes, self.cosines, strict=True)):
            ranks.append(f"rank {rank} × {size:.2f} cos {cosine:.2f}")
        losses = f"loss {self.loss:.4f} (one process {self.loss_of_one:.4f})"
        return f"{losses}; gradients: {', '.join(ranks)}"


def examine(step: Callable[..., Any], m: int, *given: Any) -> Compared:
    """Compare ``step(stage, inputs, targets, m, loss_fn, link, *given)`` with one process.

    The step runs on three real ranks.
    """
    ward = replace(
        _WARD, call=lambda step, seat: BENCH.call(lambda *args: step(*args, *given), seat)
    )
    ranks = ward.ran(step, 3, m)
    loss, expected = ward.one_process(m)
    pairs = []
    for rank in ranks:
        right = {name: expected[name] for name in rank.gradients}
        pairs.append((_flat(rank.gradients), _flat(right)))
    return Compared(
        loss=float(ranks[-1].returned),
        loss_of_one=loss,
        sizes=tuple(float(found.norm() / right.norm()) for found, right in pairs),
        cosines=tuple(float(cosine_similarity(found, right, dim=0)) for found, right in pairs),
        largest=max(float((found - right).abs().max()) for found, right in pairs),
    )


_WARD = replace(
    BENCH, loss_fn=nn.MSELoss(), width=32, block=with_norm, rows=2, n_blocks=6, before=None
)


def _flat(gradients: Mapping[str, Tensor | None]) -> Tensor:
    return torch.cat([torch.zeros(0) if g is None else g.flatten() for g in gradients.values()])


@dataclass(frozen=True)
class Slots:
    """The same rows cut into m microbatches, timed for real.

    Attributes:
        alone: {m: timeline of the shortest step on one rank}.
        shared: {m: timeline of the shortest step on two ranks}.
    """

    alone: Mapping[int, Timeline]
    shared: Mapping[int, Timeline]

    def slot_ms(self, m: int) -> float:
        """Return the time of a forward and a backward of one microbatch on a rank alone."""
        return 1e3 * float(self.alone[m].makespan) / m

    def step_ms(self, m: int) -> float:
        """Return the time of the step on two ranks."""
        return 1e3 * float(self.shared[m].makespan)

    @property
    def best(self) -> int:
        """The m with the shortest step on two ranks."""
        return min(self.shared, key=self.step_ms)

    def __str__(self) -> str:
        lines = []
        for m in self.shared:
            slot = self.slot_ms(m)
            expected = f"m + 1 slots of {slot:5.2f} ms are {(m + 1) * slot:5.1f} ms"
            lines.append(f"m = {m:2}: {expected}; measured {self.step_ms(m):5.1f} ms")
        return "\n".join(lines)


def time_cuts(sizes: Sequence[int], rows: int = 512, repeats: int = 3) -> Slots:
    """Time GPipe steps over the same rows in m microbatches, for each m in ``sizes``.

    The steps run on one rank and on two.
    """
    alone, shared = (on_ranks(p, _shortest_steps, tuple(sizes), rows, repeats)[0] for p in (1, 2))
    return Slots(alone, shared)


def _shortest_steps(
    rank: int, sizes: Sequence[int], rows: int, repeats: int
) -> dict[int, Timeline]:
    width = 512
    p = dist.get_world_size()
    recorder = Recorder()
    stage = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    x = torch.randn(rows, width)
    y = torch.randn(rows, width)
    best = dict[int, Timeline]()
    pipelines = {
        m: Pipeline(build("gpipe", p, m), stage, nn.MSELoss(), recorder=recorder) for m in sizes
    }
    for m in tuple(sizes) * repeats:
        recorder.clear()
        pipelines[m].step(x, target=y)
        run = recorder.timeline()
        best[m] = min(run, best.get(m, run), key=lambda timeline: timeline.makespan)
    return best
