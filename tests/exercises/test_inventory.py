"""The thirty questions: each answer shown by a run, each wrong one refuted by the notebook."""

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from course_pp.exercises.exercise import MODULES
from course_pp.exercises.inventory import Question, questions, questions_about
from course_pp.schedule import Costs, bound, build, simulate

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
by_name = pytest.mark.parametrize("question", questions(), ids=lambda question: question.name)


@cache
def read(notebook: str) -> tuple[str, str, str]:
    """Its prose, its outputs, and its headings, with every run of white space made one space."""
    [path] = NOTEBOOKS.glob(f"{notebook}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = [
        line
        for cell in cells
        if cell["cell_type"] == "markdown"
        for line in "".join(cell["source"]).splitlines()
    ]
    outputs, titles = [], []
    for cell in cells:
        if cell["cell_type"] == "code":
            titles.append("".join(cell["source"]))
            outputs += ["".join(output.get("text", "")) for output in cell["outputs"]]
    headings = [line.removeprefix("## ") for line in prose if line.startswith("## ")]
    return (
        " ".join(" ".join(prose + titles).split()),
        " ".join(" ".join(outputs).split()),
        "\n".join(headings),
    )


def test_there_are_thirty_two_or_three_a_notebook() -> None:
    assert len(questions()) == len({question.name for question in questions()}) == 30
    each = Counter(question.notebook for question in questions())
    assert set(each.values()) <= {2, 3}
    assert {f"{number:02}" for number in range(14)} <= set(each) <= set(MODULES)
    assert min(Counter(question.concept for question in questions()).values()) >= 2


@by_name
def test_the_answer_is_what_a_cell_prints_and_what_the_package_computes(question: Question) -> None:
    _, outputs, headings = read(question.notebook)
    assert question.output in outputs
    assert question.section in headings.splitlines()
    if question.run:
        found = eval(
            question.run,
            {
                "simulate": simulate,
                "build": build,
                "bound": bound,
                "Costs": Costs,
                "list": list,
                "max": max,
            },
        )
        assert found == pytest.approx(question.value)


@by_name
def test_each_common_guess_is_refuted_by_the_notebook(question: Question) -> None:
    prose, outputs, _ = read(question.notebook)
    assert len(question.wrong) >= 2
    for wrong in question.wrong:
        assert wrong.quote in f"{prose} {outputs}", f"{wrong.says}: {wrong.quote}"
        assert wrong.because
        assert not wrong.because.endswith(".")
    assert len(set(question.options)) == 1 + len(question.wrong)


def test_the_right_answer_stands_in_no_place_more_than_half_of_the_time() -> None:
    places = Counter(question.options.index(question.correct) for question in questions())
    assert max(places.values()) <= 15


def test_a_route_asks_what_its_sections_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NOTEBOOKS.parent / "docs"))
    from routes import ROUTES, chosen

    for route in ROUTES:
        taught = {
            (part.notebook, section.title) for part in route.parts for section in chosen(part)
        }
        expected = [
            question for question in questions() if (question.notebook, question.section) in taught
        ]
        assert list(questions_about([route.name])) == expected
    assert expected == list(questions())
