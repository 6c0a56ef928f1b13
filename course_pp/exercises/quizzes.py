"""The quiz with the questions of the inventory: as text with letters, or as a panel with buttons.

JupyterLab takes the arrow keys that a group of radio buttons would need, so each answer is a button
of its own: Tab reaches it, the space bar presses it. ipywidgets is imported when a panel is made,
because the text does not need it.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from course_pp.base.arguments import WrongArgument, check_arguments, checked
from course_pp.exercises.display import Shown, shows_widgets
from course_pp.exercises.inventory import NoQuiz, Question, count_right, questions_about
from course_pp.exercises.progress import STORE, Kept, When

if TYPE_CHECKING:
    from ipywidgets import Button

_LETTERS = string.ascii_lowercase
NO_ANSWER = "-"
_UNKNOWN = "I do not know"
_TEXT = "max-width:60em;line-height:1.5"
_MARK = "✓ "


@checked
@dataclass(frozen=True)
class Quiz(Shown):
    """The questions and the answers so far.

    Attributes:
        when: ``"before"`` the course or ``"after"`` it.
        about: routes and numbers of notebooks whose questions are asked; empty for all.
        kept: progress of the learner, with the answers before the course and after it.
        note: sentence on answers that could not be read or kept, or do not count.
    """

    when: When
    about: tuple[str, ...] = ()
    kept: Kept = field(default_factory=Kept)
    note: str = ""

    @property
    def asked(self) -> tuple[Question, ...]:
        """The questions, in order."""
        return questions_about(self.about)

    @property
    def given(self) -> Mapping[str, str]:
        """The answers so far, by name of question."""
        return self.kept.quiz[self.when]

    def is_closed(self, question: Question) -> bool:
        """Whether answers count no more, because the right answers have been shown."""
        return question.name in self.kept.quiz["after"]

    @property
    def summary(self) -> str:
        """The number of answers; after the course also of right ones, then and before."""
        answered = sum(question.name in self.given for question in self.asked)
        text = f"{answered} of {len(self.asked)} answered"
        if self.when == "before":
            return f"{text}. What is right is shown after the course: {self._call('after')}."
        right = count_right(self.asked, self.kept.quiz["after"])
        if not self.kept.quiz["before"]:
            return f"{text}, {right} right."
        earlier = count_right(self.asked, self.kept.quiz["before"])
        return f"{text}, {right} right; before the course it was {earlier}."

    @property
    def text(self) -> str:
        """The quiz as plain text.

        These are the questions, or the right answers once all are answered after the course.
        """
        if self.when == "after" and all(question.name in self.given for question in self.asked):
            explained = []
            for i, question in enumerate(self.asked, 1):
                answer = question.explain(self.given[question.name])
                explained.append(f"{i}. {question.asks}\n   {answer}")
            return "\n".join(filter(None, [*explained, self.summary, self.note]))
        how = (
            f"Answer with {self._call(self.when, '…')}: a letter for each of the {len(self.asked)}"
            f" questions, {NO_ANSWER} where you do not know."
        )
        lines = [how]
        for number, question in enumerate(self.asked, 1):
            lines.append(_as_text(number, question, self.given))
        return "\n".join(filter(None, [*lines, self.summary, self.note]))

    def _call(self, *arguments: str) -> str:
        """Return the call that asks the same questions: ``quiz("after", about="a_day")``."""
        words = [f'"{argument}"' for argument in arguments]
        if self.about:
            about = self.about[0] if len(self.about) == 1 else self.about
            words.append(f"about={json.dumps(about)}")
        return f"quiz({', '.join(words)})"

    def __repr__(self) -> str:
        return self.text

    def panel(self) -> QuizPanel:
        """Return a panel with buttons that shows one question at a time.

        Raises:
            ModuleNotFoundError: ipywidgets is not installed.
        """
        return QuizPanel(self)

    @checked
    def answer(self, question: Question, option: str | None) -> Quiz:
        """Keep an answer, None for *I do not know*; return the quiz with it."""
        return _answered(self.when, self.about, {question.name: option or NO_ANSWER})

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.text}
        if shows_widgets():
            bundle |= self.panel().bundle()
        return bundle


def quiz(
    # None is refused below, in a sentence: a missing argument would give a traceback.
    when: When = None,  # type: ignore[assignment]
    answers: str | None = None,
    about: str | Sequence[str] = (),
) -> Quiz:
    """Ask thirty questions on pipeline parallelism: the same before and after the course.

    With ipywidgets a panel shows one question at a time and keeps each answer at once. Without it
    the questions are printed, and a second call takes the answers as letters. After the course the
    first answer to a question counts. Before it, an answer may be changed until the question is
    answered after the course.

    Args:
        when: ``"before"`` or ``"after"`` the course. The right answers are shown only after it.
        answers: a letter for each question, ``-`` for *I do not know*: ``"ab-c"``.
        about: routes or notebooks; only questions on these are asked: ``"a_day"``, ``"03"``,
            ``["02", "03"]``.

    Raises:
        NoQuiz: ``when`` is neither, a name in ``about`` is unknown, or the letters do not fit the
            questions.
    """
    try:
        check_arguments(quiz, locals())
    except WrongArgument as error:
        raise NoQuiz(str(error)) from None
    about = (about,) if isinstance(about, str) else tuple(about)
    asked = questions_about(about)
    given = {} if answers is None else _read(asked, answers)
    return _answered(when, about, given).show()


def _answered(when: When, about: tuple[str, ...], given: Mapping[str, str]) -> Quiz:
    """Keep answers, by name of question; return the quiz. Its note names late answers."""
    unkept = STORE.record_answers(when, given) if given else ""
    kept, unread = STORE.read()
    late = []
    for number, question in enumerate(questions_about(about), 1):
        name = question.name
        if name in given and kept.quiz[when].get(name) != given[name]:
            late.append(str(number))
    note = ""
    if late:
        note = f"Not counted, as you had been told what is right: the answer to {', '.join(late)}."
    return Quiz(when, about, kept, " ".join(filter(None, [note, unkept or unread])))


def _read(asked: Sequence[Question], letters: str) -> dict[str, str]:
    # Learners group thirty letters by spaces.
    letters = "".join(letters.lower().split())
    if len(letters) != len(asked):
        raise NoQuiz(
            f"answers has {len(letters)} letters for {len(asked)} questions: give one for each, or"
            " - (about= asks only about some notebooks)"
        )
    chosen = {}
    for number, (question, letter) in enumerate(zip(asked, letters, strict=True), 1):
        known = _LETTERS[: len(question.options)]
        if letter == NO_ANSWER:
            chosen[question.name] = NO_ANSWER
        elif letter in known:
            chosen[question.name] = question.options[known.index(letter)]
        else:
            raise NoQuiz(
                f"answers has {letter!r} for question {number}: give one of {', '.join(known)},"
                " or -"
            )
    return chosen


def _as_text(number: int, question: Question, given: Mapping[str, str]) -> str:
    lines = [f"{number}. {question.asks}"]
    for letter, option in zip(_LETTERS, question.options, strict=False):
        yours = " (your answer)" if given.get(question.name) == option else ""
        lines.append(f"   {letter}) {option}{yours}")
    return "\n".join(lines)


class QuizPanel:
    """A panel: question, answers, Back and Next.

    Each answer is kept at once. A question that has been explained takes no other.
    """

    def __init__(self, quiz: Quiz) -> None:
        from ipywidgets import HTML, Button, HBox, Layout, VBox

        self.quiz = quiz
        self.number = 0
        self._asks = HTML()
        self._said = HTML()
        self._choice = HBox(layout=Layout(flex_flow="row wrap"))
        self.back = Button(description="Back")
        self.next = Button(description="Next")
        self.back.on_click(lambda _: self._go(-1))
        self.next.on_click(lambda _: self._go(1))
        self.widget = VBox([self._asks, self._choice, self._said, HBox([self.back, self.next])])
        self._show()

    @property
    def answers(self) -> tuple[Any, ...]:
        """The buttons of the question on show: one for each answer, and *I do not know*."""
        found: tuple[Any, ...] = self._choice.children
        return found

    def bundle(self) -> dict[str, Any]:
        """Return the panel as a notebook shows it."""
        bundle: dict[str, Any] = self.widget._repr_mimebundle_()
        return {kind: data for kind, data in bundle.items() if kind != "text/plain"}

    def _go(self, by: int) -> None:
        self.number = min(max(self.number + by, 0), len(self.quiz.asked))
        self._show()

    def _show(self) -> None:
        asked = self.quiz.asked
        done = self.number == len(asked)
        self.back.disabled = self.number == 0
        self.next.disabled = done
        if done:
            self._choice.children = ()
            self._asks.value = ""
            self._said.value = _status(self.quiz.summary, self.quiz.note)
            return
        self._choice.children = self._buttons(asked[self.number])
        self._asks.value = _question(asked[self.number], self.number, len(asked))
        self._mark()

    def _buttons(self, question: Question) -> tuple[Button, ...]:
        from ipywidgets import Button, Layout

        buttons = []
        for letter, option in zip(_LETTERS, question.options, strict=False):
            button = Button(description=letter, tooltip=option, layout=Layout(width="5em"))
            button.on_click(lambda _, option=option: self._choose(option))
            buttons.append(button)
        unknown = Button(description=_UNKNOWN, layout=Layout(width="auto"))
        unknown.on_click(lambda _: self._choose(None))
        return (*buttons, unknown)

    def _choose(self, option: str | None) -> None:
        self.quiz = self.quiz.answer(self.quiz.asked[self.number], option)
        self._mark()
        if self.quiz.is_closed(self.quiz.asked[self.number]):
            # The pressed button is disabled now: without this a keyboard would have no place.
            self.next.focus()

    def _mark(self) -> None:
        """Mark the given answer, not by colour alone; show that it is kept, or the right one."""
        question = self.quiz.asked[self.number]
        given = self.quiz.given.get(question.name)
        closed = self.quiz.is_closed(question)
        chosen = [option == given for option in question.options]
        # The last button is *I do not know*.
        chosen.append(given is not None and not any(chosen))
        said = ""
        if closed:
            said = "Answered after the course: no answer before it counts any more."
        for button, marked in zip(self.answers, chosen, strict=True):
            name = button.description.removeprefix(_MARK)
            button.description = (_MARK if marked else "") + name
            button.button_style = "info" if marked else ""
            button.disabled = closed
            if marked:
                said = f"Counted: {name}." if closed else "Kept."
        if self.quiz.when == "after" and given is not None:
            said += f" {question.explain(given)}"
        self._said.value = _status(said, self.quiz.note)


def _question(question: Question, number: int, of: int) -> str:
    options = "".join(f"<li>{escape(option, quote=False)}</li>" for option in question.options)
    return (
        f'<div style="{_TEXT}"><b>Question {number + 1} of {of}</b> (notebook'
        f" {question.notebook})<br>{escape(question.asks, quote=False)}<ol"
        f' style="list-style-type:lower-alpha">{options}</ol></div>'
    )


def _status(*texts: str) -> str:
    return (
        '<div role="status"'
        f' style="{_TEXT}">{escape(" ".join(filter(None, texts)), quote=False)}</div>'
    )
