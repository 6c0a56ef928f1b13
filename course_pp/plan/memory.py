"""What each rank holds at its fullest, by kind, as the stack of :mod:`course_pp.parallel` holds it.

    parameters   kept shards of what tensor parallelism leaves
    gradients    as large, after the step's last backward
    unreduced    what gradients are more before: with a pipeline or several microbatches FSDP2 keeps them whole until
                 the last microbatch
    optimizer    AdamW's two moments, and a float32 counter a parameter
    gathered     the most that FSDP2 gathers at once (``parallel.unsharded``)
    activations  what the microbatches in flight keep for backward, and what one recomputed layer keeps meanwhile
    buffers      rotary tables; one receive buffer a microbatch and boundary, which torch posts beforehand

A layer of T = batch · seq tokens keeps, with width h, feed-forward width f, key and value width k, a heads, elements
of e bytes and norms that compute in w = max(4, e)::

    norms         2 (2 h w + w), a norm's input and what it normalised; fused 2 (h e + w)
    attention     q, k, v, their input, the result as it left attention and as o_proj takes it: (4 h + 2 k) e; a w
    feed-forward  input, and 4 f with a gate or 2 f without: (h + 4 f) e

all times T. Tensor parallelism divides all but the norms and the two inputs; sequence parallelism the norms, too.
Where products cast their weights (``Layout.casts_weights``, so mixed precision without FSDP2), what enters a
checkpointed part is in float32, queries, keys, values, gate and up each keep a copy of their input, and each
microbatch its copies of the matrices.

The list is what torch's autograd saves; that it is complete is tested. Where attention keeps its scores, it is
Korthikanti et al. 2022, arXiv:2205.05198, equation 2: 5 a s more a token.
"""

from collections.abc import Sequence
from math import prod

from course_pp.plan.layout import Layout
from course_pp.plan.shapes import StagePlan, held_elements, shards_head, unsharded_elements
from course_pp.schedule import Costs, Timeline
from course_pp.sizes import ModelConfig

__all__ = ["kept_by_layer", "kept_by_stage", "memory_of_rank", "peaks_in_flight"]

_COUNTER = 4  # bytes of AdamW's ``step``


def kept_by_layer(model: ModelConfig, layout: Layout, seq_len: int, ac: str | None = None) -> float:
    """Bytes that the forward of one layer keeps for one microbatch."""
    e, tokens, tp = layout.bytes_of.computed, layout.microbatch_size * seq_len, layout.tp
    ac = layout.ac if ac is None else ac
    h = model.dim
    w = max(4, e)
    stream = 1 / tp if layout.splits_sequence(model) else 1.0
    between = w if layout.casts_weights else e  # of the residual stream, inside a stage
    if ac == "full":
        return tokens * h * between * stream
    norms = 2 * ((h * between if layout.fused_norms else 2 * h * w) + w) * stream
    kv = model.kv_heads * model.head_dim
    attention = ((3 * h + 2 * kv) * e + w * model.n_heads) / tp if ac == "none" else 0.0
    if not layout.flash and ac == "none":
        attention += 2.5 * e * model.n_heads * seq_len / tp
    feed_forward = (4 if model.gated_ffn else 2) * model.hidden_dim * e / tp
    kept = tokens * (norms + attention + feed_forward + 2 * h * e)
    return kept + (_cast_by_layer(model, layout, seq_len, ac) if layout.casts_weights else 0.0)


def _cast_by_layer(model: ModelConfig, layout: Layout, seq_len: int, ac: str) -> float:
    """What one layer keeps more where products cast: copies of matrices and inputs, and of the rotary tables."""
    e, tokens, h = layout.bytes_of.computed, layout.microbatch_size * seq_len, model.dim
    feed_forward = model.n_ffn_matrices * h * model.hidden_dim
    copies = h * (model.n_ffn_matrices - 2) * e
    if ac == "selective":
        return feed_forward * e / layout.tp + tokens * (copies + h * (4 - e))
    tables = 2 * model.head_dim * seq_len * e
    return model.n_layer_matrices * e / layout.tp + tokens * (copies + 2 * h * e) + tables


def kept_by_stage(model: ModelConfig, layout: Layout, seq_len: int, stage: StagePlan) -> float:
    """Bytes that the forward of one stage keeps for one microbatch."""
    tokens, e = layout.microbatch_size * seq_len, layout.bytes_of.computed
    kept = stage.n_layers * kept_by_layer(model, layout, seq_len)
    w = max(4, e)
    if stage.is_first:
        kept += 8 * tokens  # token ids
    if stage.is_last:
        between = w if layout.casts_weights else e
        norm = (model.dim * between if layout.fused_norms else 2 * model.dim * w) + w
        parts = layout.tp if shards_head(model, layout.tp) else 1
        logits = w * model.vocab_size / (parts if layout.splits_head else 1)
        kept += tokens * (norm + model.dim * e + logits + 8)
        kept += model.vocab_size * model.dim * e / parts if layout.casts_weights else 0
    return kept


def memory_of_rank(
    model: ModelConfig,
    layout: Layout,
    seq_len: int,
    n_microbatches: int,
    rank: int,
    peaks: Sequence[float] | None,
) -> dict[str, int]:
    """Bytes on a global rank at its fullest, by kind.

    Args:
        peaks: of :func:`peaks_in_flight`; None for a bound: of GPipe all microbatches, else 1F1B's, one a stage that
            follows.
    """
    at = layout.place(rank)
    stages, size = layout.stages(model, at.pp), layout.bytes_of
    n_elements = sum(held_elements(group, layout.dp_shard, at.dp_shard) for s in stages for group in s.groups)
    n_tensors = sum(len(group) for s in stages for group in s.groups)
    held = {
        "parameters": n_elements * size.kept,
        "gradients": n_elements * size.kept,
        "unreduced": 0,
        "optimizer": n_elements * size.optimizer + n_tensors * _COUNTER,
        "gathered": 0,
    }
    if layout.n_data > 1:
        scheduled = layout.is_scheduled(n_microbatches)
        elements = unsharded_elements(stages, layout.dp_shard, layout.frees_after_forward, pipelined=scheduled)
        held["gathered"] = elements * size.computed
        if scheduled:
            held["unreduced"] = max(0, numel(stages) * size.reduced - held["gradients"])
    if peaks is None:
        kept = [kept_by_stage(model, layout, seq_len, s) for s in stages]
        held["activations"] = int(_bound_in_flight(layout, kept, n_microbatches, at.pp))
    else:
        held["activations"] = int(peaks[at.pp])
    if layout.ac != "none":
        again = kept_by_layer(model, layout, seq_len, "none")
        again -= kept_by_layer(model, layout, seq_len, "selective") if layout.ac == "selective" else 0
        held["activations"] += int(again)
    held["buffers"] = _buffers(model, layout, seq_len, n_microbatches, stages)
    return held


def peaks_in_flight(model: ModelConfig, layout: Layout, seq_len: int, timeline: Timeline) -> tuple[float, ...]:
    """Bytes that each pipeline rank's microbatches in flight keep at most."""
    kept = tuple(kept_by_stage(model, layout, seq_len, s) for s in layout.stages_of_all(model))
    return tuple(map(float, timeline.peak_memory(Costs(activation=kept))))


def _bound_in_flight(layout: Layout, kept: Sequence[float], n_microbatches: int, pp_rank: int) -> float:
    n_chunks = len(kept)
    # Narayanan et al. 2021, section 2.2: one a rank that follows; interleaved, the first rank holds a round more.
    most = layout.pp - pp_rank if n_chunks == 1 else layout.pp * (n_chunks + 1) - 2 * pp_rank - 1
    if layout.schedule == "gpipe" and layout.pp > 1:
        most = n_microbatches
    flying = min(most, n_microbatches * n_chunks)
    return flying * sum(kept) / n_chunks


def _buffers(model: ModelConfig, layout: Layout, seq_len: int, n_microbatches: int, stages: Sequence[StagePlan]) -> int:
    tables = len(stages) * model.max_seq_len * model.head_dim * 4
    message = layout.microbatch_size * seq_len * model.dim * layout.bytes_of.computed
    here = {stage.index for stage in stages}
    received = sum(
        (not s.is_first and s.index - 1 not in here) + (not s.is_last and s.index + 1 not in here) for s in stages
    )
    return tables + received * message * (n_microbatches if layout.receives_ahead else 1)


def numel(stages: Sequence[StagePlan]) -> int:
    """Elements of the stages' parameters on one tensor-parallel rank."""
    return sum(prod(shape) for s in stages for group in s.groups for shape in group)
