"""Notebook 03: its exercises, and the names that its cells import."""

from course_pp.exercises.one_f_one_b.exercises import (
    PATIENTS,
    WARD,
    examine,
    room_for_latency,
    with_room,
)

__all__ = ["PATIENTS", "WARD", "examine", "room_for_latency", "with_room"]
