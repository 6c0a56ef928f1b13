"""Exercises of the notebooks: graders, hints and solutions, a folder for each notebook.

In a notebook, :func:`check` judges a function: *pending*, *not yet* or *correct*. It may stand
anywhere in a cell. :func:`hint` reveals one hint a call, :func:`solution` shows the tested source,
and :func:`progress` shows a table over all notebooks. An answer runs in processes of its own
(:mod:`course_pp.exercises.answer`), so it can neither hang nor end the kernel. :func:`quiz` asks
thirty questions, before the course and after it.

To import this package imports no torch. The folder of a notebook is loaded when somebody asks for
one of its exercises.
"""

from course_pp.exercises.checking import check, hint, solution
from course_pp.exercises.display import Verdict
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.mistakes import Mistake
from course_pp.exercises.progress import Progress, progress
from course_pp.exercises.quizzes import Quiz, quiz

__all__ = [
    "Exercise",
    "Mistake",
    "Progress",
    "Quiz",
    "Verdict",
    "check",
    "hint",
    "progress",
    "quiz",
    "solution",
]
