"""The graders of notebook 06, by what learners hand in."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from course_pp.exercises.formula import flawed
from course_pp.exercises.pipedream.exercises import (
    PATIENTS,
    examine,
    healed_versions_step,
    order_pipedream,
    slowest_part,
    stashed_step,
    version_used,
)
from course_pp.exercises.pipedream.lab import angles, steady, train
from course_pp.schedule import Action, Costs, LayerCost, build, ledger, partition, simulate
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


def with_rule(rule: str, other: Callable[[int, int, int, int], Any]) -> Answer:
    """The solution, but for one rule."""

    def answer(name: str, stage: int, i: int, p: int, group: int) -> Any:
        return other(stage, i, p, group) if name == rule else version_used(name, stage, i, p, group)

    return answer


def by_delay(rule: str, stage: int, i: int, p: int, group: int) -> int:
    delay = {"none": 0, "stash": p - 1 - stage, "vertical": p - 1}
    return sorted((0, i - delay[rule]))[1] if rule in delay else max(1, i // group) - 1


def ordered(
    in_flight: Callable[[int, list[int]], int] = lambda stage, r: math.ceil(
        sum(r[stage:]) / r[stage]
    ),
    mine: Callable[[int, int, int], list[int]] = lambda replica, share, m: list(
        range(replica, m, share)
    ),
    update: str = "after",
) -> Answer:
    def answer(stage: int, replica: int, replicas: list[int], m: int) -> list[Action]:
        work, order = deque(mine(replica, replicas[stage], m)), []
        ahead = in_flight(stage, replicas)
        waiting = deque[int]()
        while work or waiting:
            if work and (
                len(waiting) < ahead - 1
                or not order
                or order[-1].kind != "F"
                or len(waiting) < ahead
            ):
                waiting.append(work.popleft())
                order.append(Action(stage, "F", waiting[-1]))
                if len(waiting) < ahead and work:
                    continue
            done = waiting.popleft()
            order.append(Action(stage, "B", done))
            if update == "after":
                order.append(Action(stage, "U", done))
        if update == "end":
            order += [Action(stage, "U", a.microbatch) for a in order if a.kind == "B"]
        return order

    return answer


def planned(
    work: Callable[[float, float, int], float] = lambda work, exchange, r: max(work, exchange) / r,
    exchange: Callable[[float, int], float] = lambda weights, r: 2 * (r - 1) * weights,
    crossing: float = 2.0,
    behind_the_last: bool = False,
) -> Answer:
    def answer(times: Any, outputs: Any, weights: Any, stages: Any, bandwidth: float) -> float:
        parts = [
            work(sum(times[a:b]), exchange(sum(weights[a:b]), r) / bandwidth, r)
            for a, b, r in stages
        ]
        ends = [b for _, b, _ in stages]
        parts += [
            crossing * outputs[b - 1] / bandwidth for b in (ends if behind_the_last else ends[:-1])
        ]
        return max(parts)

    return answer


def step(*changes: tuple[str, str]) -> Answer:
    return flawed(stashed_step, *changes)


WRONG = {
    "version_used": [
        (
            with_rule("none", lambda s, i, p, g: max(0, i - (p - 1 - s))),
            "the backward uses the newest",
        ),
        (with_rule("stash", lambda s, i, p, g: i), "That is the newest"),
        (
            with_rule("stash", lambda s, i, p, g: max(0, i - (p - s))),
            "One too old",
            "*with* this one",
        ),
        (with_rule("stash", lambda s, i, p, g: max(0, i - (p - 1))), "That is stage 0's"),
        (with_rule("stash", lambda s, i, p, g: max(0, i // g - 1)), "when the *forward* runs"),
        (
            with_rule("stash", lambda s, i, p, g: i - (p - 1 - s)),
            "is -3, not 0",
            "There is no version before 0",
        ),
        (
            with_rule("vertical", lambda s, i, p, g: max(0, i - (p - 1 - s))),
            "takes what *stage 0* took",
        ),
        (
            with_rule("vertical", lambda s, i, p, g: max(0, i - p)),
            "Which version did stage 0 use",
            "Its forward used",
        ),
        (with_rule("2bw", lambda s, i, p, g: i // g), "the version before last"),
        (with_rule("2bw", lambda s, i, p, g: max(0, i / g - 1)), "a float", "a count of updates"),
    ],
    "order_pipedream": [
        (
            ordered(mine=lambda replica, share, m: list(range(m))),
            "has `0F1`",
            "goes to replica `i % 2`",
        ),
        (
            ordered(
                mine=lambda replica, share, m: list(range(m))[
                    replica * m // share : (replica + 1) * m // share
                ]
            ),
            "i % 2",
        ),
        (
            lambda *row: order_pipedream(*row)[:1] + order_pipedream(*row),
            "has `0F0` 2 times",
            "Each phase goes on",
        ),
        (
            lambda stage, replica, replicas, m: order_pipedream(stage, replica, replicas, m + 2),
            "are 0 to 7",
        ),
        (ordered(update="end"), "does not update right after `0B0`"),
        (ordered(update="never"), "lacks `0U0`", "followed by an update"),
        (ordered(in_flight=lambda stage, r: math.ceil(sum(r) / r[0])), "are enough", "and no more"),
        (
            ordered(in_flight=lambda stage, r: math.ceil(sum(r[stage:]) / r[stage]) + 1),
            "One too many",
        ),
        (ordered(in_flight=lambda stage, r: sum(r[stage:]) // r[stage]), "and round up"),
        (
            ordered(in_flight=lambda stage, r: 1),
            "are enough",
            "so many forwards come before the first backward",
        ),
        (lambda *row: order_pipedream(*row)[:-2], "lacks", "as the warm-up had forwards"),
        (lambda *row: order_pipedream(*row)[3:], "lacks `0F0`", "has its F, its B and its U"),
        (
            ordered(mine=lambda replica, share, m: list(range(replica, m // share * share, share))),
            "`order_pipedream(0, 0, [2, 1], 5)` lacks `0F4`",
            "the last round has fewer microbatches",
        ),
    ],
    "slowest_part": [
        (planned(work=lambda work, exchange, r: max(work, exchange)), "divided by"),
        (planned(crossing=0.0), "A boundary takes time, too"),
        (planned(crossing=1.0), "crossed twice"),
        (planned(behind_the_last=True), "Behind the last layer nothing is sent"),
        (planned(exchange=lambda weights, r: 0.0), "exchange the gradients"),
        (planned(exchange=lambda weights, r: (r - 1) * weights), "there and back"),
        (planned(exchange=lambda weights, r: 2 * (r - 1) / r * weights), "not twice"),
        (
            planned(work=lambda work, exchange, r: (work + exchange) / r),
            "take the larger one, not the sum",
        ),
        (
            lambda *plan: slowest_part(*plan) + 1.0,
            "For each stage the larger",
            "The plan: times=[2.0, 2.0,",
        ),
        (lambda *plan: None, "Is a `return` missing?"),
    ],
}
RIGHT = {
    "version_used": [by_delay],
    "order_pipedream": [
        ordered(),
        lambda *row: tuple(str(action) for action in order_pipedream(*row)),
    ],
    "slowest_part": [planned()],
}
HANDED, ALL = "newest.grad = used.grad", "zip(stage.parameters(), kept.parameters(), strict=True)"
WRONG_STEPS = [
    (step(("copy.deepcopy(stage)", "stage")), "inplace operation", "copies that no update changes"),
    (step(("(y, 1, link)", "(y, m, link)")), "Already the first update differs", "without 1/m"),
    (step((HANDED, "pass")), "The update changes nothing", "leaves its gradients on the copy"),
    (
        step((ALL, "[*zip(stage.parameters(), kept.parameters())][::2]")),
        "`3.0.bias` and `3.2.bias` stay as they were",
    ),
    (
        step(
            (HANDED, "newest.grad = used.grad if newest.grad is None else newest.grad + used.grad")
        ),
        "left over from the update before",
    ),
    (
        step(
            ("        optimizer.step()\n", ""),
            ("    for send in", "    optimizer.step()\n    for send in"),
        ),
        "updates 1 time, not 8",
        "Each backward is followed by an update",
    ),
    (
        step(
            ("def forward(", "old = []\n\n    def forward("),
            ("in_flight.append(", "old.append(kept); in_flight.append("),
        ),
        "keeps 8 versions",
        "can go when its backward is done",
    ),
    (
        step(
            ("def forward(", "first = copy.deepcopy(stage)\n\n    def forward("),
            ("kept = copy.deepcopy(stage)", "kept = copy.deepcopy(first)"),
        ),
        "Every forward uses the first weights",
    ),
    (PATIENTS["A"][0], "exactly what its forward used"),
    (PATIENTS["B"][0], "go on from its newest state"),
]


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, rows in WRONG.items() for case in rows]
)
def test_a_wrong_answer_is_told_why(name: str, case: tuple[Any, ...]) -> None:
    refuses(name, *case)


@pytest.mark.parametrize(
    ("name", "answer"), [(name, each) for name, answers in RIGHT.items() for each in answers]
)
def test_a_right_answer_may_be_written_in_another_way(name: str, answer: Answer) -> None:
    accepts(name, answer)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", WRONG_STEPS)
def test_a_wrong_step_is_told_why(case: tuple[Any, ...]) -> None:
    refuses("stashed_step", *case)


def test_a_step_that_stashes_may_compute_again() -> None:
    accepts("stashed_step", healed_versions_step)


def test_a_step_that_is_to_compute_again_keeps_inputs_only() -> None:
    refuses("healed_versions_step", stashed_step, "activations", "inputs only")


@pytest.mark.parametrize("rule", ["none", "stash", "vertical", "2bw"])
def test_the_versions_used_are_those_that_the_ledger_counts(rule: Any) -> None:
    used = ledger(build("pipedream", 3, 12, group=6 if rule == "2bw" else None), rule)
    found = {
        (stage, i): version_used(rule, stage, i, 3, 6) for stage in range(3) for i in range(12)
    }
    assert found == {(stage, i): used.of(stage, i).backward for stage, i in found}


def test_the_slowest_part_is_what_the_planner_minimises() -> None:
    layers = [LayerCost(6.0, 2.0, 1.0), LayerCost(1.5, 1.0, 20.0), LayerCost(1.5, 1.0, 20.0)]
    plan = partition(layers, 3)
    stages = [(stage.start, stage.end, stage.replicas) for stage in plan.stages]
    columns = (
        [getattr(layer, name) for layer in layers]
        for name in ("time", "output_bytes", "weight_bytes")
    )
    assert slowest_part(*columns, stages, math.inf) == pytest.approx(plan.slowest)
    accepts("slowest_part", planned())


@pytest.mark.long
def test_each_patient_shows_its_symptom_and_the_healed_step_none() -> None:
    found = {
        (name, momentum): examine(step, replicas, momentum).first_wrong
        for name, (step, replicas) in PATIENTS.items()
        for momentum in (0.0, 0.9)
    }
    late = (1, 1, 1, 3)
    assert found["A", 0.0] == found["A", 0.9] == found["B", 0.9] == late
    assert found["B", 0.0] == (None,) * 4
    assert found["C", 0.0] == found["C", 0.9] == (0, 4)
    healed = examine(healed_versions_step)
    assert healed.equal
    assert str(healed) == "right"


# What the notebook measures.


def test_stashing_gives_the_gradient_of_what_the_forward_computed_and_its_absence_does_not() -> (
    None
):
    stash, none = angles(["stash", "none"], lr=0.3, p=3, m=12).values()
    assert max(stash.own) < 1e-5
    assert none.own[0] > none.own[1] > none.own[2]
    assert none.own[2] < 1e-5, "the last stage goes backward with what it went forward"
    assert min(stash.now) > 1


def test_a_small_training_run_learns() -> None:
    runs = train(["flush", "stash"], lr=0.3, m=32, p=2)
    assert all(run.final < run.losses[0] for run in runs.values())
    assert runs["flush"].losses[0] == pytest.approx(runs["stash"].losses[0], rel=1e-12)


def test_a_diverged_run_has_an_infinite_loss() -> None:
    assert math.isinf(train(["none"], lr=1e30, m=16, p=2)["none"].final)


def test_the_time_of_a_microbatch_is_that_of_the_slowest_stage_once_the_pipeline_is_full() -> None:
    costs = Costs(update=0.25)
    assert steady(simulate(build("pipedream", 4, 16), costs)) == 3.25
    assert (
        steady(simulate(build("pipedream", 3, 12, replicas=(2, 1)), Costs((2, 1), (2, 1), (2, 1))))
        == 3
    )
