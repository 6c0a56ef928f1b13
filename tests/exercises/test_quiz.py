"""The quiz as plain text and with buttons: what is kept, and that nothing is told before the course."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course_pp.exercises import progress, quiz
from course_pp.exercises.inventory import When, WrongAnswers, answers_path, questions, read_answers
from course_pp.exercises.panel import Panel

pytestmark = pytest.mark.usefixtures("progress_file")
THIRD = [question for question in questions() if question.notebook == "03"]
RIGHT = "".join("abcdef"[question.options.index(question.correct)] for question in THIRD)


def test_without_answers_each_question_is_printed_with_letters_and_none_is_said_to_be_right() -> None:
    text = quiz("before").text
    assert text.startswith('Answer with quiz("before", "…"): a letter for each of the 30 questions')
    for number, question in enumerate(questions(), 1):
        assert f"\n{number}. {question.asks}\n   a) " in text
    assert "prints: " not in text
    assert text.endswith('0 of 30 answered. What is right is shown after the course: quiz("after").')


def test_letters_are_kept_and_counted_beside_progress(progress_file: Path) -> None:
    first = quiz("before", f"-{RIGHT[1:]}", notebook="03")
    assert first.summary.startswith("3 of 3 answered. What is right is shown after")
    after = quiz("after", RIGHT, notebook="03")
    assert after.summary == "3 of 3 answered, 3 right; before the course it was 2."
    assert answers_path().parent == progress_file.parent
    assert progress().quiz["after"] == {question.name: question.correct for question in THIRD}
    assert progress().summary.endswith("; questions answered: 3 before and 3 after the course")
    assert json.loads(progress().to_json(progress_file.with_name("mine.json")).read_text())["quiz"] == progress().quiz


def test_after_the_course_each_answer_is_explained_with_the_cell_that_shows_it() -> None:
    wrong = "".join("abcd"[question.options.index(question.wrong[0].says)] for question in THIRD)
    text = quiz("after", wrong, notebook="03").text
    for question in THIRD:
        assert f"{question.correct} is right. Not {question.wrong[0].says!r}: {question.wrong[0].because}." in text
        assert f"Notebook 03, section {question.section!r}, prints: {question.output}" in text
    assert "3 of 3 answered, 0 right." in text


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quiz("during"), "when is 'during'; it must be 'before' or 'after'"),
        (lambda: quiz("after", notebook="77"), "notebook is '77'; there are questions about 00, 01"),
        (lambda: quiz("after", "ab", notebook="03"), "answers has 2 letters for 3 questions"),
        (lambda: quiz("after", "abz", notebook="03"), "answers has 'z' for question 3: give one of a, b, c, or -"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_kept(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match="^" + says):
        call()
    assert not answers_path().exists()


def test_a_wrong_letter_is_told_without_a_traceback() -> None:
    with pytest.raises(WrongAnswers) as caught:
        quiz("after", "abz", notebook="03")
    assert len(caught.value._render_traceback_()) == 1


@pytest.mark.parametrize("content", ["[]", "{", '{"answers": {"before": [1]}}', '{"answers": {"after": {"x": 1}}}'])
def test_a_damaged_file_is_noted_and_left_as_it_is(content: str) -> None:
    answers_path().parent.mkdir(parents=True, exist_ok=True)
    answers_path().write_text(content)
    made = quiz("after", RIGHT, notebook="03")
    assert made.note.startswith(f"Answers could not be read from {answers_path()} (it is no file of answers: ")
    assert made.note in progress().note
    assert answers_path().read_text() == content


def test_where_nothing_can_be_kept_the_answers_still_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PP_PROGRESS", "/dev/null")
    made = quiz("after", RIGHT, notebook="03")
    assert "3 of 3 answered, 3 right." in made.summary
    assert "COURSE_PP_PROGRESS" in made.note


@pytest.mark.parametrize("when", ["before", "after"])
def test_buttons_go_through_all_questions_and_keep_each_answer(when: When) -> None:
    panel = Panel(quiz(when, notebook="03"))
    for question in THIRD:
        assert question.asks in panel._asks.value
        assert [button.tooltip for button in panel.answers[:-1]] == list(question.options)
        assert not any("✓" in button.description for button in panel.answers)
        right = panel.answers[question.options.index(question.correct)]
        right.click()
        assert [button for button in panel.answers if "✓" in button.description] == [right]
        assert read_answers()[0][when][question.name] == question.correct
        assert (question.output in panel._said.value) == (when == "after")
        panel.next.click()
    assert "3 of 3 answered" in panel._said.value
    assert panel.next.disabled
    panel.back.click()
    panel.answers[-1].click()
    assert panel.answers[-1].description == "✓ I do not know"
    assert read_answers()[0][when][THIRD[-1].name] == "-"


def test_without_widgets_a_notebook_gets_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def bundle(widgets: bool) -> dict[str, Any]:
        monkeypatch.setattr("course_pp.exercises.inventory.shows_widgets", lambda: widgets)
        return quiz("before", notebook="03")._repr_mimebundle_()

    assert set(bundle(False)) == {"text/plain"}
    assert "application/vnd.jupyter.widget-view+json" in bundle(True)
