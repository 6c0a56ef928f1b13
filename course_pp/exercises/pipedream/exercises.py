"""Notebook 06: weight stashing, versions, replicas, plans, and a bug clinic."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from course_pp.exercises.answer import Answer
from course_pp.exercises.bench import TOLERANCE, Bench, ForwardWatch, Memory, Seat
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import expect_int
from course_pp.exercises.formula import Formula, flawed
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, Stopped, explained, why
from course_pp.exercises.orders import Orders, judge_orders, read_order, shown
from course_pp.exercises.traffic import last_message_waited_for
from course_pp.launch import on_ranks
from course_pp.runtime import (
    Link,
    backward_stage,
    forward_stage,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
)
from course_pp.schedule import Action, Costs, Versions, build, ledger

Microbatches = Sequence[Tensor]
Weights = Mapping[str, Tensor]


def stashed_step(
    stage: nn.Module,
    optimizer: Optimizer,
    microbatches: Microbatches,
    targets: Microbatches,
    loss_fn: Any,
    link: Link,
) -> None:
    """Asynchronous 1F1B on this rank; a backward uses the weights of its forward."""
    m, ahead = len(microbatches), link.n_ranks - 1 - link.rank
    in_flight: deque[tuple] = deque()
    sends: list[dist.Work] = []

    def forward(i: int) -> None:
        kept = copy.deepcopy(stage)
        x = recv_activation(microbatches[i], link)
        y = forward_stage(kept, x, targets[i], loss_fn, link)
        in_flight.append((kept, x, y))
        sends.extend(send_activation(y, link))

    def backward() -> None:
        kept, x, y = in_flight.popleft()
        dx = backward_stage(x, y, recv_gradient(y, 1, link))
        sends.extend(send_gradient(dx, link))
        for newest, used in zip(stage.parameters(), kept.parameters(), strict=True):
            newest.grad = used.grad
        optimizer.step()

    for i in range(m + ahead):
        if i < m:
            forward(i)
        if i >= ahead:
            backward()
    for send in sends:
        send.wait()


def healed_versions_step(
    stage: nn.Module,
    optimizer: Optimizer,
    microbatches: Microbatches,
    targets: Microbatches,
    loss_fn: Any,
    link: Link,
) -> None:
    """Asynchronous 1F1B on this rank, which computes each forward again in its backward."""
    m, ahead = len(microbatches), link.n_ranks - 1 - link.rank
    inputs: deque[Tensor] = deque()
    stash: deque[dict] = deque()
    sends: list[dist.Work] = []

    def forward(i: int) -> None:
        x = recv_activation(microbatches[i], link)
        with torch.no_grad():
            y = forward_stage(stage, x, targets[i], loss_fn, link)
        inputs.append(x)
        stash.append(copy.deepcopy(stage.state_dict()))
        sends.extend(send_activation(y, link))

    def backward(i: int) -> None:
        newest = copy.deepcopy(stage.state_dict())
        stage.load_state_dict(stash.popleft())
        x = inputs.popleft()
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        dx = backward_stage(x, y, recv_gradient(y, 1, link))
        sends.extend(send_gradient(dx, link))
        stage.load_state_dict(newest)
        optimizer.step()
        optimizer.zero_grad()

    for i in range(m + ahead):
        if i < m:
            forward(i)
        if i >= ahead:
            backward(i - ahead)
    for send in sends:
        send.wait()


class Ran(NamedTuple):
    """The result of a step on one rank.

    Attributes:
        after: weights after each update.
        versions: the most versions of the weights that forwards had at once.
    """

    after: list[Weights]
    versions: int


def _run(step: Callable[..., Any], seat: Seat, momentum: float = 0.9) -> Ran:
    [stage] = seat.stages
    microbatches = seat.microbatches
    targets = seat.parts
    used = Memory()
    rank = dist.get_rank()
    after = list[Weights]()

    def note(module: nn.Module, _: object) -> None:
        for parameter in module.parameters():
            used.note(parameter)

    # A function, which all copies of the stage share.
    stage.register_forward_pre_hook(note)
    optimizer = _optimizer(stage, momentum)
    optimizer.register_step_post_hook(lambda *_: after.append(copy.deepcopy(stage.state_dict())))
    with (
        unchanged(microbatches=microbatches, targets=targets),
        last_message_waited_for(rank, rank - 1),
    ):
        step(stage, optimizer, microbatches, targets, seat.loss_fn, seat.link)
    return Ran(after, used.most_bytes // sum(p.nbytes for p in stage.parameters()))


def _optimizer(stage: nn.Module, momentum: float) -> Optimizer:
    return torch.optim.SGD(stage.parameters(), lr=0.1, momentum=momentum)


# A stage is one block of the bench's model.
BENCH = Bench(_run)


def _trained(
    rank: int,
    step: Callable[..., Any],
    replicas: Sequence[int],
    sizes: Sequence[int],
    momentum: float,
) -> list[Ran]:
    """Run a step on this rank, once for each number of microbatches."""
    number = next(s for s in range(len(replicas)) if rank < sum(replicas[: s + 1]))
    return [_run(step, BENCH.seat(rank, m, [number], BENCH.n_blocks), momentum) for m in sizes]


def _delayed(
    replicas: Sequence[int],
    m: int,
    momentum: float,
    version: Callable[[int, int], int] | None = None,
) -> list[list[Weights]]:
    """Return for each stage its weights after each update, trained in one process.

    The versions are those of weight stashing, unless ``version(stage, i)`` gives the version of
    microbatch i.
    """
    used = ledger(build("pipedream", sum(replicas), m, replicas=replicas), "stash")
    p = len(replicas)
    seat = BENCH.seat(0, m, range(p), BENCH.n_blocks)
    optimizers = [_optimizer(stage, momentum) for stage in seat.stages]
    history: list[list[Weights]] = [[copy.deepcopy(stage.state_dict())] for stage in seat.stages]
    waiting: list[list[list[Tensor]]] = [[] for _ in seat.stages]
    for i, (x, target) in enumerate(zip(seat.microbatches, seat.parts, strict=True)):
        leaves = []
        for s, stage in enumerate(seat.stages):
            weights = history[s][version(s, i) if version else used.of(s, i).forward]
            leaves.append({name: value.clone().requires_grad_() for name, value in weights.items()})
            x = functional_call(stage, leaves[s], (x,))
        seat.loss_fn(x, target).backward()
        for s, stage in enumerate(seat.stages):
            waiting[s].append([leaf.grad for leaf in leaves[s].values() if leaf.grad is not None])
            if len(waiting[s]) == replicas[s]:
                for parameter, gradients in zip(
                    stage.parameters(), zip(*waiting[s], strict=True), strict=True
                ):
                    parameter.grad = torch.stack(gradients).mean(0)
                waiting[s].clear()
                optimizers[s].step()
                history[s].append(copy.deepcopy(stage.state_dict()))
    return [each[1:] for each in history]


def _wrong_names(found: Weights, wanted: Weights) -> list[str]:
    return [
        name
        for name in wanted
        if not torch.allclose(found[name], wanted[name], rtol=TOLERANCE, atol=TOLERANCE)
    ]


def _first_wrong(found: Sequence[Weights], expected: Sequence[Weights]) -> int | None:
    """Return the first update after which weights differ; None if all are right."""
    for update, wanted in enumerate(expected):
        if update >= len(found) or _wrong_names(found[update], wanted):
            return update
    return None


_STEPS = {4: (8, 2), 3: (5,), 2: (1, 4)}
"""{number of ranks: numbers of microbatches} with which a step is tried."""


def _grade_step(answer: Answer, recomputes: bool = False) -> None:
    """Ask for the weights of delayed gradients after each update, and for few versions.

    There may be one version for each microbatch in flight. A step that ``recomputes`` may also hold
    no more activations than those of one microbatch.
    """
    for p, sizes in _STEPS.items():
        try:
            ranks = answer.on_ranks(p, _trained, (1,) * p, sizes, 0.9)
        except Stopped as stopped:
            if "inplace operation" in stopped.symptom:
                cause = (
                    "An update has written over the weights that a backward still needs: forwards"
                    " have to use copies that no update changes."
                )
                raise Mistake(stopped.symptom, cause, stopped.example) from None
            raise explained(stopped) from None
        for index, m in enumerate(sizes):
            _judge_step(
                f"On {p} ranks with {m} microbatch{'es' * (m > 1)}",
                [rank[index] for rank in ranks],
                m,
            )
    if recomputes:
        _judge_kept(answer, n_ranks=4, m=8)


def _judge_step(where: str, ran: Sequence[Ran], m: int) -> None:
    for rank, each in enumerate(ran):
        if len(each.after) != m:
            cause = (
                "Each backward is followed by an update, with the gradient of its own microbatch."
            )
            times = f"{len(each.after)} time{'s' * (len(each.after) != 1)}"
            raise Mistake(f"{where}, rank {rank} updates {times}, not {m}.", cause)
    p = len(ran)
    expected = _delayed((1,) * p, m, 0.9)
    wrong = [_first_wrong(each.after, want) for each, want in zip(ran, expected, strict=True)]
    if any(update is not None for update in wrong):
        lines = []
        for s, update in enumerate(wrong):
            found = "right" if update is None else f"wrong from update {update} on"
            lines.append(f"stage {s}: {found}")
        stages = "\n".join(lines)
        symptom = f"{where}, weights differ from those of delayed gradients in one process."
        raise Mistake(symptom, _why_wrong(ran, wrong, expected, m), stages)
    for rank, each in enumerate(ran):
        enough = min(m, p - rank)
        # One version more is allowed: a name may keep it until it names the next one.
        if each.versions > enough + 1:
            symptom = (
                f"{where} the weights are right, but rank {rank} keeps {each.versions} versions of"
                " them"
            )
            raise Mistake(
                f"{symptom}; {enough} are in flight.", "A version can go when its backward is done."
            )


def _judge_kept(answer: Answer, n_ranks: int, m: int) -> None:
    for rank, kept in enumerate(answer.on_ranks(n_ranks, _kept_on_rank, m)):
        if kept > 1:
            raise Mistake(
                f"On {n_ranks} ranks with {m} microbatches the weights are right, but rank {rank}"
                f" keeps the activations of {kept} microbatches.",
                "Keep inputs only: a forward runs under `torch.no_grad`, and once more in its"
                " backward.",
            )


def _kept_on_rank(rank: int, step: Callable[..., Any], m: int) -> int:
    """Return the most forwards whose activations were held at once.

    This takes a run of its own, because autograd cannot check the tensors that it keeps for changes
    in place while they are watched.
    """
    seat = BENCH.seat(rank, m)
    kept = ForwardWatch()
    seat.stages[0].register_forward_pre_hook(lambda _, args: kept.begin_forward(len(args[0])))
    with kept.watching():
        _run(step, seat)
    return kept.most_forwards


def _why_wrong(
    ran: Sequence[Ran], wrong: Sequence[int | None], expected: Sequence[Sequence[Weights]], m: int
) -> str:
    def trains_as(*how: Any, stages: int) -> bool:
        """Whether the last ``stages`` stages have the weights that ``_delayed(…, *how)`` gives."""
        other = _delayed((1,) * len(ran), m, *how)
        return all(_first_wrong(ran[-k].after, other[-k]) is None for k in range(1, stages + 1))

    p = len(ran)
    last = ran[-1].after[0]
    first = BENCH.seat(0, m, [p - 1], BENCH.n_blocks).stages[0].state_dict()
    still = [f"`{name}`" for name in first if torch.equal(last[name], first[name])]
    differ = [f"`{name}`" for name in _wrong_names(last, expected[-1][0])]
    causes = (
        (len(still) == len(first),
         "The update changes nothing: the optimizer's own weights have no gradient by then. A"
         " backward through a copy leaves its gradients on the copy; or was it cleared too early?"),
        (bool(still),
         f"The last stage's {' and '.join(still)} stay as they were. Each parameter needs the"
         " gradient of the same parameter of the copy, weights and biases."),
        (0 < len(differ) < len(first),
         f"After the first update only {' and '.join(differ)} of the last stage are wrong: does"
         " each parameter get its own gradient?"),
        (wrong[-1] == 0,
         "Already the first update differs: it takes the gradient of one microbatch's own mean"
         " loss, without 1/m."),
        (trains_as(0.0, stages=1),
         "The last stage trains as if it had no momentum: is the optimizer's state set back?"),
        (m > 1 and trains_as(0.9, lambda s, i: 0, stages=p),
         "Every forward uses the first weights. Copy them at each forward: that is the newest"
         " version then."),
        (wrong[-1] == 1,
         "The second update differs on the last stage, too. Is a gradient left over from the update"
         " before, are old weights put back after it, or does a second forward come before the"
         " first backward?"),
        (trains_as(0.9, lambda s, i: max(0, i - p + 1), stages=p),
         "Each stage uses the version that stage 0 used: that is vertical sync. Stashing takes a"
         " stage's own newest."),
        (OTHERWISE,
         "The last stage has nothing in flight when it updates, so there no version can be the"
         " wrong one. Elsewhere: does each backward use exactly what its forward used, and does the"
         " optimizer go on from its newest state?"),
    )  # fmt: skip
    return why(causes)


def version_used(rule: str, stage: int, i: int, p: int, group: int) -> int:
    """The version of its stage's weights that the backward of microbatch i uses."""
    if rule == "none":
        return i
    if rule == "2bw":
        return max(0, i // group - 1)
    behind = p - 1 if rule == "vertical" else p - 1 - stage
    return max(0, i - behind)


_STASHED = "else p - 1 - stage"
_WRONG_VERSIONS = (
    ((_STASHED, "else 0"),
     "That is the newest. With stashing a backward uses what its forward used."),
    ((_STASHED, "else p - 1"),
     "That is stage 0's. A later stage has fewer microbatches in flight, so its newest is newer."),
    ((_STASHED, "else p - stage"),
     "One too old: p - stage microbatches are in flight *with* this one, p - 1 - stage before it."),
    (('p - 1 if rule == "vertical" else ', ""),
     "That is this stage's newest at its forward. Vertical sync takes what *stage 0* took, on every"
     " stage."),
)  # fmt: skip
_VERSIONS = {
    "none": (
        "Nothing is kept, so the backward uses the newest: count the updates that its stage has had"
        " by then."
    ),
    "stash": (
        "Count the updates that its stage has had when the *forward* runs: one for each microbatch"
        " that is back."
    ),
    "vertical": "Which version did stage 0 use for this microbatch? All other stages use the same.",
    "2bw": (
        "Groups of `group` microbatches make one update each. A group uses the version before last:"
        " all that the group before the last one has finished, 0 for the first two groups."
    ),
}


_OTHER_VERSION: Cause = (
    (
        lambda case, got, right: got < 0,
        "There is no version before 0: the first microbatches all use version 0.",
    ),
    (OTHERWISE, lambda case, got, right: _VERSIONS[case[0]]),
)


def _its_forward(case: tuple[Any, ...], got: int, right: int) -> str:
    rule, stage, i, p, group = case
    use = ledger(build("pipedream", p, 12, group=group if rule == "2bw" else None), rule).of(
        stage, i
    )
    return f"Its forward used version {use.forward}; its gradient enters update {use.update}."


_GRADE_VERSION = Formula(
    version_used,
    [
        (rule, stage, i, p, group)
        for p, m, group in ((4, 12, 4), (3, 12, 6), (2, 6, 3), (1, 4, 2))
        for rule in get_args(Versions)
        for stage in range(p)
        for i in range(m)
    ],
    _WRONG_VERSIONS,
    _OTHER_VERSION,
    read=partial(expect_int, remedy="A version is a count of updates."),
    example=_its_forward,
)


def order_pipedream(stage: int, replica: int, replicas: list[int], m: int) -> list[Action]:
    """The actions of one replica of a stage, in order: F, B and U of each of its microbatches."""
    share = replicas[stage]
    mine = list(range(replica, m, share))
    in_flight = -(-sum(replicas[stage:]) // share)
    order = []
    for k in range(len(mine) + in_flight - 1):
        if k < len(mine):
            order.append(Action(stage, "F", mine[k]))
        if k >= in_flight - 1:
            done = mine[k - in_flight + 1]
            order += [Action(stage, "B", done), Action(stage, "U", done)]
    return order


_LAYOUTS: tuple[tuple[list[int], int], ...] = (
    ([1, 1, 1, 1], 8), ([2, 1], 8), ([3, 1], 9), ([2, 1, 1], 8), ([1, 2], 8), ([3, 2], 12),
    ([1, 1], 1), ([1, 1, 1, 1], 2), ([2, 1], 5),
)  # fmt: skip
_ADMITS = (
    "A replica admits ⌈ranks from its stage on / replicas of its stage⌉ microbatches, the first"
    " stage NOAM"
)


def _grade_order(answer: Answer) -> None:
    calls = []
    for replicas, m in _LAYOUTS:
        layout = []
        for stage, share in enumerate(replicas):
            layout += [(stage, replica, list(replicas), m) for replica in range(share)]
        calls.append(layout)
    values = iter(answer.calls([call for layout in calls for call in layout]))
    for (replicas, m), layout in zip(_LAYOUTS, calls, strict=True):
        rows = [_read_row(next(values), *call) for call in layout]
        given = f"With replicas {replicas} and {m} microbatches"
        reference = build("pipedream", sum(replicas), m, replicas=replicas)
        # Each replica takes as long for its microbatches as any other.
        times = tuple(map(float, replicas))
        judge_orders(
            given,
            rows,
            reference,
            impossible=f"{_ADMITS}. Then F, B and U take turns.",
            crowded=_CROWDED,
            slow=_TOO_SOON,
            costs=[Costs(times, times, times)],
        )
        if tuple(rows) != reference.actions:
            raise Mistake(
                f"{given} a rank turns back too soon, and another one starves.",
                _TOO_SOON,
                shown(rows),
            )


def _read_row(
    value: Any, stage: int, replica: int, replicas: list[int], m: int
) -> tuple[Action, ...]:
    wanted = order_pipedream(stage, replica, replicas, m)

    def foreign(action: Action) -> str:
        if action.microbatch >= m:
            return f"The microbatches are 0 to {m - 1}."
        return (
            f"Microbatch i goes to replica `i % {replicas[stage]}` of stage {stage}, forward,"
            " backward and update."
        )

    def lacking(action: Action) -> str:
        left = [each.kind for each in wanted[wanted.index(action) :]]
        causes = (
            (action.kind == "U", "Each backward is followed by an update."),
            (action.kind == "F" and action.microbatch >= m // replicas[stage] * replicas[stage],
             "m need not be divided by the replicas: the last round has fewer microbatches, and"
             " some replica has one more than others."),
            (action.kind == "B" and "F" not in left,
             "As many backwards are left after the last forward as the warm-up had forwards."),
            (OTHERWISE,
             f"Every microbatch of replica {replica} has its F, its B and its U."),
        )  # fmt: skip
        return why(causes)

    what = f"order_pipedream({stage}, {replica}, {replicas}, {m})"
    repeated = "Each phase goes on where the one before stopped."
    row, example = read_order(value, what, wanted, foreign, lacking, lambda _: repeated)
    for at, action in enumerate(row):
        if action.kind == "B" and row[at + 1 : at + 2] != (Action(stage, "U", action.microbatch),):
            cause = "The update comes right after the backward whose gradient it takes."
            raise Mistake(f"`{what}` does not update right after `{action}`.", cause, example)
    for kind in "FB":
        mine = [action for action in row if action.kind == kind]
        theirs = [action for action in wanted if action.kind == kind]
        if mine != theirs:
            raise Mistake(
                f"`{what}` has its {kind}'s in another order.",
                "Microbatches keep their order.",
                example,
            )
    return row


_TOO_SOON = (
    "Divide the ranks *from this stage on* by the replicas of this stage, and round up: so many"
    " forwards come before the first backward. Then a forward comes before each backward, as long"
    " as there are any."
)


def _holds_one_too_many(orders: Orders) -> bool:
    """Whether each rank holds one activation more than it needs, if it has so many."""
    for row, peak, enough in zip(
        orders.rows, orders.peaks, orders.best.peak_activations, strict=True
    ):
        n_forwards = sum(action.kind == "F" for action in row)
        if peak != min(enough + 1, n_forwards):
            return False
    return True


_CROWDED: Cause = (
    (
        _holds_one_too_many,
        "One too many: the forward of the first pair counts among those in flight.",
    ),
    (OTHERWISE, f"{_ADMITS}, and no more."),
)


def slowest_part(
    times: list[float],
    outputs: list[float],
    weights: list[float],
    stages: list[tuple[int, int, int]],
    bandwidth: float,
) -> float:
    """The time between two microbatches in the steady state: that of the slowest stage or boundary."""
    parts = []
    for start, end, replicas in stages:
        work = sum(times[start:end])
        exchange = 2 * (replicas - 1) * sum(weights[start:end]) / bandwidth
        parts.append(max(work, exchange) / replicas)
        if end < len(times):
            parts.append(2 * outputs[end - 1] / bandwidth)
    return max(parts)


_EXCHANGE = "2 * (replicas - 1)"
_WRONG_PLANS = (
    ((" / replicas)", ")"),
     "Replicas share the microbatches, so a stage takes its time *divided by* them."),
    (("2 * outputs", "0 * outputs"), "A boundary takes time, too, and may be the slowest part."),
    (("2 * outputs", "outputs"),
     "A boundary is crossed twice: an activation goes down, its gradient comes back."),
    (("end < len(times)", "True"), "Behind the last layer nothing is sent."),
    (("if end < len(times)", "for end in range(start + 1, min(end + 1, len(times)))"),
     "Only the output of a stage's *last* layer is sent; inside a stage nothing is."),
    ((_EXCHANGE, "0"), "Replicas exchange the gradients of their weights in every round."),
    ((_EXCHANGE, "(replicas - 1)"),
     "An exchange moves the weights' bytes 2 (r - 1) times: there and back."),
    ((_EXCHANGE, f"{_EXCHANGE} / replicas"),
     "The exchange is divided by the replicas once, together with the work, not twice."),
    (("max(work, exchange)", "(work + exchange)"),
     "Work and exchange run at the same time: take the larger one, not the sum."),
)  # fmt: skip
_GRADE_SLOWEST = Formula(
    slowest_part,
    (
        ([2.0, 2.0, 2.0, 2.0], [0.0] * 4, [0.0] * 4, [(0, 2, 1), (2, 4, 1)], 1.0),
        ([2.0, 1.0, 4.0], [0.0] * 3, [0.0] * 3, [(0, 2, 1), (2, 3, 1)], 1.0),
        ([6.0, 3.0], [0.0] * 2, [0.0] * 2, [(0, 1, 2), (1, 2, 1)], 1.0),
        ([6.0, 1.0], [0.0] * 2, [0.0] * 2, [(0, 1, 3), (1, 2, 1)], 1.0),
        ([1.0, 1.0, 1.0], [8.0, 2.0, 50.0], [0.0] * 3, [(0, 1, 1), (1, 3, 1)], 4.0),
        ([1.0, 1.0, 1.0], [8.0, 20.0, 50.0], [0.0] * 3, [(0, 1, 1), (1, 2, 1), (2, 3, 1)], 4.0),
        ([1.0, 1.0, 1.0], [8.0, 2.0, 50.0], [0.0] * 3, [(0, 2, 1), (2, 3, 1)], 4.0),
        ([1.0, 1.0, 1.0], [2.0, 9.0, 50.0], [0.0] * 3, [(0, 2, 1), (2, 3, 1)], 4.0),
        ([4.0, 4.0], [1.0, 1.0], [20.0, 1.0], [(0, 1, 3), (1, 2, 1)], 4.0),
        ([4.0, 4.0, 1.0], [1.0, 1.0, 1.0], [9.0, 12.0, 30.0], [(0, 2, 2), (2, 3, 1)], 3.0),
        ([8.0, 1.0], [1.0, 1.0], [6.0, 30.0], [(0, 2, 3)], 2.0),
        ([5.0], [40.0], [3.0], [(0, 1, 1)], 0.5),
        ([1.0, 7.0, 2.0], [1.0, 3.0, 2.0], [2.0, 2.0, 40.0], [(0, 1, 1), (1, 3, 4)], 8.0),
        # Slowest is the boundary before, or behind, a stage with replicas.
        ([2.0, 2.0], [8.0, 1.0], [0.0] * 2, [(0, 1, 2), (1, 2, 1)], 4.0),
        ([1.0, 2.0], [8.0, 1.0], [0.0] * 2, [(0, 1, 1), (1, 2, 2)], 4.0),
    ),
    _WRONG_PLANS,
    "For each stage the larger of work and exchange, over its replicas; between stages twice the"
    " output.",
    call=lambda *plan: "slowest_part(times, outputs, weights, stages, bandwidth)",
    example=lambda plan, got, right: (
        "The plan: times={}, outputs={}, weights={}, stages={}, bandwidth={}.".format(*plan)
    ),
)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(stashed_step, _grade_step, "06", "weight stashing by hand", 2, 9, (
        "What must not change between a forward and its backward? The optimizer changes `stage`'s"
        " parameters in place.",
        "Let each forward run through a copy of the stage of its own, `copy.deepcopy(stage)`, and"
        " keep it with x and y until the backward. Its gradients then arrive at the copy.",
        "Before `optimizer.step()` give each parameter of `stage` the `.grad` of the same parameter"
        " of the copy.",
    ), limit_s=10.0),
    Exercise(version_used, _GRADE_VERSION, "06", "which version does this backward use", 2, 7, (
        "`none` first: when the backward of microbatch i runs, its stage has had the updates of"
        " microbatches 0 to i - 1.",
        "`stash` asks for the same count at the forward: p - 1 - stage of those microbatches are"
        " not back yet. `vertical` asks it of stage 0.",
        "`2bw`: microbatch i is in group `i // group`, and its version has the updates of all"
        " groups but the last one before it. No version is below 0.",
    )),
    Exercise(order_pipedream, _grade_order, "06", "NOAM, and the order of a replica", 2, 8, (
        "Which microbatches are this replica's? `replica`, and then every `replicas[stage]`-th.",
        "In flight are `sum(replicas[stage:])` over `replicas[stage]`; `-(-a // b)` divides and"
        " rounds up.",
        "So many forwards are in flight at most, the last one included: do one fewer, then F, B, U"
        " in turn, then what is left.",
    )),
    Exercise(slowest_part, _GRADE_SLOWEST, "06", "the slowest part of a plan", 2, 7, (
        "One number for each stage and one for each boundary between two stages; the largest is the"
        " answer.",
        "A stage's work is `sum(times[start:end])`, and its weights are added up likewise.",
        "A boundary: the output of the stage's last layer, `outputs[end - 1]`, twice, over the"
        " bandwidth; none behind the last stage.",
    )),
    Exercise(healed_versions_step, partial(_grade_step, recomputes=True),
        "06", "bug clinic", 3, 9, (
        "Two faults. Which version is put away for microbatch 1 on rank 2: the one that its forward"
        " used?",
        "The stash belongs to a forward, not to an update. And what does"
        " `optimizer.load_state_dict` bring back that weight stashing does not ask for?",
        "Put `stage.state_dict()` away inside `forward`, take it in every `backward`, and never set"
        " the optimizer back.",
    ), limit_s=10.0),
)  # fmt: skip


def _dealt_apart(
    stage: nn.Module,
    optimizer: Optimizer,
    microbatches: Microbatches,
    targets: Microbatches,
    loss_fn: Any,
    link: Link,
) -> None:
    """Run two replicas of stage 0 on ranks 0 and 1, and stage 1 on rank 2.

    Rank 2 counts forwards and backwards apart.
    """
    rank = dist.get_rank()
    last = 2
    share = 2
    mates: Any = dist.new_group([0, 1])
    sends = list[dist.Work | None]()
    if rank == last:
        for backwards, target in enumerate(targets, start=1):
            x = torch.empty(link.shape, dtype=link.dtype)
            dist.recv(x, (backwards - 1) % share)
            x.requires_grad_()
            y = loss_fn(stage(x), target)
            [dx] = torch.autograd.grad(y, x, retain_graph=True)
            y.backward()
            sends.append(dist.isend(dx, backwards % share))
            optimizer.step()
            optimizer.zero_grad()
    mine = microbatches[rank::share] if rank < last else ()
    in_flight = deque[tuple[nn.Module, Tensor]]()
    for i in range(len(mine) + (rank < last)):
        if i < len(mine):
            kept = copy.deepcopy(stage)
            in_flight.append((kept, kept(mine[i])))
            sends.append(dist.isend(in_flight[-1][1].detach(), last))
        if i >= 1:
            kept, y = in_flight.popleft()
            dy = torch.empty(link.shape, dtype=link.dtype)
            dist.recv(dy, last)
            gradients = torch.autograd.grad(y, list(kept.parameters()), dy)
            for newest, gradient in zip(stage.parameters(), gradients, strict=True):
                dist.all_reduce(gradient, group=mates)
                newest.grad = gradient / share
            optimizer.step()
            optimizer.zero_grad()
    for send in sends:
        if send is not None:
            send.wait()


_PUT_AWAY = "        stash.append(copy.deepcopy(stage.state_dict()))\n"
_SET_BACK = "stage.load_state_dict(stash.popleft())"
PATIENTS: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {
    "A": (
        flawed(
            healed_versions_step,
            (_PUT_AWAY, ""),
            (_SET_BACK, "stage.load_state_dict(stash.popleft() if stash else newest)"),
            ("backward(i - ahead)\n", "backward(i - ahead)\n        if i < m:\n    " + _PUT_AWAY),
        ),
        (1, 1, 1, 1),
    ),
    "B": (
        flawed(
            healed_versions_step,
            (
                "deepcopy(stage.state_dict()))",
                "deepcopy((stage.state_dict(), optimizer.state_dict())))",
            ),
            (_SET_BACK, "weights, state = stash.popleft(); stage.load_state_dict(weights)"),
            ("x = inputs.popleft()", "x = inputs.popleft(); optimizer.load_state_dict(state)"),
        ),
        (1, 1, 1, 1),
    ),
    "C": (_dealt_apart, (2, 1)),
}
"""Steps that run and go wrong, each for another reason, with the replicas of their stages."""


@dataclass(frozen=True)
class WeightFindings:
    """The weights of a run beside those of delayed gradients in one process.

    Attributes:
        first_wrong: the first update after which a stage's weights differ, for each stage; None
            where all are right.
    """

    first_wrong: tuple[int | None, ...]

    @property
    def equal(self) -> bool:
        """Whether every stage has the right weights after every update."""
        return all(update is None for update in self.first_wrong)

    def __str__(self) -> str:
        if self.equal:
            return "right"
        told = []
        for update in self.first_wrong:
            told.append("right" if update is None else f"from update {update}")
        return "wrong, by stage: " + ", ".join(told)


def examine(
    step: Callable[..., Any],
    replicas: Sequence[int] = (1, 1, 1, 1),
    momentum: float = 0.9,
    n_microbatches: int = 8,
) -> WeightFindings:
    """Train with a hand-written step on real ranks; compare the weights with one process.

    They are compared after each update.

    Args:
        step: ``step(stage, optimizer, microbatches, targets, loss_fn, link)``.
        replicas: number of ranks that share each stage.
        momentum: momentum of SGD.
        n_microbatches: microbatches, each with an update of its own; replicas share theirs.
    """
    ranks = on_ranks(sum(replicas), _trained, step, tuple(replicas), (n_microbatches,), momentum)
    expected = _delayed(replicas, n_microbatches, momentum)
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    found = [
        _first_wrong(ranks[rank][0].after, expected[stage]) for stage, rank in enumerate(firsts)
    ]
    return WeightFindings(tuple(found))
