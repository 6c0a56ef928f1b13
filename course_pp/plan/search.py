"""The fastest layouts that fit: those that the stack takes, ranked in closed form, the best simulated."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

from course_pp.base.arguments import checked, refuse_unless
from course_pp.base.shapes import cut_by_tp
from course_pp.base.sizes import ModelConfig
from course_pp.plan.cluster import Cluster
from course_pp.plan.layout import Layout, check_ep
from course_pp.plan.memory import memory_of_rank
from course_pp.plan.prediction import (
    USABLE_MEMORY,
    Prediction,
    check_seq_len,
    largest_terms,
    mainly,
    predict,
    reason,
)
from course_pp.plan.run import Constants, Run, Work
from course_pp.plan.timing import beyond, data_parallel_times, optimizer_time, stage_time, transfers

_CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


def meshes(model: ModelConfig, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """(pp, tp, data ranks) that take all GPUs: tensor parallelism stays inside a node, whole layers make stages."""
    n = cluster.n_gpus
    heads = math.gcd(*cut_by_tp(model).values(), cluster.gpus_per_node)
    for tp in (t for t in _divisors(heads) if n % t == 0):
        for pp in (p for p in _divisors(n // tp) if p <= model.n_layers):
            yield pp, tp, n // tp // pp


def layouts(
    model: ModelConfig,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    like: Layout,
    *,
    small: bool = False,
) -> Iterator[Layout]:
    """Return the layouts that the stack does not refuse; if ``small``, of each mesh those that hold least."""
    plain = like.with_(schedule="1f1b", n_chunks=None, dp_shard=1, ep=1)
    for pp, tp, n_data in meshes(model, cluster):
        if global_batch % n_data or (
            plain.with_(pp=pp, tp=tp).splits_sequence(model) and seq_len % tp
        ):
            continue
        each = global_batch // n_data
        for size in (1,) if small else (b for b in (1, 2, 4, 8, 16) if each % b == 0):
            found = _variants(model, cluster, like, (pp, tp, n_data), size, each // size)
            yield from (f for f in found if not small or (f.dp_replicate == 1 and not f.n_chunks))


def _variants(
    model: ModelConfig,
    cluster: Cluster,
    like: Layout,
    mesh: tuple[int, int, int],
    size: int,
    m: int,
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


# a search asks for the same layouts again, on a cluster with other links or less memory
@lru_cache(maxsize=20_000)
def quick_memory(work: Work, global_batch: int) -> float:
    """Return the bytes of the first or the last pipeline rank, whichever is fuller; in closed form."""
    layout = work.layout
    m = layout.n_microbatches(global_batch)
    ranks = {0, (layout.pp - 1) * layout.n_data * layout.tp}
    return max(sum(memory_of_rank(work, m, rank, None).values()) for rank in ranks)


def quick_time(run: Run, global_batch: int) -> float:
    """Return the seconds of a step: the slowest rank's steady state, the ramp, and what data parallelism exposes."""
    layout, pp = run.layout, run.layout.pp
    m = layout.n_microbatches(global_batch)
    held = layout.stages(run.model, 0), layout.stages(run.model, pp - 1)
    busy = []
    for stages in held:
        times = [stage_time(run, stage) for stage in stages]
        busy.append(sum(t.forward + t.input_grad + t.weight_grad for t in times))
    gathered, reduced = data_parallel_times(run, held[0])
    data = beyond(gathered, busy[0] / 3)
    if layout.frees_after_forward:
        data += m * beyond(gathered, busy[0] * 2 / 3)
    data += beyond(reduced, busy[0] * 2 / 3) if layout.reduces_in_backward(m) else reduced
    hops = 2 * sum(transfers(run)[: pp - 1])
    ramp = (pp - 1) * busy[0] / len(held[0])
    return m * max(busy) + ramp + hops + data + optimizer_time(run, held[0])


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


_SIMULATED = 10  # the closed form may rank the fastest lower than first
_MOST_NODES = 512  # of a cluster that is looked for where nothing fits


@dataclass(frozen=True)
class _Asked:
    """What :func:`plan` is asked for."""

    model: ModelConfig
    cluster: Cluster
    global_batch: int
    seq_len: int
    constants: Constants
    like: Layout
    ep: int | None

    def layouts(self, *, small: bool = False) -> list[Layout]:
        found = layouts(
            self.model, self.cluster, self.global_batch, self.seq_len, self.like, small=small
        )
        return [each for each in found if self.ep in (None, each.ep)]

    def bytes_of(self, layout: Layout) -> float:
        return quick_memory(Work(self.model, layout, self.seq_len), self.global_batch)

    def seconds_of(self, layout: Layout) -> float:
        """Return the seconds of a step in closed form, by which candidates are ranked."""
        run = Run(self.model, layout, self.seq_len, self.cluster, self.constants)
        return quick_time(run, self.global_batch)

    def predict(self, layout: Layout) -> Prediction:
        return predict(
            self.model, layout, self.cluster, self.global_batch, self.seq_len, self.constants
        )

    def fastest(self, found: list[Layout], n_best: int) -> tuple[list[Prediction], float]:
        """Return the best that fit, best first, and the fewest bytes of those that were simulated."""
        budget = self.cluster.gpu.memory * USABLE_MEMORY
        found = [each for each in found if self.bytes_of(each) <= budget]
        times = [self.seconds_of(each) for each in found]
        best: list[Prediction] = []
        least = math.inf
        for i in sorted(range(len(found)), key=times.__getitem__):
            prediction = self.predict(found[i])
            least = min(least, max(prediction.total_memory))
            if prediction.fits:
                best.append(prediction)
            if len(best) == max(n_best, _SIMULATED):
                break
        return sorted(best, key=lambda each: each.step_s)[:n_best], least


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
        n_best: how many to return; of those that the closed form ranks first, at least 10 are
            simulated.
        precision: as :class:`Layout` takes it; None for that of ``like``.
        like: a layout whose other settings, such as ``flash``, ``overlap`` or ``reshard``, all
            candidates share; its sizes, schedule and checkpointing are ignored. None takes
            :class:`Layout`'s defaults.
        ep: how many ranks share a layer's experts; None tries all numbers.

    Raises:
        ValueError: if none fits: says by how many bytes the smallest does not, and on how many
            nodes it would.
    """
    refuse_unless(1 <= n_best <= 1000, "plan", "n_best", n_best, "give 1 to 1000")
    check_seq_len(model, seq_len)
    refuse_unless(
        global_batch >= 1, "plan", "global_batch", global_batch, "give at least 1 sequence"
    )
    if ep is not None:
        check_ep(model, ep, cluster.n_gpus)
    constants, like = constants or Constants(), like or Layout()
    like = like if precision is None else like.with_(precision=precision)
    asked = _Asked(model, cluster, global_batch, seq_len, constants, like, ep)
    found = asked.layouts()
    if not found:
        raise ValueError(_why_no_mesh(model, cluster, global_batch, seq_len, ep))
    best, least = asked.fastest(found, n_best)
    if not best:  # where something was simulated, the closed form was too kind to it
        raise ValueError(
            _why_none(asked, least if least < math.inf else min(map(asked.bytes_of, found)))
        )
    return best


def _why_no_mesh(
    model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int, ep: int | None
) -> str:
    sizes = [(n_data, tp) for _, tp, n_data in meshes(model, cluster)]
    fitting = sorted({tp for n_data, tp in sizes if global_batch % n_data == 0})
    if (
        ep is not None
        and ep > 1
        and not any(global_batch % n == 0 and n % ep == 0 for n, _ in sizes)
    ):
        return (
            f"ep={ep}: none of the possible numbers of data ranks on {cluster.n_gpus} GPUs is a"
            f" multiple of it and divides global_batch={global_batch}: make that a multiple of"
            f" {ep}, or lower ep"
        )
    if fitting:  # norms share the sequence
        tp = fitting[0]
        return (
            f"seq_len={seq_len}: global_batch={global_batch} on {cluster.n_gpus} GPUs needs"
            f" tp={tp}, whose norms share the sequence: pad it to {-(-seq_len // tp) * tp}, or"
            " change the batch"
        )
    n_data, tp = min(sizes)
    return (
        f"global_batch={global_batch} on {cluster.n_gpus} GPUs: with at most {model.n_layers}"
        f" stages and tp={tp} there are {n_data} data ranks or more, and no possible number of them"
        f" divides the batch: make it a multiple of {n_data}, or change the number of GPUs"
    )


def _why_none(asked: _Asked, least: float) -> str:
    cluster, global_batch = asked.cluster, asked.global_batch
    budget = cluster.gpu.memory * USABLE_MEMORY
    missing = (
        f"no layout fits seq_len={asked.seq_len}: the smallest needs {least:,.0f} bytes a GPU, "
    )
    missing += f"{least - budget:,.0f} too many"
    larger = [
        (n, global_batch)
        for n in range(cluster.n_nodes + 1, max(_MOST_NODES, 4 * cluster.n_nodes) + 1)
    ]
    # more ranks to share sequences
    larger += [(cluster.n_nodes * 2**k, global_batch * 2**k) for k in range(1, 10)]
    for n_nodes, batch in larger:
        if _one_fits(replace(asked, cluster=replace(cluster, n_nodes=n_nodes), global_batch=batch)):
            and_batch = "" if batch == global_batch else f" and global_batch={batch}"
            return (
                f"{missing}; take {n_nodes} nodes of {cluster.gpus_per_node}{and_batch}, where one"
                " fits"
            )
    return (
        f"{missing}, and no larger cluster helps: shorten the sequences, or take GPUs with more"
        " memory"
    )


def _one_fits(asked: _Asked) -> bool:
    layout = min(asked.layouts(small=True), key=asked.bytes_of, default=None)
    budget = asked.cluster.gpu.memory * USABLE_MEMORY
    return layout is not None and asked.bytes_of(layout) <= budget and asked.predict(layout).fits


_CHANGES: dict[str, Callable[[Cluster, int], Cluster]] = {
    "{} times the nodes": lambda c, n: replace(c, n_nodes=c.n_nodes * n),
    "1/{} of the bandwidth between nodes": lambda c, n: replace(
        c, inter_bandwidth=c.inter_bandwidth / n
    ),
    "1/{} of the memory of a GPU": lambda c, n: replace(
        c, gpu=replace(c.gpu, memory=c.gpu.memory / n)
    ),
}
_FACTORS = (2, 4, 8, 16)


def why_no_pipeline(best: Prediction, ep: int | None = None) -> str:
    """Return why a layout without a pipeline is the fastest, and by which change of the cluster one
    with it would be.

    The best one with a pipeline is compared with it: in time; in memory where none fits.

    Args:
        best: what :func:`plan` returned first.
        ep: as :func:`plan` got it.
    """
    asked = _Asked(
        best.model, best.cluster, best.global_batch, best.seq_len, best.constants, best.layout, ep
    )
    held = asked.layouts()
    cut = [each for each in held if each.pp > 1]
    fitting, _ = asked.fastest(cut, 1)
    if fitting and fitting[0].step_s <= best.step_s:
        return f"A pipeline is no slower: {fitting[0]}."
    if fitting:
        why = reason(best, fitting[0])
    elif cut:
        why = _why_too_large(best, asked.predict(min(cut, key=asked.bytes_of)))
    else:
        why = (
            f"no number of stages from 2 to n_layers={best.model.n_layers} divides"
            f" n_gpus={best.cluster.n_gpus} and "
        )
        why += (
            "leaves data ranks that divide"
            f" global_batch={best.global_batch}{f', in groups of {ep=}' if ep else ''}."
        )
    for n in _FACTORS:
        found = [
            words.format(n)
            for words, change in _CHANGES.items()
            if _pipeline_wins(asked, held, change, n)
        ]
        if found:
            return f"No pipeline: {why} A pipeline would be fastest with {' or with '.join(found)}."
    *some, last = (words.format(n) for words in _CHANGES)
    return f"No pipeline: {why} Nor would one be fastest with {', '.join(some)} or {last}."


def _why_too_large(best: Prediction, smallest: Prediction) -> str:
    ours, its = (
        max(each.peak_memory, key=lambda kinds: sum(kinds.values())) for each in (best, smallest)
    )
    more = largest_terms({kind: (its[kind] - ours[kind]) / 1e9 for kind in its})
    return (
        f"none fits. The smallest, {smallest.layout}, takes {max(smallest.total_memory) / 1e9:.3g}"
        f" GB of the {smallest.budget / 1e9:.3g} that a GPU can give. {best.layout} takes"
        f" {(sum(its.values()) - sum(ours.values())) / 1e9:.3g} GB less, {mainly(more, 'GB')}."
    )


def _pipeline_wins(
    asked: _Asked, held: list[Layout], change: Callable[[Cluster, int], Cluster], n: int
) -> bool:
    asked, before = replace(asked, cluster=change(asked.cluster, n)), asked.cluster
    if asked.cluster.n_gpus != before.n_gpus:
        held = asked.layouts()
    found, _ = asked.fastest(held, 1)
    return bool(found) and found[0].layout.pp > 1
