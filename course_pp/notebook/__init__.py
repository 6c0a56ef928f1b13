"""Helpers for the cells of the notebooks. Importing this imports no torch."""

from course_pp.notebook.guessing import reveal
from course_pp.notebook.real_steps import EmulatedRun, compare_gradients, emulate
from course_pp.notebook.scratch import ScratchFolder

__all__ = ["EmulatedRun", "ScratchFolder", "compare_gradients", "emulate", "reveal"]
