"""What a table of good calls is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = dict[str, dict[str, Any]]
"""For each function a good value of each parameter."""


@dataclass(frozen=True)
class Fresh:
    """A value that a call changes, made anew for each."""

    make: Callable[[], Any]


def made(value: Any) -> Any:
    return value.make() if isinstance(value, Fresh) else value
