"""Predict what each rank communicates in a training step: number and bytes of each collective, from formulas.

With m microbatches a step, L layers a stage, and an activation of A = batch · seq · dim elements:

    FSDP2     a group is gathered m + 1 times if forward frees it, else once, and is reduced once:
              Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 7
    tensor    4 · L all-reduces of A a microbatch, two in forward and two in backward:
              Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3. With sequence parallelism each is a
              reduce-scatter and an all-gather of A: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2
    pipeline  m messages of A down each boundary and m up:
              Narayanan et al. 2021, arXiv:2104.04473, section 3.2
    the rest  a handful of scalars: refusals, token count, loss, norm

Tensor parallelism sends most, and products wait for it: it belongs inside a node. A pipeline sends least: across nodes.
What ``bytes`` means is said in :mod:`course_pp.parallel.counting`.
"""

import pickle
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_pp.arguments import checked
from course_pp.collective import MEETING_BYTES
from course_pp.model import ModelConfig
from course_pp.parallel.activation_checkpointing import check_mode
from course_pp.parallel.counting import CollectiveCounts
from course_pp.parallel.fsdp import ReshardPolicy
from course_pp.parallel.mesh import DistributedConfig
from course_pp.parallel.parts import note_of
from course_pp.parallel.planning import (
    Coordinates,
    Dtypes,
    StagePlan,
    coordinates_of,
    dtypes_of,
    gathered_elements,
    reshard_policy_of,
    stages_of,
)
from course_pp.parallel.plans import check_tensor_parallel
from course_pp.parallel.schedules import check_microbatches, get_stage_indices, splits_backward
from course_pp.parallel.stage import check_microbatch
from course_pp.parallel.styles import check_sequence_divides
from course_pp.plan.shapes import shards_head

__all__ = ["predict_collectives"]

_NOTHING = CollectiveCounts()
_FLOAT64 = torch.float64.itemsize


@dataclass(frozen=True)
class _Rank:
    """One rank, and everything a formula needs to know.

    Attributes:
        tokens: in one microbatch, batch · seq.
        splits_backward: whether input and weight gradients are two actions of the schedule.
    """

    config: ModelConfig
    layout: DistributedConfig
    at: Coordinates
    stages: list[StagePlan]
    n_microbatches: int
    tokens: int
    reshard: bool | int
    ac: str
    dtypes: Dtypes
    splits_backward: bool
    gathers_logits: bool

    @property
    def n_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.layout.pp * prod(_data_and_tensor(self.layout).values())

    @property
    def everyone(self) -> str:
        """What a collective of all ranks counts as: of the one dimension there is, or of the world."""
        names = [name for name, size in {"pp": self.layout.pp, **_data_and_tensor(self.layout)}.items() if size > 1]
        return names[0] if len(names) == 1 else "world"

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 is applied."""
        return self.layout.dp_replicate * self.layout.dp_shard > 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms work on parts of the sequence; see :func:`apply_tensor_parallel`."""
        return _is_sequence_parallel(self.config, self.layout)

    @property
    def activation(self) -> int:
        """Bytes of one microbatch's residual stream."""
        return self.tokens * self.config.dim * self.dtypes.computed.itemsize

    def over(self, dimension: str, collective: str, number: int, n_bytes: int) -> CollectiveCounts:
        """Return ``number`` collectives of ``n_bytes`` each over a mesh dimension; none if it has only this rank."""
        if getattr(self.layout, dimension) == 1:
            return _NOTHING
        return CollectiveCounts.of(dimension, collective, number, n_bytes)


@checked
def predict_collectives(
    config: ModelConfig,
    layout: DistributedConfig,
    *,
    batch_size: int,
    seq_len: int,
    n_microbatches: int = 1,
    schedule: str = "1f1b",
    reshard_after_forward: ReshardPolicy = "auto",
    ac: Literal["none", "full", "selective"] = "none",
    dtype: torch.dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
    gather_logits: bool = True,
    clip: bool = True,
    foreign: bool = False,
) -> tuple[CollectiveCounts, ...]:
    """Predict what each rank communicates in one training step in the steady state: the second and every later one.

    With ``pp > 1`` that is ``PipelineSchedule.step`` with a :class:`TokenLoss`. With ``pp=1`` it is one forward and
    one backward of the whole model; averaging its loss is the caller's business. Gradients are not kept from step to
    step, and the optimizer communicates nothing.

    Args:
        config: the sizes of this package's model, or by :func:`course_pp.model.hf.config_from_hf` those of a Llama of
            transformers cut by :func:`llama_plan`. For other models there is no prediction: count a step
            (:func:`count_collectives`).
        layout: all four sizes; -1 has no meaning without ranks.
        batch_size: sequences in one *microbatch* of one data-parallel rank.
        seq_len: tokens in a sequence.
        n_microbatches: 1 without a pipeline.
        schedule: one of :func:`schedule_names`, with two stages a rank where it takes several; ignored with ``pp=1``.
        reshard_after_forward: see :func:`resolve_reshard_after_forward`.
        ac: the mode given to :func:`apply_ac`.
        dtype: in which parameters are kept.
        mp_policy: as given to :func:`apply_fsdp2`: None computes with float32 parameters in bfloat16.
        gather_logits: as given to :func:`apply_tensor_parallel`; False for :class:`VocabParallelCrossEntropy`.
        clip: whether :func:`clip_grad_norm_` follows.
        foreign: the model is such a Llama, whose ranks tell one another what they hold whenever they clip.

    Returns:
        One value a global rank.

    Raises:
        ValueError: for a layout that the model or the schedule does not allow, or a foreign model tied over stages.
    """
    _check_model(config, layout, batch_size, seq_len, gather_logits)
    if foreign and clip and config.tie_embeddings and layout.pp > 1:
        raise ValueError(
            f"foreign=True with tie_embeddings=True on pp={layout.pp}: what ranks tell one another of a weight that "
            "stages share has no formula here: predict with clip=False, or count a step (count_collectives)"
        )
    _check_schedule(layout, n_microbatches, schedule, ac)
    ranks = (
        _Rank(
            config=config,
            layout=layout,
            at=at,
            stages=stages_of(config, layout, schedule, at.pp),
            n_microbatches=n_microbatches,
            tokens=batch_size * seq_len,
            reshard=reshard_policy_of(reshard_after_forward, layout),
            ac=ac,
            dtypes=dtypes_of(dtype, mp_policy, layout),
            splits_backward=layout.pp > 1 and splits_backward(schedule) == "all",
            gathers_logits=gather_logits,
        )
        for at in coordinates_of(layout)
    )
    parts = [_tensor_parallel, _fully_sharded, _pipeline, *([_clipping] if clip else [])]
    parts += [_notes] if clip and foreign else []
    return tuple(sum((part(rank) for part in parts), _NOTHING) for rank in ranks)


def _fully_sharded(rank: _Rank) -> CollectiveCounts:
    """FSDP2: gathers by policy, one reduction a group and step."""
    n_shards, counts = rank.layout.dp_shard, _NOTHING
    for stage in rank.stages:
        for shapes in stage.groups:
            elements = gathered_elements(shapes, n_shards)
            counts += _gathers(rank, elements * rank.dtypes.computed.itemsize)
            counts += rank.over("dp_shard", "reduce_scatter", 1, elements * rank.dtypes.reduced.itemsize)
            # Replicas add up what is already reduced, each rank its own shard.
            counts += rank.over("dp_replicate", "all_reduce", 1, elements // n_shards * rank.dtypes.reduced.itemsize)
    return counts


def _gathers(rank: _Rank, n_bytes: int) -> CollectiveCounts:
    """All-gathers of one group: one before the first forward, one after every forward that frees it.

    A forward leaves the group as the policy says, a backward leaves it gathered; so whatever the schedule, each of the
    m forwards makes the action after it gather.
    """
    m, policy = rank.n_microbatches, rank.reshard
    if policy is True:
        return rank.over("dp_shard", "all_gather", m + 1, n_bytes)
    counts = rank.over("dp_shard", "all_gather", 1, n_bytes)
    if policy is not False:  # the ranks that share a whole copy after forward
        counts += CollectiveCounts.of(f"dp_shard:{policy}", "all_gather", m, n_bytes)
    return counts


def _tensor_parallel(rank: _Rank) -> CollectiveCounts:
    """Sums over the ranks of ``tp``, a microbatch at a time; see :func:`apply_tensor_parallel` for what is cut."""
    counts = _NOTHING
    for stage in rank.stages:
        n_recomputed = _recomputations(rank, stage)
        block = _sequence_parallel_block if rank.sequence_parallel else _plain_block
        counts += (block(rank, n_recomputed) * stage.n_layers + _ends(rank, stage)) * rank.n_microbatches
    if rank.sequence_parallel and rank.sharded:
        counts += _norm_weights(rank, rank.dtypes.computed)  # before FSDP2 reduces them
    return counts


def _recomputations(rank: _Rank, stage: StagePlan) -> int:
    """Return how often backward runs the forward of a block again, as far as that communicates.

    Recomputing stops at the last product that backward needs. So of a whole block the feed-forward's sum is not
    repeated; and nothing is, if only attention is recomputed, whose one sum is its end.
    """
    if rank.ac != "full":
        return 0
    # torch runs the weight-gradient half once a parameter, each time recomputing the block; the first stage, which has
    # no input gradient to send, is not split.
    return 1 + (len(stage.layer) if rank.splits_backward and not stage.is_first else 0)


def _plain_block(rank: _Rank, n_recomputed: int) -> CollectiveCounts:
    """Forward sums the outputs of attention and feed-forward, backward the gradients of their inputs."""
    return rank.over("tp", "all_reduce", 4 + n_recomputed, rank.activation)


def _sequence_parallel_block(rank: _Rank, n_recomputed: int) -> CollectiveCounts:
    """Return the sums of a plain block, each in two halves; between them, norms see parts of the sequence."""
    gathers = rank.over("tp", "all_gather", 4 + 2 * n_recomputed, rank.activation)
    return gathers + rank.over("tp", "reduce_scatter", 4 + n_recomputed, rank.activation)


def _ends(rank: _Rank, stage: StagePlan) -> CollectiveCounts:
    """Embedding and head, for one microbatch."""
    counts = _NOTHING
    if stage.is_first and rank.sequence_parallel:
        counts += rank.over("tp", "all_gather", 1, rank.activation)  # gradient of the replicated embedding's output
    if not stage.is_last:
        return counts
    cut = shards_head(rank.config, rank.layout.tp)
    if rank.sequence_parallel:
        counts += rank.over("tp", "all_gather", 1, rank.activation)  # input of the head
    if cut:
        summed = "reduce_scatter" if rank.sequence_parallel else "all_reduce"
        counts += rank.over("tp", summed, 1, rank.activation)  # gradient of the head's input
        counts += _logits(rank)
    return counts


def _logits(rank: _Rank) -> CollectiveCounts:
    """Return the gather of logits, or what :class:`VocabParallelCrossEntropy` exchanges, in float32 at least."""
    itemsize = rank.dtypes.computed.itemsize
    if rank.gathers_logits:
        return rank.over("tp", "all_gather", 1, rank.tokens * rank.config.vocab_size * itemsize)
    per_token = rank.tokens * max(itemsize, torch.float32.itemsize)
    largest, sums = rank.over("tp", "all_reduce", 1, per_token), rank.over("tp", "all_reduce", 1, 2 * per_token)
    return largest + sums


def _norm_weights(rank: _Rank, dtype: torch.dtype) -> CollectiveCounts:
    """Return the gradients of norms that saw parts of the sequence: two a layer, and the final one."""
    return rank.over("tp", "all_reduce", 2 * rank.config.n_layers + 1, rank.config.dim * dtype.itemsize)


def _pipeline(rank: _Rank) -> CollectiveCounts:
    """Messages between stages, and what every rank must hear of a step: a refusal, and the loss."""
    if rank.layout.pp == 1:
        return _NOTHING
    here = {stage.index for stage in rank.stages}
    n_stages = rank.stages[0].n_stages
    neighbours = [i for stage in here for i in (stage - 1, stage + 1) if 0 <= i < n_stages and i not in here]
    # Over each boundary to another rank a microbatch's activation passes one way, and its gradient the other.
    n_messages = len(neighbours) * rank.n_microbatches
    counts = CollectiveCounts.of("pp", "send", n_messages, rank.activation)
    counts += CollectiveCounts.of("pp", "recv", n_messages, rank.activation)
    counts += _asks_who_refuses(rank)
    counts += CollectiveCounts.of("pp", "all_reduce", 1, _FLOAT64)  # the loss
    if n_stages - 1 in here:  # the number of counted tokens before the step, the loss after it
        for dimension in ("dp_replicate", "dp_shard"):
            counts += rank.over(dimension, "all_reduce", 2, _FLOAT64)
    if rank.config.tie_embeddings and (0 in here) != (n_stages - 1 in here):
        gradient = _rows(rank) * rank.config.dim * rank.dtypes.kept.itemsize
        counts += CollectiveCounts.of("pp", "send", 1, gradient) + CollectiveCounts.of("pp", "recv", 1, gradient)
    return counts


def _rows(rank: _Rank) -> int:
    """Return the rows of the embedding in this rank's shard; the last shards may be short, or empty."""
    rows = -(-rank.config.vocab_size // rank.layout.dp_shard)
    return max(0, min(rows, rank.config.vocab_size - rank.at.dp_shard * rows))


def _asks_who_refuses(rank: _Rank) -> CollectiveCounts:
    """Count one small message, over all ranks of the mesh: is anything wrong on one of them?"""
    alone = rank.n_ranks == 1
    return _NOTHING if alone else CollectiveCounts.of(rank.everyone, "all_reduce", 1, MEETING_BYTES)


def _clipping(rank: _Rank) -> CollectiveCounts:
    """Count one float64 a rank and dimension: norms are gathered, and added up in the same order everywhere."""
    layout = rank.layout
    counts = _asks_who_refuses(rank) + rank.over("tp", "all_gather", 1, _FLOAT64 * layout.tp)
    counts += rank.over("dp_shard", "all_gather", 1, _FLOAT64 * layout.dp_shard)
    counts += rank.over("pp", "all_gather", 1, 2 * _FLOAT64 * layout.pp)  # norm, and how many stages it is of
    if rank.sequence_parallel and not rank.sharded:
        counts += _norm_weights(rank, rank.dtypes.kept)
    return counts


def _notes(rank: _Rank) -> CollectiveCounts:
    """Return what ranks of a foreign model tell one another when they clip: their stages, pickled, and the norm."""
    sizes = {name: size for name, size in _data_and_tensor(rank.layout).items() if size > 1}
    if rank.layout.dp_replicate > 1:
        sizes["dp_shard"] = rank.layout.dp_shard  # this dimension stays, whatever its size
    n_stages = rank.stages[0].n_stages if rank.layout.pp > 1 else None
    n_ranks, counts = rank.n_ranks, _NOTHING
    for told in (note_of(sizes.values(), [stage.index for stage in rank.stages], n_stages), (0.0, {})):
        if n_ranks > 1:
            counts += CollectiveCounts.of(rank.everyone, "all_reduce", 1, MEETING_BYTES)
            counts += CollectiveCounts.of(rank.everyone, "all_gather", 1, len(pickle.dumps(told)) * n_ranks)
    return counts


def _data_and_tensor(layout: DistributedConfig) -> dict[str, int]:
    return {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}


def _is_sequence_parallel(config: ModelConfig, layout: DistributedConfig) -> bool:
    return layout.tp > 1 and layout.pp == 1 and not config.tie_embeddings


def _check_model(
    config: ModelConfig, layout: DistributedConfig, batch_size: int, seq_len: int, gather_logits: bool
) -> None:
    check_microbatch(config, batch_size, seq_len)
    if layout.tp > 1:
        check_tensor_parallel(config, layout.tp, gather_logits)
    if _is_sequence_parallel(config, layout):
        check_sequence_divides(seq_len, layout.tp)


def _check_schedule(layout: DistributedConfig, n_microbatches: int, schedule: str, ac: str) -> None:
    check_mode("ac", ac)
    if layout.pp == 1:
        if n_microbatches != 1:
            raise ValueError(
                f"n_microbatches={n_microbatches} needs a pipeline, but pp=1: predict one forward and backward with "
                "n_microbatches=1, and add up those of a step"
            )
        return
    n_stages = layout.pp * len(get_stage_indices(schedule, 0, layout.pp))
    check_microbatches(schedule, n_microbatches, n_stages, layout.pp)
    if ac == "full" and layout.tp > 1 and splits_backward(schedule) == "some":
        raise ValueError(
            f"schedule={schedule!r} splits some backwards and not others, and how often torch then recomputes a block "
            "has no formula here: predict it with ac='none' or 'selective', or with 'zb_v'"
        )
