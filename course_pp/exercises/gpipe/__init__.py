"""Notebook 02: its exercises, and the names that its cells import."""

from course_pp.exercises.gpipe.exercises import PATIENTS, examine, time_cuts

__all__ = ["PATIENTS", "examine", "time_cuts"]
