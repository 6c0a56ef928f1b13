"""The graders of notebook 12, by what learners hand in; and what the notebook runs on paper."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from course_pp.exercises.capstone import exercises as capstone
from course_pp.exercises.capstone.exercises import (
    PUBLISHED,
    beside_data,
    bottleneck,
    break_even,
    bytes_held,
    data_parallel,
    grade_bottleneck,
    grade_break_even,
    grade_bytes_held,
    grade_fastest_layout,
    grade_planned_report,
    planned_report,
    ward_round,
)
from course_pp.exercises.formula import Formula
from course_pp.exercises.mistakes import Mistake
from course_pp.plan import Layout, cluster_of, model_named, plan, predict
from course_pp.schedule import Costs, build, check, simulate
from course_pp.show.curves import crossing


class Direct:
    """An answer that is called in this process: to start ranks for each takes long."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name, self._fn = fn.__name__, fn

    def calls(self, rows: Any, call: str | None = None) -> list[Any]:
        return [self._fn(*row) for row in rows]


def said(grade: Callable[[Any], None], fn: Callable[..., Any]) -> str:
    """What the grader has against an answer; nothing if it is right."""
    try:
        grade(Direct(fn))
    except Mistake as mistake:
        return str(mistake)
    return ""


def rounded_down(*given: Any) -> float:
    return math.floor(break_even(*given))


def one_gpu_too_many(rank: int, pp: int, *rest: Any) -> float:
    return bytes_held(rank, pp, *rest) + (rank == 0) * 7


@pytest.mark.parametrize(
    ("grade", "fn", "says"),
    [
        (grade_break_even, lambda *given: math.ceil(break_even(*given)), ""),
        (grade_break_even, rounded_down, "the ring still takes longer"),
        (grade_break_even, lambda *given: 3.0, "Set the ring"),
        (
            grade_bytes_held,
            one_gpu_too_many,
            "16 bytes × (3 layers × 12,000 + 1 × 5,000) / 2, and 4 microbatches",
        ),
    ],
)
def test_any_other_answer_is_told_what_to_compare(
    grade: Formula, fn: Callable[..., Any], says: str
) -> None:
    found = said(grade, fn)
    assert says in found if says else not found


def planned_best(model: Any, cluster: Any, batch: int, seq_len: int) -> Layout:
    return plan(model, cluster, batch, seq_len, 1)[0].layout


predicted = cache(predict)


def choose(**changes: Any) -> Callable[..., Layout]:
    """An answer that tries less, or asks less, than it should."""

    def search(model: Any, cluster: Any, batch: int, seq_len: int) -> Layout:
        n, found = cluster.n_gpus, []
        for pp in changes.get("pp", range(1, n + 1)):
            for tp in changes.get(
                "tp", range(1, (n if "wide" in changes else cluster.gpus_per_node) + 1)
            ):
                for ac in changes.get("ac", ("none", "selective", "full")):
                    if n % (pp * tp) == 0:
                        try:
                            found.append(
                                predicted(
                                    model,
                                    Layout(pp, tp, n // pp // tp, ac=ac),
                                    cluster,
                                    batch,
                                    seq_len,
                                )
                            )
                        except ValueError:
                            continue
        fitting = [each for each in found if each.fits or "any" in changes]
        return min(fitting or found, key=changes.get("key", lambda each: each.step_s)).layout

    return search


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (choose(), ""),
        (choose(any=True), "GB too many"),
        (choose(pp=(1, 2, 4, 8, 16)), "Was every pp that divides the GPUs tried?"),
        (choose(tp=(1,)), "There is one of"),
        (choose(tp=(1, 2, 4)), "There is one of"),
        (choose(ac=("none", "full")), "There is one of"),
        (choose(ac=("none", "selective")), "There is one of"),
        (choose(ac=("full",)), "try every `ac`"),
        (choose(key=lambda each: -each.step_s), "That is the slowest one that fits"),
        (choose(key=lambda each: max(each.total_memory)), "That is the one that holds least"),
        (choose(wide=True), "leaves the node"),
        (lambda *given: Layout(), "cannot be laid out"),
        (lambda *given: None, "Is a `return` missing?"),
        (lambda *given: choose()(*given).with_(overlap=False), "changes more than"),
        (lambda model, cluster, *rest: Layout(1, cluster.n_gpus), "leaves the node"),
        (planned_best, "changes more than"),
    ],
)
@pytest.mark.slow
def test_a_layout_is_accepted_if_it_fits_and_none_is_faster(
    fn: Callable[..., Any], says: str
) -> None:
    found = said(grade_fastest_layout, fn)
    assert says in found if says else not found


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (bottleneck, ""),
        (lambda prediction: min(capstone._RESOURCES, key=prediction.gains().get), ""),
        (lambda prediction: "peak", "Return one of"),
        (lambda prediction: None, "Return one of"),
        *((lambda prediction, name=name: name, "leaves") for name in capstone._RESOURCES),
    ],
)
def test_a_bottleneck_is_what_helps_most(fn: Callable[..., Any], says: str) -> None:
    found = said(grade_bottleneck, fn)
    assert says in found if says else not found


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (planned_report, ""),
        (lambda *given: list(planned_report(*given)), ""),
        (lambda *given: planned_report(*given)[:2], "not 3"),
        (lambda *given: None, "None"),
        (
            lambda model, layout, *rest: planned_report(
                model, replace(layout, microbatch_size=1), *rest
            ),
            "of a microbatch",
        ),
        (
            lambda model, layout, *rest: planned_report(
                model, replace(layout, dp_replicate=1), *rest
            ),
            "both data-parallel",
        ),
    ],
)
def test_a_report_needs_all_three_numbers(fn: Callable[..., Any], says: str) -> None:
    found = said(grade_planned_report, fn)
    assert says in found if says else not found


def test_each_patient_shows_its_own_symptom() -> None:
    _, first, *rest = ward_round().splitlines()
    one, four = (
        {line.split()[0]: line.split()[1:] for line in rows} for rows in (rest[:4], rest[5:])
    )
    assert first.startswith("2x2xH100")
    assert one["A"] == one["right"]
    assert four["A"][0] == f"{4 * 524_288:,}"
    assert [float(each["B"][1].rstrip("%")) > 100 for each in (one, four)] == [True, True]
    assert (one["C"][2], one["C"][3]) == (one["right"][3], one["right"][3])


# What the notebook says of the ways to train.


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(("batch", "size"), [(8, 1), (24, 100)])
def test_ring_and_bubble_take_equally_long_where_two_rings_are_a_sequence(
    n: int, batch: int, size: int
) -> None:
    sequence = ring = 12.0 * size
    schedule = data_parallel(n)
    assert check(schedule) == []
    alone = simulate(
        schedule, Costs((batch / n * sequence, *[ring / (2 * n)] * (2 * n - 2)))
    ).makespan
    stage = sequence / 3 / n
    piped = simulate(build("1f1b", n, batch), Costs(stage, stage, stage)).makespan
    assert float(alone) == pytest.approx(float(piped))


def test_the_break_even_hardly_depends_on_the_size_of_the_model() -> None:
    cluster, tokens = cluster_of("8x1xH100"), [2**k for k in range(9, 16)]
    found = [
        crossing(beside_data(model_named(name), "pp", cluster, tokens))
        for name in ("llama2-7b", "llama3-70b", "llama3-405b")
    ]
    assert all(each is not None for each in found)
    assert max(found) < 2 * min(found)  # type: ignore[type-var, operator]


@pytest.mark.slow
def test_published_runs_are_predicted_within_a_tenth() -> None:
    errors = [abs(run.predicted().step_s / run.seconds - 1) for run in PUBLISHED]
    assert max(errors) < 0.1
    assert sorted(errors)[4] < 0.03
