"""Exercises of the notebooks: graders, hints and solutions, a folder for each notebook.

In a notebook, :func:`check` says of a function *pending*, *not yet* or *correct*, wherever in a
cell it stands; :func:`hint` reveals one hint a call, :func:`solution` shows the tested source,
:func:`progress` a table over all notebooks. What an answer does happens in processes of its own
(:mod:`course_pp.exercises.answer`), so it can neither hang nor end the kernel. :func:`quiz` asks
thirty questions, before the course and after it.

Importing this imports no torch; the folder of a notebook is loaded when one of its exercises is
asked for.
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
