"""Notebook 11: a bound, a rule, a repair, and a clinic of orders that need buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import expect_list, expect_number
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, Stopped, why
from course_pp.launch import RanksHung, on_ranks
from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_stage_indices,
    init_distributed,
)
from course_pp.schedule import (
    Action,
    Costs,
    Schedule,
    Time,
    Timeline,
    bound,
    build,
    optima,
    simulate,
)
from course_pp.schedule import check as problems_of
from course_pp.schedule.heuristics import Desk, DispatchRule
from course_pp.schedule.problem import OrderProblem
from course_pp.schedule.schedule import looped

if TYPE_CHECKING:
    from course_pp.show import Board  # which ranks, who import this module, have no use for


def lower_bound(p: int, m: int, forward: float, input_grad: float, weight_grad: float) -> float:
    """A time before which no order can finish, whatever the memory; all stages are alike, messages take no time."""
    work = m * (forward + input_grad + weight_grad)
    bounds = []
    for rank in range(p):
        down = rank * forward
        bounds.append(down + work)
        # The last input gradient of this rank still has to go up, and stage 0 then has a weight
        # gradient to do.
        bounds.append(down + m * (forward + input_grad) + rank * input_grad + weight_grad)
    return max(bounds)


_BOUNDS: list[tuple[int, int, float, float, float]] = [
    (4, 8, 1, 1, 1), (1, 3, 1, 2, 3), (4, 1, 1, 1, 1), (2, 6, 1, 2, 1),
    (4, 8, 10, 12, 7), (3, 5, 2, 3, 0.5), (6, 12, 1, 1, 0.25), (8, 4, 1, 3, 2),
]  # fmt: skip
_NAMED = ("naive", "1f1b", "zb_h1", "zb_h2")


def _grade_lower_bound(answer: Answer) -> None:
    """Ask for a number that no order beats, and that is as high as two simple arguments make it."""
    for case, got in zip(_BOUNDS, answer.calls(_BOUNDS), strict=True):
        p, m, forward, input_grad, weight_grad = case
        call = f"lower_bound({', '.join(map(str, case))})"
        costs = Costs(forward, input_grad, weight_grad)
        value = expect_number(got, call)
        least, name = min((simulate(build(name, p, m), costs).makespan, name) for name in _NAMED)
        if value > least * (1 + 1e-9):
            raise Mistake(
                f"`{call}` is {value:g}, yet {name} is done after {float(least):g}.",
                "A lower bound holds for every order. Each argument must be sure by itself; take"
                " the latest of them.",
                f"`simulate(build({name!r}, {p}, {m}), Costs({forward}, {input_grad},"
                f" {weight_grad})).makespan`",
            )
        if value < bound(p, m, costs) * (1 - 1e-9):
            work = m * (forward + input_grad + weight_grad)
            causes = (
                (value < work * (1 - 1e-9),
                 "One rank alone has `m` times all three kinds of work to do."),
                (value < (work + (p - 1) * forward) * (1 - 1e-9),
                 "The last rank cannot begin before a microbatch has come down to it. Then it has"
                 " all its work to do."),
                (OTHERWISE,
                "When the last rank has done its last input gradient, the gradient still goes up"
                " through all the others, and rank 0 has a weight gradient to do then. Where weight"
                " gradients are short, that is what counts."),
            )  # fmt: skip
            raise Mistake(f"`{call}` is {value:g}; more can be said.", why(causes))


Choice = Callable[[list[Action], int, int], Action]
"""``choice(able, held, cap)``: the next action of a rank, one of those that it could start now.

``held`` is the number of activations that it holds, ``cap`` the most that it may hold.
"""


def next_action(able: list[Action], held: int, cap: int) -> Action:
    """First the actions for which others wait; weight gradients when nothing else is left."""
    best, rank = able[0], 3
    for action in able:
        place = "IFW".index(action.kind)
        if place < rank:
            best, rank = action, place
    return best


def play(next_action: Choice, p: int, m: int, cap: int, costs: Costs | None = None) -> Schedule:
    """Return the schedule of a rule, which chooses whenever a rank could start several actions.

    Args:
        next_action: ``next_action(able, held, cap)``; ``able`` holds an ``F``, an ``I`` and a ``W``
            at most, and no ``F`` while the rank holds ``cap`` activations. Raises Mistake for a
            choice that is not in it.
        p: ranks, of one stage each.
        m: microbatches.
        cap: how many activations each rank may hold.
        costs: one unit for everything unless given.
    """
    problem = OrderProblem.of(looped(p), m, costs or Costs(1, 1, 1), [cap] * p, split=True)
    desk = _Asking(problem, next_action)
    desk.fill()
    return problem.schedule_of("own rule", desk.words)


class _Asking(Desk):
    def __init__(self, problem: OrderProblem, next_action: Choice) -> None:
        self._choose = next_action
        super().__init__(problem, DispatchRule("FIW"))

    def _look(self, rank: int) -> None:
        choices = sorted(self._choices(rank))
        soonest = [each for each in choices if each[0] == choices[0][0]]
        # The rule is asked only if there is a choice.
        if len(soonest) > 1:
            self._next[rank] = self._asked(rank, soonest)
        else:
            self._next[rank] = soonest[0] if soonest else None

    def _asked(self, rank: int, soonest: Sequence[tuple[Time, int, int]]) -> tuple[Time, int, int]:
        able = {
            Action(rank, "FIW"[each[2] % 3], self.words[rank].count(each[2])): each
            for each in soonest
        }
        held = self.held[rank]
        cap = self.problem.caps[rank]
        chosen = self._choose(list(able), held, cap)
        if not isinstance(chosen, Action) or chosen not in able:
            raise Mistake(
                f"`next_action({list(able)}, {held}, {cap})` returned {chosen!r:.60}.",
                "Return one of the actions in `able`.",
            )
        return able[chosen]


# Ranks, microbatches, cap, and the times of F, I and W.
_HIDDEN = [
    (4, 8, 7, (1, 1, 1)), (3, 6, 3, (10, 12, 7)), (2, 8, 3, (10, 12, 7)),
    (4, 8, 2, (1, 1, 1)), (3, 8, 2, (10, 12, 7)), (4, 8, 6, (10, 12, 7)),
]  # fmt: skip
_NEAR = 1.05


def _grade_next_action(answer: Answer) -> None:
    """Ask for a rule whose orders take at most a twentieth longer than the proven optimum."""
    try:
        (orders,) = answer.on_ranks(1, _played, _HIDDEN)
    except Stopped as stopped:
        if stopped.how != "raised" or stopped.cause:
            raise
        cause = (
            "`able` has two or three of F, I and W, and not always the one that you look for:"
            " choose among those."
        )
        raise Mistake(stopped.symptom, cause, stopped.example) from None
    best = {(r.n_ranks, r.n_microbatches, r.cap, r.times): r.makespan for r in optima() if r.split}
    for case, order in zip(_HIDDEN, orders, strict=True):
        p, m, cap, times = case
        costs = Costs(*times)
        makespan = simulate(order, costs).makespan
        if makespan > _NEAR * best[case]:
            raise Mistake(
                f"With p = {p}, m = {m}, room for {cap} and F, I, W of {times} the rule's order"
                f" takes {makespan}; the best takes {best[case]}.",
                _habit(order, costs),
                f"`show.timeline(simulate(play(next_action, {p}, {m}, {cap}, Costs{times}),"
                f" Costs{times}))`",
            )


def _played(
    rank: int, next_action: Choice, cases: Sequence[tuple[int, int, int, tuple[int, int, int]]]
) -> list[Schedule]:
    return [play(next_action, p, m, cap, Costs(*times)) for p, m, cap, times in cases]


def _habit(order: Schedule, costs: Costs) -> str:
    """The kind of action that most often ran while an input gradient could have."""
    tl = simulate(order, costs)
    ends = {span.action: span.end for span in tl.spans}
    instead: Counter[str] = Counter()
    for row in tl.by_rank:
        for span in row:
            action = span.action.parts[0]
            if action.kind != "I":
                continue
            ready = max(ends[each] for each in _inputs(action, order.n_stages))
            instead.update(
                each.action.parts[0].kind for each in row if ready <= each.start < span.start
            )
    instead.pop("I", None)
    if not instead:
        return (
            "No gradient waits long for a rank that does something else; where do ranks idle, and"
            " for what?"
        )
    kind = instead.most_common(1)[0][0]
    does = {"F": "the next forward", "W": "a weight gradient"}[kind]
    return (
        f"Ranks often do {does} while an input gradient could start, and the rank above waits for"
        " that."
    )


def _inputs(action: Action, n_stages: int) -> list[Action]:
    own = Action(action.stage, "F", action.microbatch)
    return (
        [own]
        if action.stage + 1 == n_stages
        else [own, Action(action.stage + 1, "I", action.microbatch)]
    )


def repair(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    """Swap neighbours on a rank as long as that ends the ranks sooner, within the cap."""

    def ends(tl: Timeline) -> tuple[Time, Time]:
        return tl.makespan, sum(span.end for span in tl.spans)

    rows, least = [list(row) for row in schedule.actions], ends(simulate(schedule, costs))
    improved = True
    while improved:
        improved = False
        for row in rows:
            for i in range(len(row) - 1):
                row[i], row[i + 1] = row[i + 1], row[i]
                changed = Schedule(schedule.name, schedule.placement, tuple(map(tuple, rows)))
                if not problems_of(changed):
                    tl = simulate(changed, costs)
                    if max(tl.peak_activations) <= cap and ends(tl) < least:
                        schedule, least, improved = changed, ends(tl), True
                        continue
                row[i], row[i + 1] = row[i + 1], row[i]
    return schedule


_CHANGES: tuple[tuple[Schedule, Costs, int, int], ...] = (
    (build("zb_h1", 3, 6), Costs(1, 1, 1, latency=(2, 0)), 4, 25),
    (build("zb_h1", 4, 6), Costs((1, 2, 1, 1), (1, 2, 1, 1), (1, 2, 1, 1), latency=1), 4, 40),
    (build("zb_h1", 4, 8), Costs(1, 1, 1, latency=(0, 2, 0)), 4, 35),
)
"""An order, the costs that it meets, the cap, and the least makespan, which ``optimum`` proves."""
# Swaps of neighbours end within this limit, whatever order they are tried in.
_A_TWELFTH = 13 / 12
_UNDO = (
    "Not every swap is legal. Ask `problems_of(schedule)` first, and undo the swap if it has"
    " something to say."
)


def _grade_repair(answer: Answer) -> None:
    """Ask for a legal order of the same actions, within the cap, nearly as short as the best."""
    try:
        values = answer.calls(
            [(schedule, costs, cap) for schedule, costs, cap, _ in _CHANGES], "repair(…)"
        )
    except Stopped as stopped:
        causes = (
            (stopped.error == "FrozenInstanceError" or "item assignment" in stopped.symptom,
             "A `Schedule` is frozen, and its rows are tuples: change lists, and make a new"
             " `Schedule` of them."),
            (stopped.error == "ValueError", _UNDO),
        )  # fmt: skip
        if cause := why(causes):
            raise Mistake(stopped.symptom, cause, stopped.example) from None
        raise
    for change, got in zip(_CHANGES, values, strict=True):
        _judge_repair(*change, got)


def _judge_repair(schedule: Schedule, costs: Costs, cap: int, best: int, got: Any) -> None:
    before = simulate(schedule, costs).makespan
    case = (
        f"`build('zb_h1', {schedule.n_ranks}, {schedule.n_microbatches})` with F {costs.forward},"
        f" latency {costs.latency} and room for {cap}"
    )
    if not isinstance(got, Schedule):
        raise Mistake(
            f"For {case}, `repair` returned {type(got).__name__}.", "Return a `Schedule`."
        )
    if _sorted(got.actions) != _sorted(schedule.actions) or got.placement != schedule.placement:
        cause = (
            "Change the order on a rank only: swap two neighbours, and keep the swap if it helps."
        )
        raise Mistake(f"For {case}, `repair` returned other actions, or on other ranks.", cause)
    if problems := problems_of(got):
        raise Mistake(f"For {case}, the order cannot run: {problems[0]}.", _UNDO)
    tl = simulate(got, costs)
    if max(tl.peak_activations) > cap:
        cause = (
            "`simulate(…).peak_activations` tells what each rank holds: undo a swap that makes it"
            " more than `cap`."
        )
        raise Mistake(f"For {case}, a rank holds {max(tl.peak_activations)} activations.", cause)
    if tl.makespan > best * _A_TWELFTH:
        cause = (
            "Go through all neighbours of all ranks again, until no swap helps any more. A swap may"
            " leave the makespan as it is and still let actions end sooner: keep it too."
        )
        if tl.makespan >= before:
            cause = "Simulate after each swap with the new costs, and keep what ends sooner."
        raise Mistake(
            f"For {case}, it took {before}; now {tl.makespan}; {best} is possible.", cause
        )


def _sorted(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    return [sorted(map(str, row)) for row in rows]


Event = tuple[Any, ...]
Program = list[Event]
"""The events of a rank, in order.

They are ``("do", "0F1")``, ``("send", 1, "0F1")`` to rank 1, and ``("recv", 1, "1B0")`` from it.
"""


def programs_of(schedule: Schedule) -> list[Program]:
    """Return each action after the receives that it needs, and before the send of its result."""
    last = schedule.n_stages - 1
    kinds = {(part.kind, part.stage, part.microbatch) for part in schedule.parts}
    programs: list[Program] = [[] for _ in range(schedule.n_ranks)]
    for rank, row in enumerate(schedule.actions):
        for action in (part for each in row for part in each.parts):
            stage, microbatch = action.stage, action.microbatch
            if action.kind == "F" and stage > 0:
                _receive(programs[rank], schedule, rank, Action(stage - 1, "F", microbatch))
            if action.kind in "BI" and stage < last:
                kind = "I" if ("I", stage + 1, microbatch) in kinds else "B"
                _receive(programs[rank], schedule, rank, Action(stage + 1, kind, microbatch))
            programs[rank].append(("do", str(action)))
            to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(action.kind, -1)
            if 0 <= to <= last and (peer := schedule.rank_of(to, microbatch)) != rank:
                programs[rank].append(("send", peer, str(action)))
    return programs


def _receive(program: Program, schedule: Schedule, rank: int, made_by: Action) -> None:
    if (peer := schedule.rank_of(made_by.stage, made_by.microbatch)) != rank:
        program.append(("recv", peer, str(made_by)))


def hanging(programs: Sequence[Sequence[Event]]) -> dict[int, Event]:
    """Return the ranks that never end if a send waits for its receiver, with the event of each."""
    at = [0] * len(programs)

    def head(rank: int) -> Event | None:
        return tuple(programs[rank][at[rank]]) if at[rank] < len(programs[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(programs)):
            event = head(rank)
            if event is None:
                continue
            if event[0] == "do":
                at[rank], moved = at[rank] + 1, True
            elif event[0] == "send" and head(event[1]) == ("recv", rank, event[2]):
                at[rank], at[event[1]], moved = at[rank] + 1, at[event[1]] + 1, True
    return {rank: event for rank in range(len(programs)) if (event := head(rank)) is not None}


def untangled(programs: list[list[tuple]]) -> list[list[tuple]]:
    """The same events on each rank, some receives earlier, so that no send waits for ever."""
    left = [list(program) for program in programs]
    done: list[list[tuple]] = [[] for _ in programs]
    while any(left):
        for rank, rest in enumerate(left):
            if not rest or rest[0][0] == "recv":
                continue
            event = rest.pop(0)
            done[rank].append(event)
            if event[0] == "send":
                taken = ("recv", rank, event[2])
                left[event[1]].remove(taken)
                done[event[1]].append(taken)
    return done


_ORDERS = [
    ("1f1b", 2, 3),
    ("1f1b", 3, 4),
    ("zb_h1", 3, 5),
    ("zb_h2", 4, 7),
    ("zb_v", 2, 4),
    ("gpipe", 3, 3),
]


def _grade_untangled(answer: Answer) -> None:
    """Ask for the same events, with receives earlier if at all, that end without any buffer."""
    given = [programs_of(build(name, p, m)) for name, p, m in _ORDERS]
    values = answer.calls([(programs,) for programs in given], "untangled(…)")
    for (name, p, m), before, got in zip(_ORDERS, given, values, strict=True):
        what = f"`untangled` of {name} with p = {p} and m = {m}"
        call = f"untangled(… {name}, p = {p}, m = {m} …)"
        programs = []
        for rank, program in enumerate(expect_list(got, call, p)):
            events = expect_list(program, f"{call}[{rank}]")
            programs.append(
                [tuple(event) if isinstance(event, list) else event for event in events]
            )
        for rank in range(p):
            _judge_rank(what, rank, before[rank], programs[rank])
        if stuck := hanging(programs):
            stand = "\n".join(
                f"rank {rank}: {' '.join(map(str, event))}" for rank, event in stuck.items()
            )
            ranks = ", ".join(map(str, stuck))
            cause = why(_STUCK, _circle_of(stuck))
            raise Mistake(f"{what} hangs on rank {ranks}.", cause, f"They stand at\n{stand}")


def _judge_rank(what: str, rank: int, given: Program, got: list[Any]) -> None:
    if Counter(map(repr, given)) != Counter(map(repr, got)):
        cause = "Every event stays on its rank, once. Only the order changes."
        raise Mistake(f"{what} has other events on rank {rank}.", cause)
    if [event for event in given if event[0] != "recv"] != [
        event for event in got if event[0] != "recv"
    ]:
        cause = (
            "The order is the schedule: leave what a rank does and sends as it is, and move"
            " receives."
        )
        raise Mistake(f"{what} changes the order in which rank {rank} works and sends.", cause)
    for at, event in enumerate(given):
        after = [each for each in given[at:] if each[0] != "recv"]
        if event[0] == "recv" and (
            late := [each for each in got[: got.index(event)] if each in after]
        ):
            cause = "The events after a receive need it: it may come earlier, never later."
            raise Mistake(f"{what} has {event} on rank {rank} after {late[0]}.", cause)


def _circle_of(stuck: dict[int, Event]) -> set[str]:
    """Return the kinds of the events at which ranks wait for each other in a circle."""
    # Some ranks only wait for the circle. Enough steps from rank to rank end inside it.
    rank = next(iter(stuck))
    for _ in stuck:
        rank = stuck[rank][1]
    circle = {rank: stuck[rank][0]}
    while (rank := stuck[rank][1]) not in circle:
        circle[rank] = stuck[rank][0]
    return set(circle.values())


_STUCK: Cause = (
    (
        lambda kinds: kinds == {"send"},
        "Two neighbours send to one another, and neither receives: one of them has to receive"
        " first.",
    ),
    (
        lambda kinds: kinds == {"recv"},
        "Everybody receives, and what they wait for comes after their own sends: too many receives"
        " are early.",
    ),
    (
        OTHERWISE,
        "A rank sends while its receiver waits for something else, which comes later: that receive"
        " is too early.",
    ),
)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(lower_bound, _grade_lower_bound, "11", "a bound of your own", 2, 10, (
        "Take one rank. Before its first forward a microbatch comes down `rank` stages. Then it has"
        " m times F, I and W to do: that gives one bound for each rank.",
        "Look at the end, too: after a rank's last I, a gradient goes up `rank` stages, and stage 0"
        " has its W.",
        "The second bound of a rank is `rank * F + m * (F + I) + rank * I + W`. Return the latest"
        " of all.",
    )),
    Exercise(next_action, _grade_next_action, "11", "a greedy rule", 1, 6, (
        "Whoever waits for this rank waits for one kind of action. Which?",
        "The rank above waits for I, the rank below for F, and nobody for W.",
        "I before F before W: `min` with a key that says so.",
    )),
    Exercise(repair, _grade_repair, "11", "a repair", 3, 12, (
        "Try every swap of two neighbours on a rank. `problems_of(schedule)` says whether the order"
        " can still run.",
        "Keep a swap if `simulate(…).makespan` falls, and `max(….peak_activations)` is at most"
        " `cap`. Otherwise swap back.",
        "Some swaps leave the makespan and prepare the next one. Compare pairs: the makespan, then"
        " the sum of all ends. Go round until nothing helps.",
    ), limit_s=30.0),
    Exercise(untangled, _grade_untangled, "11", "bug clinic", 3, 10, (
        "Walk through all programs at once. A send and its receive happen together.",
        "Where a rank stands at a send, and its receiver at a send of its own, neither can go on.",
        "Let the receiver take the message at once: its `recv` moves to where it stands. Write each"
        " event down as it happens: these lists are the answer.",
    )),
)  # fmt: skip


_CONFIG = ModelConfig(dim=32, n_layers=4, n_heads=4, vocab_size=61, max_seq_len=16)
_ROWS, _SEQ_LEN = 2, 8


def drawn(board: Board) -> Schedule:
    """Return the order on ``board``, or its level's order, with a line about it, if incomplete."""
    if board.is_complete:
        return board.schedule
    assert board.level is not None
    reference = board.level.reference
    print(
        f"Level {board.level.number} is not complete: this is its worked order, {reference.name}."
    )
    return reference


def run_in_torch(schedule: Schedule) -> float:
    """Run a step by torch's executor; return the largest difference from one process.

    Loss and gradients are compared.
    """
    return max(on_ranks(schedule.n_ranks, _stepped, schedule))


def _stepped(rank: int, schedule: Schedule) -> float:
    m = schedule.n_microbatches
    mesh = init_distributed(DistributedConfig(pp=schedule.n_ranks), seed=0)
    seeded = torch.Generator().manual_seed(1)
    tokens = torch.randint(_CONFIG.vocab_size, (_ROWS * m, _SEQ_LEN + 1), generator=seeded)
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    loss_fn = CrossEntropy()

    torch.manual_seed(0)
    whole = build_stage_module(_CONFIG, 0, 1).double()
    loss = loss_fn(whole(inputs), target)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}

    indices = get_stage_indices(schedule, rank, schedule.n_ranks)
    modules = [build_stage_module(_CONFIG, index, schedule.n_stages).double() for index in indices]
    for module in modules:
        module.load_state_dict({name: whole.state_dict()[name] for name in module.state_dict()})
    stages = [
        build_pipeline_stage(module, mesh, "cpu", _ROWS, _SEQ_LEN, param_dtype=torch.float64)
        for module in modules
    ]
    pipeline = build_pipeline_schedule(stages, m, loss_fn, schedule)
    differences = [abs(pipeline.step(inputs, target=target).item() - loss.item())]
    for module in modules:
        for name, parameter in module.named_parameters():
            got, wanted = parameter.grad, expected[name]
            assert got is not None
            assert wanted is not None
            differences.append((got - wanted).abs().max().item())
    return max(differences)


def run_unbuffered(order: Schedule | Sequence[Program], timeout_s: float = 2.0) -> bool:
    """Run the messages of ``order``, each send waiting for its receiver; print who hangs.

    Returns:
        Whether no rank hangs.
    """
    programs = programs_of(order) if isinstance(order, Schedule) else list(order)
    try:
        on_ranks(len(programs), _exchange, programs, timeout_s=timeout_s)
    except RanksHung as hung:
        for wait in hung.waits:
            whom = f" with rank {wait.peers[0]}" if wait.peers else ""
            print(f"rank {wait.rank}: {wait.operation}{whom}")
        return False
    print("Every message arrived.")
    return True


def _exchange(rank: int, programs: Sequence[Program]) -> None:
    names = sorted({event[2] for program in programs for event in program if event[0] == "send"})
    for event in programs[rank]:
        if event[0] == "send":
            dist.send(torch.ones(1), event[1], tag=names.index(event[2]))
        elif event[0] == "recv":
            dist.recv(torch.empty(1), event[1], tag=names.index(event[2]))
