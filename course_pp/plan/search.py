"""Find the layouts that fit, fastest first, and compare two of them line by line.

Every mesh of the sizes that divide is tried with a few schedules, microbatches and kinds of checkpointing. A closed
form ranks them in microseconds each; only the best are simulated.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Literal

from course_pp.arguments import checked, refuse_unless
from course_pp.plan.cluster import Cluster
from course_pp.plan.layout import Layout
from course_pp.plan.memory import memory_of_rank
from course_pp.plan.prediction import PARTS, USABLE_MEMORY, Prediction, check_seq_len, predict
from course_pp.plan.timing import Constants, data_parallel_times, optimizer_time, stage_time, transfers
from course_pp.sizes import ModelConfig

__all__ = ["explain", "plan"]

_CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


@checked
def plan(
    model: ModelConfig,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    n_best: int = 10,
    precision: str = "mixed",
    constants: Constants | None = None,
) -> list[Prediction]:
    """The fastest layouts that fit, best first.

    Args:
        global_batch: sequences of all ranks together.
        n_best: how many to simulate and return.
        precision: as :class:`Layout` takes it.

    Raises:
        ValueError: if none fits: says by how many bytes the smallest does not, and on how many nodes it would.
    """
    refuse_unless(1 <= n_best <= 1000, "plan", "n_best", n_best, "give 1 to 1000")
    check_seq_len(model, seq_len)
    refuse_unless(global_batch >= 1, "plan", "global_batch", global_batch, "give at least 1 sequence")
    constants = constants or Constants()
    budget = cluster.gpu.memory * USABLE_MEMORY
    ranked: list[tuple[float, int, Layout]] = []
    least = math.inf
    for layout in _layouts(model, cluster, global_batch, seq_len, precision):
        held = _quick_memory(model, layout, global_batch, seq_len)
        least = min(least, held)
        if held <= budget:
            ranked.append((_quick_time(model, layout, cluster, constants, global_batch, seq_len), len(ranked), layout))
    if not ranked:
        raise ValueError(_why_none(model, cluster, global_batch, seq_len, precision, least, budget))
    best: list[Prediction] = []
    least = math.inf
    for _, _, layout in sorted(ranked):
        prediction = predict(model, layout, cluster, global_batch, seq_len, constants)
        least = min(least, max(prediction.total_memory))
        if prediction.fits:
            best.append(prediction)
        if len(best) == n_best:
            break
    if not best:  # the closed form was too kind to all of them
        raise ValueError(_why_none(model, cluster, global_batch, seq_len, precision, least, budget))
    return sorted(best, key=lambda each: each.step_s)


@checked
def explain(first: Prediction, second: Prediction) -> str:
    """Compare two predictions line by line: where the time goes, what is held, and where they differ most."""
    rows: list[tuple[str, ...]] = [("", str(first.layout), str(second.layout), "second − first")]
    rows += [("step, s", f"{first.step_s:.4g}", f"{second.step_s:.4g}", f"{second.step_s - first.step_s:+.4g}")]
    for part in PARTS:
        a, b = first.parts[part], second.parts[part]
        if a or b:
            rows.append((f"  {part}", f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}"))
    rows.append(("MFU", f"{first.mfu:.1%}", f"{second.mfu:.1%}", f"{second.mfu - first.mfu:+.1%}"))
    fullest = [max(each.peak_memory, key=lambda kinds: sum(kinds.values())) for each in (first, second)]
    totals = [sum(kinds.values()) for kinds in fullest]
    rows.append(("memory, GB", *(f"{t / 1e9:.4g}" for t in totals), f"{(totals[1] - totals[0]) / 1e9:+.4g}"))
    for kind in fullest[0]:
        a, b = (kinds[kind] / 1e9 for kinds in fullest)
        rows.append((f"  {kind}", f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    part = max(PARTS, key=lambda name: abs(second.parts[name] - first.parts[name]))
    if first.step_s == second.step_s:
        return "\n".join([*lines, "Both take the same time."])
    quicker = "first" if first.step_s < second.step_s else "second"
    return "\n".join([*lines, f"The {quicker} is faster; they differ most in {part}."])


def _layouts(model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int, precision: str) -> Iterator[Layout]:
    """Everything that divides: tensor parallelism stays inside a node, whole layers make stages."""
    n = cluster.n_gpus
    heads = math.gcd(model.n_heads, model.kv_heads, model.hidden_dim, cluster.gpus_per_node)
    for tp in _divisors(heads):
        for pp in (p for p in _divisors(n // tp) if p <= model.n_layers):
            n_data = n // tp // pp
            if global_batch % n_data or (Layout(pp, tp).splits_sequence(model) and seq_len % tp):
                continue
            for size in (b for b in (1, 2, 4, 8, 16) if global_batch // n_data % b == 0):
                yield from _variants(model, cluster, precision, (pp, tp, n_data), size, global_batch // n_data // size)


def _variants(
    model: ModelConfig, cluster: Cluster, precision: str, mesh: tuple[int, int, int], size: int, m: int
) -> Iterator[Layout]:
    pp, tp, n_data = mesh
    orders: list[tuple[str, int | None]] = [("1f1b", None)]
    if pp > 1 and m % pp == 0:
        orders += [("interleaved_1f1b", v) for v in (2, 3, 4) if pp * v <= model.n_layers]
    # Shards over all data ranks, over those near by, or none.
    near = min(n_data, max(1, cluster.gpus_per_node * 8 // tp))
    shards = sorted({s for s in (1, near, n_data) if n_data % s == 0}, reverse=True)
    for (name, v), shard, ac in product(orders, shards, _CHECKPOINTING):
        yield Layout(pp, tp, shard, n_data // shard, name, v, size, ac=ac, precision=precision)


def _quick_memory(model: ModelConfig, layout: Layout, global_batch: int, seq_len: int) -> float:
    """Of the first and the last pipeline rank, the fuller; in closed form."""
    m = layout.n_microbatches(global_batch)
    ranks = {0, (layout.pp - 1) * layout.n_data * layout.tp}
    return max(sum(memory_of_rank(model, layout, seq_len, m, rank, None).values()) for rank in ranks)


def _quick_time(
    model: ModelConfig, layout: Layout, cluster: Cluster, constants: Constants, global_batch: int, seq_len: int
) -> float:
    """The steady state of the slowest rank, the ramp, and what data parallelism exposes."""
    m, pp = layout.n_microbatches(global_batch), layout.pp
    held = layout.stages(model, 0), layout.stages(model, pp - 1)
    work = []
    for stages in held:
        times = [stage_time(model, layout, cluster, constants, seq_len, stage) for stage in stages]
        work.append(sum(t.forward + t.input_grad + t.weight_grad for t in times))
    gathered, reduced = data_parallel_times(layout, cluster, constants, held[0])
    data = max(0.1 * gathered, gathered - work[0] / 3)
    if layout.frees_after_forward:
        data += m * max(0.1 * gathered, gathered - work[0] * 2 / 3)
    data += max(0.1 * reduced, reduced - work[0] * 2 / 3) if layout.reduces_in_backward(m) else reduced
    hops = 2 * sum(transfers(model, layout, cluster, constants, seq_len)[: pp - 1])
    ramp = (pp - 1) * work[0] / len(held[0])
    return m * max(work) + ramp + hops + data + optimizer_time(layout, cluster, held[0])


def _why_none(
    model: ModelConfig,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    precision: str,
    least: float,
    budget: float,
) -> str:
    if least == math.inf:
        return f"global_batch={global_batch} on {cluster.n_gpus} GPUs: no number of data ranks divides it: change one"
    missing = f"no layout fits seq_len={seq_len}: the smallest needs {least:,.0f} bytes a GPU, "
    missing += f"{least - budget:,.0f} too many"
    for doublings in range(1, 12):
        n_nodes = cluster.n_nodes * 2**doublings
        larger = Cluster(n_nodes, cluster.gpus_per_node, cluster.gpu, cluster.intra_bandwidth, cluster.inter_bandwidth)
        layouts = _layouts(model, larger, global_batch, seq_len, precision)
        if any(_quick_memory(model, layout, global_batch, seq_len) <= budget for layout in layouts):
            return f"{missing}; take {n_nodes} nodes of {cluster.gpus_per_node}, where one fits"
    return f"{missing}, and no larger cluster helps: shorten the sequences, or take GPUs with more memory"


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
