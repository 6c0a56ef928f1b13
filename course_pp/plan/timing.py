"""How long the parts of a step take, from operations, bytes and links.

    products    2 operations a parameter and token; attention 4 · dim a (query, key) pair. At ``matmul_efficiency`` of
                the peak.
    other work  norms, activations, softmax move bytes instead. A forward moves ``memory_passes`` times what
                Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, counts as kept. Bytes grow with the width,
                operations with its square: so narrow matrices look inefficient, and this is that curve.
    casts       where products cast their weights, each microbatch reads and writes them once a forward, and as many
                bytes of their gradients.
    links       rings at ``link_efficiency`` of the bandwidth; a ring of n takes n − 1 messages one after another, each
                the cluster's latency.

Backward does the products twice, and moves twice the bytes. Two constants are fitted, on table 1 of Narayanan et al.
2021, arXiv:2104.04473, by ``benchmarks/plan_calibration.py``; ``link_efficiency`` is set.
"""

from dataclasses import dataclass
from itertools import pairwise

from course_pp.plan.cluster import Cluster
from course_pp.plan.layout import Layout, StagePlan, shards_head
from course_pp.plan.memory import numel
from course_pp.sizes import ModelConfig


@dataclass(frozen=True)
class Constants:
    """What cannot be read off a data sheet.

    Attributes:
        matmul_efficiency: share of the peak that large products reach. Fitted.
        memory_passes: bytes moved by a forward over bytes a layer keeps. Fitted.
        link_efficiency: share of a link's bandwidth that a collective reaches.
    """

    matmul_efficiency: float = 0.6737
    memory_passes: float = 2.517
    link_efficiency: float = 0.8


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage and microbatch, as of :class:`course_pp.schedule.Costs`; recomputation is in ``input_grad``.

    Attributes:
        tensor: the part of all three that waits for tensor-parallel sums.
        recomputed: the part that runs forwards again.
        tensor_again: the part of ``recomputed`` that waits for such sums.
    """

    forward: float
    input_grad: float
    weight_grad: float
    tensor: float
    recomputed: float
    tensor_again: float


def model_flops(model: ModelConfig, global_batch: int, seq_len: int) -> float:
    """Return the operations that one step's products need, forward and backward, nothing recomputed.

    Attention is counted whole, as published utilisations count it, also where a kernel skips the masked half.
    """
    tokens = global_batch * seq_len
    matrices = model.n_layers * model.n_layer_matrices + model.vocab_size * model.dim
    attention = 2 * model.n_layers * model.dim * seq_len
    return 6.0 * tokens * (matrices + attention)


def recomputed_by_selective(model: ModelConfig) -> int:
    """Return the parameters of the products that ``ac="selective"`` repeats beside attention: queries, keys, values.

    The product that ends a recomputed part is not repeated: only its input is needed.
    """
    return model.dim * model.dim + 2 * model.dim * model.kv_heads * model.head_dim


def stage_time(
    model: ModelConfig, layout: Layout, cluster: Cluster, constants: Constants, seq_len: int, stage: StagePlan
) -> StageTime:
    tokens, tp = layout.microbatch_size * seq_len, layout.tp
    speed = cluster.gpu.peak_of(layout.bytes_of.computed) * constants.matmul_efficiency
    matrices = 2.0 * tokens * model.n_layer_matrices / tp / speed
    attention = 4.0 * tokens * seq_len * model.dim / tp / speed * (0.5 if layout.flash else 1.0)
    moved = _moved(model, layout, seq_len) * constants.memory_passes / cluster.gpu.memory_bandwidth
    cast = _cast(layout, cluster, model.n_layer_matrices / tp)
    summed, summed_back = _tensor_sums(model, layout, cluster, constants, tokens)
    forward = matrices + attention + moved + cast + summed
    selective = attention + 2.0 * tokens * recomputed_by_selective(model) / tp / speed
    selective += _cast(layout, cluster, (model.dim**2 + recomputed_by_selective(model)) / tp)
    again = {"none": 0.0, "full": forward, "selective": selective}[layout.ac]
    n = stage.n_layers
    parts = tp if shards_head(model, tp) else 1
    head = 2.0 * tokens * model.vocab_size * model.dim / parts / speed if stage.is_last else 0.0
    # The loss reads and writes the logits once, in float32.
    logits = tokens * model.vocab_size / parts * 8 / cluster.gpu.memory_bandwidth if stage.is_last else 0.0
    cast_head = _cast(layout, cluster, model.vocab_size * model.dim / parts) if stage.is_last else 0.0
    return StageTime(
        forward=n * forward + head + logits + cast_head,
        input_grad=n * (matrices + 2 * attention + 2 * moved + summed_back + again) + head + logits,
        weight_grad=n * (matrices + cast) + head + cast_head,
        tensor=n * (summed * (2 if layout.ac == "full" else 1) + summed_back),
        recomputed=n * again,
        tensor_again=n * summed if layout.ac == "full" else 0.0,
    )


def _cast(layout: Layout, cluster: Cluster, n_elements: float) -> float:
    """Return the seconds to read weights as they are kept and write them as they are used."""
    if not layout.casts_weights:
        return 0.0
    return n_elements * (layout.bytes_of.kept + layout.bytes_of.computed) / cluster.gpu.memory_bandwidth


def _tensor_sums(
    model: ModelConfig, layout: Layout, cluster: Cluster, constants: Constants, tokens: int
) -> tuple[float, float]:
    """Return the seconds of the sums over tensor-parallel ranks in one layer: forward, backward.

    There are two each, of two halves. If products cast their inputs, sums before the cast are wider: those of backward,
    and with sequence parallelism one half of each, forward and backward.
    """
    size, tp = layout.bytes_of, layout.tp
    widths: tuple[float, float] = (size.computed, size.computed)
    if layout.casts_weights:
        both = (size.computed + size.kept) / 2
        widths = (both, both) if layout.splits_sequence(model) else (size.computed, size.kept)
    waits = 4 * (tp - 1) * cluster.latency
    forward, backward = (
        2 * _ring(tp, 2 * tokens * model.dim * width, cluster.bandwidth(tp), constants) + waits for width in widths
    )
    return forward, backward


def transfers(
    model: ModelConfig, layout: Layout, cluster: Cluster, constants: Constants, seq_len: int
) -> tuple[float, ...]:
    """Return the seconds that one microbatch takes between each two stages, on their slowest ranks; 0 on one rank."""
    inside = float(cluster.intra_bandwidth or 0)
    message = float(layout.microbatch_size * seq_len * model.dim * layout.bytes_of.computed)
    took = cluster.latency
    if layout.scatter_gather:
        took += _ring(layout.tp, message, cluster.bandwidth(layout.tp), constants)
        message /= layout.tp
    near = took + message / (inside * constants.link_efficiency)
    far = took + message / (min(inside, cluster.inter_bandwidth) * constants.link_efficiency)
    block, node = layout.n_data * layout.tp, cluster.gpus_per_node

    def transfer(a: int, b: int) -> float:
        if a == b:
            return 0.0
        # Some rank of pipeline rank a may have its neighbour of pipeline rank b on another node.
        is_far = abs(a - b) * block >= node or any(
            (a * block + i) // node != (b * block + i) // node for i in range(block)
        )
        return far if is_far else near

    return tuple(transfer(a, b) for a, b in pairwise(ranks[0] for ranks in layout.placement))


def beyond(traffic: float, beside: float) -> float:
    """Return the part of traffic that work beside it does not hide: at least a tenth, for the first and last layer."""
    return max(traffic - beside, 0.1 * traffic)


def data_parallel_times(
    layout: Layout, cluster: Cluster, constants: Constants, stages: list[StagePlan]
) -> tuple[float, float]:
    """Return the seconds to gather a rank's parameters once, and to reduce its gradients once; nothing overlapped."""
    n_elements, size = numel(stages), layout.bytes_of
    wait = cluster.latency * sum(len(stage.groups) for stage in stages)
    shard, replicate = layout.dp_shard, layout.dp_replicate
    to_shards = cluster.bandwidth(layout.tp * shard, layout.tp)
    to_replicas = cluster.bandwidth(layout.tp * shard * replicate, layout.tp * shard)
    gathered = _ring(shard, n_elements * size.computed, to_shards, constants) + (shard - 1) * wait
    reduced = _ring(shard, n_elements * size.reduced, to_shards, constants) + (shard - 1) * wait
    reduced += _ring(replicate, 2 * n_elements / shard * size.reduced, to_replicas, constants)
    reduced += 2 * (replicate - 1) * wait
    return gathered, reduced


def optimizer_time(layout: Layout, cluster: Cluster, stages: list[StagePlan]) -> float:
    """Return the seconds to read gradients and to read and write parameters and optimizer state, at memory speed."""
    size = layout.bytes_of
    moved = numel(stages) / layout.dp_shard * (3 * size.kept + 2 * size.optimizer)
    return moved / cluster.gpu.memory_bandwidth


def _moved(model: ModelConfig, layout: Layout, seq_len: int) -> float:
    """Return the bytes of one layer's intermediate values: 34 · dim a token and the scores in the paper's case."""
    tokens, h, tp = layout.microbatch_size * seq_len, model.dim, layout.tp
    kv = model.kv_heads * model.head_dim
    whole = 10 * h / (tp if layout.splits_sequence(model) else 1)
    cut = 4 * h + 4 * kv + 2 * (4 if model.gated_ffn else 2) * model.hidden_dim
    scores = 0 if layout.flash else 5 * model.n_heads * seq_len
    return tokens * (whole + (cut + scores) / tp) * layout.bytes_of.computed / 2


def _ring(n: int, n_bytes: float, bandwidth: float, constants: Constants) -> float:
    return (n - 1) / n * n_bytes / (bandwidth * constants.link_efficiency)
