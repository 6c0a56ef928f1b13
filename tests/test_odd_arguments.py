"""Every public function, each parameter in turn given what it is not for: refused by name, or rightly taken.

A new public function without a row in ``tests.odd_arguments`` fails the test, so that each is tried.
"""

import contextlib
import enum
import inspect
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matplotlib import pyplot as plt

from course_pp.arguments import checked, fits, hints_of
from tests.grids import thinned
from tests.odd_arguments import accepted, around, on_paper, on_ranks_of_one
from tests.odd_arguments.rows import Rows, made

_MANY, _BY_NAME = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

ROWS: dict[str, Callable[[Path], Rows]] = {
    "collective": around.collective_rows,
    "doctor": around.doctor_rows,
    "exercises": around.exercise_rows,
    "launch": around.launch_rows,
    "loss": around.loss_rows,
    "model": lambda _: on_paper.MODEL,
    "notebook": around.notebook_rows,
    "parallel": on_ranks_of_one.parallel_rows,
    "plan": lambda _: on_paper.PLAN,
    "runtime": on_ranks_of_one.runtime_rows,
    "schedule": lambda _: on_paper.SCHEDULE,
    "schedule.theory": lambda _: on_paper.THEORY,
    "show": lambda _: on_paper.SHOW,
    "training": on_ranks_of_one.training_rows,
    "training.checkpoint": on_ranks_of_one.checkpoint_rows,
    "training.data": on_ranks_of_one.data_rows,
}

ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "0": lambda: 0,
    "-1": lambda: -1,
    "1.5": lambda: 1.5,
    "10**12": lambda: 10**12,
    "10**5000": lambda: 10**5000,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "True": lambda: True,
    "''": lambda: "",
    "'x'": lambda: "x",
    "b''": lambda: b"",
    "[]": list,
    "{}": dict,
    "()": tuple,
    "object()": object,
    "a lambda": lambda: lambda: None,
    "a class": lambda: object,
    "a tensor": lambda: torch.ones(2, 2),
    "[[1], 'x']": lambda: [[1], "x"],
    "a generator": lambda: (n for n in (1, 2)),
    "np.int64(1)": lambda: np.int64(1),
    "np.float32(0.5)": lambda: np.float32(0.5),
    "a Fraction": lambda: Fraction(1, 2),
    "1j": lambda: 1j,
    "an exception": ValueError,
    "a set": lambda: {1},
}


def no_hub(dataset: str, subset: str | None, split: str, text_column: str, streaming: bool = False) -> None:
    """Refuse every data set, as where there is no network."""
    raise ValueError(f"dataset={dataset!r}, {subset=}, {split=}, {text_column=}: there is no hub here")


class NothingStarted:
    """A run of torchrun that has ended before it began."""

    def __init__(self, command: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def follow(self, timeout_s: float) -> tuple[str, ...]:
        return ()


@pytest.fixture
def process_group_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, and a process group without other ranks."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr("course_pp.launch.ranks.run_ranks", lambda n, *_: [pickle.dumps(None)] * n)
    monkeypatch.setattr("course_pp.training.data.corpus._load_dataset", no_hub)
    monkeypatch.setattr("course_pp.notebook.scratch._REMOVE_WHEN_ALONE", "")
    monkeypatch.setattr("course_pp.launch.torchrun._Run", NothingStarted)
    monkeypatch.setattr("course_pp.notebook.emulating.on_ranks", lambda n, fn, *args: [fn(0, *args)])
    monkeypatch.setattr("course_pp.notebook.comparing.on_ranks", lambda n, fn, *args: [fn(0, *args)])
    yield tmp_path
    dist.destroy_process_group()


def fault_of(package: str, name: str, parameter: str, odd: str, row: dict[str, Any]) -> str | None:
    """What is wrong with how one odd argument was answered; None if nothing is."""
    function = getattr(import_module(f"course_pp.{package}"), name)
    value, taker = ODD[odd](), inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    fitting = fits(value, hints_of(taker).get(parameter, object))
    users_own = fitting and (name, parameter) in accepted.USERS_CODE
    arguments = {key: made(each) for key, each in row.items()} | {parameter: value}
    try:
        function(**arguments)
    except (TypeError, ValueError) as refusal:
        if parameter in str(refusal) or users_own or (fitting and parameter in accepted.UNNAMED):
            return None
        if (name, parameter) in accepted.ONLY:
            return None
        return f"does not name it: {type(refusal).__name__}: {refusal}"
    except Exception as error:
        if users_own:
            return None
        return f"{type(error).__name__}: {error}"
    if not fitting and name not in accepted.RECORDS:
        return "was taken, although it does not fit its annotation"
    return None if accepted.why(name, parameter, odd) else "was taken without a reason"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (torch.tensor(3), Iterable[int]),  # has a length and an iterator, which raise
        ("a\0b", str | PathLike[str]),
    ],
    ids=["tensor without dimensions", "null character"],
)
def test_what_cannot_even_be_looked_at_does_not_fit(value: object, hint: Any) -> None:
    assert not fits(value, hint)
    assert fits(np.array([]), Iterable[int] | None)  # neither equal to '' nor unequal


class Choice(enum.IntEnum):
    TWO = 2


def test_a_kind_of_integer_becomes_one() -> None:
    @checked
    def kind_of(n: int) -> type:
        return type(n)

    assert {kind_of(2), kind_of(Choice.TWO), kind_of(np.int64(2))} == {int}


METHODS_THAT_DO_NOT_CHECK = {
    "all ranks refuse together": {
        "AsyncSaver": {"save"},
        "Pipeline": {"evaluate", "step"},
        "PipelineSchedule": {"eval", "evaluate", "step"},
        "Ranks": {"collectively", "gather", "largest", "refuse", "require_equal", "sentence"},
        "Trainer": {"fit", "load_state"},
    },
    "called in every action, step or message": {
        "Action": {"needs"},
        "Costs": {"durations", "each", "edge_transfers", "token_transfer", "transfers"},
        "CrossEntropy": {"count", "total"},
        "EmulatedCluster": {"transfer"},
        "EmulatedLink": {"seconds"},
        "KVCache": {"after", "layer", "mask"},
        "Meter": {"hold", "ignore", "saving"},
        "Recorder": {"add_emulated", "receiving", "span"},
        "Schedule": {"rank_of"},
        "Speed": {"after"},
        "StreamedBatches": {"seek"},
        "TokenLoss": {"count", "total"},
        "VocabParallelCrossEntropy": {"total"},
    },
    "torch's, matplotlib's or somebody else's": {
        "ChartFigure": {"set"},
        "DecoderLayer": {"forward"},
        "Entry": {"placed"},
        "Transformer": {"forward"},
    },
    "checks by building what it returns": {"Layout": {"with_"}},
}


def test_a_public_method_checks_its_arguments_or_there_is_a_reason_why_not() -> None:
    unchecked: dict[str, set[str]] = {}
    for room in ROWS:
        package = import_module(f"course_pp.{room}")
        for kind in filter(inspect.isclass, (getattr(package, name) for name in package.__all__)):
            for name, held in vars(kind).items():
                method = getattr(held, "__func__", held)
                takes = inspect.isfunction(method) and {*inspect.signature(method).parameters} - {"self", "cls"}
                if takes and not name.startswith("_") and not hasattr(method, "__wrapped__"):
                    unchecked.setdefault(kind.__name__, set()).add(name)
    excused: dict[str, set[str]] = {}
    for methods in METHODS_THAT_DO_NOT_CHECK.values():
        excused |= methods
    assert unchecked == excused


@thinned
@pytest.mark.parametrize("package", ROWS)
@pytest.mark.slow
def test_an_odd_argument_is_refused_by_name(package: str, every: int, process_group_of_one: Path) -> None:
    rows = ROWS[package](process_group_of_one)
    cases = [(name, parameter, odd) for name, row in rows.items() for parameter in row for odd in ODD][::every]
    faults = {}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        for name, parameter, odd in cases:
            if fault := fault_of(package, name, parameter, odd, rows[name]):
                faults[f"{name}: {parameter} = {odd}"] = fault
    plt.close("all")
    assert not faults, f"{len(faults)} of {len(cases)}:\n" + "\n".join(f"{k} -> {v[:150]}" for k, v in faults.items())


@pytest.mark.parametrize("package", ROWS)
def test_every_parameter_of_every_public_function_is_tried(package: str, process_group_of_one: Path) -> None:
    module = import_module(f"course_pp.{package}")
    public = {name for name in module.__all__ if callable(getattr(module, name))}
    rows = ROWS[package](process_group_of_one)
    assert public - accepted.UNTRIED.get(package, {}).keys() == rows.keys()
    for name, row in rows.items():
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        many = [parameter.kind for parameter in parameters if parameter.kind in (_MANY, _BY_NAME)]
        named = {parameter.name for parameter in parameters if parameter.kind not in many}
        fits_all = named <= row.keys() if _BY_NAME in many else named == row.keys()
        assert fits_all, f"{name}: give {sorted(named - row.keys())} a good value, and nothing else"
