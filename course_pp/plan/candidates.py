"""The layouts that a search tries, and closed forms that rank them in microseconds each."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Literal

from course_pp.plan.cluster import Cluster
from course_pp.plan.layout import Layout
from course_pp.plan.memory import memory_of_rank
from course_pp.plan.timing import Constants, beyond, data_parallel_times, optimizer_time, stage_time, transfers
from course_pp.sizes import ModelConfig

__all__ = ["layouts", "meshes", "quick_memory", "quick_time"]

_CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


def meshes(model: ModelConfig, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """(pp, tp, data ranks) that take all GPUs: tensor parallelism stays inside a node, whole layers make stages."""
    n = cluster.n_gpus
    heads = math.gcd(model.n_heads, model.kv_heads, model.hidden_dim, cluster.gpus_per_node)
    for tp in (t for t in _divisors(heads) if n % t == 0):
        for pp in (p for p in _divisors(n // tp) if p <= model.n_layers):
            yield pp, tp, n // tp // pp


def layouts(
    model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int, like: Layout, *, small: bool = False
) -> Iterator[Layout]:
    """Return the layouts whose sizes divide, and that the stack does not refuse.

    Args:
        small: of each mesh only those that hold least: one sequence a microbatch, sharded over all data ranks.
    """
    plain = like.with_(schedule="1f1b", n_chunks=None)
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
    for (name, v), shard, ac in product(orders, shards, _CHECKPOINTING):
        yield like.with_(
            pp=pp,
            tp=tp,
            dp_shard=shard,
            dp_replicate=n_data // shard,
            schedule=name,
            n_chunks=v,
            microbatch_size=size,
            ac=ac,
        )


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
