"""The memory of each rank at its fullest, by kind, under the stack of :mod:`course_pp.parallel`.

    parameters   shards of the parameters that tensor and expert parallelism leave to the rank:
                 experts over dp_shard / ep ranks, all others over dp_shard
    gradients    as large as parameters, after the step's last backward
    unreduced    the bytes by which gradients are larger before. With a pipeline or several
                 microbatches, FSDP2 keeps a stage's gradients whole until its last microbatch
    optimizer    AdamW's two moments, and a float32 counter a parameter
    gathered     the most that FSDP2 gathers at once (``parallel.traffic_and_memory``)
    activations  tensors that microbatches in flight keep for backward; the output of the stage,
                 which torch's pipeline holds as long; and the tensors that one recomputed layer
                 keeps meanwhile
    buffers      rotary tables, and one receive buffer a boundary. Before 2.15, torch makes a
                 buffer for each microbatch and boundary beforehand (``Layout.receives_ahead``)

A layer of T = batch · seq tokens has width h, feed-forward width f, key and value width k, and a
heads. Elements have e bytes, and norms and routers compute in w = max(4, e) bytes. It keeps::

    norms         2 (2 h w + w): a norm's input and its normalised values; fused 2 (h e + w)
    attention     q, k, v, their input, and the result as it left attention and as o_proj takes it:
                  (4 h + 2 k) e; a w
    feed-forward  its input, and 4 f with a gate or 2 f without: (h + 4 f) e
    experts       in place of feed-forward, E of them: the router's input and scores, (h + E) w;
                  for each of a token's choices indices and weights, the input, intermediate values
                  and output of an expert of width f, and the same in order: (3 h + 4 f) e

All of it is times T. Tensor parallelism divides everything but the norms, the two inputs and
experts. Sequence parallelism divides the norms, too. The rank of a hot expert takes and keeps more
of the experts' part (``Layout.imbalance``).

Where products cast their weights (``Layout.casts_weights``: mixed precision without FSDP2), the
input of a checkpointed part is in float32. Queries, keys, values, gate and up each keep a copy of
their input, and each microbatch keeps copies of the matrices.

The list is what torch's autograd saves, and a test compares them. Where attention keeps its scores,
it is Korthikanti et al. 2022, arXiv:2205.05198, equation 2: 5 a s more a token.
"""

from collections.abc import Sequence

from course_pp.base.shapes import (
    Group,
    StagePlan,
    held_elements,
    shards_head,
    unsharded_elements,
)
from course_pp.plan.layout import Layout
from course_pp.plan.run import Work
from course_pp.schedule import Action, Overlap, Timeline

_COUNTER = 4  # bytes of AdamW's ``step``


def kept_by_layer(work: Work, ac: str, *, sparse: bool = False) -> float:
    """Return the bytes that the forward of one layer keeps for one microbatch.

    Args:
        ac: activation checkpointing of the layer, as in :class:`Layout`; it may differ from the
            one of ``work.layout``.
        sparse: True for a layer with experts.
    """
    model = work.model
    layout = work.layout
    e = layout.bytes_of.computed
    tokens = work.tokens
    tp = layout.tp
    h = model.dim
    w = max(4, e)
    stream = 1 / tp if layout.splits_sequence(model) else 1.0
    if ac == "full":
        return tokens * h * _between(layout) * stream

    norms = 2 * (_kept_by_norm(h, layout) + w) * stream
    attention = 0.0
    if ac == "none":
        kv = model.kv_heads * model.head_dim
        attention = ((3 * model.q_dim + 2 * kv) * e + w * model.n_heads) / tp
        if model.qk_norm:
            normed = _kept_by_norm(model.q_dim + kv, layout)
            attention += (normed + w * (model.n_heads + model.kv_heads)) / tp
        if not layout.flash:
            attention += 2.5 * e * model.n_heads * work.seq_len / tp
    kept = tokens * (norms + attention + h * e + _kept_inside_ffn(work, sparse))
    if layout.casts_weights:
        kept += _cast_by_layer(work, ac, sparse)
    return kept


def _between(layout: Layout) -> int:
    """Return the bytes of an element of the residual stream inside a stage."""
    e = layout.bytes_of.computed
    return max(4, e) if layout.casts_weights else e


def _kept_by_norm(width: int, layout: Layout) -> float:
    """Return the bytes that a norm keeps of its input, for one token."""
    if layout.fused_norms:
        return width * _between(layout)
    return width * 2 * max(4, layout.bytes_of.computed)


def _kept_inside_ffn(work: Work, sparse: bool) -> float:
    """Return the bytes that a token keeps in a feed-forward block or in experts, input included."""
    model = work.model
    layout = work.layout
    e = layout.bytes_of.computed
    h = model.dim
    inner = 4 if model.gated_ffn else 2
    if not sparse:
        return h * e + inner * model.hidden_dim * e / layout.tp
    w, k = max(4, e), model.top_k
    shared = model.n_shared_experts * model.expert_hidden_dim
    # The z-loss keeps the scores once more. A choice keeps an index and two weights.
    router = (h + model.n_experts * (1 + (model.z_coef > 0))) * w + k * (8 + 2 * w)
    # A row also keeps indices, twice as many if it is exchanged with other ranks.
    row = (2 * h + inner * model.expert_hidden_dim) * e + (16 if layout.ep == 1 else 32)
    kept = router + k * (layout.expert_load(model) * row + h * e) + inner * shared * e
    if shared and w > e:
        kept += h * e
    return kept


def _cast_by_layer(work: Work, ac: str, sparse: bool) -> float:
    """Return the bytes that one layer keeps in addition where products cast their weights.

    They are copies of matrices, inputs and rotary tables.
    """
    model = work.model
    layout = work.layout
    e = layout.bytes_of.computed
    tokens = work.tokens
    h = model.dim
    inputs: float = 1
    if sparse:
        inputs = model.top_k * layout.expert_load(model) + (model.n_shared_experts > 0)
    copies = h * (model.n_ffn_matrices - 2) * inputs * e
    feed_forward = _ffn_matrices(work, sparse)
    if ac == "selective":
        return feed_forward * e + tokens * (copies + h * (4 - e))
    matrices = (model.n_attention_matrices / layout.tp + feed_forward) * e
    tables = 2 * model.head_dim * work.seq_len * e
    return matrices + tokens * (copies + 2 * h * e) + tables


def _ffn_matrices(work: Work, sparse: bool) -> float:
    """Return the parameters of a layer's feed-forward block or experts on one rank."""
    model = work.model
    layout = work.layout
    if sparse:
        return (model.n_experts / layout.ep + model.n_shared_experts) * model.n_expert_parameters
    return model.n_ffn_matrices * model.dim * model.hidden_dim / layout.tp


def kept_by_stage(work: Work, stage: StagePlan) -> float:
    """Return the bytes that the forward of one stage keeps for one microbatch, and its output."""
    layout = work.layout
    n_dense = stage.n_layers - stage.n_sparse
    kept = n_dense * kept_by_layer(work, layout.ac)
    if stage.n_sparse:
        kept += stage.n_sparse * kept_by_layer(work, layout.ac, sparse=True)
    if stage.is_first:
        kept += 8 * work.tokens  # token ids
    if stage.is_last:
        kept += _kept_by_end(work)
    width = _n_logits(work) if stage.is_last else work.model.dim
    return kept + work.tokens * layout.bytes_of.computed * width


def _kept_by_end(work: Work) -> float:
    """Return the bytes kept by final norm, head and loss. The loss keeps log-probabilities."""
    model = work.model
    layout = work.layout
    e = layout.bytes_of.computed
    h = model.dim
    w = max(4, e)
    norm = _kept_by_norm(h, layout) + w
    kept = work.tokens * (norm + h * e + w * _n_logits(work) + 8)
    if layout.casts_weights:
        parts = layout.tp if shards_head(model, layout.tp) else 1
        kept += model.vocab_size * h * e / parts
    return kept


def _n_logits(work: Work) -> float:
    """Return the number of logits that a token has on one rank."""
    layout = work.layout
    is_split = shards_head(work.model, layout.tp) and layout.splits_head
    return work.model.vocab_size / (layout.tp if is_split else 1)


def kept_again(work: Work, stage: StagePlan) -> float:
    """Return the most bytes that a backward keeps in addition after it has recomputed.

    By then it has freed the final norm, head and loss, and later layers. With ``selective`` it has
    freed the layer's feed-forward block or experts, too, which are larger than attention in every
    published model.
    """
    ac = work.layout.ac
    if ac == "none":
        return 0.0
    freed = _kept_by_end(work) if stage.is_last else 0.0
    most = 0.0
    kinds = set(stage.has_experts)
    again = {sparse: _again_by_layer(work, sparse) for sparse in kinds}
    kept = {sparse: kept_by_layer(work, ac, sparse=sparse) for sparse in kinds}
    for sparse in reversed(stage.has_experts):
        most = max(most, again[sparse] - freed)
        freed += kept[sparse]
    return most


def _again_by_layer(work: Work, sparse: bool) -> float:
    """Return the bytes that a backward keeps in addition after it has recomputed one layer."""
    model = work.model
    layout = work.layout
    e = layout.bytes_of.computed
    tokens = work.tokens
    h = model.dim
    again = kept_by_layer(work, "none", sparse=sparse)
    stream = 1 / layout.tp if layout.splits_sequence(model) else 1.0
    if layout.ac == "selective":
        again -= kept_by_layer(work, "selective", sparse=sparse)
        again -= tokens * (_kept_by_norm(h, layout) * stream + _kept_inside_ffn(work, sparse))
        if layout.casts_weights:
            again -= _ffn_matrices(work, sparse) * e
    elif layout.fused_norms or _between(layout) >= 4:
        # The first norm keeps the layer's input, which is kept already.
        again -= tokens * h * _between(layout) * stream
    return again


def memory_of_rank(
    work: Work, n_microbatches: int, rank: int, peaks: Sequence[float] | None
) -> dict[str, int]:
    """Return the bytes on a global rank at its fullest, by kind.

    Args:
        peaks: bytes of activations by pipeline rank, of :func:`peaks_in_flight`. None takes an
            upper bound: all microbatches under GPipe, otherwise one for each stage that follows,
            as in 1F1B; and whole gradients of all stages at once.
    """
    layout = work.layout
    at = layout.place(rank)
    stages = layout.stages(work.model, at.pp)
    size = layout.bytes_of

    def shard(group: Group) -> int:
        return held_elements(group, layout.dp_shard, at.dp_shard)

    n_elements = sum(stage.total(shard) for stage in stages)
    n_tensors = sum(stage.total(len) for stage in stages)
    held = {
        "parameters": n_elements * size.kept,
        "gradients": n_elements * size.kept,
        "unreduced": 0,
        "optimizer": n_elements * size.optimizer + n_tensors * _COUNTER,
        "gathered": 0,
    }
    if layout.n_data > 1:
        scheduled = layout.is_scheduled(n_microbatches)
        elements = unsharded_elements(
            stages, layout.dp_shard, layout.frees_after_forward, pipelined=scheduled
        )
        held["gathered"] = elements * size.computed
        if scheduled:
            order = () if peaks is None else layout.order(n_microbatches).actions[at.pp]
            held["unreduced"] = _unreduced(layout, at.dp_shard, stages=stages, order=order)
    if peaks is None:
        kept = [kept_by_stage(work, s) for s in stages]
        again = max(kept_again(work, s) for s in stages)
        flying = _bound_in_flight(layout, kept, n_microbatches=n_microbatches, pp_rank=at.pp)
        held["activations"] = int(flying + again)
    else:
        held["activations"] = int(peaks[at.pp])
    held["buffers"] = _buffers(work, n_microbatches, stages)
    return held


def peaks_in_flight(work: Work, timeline: Timeline) -> tuple[float, ...]:
    """Return the bytes that each pipeline rank keeps at most for microbatches in flight.

    Recomputed tensors are included.
    """
    stages = work.layout.stages_of_all(work.model)
    kept = [kept_by_stage(work, s) for s in stages]
    again = [kept_again(work, s) for s in stages]
    peaks = []
    for row in timeline.by_rank:
        held = 0.0
        peak = 0.0
        for span in row:
            parts = span.action.parts
            held += sum(kept[part.stage] for part in parts if part.kind == "F")
            # A backward recomputes while it still holds its microbatch.
            recomputed = [again[part.stage] for part in parts if part.kind in "BI"]
            peak = max(peak, held + max(recomputed, default=0.0))
            held -= sum(kept[part.stage] for part in parts if part.kind in "BW")
        peaks.append(peak)
    return tuple(peaks)


def _unreduced(
    layout: Layout, at_shard: int, stages: Sequence[StagePlan], order: Sequence[Action | Overlap]
) -> int:
    """Return the most bytes by which gradients exceed their shards.

    A stage's gradients are whole from its first backward to its last.
    """
    size = layout.bytes_of

    def shard(group: Group) -> int:
        return held_elements(group, layout.dp_shard, at_shard)

    more = {}
    for stage in stages:
        whole = numel([stage]) * size.reduced
        more[stage.index] = max(0, whole - stage.total(shard) * size.kept)
    turns = [part.stage for each in order for part in each.parts if part.kind in "BW"]
    if not turns:
        return sum(more.values())

    first = {stage: turns.index(stage) for stage in turns}
    last = {stage: turn for turn, stage in enumerate(turns)}
    most = 0
    for turn in first.values():
        whole_now = [stage for stage in first if first[stage] <= turn <= last[stage]]
        most = max(most, sum(more[stage] for stage in whole_now))
    return most


def _bound_in_flight(
    layout: Layout, kept: Sequence[float], n_microbatches: int, pp_rank: int
) -> float:
    """Return an upper bound of the bytes that microbatches in flight keep on a pipeline rank."""
    n_chunks = len(kept)
    # Narayanan et al. 2021, section 2.2: one microbatch for each rank that follows. Interleaved,
    # the first rank holds a round more.
    most = layout.pp - pp_rank
    if n_chunks > 1:
        most = layout.pp * (n_chunks + 1) - 2 * pp_rank - 1
    if layout.schedule == "gpipe" and layout.pp > 1:
        most = n_microbatches
    flying = min(most, n_microbatches * n_chunks)
    return flying * sum(kept) / n_chunks


def _buffers(work: Work, n_microbatches: int, stages: Sequence[StagePlan]) -> int:
    """Return the bytes of rotary tables and receive buffers."""
    model = work.model
    layout = work.layout
    tables = len(stages) * model.max_seq_len * model.head_dim * 4
    message = work.tokens * model.dim * layout.bytes_of.computed
    here = {stage.index for stage in stages}
    received = 0
    for stage in stages:
        # A message between two stages of one rank needs no buffer.
        received += not stage.is_first and stage.index - 1 not in here
        received += not stage.is_last and stage.index + 1 not in here
    ahead = n_microbatches if layout.receives_ahead else 1
    return tables + received * message * ahead


def numel(stages: Sequence[StagePlan]) -> int:
    """Return the elements of the stages' parameters on one tensor-parallel rank."""
    return sum(s.total(lambda group: group.n_elements) for s in stages)
