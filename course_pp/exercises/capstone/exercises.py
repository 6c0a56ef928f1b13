"""Notebook 13: bytes of a rank, ring against bubble, a layout, a bottleneck, a clinic of planners.

Also the plans and runs of the notebook.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from math import floor, prod
from pathlib import Path
from statistics import median
from typing import Any, Literal

from course_pp.base.imports import imports_that_warn
from course_pp.base.sizes import compute_layer_assignment
from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import close, expect_int, expect_list, expect_number
from course_pp.exercises.formula import Formula, flawed
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, Stopped, why
from course_pp.launch import on_ranks
from course_pp.plan import (
    Cluster,
    Layout,
    ModelConfig,
    Prediction,
    cluster_of,
    gpu_named,
    model_named,
    predict,
)
from course_pp.plan.calibration import MEGATRON as PUBLISHED
from course_pp.plan.timing import model_flops
from course_pp.schedule import Action, Schedule

__all__ = ["MODEL", "PUBLISHED", "SIZES", "TEXT"]


def bytes_held(
    rank: int, pp: int, shard: int, layers: int, layer: int, matrix: int, kept: float, m: int
) -> float:
    """Bytes on a rank of a 1F1B pipeline whose parameters are sharded."""
    n_layers = layers // pp + (rank < layers % pp)
    parameters = n_layers * layer
    if rank == 0:
        parameters += matrix
    if rank == pp - 1:
        parameters += matrix
    in_flight = min(pp - rank, m)
    return 16 * parameters / shard + in_flight * n_layers * kept


_SHARE = "layers // pp + (rank < layers % pp)"
_FLIGHT = "min(pp - rank, m)"
_WRONG_BYTES = (
    (("rank == 0", "False"), ("rank == pp - 1", "False"),
     "The first stage holds the embedding, the last one the head: neither is in your answer."),
    (("rank == pp - 1", "False"), "The last stage holds the head, as large as the embedding."),
    (("rank == 0", "False"), "The first stage holds the embedding, as large as the head."),
    (("rank == pp - 1", "rank == 0"), "The head is on the last stage, not beside the embedding."),
    (("if rank == pp - 1", "elif rank == pp - 1"),
     "A pipeline of one stage holds both, embedding and head."),
    (("rank == 0", "True"), ("rank == pp - 1", "True"),
     "Only the first stage holds the embedding, and only the last one the head."),
    ((_FLIGHT, "m"), "1F1B has at most `pp - rank` microbatches in flight, not all of them (03)."),
    ((_FLIGHT, "min(pp, m)"),
     "Only rank 0 has `pp` microbatches in flight: later ranks have fewer."),
    ((_FLIGHT, "pp - rank"), "There are never more than `m` microbatches in flight."),
    ((_FLIGHT, "pp"), "Only rank 0 has `pp` microbatches in flight, and there are `m` at most."),
    ((_FLIGHT, "min(pp - 1 - rank, m)"),
     "The forward that comes before the first backward is in flight, too: `pp - rank`."),
    ((_FLIGHT, "min(pp - rank + 1, m)"), "One too many: `pp - rank` are in flight (03)."),
    ((_FLIGHT, "1"), "Several microbatches are in flight at once, and each keeps its bytes (03)."),
    ((_FLIGHT, "min(rank + 1, m)"), "The first rank has most in flight, not the last."),
    (("16 *", "4 *"),
     "Gradients and AdamW's two moments stand beside the parameters: 16 bytes each, not 4."),
    (("16 *", "2 *"),
     "Parameters, gradients and two moments are kept in float32: 16 bytes each, not 2."),
    (("16 *", "8 *"),
     "Parameters, gradients and two moments are kept in float32: 16 bytes each, not 8."),
    (("16 *", "12 *"), "Parameters, gradients and *two* moments: 16 bytes each, not 12."),
    (("* kept", "* kept / shard"),
     "Shards cut parameters, not activations: each data-parallel rank has its own sequences."),
    ((" / shard", ""), "FSDP cuts what is kept of each parameter into `shard` parts."),
    (("n_layers * layer\n", "n_layers * layer / shard\n"), ("parameters / shard", "parameters"),
     "FSDP cuts embedding and head into `shard` parts, too."),
    (("n_layers * kept", "kept"), "`kept` is of one layer: this rank has several."),
    (("* kept", "* 0"), "Activations are not in your answer: `kept` bytes a layer and microbatch."),
    ((_SHARE, "layers / pp"), "Layers are whole: earlier stages take the extras."),
    ((_SHARE, "layers // pp"),
     "Where `pp` does not divide the layers, earlier stages take one more."),
    ((_SHARE, "layers // pp + (rank >= pp - layers % pp)"),
     "The *earlier* stages take the extras."),
    ((_SHARE, "layers // pp + (rank <= layers % pp)"),
     "One stage too many takes an extra: the first `layers % pp`, rank 0 among them."),
    ((_SHARE, "-(-layers // pp)"), "Only the first `layers % pp` stages take one more."),
)  # fmt: skip

_PIPELINES = (
    (1, 8, 32, 202_383_360, 131_072_000, 0.0, 16),
    (4, 2, 10, 12_000, 5_000, 700.0, 8),
    (4, 3, 32, 218_112_000, 525_336_576, 6.5e8, 2),
    (3, 1, 4, 1000, 77, 50.0, 5),
)


def _counted(case: tuple[Any, ...], got: float, right: float) -> str:
    rank, pp, shard, layers, layer, matrix, kept, m = case
    n = layers // pp + (rank < layers % pp)
    ends = (rank == 0) + (rank == pp - 1)
    return (
        f"16 bytes × ({n} layers × {layer:,} + {ends} × {matrix:,}) / {shard}, and"
        f" {min(pp - rank, m)} microbatches × {n} layers × {kept:g} bytes"
    )


grade_bytes_held = Formula(
    bytes_held,
    [(rank, *run) for run in _PIPELINES for rank in range(run[0])],
    _WRONG_BYTES,
    "Compare the two parts one by one: parameters are cut into `shard` parts, activations are not.",
    example=_counted,
)


def break_even(
    n: int, parameters: float, batch: int, speed: float, bandwidth: float, each: int
) -> float:
    """Tokens a sequence from which data parallelism is as fast as 1F1B."""
    # Ring: (n - 1) / n * 2 * each * parameters / bandwidth; bubble: (n - 1) / n * 6 * parameters *
    # tokens / speed.
    return each * speed / (3 * bandwidth)


_SAME_WORK = (
    "Both ways do the work of the whole batch, in the same time. What differs is bubble and ring,"
    " each once a step."
)
_TOKENS = "each * speed / (3 * bandwidth)"
_WRONG_TOKENS = (
    *(((_TOKENS, wrong), cause) for wrong, cause in (
        ("each * speed / (6 * bandwidth)",
         "An all-reduce goes round twice, to sum and to pass on: `2 * (n - 1) / n` times the bytes"
         " (00)."),
        ("each * speed /"
         " bandwidth", "Backward is work, too: 6 operations a parameter and token, not 2."),
        ("each * speed / (2 *"
         " bandwidth)", "Forward is work, too: 6 operations a parameter and token, not 4."),
        (f"(n - 1) / n * {_TOKENS}",
         "The bubble has the same (n - 1) / n as the ring: look at how long a stage's microbatch"
         " takes."),
        (f"n / (n - 1) * {_TOKENS}", "The ring has the same (n - 1) / n as the bubble."),
        (f"n * {_TOKENS}",
         "A rank of the ring sends an n-th of the bytes in each of its 2 (n - 1) steps, not all of"
         " them."),
        (f"1 / n * {_TOKENS}",
         "A stage has an n-th of the layers, so a microbatch takes it an n-th of a sequence's"
         " time."),
        (f"1 / batch * {_TOKENS}", _SAME_WORK),
        (f"n / batch * {_TOKENS}", _SAME_WORK),
        (f"batch * {_TOKENS}", _SAME_WORK),
        (f"parameters * {_TOKENS}",
         "The gradients have `each * parameters` bytes, and the work grows with `parameters`,"
         " too."),
        ("speed / (3 * bandwidth)", "A gradient has `each` bytes."),
        ("3 * bandwidth / (each *"
         " speed)", "This is one over the tokens: with a faster link fewer are enough."),
    )),
    (lambda *given: floor(break_even(*given)),
     "With that many the ring still takes longer than the bubble: round up, or give the tokens as"
     " they come out."),
)  # fmt: skip


def _reached(got: float, right: float) -> bool:
    """Whether the value is the number of tokens, exactly or in whole tokens."""
    return close(got, right) or (got == int(got) and right < got < right + 1)


grade_break_even = Formula(
    break_even,
    [
        (8, 7e9, 64, 4e14, 4e10, 4),
        (16, 7e9, 64, 4e14, 4e10, 4),
        (8, 4.05e11, 64, 4e14, 4e10, 4),
        (8, 7e9, 1024, 4e14, 4e10, 4),
        (2, 1.2e8, 6, 1e12, 1e9, 2),
        (64, 7e10, 64, 6e14, 3e11, 2),
    ],
    _WRONG_TOKENS,
    "Set the ring, `2 * (n - 1) / n * each * parameters / bandwidth`, equal to the bubble, n - 1"
    " microbatches of a stage, and solve for the tokens.",
    same=_reached,
)


def fastest_layout(model: ModelConfig, cluster: Cluster, batch: int, seq_len: int) -> Layout:
    """The fastest layout that fits."""
    n, fitting = cluster.n_gpus, {}
    for pp in range(1, n + 1):
        for tp in range(1, cluster.gpus_per_node + 1):
            if n % (pp * tp) != 0:
                continue
            for ac in ("none", "selective", "full"):
                layout = Layout(pp, tp, n // (pp * tp), ac=ac)
                try:
                    found = predict(model, layout, cluster, batch, seq_len)
                except ValueError:
                    break
                if found.fits:
                    fitting[layout] = found.step_s
    return min(fitting, key=lambda layout: fitting[layout])


_Run = tuple[str, str, int, int]
_RUNS: tuple[_Run, ...] = (
    ("llama2-7b", "8x1xH100", 64, 2048),
    ("llama2-7b", "4x4xA100", 16, 512),
    ("llama2-7b", "8x1xH100", 16, 512),
    ("llama2-7b", "3x4xH100", 12, 512),
    ("llama3-70b", "2x8xH200", 16, 2048),
    ("llama3-70b", "8x4xH200", 32, 4096),
    ("llama2-7b", "2x8xA100", 16, 4096),
    ("llama2-7b", "1x8xH100", 1, 2048),
    ("llama3-8b", "4x2xH100", 2, 8192),
)


_Case = tuple[ModelConfig, Cluster, int, int]


def _given(run: _Run) -> _Case:
    return model_named(run[0]), cluster_of(run[1]), run[2], run[3]


def grade_fastest_layout(answer: Answer) -> None:
    """Ask for a layout as fast as the best of the same choices that fits."""
    cases = [_given(run) for run in _RUNS]
    try:
        layouts = answer.calls(cases, "fastest_layout(…)")
    except Stopped as stopped:
        if stopped.error != "ValueError":
            raise
        cause = (
            "`predict` raises ValueError for what cannot be laid out: `try` it, and pass that"
            " layout over."
        )
        raise Mistake(stopped.symptom, cause, stopped.example) from None
    for run, case, got in zip(_RUNS, cases, layouts, strict=True):
        what = f"`fastest_layout` of {run[0]} on {run[1]}, {run[2]} sequences of {run[3]:,} tokens,"
        _judge_layout(what, case, got)


def _judge_layout(what: str, case: _Case, got: Any) -> None:
    if not isinstance(got, Layout):
        raise Mistake(
            f"{what} is of type {type(got).__name__}; a `Layout` is asked for.",
            "Is a `return` missing?" if got is None else "A prediction has its `.layout`.",
        )
    cluster = case[1]
    plain = Layout(got.pp, got.tp, got.dp_shard, ac=got.ac)
    if got != plain:
        changed = [
            each.name
            for each in fields(got)
            if getattr(got, each.name) != getattr(plain, each.name)
        ]
        names = " and ".join(f"`{name}`" for name in changed)
        cause = (
            f"Leave {names} out of the call of `Layout`: the exercise compares layouts that differ"
            " in nothing else."
        )
        raise Mistake(f"{what} is {got}, which changes more than pp, tp, dp_shard and ac.", cause)
    if got.tp > cluster.gpus_per_node:
        raise Mistake(f"{what} has tp={got.tp}, which leaves the node of {cluster.gpus_per_node}.")
    try:
        found = predict(case[0], got, *case[1:])
    except ValueError as error:
        raise Mistake(
            f"{what} is {got}, which cannot be laid out.", f"`predict` says: {error}."
        ) from None
    if not found.fits:
        over = max(found.total_memory) - found.budget
        raise Mistake(
            f"{what} is {got}: {over / 1e9:.1f} GB too many on the fullest rank.",
            "Pass over what does not `.fits`.",
        )
    best = min(_fitting(*case), key=lambda each: each.step_s)
    if found.step_s > best.step_s * (1 + 1e-9):
        symptom = (
            f"{what} is {got}: {found.step_s:.4g} s a step. There is one of {best.step_s:.4g} s."
        )
        raise Mistake(symptom, _why_slower(case, found, best))


def _why_slower(case: _Case, found: Prediction, best: Prediction) -> str:
    every = _fitting(*case)
    got = found.layout
    fastest = best.layout
    of_pp = [each.step_s for each in every if each.layout.pp == got.pp]
    slowest = max(each.step_s for each in every)
    least_memory = min(max(each.total_memory) for each in every)
    causes = (
        (got == replace(fastest, pp=fastest.tp, tp=fastest.pp),
         "`pp` and `tp` have changed places."),
        (found.step_s == slowest,
         "That is the slowest one that fits: take the least `step_s`."),
        (max(found.total_memory) == least_memory,
         "That is the one that holds least. All that fit are good enough; of those take the least"
         " `step_s`."),
        ((got.pp, got.tp) == (fastest.pp, fastest.tp),
         f"With `ac={fastest.ac!r}` it is faster and fits: try every `ac`, and compare `step_s`."),
        (found.step_s == min(of_pp),
         f"It is the fastest with pp={got.pp}. Was every pp that divides the GPUs tried? The best"
         f" has {fastest.pp}."),
        (OTHERWISE,
         "Compare the `step_s` of every pp, tp and ac; the data-parallel ranks are what is left."),
    )  # fmt: skip
    return why(causes)


@cache
def _fitting(
    model: ModelConfig, cluster: Cluster, batch: int, seq_len: int
) -> tuple[Prediction, ...]:
    return tuple(_predictions(model, cluster, batch, seq_len))


def _predictions(
    model: ModelConfig, cluster: Cluster, batch: int, seq_len: int
) -> Iterator[Prediction]:
    n = cluster.n_gpus
    for pp in (each for each in range(1, n + 1) if n % each == 0):
        for tp in (each for each in range(1, cluster.gpus_per_node + 1) if n // pp % each == 0):
            for ac in ("none", "selective", "full"):
                try:
                    found = predict(
                        model, Layout(pp, tp, n // pp // tp, ac=ac), cluster, batch, seq_len
                    )
                except ValueError:
                    continue
                if found.fits:
                    yield found


_RESOURCES = ("memory bandwidth", "links inside nodes", "links between nodes", "global batch")


def bottleneck(prediction: Prediction) -> str:
    """What to double so that a sequence takes least."""
    run, gpu = prediction, prediction.cluster.gpu
    doubled = {
        "memory bandwidth": {"gpu": replace(gpu, memory_bandwidth=2 * gpu.memory_bandwidth)},
        "links inside nodes": {"intra_bandwidth": 2 * run.cluster.intra_bandwidth},  # type: ignore[operator]
        "links between nodes": {"inter_bandwidth": 2 * run.cluster.inter_bandwidth},
    }
    seconds = {}
    for name, change in doubled.items():
        other = replace(run.cluster, **change)  # type: ignore[arg-type]
        seconds[name] = predict(run.model, run.layout, other, run.global_batch, run.seq_len).step_s
    larger = predict(run.model, run.layout, run.cluster, 2 * run.global_batch, run.seq_len)
    seconds["global batch"] = larger.step_s / 2
    return min(seconds, key=lambda name: seconds[name])


_PREDICTED: tuple[tuple[str, str, int, int, Layout], ...] = (
    ("llama3-405b", "128x8xH100", 128, 8192, Layout(16, 8, 8)),
    ("llama3-8b", "2x8xH100", 256, 8192, Layout(dp_shard=16)),
    ("llama3-8b", "2x8xH100", 64, 8192, Layout(tp=8, dp_shard=2)),
    ("llama3-70b", "8x8xA100", 512, 2048, Layout(tp=8, dp_shard=8, ac="full")),
    ("llama3-70b", "8x8xH100", 64, 8192, Layout(pp=8, dp_shard=8)),
    ("gpt2", "2x8xH100", 2048, 1024, Layout(dp_replicate=16)),
    ("llama3-70b", "4x4xH100", 16, 512, Layout(4, 4)),
    # Close calls: three times another resource would help more.
    ("llama3-8b", "4x4xH100", 32, 512, Layout(4, 2, 2)),
    ("gpt-18b", "2x8xH100", 16, 512, Layout(2, dp_shard=8)),
    ("llama3-8b", "4x4xH100", 16, 512, Layout(2, 4, 2)),
)
_OF_PART = {
    "compute": "memory bandwidth",
    "recompute": "memory bandwidth",
    "tensor": "links inside nodes",
    "bubble": "global batch",
    "point-to-point": "links between nodes",
    "data": "links between nodes",
    "optimizer": "memory bandwidth",
}


def _named(case: tuple[Prediction], got: str, right: str) -> str:
    left = case[0].gains()
    return (
        f"Twice of {got!r} leaves {left[got]:.1%} of a sequence's time. Twice of {right!r} leaves"
        f" {left[right]:.1%}."
    )


def _as_resource(value: Any, call: str) -> str:
    if not isinstance(value, str) or value not in _RESOURCES:
        raise Mistake(
            f"`{call}` is {value!r:.60}.", f"Return one of {', '.join(map(repr, _RESOURCES))}."
        )
    return value


def _largest_part(prediction: Prediction) -> str:
    return _OF_PART[prediction.bound_by]


def _largest_wait(prediction: Prediction) -> str:
    waits = {
        part: seconds
        for part, seconds in prediction.parts.items()
        if part not in ("compute", "recompute")
    }
    return _OF_PART[max(waits, key=waits.__getitem__)]


def _longest_alone(prediction: Prediction) -> str:
    """Return the resource that helps most if times of steps, not of sequences, are compared."""
    left = prediction.gains()
    return min(_RESOURCES, key=lambda each: left[each] * (2 if each == "global batch" else 1))


_NOT_WHAT_HELPS = (
    "The largest part is not what helps most: of some parts doubling a resource takes nearly"
    " nothing."
)
_COMPARE = "Change one resource with `replace`, predict again, and compare times a sequence."
_WRONG_BOTTLENECKS = (
    (_longest_alone,
     "With twice the batch a step does twice the work: compare times a sequence, of all four."),
    (_largest_part, _NOT_WHAT_HELPS),
    (_largest_wait, _NOT_WHAT_HELPS),
    (lambda run: max(_RESOURCES, key=run.gains().get),
     "That helps least: what is left of the time has to be least."),
    *((lambda run, gone=gone: min((each for each in _RESOURCES if each != gone), key=run.gains().get),
       f"{gone!r} is never the answer of yours: is it doubled?")
      for gone in _RESOURCES[:3]),
)  # fmt: skip
grade_bottleneck = Formula(
    bottleneck,
    lambda: [
        (predict(model_named(name), layout, cluster_of(where), batch, seq_len),)
        for name, where, batch, seq_len, layout in _PREDICTED
    ],
    _WRONG_BOTTLENECKS,
    _COMPARE,
    read=_as_resource,
    call=lambda run: f"bottleneck(…{run.model.n_layers} layers, {run.layout}…)",
    example=_named,
)


Report = tuple[int, float, list[int]]
"""Microbatches of a rank, MFU, parameters of each pipeline rank."""


def planned_report(
    model: ModelConfig, layout: Layout, cluster: Cluster, batch: int, seq_len: int, step_s: float
) -> Report:
    """(microbatches of a rank, MFU, parameters of each pipeline rank)"""
    m = batch // layout.n_data // layout.microbatch_size
    mfu = model_flops(model, batch, seq_len) / (step_s * cluster.gpu.peak * cluster.n_gpus)
    parameters = model.layer_parameters
    held = [
        sum(parameters[start:end])
        for start, end in compute_layer_assignment(model.n_layers, layout.pp)
    ]
    held[0] += model.n_embedding_parameters
    held[-1] += model.n_head_parameters
    return m, mfu, held


_ILLNESSES = {
    "batch": (("batch // layout.n_data", "batch"),
              "That is the global batch: each data-parallel rank has a part of it."),
    "peak": (("cluster.n_gpus", "cluster.n_nodes"),
             "That MFU is above what the GPUs could do: count all of them, not the nodes."),
    "embedding": (("    held[0] += model.n_embedding_parameters\n", ""),
                  "Rank 0 holds the embedding, too."),
    "head": (("    held[-1] += model.n_head_parameters\n", ""),
             "The last rank holds final norm and head, too."),
}  # fmt: skip
"""{name: ((text in the source, text in its place), cause)}."""


def _ill(*illnesses: str) -> Callable[..., Report]:
    return flawed(planned_report, *(_ILLNESSES[each][0] for each in illnesses))


@dataclass(frozen=True)
class _Planner:
    """A planner: tokens a step, MFU, and gigabytes of the first and of a middle rank."""

    report: Callable[..., Report]

    def says(self, run: Prediction) -> tuple[int, float, float, float]:
        asked = run.model, run.layout, run.cluster, run.global_batch, run.seq_len, run.step_s
        m, mfu, held = self.report(*asked)
        tokens = m * run.layout.microbatch_size * run.layout.n_data * run.seq_len
        first, second = (16 * each / run.layout.dp_shard / 1e9 for each in held[:2])
        return tokens, mfu, first, second


PATIENTS = {
    "A": _Planner(_ill("batch")),
    "B": _Planner(_ill("peak")),
    "C": _Planner(_ill("embedding")),
}
"""Three planners, each with one illness."""


def ward_round() -> str:
    """Return the numbers of the three planners on two runs, each line below the right one."""
    model = model_named("llama3-8b")
    told = {"right": _Planner(planned_report), **PATIENTS}
    lines = ["               tokens a step      MFU     GB of rank 0   GB of rank 1"]
    for where, layout in (("2x2xH100", Layout(pp=4)), ("4x4xH100", Layout(pp=4, dp_shard=4))):
        run = predict(model, layout, cluster_of(where), 64, 8192)
        lines.append(f"{where}, {layout}")
        for name, patient in told.items():
            tokens, mfu, first, second = patient.says(run)
            lines.append(f"  {name:<12}{tokens:>14,} {mfu:8.0%} {first:>13.1f} {second:>14.1f}")
    return "\n".join(lines)


_CASES: tuple[tuple[str, str, Layout, int, int, float], ...] = (
    ("llama3-8b", "2x8xH100", Layout(4, dp_shard=4), 64, 8192, 4.2),
    ("llama3-8b", "2x8xH100", Layout(dp_shard=8, dp_replicate=2, microbatch_size=2), 64, 8192, 3.9),
    ("llama3-70b", "3x8xH100", Layout(3, 2, 2, 2, microbatch_size=3), 36, 4096, 11.0),
    ("gpt2-xl", "1x4xA100", Layout(2, dp_replicate=2), 10, 1024, 1.5),
)


def _case(
    name: str, where: str, layout: Layout, batch: int, seq_len: int, step_s: float
) -> tuple[ModelConfig, Layout, Cluster, int, int, float]:
    return (
        replace(model_named(name), tie_embeddings=False),
        layout,
        cluster_of(where),
        batch,
        seq_len,
        step_s,
    )


_THREE = "m, MFU, and the parameters of each pipeline rank"


def _as_report(got: Any, what: str) -> Report:
    m, mfu, held = expect_list(got, what, 3, f"{_THREE}.")
    counts = [
        expect_int(each, f"{what}[2][{i}]", "Parameters are counted: nothing is to be divided.")
        for i, each in enumerate(expect_list(held, f"{what}[2]"))
    ]
    number = expect_int(m, f"{what}[0]", f"{_THREE}, in this order. m is counted: `//`.")
    return number, expect_number(mfu, f"{what}[1]"), counts


_OTHER_REPORT: Cause = (
    (
        lambda case, got, right: got[0] != right[0],
        "A rank's sequences, divided by those of a microbatch: both data-parallel sizes count.",
    ),
    (
        lambda case, got, right: not close(got[1], right[1]),
        "Operations a second over the peak of all GPUs: `model_flops` counts a step's.",
    ),
    (
        lambda case, got, right: len(got[2]) != len(right[2]),
        "There is one number of parameters for each of the `pp` pipeline ranks.",
    ),
    (
        OTHERWISE,
        "Layers as `compute_layer_assignment` shares them, and what the ends hold, before anything"
        " cuts them further.",
    ),
)


grade_planned_report = Formula(
    planned_report,
    [_case(*case) for case in _CASES],
    [
        (_ill(*ill), " ".join(_ILLNESSES[each][1] for each in ill))
        for n in (1, 2, 3, 4)
        for ill in combinations(_ILLNESSES, n)
    ],
    _OTHER_REPORT,
    read=_as_report,
    call=lambda model, layout, *_: f"planned_report(…{model.n_layers} layers, {layout}…)",
)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(bytes_held, grade_bytes_held, "13", "what a rank holds", 2, 7, (
        "Count the parameters first: this rank's layers, the embedding if it is the first, the head"
        " if the last.",
        "16 bytes for each of them, cut into `shard` parts. Activations are not cut.",
        "Under 1F1B `min(pp - rank, m)` microbatches are in flight; each keeps `kept` bytes for"
        " each layer here.",
    )),
    Exercise(break_even, grade_break_even, "13", "ring against bubble", 2, 8, (
        "Both ways do the same work. Data parallelism adds a ring, the pipeline adds a bubble: set"
        " them equal.",
        "The ring: `2 * (n - 1) / n` times the gradients' bytes, over the bandwidth. The bubble: `n"
        " - 1` microbatches of a stage, and a stage has an n-th of the work of a sequence.",
        "`(n - 1) / n` and the parameters are on both sides. What is left has `each`, `speed` and"
        " `bandwidth`.",
    )),
    Exercise(fastest_layout, grade_fastest_layout, "13", "find the layout", 2, 10, (
        "Try every `pp` and `tp` that divide the GPUs, and every `ac`. The data-parallel ranks are"
        " what is left.",
        "`predict` raises `ValueError` for what cannot be laid out: pass it over.",
        "Keep the least `step_s` among the predictions with `fits`, and return its `layout`.",
    ), limit_s=60.0),
    Exercise(bottleneck, grade_bottleneck, "13", "name the bottleneck", 2, 7, (
        "The largest part of a step need not be what helps most: predict again with twice of each.",
        "`replace(cluster, inter_bandwidth=2 * cluster.inter_bandwidth)`, and likewise the others;"
        " the memory's bandwidth is the GPU's. `predict` takes the rest from the prediction.",
        "With twice the batch a step does twice the work: halve its time, then take the least.",
    ), limit_s=30.0),
    Exercise(planned_report, grade_planned_report, "13", "bug clinic", 2, 8, (
        "Check each number against something you know. An MFU cannot be above 1.",
        "A rank gets `batch // layout.n_data` sequences. A peak is of one GPU.",
        "The ends hold more than layers: rank 0 the embedding, the last rank final norm and head.",
    )),
)  # fmt: skip


def data_parallel(n_ranks: int) -> Schedule:
    """Return data parallelism as a schedule: every rank works, then gradients go round a ring.

    Stage 0 is the work of a rank, one "microbatch" each. The stages that follow are the 2 (n - 1)
    steps of the all-reduce. Part c of the gradients starts on rank c, and each of its steps is one
    rank further.
    """
    n_stages = 2 * (n_ranks - 1) + 1
    placement = tuple(tuple((c + s) % n_ranks for c in range(n_ranks)) for s in range(n_stages))
    rows: list[list[Action]] = [[] for _ in range(n_ranks)]
    for s in range(n_stages):
        for c in range(n_ranks):
            rows[(c + s) % n_ranks].append(Action(s, "F", c))
    return Schedule("data parallel", placement, tuple(map(tuple, rows)))


def beside_data(
    model: ModelConfig,
    way: Literal["pp", "tp"],
    cluster: Cluster,
    tokens: Sequence[int],
    per_rank: int = 4,
) -> dict[int, float]:
    """Return step times of one kind of parallelism alone, divided by those of data parallelism.

    The kind is pipeline (``pp``) or tensor parallelism (``tp``).
    Data parallelism is torch's DDP, whose ring runs beside the last backward. Memory does not
    count: a layout that does not fit is timed all the same.

    Args:
        tokens: tokens of a sequence; a microbatch is one sequence.
        per_rank: sequences of a batch on each GPU.
    """
    n = cluster.n_gpus
    longer = replace(model, max_seq_len=max(tokens))
    # in mixed precision even a lone data-parallel rank would cast its weights
    plain = Layout(precision="bfloat16")
    layouts = plain.with_(**{way: n}), plain.with_(dp_replicate=n, reduces="backward")

    def ratio(seq_len: int) -> float:
        a, b = (predict(longer, each, cluster, per_rank * n, seq_len).step_s for each in layouts)
        return a / b

    return {each: ratio(each) for each in tokens}


TEXT = (
    "A plan is a guess until somebody measures it. "
    "Data parallelism needs tokens, tensor parallelism needs width, a pipeline needs microbatches. "
    "Ranks die, and the run goes on.\n"
)
SEQ_LEN, BATCH = 64, 16
MODEL = ModelConfig(dim=64, n_layers=4, n_heads=4, vocab_size=300, max_seq_len=SEQ_LEN)
SIZES = (
    f"--dim {MODEL.dim} --layers {MODEL.n_layers} --heads {MODEL.n_heads} --tokenizer-size"
    f" {MODEL.vocab_size} --seq-len {SEQ_LEN} --global-batch-size {BATCH} --eval-batches 1 --lr"
    " 0.01 --lr-schedule constant --warmup 4"
)
"""The flags of ``train.py`` for ``MODEL`` and its training."""


def train_and_die(flags: str, n_ranks: int, rank: int, step: int) -> None:
    """Run ``train.py`` with ``flags`` on the notebook's own ranks; kill ``rank`` at ``step``.

    The rank gets a SIGKILL when the step begins.

    Raises:
        RankDied: the rank has died.
    """
    on_ranks(n_ranks, _run_script, str(_script()), shlex.split(flags), rank, step)


def _script() -> Path:
    """The course's script, here or above, as ``%torchrun`` looks for it."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (found := folder / "source_code" / "train.py").exists():
            return found
    raise FileNotFoundError(
        f"there is no source_code/train.py in {here} or above: open the notebook in its folder"
    )


def _run_script(rank: int, script: str, flags: Sequence[str], dying: int, step: int) -> None:
    from course_pp.training import Trainer
    from course_pp.training.flags import parse

    if rank == dying:
        whole_step = Trainer.train_step

        def fatal_step(trainer: Trainer) -> Any:
            if trainer.step + 1 == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole_step(trainer)

        Trainer.train_step = fatal_step  # type: ignore[assignment,method-assign]
    runpy.run_path(script, run_name="train")["run"](parse(flags), None)


def step_seconds(log_folder: Path) -> float:
    """Return the seconds of a step: the median of the lines in ``metrics.jsonl``.

    The first line is left out, because its steps also connect ranks.
    """
    lines = [
        json.loads(line)
        for line in (log_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    speeds = [line["tokens_per_s"] for line in lines if line["event"] == "train"]
    return BATCH * SEQ_LEN / median(speeds[1:] or speeds)


_KINDS = {"model": "parameters", "optimizer": "moments"}


def saved_bytes(checkpoint: Path) -> list[dict[str, int]]:
    """Return for each rank the bytes of parameters and of AdamW's two moments that it wrote."""
    from course_pp.training.checkpoint import contents

    held: dict[int, dict[str, int]] = {}
    for entry in contents(checkpoint):
        first, *_, last = entry.key.split(".")
        # of the counters, equal everywhere, one rank writes its own
        if first not in _KINDS or last == "step":
            continue
        for piece in entry.pieces:
            mine = held.setdefault(piece.rank, dict.fromkeys(_KINDS.values(), 0))
            mine[_KINDS[first]] += entry.dtype.itemsize * prod(piece.sizes)
    return [held[rank] for rank in sorted(held)]


def planned_bytes(layout: Layout) -> list[dict[str, int]]:
    """Predict the bytes of :func:`saved_bytes` on paper."""
    run = predict(MODEL, layout, Cluster(1, layout.n_ranks, gpu_named("laptop")), BATCH, SEQ_LEN)
    held = []
    for rank in range(layout.n_ranks):
        on_paper = run.memory(rank)
        stages = layout.stages(MODEL, layout.place(rank).pp)
        counters = 4 * sum(stage.total(len) for stage in stages)
        held.append(
            {"parameters": on_paper["parameters"], "moments": on_paper["optimizer"] - counters}
        )
    return held


def continued(folder: Path, prompt: str, n_tokens: int = 24) -> str:
    """Return the likeliest continuation of ``prompt`` by an exported model in ``transformers``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    with imports_that_warn():
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        words: Any = AutoTokenizer.from_pretrained(folder)
        asked = words(prompt, return_tensors="pt")
        said = model.generate(**asked, max_new_tokens=n_tokens, do_sample=False, pad_token_id=0)
    return str(words.decode(said[0], skip_special_tokens=True))


def calibrated(seconds: float, layout: Layout) -> Cluster:
    """A machine whose ranks are as fast as one timed step of ``MODEL`` says."""
    gpu = gpu_named("laptop")
    peak, memory = gpu.peak, gpu.memory_bandwidth
    for _ in range(4):  # links do not get faster with it
        cluster = Cluster(1, layout.n_ranks, replace(gpu, peak=peak, memory_bandwidth=memory))
        factor = predict(MODEL, layout, cluster, BATCH, SEQ_LEN).step_s / seconds
        peak, memory = peak * factor, memory * factor
    return cluster
