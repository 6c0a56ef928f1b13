"""Notebook 00: its exercises, and the names that its cells import."""

from course_pp.exercises.ranks_and_messages.exercises import (
    added_up,
    contributions,
    even_ranks_send_first,
    exchange,
)

__all__ = ["added_up", "contributions", "even_ranks_send_first", "exchange"]
