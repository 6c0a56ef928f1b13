"""Notebook 13: its exercises, and the names that its cells import."""

from course_pp.exercises.capstone.exercises import (
    MODEL,
    PUBLISHED,
    SIZES,
    TEXT,
    beside_data,
    calibrated,
    continued,
    data_parallel,
    planned_bytes,
    saved_bytes,
    step_seconds,
    train_and_die,
    ward_round,
)

__all__ = [
    "MODEL",
    "PUBLISHED",
    "SIZES",
    "TEXT",
    "beside_data",
    "calibrated",
    "continued",
    "data_parallel",
    "planned_bytes",
    "saved_bytes",
    "step_seconds",
    "train_and_die",
    "ward_round",
]
