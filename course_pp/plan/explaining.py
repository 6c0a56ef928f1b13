"""Compare two predictions: line by line, and the reason in one sentence."""

from collections.abc import Iterator
from dataclasses import fields

from course_pp.arguments import checked, refuse_unless
from course_pp.plan.cluster import Cluster
from course_pp.plan.models import model_named, model_names
from course_pp.plan.prediction import PARTS, Prediction
from course_pp.sizes import ModelConfig

__all__ = ["explain", "reason"]

_ROUNDING = 1e-9
"""Of the larger of two values: what they may differ by and be called equal."""


@checked
def explain(first: Prediction, second: Prediction) -> str:
    """Compare two predictions line by line: what was asked where it differs, where the time goes, what is held.

    The last line is the reason in one sentence.
    """
    rows: list[tuple[str, ...]] = [("", str(first.layout), str(second.layout), "second − first")]
    rows += [(name, a, b) for name, a, b in _asked(first, second)]
    largest = max(first.step_s, second.step_s)
    rows.append(_row("step, s", first.step_s, second.step_s, largest))
    rows += [
        _row(f"  {part}", first.parts[part], second.parts[part], largest)
        for part in PARTS
        if max(first.parts[part], second.parts[part]) > _ROUNDING * largest
    ]
    rows.append(("MFU", f"{first.mfu:.1%}", f"{second.mfu:.1%}", f"{_less(first.mfu, second.mfu, 1.0):+.1%}"))
    fullest = [max(each.peak_memory, key=lambda kinds: sum(kinds.values())) for each in (first, second)]
    totals = [sum(kinds.values()) / 1e9 for kinds in fullest]
    rows.append(_row("memory, GB", totals[0], totals[1], max(totals)))
    rows += [_row(f"  {kind}", n / 1e9, fullest[1][kind] / 1e9, max(totals)) for kind, n in fullest[0].items()]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(4)]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)).rstrip() for row in rows]
    if not _less(first.step_s, second.step_s, largest):
        return "\n".join([*lines, "Both take the same time."])
    if first.step_s < second.step_s:
        return "\n".join([*lines, f"The first is faster: {reason(first, second)}"])
    return "\n".join([*lines, f"The second is faster: {reason(second, first)}"])


@checked
def reason(quicker: Prediction, slower: Prediction) -> str:
    """Return why one prediction is quicker than another, in a sentence made of what differs and of the parts of both.

    Raises:
        ValueError: if it is not quicker.
    """
    refuse_unless(quicker.step_s < slower.step_s, "reason", "quicker", quicker, "give the quicker first")
    what = [f"{name.strip()} {a}, not {b}" for name, a, b in _asked(quicker, slower)]
    ours, theirs = str(quicker.layout), str(slower.layout)
    if ours != theirs:
        what.append(f"{ours} instead of {theirs}")
    told = {"pp", "tp", "dp_shard", "dp_replicate", "schedule", "n_chunks", "microbatch_size", "ac"}
    unsaid = (each for each in _differing(quicker.layout, slower.layout) if each[0] not in told)
    what += [f"{name}={a}, not {b}" for name, a, b in unsaid]
    saved = {part: slower.parts[part] - quicker.parts[part] for part in PARTS}
    part, paid = max(saved, key=lambda each: saved[each]), min(saved, key=lambda each: saved[each])
    less = slower.step_s - quicker.step_s
    because = f"{part} takes {saved[part]:.3g} s less"
    if saved[paid] < -_ROUNDING * slower.step_s:
        because += f" and {paid} only {-saved[paid]:.3g} s more"
    return f"{', '.join(what)}: {less:.3g} of {slower.step_s:.3g} s less, as {because}."


def _asked(first: Prediction, second: Prediction) -> Iterator[tuple[str, str, str]]:
    """Yield what two predictions were asked for, where it differs."""
    if first.model != second.model:
        yield "model", _model(first.model), _model(second.model)
    if first.cluster != second.cluster:
        yield "cluster", _cluster(first.cluster), _cluster(second.cluster)
        for name in ("intra_bandwidth", "inter_bandwidth", "latency", "gpu"):
            a, b = getattr(first.cluster, name), getattr(second.cluster, name)
            if a != b and name != "gpu":
                yield f"  {name}", f"{a:.4g}", f"{b:.4g}"
            if a != b and name == "gpu" and a.name == b.name:
                yield from ((f"  {n}", f"{x}", f"{y}") for n, x, y in _differing(a, b))
    for name in ("global_batch", "seq_len"):
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            yield name, f"{a:,}", f"{b:,}"
    if first.constants != second.constants:
        yield from _differing(first.constants, second.constants)


def _differing(a: object, b: object) -> Iterator[tuple[str, str, str]]:
    for each in fields(a):  # type: ignore[arg-type]
        x, y = getattr(a, each.name), getattr(b, each.name)
        if x != y:
            yield each.name, f"{x}", f"{y}"


def _model(model: ModelConfig) -> str:
    named = [name for name in model_names() if model_named(name) == model]
    return named[0] if named else f"{model.n_parameters / 1e9:.3g}B"


def _cluster(cluster: Cluster) -> str:
    return f"{cluster.n_nodes}x{cluster.gpus_per_node}x{cluster.gpu.name}"


def _row(name: str, a: float, b: float, largest: float) -> tuple[str, ...]:
    """Return a line of two values; what is rounding beside ``largest`` is 0."""
    a, b = (0.0 if abs(each) <= _ROUNDING * largest else each for each in (a, b))
    return name, f"{a:.4g}", f"{b:.4g}", f"{_less(a, b, largest):+.4g}"


def _less(a: float, b: float, largest: float) -> float:
    return 0.0 if abs(b - a) <= _ROUNDING * largest else b - a
