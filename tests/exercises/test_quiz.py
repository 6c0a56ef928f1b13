"""The quiz as text and with buttons: answers are kept, and nothing is told before the course."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course_pp.exercises import progress, quiz
from course_pp.exercises.inventory import NoQuiz, questions
from course_pp.exercises.progress import STORE, Store, When
from course_pp.exercises.quizzes import QuizPanel

pytestmark = pytest.mark.usefixtures("progress_file")
THIRD = [question for question in questions() if question.notebook == "03"]
RIGHT = "".join("abcdef"[question.options.index(question.correct)] for question in THIRD)


def test_without_answers_each_question_is_printed_with_letters_and_none_is_said_to_be_right() -> (
    None
):
    text = quiz("before").text
    assert text.startswith('Answer with quiz("before", "…"): a letter for each of the 30 questions')
    for number, question in enumerate(questions(), 1):
        assert f"\n{number}. {question.asks}\n   a) " in text
    assert "prints: " not in text
    assert text.endswith(
        '0 of 30 answered. What is right is shown after the course: quiz("after").'
    )


def test_letters_are_kept_and_counted_with_progress(progress_file: Path) -> None:
    first = quiz("before", f"-{RIGHT[1:]}", about="03")
    assert first.summary.startswith("3 of 3 answered. What is right is shown after")
    after = quiz("after", RIGHT, about="03")
    assert after.summary == "3 of 3 answered, 3 right; before the course it was 2."
    assert progress().kept.quiz["after"] == {question.name: question.correct for question in THIRD}
    quiz("after", "---", about="07")
    assert progress().summary.endswith("; questions answered: 3 before and 6 after the course")
    progress_file.unlink()
    assert quiz("before").summary.startswith("0 of 30 answered")


def test_the_first_answer_after_the_course_counts_and_closes_the_question() -> None:
    quiz("before", "aaa", about="03")
    assert quiz("before", "---", about="03").given == {question.name: "-" for question in THIRD}
    first = quiz("after", f"-{RIGHT[1:]}", about="03")
    again = quiz("after", RIGHT, about="03")
    assert again.kept.quiz == first.kept.quiz
    assert first.note == ""
    assert again.note == "Not counted, as you had been told what is right: the answer to 1."
    late = quiz("before", RIGHT, about="03")
    assert late.kept.quiz == first.kept.quiz
    assert late.note == "Not counted, as you had been told what is right: the answer to 1, 2, 3."
    assert late.summary.startswith("3 of 3 answered.")


def test_a_question_that_was_only_answered_after_the_course_takes_no_answer_before_it() -> None:
    stale = QuizPanel(quiz("before", about="03"))
    quiz("after", RIGHT, about="03")
    assert not quiz("before", "aaa", about="03").given
    for panel in (stale, QuizPanel(quiz("before", about="03"))):
        panel.answers[0].click()
        assert all(button.disabled for button in panel.answers)
        assert "no answer before it counts any more" in panel._said.value
    assert not progress().kept.quiz["before"]


@pytest.mark.parametrize("about", ["45_minutes", ["02", "03"]])
def test_the_calls_that_are_named_ask_the_same_questions(about: str | list[str]) -> None:
    asked = quiz("before", about=about)
    called = re.findall(r"quiz\(.*?\)", asked.text)
    assert [call.split('"')[1] for call in called] == ["before", "after"]
    for call in called:
        assert eval(call.replace(', "…"', "")).asked == asked.asked


def test_after_the_course_each_answer_is_explained_with_the_cell_that_shows_it() -> None:
    wrong = "".join("abcd"[question.options.index(question.wrong[0].says)] for question in THIRD)
    text = quiz("after", wrong, about="03").text
    for question in THIRD:
        assert (
            f"{question.correct} is right. Not {question.wrong[0].says!r}:"
            f" {question.wrong[0].because}." in text
        )
        assert f"Notebook 03, section {question.section!r}, prints: {question.output}" in text
    assert "3 of 3 answered, 0 right." in text


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quiz(), "quiz: when is None: pass one of 'before', 'after'"),
        (lambda: quiz("during"), "quiz: when is 'during' .*'before', 'after'"),
        (
            lambda: quiz("after", about="77"),
            (
                "about is '77'; there are 45_minutes, 90_minutes, 180_minutes, a_day, a_semester,"
                " 00, 01"
            ),
        ),
        (lambda: quiz("after", "ab", about="03"), "answers has 2 letters for 3 questions"),
        (
            lambda: quiz("after", "abz", about="03"),
            "answers has 'z' for question 3: give one of a, b, c, or -",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_and_nothing_kept(
    call: Callable[[], object], says: str
) -> None:
    with pytest.raises(NoQuiz, match="^" + says) as caught:
        call()
    assert len(caught.value._render_traceback_()) == 1
    assert progress().kept.quiz == {"before": {}, "after": {}}


@pytest.mark.parametrize(
    ("about", "names"),
    [
        ("45_minutes", ["bubble_of_1f1b", "held_under_1f1b"]),
        (
            ["09", "45_minutes"],
            ["bubble_of_1f1b", "held_under_1f1b", "full_state_dict", "killed_save"],
        ),
    ],
)
def test_it_asks_about_routes_and_notebooks_in_the_order_of_the_course(
    about: str | list[str], names: list[str]
) -> None:
    assert [question.name for question in quiz("before", about=about).asked] == names


def test_where_nothing_can_be_kept_the_answers_still_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PP_PROGRESS", "/dev/null")
    # what waits in it is of this test alone
    monkeypatch.setattr("course_pp.exercises.quizzes.STORE", Store())
    made = quiz("after", RIGHT, about="03")
    assert "3 of 3 answered, 3 right." in made.summary
    assert "COURSE_PP_PROGRESS" in made.note


@pytest.mark.parametrize("when", ["before", "after"])
def test_buttons_go_through_all_questions_and_keep_each_answer(when: When) -> None:
    panel = QuizPanel(quiz(when, about="03"))
    for question in THIRD:
        assert question.asks in panel._asks.value
        assert [button.tooltip for button in panel.answers[:-1]] == list(question.options)
        assert not any("✓" in button.description for button in panel.answers)
        right = panel.answers[question.options.index(question.correct)]
        right.click()
        assert [button for button in panel.answers if "✓" in button.description] == [right]
        assert STORE.read()[0].quiz[when][question.name] == question.correct
        assert (question.output in panel._said.value) == (when == "after")
        assert panel._said.value.count(f"Counted: {right.description[-1]}.") == (when == "after")
        assert all(button.disabled == (when == "after") for button in panel.answers)
        panel.next.click()
    assert "3 of 3 answered" in panel._said.value
    assert panel.next.disabled
    panel.back.click()
    panel.answers[-1].click()
    changed = when == "before"
    assert panel.answers[-1].description == "✓ " * changed + "I do not know"
    assert (STORE.read()[0].quiz[when][THIRD[-1].name] == "-") == changed


def test_without_widgets_a_notebook_gets_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def bundle(widgets: bool) -> dict[str, Any]:
        monkeypatch.setattr("course_pp.exercises.quizzes.shows_widgets", lambda: widgets)
        return quiz("before", about="03")._repr_mimebundle_()

    assert set(bundle(False)) == {"text/plain"}
    assert "application/vnd.jupyter.widget-view+json" in bundle(True)
