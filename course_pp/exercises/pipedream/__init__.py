"""Notebook 06: its exercises, and the names that its cells import beside the lab."""

from course_pp.exercises.pipedream.exercises import PATIENTS, examine

__all__ = ["PATIENTS", "examine"]
