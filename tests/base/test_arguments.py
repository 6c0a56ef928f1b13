"""A learner's wrong argument to a function of notebooks and README is refused by name."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from course_pp.base.arguments import WrongArgument, check_arguments, checked, fits, spelled
from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, build_stage_module, compute_layer_assignment
from course_pp.notebook import ScratchFolder, compare_gradients, emulate, reveal
from course_pp.parallel import DistributedConfig, apply_ac, auto_split, clip_grad_norm_
from course_pp.plan import Layout, cluster_of, model_named, predict
from course_pp.runtime import EmulatedCluster, EmulatedLink
from course_pp.schedule import Action, Costs, build, check, search, simulate, to_torch_csv
from course_pp.show import compare, play, timeline

ONE = build("1f1b", 2, 2)
TINY = ModelConfig(dim=8, n_layers=2, n_heads=2, vocab_size=9)
odd: Any = "4"

MISTYPED: dict[str, tuple[Callable[[], object], str]] = {
    "a name without its last letter": (
        lambda: build("gpip", 4, 8),
        "'gpip': use one of naive, gpipe",
    ),
    "text for a number of ranks": (lambda: build("gpipe", odd, 8), "n_ranks is '4'"),
    "no ranks": (lambda: build("gpipe", 0, 8), "n_ranks"),
    "a size that does not work": (lambda: build("chimera", 3, 6), "3"),
    "the name for the schedule": (lambda: simulate(odd), "schedule is '4'"),
    "the builder for the schedule": (lambda: check(build), "schedule is a function"),  # type: ignore[arg-type]
    "a negative cost": (lambda: Costs(forward=-1), "forward"),
    "too few costs": (lambda: simulate(ONE, Costs(forward=(1, 2, 3))), "forward"),
    "a number for costs": (lambda: search(2, 2, 1.5), "costs is 1.5"),  # type: ignore[arg-type]
    "an unknown letter": (lambda: Action(0, "X", 0), "unknown kind of action 'X'"),  # type: ignore[arg-type]
    "a name to export": (lambda: to_torch_csv(odd), "schedule is '4'"),
    "a name to draw": (lambda: timeline(odd), "'4'"),
    "a name to play": (lambda: play(odd), "'4'"),
    "a name to compare": (lambda: compare(odd, odd), "'4'"),
    "a name to emulate": (lambda: emulate(odd), "schedule is '4'"),
    "names to compare": (lambda: compare_gradients(odd), "schedules"),
    "no name of what was guessed": (lambda: reveal(4, 1, 2), "what is 4"),  # type: ignore[arg-type]
    "a number for a folder": (lambda: ScratchFolder(4), "prefix is 4"),  # type: ignore[arg-type]
    "text for ranks": (lambda: on_ranks(odd, print), "n is '4'"),
    "what a function returned": (lambda: on_ranks(2, None), "fn is None"),  # type: ignore[arg-type]
    "no seconds": (lambda: on_ranks(2, print, timeout_s=0), "timeout_s is 0"),
    "seconds for a cluster": (lambda: EmulatedCluster(0.02), "costs is 0.02"),  # type: ignore[arg-type]
    "a bandwidth of nothing": (lambda: EmulatedLink(bandwidth=0.0), "bandwidth"),
    "a width that no head divides": (lambda: ModelConfig(6, 2, 4, 9), "dim=6"),
    "text for a width": (lambda: ModelConfig(odd, 2, 2, 9), "dim is '4'"),
    "a stage that is not there": (lambda: build_stage_module(TINY, 2, 2), "2"),
    "more stages than layers": (lambda: compute_layer_assignment(2, 4), "4"),
    "a degree of nothing": (lambda: DistributedConfig(pp=0), "pp"),
    "text for a model": (lambda: apply_ac(odd, "full"), "model is '4'"),
    "an unknown mode": (lambda: apply_ac(nn.Linear(1, 1), "ful"), "mode is 'ful'"),  # type: ignore[arg-type]
    "a norm below nothing": (lambda: clip_grad_norm_(nn.Linear(1, 1), -1.0), "max_norm"),
    "no stages": (lambda: auto_split(nn.Linear(1, 1), (torch.ones(1, 1),), 0), "n_stages"),
    "an unknown model": (lambda: model_named("llama"), "llama"),
    "a layout that does not fit": (
        lambda: predict(TINY, Layout(pp=3), cluster_of("H100", 1, 8), 8, 8),
        "pp|3|8",
    ),
}


@pytest.mark.parametrize("case", MISTYPED)
def test_what_a_learner_mistypes_is_refused_by_name(case: str) -> None:
    call, words = MISTYPED[case]
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize(
    ("value", "hint", "right"),
    [
        (np.int64(1), int, True),
        (True, int, False),
        (np.float32(0.5), float, True),
        ([1, 2], tuple[int, ...], True),
        ((1, "x"), tuple[int, ...], False),
        ((1,), tuple[int, int], False),
        ("xy", Sequence[str], False),
        ({1: 2.5}, Mapping[int, float], True),
        ({"1": 2.5}, Mapping[int, float], False),
        ((n for n in "ab"), Iterable[int], True),  # it is not consumed
        ("full", Literal["none", "full"], True),
        ("ful", Literal["none", "full"], False),
        (print, Callable[[int], str] | None, True),
        (None, int | None, True),
        ("x", int | Path, False),
        (nn.Linear(1, 1), nn.Module, True),
    ],
)
def test_what_an_annotation_promises(value: object, hint: Any, right: bool) -> None:
    assert fits(value, hint) is right


def test_an_annotation_in_words() -> None:
    assert spelled(Sequence[int] | None) == "a sequence of integers or None"
    assert spelled(Mapping[int, nn.Module]) == "a mapping from integers to Modules"
    assert spelled(Literal["a", "b"] | bool) == "one of 'a', 'b' or True or False"


@checked
class Box:
    """Has a size."""

    def __init__(self, size: int = 1) -> None:
        check_arguments(Box, locals())
        self.size = size


def test_a_checked_class_keeps_its_signature_and_names_itself() -> None:
    assert Box().size == 1
    assert inspect.signature(Box).parameters.keys() == {"size"}
    with pytest.raises(
        WrongArgument, match=r"^Box: size is 1.5 \(a float\): pass an integer$"
    ) as caught:
        Box(size=1.5)  # type: ignore[arg-type]
    assert (caught.value.function, caught.value.argument) == ("Box", "size")


def test_what_follows_a_star_is_not_held_against_keywords() -> None:
    @checked
    def call(n: int, *rest: Any, limit: float = 1.0) -> tuple[Any, ...]:
        return rest

    assert call(1, "a", "b", limit=2) == ("a", "b")
    with pytest.raises(WrongArgument, match="limit is 'b'"):
        call(1, limit="b")  # type: ignore[arg-type]
