"""The rule for time limits, the same however ranks are started."""

from __future__ import annotations

from course_pp.arguments import shown

# select() counts milliseconds in 32 bits, hence at most 24 days; torch's store and gloo give up later.
_MOST_S = 1_000_000


def refuse_bad_limit(timeout_s: object) -> None:
    """Raise ValueError unless ``timeout_s`` is a number of seconds that every clock involved can count to."""
    __tracebackhide__ = True
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _MOST_S:
        raise ValueError(
            f"timeout_s is {shown(timeout_s)}; it must be a positive number of seconds, at most {_MOST_S} (11 days). "
            "For a run that may take long, pass for example timeout_s=3600."
        )
