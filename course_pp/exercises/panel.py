"""The quiz with buttons: one question at a time, by keyboard alone.

JupyterLab takes the arrow keys that a group of radio buttons would need, so each answer is a button of its own: Tab
reaches it, the space bar presses it.
"""

from __future__ import annotations

import string
from html import escape
from typing import TYPE_CHECKING, Any

from ipywidgets import HTML, Button, HBox, Layout, VBox

if TYPE_CHECKING:
    from course_pp.exercises.inventory import Question, Quiz

_UNKNOWN = "I do not know"
_TEXT = "max-width:60em;line-height:1.5"
_MARK = "✓ "


class Panel:
    """Question, answers, Back and Next. Each answer is kept when it is given; what is explained takes no other."""

    def __init__(self, quiz: Quiz) -> None:
        self.quiz = quiz
        self.number = 0
        self._asks, self._said, self._choice = HTML(), HTML(), HBox(layout=Layout(flex_flow="row wrap"))
        self.back, self.next = Button(description="Back"), Button(description="Next")
        self.back.on_click(lambda _: self._go(-1))
        self.next.on_click(lambda _: self._go(1))
        self.widget = VBox([self._asks, self._choice, self._said, HBox([self.back, self.next])])
        self._show()

    @property
    def answers(self) -> tuple[Any, ...]:
        """The buttons of the question that is shown: one for each answer, and *I do not know*."""
        found: tuple[Any, ...] = self._choice.children
        return found

    def bundle(self) -> dict[str, Any]:
        """What a notebook shows."""
        bundle: dict[str, Any] = self.widget._repr_mimebundle_()
        return {kind: data for kind, data in bundle.items() if kind != "text/plain"}

    def _go(self, by: int) -> None:
        self.number = min(max(self.number + by, 0), len(self.quiz.asked))
        self._show()

    def _show(self) -> None:
        asked = self.quiz.asked
        done = self.number == len(asked)
        self.back.disabled, self.next.disabled = self.number == 0, done
        self._choice.children = () if done else self._buttons(asked[self.number])
        if done:
            self._asks.value, self._said.value = "", _status(self.quiz.summary, self.quiz.note)
            return
        self._asks.value = _question(asked[self.number], self.number, len(asked))
        self._mark()

    def _buttons(self, question: Question) -> tuple[Button, ...]:
        buttons = []
        for letter, option in zip(string.ascii_lowercase, question.options, strict=False):
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
            self.next.focus()  # the button that was pressed is disabled now, and would leave a keyboard nowhere

    def _mark(self) -> None:
        """Mark the answer that was given, not by colour alone, and say that it is kept or what is right."""
        question = self.quiz.asked[self.number]
        given, closed = self.quiz.given.get(question.name), self.quiz.is_closed(question)
        chosen = [
            *(option == given for option in question.options),
            given is not None and given not in question.options,
        ]
        said = "Answered after the course: no answer before it counts any more." if closed else ""
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
        f'<div style="{_TEXT}"><b>Question {number + 1} of {of}</b> (notebook {question.notebook})<br>'
        f'{escape(question.asks, quote=False)}<ol style="list-style-type:lower-alpha">{options}</ol></div>'
    )


def _status(*texts: str) -> str:
    return f'<div role="status" style="{_TEXT}">{escape(" ".join(filter(None, texts)), quote=False)}</div>'
