"""What the notebooks' cells lean on: a guess beside its measurement, emulated runs, a folder for runs, working copies.

Importing this imports no torch; :func:`emulate` does when it is called.
"""

from course_pp.notebook.emulating import EmulatedRun, emulate
from course_pp.notebook.guessing import reveal
from course_pp.notebook.scratch import ScratchFolder

__all__ = ["EmulatedRun", "ScratchFolder", "emulate", "reveal"]
