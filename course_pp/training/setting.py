"""The error of a setting that no run can have; it knows the setting's name, so a command line can name its flag."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from course_pp.arguments import shown

__all__ = ["SettingError", "check_number", "check_whole", "nearest"]


class SettingError(ValueError):
    """A setting that no run can have.

    Args:
        sentence: a format string with a field for each setting, such as ``"{steps} must be at least 1"``.
        settings: their values.

    Attributes:
        sentence, settings: as given; the settings by name.
    """

    def __init__(self, sentence: str, settings: Mapping[str, Any]) -> None:
        self.sentence, self.settings = sentence, {name: _short(value) for name, value in settings.items()}
        super().__init__(self.spelled(lambda name, value: f"{name}={value!r}"))

    def spelled(self, spell: Callable[[str, Any], str]) -> str:
        """Return the sentence with each setting as ``spell(name, value)`` has it."""
        return self.sentence.format(**{name: spell(name, value) for name, value in self.settings.items()})

    def __reduce__(self) -> tuple[type["SettingError"], tuple[str, dict[str, Any]]]:
        return type(self), (self.sentence, self.settings)


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is not a whole number of at least ``least``.

    Raises:
        SettingError: naming the setting.
    """
    if type(value) is not int or value < least:
        raise SettingError(f"{{{name}}} must be a whole number of at least {least}", {name: value})
    if value.bit_length() > 63:
        raise SettingError(f"{{{name}}} must be a whole number below 2**63", {name: value})


def check_number(name: str, value: object) -> None:
    """Refuse what is not a number.

    Raises:
        SettingError: naming the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{{{name}}} must be a number, not {type(value).__name__}", {name: value})
    if isinstance(value, int) and value.bit_length() > 63:
        raise SettingError(f"{{{name}}} must be below 2**63", {name: value})


def nearest(name: object, names: Iterable[str]) -> str:
    """Return the one of ``names`` that is spelled most like ``name``, whatever the case."""
    by_folded = {each.casefold(): each for each in names}
    return by_folded[get_close_matches(shown(name).casefold(), by_folded, 1, 0.0)[0]]


def _short(value: object) -> object:
    """Return ``value``, unless it is an integer too long to print."""
    return f"{value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else value
