"""What the notebooks' cells lean on: a guess beside its measurement, emulated runs, the learner's working copy.

Importing this imports no torch; :func:`emulate` does when it is called.
"""

from course_pp.notebook.emulating import EmulatedRun, emulate
from course_pp.notebook.guessing import reveal

__all__ = ["EmulatedRun", "emulate", "reveal"]
