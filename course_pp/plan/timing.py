"""How long the parts of a step take, from operations, bytes and links.

    products    2 operations a parameter and token; attention 4 · dim a (query, key) pair. At ``matmul_efficiency`` of
                the peak.
    other work  norms, activations, softmax move bytes instead. A forward moves ``memory_passes`` times what
                Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, counts as kept. Bytes grow with the width,
                operations with its square: so narrow matrices look inefficient, and this is that curve.
    links       rings at ``link_efficiency`` of the bandwidth.

Backward does the products twice, and moves twice the bytes. Two constants are fitted, on table 1 of Narayanan et al.
2021, arXiv:2104.04473, by ``benchmarks/plan_calibration.py``; ``link_efficiency`` is set.
"""

from dataclasses import dataclass

from course_pp.arguments import checked
from course_pp.plan.cluster import Cluster
from course_pp.plan.layout import Layout
from course_pp.plan.memory import numel
from course_pp.plan.shapes import StagePlan, shards_head
from course_pp.sizes import ModelConfig

__all__ = [
    "Constants",
    "StageTime",
    "data_parallel_times",
    "model_flops",
    "optimizer_time",
    "recomputed_by_selective",
    "stage_time",
    "transfer",
]


@checked
@dataclass(frozen=True)
class Constants:
    """What cannot be read off a data sheet.

    Attributes:
        matmul_efficiency: share of the peak that large products reach. Fitted.
        memory_passes: bytes moved by a forward over bytes a layer keeps. Fitted.
        link_efficiency: share of a link's bandwidth that a collective reaches.
    """

    matmul_efficiency: float = 0.6665
    memory_passes: float = 2.472
    link_efficiency: float = 0.8

    def __post_init__(self) -> None:
        for name in ("matmul_efficiency", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a share, above 0 and at most 1")
        if not 0 <= self.memory_passes < 1000:
            raise ValueError(f"memory_passes={self.memory_passes}: give 0 or more, below 1000")


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage and microbatch.

    Attributes:
        forward, input_grad, weight_grad: as :class:`course_pp.schedule.Costs` has them; recomputation is in the second.
        tensor: the part of all three that waits for tensor-parallel sums.
        recomputed: the part that runs forwards again.
    """

    forward: float
    input_grad: float
    weight_grad: float
    tensor: float
    recomputed: float


def model_flops(model: ModelConfig, global_batch: int, seq_len: int) -> float:
    """Operations that one step's products need, forward and backward, nothing recomputed.

    Attention is counted whole, as published utilisations count it, also where a kernel skips the masked half.
    """
    tokens = global_batch * seq_len
    matrices = model.n_layers * model.n_layer_matrices + model.vocab_size * model.dim
    attention = 2 * model.n_layers * model.dim * seq_len
    return 6.0 * tokens * (matrices + attention)


def recomputed_by_selective(model: ModelConfig) -> int:
    """Parameters of the products that ``ac="selective"`` does again beside attention itself: queries, keys, values.

    What a part keeps for the product that ends it is its input, so that product is not repeated.
    """
    return model.dim * model.dim + 2 * model.dim * model.kv_heads * model.head_dim


def stage_time(
    model: ModelConfig, layout: Layout, cluster: Cluster, constants: Constants, seq_len: int, stage: StagePlan
) -> StageTime:
    """The times of one stage for one microbatch."""
    tokens, tp = layout.microbatch_size * seq_len, layout.tp
    speed = cluster.gpu.peak_of(layout.bytes_of.computed) * constants.matmul_efficiency
    matrices = 2.0 * tokens * model.n_layer_matrices / tp / speed
    attention = 4.0 * tokens * seq_len * model.dim / tp / speed * (0.5 if layout.flash else 1.0)
    moved = _moved(model, layout, seq_len) * constants.memory_passes / cluster.gpu.memory_bandwidth
    summed = 2 * _ring(layout.tp, 2 * tokens * model.dim * layout.bytes_of.computed, cluster.bandwidth(tp), constants)
    summed += 4 * cluster.latency * (tp > 1)
    forward = matrices + attention + moved + summed
    selective = attention + 2.0 * tokens * recomputed_by_selective(model) / tp / speed
    again = {"none": 0.0, "full": forward, "selective": selective}[layout.ac]
    n = stage.n_layers
    parts = tp if shards_head(model, tp) else 1
    head = 2.0 * tokens * model.vocab_size * model.dim / parts / speed if stage.is_last else 0.0
    # The loss reads and writes the logits once, in float32.
    logits = tokens * model.vocab_size / parts * 8 / cluster.gpu.memory_bandwidth if stage.is_last else 0.0
    return StageTime(
        forward=n * forward + head + logits,
        input_grad=n * (matrices + 2 * attention + 2 * moved + summed + again) + head + logits,
        weight_grad=n * matrices + head,
        tensor=n * summed * (3 if layout.ac == "full" else 2),
        recomputed=n * again,
    )


def transfer(model: ModelConfig, layout: Layout, cluster: Cluster, constants: Constants, seq_len: int) -> float:
    """Seconds that one microbatch is between two stages; neighbours are ``n_data`` × ``tp`` ranks apart."""
    message = float(layout.microbatch_size * seq_len * model.dim * layout.bytes_of.computed)
    apart = layout.n_data * layout.tp
    took = cluster.latency
    if layout.scatter_gather:
        took += _ring(layout.tp, message, cluster.bandwidth(layout.tp), constants)
        message /= layout.tp
    return took + message / (cluster.bandwidth(apart + 1, apart) * constants.link_efficiency)


def data_parallel_times(
    layout: Layout, cluster: Cluster, constants: Constants, stages: list[StagePlan]
) -> tuple[float, float]:
    """Seconds to gather a rank's parameters once, and to reduce its gradients once; nothing overlapped."""
    n_elements, size = numel(stages), layout.bytes_of
    shard, replicate = layout.dp_shard, layout.dp_replicate
    to_shards = cluster.bandwidth(layout.tp * shard, layout.tp)
    to_replicas = cluster.bandwidth(layout.tp * shard * replicate, layout.tp * shard)
    gathered = _ring(shard, n_elements * size.computed, to_shards, constants)
    reduced = _ring(shard, n_elements * size.reduced, to_shards, constants)
    reduced += _ring(replicate, 2 * n_elements / shard * size.reduced, to_replicas, constants)
    return gathered, reduced


def optimizer_time(layout: Layout, cluster: Cluster, stages: list[StagePlan]) -> float:
    """Seconds to read gradients, and to read and write parameters and optimizer state, at the memory's speed."""
    size = layout.bytes_of
    moved = numel(stages) / layout.dp_shard * (3 * size.kept + 2 * size.optimizer)
    return moved / cluster.gpu.memory_bandwidth


def _moved(model: ModelConfig, layout: Layout, seq_len: int) -> float:
    """Bytes of one layer's intermediate values: 34 · dim a token and the scores in the paper's case."""
    tokens, h, tp = layout.microbatch_size * seq_len, model.dim, layout.tp
    kv = model.kv_heads * model.head_dim
    whole = 10 * h / (tp if layout.splits_sequence(model) else 1)
    cut = 4 * h + 4 * kv + 2 * (4 if model.gated_ffn else 2) * model.hidden_dim
    scores = 0 if layout.flash else 5 * model.n_heads * seq_len
    return tokens * (whole + (cut + scores) / tp) * layout.bytes_of.computed / 2


def _ring(n: int, n_bytes: float, bandwidth: float, constants: Constants) -> float:
    return (n - 1) / n * n_bytes / (bandwidth * constants.link_efficiency)
