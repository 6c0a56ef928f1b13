"""The pipeline written out by hand, and the recorder that measures any pipeline."""

from course_pp.runtime.recorder import Recorder

__all__ = ["Recorder"]
