"""Notebook 10: its exercises, and the names that its cells import beside the lab."""

from course_pp.exercises.models_of_others.exercises import PATIENTS, examine

__all__ = ["PATIENTS", "examine"]
