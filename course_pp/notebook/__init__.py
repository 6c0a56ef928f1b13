"""What the notebooks' cells lean on: guesses beside measurements, emulated runs, gradients beside one process's.

Also a folder for runs, and working copies. Importing this imports no torch; :func:`emulate` and
:func:`compare_gradients` do when they are called.
"""

from course_pp.notebook.guessing import reveal
from course_pp.notebook.real_steps import EmulatedRun, compare_gradients, emulate
from course_pp.notebook.scratch import ScratchFolder

__all__ = ["EmulatedRun", "ScratchFolder", "compare_gradients", "emulate", "reveal"]
