"""The graders of notebook 12, by what learners hand in; and what the notebook runs on paper."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from course_pp.exercises import capstone_clinic, capstone_formulas, capstone_plans
from course_pp.exercises.capstone_clinic import grade_planned_report, planned_report, ward_round
from course_pp.exercises.capstone_formulas import break_even, bytes_held, grade_break_even, grade_bytes_held
from course_pp.exercises.capstone_lab import PUBLISHED, beside_data, data_parallel
from course_pp.exercises.capstone_plans import bottleneck, grade_bottleneck, grade_fastest_layout
from course_pp.exercises.mistakes import Mistake
from course_pp.plan import Layout, cluster_of, model_named, plan, predict
from course_pp.schedule import Costs, build, check, simulate
from course_pp.show.curves import crossing


class Direct:
    """An answer that is called here: graders are tried by many, and starting ranks for each takes long."""

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


@pytest.mark.parametrize(
    ("table", "right", "grade"),
    [
        (capstone_formulas._WRONG_BYTES, bytes_held, grade_bytes_held),
        (capstone_formulas._WRONG_TOKENS, break_even, grade_break_even),
    ],
    ids=["bytes_held", "break_even"],
)
def test_each_known_mistake_is_told_by_its_own_cause(table: Any, right: Any, grade: Any) -> None:
    assert said(grade, right) == ""
    assert {why: said(grade, wrong) for wrong, why in table if why not in said(grade, wrong)} == {}


def planned_best(model: Any, cluster: Any, batch: int, seq_len: int) -> Layout:
    return plan(model, cluster, batch, seq_len, 1)[0].layout


predicted = cache(predict)


def choose(**changes: Any) -> Callable[..., Layout]:
    """An answer that tries less, or asks less, than it should."""

    def search(model: Any, cluster: Any, batch: int, seq_len: int) -> Layout:
        n, found = cluster.n_gpus, []
        for pp in changes.get("pp", range(1, n + 1)):
            for tp in changes.get("tp", range(1, cluster.gpus_per_node + 1)):
                for ac in changes.get("ac", ("none", "selective", "full")):
                    if n % (pp * tp) == 0:
                        try:
                            found.append(
                                predicted(model, Layout(pp, tp, n // pp // tp, ac=ac), cluster, batch, seq_len)
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
        (choose(pp=(1, 2, 4, 8, 16)), "There is one of"),
        (choose(pp=(1,)), "There is one of"),
        (choose(tp=(1,)), "There is one of"),
        (choose(tp=(1, 2, 4)), "There is one of"),
        (choose(ac=("none", "full")), "There is one of"),
        (choose(ac=("none", "selective")), "There is one of"),
        (choose(ac=("full",)), "There is one of"),
        (choose(key=lambda each: -each.step_s), "There is one of"),
        (choose(key=lambda each: max(each.total_memory)), "There is one of"),
        (lambda *given: Layout(), "cannot be laid out"),
        (lambda *given: None, "Is a `return` missing?"),
        (lambda *given: choose()(*given).with_(overlap=False), "changes more than"),
        (lambda model, cluster, *rest: Layout(1, cluster.n_gpus), "leaves the node"),
        (planned_best, "changes more than"),
    ],
)
@pytest.mark.slow
def test_a_layout_is_accepted_if_it_fits_and_none_is_faster(fn: Callable[..., Any], says: str) -> None:
    found = said(grade_fastest_layout, fn)
    assert says in found if says else not found


def by_part(prediction: Any) -> str:
    return capstone_plans._OF_PART[prediction.bound_by]


def by_waiting(prediction: Any) -> str:
    waits = {part: seconds for part, seconds in prediction.parts.items() if part not in ("compute", "recompute")}
    return capstone_plans._OF_PART[max(waits, key=lambda part: waits[part])]


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (bottleneck, ""),
        (lambda prediction: min(capstone_plans._RESOURCES, key=prediction.gains().get), ""),
        (by_part, "The largest part is not what helps most"),
        (by_waiting, "The largest part is not what helps most"),
        (capstone_plans._longest_alone, "compare times a sequence"),
        (lambda prediction: "peak", "Return one of"),
        (lambda prediction: None, "Return one of"),
        *((lambda prediction, name=name: name, "leaves") for name in capstone_plans._RESOURCES),
    ],
)
def test_a_bottleneck_is_what_helps_most(fn: Callable[..., Any], says: str) -> None:
    found = said(grade_bottleneck, fn)
    assert says in found if says else not found


def ill_report(model: Any, layout: Any, cluster: Any, batch: int, seq_len: int, step_s: float) -> Any:
    """All three illnesses, as the notebook shows them."""
    return capstone_clinic._report("batch", "peak", "embedding", "head")(model, layout, cluster, batch, seq_len, step_s)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (planned_report, ""),
        (lambda *given: list(planned_report(*given)), ""),
        (ill_report, "global batch"),
        (capstone_clinic._report("peak"), "count all of them, not the nodes"),
        (capstone_clinic._report("embedding"), "Rank 0 holds the embedding"),
        (capstone_clinic._report("head"), "The last rank holds final norm and head"),
        (capstone_clinic._report("embedding", "head"), "The ends hold more than layers"),
        (lambda *given: planned_report(*given)[:2], "not 3"),
        (lambda *given: None, "None"),
        (lambda model, layout, *rest: planned_report(model, replace(layout, microbatch_size=1), *rest), "microbatches"),
        (lambda model, layout, *rest: planned_report(model, replace(layout, dp_replicate=1), *rest), "microbatches"),
    ],
)
def test_a_report_needs_all_three_numbers(fn: Callable[..., Any], says: str) -> None:
    found = said(grade_planned_report, fn)
    assert says in found if says else not found


def test_each_patient_shows_its_own_symptom() -> None:
    _, first, *rest = ward_round().splitlines()
    one, four = ({line.split()[0]: line.split()[1:] for line in rows} for rows in (rest[:4], rest[5:]))
    assert first.startswith("2x2xH100")
    assert one["A"] == one["right"]
    assert four["A"][0] == f"{4 * 524_288:,}"
    assert [float(each["B"][1].rstrip("%")) > 100 for each in (one, four)] == [True, True]
    assert (one["C"][2], one["C"][3]) == (one["right"][3], one["right"][3])


# What the notebook says of the ways to train.


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(("batch", "size"), [(8, 1), (24, 100)])
def test_ring_and_bubble_take_equally_long_where_two_rings_are_a_sequence(n: int, batch: int, size: int) -> None:
    sequence = ring = 12.0 * size
    schedule = data_parallel(n)
    assert check(schedule) == []
    alone = simulate(schedule, Costs((batch / n * sequence, *[ring / (2 * n)] * (2 * n - 2)))).makespan
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
