"""The fastest layouts that fit: those that the stack takes, ranked in closed form, the best simulated."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

from course_pp.arguments import checked, refuse_unless
from course_pp.plan.cluster import Cluster
from course_pp.plan.layout import Layout, check_ep, cut_by_tp
from course_pp.plan.memory import memory_of_rank
from course_pp.plan.prediction import USABLE_MEMORY, Prediction, check_seq_len, predict
from course_pp.plan.timing import Constants, beyond, data_parallel_times, optimizer_time, stage_time, transfers
from course_pp.sizes import ModelConfig

_CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


def meshes(model: ModelConfig, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """(pp, tp, data ranks) that take all GPUs: tensor parallelism stays inside a node, whole layers make stages."""
    n = cluster.n_gpus
    heads = math.gcd(*cut_by_tp(model).values(), cluster.gpus_per_node)
    for tp in (t for t in _divisors(heads) if n % t == 0):
        for pp in (p for p in _divisors(n // tp) if p <= model.n_layers):
            yield pp, tp, n // tp // pp


def layouts(
    model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int, like: Layout, *, small: bool = False
) -> Iterator[Layout]:
    """Return the layouts that the stack does not refuse; if ``small``, of each mesh those that hold least."""
    plain = like.with_(schedule="1f1b", n_chunks=None, dp_shard=1, ep=1)
    for pp, tp, n_data in meshes(model, cluster):
        if global_batch % n_data or (plain.with_(pp=pp, tp=tp).splits_sequence(model) and seq_len % tp):
            continue
        each = global_batch // n_data
        for size in (1,) if small else (b for b in (1, 2, 4, 8, 16) if each % b == 0):
            found = _variants(model, cluster, like, (pp, tp, n_data), size, each // size)
            yield from (f for f in found if not small or (f.dp_replicate == 1 and not f.n_chunks))


def _variants(
    model: ModelConfig, cluster: Cluster, like: Layout, mesh: tuple[int, int, int], size: int, m: int
) -> Iterator[Layout]:
    pp, tp, n_data = mesh
    # With fewer microbatches than stages 1F1B's order is nearly GPipe's, so only GPipe is tried.
    orders: list[tuple[str, int | None]] = [("1f1b" if pp == 1 or m >= pp else "gpipe", None)]
    if pp > 1 and m % pp == 0:
        orders += [("interleaved_1f1b", v) for v in (2, 3, 4) if pp * v <= model.n_layers]
    # Shards over all data ranks, over those near by, or none.
    near = min(n_data, max(1, cluster.gpus_per_node * 8 // tp))
    shards = sorted({s for s in (1, near, n_data) if n_data % s == 0}, reverse=True)
    shared = [(shard, ep) for shard in shards for ep in _expert_parallel(model, shard)]
    for (name, v), (shard, ep), ac in product(orders, shared, _CHECKPOINTING):
        yield like.with_(
            pp=pp,
            tp=tp,
            dp_shard=shard,
            dp_replicate=n_data // shard,
            ep=ep,
            schedule=name,
            n_chunks=v,
            microbatch_size=size,
            ac=ac,
        )


def _expert_parallel(model: ModelConfig, dp_shard: int) -> list[int]:
    """Return the numbers of ranks that may share experts."""
    columns = math.gcd(model.dim, model.expert_hidden_dim)
    found = _divisors(math.gcd(model.n_experts, dp_shard)) if model.n_experts else [1]
    return [ep for ep in found if ep == 1 or columns % (dp_shard // ep) == 0]


def quick_memory(model: ModelConfig, layout: Layout, global_batch: int, seq_len: int) -> float:
    """Return the bytes of the first or the last pipeline rank, whichever is fuller; in closed form."""
    m = layout.n_microbatches(global_batch)
    ranks = {0, (layout.pp - 1) * layout.n_data * layout.tp}
    return max(sum(memory_of_rank(model, layout, seq_len, m, rank, None).values()) for rank in ranks)


def quick_time(
    model: ModelConfig, layout: Layout, cluster: Cluster, constants: Constants, global_batch: int, seq_len: int
) -> float:
    """Return the seconds of a step: the slowest rank's steady state, the ramp, and what data parallelism exposes."""
    m, pp = layout.n_microbatches(global_batch), layout.pp
    held = layout.stages(model, 0), layout.stages(model, pp - 1)
    work = []
    for stages in held:
        times = [stage_time(model, layout, cluster, constants, seq_len, stage) for stage in stages]
        work.append(sum(t.forward + t.input_grad + t.weight_grad for t in times))
    gathered, reduced = data_parallel_times(layout, cluster, constants, held[0])
    data = beyond(gathered, work[0] / 3)
    if layout.frees_after_forward:
        data += m * beyond(gathered, work[0] * 2 / 3)
    data += beyond(reduced, work[0] * 2 / 3) if layout.reduces_in_backward(m) else reduced
    hops = 2 * sum(transfers(model, layout, cluster, constants, seq_len)[: pp - 1])
    ramp = (pp - 1) * work[0] / len(held[0])
    return m * max(work) + ramp + hops + data + optimizer_time(layout, cluster, held[0])


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


_MOST_NODES = 512  # of a cluster that is looked for where nothing fits


@checked
def plan(
    model: ModelConfig,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    n_best: int = 10,
    precision: str | None = None,
    constants: Constants | None = None,
    like: Layout | None = None,
    ep: int | None = None,
) -> list[Prediction]:
    """Return the fastest layouts that fit, best first.

    Layouts that :mod:`course_pp.parallel` refuses are left out.

    Args:
        global_batch: sequences of all ranks together.
        n_best: how many to simulate and return.
        precision: as :class:`Layout` takes it; None for that of ``like``.
        like: a layout whose other settings, such as ``flash``, ``overlap`` or ``reshard``, all candidates share; its
            sizes, schedule and checkpointing are ignored. None takes :class:`Layout`'s defaults.
        ep: how many ranks share a layer's experts; None tries all numbers.

    Raises:
        ValueError: if none fits: says by how many bytes the smallest does not, and on how many nodes it would.
    """
    refuse_unless(1 <= n_best <= 1000, "plan", "n_best", n_best, "give 1 to 1000")
    check_seq_len(model, seq_len)
    refuse_unless(global_batch >= 1, "plan", "global_batch", global_batch, "give at least 1 sequence")
    if ep is not None:
        check_ep(model, ep, cluster.n_gpus)
    constants, like = constants or Constants(), like or Layout()
    like = like if precision is None else like.with_(precision=precision)
    budget = cluster.gpu.memory * USABLE_MEMORY
    ranked: list[tuple[float, int, Layout]] = []
    least = math.inf
    for layout in layouts(model, cluster, global_batch, seq_len, like):
        if ep not in (None, layout.ep):
            continue
        held = quick_memory(model, layout, global_batch, seq_len)
        least = min(least, held)
        if held <= budget:
            ranked.append((quick_time(model, layout, cluster, constants, global_batch, seq_len), len(ranked), layout))
    if least == math.inf:
        raise ValueError(_why_no_mesh(model, cluster, global_batch, seq_len, ep))
    best: list[Prediction] = []
    exact = math.inf
    for _, _, layout in sorted(ranked):
        prediction = predict(model, layout, cluster, global_batch, seq_len, constants)
        exact = min(exact, max(prediction.total_memory))
        if prediction.fits:
            best.append(prediction)
        if len(best) == n_best:
            break
    if not best:  # where something was simulated, the closed form was too kind to it
        raise ValueError(_why_none(model, cluster, global_batch, seq_len, like, ep, exact if ranked else least))
    return sorted(best, key=lambda each: each.step_s)


def _why_no_mesh(model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int, ep: int | None) -> str:
    sizes = [(n_data, tp) for _, tp, n_data in meshes(model, cluster)]
    fitting = sorted({tp for n_data, tp in sizes if global_batch % n_data == 0})
    if ep is not None and ep > 1 and not any(global_batch % n == 0 and n % ep == 0 for n, _ in sizes):
        return (
            f"ep={ep}: none of the possible numbers of data ranks on {cluster.n_gpus} GPUs is a multiple of it and "
            f"divides global_batch={global_batch}: make that a multiple of {ep}, or lower ep"
        )
    if fitting:  # norms share the sequence
        tp = fitting[0]
        return (
            f"seq_len={seq_len}: global_batch={global_batch} on {cluster.n_gpus} GPUs needs tp={tp}, whose norms share "
            f"the sequence: pad it to {-(-seq_len // tp) * tp}, or change the batch"
        )
    n_data, tp = min(sizes)
    return (
        f"global_batch={global_batch} on {cluster.n_gpus} GPUs: with at most {model.n_layers} stages and tp={tp} there "
        f"are {n_data} data ranks or more, and no possible number of them divides the batch: make it a multiple of "
        f"{n_data}, or change the number of GPUs"
    )


def _why_none(
    model: ModelConfig,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    like: Layout,
    ep: int | None,
    least: float,
) -> str:
    budget = cluster.gpu.memory * USABLE_MEMORY
    missing = f"no layout fits seq_len={seq_len}: the smallest needs {least:,.0f} bytes a GPU, "
    missing += f"{least - budget:,.0f} too many"
    larger = [(n, global_batch) for n in range(cluster.n_nodes + 1, max(_MOST_NODES, 4 * cluster.n_nodes) + 1)]
    larger += [(cluster.n_nodes * 2**k, global_batch * 2**k) for k in range(1, 10)]  # more ranks to share sequences
    for n_nodes, batch in larger:
        if _one_fits(model, replace(cluster, n_nodes=n_nodes), batch, seq_len, like, ep):
            and_batch = "" if batch == global_batch else f" and global_batch={batch}"
            return f"{missing}; take {n_nodes} nodes of {cluster.gpus_per_node}{and_batch}, where one fits"
    return f"{missing}, and no larger cluster helps: shorten the sequences, or take GPUs with more memory"


def _one_fits(
    model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int, like: Layout, ep: int | None
) -> bool:
    found = [f for f in layouts(model, cluster, global_batch, seq_len, like, small=True) if ep in (None, f.ep)]
    held = [(quick_memory(model, each, global_batch, seq_len), i, each) for i, each in enumerate(found)]
    if not held or min(held)[0] > cluster.gpu.memory * USABLE_MEMORY:
        return False
    return predict(model, min(held)[2], cluster, global_batch, seq_len).fits
