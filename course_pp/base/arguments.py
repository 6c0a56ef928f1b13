"""Arguments of a wrong class, refused by name at the names that a learner types.

:func:`checked` holds each argument against the annotation of its parameter. Values (a size of at
least 1, a known name) are the function's own business. A list will do for a tuple, and NumPy's
numbers for Python's; True is no integer.
"""

import reprlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cache, wraps
from inspect import Parameter, signature
from itertools import chain
from numbers import Integral, Real
from operator import call
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_F = TypeVar("_F", bound=Callable[..., Any])
_PLAIN = (NoneType, bool, int, float, str, bytes, list, tuple, dict, set)
_MOST_TIMEOUT_S = 365 * 24 * 3600  # beyond some centuries clocks overflow


class WrongArgument(TypeError, ValueError):
    """An argument that is not of the class its parameter takes.

    It is a ValueError, too, as a wrong value is.

    Attributes:
        function: the name of the function that was called, such as ``simulate``.
        argument: the name of the parameter.
    """

    def __init__(self, message: str, function: str = "", argument: str = "") -> None:
        super().__init__(message)
        self.function, self.argument = function, argument


def checked(thing: _F) -> _F:
    """Make a function or class raise WrongArgument for arguments its annotations rule out.

    Put it above ``@dataclass`` and below ``@classmethod``. Leave it out where a function runs for
    every microbatch, because a check costs microseconds.
    """
    if isinstance(thing, type):
        thing.__init__ = checked(thing.__init__)  # type: ignore[misc]
        return thing
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(name for name, each in signature(thing).parameters.items() if each.kind in kinds)

    @wraps(thing)
    def door(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        _check(thing, chain(zip(names, args, strict=False), kwargs.items()), "")
        return thing(*args, **kwargs)

    return cast(_F, door)


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], name: str = ""
) -> None:
    """Check the arguments of ``function`` from inside, as :func:`checked` does at its door.

    Use it where all ranks must refuse together.

    Args:
        arguments: values by parameter, such as ``locals()`` on the first line; other names are
            passed over.
        name: name of the function a user called, if that is not ``function`` itself.
    """
    _check(function.__init__ if isinstance(function, type) else function, arguments.items(), name)  # type: ignore[misc]


def _check(function: Callable[..., Any], arguments: Any, name: str) -> None:
    hints = _hints_of(function)
    for argument, value in arguments:
        if argument in hints and not fits(value, hints[argument]):
            name = name or function.__qualname__.removesuffix(".__init__")
            refuse_unless(False, name, argument, value, f"pass {spelled(hints[argument])}")


def refuse_unless(holds: bool, function: str, argument: str, value: object, remedy: str) -> None:
    """Raise WrongArgument unless ``holds``: for what annotations cannot say, in the same words."""
    if not holds:
        raise WrongArgument(
            f"{function}: {argument} is {described(value)}: {remedy}", function, argument
        )


def refuse_below(least: int, function: str, **sizes: int | None) -> None:
    """Raise WrongArgument for the first of ``sizes`` that is too small; None was left out."""
    for name, size in sizes.items():
        refuse_unless(size is None or size >= least, function, name, size, f"give at least {least}")


def refuse_bad_timeout(function: str, timeout_s: float, argument: str = "timeout_s") -> None:
    """Raise WrongArgument unless ``timeout_s`` is above 0 and so small that no clock overflows."""
    remedy = f"give seconds above 0, at most {_MOST_TIMEOUT_S:,} (a year)"
    refuse_unless(0 < timeout_s <= _MOST_TIMEOUT_S, function, argument, timeout_s, remedy)


def fits(value: object, hint: Any) -> bool:
    """Return whether ``value`` keeps the promise of an annotation.

    An iterator is not consumed for that.
    """
    return _test_of(hint)(value)


@cache
def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError:  # of a class that is imported for the type checker alone
        hints = {}
        for name, hint in function.__annotations__.items():
            with suppress(NameError):
                hints[name] = eval(hint, function.__globals__) if isinstance(hint, str) else hint
        return hints


@cache
def _test_of(hint: Any) -> Callable[[Any], bool]:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        options = [_test_of(each) for each in inner]
        return lambda value: any(test(value) for test in options)
    if kind is Literal:
        return lambda value: any(type(value) is type(each) and value == each for each in inner)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return lambda value: isinstance(value, number) and not isinstance(value, bool)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return lambda value: True
    classes: Any = (tuple, list) if kind is tuple else kind
    # torch gives -100 to who is no member, which has a refusal of its own
    if kind.__name__ == "ProcessGroup":
        return lambda value: isinstance(value, classes) or (type(value) is int and value == -100)
    if not inner or kind is Callable:
        return lambda value: isinstance(value, classes)
    tests = [_test_of(each) for each in inner]

    def holds(value: Any) -> bool:
        if isinstance(value, str | bytes) or not isinstance(value, classes):
            return False
        if isinstance(value, Mapping):
            return all(tests[0](key) and tests[-1](each) for key, each in value.items())
        if kind is tuple and Ellipsis not in inner:
            return len(value) == len(tests) and all(map(call, tests, value))
        return not isinstance(value, Collection) or all(map(tests[0], value))

    return holds


def spelled(hint: Any, many: bool = False) -> str:
    """Return an annotation in words, such as ``a sequence of numbers``; a plural if ``many``."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        words = dict.fromkeys(word for each in inner for word in spelled(each, many).split(" or "))
        return " or ".join(words)
    if kind is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if kind in (bool, NoneType):
        return "None" if kind is NoneType else "True or False"
    name = _WORDS.get(kind) or str(getattr(kind, "__name__", kind))
    if inner and kind is not Callable:
        name = name.lower()
    name = f"{name}s" if many else _with_article(name)
    if not inner or kind is Callable:
        return name
    items = [spelled(each, True) for each in inner if each is not Ellipsis]
    return f"{name} from {items[0]} to {items[1]}" if len(items) == 2 else f"{name} of {items[0]}"


_WORDS = {int: "integer", float: "number", Fraction: "number", str: "text", Callable: "function"}


def described(value: object) -> str:
    """Return a short value as it prints, with its class; of another value the class alone."""
    kind = _with_article(type(value).__name__)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool):
        return repr(value)
    return f"{short} ({kind})" if (short := _printed(value)) else kind


def shown(value: object) -> str:
    """Return a short value as it prints; the class of one that may be large or fail to print."""
    return _printed(value) or described(value)


def _printed(value: object) -> str:
    try:
        printed = reprlib.repr(value) if type(value) in _PLAIN or isinstance(value, Real) else ""
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return ""
    return printed if len(printed) <= 60 else ""


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"
