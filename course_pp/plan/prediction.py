"""Predict one layout: the step's time, the memory of ranks, what bounds it; and compare two."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from course_pp.base.arguments import checked, refuse_unless
from course_pp.base.shapes import StagePlan
from course_pp.base.sizes import ModelConfig
from course_pp.plan.cluster import Cluster, model_named, model_names
from course_pp.plan.layout import Layout
from course_pp.plan.memory import memory_of_rank, peaks_in_flight
from course_pp.plan.run import Constants, Run
from course_pp.plan.timing import (
    StageTime,
    beyond,
    data_parallel_times,
    model_flops,
    optimizer_time,
    stage_time,
    transfers,
)
from course_pp.schedule import Costs, Span, Timeline, simulate

PARTS = (
    "compute",
    "recompute",
    "tensor",
    "expert exchange",
    "bubble",
    "point-to-point",
    "data",
    "optimizer",
)
USABLE_MEMORY = 0.92
"""Usable share of a GPU's memory. The driver, libraries' buffers and fragments take the rest."""


@dataclass(frozen=True)
class Prediction:
    """A run on paper: the model, layout and cluster, and the prediction.

    Attributes:
        step_s: seconds of a step.
        parts: seconds by kind, :data:`PARTS`, of the rank that ends last; they add up to
            ``step_s``.
        parts_by_rank: seconds by kind of each pipeline rank. If a rank ends earlier, the rest of
            the step is in its bubble.
        costs: seconds of each stage and message, as the simulator took them.
        timeline: the pipeline's timeline in seconds, up to its last backward.
    """

    model: ModelConfig
    layout: Layout
    cluster: Cluster
    global_batch: int
    seq_len: int
    constants: Constants
    step_s: float
    parts: Mapping[str, float]
    parts_by_rank: tuple[Mapping[str, float], ...] = field(repr=False)
    timeline: Timeline = field(repr=False)
    costs: Costs = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        return self.global_batch * self.seq_len / self.step_s

    @property
    def tflops_per_gpu(self) -> float:
        """Useful operations of a GPU, in 10¹² a second."""
        flops = model_flops(self.model, self.global_batch, self.seq_len)
        return flops / self.step_s / self.cluster.n_gpus / 1e12

    @property
    def mfu(self) -> float:
        """Useful operations over the operations of the GPUs at their peak.

        Chowdhery et al. 2022, arXiv:2204.02311. Attention is counted whole, as there. With
        ``flash`` half of it is skipped, so beyond some ``12 * dim`` tokens this can pass 1. No
        model of :func:`model_names` takes so many.
        """
        return self.tflops_per_gpu * 1e12 / self.cluster.gpu.peak

    @property
    def _run(self) -> Run:
        return Run(self.model, self.layout, self.seq_len, self.cluster, self.constants)

    @cached_property
    def _peaks(self) -> tuple[float, ...]:
        return peaks_in_flight(self._run, self.timeline)

    @cached_property
    def peak_memory(self) -> tuple[Mapping[str, int], ...]:
        """Bytes by pipeline rank and kind, on the first of its data- and tensor-parallel ranks.

        That rank holds the most.
        """
        block = self.layout.n_data * self.layout.tp
        return tuple(self.memory(rank * block) for rank in range(self.layout.pp))

    @cached_property
    def total_memory(self) -> tuple[int, ...]:
        return tuple(sum(kinds.values()) for kinds in self.peak_memory)

    @property
    def budget(self) -> float:
        return self.cluster.gpu.memory * USABLE_MEMORY

    @property
    def fits(self) -> bool:
        return max(self.total_memory) <= self.budget

    @property
    def bound_by(self) -> str:
        """The largest part of the step, one of :data:`PARTS`."""
        return max(PARTS, key=lambda part: self.parts[part])

    def memory(self, rank: int) -> dict[str, int]:
        """Return the bytes on a global rank at its fullest, by kind."""
        m = self.layout.n_microbatches(self.global_batch)
        return memory_of_rank(self._run, m, rank=rank, peaks=self._peaks)

    def gains(self) -> dict[str, float]:
        """Return the share of a sequence's time that is left if a resource doubles.

        1 is no gain.
        """
        gpu, cluster = self.cluster.gpu, self.cluster
        faster = replace(gpu, peak=2 * gpu.peak, peak_32=2 * gpu.peak_of(4))
        wider = replace(gpu, memory_bandwidth=2 * gpu.memory_bandwidth)
        intra = float(cluster.intra_bandwidth or 0)
        doubled = {
            "peak": replace(cluster, gpu=faster),
            "memory bandwidth": replace(cluster, gpu=wider),
            "links inside nodes": replace(cluster, intra_bandwidth=2 * intra),
            "links between nodes": replace(cluster, inter_bandwidth=2 * cluster.inter_bandwidth),
        }

        def step_s(cluster: Cluster, global_batch: int) -> float:
            prediction = predict(
                self.model,
                self.layout,
                cluster=cluster,
                global_batch=global_batch,
                seq_len=self.seq_len,
                constants=self.constants,
            )
            return prediction.step_s

        found = {}
        for name, other in doubled.items():
            found[name] = step_s(other, self.global_batch) / self.step_s
        # A batch of twice the size has twice the sequences.
        found["global batch"] = step_s(cluster, 2 * self.global_batch) / (2 * self.step_s)
        return found

    def __str__(self) -> str:
        most = max(self.total_memory)
        return (
            f"{self.layout}: {self.step_s:.4g} s a step, {self.tflops_per_gpu:.4g} TFLOP/s a GPU,"
            f" MFU {self.mfu:.1%}, {most / 1e9:.3g} of {self.cluster.gpu.memory / 1e9:.3g} GB,"
            f" bound by {self.bound_by}"
        )


@checked
def predict(
    model: ModelConfig,
    layout: Layout,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    constants: Constants | None = None,
) -> Prediction:
    """Predict one step of ``model`` laid out on a cluster.

    The pipeline is simulated with each stage's own times. The first gather, the reductions and the
    optimizer are added on the rank that ends last, minus the part that overlaps. ``layout.reduces``
    says how reductions run: beside the last backward, or each after the last backward of its stage,
    while the rank waits.

    Args:
        global_batch: sequences of all ranks together.
        seq_len: tokens in a sequence.
        constants: fitted constants; None takes the ones fitted on the Megatron table.
    """
    run = Run(model, layout, seq_len, cluster, constants or Constants())
    layout.check(model, cluster)
    check_seq_len(model, seq_len)
    if layout.splits_sequence(model) and seq_len % layout.tp:
        raise ValueError(
            f"seq_len={seq_len} must be a multiple of tp={layout.tp} for sequence-parallel norms: "
            f"pad it to {-(-seq_len // layout.tp) * layout.tp}"
        )
    m = layout.n_microbatches(global_batch)
    stages = layout.stages_of_all(model)
    times = [stage_time(run, stage) for stage in stages]
    gathers = [data_parallel_times(run, [stage])[0] for stage in stages]
    hops = transfers(run)
    # With ``reshard`` each backward waits for parameters that come too late. A forward frees a
    # group, so the next action gathers it. A backward leaves it gathered for the next forward.
    late = [0.0] * len(times)
    if layout.frees_after_forward:
        both = zip(gathers, times, strict=True)
        late = [_exposed(layout, g, t.input_grad + t.weight_grad) for g, t in both]
    forward = [t.forward for t in times]
    input_grad = [t.input_grad + x for t, x in zip(times, late, strict=True)]
    weight_grad = [t.weight_grad for t in times]
    costs = Costs(tuple(forward), tuple(input_grad), tuple(weight_grad), latency=hops or 0.0)
    timeline = simulate(layout.order(m), costs)
    by_rank = _parts(run, timeline, times, hops)
    parts = max(by_rank, key=lambda each: sum(each.values()))
    step_s = sum(parts.values())
    # A rank that ends earlier waits for the others, which is a bubble.
    filled = []
    for each in by_rank:
        waits = each["bubble"] + step_s - sum(each.values())
        filled.append({**each, "bubble": waits})
    return Prediction(
        model=model,
        layout=layout,
        cluster=cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        constants=run.constants,
        step_s=step_s,
        parts=parts,
        parts_by_rank=tuple(filled),
        timeline=timeline,
        costs=costs,
    )


def check_seq_len(model: ModelConfig, seq_len: int) -> None:
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: give at least 1 token")
    if seq_len > model.max_seq_len:
        raise ValueError(
            f"seq_len={seq_len} is longer than the model's max_seq_len={model.max_seq_len}: give at"
            " most that many tokens, or a model with a larger max_seq_len"
        )


def _parts(
    run: Run, timeline: Timeline, times: list[StageTime], hops: tuple[float, ...]
) -> tuple[dict[str, float], ...]:
    """Return the seconds of each rank by kind, until it is done."""
    found: list[dict[str, float]] = []
    for rank, row in enumerate(timeline.by_rank):
        held = run.layout.stages(run.model, rank)
        # A stage counts once for each microbatch, that is, for each forward.
        here = [times[part.stage] for span in row for part in span.action.parts if part.kind == "F"]
        work = sum(t.forward + t.input_grad + t.weight_grad for t in here)
        tensor = sum(t.tensor for t in here)
        again = sum(t.recomputed for t in here)
        exchange = sum(t.exchange for t in here)
        waits_again = sum(t.waits_again for t in here)
        busy = float(timeline.busy[rank])
        idle = float(row[-1].end) - busy
        # The first microbatch travels through all stages, and so does the last gradient.
        ramps = min(idle, 2.0 * sum(hops[: len(timeline.by_rank) - 1]))
        data = _data(run, held, times=times, timeline=timeline, rank=rank)
        parts = {
            "compute": work - tensor - exchange - again + waits_again,
            "recompute": again - waits_again,
            "tensor": tensor,
            "expert exchange": exchange,
            "bubble": idle - ramps,
            "point-to-point": ramps,
            "data": data + busy - work,
            "optimizer": optimizer_time(run, held),
        }
        found.append(parts)
    return tuple(found)


def _data(
    run: Run, held: list[StagePlan], times: list[StageTime], timeline: Timeline, rank: int
) -> float:
    """Return the seconds that a rank waits for data-parallel traffic.

    The parameters that each backward gathers are not included.
    """
    layout = run.layout
    gathered, reduced = data_parallel_times(run, held)
    first = sum(times[s.index].forward for s in held)
    last = sum(times[s.index].input_grad + times[s.index].weight_grad for s in held)
    waited = _exposed(layout, gathered, first)
    if not layout.overlap:
        return waited + reduced
    if layout.reduces_in_backward(timeline.n_microbatches):
        # Where forward frees parameters, the links gather for the same backward.
        free = max(0.0, last - gathered * layout.frees_after_forward)
        return waited + _exposed(layout, reduced, free)
    each = {stage.index: data_parallel_times(run, [stage])[1] for stage in held}
    row = timeline.by_rank[rank]
    return waited + _reduced_at(row, each) - float(row[-1].end)


def _reduced_at(row: Sequence[Span], seconds: Mapping[int, float]) -> float:
    """Return when a rank is done if it waits for the reduction after each stage's last backward."""
    # The number of the action that is a stage's last.
    ends = {}
    for i, span in enumerate(row):
        for part in span.action.parts:
            ends[part.stage] = i
    clock = 0.0
    for i, span in enumerate(row):
        after = sum(seconds[stage] for stage, at in ends.items() if at == i)
        clock = max(clock, float(span.start)) + float(span.end - span.start) + after
    return clock


def _exposed(layout: Layout, traffic: float, beside: float) -> float:
    return beyond(traffic, beside) if layout.overlap else traffic


_ROUNDING = 1e-9
"""Relative difference of two values that count as equal."""


@checked
def explain(first: Prediction, second: Prediction) -> str:
    """Compare two predictions line by line: their differences in time and memory, and the reason.

    The first lines say where model, layout and so on differ. Times are means over pipeline ranks,
    as in :func:`causes`. The last line is the reason in one sentence.
    """
    rows: list[tuple[str, ...]] = [("", str(first.layout), str(second.layout), "second − first")]
    rows += [(name, a, b) for name, a, b in _asked(first, second)]
    largest = max(first.step_s, second.step_s)
    rows.append(_row("step, s", first.step_s, second.step_s, largest))
    ours, theirs = _shares(first), _shares(second)
    for part in ours:
        if max(ours[part], theirs[part]) > _ROUNDING * largest:
            rows.append(_row(f"  {part}", ours[part], theirs[part], largest))
    more_mfu = _less(first.mfu, second.mfu, 1.0)
    rows.append(("MFU", f"{first.mfu:.1%}", f"{second.mfu:.1%}", f"{more_mfu:+.1%}"))

    held = [_fullest(first), _fullest(second)]
    a, b = [sum(kinds.values()) / 1e9 for kinds in held]
    rows.append(_row("memory, GB", a, b, max(a, b)))
    for kind in held[0]:
        rows.append(_row(f"  {kind}", held[0][kind] / 1e9, held[1][kind] / 1e9, max(a, b)))

    # Rows of model, cluster and so on have no fourth column.
    widths = [0] * 4
    for row in rows:
        for i, cell in enumerate(row):
            widths[i] = max(widths[i], len(cell))
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join(cells).rstrip())
    if not _less(first.step_s, second.step_s, largest):
        last = "Both take the same time."
    elif first.step_s < second.step_s:
        last = f"The first is faster: {reason(first, second)}"
    else:
        last = f"The second is faster: {reason(second, first)}"
    return "\n".join([*lines, last])


def _fullest(prediction: Prediction) -> Mapping[str, float]:
    """Return the bytes by kind of the rank that holds the most."""
    return max(prediction.peak_memory, key=lambda kinds: sum(kinds.values()))


@checked
def reason(quicker: Prediction, slower: Prediction) -> str:
    """Return why one prediction is quicker than another, in a sentence."""
    refuse_unless(
        quicker.step_s < slower.step_s, "reason", "quicker", quicker, "give the quicker first"
    )
    what = [f"{name.strip()} {a}, not {b}" for name, a, b in _asked(quicker, slower)]
    ours, theirs = str(quicker.layout), str(slower.layout)
    if ours != theirs:
        what.append(f"{ours} instead of {theirs}")
    for name, a, b in _differing(quicker.layout, slower.layout):
        if name not in _IN_LAYOUTS_WORDS:
            what.append(f"{name}={a}, not {b}")
    less = slower.step_s - quicker.step_s
    because = mainly(causes(quicker, slower), "s")
    return f"{', '.join(what)}: {less:.3g} of {slower.step_s:.3g} s less, {because}."


# Fields that str(layout) spells.
_IN_LAYOUTS_WORDS = (
    *("pp", "tp", "dp_shard", "dp_replicate", "ep"),
    *("schedule", "n_chunks", "microbatch_size", "ac"),
)


def causes(quicker: Prediction, slower: Prediction) -> list[tuple[float, str]]:
    """Return why one prediction is quicker: seconds that it saves, each with the cause.

    Negative seconds are lost. Each is a mean over pipeline ranks. Together they are the difference
    of the steps, give or take a quarter.
    """
    ours, theirs = _shares(quicker), _shares(slower)
    saved = {part: theirs[part] - ours[part] for part in ours}
    found = []
    for seconds, cause in largest_terms(saved):
        if cause == _UNEVEN:
            cause += f" ({_uneven_ranks(slower if seconds > 0 else quicker)})"
        found.append((seconds, cause))
    return found


def largest_terms(terms: Mapping[str, float]) -> list[tuple[float, str]]:
    """Return the largest terms of a sum: first the positive ones, then the negative ones.

    Of each sign, the terms left out are together at most a quarter of the sum.
    """
    found: list[tuple[float, str]] = []
    for sign in (1, -1):
        left = {name: abs(term) for name, term in terms.items() if sign * term > 0}
        while sum(left.values()) > abs(sum(terms.values())) / 4:
            name = max(left, key=lambda each: left[each])
            found.append((sign * left.pop(name), name))
    return found


def mainly(found: Sequence[tuple[float, str]], unit: str) -> str:
    """Return in words what :func:`largest_terms` found, for a sum that is saved."""
    saved = []
    paid = []
    for amount, name in found:
        words = _IN_WORDS.get(name, name)
        if amount > 0:
            saved.append(f"{amount:.3g} {unit} of {words}")
        elif amount < 0:
            paid.append(f"{-amount:.3g} {unit} more of {words}")
    if paid:
        return f"mainly {_listed(saved)}, but {_listed(paid)}"
    return f"mainly {_listed(saved)}"


def _listed(words: Sequence[str]) -> str:
    *some, last = words or [""]
    return f"{', '.join(some)} and {last}" if some else last


_UNEVEN = "uneven stages"
_IN_WORDS = {
    "tensor": "tensor-parallel sums",
    "data": "data-parallel traffic",
    "point-to-point": "point-to-point messages",
    "unreduced": "unreduced gradients",
    "gathered": "gathered parameters",
}


def _shares(prediction: Prediction) -> dict[str, float]:
    """Return the seconds of a step by kind, as means over pipeline ranks.

    A rank waits for the busiest one as long as that works longer. This part is "uneven stages". The
    rest is the bubble, in which the busiest rank waits, too.
    """
    ranks = prediction.parts_by_rank
    busy = [float(each) for each in prediction.timeline.busy]
    mean = {}
    for part in PARTS:
        mean[part] = sum(each[part] for each in ranks) / len(ranks)
    uneven = min(max(busy) - sum(busy) / len(busy), mean["bubble"])
    return {**mean, "bubble": mean["bubble"] - uneven, _UNEVEN: uneven}


def _uneven_ranks(prediction: Prediction) -> str:
    """Return how long the busiest and the idlest rank work, and why the busiest has more work."""
    busy = [float(each) for each in prediction.timeline.busy]
    most, least = busy.index(max(busy)), busy.index(min(busy))
    ours = prediction.layout.stages(prediction.model, most)
    theirs = prediction.layout.stages(prediction.model, least)
    more = []
    if any(stage.is_last for stage in ours):
        more.append("the head")
    for field_of_stage, kind in (("n_layers", "layers"), ("n_sparse", "layers of experts")):
        a = sum(getattr(stage, field_of_stage) for stage in ours)
        b = sum(getattr(stage, field_of_stage) for stage in theirs)
        if a > b:
            more.append(f"{a} {kind} to {b}")
    holding = f", with {_listed(more)}," if more else ""
    return (
        f"pipeline rank {most}{holding} is busy for {max(busy):.3g} s, rank {least} for"
        f" {min(busy):.3g} s, a rank on average for {sum(busy) / len(busy):.3g} s"
    )


def _asked(first: Prediction, second: Prediction) -> Iterator[tuple[str, str, str]]:
    """Yield the name and both values of what two predictions were asked, where it differs."""
    if first.model != second.model:
        yield "model", _model(first.model), _model(second.model)
    if first.cluster != second.cluster:
        yield "cluster", _cluster(first.cluster), _cluster(second.cluster)
        for name in ("intra_bandwidth", "inter_bandwidth", "latency"):
            x, y = getattr(first.cluster, name), getattr(second.cluster, name)
            if x != y:
                yield f"  {name}", f"{x:.4g}", f"{y:.4g}"
        if first.cluster.gpu.name == second.cluster.gpu.name:
            for name, x, y in _differing(first.cluster.gpu, second.cluster.gpu):
                yield f"  {name}", x, y
    for name in ("global_batch", "seq_len"):
        x, y = getattr(first, name), getattr(second, name)
        if x != y:
            yield name, f"{x:,}", f"{y:,}"
    if first.constants != second.constants:
        yield from _differing(first.constants, second.constants)


def _differing(a: object, b: object) -> Iterator[tuple[str, str, str]]:
    """Yield the name and both values of each field that differs."""
    for each in fields(a):  # type: ignore[arg-type]
        x, y = getattr(a, each.name), getattr(b, each.name)
        if x != y:
            yield each.name, f"{x}", f"{y}"


def _cluster(cluster: Cluster) -> str:
    return f"{cluster.n_nodes}x{cluster.gpus_per_node}x{cluster.gpu.name}"


def _model(model: ModelConfig) -> str:
    named = [name for name in model_names() if model_named(name) == model]
    return named[0] if named else f"{model.n_parameters / 1e9:.3g}B"


def _row(name: str, a: float, b: float, largest: float) -> tuple[str, ...]:
    """Return a line of two values. A value that is only rounding beside ``largest`` is 0."""
    a = 0.0 if abs(a) <= _ROUNDING * largest else a
    b = 0.0 if abs(b) <= _ROUNDING * largest else b
    return name, f"{a:.4g}", f"{b:.4g}", f"{_less(a, b, largest):+.4g}"


def _less(a: float, b: float, largest: float) -> float:
    return 0.0 if abs(b - a) <= _ROUNDING * largest else b - a
