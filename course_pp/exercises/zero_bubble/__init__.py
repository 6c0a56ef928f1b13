"""Notebook 05: its exercises, and the names that its cells import."""

from course_pp.exercises.zero_bubble.exercises import (
    PATIENTS,
    blocks,
    examine,
    gradient_norm,
    one_after_another,
    time_halves,
)

__all__ = ["PATIENTS", "blocks", "examine", "gradient_norm", "one_after_another", "time_halves"]
