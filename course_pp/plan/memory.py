"""What each rank holds at its fullest, by kind, as the stack of :mod:`course_pp.parallel` holds it.

    parameters   kept shards of what tensor and expert parallelism leave: of experts over dp_shard / ep ranks, of the
                 rest over dp_shard
    gradients    as large, after the step's last backward
    unreduced    what gradients are more before: with a pipeline or several microbatches FSDP2 keeps a stage's whole
                 until its last microbatch
    optimizer    AdamW's two moments, and a float32 counter a parameter
    gathered     the most that FSDP2 gathers at once (``parallel.traffic_and_memory``)
    activations  what the microbatches in flight keep for backward, a stage's output, which torch's
    pipeline holds as
                 long, and what one recomputed layer keeps meanwhile
    buffers      rotary tables; receive buffers, one a boundary; before torch 2.15 one a microbatch and boundary, which
                 it makes beforehand (``Layout.receives_ahead``)

A layer of T = batch · seq tokens keeps, with width h, feed-forward width f, key and value width k, a heads, elements
of e bytes and norms and routers that compute in w = max(4, e)::

    norms         2 (2 h w + w), a norm's input and what it normalised; fused 2 (h e + w)
    attention     q, k, v, their input, the result as it left attention and as o_proj takes it: (4 h + 2 k) e; a w
    feed-forward  input, and 4 f with a gate or 2 f without: (h + 4 f) e
    experts       instead, E of them: the router's input and scores (h + E) w; for each of a token's choices indices and
                  weights, what an expert of width f takes, keeps and returns, and the same in order: (3 h + 4 f) e

all times T. Tensor parallelism divides all but the norms, the two inputs and experts; sequence
parallelism the norms, too. The rank of a hot expert takes and keeps more of them
(``Layout.imbalance``). Where products cast their weights (``Layout.casts_weights``, so mixed
precision without FSDP2), what enters a checkpointed part is in float32, queries, keys, values, gate
and up each keep a copy of their input, and each microbatch its copies of the matrices.

The list is what torch's autograd saves; that it is complete is tested. Where attention keeps its
scores, it is Korthikanti et al. 2022, arXiv:2205.05198, equation 2: 5 a s more a token.
"""

from collections.abc import Sequence

from course_pp.base.shapes import StagePlan, held_elements, shards_head, unsharded_elements
from course_pp.plan.layout import Layout
from course_pp.plan.run import Work
from course_pp.schedule import Action, Overlap, Timeline

_COUNTER = 4  # bytes of AdamW's ``step``


def kept_by_layer(work: Work, ac: str, *, sparse: bool = False) -> float:
    """Return the bytes that the forward of one layer, with experts if ``sparse``, keeps for one
    microbatch.

    Args:
        ac: the checkpointing, as :class:`Layout` takes it; that of ``work.layout`` or another one.
    """
    model, layout = work.model, work.layout
    e, tokens, tp = layout.bytes_of.computed, work.tokens, layout.tp
    h = model.dim
    w = max(4, e)
    stream = 1 / tp if layout.splits_sequence(model) else 1.0
    if ac == "full":
        return tokens * h * _between(layout) * stream
    norms = 2 * (_kept_by_norm(h, layout) + w) * stream
    kv = model.kv_heads * model.head_dim
    attention = ((3 * model.q_dim + 2 * kv) * e + w * model.n_heads) / tp if ac == "none" else 0.0
    if model.qk_norm and ac == "none":
        attention += (
            _kept_by_norm(model.q_dim + kv, layout) + w * (model.n_heads + model.kv_heads)
        ) / tp
    if not layout.flash and ac == "none":
        attention += 2.5 * e * model.n_heads * work.seq_len / tp
    kept = tokens * (norms + attention + h * e + _kept_inside_ffn(work, sparse))
    return kept + (_cast_by_layer(work, ac, sparse) if layout.casts_weights else 0.0)


def _between(layout: Layout) -> int:
    """Return the bytes of an element of the residual stream inside a stage."""
    e = layout.bytes_of.computed
    return max(4, e) if layout.casts_weights else e


def _kept_by_norm(width: int, layout: Layout) -> float:
    """Return the bytes that a norm keeps of its input, for one token."""
    return width * (
        _between(layout) if layout.fused_norms else 2 * max(4, layout.bytes_of.computed)
    )


def _kept_inside_ffn(work: Work, sparse: bool) -> float:
    """Return the bytes that a token keeps of a feed-forward block's or experts' input and inside."""
    model, layout = work.model, work.layout
    e, h, inner = layout.bytes_of.computed, model.dim, 4 if model.gated_ffn else 2
    if not sparse:
        return h * e + inner * model.hidden_dim * e / layout.tp
    w, k, shared = max(4, e), model.top_k, model.n_shared_experts * model.expert_hidden_dim
    router = (h + model.n_experts * (1 + (model.z_coef > 0))) * w + k * (8 + 2 * w)
    row = (2 * h + inner * model.expert_hidden_dim) * e + (16 if layout.ep == 1 else 32)
    kept = router + k * (layout.expert_load(model) * row + h * e) + inner * shared * e
    return kept + (h * e if shared and w > e else 0.0)


def _cast_by_layer(work: Work, ac: str, sparse: bool) -> float:
    """Return what one layer keeps in addition where products cast: copies of matrices, inputs and rotary tables."""
    model, layout = work.model, work.layout
    e, tokens, h = layout.bytes_of.computed, work.tokens, model.dim
    feed_forward = _ffn_matrices(work, sparse)
    inputs = model.top_k * layout.expert_load(model) + (model.n_shared_experts > 0) if sparse else 1
    copies = h * (model.n_ffn_matrices - 2) * inputs * e
    if ac == "selective":
        return feed_forward * e + tokens * (copies + h * (4 - e))
    tables = 2 * model.head_dim * work.seq_len * e
    return (
        (model.n_attention_matrices / layout.tp + feed_forward) * e
        + tokens * (copies + 2 * h * e)
        + tables
    )


def _ffn_matrices(work: Work, sparse: bool) -> float:
    """Return the parameters of a feed-forward block, or of all experts of a layer, on one tensor-parallel rank."""
    model, layout = work.model, work.layout
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
    """Return the bytes kept by final norm, head and loss, which keeps the logarithms of probabilities."""
    model, layout = work.model, work.layout
    e, h = layout.bytes_of.computed, model.dim
    w = max(4, e)
    norm = _kept_by_norm(h, layout) + w
    kept = work.tokens * (norm + h * e + w * _n_logits(work) + 8)
    parts = layout.tp if shards_head(model, layout.tp) else 1
    return kept + (model.vocab_size * h * e / parts if layout.casts_weights else 0.0)


def _n_logits(work: Work) -> float:
    """Return how many logits a token has on one rank."""
    layout = work.layout
    is_split = shards_head(work.model, layout.tp) and layout.splits_head
    return work.model.vocab_size / (layout.tp if is_split else 1)


def kept_again(work: Work, stage: StagePlan) -> float:
    """Return the most bytes that a backward keeps in addition once it has recomputed a layer or its
    attention.

    By then it has freed what lies behind: final norm, head and loss, and later layers; with
    ``selective`` the layer's feed-forward block or experts, too, which are larger than attention in
    every published model.
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
    """Return the bytes that a backward keeps in addition once it has recomputed one layer."""
    model, layout = work.model, work.layout
    e, tokens, h = layout.bytes_of.computed, work.tokens, model.dim
    again = kept_by_layer(work, "none", sparse=sparse)
    stream = 1 / layout.tp if layout.splits_sequence(model) else 1.0
    if layout.ac == "selective":
        again -= kept_by_layer(work, "selective", sparse=sparse)
        again -= tokens * (_kept_by_norm(h, layout) * stream + _kept_inside_ffn(work, sparse))
        if layout.casts_weights:
            again -= _ffn_matrices(work, sparse) * e
    elif layout.fused_norms or _between(layout) >= 4:
        # the layer's input, kept already, is what its first norm keeps
        again -= tokens * h * _between(layout) * stream
    return again


def memory_of_rank(
    work: Work, n_microbatches: int, rank: int, peaks: Sequence[float] | None
) -> dict[str, int]:
    """Return the bytes on a global rank at its fullest, by kind.

    Args:
        peaks: of :func:`peaks_in_flight`; None for a bound: of GPipe all microbatches, else 1F1B's,
            one a stage that follows; and whole gradients of all stages at once.
    """
    layout = work.layout
    at = layout.place(rank)
    stages = layout.stages(work.model, at.pp)
    size = layout.bytes_of
    n_elements = sum(
        s.total(lambda group: held_elements(group, layout.dp_shard, at.dp_shard)) for s in stages
    )
    n_tensors = sum(s.total(len) for s in stages)
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
            held["unreduced"] = _unreduced(layout, at.dp_shard, stages, order)
    if peaks is None:
        kept = [kept_by_stage(work, s) for s in stages]
        again = max(kept_again(work, s) for s in stages)
        held["activations"] = int(_bound_in_flight(layout, kept, n_microbatches, at.pp) + again)
    else:
        held["activations"] = int(peaks[at.pp])
    held["buffers"] = _buffers(work, n_microbatches, stages)
    return held


def peaks_in_flight(work: Work, timeline: Timeline) -> tuple[float, ...]:
    """Return the bytes that each pipeline rank's microbatches in flight keep at most, with what is recomputed."""
    stages = work.layout.stages_of_all(work.model)
    kept = [kept_by_stage(work, s) for s in stages]
    again = [kept_again(work, s) for s in stages]
    peaks = []
    for row in timeline.by_rank:
        held = peak = 0.0
        for parts in (span.action.parts for span in row):
            held += sum(kept[part.stage] for part in parts if part.kind == "F")
            peak = max(
                peak, held, *(held + again[part.stage] for part in parts if part.kind in "BI")
            )
            held -= sum(kept[part.stage] for part in parts if part.kind in "BW")
        peaks.append(peak)
    return tuple(peaks)


def _unreduced(
    layout: Layout, at_shard: int, stages: Sequence[StagePlan], order: Sequence[Action | Overlap]
) -> int:
    """Return the most bytes by which gradients, whole from a stage's first to last backward, exceed their shards."""
    size, more = layout.bytes_of, {}
    for stage in stages:
        held = stage.total(lambda group: held_elements(group, layout.dp_shard, at_shard))
        more[stage.index] = max(0, numel([stage]) * size.reduced - held * size.kept)
    turns = [part.stage for each in order for part in each.parts if part.kind in "BW"]
    if not turns:
        return sum(more.values())
    last = {stage: turn for turn, stage in enumerate(turns)}
    first = {stage: turns.index(stage) for stage in last}
    return max(
        sum(more[s] for s in last if first[s] <= turn <= last[s]) for turn in set(first.values())
    )


def _bound_in_flight(
    layout: Layout, kept: Sequence[float], n_microbatches: int, pp_rank: int
) -> float:
    n_chunks = len(kept)
    # Narayanan et al. 2021, section 2.2: one a rank that follows; interleaved, the first rank holds
    # a round more.
    most = layout.pp - pp_rank if n_chunks == 1 else layout.pp * (n_chunks + 1) - 2 * pp_rank - 1
    if layout.schedule == "gpipe" and layout.pp > 1:
        most = n_microbatches
    flying = min(most, n_microbatches * n_chunks)
    return flying * sum(kept) / n_chunks


def _buffers(work: Work, n_microbatches: int, stages: Sequence[StagePlan]) -> int:
    """Return the bytes of rotary tables and receive buffers."""
    model, layout = work.model, work.layout
    tables = len(stages) * model.max_seq_len * model.head_dim * 4
    message = work.tokens * model.dim * layout.bytes_of.computed
    here = {stage.index for stage in stages}
    received = sum(
        (not s.is_first and s.index - 1 not in here) + (not s.is_last and s.index + 1 not in here)
        for s in stages
    )
    return tables + received * message * (n_microbatches if layout.receives_ahead else 1)


def numel(stages: Sequence[StagePlan]) -> int:
    """Return the elements of the stages' parameters on one tensor-parallel rank."""
    return sum(s.total(lambda group: group.n_elements) for s in stages)
