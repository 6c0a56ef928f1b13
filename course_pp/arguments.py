"""Arguments of a wrong class, refused by name at the door of a public function.

:func:`checked` compares each argument with the annotation of its parameter, so a function whose annotations are right
needs no check of its own for classes; values (a size of at least 1, a known name) remain the function's. Annotations
are read at the first call, and the check costs a few microseconds: decorate what a user calls, not what runs for every
microbatch.

Numbers are stricter than ``isinstance`` in one way and looser in another: True is no integer, and an integer or NumPy
scalar will do for a float, a NumPy integer for an int. A list will do for a tuple; text is no sequence of anything.
"""

import builtins
from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cache, partial, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from operator import call
from os import PathLike
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

__all__ = [
    "WrongArgument",
    "check_arguments",
    "checked",
    "described",
    "refuse_bad_timeout",
    "refuse_below",
    "refuse_unless",
    "shown",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 40
_NUMBERS = (int, float)
_FIRST_TOO_LARGE = 2**63
_MOST_TIMEOUT_S = 365 * 24 * 3600
_PLAIN = (NoneType, bool, int, float, str, bytes, list, tuple, dict, set)


class WrongArgument(TypeError, ValueError):
    """An argument that is not of the class its parameter takes.

    A TypeError; and a ValueError too, so that whoever expects a wrong value catches both.

    Attributes:
        function: whose argument it is, such as ``simulate``.
        argument: the name of the parameter.
    """

    def __init__(self, message: str, function: str = "", argument: str = "") -> None:
        super().__init__(message)
        self.function, self.argument = function, argument


def checked(thing: _F) -> _F:
    """Refuse arguments whose class the annotations rule out, before ``thing`` runs.

    Args:
        thing: a function, a method (below ``@classmethod``), or a class with annotated ``__init__`` (above
            ``@dataclass``). It keeps its name, signature and docstring.

    Raises:
        WrongArgument: from each call with such an argument.
    """
    if isinstance(thing, type):
        thing.__init__ = _with_door(thing.__init__, thing.__qualname__)  # type: ignore[misc]
        return thing
    return cast(_F, _with_door(thing, thing.__qualname__))


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], name: str = "") -> None:
    """As :func:`checked`, called by ``function`` itself: where all ranks must refuse together, not one at its door.

    Args:
        function: the caller; a class stands for its ``__init__``.
        arguments: by parameter, such as ``locals()`` on the first line; other names are passed over.
        name: what a user called, if that is not ``function`` itself.

    Raises:
        WrongArgument: for the first that will not do.
    """
    door = _door_of(function, name or function.__qualname__)
    for parameter, value in arguments.items():
        door.value(parameter, value)


@cache
def _door_of(function: Callable[..., Any], name: str) -> "_Door":
    fn = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    return _Door(fn, name)


def refuse_unless(holds: bool, function: str, argument: str, value: object, remedy: str) -> None:
    """Raise WrongArgument unless ``holds``: for what annotations cannot say, in the same words."""
    if not holds:
        raise WrongArgument(f"{function}: {argument} is {described(value)}: {remedy}", function, argument)


def refuse_below(least: int, function: str, **sizes: int | None) -> None:
    """Raise WrongArgument for the first of ``sizes`` that is smaller; one that is None was left out."""
    for name, size in sizes.items():
        refuse_unless(size is None or size >= least, function, name, size, f"give at least {least}")


def refuse_bad_timeout(function: str, timeout_s: float, argument: str = "timeout_s") -> None:
    """Raise WrongArgument unless ``timeout_s`` is seconds above 0, and so few that no clock overflows."""
    remedy = f"give seconds above 0, at most {_MOST_TIMEOUT_S:,} (a year)"
    refuse_unless(0 < timeout_s <= _MOST_TIMEOUT_S, function, argument, timeout_s, remedy)


def _with_door(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    door = cache(partial(_Door, fn, name))

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        let_in = door()
        args = tuple(map(let_in.value, let_in.names_of(args), args))
        return fn(*args, **{key: let_in.value(key, value) for key, value in kwargs.items()})

    return call


class _Door:
    """What one function takes, read off its annotations."""

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self.name = name
        self.parameters = signature(fn).parameters
        self.hints = hints_of(fn)
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = tuple(p.name for p in self.parameters.values() if p.kind in kinds)
        self._sure = {name: _sure_classes(hint) for name, hint in self.hints.items()}
        self._counts = {name for name, hint in self.hints.items() if int in _options_of(hint)}
        self._rest = next((p.name for p in self.parameters.values() if p.kind is Parameter.VAR_POSITIONAL), "")

    def names_of(self, args: tuple[Any, ...]) -> tuple[str, ...]:
        """Return the parameter of each positional argument."""
        return self._positional + (self._rest,) * max(0, len(args) - len(self._positional))

    def value(self, parameter: str, value: Any) -> Any:
        """Return ``value`` if its class will do, NumPy's scalars as Python's; raises WrongArgument otherwise."""
        if isinstance(value, self._sure.get(parameter, object)):
            return value  # an unknown keyword is Python's to refuse
        if type(value) is int and parameter in self._counts and -_FIRST_TOO_LARGE < value < _FIRST_TOO_LARGE:
            return value
        hint = self.hints.get(parameter, Any)
        value = _as_python(value, hint)
        if fits(value, hint):
            return value
        left_out = ", or leave it out" if self.parameters[parameter].default is not Parameter.empty else ""
        limit = " of at most 64 bits" if isinstance(value, int) and not _in_range(value) else ""
        limit = " that is not empty" if isinstance(value, str) and not value else limit
        limit = " without a null character" if isinstance(value, str) and "\0" in value else limit
        refuse_unless(False, self.name, parameter, value, f"pass {spelled(hint, bool(left_out))}{limit}{left_out}")


def hints_of(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(fn)
    except NameError:
        known, names = {}, _Names(fn.__globals__)
        for name, hint in fn.__annotations__.items():
            with suppress(AttributeError):  # of a module that was not imported
                known[name] = eval(hint, fn.__globals__, names) if isinstance(hint, str) else hint
        return known


class _Names(dict[str, Any]):
    """Anything for a name imported for the type checker alone, perhaps from a package that is not installed."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Any


def _as_python(value: object, hint: Any) -> Any:
    if type(value) is int or isinstance(value, bool | float) or not isinstance(value, Real):
        return value
    wanted = (hint, *get_args(hint))
    if isinstance(value, Integral) and (int in wanted or float in wanted):
        return int(value)
    return float(value) if float in wanted and type(value) not in wanted else value


def fits(value: object, hint: Any) -> bool:
    """Return whether ``value`` is what an annotation promises, as far as can be told without consuming an iterator."""
    return _test_of(hint)(value)


@cache
def _test_of(hint: Any) -> Callable[[Any], bool]:
    """Return a test for an annotation, which is read once: a curve may have a hundred thousand values."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        options = [_test_of(each) for each in inner]
        return lambda value: any(test(value) for test in options) and not _unreadable(value, inner)
    if kind is Literal:
        return lambda value: any(type(value) is type(each) and value == each for each in inner)
    if hint is None:
        return lambda value: value is None
    if kind is float:
        return lambda value: type(value) is float or _is_number(value, Real)
    if kind is int:
        return lambda value: _is_number(value, Integral)
    if kind is Any or not isinstance(kind, type):  # or a type variable
        return lambda value: True
    if _is_protocol(kind):
        return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in _members(kind))
    return _test_of_class(kind, inner)


def _test_of_class(kind: type, inner: tuple[Any, ...]) -> Callable[[Any], bool]:
    right = (tuple, list) if kind is tuple else kind
    if inner and kind is not Callable:
        holds = _test_of_items(kind, inner)
        return lambda value: isinstance(value, right) and (not isinstance(value, Collection) or holds(value))
    if kind.__name__ == "ProcessGroup":
        # torch gives -100 for a group of which this process is no member; that has a refusal of its own.
        return lambda value: isinstance(value, right) or (type(value) is int and value == -100)
    return lambda value: isinstance(value, right)


def _test_of_items(kind: type, inner: tuple[Any, ...]) -> Callable[[Any], bool]:
    first, last = _test_of(inner[0]), _test_of(inner[-1])
    if kind is tuple and Ellipsis not in inner:
        tests = [_test_of(each) for each in inner]
        return lambda value: len(value) == len(tests) and all(map(call, tests, value))
    classes = _plain_classes(inner[0])

    def holds(value: Any) -> bool:
        if isinstance(value, Mapping):
            return all(first(key) and last(each) for key, each in value.items())
        if isinstance(value, str | bytes):
            return False
        try:
            return all(isinstance(each, classes) for each in value) if classes else all(map(first, value))
        except TypeError:  # it has the methods of a collection, and is none, as a tensor without dimensions
            return False

    return holds


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and _in_range(value)


def _in_range(value: object) -> bool:
    """Return whether a number fits 64 bits: nothing counted here goes beyond, and larger integers fail elsewhere."""
    return not isinstance(value, Integral) or -_FIRST_TOO_LARGE < int(value) < _FIRST_TOO_LARGE


def _unreadable(value: object, options: tuple[Any, ...]) -> bool:
    """Return whether ``value`` is text of which no path or device can be made: empty, or what nothing can be named."""
    if not isinstance(value, str):
        return False
    if (not value or "\0" in value) and any(get_origin(each) is PathLike for each in options):
        return True
    device = next((each for each in options if getattr(each, "__module__", "") == "torch"), None)
    if device is None or device.__name__ != "device":
        return False
    try:
        device(value)
    except RuntimeError:
        return True
    return False


def _sure_classes(hint: Any) -> tuple[type, ...]:
    """Classes of which every value fits a hint: nothing slower has to be asked where a function is called often."""
    options = _options_of(hint)
    if Any in options:
        return (object,)
    kinds = [Callable if get_origin(each) is Callable else each for each in options]
    unsure = {int, *([str] if len(options) > 1 else [])}  # True, or beyond 64 bits; '' for a path
    return tuple(
        kind
        for kind in kinds
        if isinstance(kind, type) and kind not in unsure and not _is_protocol(kind) and not get_args(kind)
    )


def _options_of(hint: Any) -> tuple[Any, ...]:
    """Return the hints between which one chooses; itself alone if it leaves no choice."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


@cache
def _plain_classes(hint: Any) -> tuple[type, ...]:
    """Return the classes between which a hint chooses, if ``isinstance`` says all there is to say; else none."""
    options = _options_of(hint)
    return options if all(type(each) in (type, ABCMeta) and each not in _NUMBERS for each in options) else ()


@cache
def _members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


def spelled(hint: Any, may_be_left_out: bool = False, many: bool = False) -> str:
    """Return an annotation in words: ``an integer``, ``a Costs``, ``a sequence of numbers``; a plural if ``many``."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        rest = [each for each in inner if not (each is NoneType and may_be_left_out)]
        return " or ".join(dict.fromkeys(spelled(each, many=many) for each in rest))
    if kind is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if kind in _WORDS:
        return _WORDS[kind][many]
    name = str(getattr(kind, "__name__", kind))
    if not inner:
        name += " values" if many else ""
        like = f" (anything with {', '.join(_members(kind))})" if _is_protocol(kind) else ""
        return (name if many else _with_article(name)) + like
    name = name.lower() + "s" if many else _with_article(name.lower())
    if kind is tuple and Ellipsis not in inner:
        return f"{name} of {' and '.join(map(spelled, inner))}"
    joint = " from {} to {}" if len(inner) == 2 and Ellipsis not in inner else " of {}"
    return name + joint.format(*(spelled(each, many=True) for each in inner))


_WORDS: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    Fraction: ("a number", "numbers"),
    str: ("text", "texts"),
    bytes: ("bytes", "bytes"),
    bool: ("True or False", "True or False"),
    NoneType: ("None", "None"),
    Any: ("anything", "anything"),
    object: ("anything", "anything"),
    PathLike: ("a path", "paths"),
    Callable: ("a function", "functions"),
}


def described(value: object) -> str:
    """Return a short value as it prints, with its class; of anything else, which may be large, the class alone."""
    kind = _with_article(type(value).__name__)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool):
        return repr(value)
    return f"{short} ({kind})" if (short := _printed(value)) else kind


def shown(value: object) -> str:
    """Return a short value as it prints; of anything else, which may be large or not print at all, the class."""
    return _printed(value) or described(value)


def _printed(value: object) -> str:
    """Return a short value as it prints; empty for any other."""
    try:
        printed = _SHORT.repr(value) if type(value) in _PLAIN or isinstance(value, Real) else ""
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return ""
    return printed if len(printed) <= 60 else ""


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"
