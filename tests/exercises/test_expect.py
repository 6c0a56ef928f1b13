"""Values that graders take for a number or a list, and the messages on all others."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from course_pp.exercises.expect import expect_int, expect_list, expect_number
from course_pp.exercises.formula import Formula
from course_pp.exercises.mistakes import Mistake
from tests.exercises.grading import refuses


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        deque([1, 2]),
        np.array([1, 2]),
        torch.tensor([1, 2]),
    ],
)
def test_any_sequence_is_a_list(value: Any) -> None:
    found = expect_list(value, "f(1)", 2)
    assert found == [1, 2]
    assert [type(each) for each in found] == [int, int]


@pytest.mark.parametrize(
    "value",
    [3, "12", None, {1: 2}, {1, 2}, map(int, "12"), np.array(3), torch.tensor(3)],
)
def test_what_has_no_order_or_is_no_collection_is_no_list(value: Any) -> None:
    with pytest.raises(Mistake):
        expect_list(value, "f(1)")


def test_a_table_in_a_tensor_is_a_list_of_lists() -> None:
    assert expect_list(torch.eye(2, requires_grad=True), "f(1)") == [[1.0, 0.0], [0.0, 1.0]]


def test_a_return_is_missing_only_where_nothing_was_returned() -> None:
    with pytest.raises(Mistake) as whole:
        expect_number(None, "f(1)")
    with pytest.raises(Mistake) as entry:
        expect_number(None, "f(1)[0]")
    assert "return" in whole.value.cause
    assert "return" not in entry.value.cause


@pytest.mark.parametrize(("value", "divides"), [(3.0, True), (0.43, False)])
def test_a_division_is_blamed_for_a_whole_float_first(value: float, divides: bool) -> None:
    with pytest.raises(Mistake) as refused:
        expect_int(value, "f(1)")
    assert refused.value.cause.startswith("`/`") is divides


def judged(solution: Callable[..., Any], value: Any) -> Mistake:
    formula = Formula(solution, [(3,)], read=lambda value, call: value)
    with pytest.raises(Mistake) as refused:
        formula.judge("f", [value])
    return refused.value


def test_thousands_have_commas_only_outside_of_lists() -> None:
    assert "1,201" in judged(lambda x: 1200, 1201).symptom
    assert "[1200, 601]" in judged(lambda x: [1200, 600], [1200, 601]).symptom


@pytest.mark.parametrize("right", [1 / 3, [1 / 3, 2], (7, [0.123456, 2 / 3])])
def test_a_rounded_number_is_called_rounded(right: Any) -> None:
    def rounded(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(rounded, value))
        return round(value, 2)

    assert "rounded" in judged(lambda x: right, rounded(right)).cause
    assert "rounded" not in judged(lambda x: 1 / 3, 0.34).cause


@pytest.mark.parametrize(
    ("name", "answer", "place"),
    [
        ("splits", lambda counts, rank: ([0.5], [1]), "[0][0]"),
        ("carries", lambda reads, begins: [1, 2], "[0]"),
        ("carries", lambda reads, begins: [["1"]], "[0][0]"),
        ("skip_bytes", lambda *case: (1, "2"), "[1]"),
        ("stages_of_rank", lambda *case: ["0"], "[0]"),
        ("neighbours", lambda rank, pp, tp: ([0], ["1"]), "[1][0]"),
        ("assign_layers", lambda n_layers, n_stages: [(0, 1), 2], "[1]"),
    ],
)
def test_a_wrong_entry_is_named_by_its_place(
    name: str, answer: Callable[..., Any], place: str
) -> None:
    refuses(name, answer, f"){place}` is")
