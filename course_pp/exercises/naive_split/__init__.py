"""Notebook 01: its exercises, and the names that its cells import."""

from course_pp.exercises.naive_split.exercises import (
    BUDGET,
    DEEP,
    SMALL,
    compare,
    loss_fn,
    measured_bytes,
    peaks_while_building,
    predicted_bytes,
    second_forward,
    time_splits,
    train_two_ranks,
)

__all__ = [
    "BUDGET",
    "DEEP",
    "SMALL",
    "compare",
    "loss_fn",
    "measured_bytes",
    "peaks_while_building",
    "predicted_bytes",
    "second_forward",
    "time_splits",
    "train_two_ranks",
]
