"""Predict one layout: the step's time and parts, memory by rank and kind, what bounds it; and compare two of them."""

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
"""Of a GPU's memory; the driver, the libraries' buffers and fragments take the rest."""


@dataclass(frozen=True)
class Prediction:
    """A run on paper: what was asked, and what is predicted.

    Attributes:
        step_s: seconds of a step.
        parts: seconds by kind, :data:`PARTS`, of the rank that ends last; they add up to
            ``step_s``.
        parts_by_rank: those of each pipeline rank. Where it ends earlier, the rest of the step is
            in its bubble.
        costs: of each stage and message, as the simulator took them, in seconds.
        timeline: the pipeline's, in seconds, up to its last backward.
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
        """Useful operations a GPU, in 10¹² a second."""
        flops = model_flops(self.model, self.global_batch, self.seq_len)
        return flops / self.step_s / self.cluster.n_gpus / 1e12

    @property
    def mfu(self) -> float:
        """Useful operations over what the GPUs could do at their peak (Chowdhery et al. 2022,
        arXiv:2204.02311).

        Attention is counted whole, as there. With ``flash`` half of it is skipped, so that beyond
        some ``12 * dim`` tokens, more than any model of :func:`model_names` takes, this can pass 1.
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
        """Bytes by pipeline rank and kind, of the first data- and tensor-parallel rank, which holds most."""
        return tuple(
            self.memory(rank * self.layout.n_data * self.layout.tp)
            for rank in range(self.layout.pp)
        )

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
        return memory_of_rank(self._run, m, rank, self._peaks)

    def gains(self) -> dict[str, float]:
        """Return for twice of each resource the share of a sequence's time that is left; 1 is no gain."""
        gpu, cluster = self.cluster.gpu, self.cluster
        intra = float(cluster.intra_bandwidth or 0)
        faster = replace(gpu, peak=2 * gpu.peak, peak_32=2 * gpu.peak_of(4))
        doubled = {
            "peak": replace(cluster, gpu=faster),
            "memory bandwidth": replace(
                cluster, gpu=replace(gpu, memory_bandwidth=2 * gpu.memory_bandwidth)
            ),
            "links inside nodes": replace(cluster, intra_bandwidth=2 * intra),
            "links between nodes": replace(cluster, inter_bandwidth=2 * cluster.inter_bandwidth),
        }
        asked = self.model, self.layout
        found = {
            name: (
                predict(*asked, other, self.global_batch, self.seq_len, self.constants).step_s
                / self.step_s
            )
            for name, other in doubled.items()
        }
        twice = predict(*asked, cluster, 2 * self.global_batch, self.seq_len, self.constants)
        return found | {"global batch": twice.step_s / (2 * self.step_s)}

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
    optimizer are added on the rank that ends last, minus what overlaps. As ``layout.reduces`` says,
    reductions run beside the last backward; or each begins when the last backward of its stage
    ends, and the rank waits for it.

    Args:
        global_batch: sequences of all ranks together.
        seq_len: tokens in a sequence.
        constants: those fitted on the Megatron table unless given.
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
    # With ``reshard`` each backward waits for parameters that come too late. Each forward frees a
    # group, so the next action gathers it; a backward leaves it gathered for the next forward.
    late = [0.0] * len(times)
    if layout.frees_after_forward:
        both = zip(gathers, times, strict=True)
        late = [_exposed(layout, g, t.input_grad + t.weight_grad) for g, t in both]
    costs = Costs(
        forward=tuple(t.forward for t in times),
        input_grad=tuple(t.input_grad + x for t, x in zip(times, late, strict=True)),
        weight_grad=tuple(t.weight_grad for t in times),
        latency=hops or 0.0,
    )
    timeline = simulate(layout.order(m), costs)
    by_rank = _parts(run, timeline, times, hops)
    parts = max(by_rank, key=lambda each: sum(each.values()))
    step_s = sum(parts.values())
    by_rank = tuple(
        {**each, "bubble": each["bubble"] + step_s - sum(each.values())} for each in by_rank
    )
    return Prediction(
        model=model,
        layout=layout,
        cluster=cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        constants=run.constants,
        step_s=step_s,
        parts=parts,
        parts_by_rank=by_rank,
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
    found = []
    for rank, row in enumerate(timeline.by_rank):
        held = run.layout.stages(run.model, rank)
        # A stage counts once a microbatch, which is what it runs forward.
        here = [times[part.stage] for span in row for part in span.action.parts if part.kind == "F"]
        work = sum(t.forward + t.input_grad + t.weight_grad for t in here)
        tensor = sum(t.tensor for t in here)
        again = sum(t.recomputed for t in here)
        exchange = sum(t.exchange for t in here)
        waits_again = sum(t.waits_again for t in here)
        busy = float(timeline.busy[rank])
        idle = float(row[-1].end) - busy
        ramps = min(idle, 2.0 * sum(hops[: len(timeline.by_rank) - 1]))
        parts = {
            "compute": work - tensor - exchange - again + waits_again,
            "recompute": again - waits_again,
            "tensor": tensor,
            "expert exchange": exchange,
            "bubble": idle - ramps,
            "point-to-point": ramps,
            "data": _data(run, held, times, timeline, rank) + busy - work,
            "optimizer": optimizer_time(run, held),
        }
        found.append(parts)
    return tuple(found)


def _data(
    run: Run, held: list[StagePlan], times: list[StageTime], timeline: Timeline, rank: int
) -> float:
    """Return the seconds that a rank waits for data-parallel traffic beside what each backward gathers."""
    layout = run.layout
    gathered, reduced = data_parallel_times(run, held)
    first = sum(times[s.index].forward for s in held)
    last = sum(times[s.index].input_grad + times[s.index].weight_grad for s in held)
    waited = _exposed(layout, gathered, first)
    if not layout.overlap:
        return waited + reduced
    if layout.reduces_in_backward(timeline.n_microbatches):
        # Where forward frees parameters, the links gather for the same backward.
        return waited + _exposed(
            layout, reduced, max(0.0, last - gathered * layout.frees_after_forward)
        )
    each = {stage.index: data_parallel_times(run, [stage])[1] for stage in held}
    row = timeline.by_rank[rank]
    return waited + _reduced_at(row, each) - float(row[-1].end)


def _reduced_at(row: Sequence[Span], seconds: Mapping[int, float]) -> float:
    """Return when a rank is done if it waits for each stage's reduction once the stage's last backward has ended."""
    ends = {part.stage: i for i, span in enumerate(row) for part in span.action.parts}
    after = {
        i: sum(seconds[stage] for stage, at in ends.items() if at == i) for i in set(ends.values())
    }
    clock = 0.0
    for i, span in enumerate(row):
        clock = max(clock, float(span.start)) + float(span.end - span.start) + after.get(i, 0.0)
    return clock


def _exposed(layout: Layout, traffic: float, beside: float) -> float:
    return beyond(traffic, beside) if layout.overlap else traffic


_ROUNDING = 1e-9
"""Of the larger of two values: what they may differ by and be called equal."""


@checked
def explain(first: Prediction, second: Prediction) -> str:
    """Compare two predictions line by line: what was asked where it differs, where the time goes,
    what is held.

    Times are means over pipeline ranks, as :func:`causes` takes them. The last line is the reason
    in one sentence.
    """
    rows: list[tuple[str, ...]] = [("", str(first.layout), str(second.layout), "second − first")]
    rows += [(name, a, b) for name, a, b in _asked(first, second)]
    largest = max(first.step_s, second.step_s)
    rows.append(_row("step, s", first.step_s, second.step_s, largest))
    ours, theirs = _shares(first), _shares(second)
    rows += [
        _row(f"  {part}", ours[part], theirs[part], largest)
        for part in ours
        if max(ours[part], theirs[part]) > _ROUNDING * largest
    ]
    rows.append(
        (
            "MFU",
            f"{first.mfu:.1%}",
            f"{second.mfu:.1%}",
            f"{_less(first.mfu, second.mfu, 1.0):+.1%}",
        )
    )
    fullest = [
        max(each.peak_memory, key=lambda kinds: sum(kinds.values())) for each in (first, second)
    ]
    totals = [sum(kinds.values()) / 1e9 for kinds in fullest]
    rows.append(_row("memory, GB", totals[0], totals[1], max(totals)))
    rows += [
        _row(f"  {kind}", n / 1e9, fullest[1][kind] / 1e9, max(totals))
        for kind, n in fullest[0].items()
    ]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(4)]
    lines = [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
    if not _less(first.step_s, second.step_s, largest):
        last = "Both take the same time."
    elif first.step_s < second.step_s:
        last = f"The first is faster: {reason(first, second)}"
    else:
        last = f"The second is faster: {reason(second, first)}"
    return "\n".join([*lines, last])


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
    told = {
        "pp",
        "tp",
        "dp_shard",
        "dp_replicate",
        "ep",
        "schedule",
        "n_chunks",
        "microbatch_size",
        "ac",
    }
    unsaid = (each for each in _differing(quicker.layout, slower.layout) if each[0] not in told)
    what += [f"{name}={a}, not {b}" for name, a, b in unsaid]
    less = slower.step_s - quicker.step_s
    because = mainly(causes(quicker, slower), "s")
    return f"{', '.join(what)}: {less:.3g} of {slower.step_s:.3g} s less, {because}."


def causes(quicker: Prediction, slower: Prediction) -> list[tuple[float, str]]:
    """Return what makes one prediction quicker: seconds that it saves, negative where it takes
    more, and their cause.

    Each is a mean over pipeline ranks. All named together are the difference of the steps, give or
    take a quarter.
    """
    ours, theirs = _shares(quicker), _shares(slower)
    saved = {part: theirs[part] - ours[part] for part in ours}
    found = []
    for seconds, part in largest_terms(saved):
        ranks = f" ({_uneven_ranks(slower if seconds > 0 else quicker)})" if part == _UNEVEN else ""
        found.append((seconds, part + ranks))
    return found


def largest_terms(terms: Mapping[str, float]) -> list[tuple[float, str]]:
    """Return the largest terms of a sum: first those above zero, then those below.

    Of either, those left out are together at most a quarter of the sum.
    """
    found: list[tuple[float, str]] = []
    for sign in (1, -1):
        left = {name: abs(term) for name, term in terms.items() if sign * term > 0}
        while sum(left.values()) > abs(sum(terms.values())) / 4:
            name = max(left, key=lambda each: left[each])
            found.append((sign * left.pop(name), name))
    return found


def mainly(found: Sequence[tuple[float, str]], unit: str) -> str:
    """Return in words what :func:`largest_terms` found, of what is less."""
    saved = _listed(
        [f"{n:.3g} {unit} of {_IN_WORDS.get(what, what)}" for n, what in found if n > 0]
    )
    paid = _listed(
        [f"{-n:.3g} {unit} more of {_IN_WORDS.get(what, what)}" for n, what in found if n < 0]
    )
    return f"mainly {saved}, but {paid}" if paid else f"mainly {saved}"


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

    A rank waits for the busiest as long as that one works longer: for uneven stages. The bubble is
    the rest, in which the busiest rank waits too.
    """
    ranks, busy = prediction.parts_by_rank, [float(each) for each in prediction.timeline.busy]
    mean = {part: sum(each[part] for each in ranks) / len(ranks) for part in PARTS}
    uneven = min(max(busy) - sum(busy) / len(busy), mean["bubble"])
    return {**mean, "bubble": mean["bubble"] - uneven, _UNEVEN: uneven}


def _uneven_ranks(prediction: Prediction) -> str:
    """Return how long the busiest rank works and the idlest, and what the busiest holds more of."""
    busy = [float(each) for each in prediction.timeline.busy]
    most, least = busy.index(max(busy)), busy.index(min(busy))
    ours, theirs = (prediction.layout.stages(prediction.model, rank) for rank in (most, least))
    more = ["the head"] if any(stage.is_last for stage in ours) else []
    for name, kind in (("n_layers", "layers"), ("n_sparse", "layers of experts")):
        a, b = (sum(getattr(stage, name) for stage in stages) for stages in (ours, theirs))
        if a > b:
            more.append(f"{a} {kind} to {b}")
    holding = f", with {_listed(more)}," if more else ""
    return (
        f"pipeline rank {most}{holding} is busy for {max(busy):.3g} s, rank {least} for"
        f" {min(busy):.3g} s, a rank on average for {sum(busy) / len(busy):.3g} s"
    )


def _asked(first: Prediction, second: Prediction) -> Iterator[tuple[str, str, str]]:
    """Yield what two predictions were asked for, where it differs."""
    if first.model != second.model:
        yield "model", _model(first.model), _model(second.model)
    if first.cluster != second.cluster:
        a, b = (
            f"{c.n_nodes}x{c.gpus_per_node}x{c.gpu.name}" for c in (first.cluster, second.cluster)
        )
        yield "cluster", a, b
        for name in ("intra_bandwidth", "inter_bandwidth", "latency"):
            x, y = getattr(first.cluster, name), getattr(second.cluster, name)
            if x != y:
                yield f"  {name}", f"{x:.4g}", f"{y:.4g}"
        if first.cluster.gpu.name == second.cluster.gpu.name:
            yield from (
                (f"  {n}", x, y) for n, x, y in _differing(first.cluster.gpu, second.cluster.gpu)
            )
    for name in ("global_batch", "seq_len"):
        x, y = getattr(first, name), getattr(second, name)
        if x != y:
            yield name, f"{x:,}", f"{y:,}"
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


def _row(name: str, a: float, b: float, largest: float) -> tuple[str, ...]:
    """Return a line of two values; what is rounding beside ``largest`` is 0."""
    a, b = (0.0 if abs(each) <= _ROUNDING * largest else each for each in (a, b))
    return name, f"{a:.4g}", f"{b:.4g}", f"{_less(a, b, largest):+.4g}"


def _less(a: float, b: float, largest: float) -> float:
    return 0.0 if abs(b - a) <= _ROUNDING * largest else b - a
