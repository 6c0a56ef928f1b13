"""Notebook 11: its exercises, and the names that its cells import."""

from course_pp.exercises.own_schedule.exercises import (
    drawn,
    hanging,
    play,
    programs_of,
    run_in_torch,
    run_unbuffered,
)

__all__ = ["drawn", "hanging", "play", "programs_of", "run_in_torch", "run_unbuffered"]
