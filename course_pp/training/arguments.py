"""The command line of a training run: a flag for each field of :class:`~course_pp.training.options.Options`.

    defaults  <  --model's preset  <  --config's file  <  flags

A file is TOML and has a key for each flag, ``global_batch_size = 64``. It is read as flags that were given earlier, so
both are checked by the same code. Flags are made from the dataclasses by cyclopts; every refusal is one sentence.
"""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import cyclopts
from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)

from course_pp.training.config import TrainConfig
from course_pp.training.options import (
    PRESETS,
    CheckpointOptions,
    DataOptions,
    LayoutOptions,
    ModelOptions,
    Options,
    SampleOptions,
)
from course_pp.training.setting import SettingError, nearest

__all__ = ["flags_named", "parse"]

# Where the flag is not the field's name.
_FLAGS = {"batch": "global-batch-size", "warmup_steps": "warmup", "clip_norm": "max-norm"}
_CLASSES: tuple[type, ...] = (TrainConfig, LayoutOptions, ModelOptions, DataOptions, CheckpointOptions, SampleOptions)
_RENAMED = {"batch-size": ("global-batch-size", "sequences an optimizer step, over all ranks")}
_EITHER = ("steps", "epochs")

Values = dict[str, Any]
"""By the name of a flag, without its dashes."""


def parse(arguments: Sequence[str], description: str = "") -> Options | None:
    """Return the run that the arguments ask for; print help and return None if they ask for that.

    Raises:
        ValueError: for an unknown flag or a wrong value, in one sentence that names it; for a setting that no run can
            have, in the words of :class:`TrainConfig`.
    """
    levels = [_given(arguments)]
    files = levels[0].get("config", [])
    if files:
        levels.insert(0, _read(files[-1]))
    model = next((level["model"] for level in reversed(levels) if "model" in level), [None])[-1]
    if model is not None:
        levels.insert(0, _preset(model))
    below: list[str] = []
    for i, level in enumerate(levels):
        if all(name in level for name in _EITHER):
            raise ValueError("--steps and --epochs both say how long to train: leave one out")
        above = {name for later in levels[i + 1 :] for name in later}
        above |= {other for name, other in (_EITHER, _EITHER[::-1]) if name in above}
        if level is not levels[-1]:
            below += [token for name, value in level.items() if name not in above for token in _tokens(name, value)]
    try:
        options: Options | None = _app(description)([*below, *arguments], **_AS_VALUES)
    except cyclopts.CycloptsError as error:
        raise ValueError(_sentence(error)) from error
    return options


_AS_VALUES: dict[str, Any] = {"exit_on_error": False, "print_error": False, "result_action": "return_value"}


def _app(description: str) -> App:
    """Return the parser. A flag given twice counts the last time, as with most programs."""
    rules = Parameter(
        name="*",
        name_transform=_flag,
        consume_multiple=True,
        allow_repeating=True,
        negative_iterable=(),
        negative_none=(),
    )
    app = App(name="train.py", help=description, default_parameter=rules, version_flags=[], help_format="plaintext")
    app.config = (_check_whole_numbers,)

    @app.default
    def run(
        *,
        config: Annotated[str | None, Parameter(name="--config")] = None,
        train: TrainConfig | None = None,
        layout: LayoutOptions | None = None,
        model: ModelOptions | None = None,
        data: DataOptions | None = None,
        checkpoints: CheckpointOptions | None = None,
        writing: SampleOptions | None = None,
    ) -> Options:
        """Build the options.

        Parameters
        ----------
        config
            a TOML file with a key for each of the other flags, which override it
        """
        given: dict[str, Any] = {"train": train, "layout": layout, "model": model, "data": data}
        given |= {"checkpoints": checkpoints, "writing": writing}
        return Options(**{name: part for name, part in given.items() if part is not None})

    return app


def _flag(field: str) -> str:
    return _FLAGS.get(field, field.replace("_", "-"))


def _hints() -> dict[str, Any]:
    """Return the type of each flag, by its name."""
    return {"config": str | None} | {_flag(each.name): each.type for kind in _CLASSES for each in fields(kind)}


def _given(arguments: Sequence[str]) -> Values:
    """Return the flags in ``arguments``, each with its values as text, as far as can be told before they are parsed."""
    found: Values = {}
    values: list[str] = []
    for token in arguments:
        if token.startswith("--"):
            name, _, value = token[2:].partition("=")
            if name in _RENAMED:
                new, meaning = _RENAMED[name]
                rest = arguments[arguments.index(token) + 1 :]
                value = value or next(iter(rest), "")
                raise ValueError(f"--{name} {value} is now --{new} {value}: {meaning}")
            name = name.removeprefix("no-") if name not in _hints() else name
            values = found[name.partition(".")[0]] = [value] if "=" in token else []
        else:
            values.append(token)
    return found


def _read(path: str) -> Values:
    """Return the keys of a file, as flags.

    Raises:
        ValueError: naming the file, and an unknown key.
    """
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"--config {path!r} cannot be read ({error.strerror}): give a TOML file") from error
    except ValueError as error:  # also of text that is not UTF-8
        raise ValueError(f"--config {path!r} is not TOML: {error}") from error
    known = [name.replace("-", "_") for name in _hints() if name != "config"]
    found: Values = {}
    for key, value in content.items():
        if key.replace("-", "_") not in known:
            raise ValueError(f"{path}: unknown key {key!r}: did you mean {nearest(key, known)!r}?")
        name = key.replace("_", "-")
        _check_value(path, key, value, _hints()[name])
        found[name] = [value] if name == "model" else value
    return found


def _check_value(path: str, key: str, value: Any, hint: Any) -> None:
    """Check a value of a file before it becomes text and loses its type: boolean, list or table."""
    kinds = {get_origin(each) or each for each in _choices(hint)}
    right = isinstance(value, dict) == (dict in kinds) and isinstance(value, list) == (tuple in kinds)
    right = right and isinstance(value, bool) == (bool in kinds)
    if not right or not isinstance(value, bool | int | float | str | list | dict):
        raise ValueError(f"{path}: {key} = {value!r} must be {_spelled(hint)}")


def _preset(model: object) -> Values:
    if not isinstance(model, str) or model not in PRESETS:
        raise ValueError(
            f"--model {model!r} must be one of {', '.join(PRESETS)}: did you mean {nearest(model, PRESETS)!r}?"
        )
    return {name.replace("_", "-"): value for name, value in PRESETS[model].items()}


def _tokens(name: str, value: Any) -> list[str]:
    """Return a value as it would be typed."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [token for key, each in value.items() for token in [f"--{name}.{key}={_typed(each)}"]]
    if isinstance(value, list):
        return [f"--{name}", *map(_typed, value)]
    return [f"--{name}={_typed(value)}"]


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 3.5 for a whole number, which cyclopts would round."""
    for argument in arguments:
        if int in _choices(argument.hint) and float not in _choices(argument.hint):
            for token in argument.tokens:
                if not token.value.strip().lstrip("+-").isdecimal():
                    raise ValueError(f"{argument.name} {token.value!r} must be a whole number")


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the types between which a hint chooses, without None."""
    options = get_args(hint) if get_origin(hint) in (Union, type(int | None)) else (hint,)
    return tuple(each for each in options if each is not type(None))


def _spelled(hint: Any) -> str:
    """Return a type in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    [kind, *_] = _choices(hint)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"a list, each {_spelled(get_args(kind)[0])}"
    return "a table of names and values" if get_origin(kind) is dict else words[kind]


def _sentence(error: cyclopts.CycloptsError) -> str:
    """Return what cyclopts found, in our words."""
    name = "" if error.argument is None else error.argument.name
    if isinstance(error, UnknownOptionError):
        flag = error.token.keyword or error.token.value
        return f"unknown option {flag}: did you mean --{nearest(flag.lstrip('-').partition('=')[0], _hints())}?"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected {(error.unused_tokens or [''])[0]!r}: every value follows its flag, as in --steps 100"
    if isinstance(error, CoercionError) and error.token is not None and error.argument is not None:
        return f"{name} {error.token.value!r} must be {_spelled(error.argument.hint)}"
    if isinstance(error, MissingArgumentError):
        return f"{name} needs a value: {_spelled(error.argument.hint)}" if error.argument is not None else str(error)
    return " ".join(str(error).split())


@contextmanager
def flags_named() -> Iterator[None]:
    """Rephrase a refusal from inside for the command line: ``--global-batch-size 9`` instead of ``batch=9``.

    Raises:
        ValueError: the refusal, rephrased.
    """
    flags = {each.name: f"--{_flag(each.name)}" for kind in _CLASSES for each in fields(kind)}
    try:
        yield
    except SettingError as error:
        said = error.spelled(lambda name, value: f"{flags[name]} {value!r}" if name in flags else f"{name}={value!r}")
        raise ValueError(said) from error
