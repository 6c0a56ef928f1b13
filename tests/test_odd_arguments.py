"""Every public function, each parameter in turn given what it is not for: refused by name, or rightly taken.

A new public function without a row in ``ROWS`` fails the test, so that each is tried.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from course_pp import model, schedule, show
from course_pp.arguments import fits, hints_of
from course_pp.model import ModelConfig, Transformer
from course_pp.schedule import Action, Costs, Product, Span, build, fit, simulate

S = build("1f1b", 2, 4)
TL = simulate(S)
FIT = fit(TL)
CONFIG = ModelConfig(dim=8, n_layers=4, n_heads=2, vocab_size=11)
F0, B0 = Action(0, "F", 0), Action(0, "B", 1)


def whole() -> Transformer:
    return Transformer(CONFIG)


# A good call of each: values, or a function that makes what a call would change.
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "schedule": {
        "Action": {"stage": 0, "kind": "F", "microbatch": 0},
        "Costs": dict.fromkeys(inspect.signature(Costs).parameters, 1.0),
        "Entry": {"name": "own", "order": build, "n_chunks": 1, "any_chunks": False, "torch_name": ""},
        "Fit": {name: getattr(FIT, name) for name in inspect.signature(type(FIT)).parameters},
        "Gap": {"rank": 0, "start": 0, "end": 1, "cause": "because"},
        "Loss": {"cause": "rest", "time": 1.0, "per_rank": (1.0,), "per_link": {}},
        "Overlap": {"forward": F0, "backward": B0},
        "Product": {"what": "activation", "stage": 0, "microbatch": 0},
        "Receive": {"rank": 0, "product": Product("activation", 0, 0), "start": 0, "end": 1},
        "Schedule": {"name": "own", "placement": ((0,),), "actions": ((F0,),)},
        "Span": {"rank": 0, "action": F0, "start": 0, "end": 1},
        "Timeline": {
            "n_ranks": 1,
            "spans": (Span(0, F0, 0, 1),),
            "unit": "",
            "transfers": (),
            "receives": (),
            "name": "",
        },
        "bound": {"n_ranks": 2, "n_microbatches": 4, "costs": None, "memory_limit": None, "placement": None},
        "build": {"name": "1f1b", "n_ranks": 2, "n_microbatches": 4, "n_chunks": None, "replicas": None},
        "check": {"schedule": S},
        "find": {"name": "1f1b"},
        "fit": {"measured": TL, "expected": None},
        "format_time": {"time": 1.0, "unit": ""},
        "from_torch_csv": {"text": "0F0,0B0\n", "placement": None, "name": "own"},
        "names": {},
        "simulate": {"schedule": S, "costs": None, "durations": None},
        "to_torch_csv": {"schedule": S},
    },
    "show": {
        "ChartFigure": {"width": 4.0, "height": 2.0},
        "bubble_curve": {
            "schedules": "1f1b",
            "n_ranks": 2,
            "microbatches": (2, 4),
            "costs": None,
            "within_span": False,
            "title": None,
        },
        "bytes_by_kind": {"parts": {"weights": 1.0}, "budget": None, "title": None},
        "compare": {"predicted": TL, "measured": TL, "names": ("a", "b"), "seconds_per_unit": None, "title": None},
        "dependencies": {"tl": TL, "action": "0B0", "title": None},
        "format_bytes": {"n_bytes": 1},
        "lost_time": {"fit": FIT, "title": None},
        "memory": {"tl": TL, "costs": None, "title": None, "measured": None, "kind": "activation"},
        "pareto": {
            "n_ranks": 2,
            "n_microbatches": 4,
            "costs": None,
            "schedules": None,
            "within_span": False,
            "title": None,
        },
        "pieces": {"tensors": {"a": [SimpleNamespace(offsets=(0,), sizes=(1,), rank=0)]}, "title": None},
        "timeline": {"tl": TL, "title": None},
        "timeline_text": {"tl": TL, "width": 80, "colour": False},
        "to_trace": {"tl": TL, "name": "own"},
        "waits": {"waits": [SimpleNamespace(rank=0, operation="recv", peers=(1,))]},
    },
    "model": {
        "CrossEntropy": {"ignore_index": -100},
        "DecoderLayer": {"config": CONFIG},
        "ForwardFlops": {"embed": 0.0, "layers": (1.0,), "head": 1.0},
        "ModelConfig": {
            "dim": 8,
            "n_layers": 4,
            "n_heads": 2,
            "vocab_size": 11,
            "n_kv_heads": None,
            "ffn_dim": None,
            "max_seq_len": 16,
            "rope_theta": 1e4,
            "norm_eps": 1e-5,
            "tie_embeddings": False,
        },
        "PipelineStageModule": {"config": CONFIG, "stage_id": 0, "num_stages": 2, "layer_range": (0, 2)},
        "Transformer": {"config": CONFIG, "layer_range": None, "has_embedding": True, "has_head": True},
        "build_stage_module": {"config": CONFIG, "pp_rank": 0, "pp_size": 2, "layer_ranges": None},
        "compute_layer_assignment": {"n_layers": 4, "pp_size": 2},
        "drop_other_stages": {"model": whole, "stage_id": 0, "num_stages": 2, "layer_range": (0, 2)},
        "hf_state_dict": {"module": whole},
        "layer_costs": {"config": CONFIG, "seq_len": 4},
        "load_hf_state_dict": {"module": whole, "state": dict},
        "partition_by_cost": {"costs": [1.0, 2.0], "n_stages": 2, "first": 0.0, "last": 0.0},
    },
}
MODULES = {"schedule": schedule, "show": show, "model": model}

ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "0": lambda: 0,
    "-1": lambda: -1,
    "1.5": lambda: 1.5,
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

# What is not refused and yet no mistake: a value of the annotated class, and why any such will do.
TAKEN = {
    "np.int64(1)": "NumPy's integers are integers",
    "np.float32(0.5)": "NumPy's floats are numbers",
    "a Fraction": "a Fraction is a number",
    "0": "0 is a rank, a stage, a time or an amount, where it is taken",
    "1.5": "a number, where it is taken",
    "True": "True is no integer, so it is taken as a yes alone",
}
LATER = (
    "ParallelismTable",
    "Player",
    "autograd",
    "course_map",
    "cut",
    "fsdp_step",
    "mesh",
    "message",
    "microbatches",
    "parallelisms",
    "placement",
    "play",
    "ring",
    "tensor_cut",
)
UNTRIED = {
    "show": {"explore": "takes Settings by name; its own tests try odd ones"}
    | dict.fromkeys(
        [*LATER],
        "row to come",
    ),
    "model": {
        "config_from_hf": "takes any object with transformers' fields",
        "config_to_hf": "needs transformers",
        "from_hf": "needs transformers",
    },
}


def cases(package: str) -> Iterator[tuple[str, str, str]]:
    for name, row in ROWS[package].items():
        for parameter in row:
            yield from ((name, parameter, odd) for odd in ODD)


def made(value: Any) -> Any:
    return value() if value is whole or value is dict else value


def fault_of(package: str, name: str, parameter: str, odd: str) -> str | None:
    """What is wrong with how one odd argument was answered; None if nothing is."""
    function = getattr(MODULES[package], name)
    value = ODD[odd]()
    arguments = {key: made(each) for key, each in ROWS[package][name].items()} | {parameter: value}
    try:
        function(**arguments)
    except (TypeError, ValueError) as refusal:
        return None if parameter in str(refusal) else f"does not name it: {type(refusal).__name__}: {refusal}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    init = function.__init__ if inspect.isclass(function) else function
    if odd in TAKEN or fits(value, hints_of(inspect.unwrap(init)).get(parameter, object)):
        return None
    return "was taken"


@pytest.mark.parametrize("package", ROWS)
def test_an_odd_argument_is_refused_by_name(package: str) -> None:
    faults = {}
    for case in cases(package):
        if fault := fault_of(package, *case):
            faults["{}: {} = {}".format(*case)] = fault
    plt.close("all")
    assert not faults, f"{len(faults)} of {len(list(cases(package)))}:\n" + "\n".join(
        f"{k} -> {v[:150]}" for k, v in faults.items()
    )


@pytest.mark.parametrize("package", ROWS)
def test_every_public_function_is_tried(package: str) -> None:
    public = {name for name in MODULES[package].__all__ if callable(getattr(MODULES[package], name))} - {"Time"}
    assert public - UNTRIED.get(package, {}).keys() == ROWS[package].keys()
