"""The seconds of the parts of a step, from operations, bytes and links.

    products    2 operations a parameter and token; attention 4 · dim a (query, key) pair. They run
                at ``matmul_efficiency`` of the peak.
    other work  Norms, activations and softmax move bytes instead. A forward moves
                ``memory_passes`` times the bytes that Korthikanti et al. 2022, arXiv:2205.05198,
                section 4.1, counts as kept. Bytes grow with the width, operations with its square.
                So narrow matrices look inefficient; this ratio makes them so.
    experts     The products of a token's ``top_k`` experts, or the reading of their weights,
                whichever takes longer. The rank with the fullest expert keeps all others waiting.
                The router multiplies in float32.
    casts       Where products cast their weights, a forward of each microbatch reads and writes
                them once, and its backward as many bytes of their gradients.
    exchange    A layer with experts sends each (token, choice) pair to its expert's rank and back,
                and waits: two all-to-alls in forward and two in backward, and one of the counts in
                forward. Of ``ep`` ranks, the ones in the node are reached over its links. The
                others are reached at the same time, over a GPU's share of the network.
    links       Rings run at ``link_efficiency`` of the bandwidth. A ring of n sends n − 1 messages
                one after another, each with the cluster's latency.

Backward does the products twice, and moves twice the bytes. Two constants are fitted, on table 1 of
Narayanan et al. 2021, arXiv:2104.04473, by ``benchmarks/plan_calibration.py``; ``link_efficiency``
is set.
"""

from dataclasses import astuple, dataclass
from itertools import pairwise

from course_pp.base.shapes import (
    Group,
    StagePlan,
    gathered_elements,
    held_elements,
    shards_head,
)
from course_pp.base.sizes import ModelConfig
from course_pp.plan.run import Run, Work


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage and microbatch, as in :class:`course_pp.schedule.Costs`.

    Recomputation is in ``input_grad``.

    Attributes:
        tensor: the part of forward and backward that waits for tensor-parallel sums.
        exchange: the part of forward and backward that waits for experts of other ranks.
        recomputed: the part that runs forwards again.
        waits_again: the part of ``recomputed`` that waits for sums or experts.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    tensor: float = 0.0
    exchange: float = 0.0
    recomputed: float = 0.0
    waits_again: float = 0.0

    def __add__(self, other: "StageTime") -> "StageTime":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return StageTime(*(a + b for a, b in pairs))

    def __mul__(self, times: int) -> "StageTime":
        return StageTime(*(each * times for each in astuple(self)))


def model_flops(model: ModelConfig, global_batch: int, seq_len: int) -> float:
    """Return the operations of one step's products, forward and backward, without recomputation.

    Attention is counted whole, as published utilisations count it, even if a kernel skips the
    masked half. Only the experts that a token goes to are counted.
    """
    tokens = global_batch * seq_len
    matrices = sum(model.layer_matrices) + model.vocab_size * model.dim
    attention = 2 * model.n_layers * model.q_dim * seq_len
    return 6.0 * tokens * (matrices + attention)


def recomputed_by_selective(model: ModelConfig) -> int:
    """Return the parameters whose products ``ac="selective"`` repeats: queries, keys, values.

    Attention itself is repeated, too, but has no parameters. The product that ends a recomputed
    part is not repeated, because backward needs only its input.
    """
    return model.n_attention_matrices - model.dim * model.q_dim


def stage_time(run: Run, stage: StagePlan) -> StageTime:
    """Return the times of one microbatch on one stage."""
    model = run.model
    layout = run.layout
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
    model = run.model
    layout = run.layout
    tokens = run.tokens
    tp = run.layout.tp
    speed = run.speed(layout.bytes_of.computed)
    if sparse:
        n_experts = model.n_experts / layout.ep + model.n_shared_experts
        n_matrices = model.n_attention_matrices / tp + model.n_experts * model.dim
        n_matrices += n_experts * model.n_expert_parameters
        matrices = 2.0 * tokens * model.n_attention_matrices / tp / speed
        matrices += _experts_time(run)
    else:
        n_matrices = model.n_layer_matrices / tp
        matrices = 2.0 * tokens * model.n_layer_matrices / tp / speed
    # A kernel such as FlashAttention skips the half that the causal mask hides.
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
    # Only whole layers repeat their sums and exchanges.
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
    """Return the seconds of one forward of a layer's router, experts and shared experts."""
    model = run.model
    layout = run.layout
    size = layout.bytes_of.computed
    rows = run.tokens * model.top_k * layout.expert_load(model)
    weights = model.n_experts / layout.ep * model.n_expert_parameters * size
    reading = weights / run.cluster.gpu.memory_bandwidth
    experts = max(2.0 * rows * model.n_expert_parameters / run.speed(size), reading)
    shared = 2.0 * run.tokens * model.n_shared_experts * model.n_expert_parameters
    shared /= run.speed(size)
    router = 2.0 * run.tokens * model.n_experts * model.dim / run.speed(max(4, size))
    return experts + shared + router


def _exchanges(run: Run) -> tuple[float, float]:
    """Return the seconds in which a layer's tokens go to their experts and back.

    The first number is for forward, the second for backward.
    """
    model = run.model
    layout = run.layout
    cluster = run.cluster
    ep = run.layout.ep
    if ep == 1:
        return 0.0, 0.0
    # The bytes that the fullest rank gets, as every rank waits for it.
    rows = run.tokens * model.top_k * layout.expert_load(model)
    n_bytes = rows * model.dim * layout.bytes_of.computed
    inside = float(cluster.intra_bandwidth or 0)
    # Over the links of the node and over the network at the same time.
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

    There are two sums each, of two halves: a reduction and a gather. Experts get whole tokens and
    need no sum, only a gather if norms see parts of the sequence.

    If products cast their inputs, a sum before the cast is wider. That is a sum of backward, and
    with sequence parallelism one half of each sum, forward and backward.
    """
    model = run.model
    layout = run.layout
    cluster = run.cluster
    size = layout.bytes_of
    tp = layout.tp
    widths: tuple[float, float] = (size.computed, size.computed)
    if layout.casts_weights:
        both = (size.computed + size.kept) / 2
        widths = (both, both) if layout.splits_sequence(model) else (size.computed, size.kept)
    share = 1.0
    if sparse:
        share = 0.75 if layout.splits_sequence(model) else 0.5

    waits = 4 * (tp - 1) * cluster.latency
    n_elements = 2 * run.tokens * model.dim
    found = []
    for width in widths:
        ring = _ring(run, tp, n_bytes=n_elements * width, bandwidth=cluster.bandwidth(tp))
        found.append(share * (2 * ring + waits))
    return found[0], found[1]


def transfers(run: Run) -> tuple[float, ...]:
    """Return the seconds that a microbatch takes between each two stages, on their slowest ranks.

    Between two stages of one rank it is 0.
    """
    layout = run.layout
    cluster = run.cluster
    inside = float(cluster.intra_bandwidth or 0)
    efficiency = run.constants.link_efficiency
    message = float(run.tokens * run.model.dim * layout.bytes_of.computed)
    took = cluster.latency
    if layout.scatter_gather:
        bandwidth = cluster.bandwidth(layout.tp)
        took += _ring(run, layout.tp, n_bytes=message, bandwidth=bandwidth)
        message /= layout.tp
    near = took + message / (inside * efficiency)
    far = took + message / (min(inside, cluster.inter_bandwidth) * efficiency)
    block = layout.n_data * layout.tp
    node = cluster.gpus_per_node

    found = []
    for a, b in pairwise(ranks[0] for ranks in layout.placement):
        # Some rank of pipeline rank a may have its neighbour of pipeline rank b on another node.
        is_far = abs(a - b) * block >= node or any(
            (a * block + i) // node != (b * block + i) // node for i in range(block)
        )
        if a == b:
            found.append(0.0)
        else:
            found.append(far if is_far else near)
    return tuple(found)


def beyond(traffic: float, beside: float) -> float:
    """Return the part of traffic that work beside it does not hide.

    At least a tenth remains: the traffic of the first or last layer has no work beside it.
    """
    return max(traffic - beside, 0.1 * traffic)


def data_parallel_times(run: Run, stages: list[StagePlan]) -> tuple[float, float]:
    """Return the seconds to gather a rank's parameters and to reduce its gradients, once each.

    Nothing is overlapped.
    """
    layout = run.layout
    cluster = run.cluster
    size = layout.bytes_of
    tp = layout.tp
    replicate = layout.dp_replicate
    gathered = 0.0
    reduced = 0.0
    to_replicas = cluster.bandwidth(tp * layout.dp_shard * replicate, tp * layout.dp_shard)
    # Experts are shared by dp_shard / ep ranks, all other parameters by dp_shard ranks.
    for ep in {1, layout.ep}:
        shard = layout.dp_shard // ep
        n_elements = _gathered(stages, layout.dp_shard, ep)
        n_groups = sum(group.ep == ep for stage in stages for group in stage.groups)
        wait = cluster.latency * n_groups
        to_shards = cluster.bandwidth(tp * layout.dp_shard, tp * ep)
        waits = (shard - 1) * wait
        to_gather = _ring(run, shard, n_bytes=n_elements * size.computed, bandwidth=to_shards)
        to_reduce = _ring(run, shard, n_bytes=n_elements * size.reduced, bandwidth=to_shards)
        gathered += to_gather + waits
        reduced += to_reduce + waits
        # Replicas then sum their shards: a reduction and a gather.
        n_bytes = 2 * n_elements / shard * size.reduced
        reduced += _ring(run, replicate, n_bytes=n_bytes, bandwidth=to_replicas)
        reduced += 2 * (replicate - 1) * wait
    return gathered, reduced


def _gathered(stages: list[StagePlan], dp_shard: int, ep: int) -> int:
    """Return the elements, with padding, of the groups that ``dp_shard / ep`` ranks share."""

    def shared(group: Group) -> int:
        return gathered_elements(group, dp_shard) if group.ep == ep else 0

    return sum(stage.total(shared) for stage in stages)


def optimizer_time(run: Run, stages: list[StagePlan]) -> float:
    """Return the seconds of the optimizer, at the speed of memory.

    It reads gradients, and reads and writes parameters and its own state.
    """
    size = run.layout.bytes_of
    dp_shard = run.layout.dp_shard
    n_elements = sum(s.total(lambda group: held_elements(group, dp_shard, 0)) for s in stages)
    moved = n_elements * (3 * size.kept + 2 * size.optimizer)
    return moved / run.cluster.gpu.memory_bandwidth


def _moved(work: Work, sparse: bool) -> float:
    """Return the bytes of one layer's intermediate values.

    In the paper's case they are 34 · dim a token, and the scores.
    """
    model = work.model
    layout = work.layout
    h = model.dim
    tp = layout.tp
    kv = model.kv_heads * model.head_dim
    inner = 2 * (4 if model.gated_ffn else 2)
    whole = 10.0 * h
    if layout.splits_sequence(model):
        whole /= tp
    attention = 4 * model.q_dim + 4 * kv
    if not layout.flash:
        attention += 5 * model.n_heads * work.seq_len
    if sparse:
        # The input of a pair, sorted by expert, and its output, back in order.
        in_order = 4 * h
        pairs = model.top_k * layout.expert_load(model)
        pairs *= inner * model.expert_hidden_dim + in_order
        feed_forward = pairs + inner * model.n_shared_experts * model.expert_hidden_dim
    else:
        feed_forward = inner * model.hidden_dim / tp
    return work.tokens * (whole + attention / tp + feed_forward) * layout.bytes_of.computed / 2


def _ring(run: Run, n: int, n_bytes: float, bandwidth: float) -> float:
    """Return the seconds in which a ring of ``n`` ranks gathers or reduces, without latency."""
    return (n - 1) / n * n_bytes / (bandwidth * run.constants.link_efficiency)
