"""Cut where the caller says: before the calls of the named modules."""

from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from course_pp.arguments import refuse_unless
from course_pp.parallel.split.calls import Recording
from course_pp.sizes import LayerRange

__all__ = ["partition_at"]

_SHOWN = 3


def partition_at(model: nn.Module, recording: Recording, at: Sequence[str]) -> list[LayerRange]:
    """Return the calls of each stage as (first, end), end excluded; each stage but the first begins with a name.

    Raises:
        ValueError: for a name that is no place to cut, with the nearest that are; for names out of order.
    """
    numbers = [_number(model, recording, name) for name in at]
    for index, (name, number) in enumerate(zip(at, numbers, strict=True)):
        before = numbers[index - 1] if index else 0
        called = f"it is called after {at[index - 1]!r}" if index else "it is not the first that is called"
        remedy = f"name each module once, in the order of their calls, so that {called}"
        refuse_unless(number > before, "auto_split", "at", name, remedy)
    ends = [*numbers, len(recording.calls)]
    return list(zip([0, *numbers], ends, strict=True))


def _number(model: nn.Module, recording: Recording, name: str) -> int:
    """Return the number of the call before which ``name`` cuts."""
    units = {id(unit): first for first, unit in recording.units.items()}
    named = dict(model.named_modules(remove_duplicate=False))
    places = list(dict.fromkeys(call.unit for call in recording.calls))
    if name not in named:
        nearest = _listed(get_close_matches(name, places, _SHOWN, 0.0))
        refuse_unless(False, "auto_split", "at", name, f"no module has this name; the nearest places are {nearest}")
    unit = units.get(id(named[name]))
    if unit is None:
        refuse_unless(False, "auto_split", "at", name, _why_not(named, units, places, name))
    calls = [number for number, call in enumerate(recording.calls) if call.unit == unit]
    refuse_unless(bool(calls), "auto_split", "at", name, "the example does not make the model call it; name another")
    also = f", as {unit!r} is the same module" if unit != name else ""
    remedy = f"it is called {len(calls)} times{also}: name one that is called once, or let n_stages find the places"
    refuse_unless(len(calls) == 1, "auto_split", "at", name, remedy)
    return calls[0]


def _why_not(named: dict[str, nn.Module], units: dict[int, str], places: Sequence[str], name: str) -> str:
    parts = name.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts))]
    whole = next((units[id(named[each])] for each in above if id(named[each]) in units), None)
    if whole is not None:
        after = places[places.index(whole) + 1 : places.index(whole) + 2] if whole in places else []
        return f"it lies inside {whole!r}, which one stage holds as a whole: name {_listed([whole, *after])}"
    inside = [each for each in places if each.startswith(f"{name}.")]
    what = "every stage runs its forward" if inside or not name else "no other module's result goes into it"
    return f"{what}: name {_listed(inside[:_SHOWN] or places[:_SHOWN])}"


def _listed(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))
