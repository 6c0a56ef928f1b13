"""Two exercises of notebook 12: find the fastest layout that fits, and read off a prediction what would help it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.plan import Cluster, Layout, ModelConfig, Prediction, cluster_of, model_named, predict

__all__ = ["bottleneck", "fastest_layout", "grade_bottleneck", "grade_fastest_layout"]


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
)


_Case = tuple[ModelConfig, Cluster, int, int]


def _given(run: _Run) -> _Case:
    return model_named(run[0]), cluster_of(run[1]), run[2], run[3]


def grade_fastest_layout(answer: Answer) -> None:
    """Ask for a layout as fast as the best of the same choices that fits."""
    cases = [_given(run) for run in _RUNS]
    for run, case, got in zip(_RUNS, cases, answer.calls(cases, "fastest_layout(…)"), strict=True):
        what = f"`fastest_layout` of {run[0]} on {run[1]}, {run[2]} sequences of {run[3]:,} tokens,"
        _judge_layout(what, case, got)


def _judge_layout(what: str, case: _Case, got: Any) -> None:
    if not isinstance(got, Layout):
        raise Mistake(
            f"{what} is {got!r:.60}; a `Layout` is asked for.", "Is a `return` missing?" if got is None else ""
        )
    cluster = case[1]
    plain = Layout(got.pp, got.tp, got.dp_shard, ac=got.ac)
    if got != plain:
        raise Mistake(f"{what} is {got}, which changes more than pp, tp, dp_shard and ac.", "Leave the rest as it is.")
    if got.tp > cluster.gpus_per_node:
        raise Mistake(f"{what} has tp={got.tp}, which leaves the node of {cluster.gpus_per_node}.")
    try:
        found = predict(case[0], got, *case[1:])
    except ValueError as error:
        raise Mistake(f"{what} is {got}, which cannot be laid out.", f"`predict` says: {error}.") from None
    if not found.fits:
        over = max(found.total_memory) - found.budget
        raise Mistake(
            f"{what} is {got}: {over / 1e9:.1f} GB too many on the fullest rank.", "Pass over what does not `.fits`."
        )
    least = _least_step_s(case)
    if found.step_s > least * (1 + 1e-9):
        cause = "Look at every pp, tp and ac; the data-parallel ranks are what is left."
        raise Mistake(f"{what} is {got}: {found.step_s:.4g} s a step. There is one of {least:.4g} s.", cause)


@cache
def _least_step_s(case: _Case) -> float:
    return min(each.step_s for each in _fitting(*case))


def _fitting(model: ModelConfig, cluster: Cluster, batch: int, seq_len: int) -> Iterator[Prediction]:
    n = cluster.n_gpus
    for pp in (each for each in range(1, n + 1) if n % each == 0):
        for tp in (each for each in range(1, cluster.gpus_per_node + 1) if n // pp % each == 0):
            for ac in ("none", "selective", "full"):
                try:
                    found = predict(model, Layout(pp, tp, n // pp // tp, ac=ac), cluster, batch, seq_len)
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


def grade_bottleneck(answer: Answer) -> None:
    """Ask which of four resources helps most when it is doubled."""
    cases = [
        (predict(model_named(name), layout, cluster_of(where), batch, seq_len),)
        for name, where, batch, seq_len, layout in _PREDICTED
    ]
    found = answer.calls(cases, "bottleneck(…)")
    for got in found:
        if not isinstance(got, str) or got not in _RESOURCES:
            raise Mistake(f"`bottleneck(…)` is {got!r:.60}.", f"Return one of {', '.join(map(repr, _RESOURCES))}.")
    for (name, where, *_), (prediction,), got in zip(_PREDICTED, cases, found, strict=True):
        left = prediction.gains()
        right = min(_RESOURCES, key=lambda each: left[each])
        if got != right:
            raise Mistake(
                f"`bottleneck` of {name} on {where}, {prediction.layout}, is {got!r}: twice of it leaves "
                f"{left[got]:.1%} of a sequence's time. Twice of {right!r} leaves {left[right]:.1%}.",
                _why(found, [each for (each,) in cases]),
            )


def _why(found: list[Any], predictions: list[Prediction]) -> str:
    by_part = [_OF_PART[each.bound_by] for each in predictions]
    exposed = [
        _OF_PART[max((part for part in each.parts if part not in ("compute", "recompute")), key=each.parts.__getitem__)]
        for each in predictions
    ]
    times = [_longest_alone(each) for each in predictions]
    if found in (by_part, exposed):
        return "The largest part is not what helps most: of some parts doubling a resource takes nearly nothing."
    if found == times:
        return "With twice the batch a step does twice the work: compare times a sequence."
    return "Change one resource with `replace`, predict again, and compare times a sequence."


def _longest_alone(prediction: Prediction) -> str:
    """What helps most where a step with twice the batch is compared as it is."""
    left = prediction.gains()
    return min(_RESOURCES, key=lambda each: left[each] * (2 if each == "global batch" else 1))
