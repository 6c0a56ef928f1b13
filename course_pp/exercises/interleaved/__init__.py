"""Notebook 04: its exercises, and the names that its cells import."""

from course_pp.exercises.interleaved.exercises import PATIENTS, examine, lean, turns

__all__ = ["PATIENTS", "examine", "lean", "turns"]
