"""Search for the fastest layouts that fit: rank all in closed form, and simulate the best."""

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
    """Yield (pp, tp, data ranks) that take all GPUs.

    Tensor parallelism stays inside a node, and stages are whole layers.
    """
    n = cluster.n_gpus
    heads = math.gcd(*cut_by_tp(model).values(), cluster.gpus_per_node)
    for tp in _divisors(heads):
        if n % tp:
            continue
        for pp in _divisors(n // tp):
            if pp <= model.n_layers:
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
    """Yield the layouts that the stack does not refuse; if ``small``, the smallest of each mesh."""
    plain = like.with_(schedule="1f1b", n_chunks=None, dp_shard=1, ep=1)
    for pp, tp, n_data in meshes(model, cluster):
        splits_sequence = plain.with_(pp=pp, tp=tp).splits_sequence(model)
        if global_batch % n_data or (splits_sequence and seq_len % tp):
            continue
        each = global_batch // n_data
        for size in (1, 2, 4, 8, 16):
            if each % size or (small and size > 1):
                continue
            found = _variants(
                model, cluster, like=like, mesh=(pp, tp, n_data), size=size, m=each // size
            )
            for layout in found:
                # Shards over all data ranks, and one stage a rank, take the least memory.
                if not small or (layout.dp_replicate == 1 and not layout.n_chunks):
                    yield layout


def _variants(
    model: ModelConfig,
    cluster: Cluster,
    like: Layout,
    mesh: tuple[int, int, int],
    size: int,
    m: int,
) -> Iterator[Layout]:
    """Yield the layouts of one mesh and one size of microbatches."""
    pp, tp, n_data = mesh
    # With fewer microbatches than stages 1F1B's order is nearly GPipe's, so only GPipe is tried.
    orders: list[tuple[str, int | None]] = [("1f1b", None)]
    if m < pp:
        orders = [("gpipe", None)]
    if pp > 1 and m % pp == 0:
        for n_chunks in (2, 3, 4):
            if pp * n_chunks <= model.n_layers:
                orders.append(("interleaved_1f1b", n_chunks))
    # Shards over all data ranks, over the ranks of up to eight nodes, or none.
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
    """Return the numbers of ranks that may share experts. The others must divide their columns."""
    if not model.n_experts:
        return [1]
    columns = math.gcd(model.dim, model.expert_hidden_dim)
    found = _divisors(math.gcd(model.n_experts, dp_shard))
    return [ep for ep in found if ep == 1 or columns % (dp_shard // ep) == 0]


# A search asks for the same layouts again, on a cluster with other links or less memory.
@lru_cache(maxsize=20_000)
def quick_memory(work: Work, global_batch: int) -> float:
    """Return an upper bound of the bytes of the fuller of the first and last pipeline rank."""
    layout = work.layout
    m = layout.n_microbatches(global_batch)
    most = 0
    for rank in {0, (layout.pp - 1) * layout.n_data * layout.tp}:
        kinds = memory_of_rank(work, m, rank=rank, peaks=None)
        most = max(most, sum(kinds.values()))
    return most


def quick_time(run: Run, global_batch: int) -> float:
    """Return the seconds of a step in closed form.

    They are the slowest rank's steady state, the ramp, and the data-parallel traffic that no work
    hides.
    """
    layout = run.layout
    pp = run.layout.pp
    m = layout.n_microbatches(global_batch)
    held = layout.stages(run.model, 0), layout.stages(run.model, pp - 1)
    busy = []
    for stages in held:
        times = [stage_time(run, stage) for stage in stages]
        busy.append(sum(t.forward + t.input_grad + t.weight_grad for t in times))

    gathered, reduced = data_parallel_times(run, held[0])
    # A forward takes about a third of a microbatch, and its backward the rest.
    data = beyond(gathered, busy[0] / 3)
    if layout.frees_after_forward:
        data += m * beyond(gathered, busy[0] * 2 / 3)
    if layout.reduces_in_backward(m):
        data += beyond(reduced, busy[0] * 2 / 3)
    else:
        data += reduced
    hops = 2 * sum(transfers(run)[: pp - 1])
    ramp = (pp - 1) * busy[0] / len(held[0])
    return m * max(busy) + ramp + hops + data + optimizer_time(run, held[0])


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


_SIMULATED = 10  # more than one, because the closed form may rank the fastest lower than first
_MOST_NODES = 512  # of a larger cluster that is suggested where nothing fits


@dataclass(frozen=True)
class _Asked:
    """The arguments of :func:`plan`."""

    model: ModelConfig
    cluster: Cluster
    global_batch: int
    seq_len: int
    constants: Constants
    like: Layout
    ep: int | None

    def layouts(self, *, small: bool = False) -> list[Layout]:
        found = layouts(
            self.model,
            self.cluster,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            like=self.like,
            small=small,
        )
        return [each for each in found if self.ep in (None, each.ep)]

    def bytes_of(self, layout: Layout) -> float:
        return quick_memory(Work(self.model, layout, self.seq_len), self.global_batch)

    def seconds_of(self, layout: Layout) -> float:
        """Return the seconds of a step in closed form. Candidates are ranked by them."""
        run = Run(self.model, layout, self.seq_len, self.cluster, self.constants)
        return quick_time(run, self.global_batch)

    def predict(self, layout: Layout) -> Prediction:
        return predict(
            self.model,
            layout,
            cluster=self.cluster,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            constants=self.constants,
        )

    def fastest(self, found: list[Layout], n_best: int) -> tuple[list[Prediction], float]:
        """Return the best layouts that fit, best first, and the fewest bytes of all simulated."""
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
        n_best: number of layouts to return. At least 10 are simulated, the first by the closed
            form.
        precision: as in :class:`Layout`; None takes the precision of ``like``.
        like: layout whose other settings, such as ``flash``, ``overlap`` or ``reshard``, all
            candidates share. Its sizes, schedule and checkpointing are ignored. None takes
            :class:`Layout`'s defaults.
        ep: number of ranks that share a layer's experts; None tries all numbers.

    Raises:
        ValueError: if none fits. The sentence says how many bytes the smallest has too many, and on
            how many nodes one fits.
    """
    refuse_unless(1 <= n_best <= 1000, "plan", "n_best", n_best, "give 1 to 1000")
    check_seq_len(model, seq_len)
    refuse_unless(
        global_batch >= 1, "plan", "global_batch", global_batch, "give at least 1 sequence"
    )
    if ep is not None:
        check_ep(model, ep, cluster.n_gpus)
    like = like or Layout()
    if precision is not None:
        like = like.with_(precision=precision)
    asked = _Asked(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        constants=constants or Constants(),
        like=like,
        ep=ep,
    )
    found = asked.layouts()
    if not found:
        raise ValueError(_why_no_mesh(asked))
    best, least = asked.fastest(found, n_best)
    if not best:
        # If nothing was simulated, the closed form has already found all layouts too large.
        if least == math.inf:
            least = min(map(asked.bytes_of, found))
        raise ValueError(_why_none(asked, least))
    return best


def _why_no_mesh(asked: _Asked) -> str:
    """Return why not even a layout that is too large exists, and what to change."""
    global_batch = asked.global_batch
    seq_len = asked.seq_len
    ep = asked.ep
    n_gpus = asked.cluster.n_gpus
    sizes = [(n_data, tp) for _, tp, n_data in meshes(asked.model, asked.cluster)]
    dividing = [(n_data, tp) for n_data, tp in sizes if global_batch % n_data == 0]
    if ep is not None and ep > 1 and not any(n_data % ep == 0 for n_data, _ in dividing):
        return (
            f"ep={ep}: none of the possible numbers of data ranks on {n_gpus} GPUs is a multiple of"
            f" it and divides global_batch={global_batch}: make that a multiple of {ep}, or lower"
            " ep"
        )
    if dividing:  # so it is the sequence that does not divide
        tp = min(tp for _, tp in dividing)
        return (
            f"seq_len={seq_len}: global_batch={global_batch} on {n_gpus} GPUs needs tp={tp}, whose"
            f" norms share the sequence: pad it to {-(-seq_len // tp) * tp}, or change the batch"
        )
    n_data, tp = min(sizes)
    return (
        f"global_batch={global_batch} on {n_gpus} GPUs: with at most {asked.model.n_layers}"
        f" stages and tp={tp} there are {n_data} data ranks or more, and no possible number of them"
        f" divides the batch: make it a multiple of {n_data}, or change the number of GPUs"
    )


def _why_none(asked: _Asked, least: float) -> str:
    """Return the missing bytes, and the smallest change of the cluster with which one fits."""
    cluster = asked.cluster
    global_batch = asked.global_batch
    budget = cluster.gpu.memory * USABLE_MEMORY
    missing = (
        f"no layout fits seq_len={asked.seq_len}: the smallest needs {least:,.0f} bytes a GPU,"
        f" {least - budget:,.0f} too many"
    )
    most_nodes = max(_MOST_NODES, 4 * cluster.n_nodes)
    larger = [(n, global_batch) for n in range(cluster.n_nodes + 1, most_nodes + 1)]
    # The batch limits the data ranks, so a larger batch may help where more nodes alone do not.
    larger += [(cluster.n_nodes * 2**k, global_batch * 2**k) for k in range(1, 10)]
    for n_nodes, batch in larger:
        changed = replace(cluster, n_nodes=n_nodes)
        if _one_fits(replace(asked, cluster=changed, global_batch=batch)):
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
    """Return True if the smallest layout fits."""
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
    """Return why the fastest layout has no pipeline, and what would make a pipeline the fastest.

    The best layout with a pipeline is compared with it: in time, or if none fits, in memory. The
    second part is a change of the cluster.

    Args:
        best: the first layout of :func:`plan`.
        ep: the ``ep`` that :func:`plan` was given.
    """
    asked = _Asked(
        best.model,
        best.cluster,
        global_batch=best.global_batch,
        seq_len=best.seq_len,
        constants=best.constants,
        like=best.layout,
        ep=ep,
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
        groups = f", in groups of {ep=}" if ep else ""
        why = (
            f"no number of stages from 2 to n_layers={best.model.n_layers} divides"
            f" n_gpus={best.cluster.n_gpus} and leaves data ranks that divide"
            f" global_batch={best.global_batch}{groups}."
        )

    for n in _FACTORS:
        found = []
        for words, change in _CHANGES.items():
            if _pipeline_wins(asked, held, change=change, n=n):
                found.append(words.format(n))
        if found:
            return f"No pipeline: {why} A pipeline would be fastest with {' or with '.join(found)}."
    *some, last = [words.format(_FACTORS[-1]) for words in _CHANGES]
    return f"No pipeline: {why} Nor would one be fastest with {', '.join(some)} or {last}."


def _why_too_large(best: Prediction, smallest: Prediction) -> str:
    """Return the bytes that the smallest pipeline takes more than the best layout, by kind."""
    ours = max(best.peak_memory, key=lambda kinds: sum(kinds.values()))
    its = max(smallest.peak_memory, key=lambda kinds: sum(kinds.values()))
    less = (sum(its.values()) - sum(ours.values())) / 1e9
    more = largest_terms({kind: (its[kind] - ours[kind]) / 1e9 for kind in its})
    return (
        f"none fits. The smallest, {smallest.layout}, takes {max(smallest.total_memory) / 1e9:.3g}"
        f" GB of the {smallest.budget / 1e9:.3g} that a GPU can give. {best.layout} takes"
        f" {less:.3g} GB less, {mainly(more, 'GB')}."
    )


def _pipeline_wins(
    asked: _Asked, held: list[Layout], change: Callable[[Cluster, int], Cluster], n: int
) -> bool:
    """Return True if the fastest layout on a changed cluster has a pipeline.

    ``held`` are the layouts on the cluster as it is. They depend only on its number of GPUs.
    """
    changed = replace(asked, cluster=change(asked.cluster, n))
    if changed.cluster.n_gpus != asked.cluster.n_gpus:
        held = changed.layouts()
    found, _ = changed.fastest(held, 1)
    return bool(found) and found[0].layout.pp > 1
