"""How long the parts of a step take, from operations, bytes and links.

    products    2 operations a parameter and token; attention 4 · dim a (query, key) pair. At ``matmul_efficiency`` of
                the peak.
    other work  norms, activations, softmax move bytes instead. A forward moves ``memory_passes``
    times what
                Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, counts as kept. Bytes grow
                with the width, operations with its square: so narrow matrices look inefficient, and
                this is that curve.
    experts     of a token's ``top_k``, or while their weights are read, whichever takes longer. The rank with the
                fullest expert keeps all others waiting; the router multiplies in float32.
    casts       where products cast their weights, each microbatch reads and writes them once a forward, and as many
                bytes of their gradients.
    exchange    a layer with experts sends each (token, choice) pair to its expert's rank and back, in forward and in
                backward, and waits: two all-to-alls each, and one of the counts in forward. Of
                ``ep`` ranks those in the node are reached over its links, the others at the same
                time over a GPU's share of the network.
    links       rings at ``link_efficiency`` of the bandwidth; a ring of n takes n − 1 messages one after another, each
                the cluster's latency.

Backward does the products twice, and moves twice the bytes. Two constants are fitted, on table 1 of
Narayanan et al. 2021, arXiv:2104.04473, by ``benchmarks/plan_calibration.py``; ``link_efficiency``
is set.
"""

from dataclasses import astuple, dataclass
from itertools import pairwise

from course_pp.base.shapes import StagePlan, gathered_elements, held_elements, shards_head
from course_pp.base.sizes import ModelConfig
from course_pp.plan.run import Run, Work


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage and microbatch, as of :class:`course_pp.schedule.Costs`; recomputation
    is in ``input_grad``.

    Attributes:
        tensor: the part of all three that waits for tensor-parallel sums.
        exchange: the part of all three that waits for experts of other ranks.
        recomputed: the part that runs forwards again.
        waits_again: the part of ``recomputed`` that waits for either.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    tensor: float = 0.0
    exchange: float = 0.0
    recomputed: float = 0.0
    waits_again: float = 0.0

    def __add__(self, other: "StageTime") -> "StageTime":
        return StageTime(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> "StageTime":
        return StageTime(*(each * times for each in astuple(self)))


def model_flops(model: ModelConfig, global_batch: int, seq_len: int) -> float:
    """Return the operations that one step's products need, forward and backward, nothing
    recomputed.

    Attention is counted whole, as published utilisations count it, also where a kernel skips the
    masked half. Of experts those count that a token goes to.
    """
    tokens = global_batch * seq_len
    matrices = sum(model.layer_matrices) + model.vocab_size * model.dim
    attention = 2 * model.n_layers * model.q_dim * seq_len
    return 6.0 * tokens * (matrices + attention)


def recomputed_by_selective(model: ModelConfig) -> int:
    """Return the parameters of the products that ``ac="selective"`` repeats beside attention:
    queries, keys, values.

    The product that ends a recomputed part is not repeated: only its input is needed.
    """
    return model.n_attention_matrices - model.dim * model.q_dim


def stage_time(run: Run, stage: StagePlan) -> StageTime:
    """Return the times of one microbatch on one stage."""
    model, layout = run.model, run.layout
    times = StageTime()
    n_dense = stage.n_layers - stage.n_sparse
    if n_dense:
        times += _layer_time(run, sparse=False) * n_dense
    if stage.n_sparse:
        times += _layer_time(run, sparse=True) * stage.n_sparse
    if not stage.is_last:
        return times
    parts = layout.tp if shards_head(model, layout.tp) else 1
    speed = run.speed(layout.bytes_of.computed)
    head = 2.0 * run.tokens * model.vocab_size * model.dim / parts / speed
    # The loss reads and writes the logits once, in float32.
    logits = run.tokens * model.vocab_size / parts * 8 / run.cluster.gpu.memory_bandwidth
    cast = _cast(run, model.vocab_size * model.dim / parts)
    return times + StageTime(head + logits + cast, head + logits, head + cast)


def _layer_time(run: Run, *, sparse: bool) -> StageTime:
    """Return the times of one microbatch in one decoder layer, with experts if ``sparse``."""
    model, layout = run.model, run.layout
    tokens, tp = run.tokens, layout.tp
    speed = run.speed(layout.bytes_of.computed)
    if sparse:
        matrices = 2.0 * tokens * model.n_attention_matrices / tp / speed
        matrices += _experts_time(run)
        n_matrices = model.n_attention_matrices / tp + model.n_experts * model.dim
        n_matrices += (
            model.n_experts / layout.ep + model.n_shared_experts
        ) * model.n_expert_parameters
    else:
        matrices = 2.0 * tokens * model.n_layer_matrices / tp / speed
        n_matrices = model.n_layer_matrices / tp
    seen = 0.5 if layout.flash else 1.0
    attention = 4.0 * tokens * run.seq_len * model.q_dim / tp / speed * seen
    moved = _moved(run, sparse) * run.constants.memory_passes / run.cluster.gpu.memory_bandwidth
    cast = _cast(run, n_matrices)
    summed, summed_back = _tensor_sums(run, sparse)
    sent, sent_back = _exchanges(run) if sparse else (0.0, 0.0)
    forward = matrices + attention + moved + cast + summed + sent
    selective = attention + 2.0 * tokens * recomputed_by_selective(model) / tp / speed
    selective += _cast(run, model.n_attention_matrices / tp)
    again = {"none": 0.0, "full": forward, "selective": selective}[layout.ac]
    repeats = layout.ac == "full"
    return StageTime(
        forward=forward,
        input_grad=matrices + 2 * attention + 2 * moved + summed_back + sent_back + again,
        weight_grad=matrices + cast,
        tensor=summed * (1 + repeats) + summed_back,
        exchange=sent * (1 + repeats) + sent_back,
        recomputed=again,
        waits_again=(summed + sent) * repeats,
    )


def _experts_time(run: Run) -> float:
    """Return the seconds that one forward of a layer's router, experts and shared experts multiplies."""
    model, layout = run.model, run.layout
    size = layout.bytes_of.computed
    rows = run.tokens * model.top_k * layout.expert_load(model)
    weights = model.n_experts / layout.ep * model.n_expert_parameters * size
    reading = weights / run.cluster.gpu.memory_bandwidth
    experts = max(2.0 * rows * model.n_expert_parameters / run.speed(size), reading)
    shared = 2.0 * run.tokens * model.n_shared_experts * model.n_expert_parameters / run.speed(size)
    router = 2.0 * run.tokens * model.n_experts * model.dim / run.speed(max(4, size))
    return experts + shared + router


def _exchanges(run: Run) -> tuple[float, float]:
    """Return the seconds in which one layer's tokens go to their experts and back: forward, backward."""
    model, layout, cluster = run.model, run.layout, run.cluster
    ep, inside = layout.ep, float(cluster.intra_bandwidth or 0)
    if ep == 1:
        return 0.0, 0.0
    # The bytes that the fullest rank gets, as every rank waits for it.
    rows = run.tokens * model.top_k * layout.expert_load(model)
    n_bytes = rows * model.dim * layout.bytes_of.computed
    near = min(ep, max(1, cluster.gpus_per_node // layout.tp))
    in_node = (near - 1) / ep * n_bytes / inside
    between = (ep - near) / ep * n_bytes / min(inside, cluster.inter_bandwidth)
    once = cluster.latency + max(in_node, between) / run.constants.link_efficiency
    return 2 * once + cluster.latency, 2 * once


def _cast(run: Run, n_elements: float) -> float:
    """Return the seconds to read weights as they are kept and write them as they are used."""
    if not run.layout.casts_weights:
        return 0.0
    size = run.layout.bytes_of
    return n_elements * (size.kept + size.computed) / run.cluster.gpu.memory_bandwidth


def _tensor_sums(run: Run, sparse: bool) -> tuple[float, float]:
    """Return the seconds of the sums over tensor-parallel ranks in one layer: forward, backward.

    There are two each, of two halves. Experts get whole tokens and need no sum, only a gather if
    norms see parts. If products cast their inputs, sums before the cast are wider: those of
    backward, and with sequence parallelism one half of each, forward and backward.
    """
    model, layout, cluster = run.model, run.layout, run.cluster
    size, tp = layout.bytes_of, layout.tp
    widths: tuple[float, float] = (size.computed, size.computed)
    if layout.casts_weights:
        both = (size.computed + size.kept) / 2
        widths = (both, both) if layout.splits_sequence(model) else (size.computed, size.kept)
    waits = 4 * (tp - 1) * cluster.latency
    share = 1.0 if not sparse else 0.75 if layout.splits_sequence(model) else 0.5
    n_elements = 2 * run.tokens * model.dim
    forward, backward = (
        share * (2 * _ring(run, tp, n_elements * width, cluster.bandwidth(tp)) + waits)
        for width in widths
    )
    return forward, backward


def transfers(run: Run) -> tuple[float, ...]:
    """Return the seconds that one microbatch takes between each two stages, on their slowest ranks; 0 on one rank."""
    layout, cluster = run.layout, run.cluster
    inside = float(cluster.intra_bandwidth or 0)
    efficiency = run.constants.link_efficiency
    message = float(run.tokens * run.model.dim * layout.bytes_of.computed)
    took = cluster.latency
    if layout.scatter_gather:
        took += _ring(run, layout.tp, message, cluster.bandwidth(layout.tp))
        message /= layout.tp
    near = took + message / (inside * efficiency)
    far = took + message / (min(inside, cluster.inter_bandwidth) * efficiency)
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


def data_parallel_times(run: Run, stages: list[StagePlan]) -> tuple[float, float]:
    """Return the seconds to gather a rank's parameters once, and to reduce its gradients once; nothing overlapped."""
    layout, cluster = run.layout, run.cluster
    size, tp, replicate = layout.bytes_of, layout.tp, layout.dp_replicate
    gathered = reduced = 0.0
    to_replicas = cluster.bandwidth(tp * layout.dp_shard * replicate, tp * layout.dp_shard)
    for ep in {1, layout.ep}:
        n_elements, shard = _gathered(stages, layout.dp_shard, ep), layout.dp_shard // ep
        wait = cluster.latency * sum(group.ep == ep for stage in stages for group in stage.groups)
        to_shards = cluster.bandwidth(tp * layout.dp_shard, tp * ep)
        gathered += _ring(run, shard, n_elements * size.computed, to_shards) + (shard - 1) * wait
        reduced += _ring(run, shard, n_elements * size.reduced, to_shards) + (shard - 1) * wait
        reduced += _ring(run, replicate, 2 * n_elements / shard * size.reduced, to_replicas)
        reduced += 2 * (replicate - 1) * wait
    return gathered, reduced


def _gathered(stages: list[StagePlan], dp_shard: int, ep: int) -> int:
    """Return the elements, with padding, of the groups that ``dp_shard / ep`` ranks share."""
    return sum(
        s.total(lambda group: gathered_elements(group, dp_shard) if group.ep == ep else 0)
        for s in stages
    )


def optimizer_time(run: Run, stages: list[StagePlan]) -> float:
    """Return the seconds to read gradients and to read and write parameters and optimizer state, at memory speed."""
    size, dp_shard = run.layout.bytes_of, run.layout.dp_shard
    n_elements = sum(s.total(lambda group: held_elements(group, dp_shard, 0)) for s in stages)
    moved = n_elements * (3 * size.kept + 2 * size.optimizer)
    return moved / run.cluster.gpu.memory_bandwidth


def _moved(work: Work, sparse: bool) -> float:
    """Return the bytes of one layer's intermediate values: 34 · dim a token and the scores in the paper's case."""
    model, layout = work.model, work.layout
    h, tp = model.dim, layout.tp
    kv = model.kv_heads * model.head_dim
    whole = 10 * h / (tp if layout.splits_sequence(model) else 1)
    attention = 4 * model.q_dim + 4 * kv + (0 if layout.flash else 5 * model.n_heads * work.seq_len)
    inner = 2 * (4 if model.gated_ffn else 2)
    if sparse:  # a pair's input, sorted, and its output, back in order
        pairs = model.top_k * layout.expert_load(model) * (inner * model.expert_hidden_dim + 4 * h)
        feed_forward = pairs + inner * model.n_shared_experts * model.expert_hidden_dim
    else:
        feed_forward = inner * model.hidden_dim / tp
    return work.tokens * (whole + attention / tp + feed_forward) * layout.bytes_of.computed / 2


def _ring(run: Run, n: int, n_bytes: float, bandwidth: float) -> float:
    """Return the seconds in which a ring of ``n`` ranks gathers or reduces, latency left out."""
    return (n - 1) / n * n_bytes / (bandwidth * run.constants.link_efficiency)
