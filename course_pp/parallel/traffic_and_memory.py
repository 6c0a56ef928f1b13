"""Counts and formulas for the messages of a training step and the parameters FSDP2 gathers.

``bytes`` are those of the whole: the larger of a collective's input and output on this rank.

    all_gather, reduce_scatter   the gathered output, the input to be reduced
    all_reduce, broadcast        the tensor
    all_to_all                   all that is sent, or all that comes
    send, recv                   the message

:func:`wire_factor` says how many of these bytes a rank sends. Collectives over a group of one rank
move nothing and are not counted.

With m microbatches a step, L layers a stage, and an activation of A = batch · seq · dim elements:

    FSDP2     a group is gathered m + 1 times if forward frees it, else once, and is reduced once:
              Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 7
    tensor    4 · L all-reduces of A a microbatch, two in forward and two in backward:
              Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3. With sequence
              parallelism each is a reduce-scatter and an all-gather of A: Korthikanti et al. 2022,
              arXiv:2205.05198, section 4.2.2
    pipeline  m messages of A down each boundary and m up:
              Narayanan et al. 2021, arXiv:2104.04473, section 3.2
    experts   for each microbatch and layer: the counts of rows, the rows and the experts' results,
              and in backward the gradients of both. A row is a token's activation, and
              top_k · A / dim rows leave a rank:
              Lepikhin et al. 2020, "GShard", arXiv:2006.16668, section 3.2
    the rest  a handful of scalars: refusals, token count, loss, attached losses, norm

With layers of G bytes and the ends of R bytes on a rank, and the fraction f of a group that forward
leaves behind, 0 for True, 1 for False, 1/k for an integer k, the most gathered parameters that are
alive in a step are

    R + min(2, L) · G + f · max(0, L − 2) · G     without a pipeline
    R + L · G                                     with one, whatever the policy

Without a pipeline backward computes on one layer while the next is gathered, and frees each for
good. In a pipeline backward keeps what it gathered until the last microbatch's gradients are
reduced, so True does not lower the peak.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_pp.base.arguments import checked
from course_pp.base.ranks import MEETING_BYTES
from course_pp.base.shapes import (
    Coordinates,
    Group,
    StagePlan,
    coordinates,
    gathered_elements,
    held_elements,
    shards_head,
    stage_plans,
    unsharded_elements,
)
from course_pp.base.sizes import compute_layer_assignment
from course_pp.model import ModelConfig
from course_pp.parallel.fsdp import ReshardPolicy, policy_of_dtypes, resolve_reshard_after_forward
from course_pp.parallel.mesh import DistributedConfig, mesh_of_experts
from course_pp.parallel.schedules import get_stage_indices, order_of, splits_backward
from course_pp.parallel.stage import check_microbatch
from course_pp.parallel.tensor import check_sequence_divides, check_tensor_parallel
from course_pp.parallel.watching import CollectiveWatcher, GatheredWatcher

# How torch spells them, underscores left out; the first that an operator's name starts with is what
# it is.
_KINDS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "monitoredbarrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "isend": "send",
    "send": "send",
    "irecv": "recv",
    "recv": "recv",
}


@dataclass(frozen=True)
class Tally:
    """A number of collectives, and their bytes in all."""

    number: int = 0
    n_bytes: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.number + other.number, self.n_bytes + other.n_bytes)

    def __mul__(self, times: int) -> "Tally":
        return Tally(self.number * times, self.n_bytes * times)


@dataclass(frozen=True)
class CollectiveCounts:
    """The collectives of one rank, as a table: a tally for each (mesh dimension, collective).

    A dimension is ``pp``, ``dp_replicate``, ``dp_shard`` or ``tp``; ``ep`` or ``efsdp`` for the
    ranks of ``dp_shard`` that hold all experts together, or the same ones, unless these are all;
    ``"dp_shard:2"`` for a group of two of the ranks of ``dp_shard`` (an integer reshard policy
    makes one), ``"world"`` for all ranks, or ``"other"``.
    """

    tallies: Mapping[tuple[str, str], Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = {key: self.tallies[key] for key in sorted(self.tallies) if self.tallies[key].number}
        object.__setattr__(self, "tallies", kept)

    @classmethod
    def of(
        cls, dimension: str, collective: str, number: int, n_bytes_each: int
    ) -> "CollectiveCounts":
        """Return ``number`` collectives of one kind and size."""
        return cls({(dimension, collective): Tally(1, n_bytes_each) * number})

    def __add__(self, other: "CollectiveCounts") -> "CollectiveCounts":
        keys = {*self.tallies, *other.tallies}
        return CollectiveCounts({key: self[key] + other[key] for key in keys})

    def __mul__(self, times: int) -> "CollectiveCounts":
        return CollectiveCounts({key: tally * times for key, tally in self.tallies.items()})

    def __getitem__(self, key: tuple[str, str]) -> Tally:
        """Return the tally of (mesh dimension, collective); zero where there was none."""
        return self.tallies.get(key, Tally())

    def total(self, dimension: str | None = None, collective: str | None = None) -> Tally:
        """Return the tally over all dimensions, or one, and over all collectives, or one."""
        return sum(
            (
                t
                for (d, c), t in self.tallies.items()
                if dimension in (None, d) and collective in (None, c)
            ),
            Tally(),
        )

    def __str__(self) -> str:
        rows = [("dimension", "collective", "number", "bytes")]
        rows += [(d, c, f"{t.number:,}", f"{t.n_bytes:,}") for (d, c), t in self.tallies.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{d:<{widths[0]}}  {c:<{widths[1]}}  {number:>{widths[2]}}  {size:>{widths[3]}}"
            for d, c, number, size in rows
        )


class Entered(NamedTuple):
    """One collective or message that a rank began."""

    dimension: str
    collective: str
    n_bytes: int


def wire_factor(collective: str, n_ranks: int) -> float:
    """Return the bytes a rank sends for each byte counted, with ring algorithms.

    An all-reduce is a reduce-scatter and an all-gather: Rajbhandari et al. 2020, "ZeRO",
    arXiv:1910.02054, section 7.1.
    """
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
    if collective in rounds:
        return rounds[collective] * (n_ranks - 1) / n_ranks
    if collective in ("send", "recv"):
        return float(collective == "send")
    raise ValueError(
        f"collective is {collective!r}, whose ranks send unequal amounts: use one of"
        f" {', '.join(rounds)}, send, recv"
    )


@checked
def count_collectives(
    fn: Callable[[], object], device_mesh: DeviceMesh | None = None
) -> CollectiveCounts:
    """Call ``fn`` and count every collective and message that this process begins meanwhile, on any
    process group.

    The first step of a model does more than later ones (it opens connections): for the steady state
    count the second.

    Args:
        device_mesh: the mesh whose dimensions' names to use; without it there are ``"world"`` and
            ``"other"``.
    """
    with CollectiveCounter(device_mesh) as counter:
        fn()
    return counter.counts


class CollectiveCounter(CollectiveWatcher):
    """Counts the collectives of a ``with`` block; :func:`count_collectives` counts those of a call.

    ``entered`` lists them in order.
    """

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "no process group, so nothing to count: call init_distributed(config) first"
            )
        # This rank's group along each dimension, then the world, which a mesh of one dimension is
        # too.
        self._dimensions: dict[str, frozenset[int]] = {}
        for mesh in (
            mesh for mesh in (device_mesh, mesh_of_experts(device_mesh)) if mesh is not None
        ):
            for name in mesh.mesh_dim_names or ():
                self._dimensions.setdefault(
                    name, frozenset(dist.get_process_group_ranks(mesh.get_group(name)))
                )
        self._dimensions["world"] = frozenset(range(dist.get_world_size()))
        self.entered: list[Entered] = []
        super().__init__(self._note)

    @property
    def counts(self) -> CollectiveCounts:
        """Return the counts so far."""
        tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        for dimension, collective, n_bytes in self.entered:
            tallies[dimension, collective] += Tally(1, n_bytes)
        return CollectiveCounts(tallies)

    def _note(self, operator: str, group: dist.ProcessGroup, n_bytes: int) -> None:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            spelled = operator.replace("_", "")
            kind = next(
                (kind for prefix, kind in _KINDS.items() if spelled.startswith(prefix)), operator
            )
            self.entered.append(Entered(self._dimension_of(ranks), kind, n_bytes))

    def _dimension_of(self, ranks: Iterable[int]) -> str:
        members = frozenset(ranks)
        for name, whole in self._dimensions.items():
            if members == whole:
                return name
        for name, whole in self._dimensions.items():
            if members < whole and name != "world":
                return f"{name}:{len(members)}"
        return "other"


_NOTHING = CollectiveCounts()
_FLOAT64 = torch.float64.itemsize


@dataclass(frozen=True)
class _Rank:
    """One rank on paper, and everything a formula needs to know."""

    config: ModelConfig
    layout: DistributedConfig
    at: Coordinates
    stages: list[StagePlan]
    reshard: bool | int
    kept: torch.dtype  # of the parameters
    computed: torch.dtype  # in which they are gathered and used
    reduced: torch.dtype  # in which FSDP2 reduces gradients
    schedule: str
    n_microbatches: int = 1
    tokens: int = 0  # in one microbatch, batch · seq
    ac: str = "none"
    # whether input and weight gradients are two actions of the schedule
    splits_backward: bool = False
    gathers_logits: bool = True
    asks_for_tokens: bool = True  # whether data ranks add up the counted tokens before a step
    # (data ranks, layers with experts, microbatches, experts) rows; None: as many each
    routed: Tensor | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Every dimension of the mesh, whatever its size."""
        names = ("pp", "dp_replicate", "dp_shard", "tp")
        return {name: getattr(self.layout, name) for name in names}

    @property
    def everyone(self) -> str:
        """Return the dimension for which a collective of all ranks counts.

        It is the mesh's only dimension, or else the world.
        """
        names = [name for name, size in self.sizes.items() if size > 1]
        return names[0] if len(names) == 1 else "world"

    @property
    def sharded(self) -> bool:
        return _is_sharded(self.layout)

    @property
    def sequence_parallel(self) -> bool:
        return _is_sequence_parallel(self.config, self.layout)

    @property
    def activation(self) -> int:
        """Bytes of one microbatch's residual stream."""
        return self.tokens * self.config.dim * self.computed.itemsize

    def over(self, dimension: str, collective: str, number: int, n_bytes: int) -> CollectiveCounts:
        """Return ``number`` collectives of ``n_bytes`` each over a mesh dimension.

        There are none if this rank is alone in the dimension.
        """
        efsdp = self.layout.dp_shard // self.layout.ep
        if (efsdp if dimension == "efsdp" else getattr(self.layout, dimension)) == 1:
            return _NOTHING
        if dimension == "ep" and efsdp == 1:
            dimension = "dp_shard"  # the same ranks
        return CollectiveCounts.of(dimension, collective, number, n_bytes)


def _ranks(
    config: ModelConfig,
    layout: DistributedConfig,
    schedule: str,
    policy: ReshardPolicy,
    dtype: torch.dtype,
    mp_policy: MixedPrecisionPolicy | None,
    **step: Any,
) -> list[_Rank]:
    """Return each global rank, the last dimension of the mesh running fastest."""
    if layout.dp_shard == -1:
        raise ValueError(
            "dp_shard=-1 stands for the ranks that are left, but on paper there are none yet: say"
            " how many, 1 for no sharding"
        )
    n_ranks = layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp
    sizes = layout.sizes(n_ranks)
    many = {name: getattr(layout, name) for name in ("pp", "dp_shard", "tp", "ep")}
    reshard = resolve_reshard_after_forward(policy, **many)
    computed = reduced = dtype
    if _is_sharded(layout):  # elsewhere a policy has no effect
        mp_policy = policy_of_dtypes({dtype}) if mp_policy is None else mp_policy
        computed = mp_policy.param_dtype or dtype
        reduced = mp_policy.reduce_dtype or computed
    ranks = []
    for rank in range(n_ranks):
        at = coordinates(rank, **sizes)
        indices = get_stage_indices(schedule, at.pp, layout.pp) if layout.pp > 1 else [0]
        stages = stage_plans(config, indices, layout.pp * len(indices), layout.tp, layout.ep)
        ranks.append(
            _Rank(config, layout, at, stages, reshard, dtype, computed, reduced, schedule, **step)
        )
    return ranks


def _is_sharded(layout: DistributedConfig) -> bool:
    return layout.dp_replicate * layout.dp_shard > 1


def _is_sequence_parallel(config: ModelConfig, layout: DistributedConfig) -> bool:
    return layout.tp > 1 and layout.pp == 1 and not config.tie_embeddings


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
    divisor: float | None = None,
    clip: bool = True,
    routed: Tensor | None = None,
) -> tuple[CollectiveCounts, ...]:
    """Predict the collectives and messages of each rank in one training step.

    The step is one in the steady state: the second or a later one.

    With ``pp > 1`` that is ``PipelineSchedule.step`` with a :class:`TokenLoss`. With ``pp=1`` it is
    one forward and one backward of the whole model; averaging its loss is the caller's business.
    Gradients are not kept from step to step, and the optimizer communicates nothing.

    Args:
        config: the sizes of this package's model, or by :func:`course_pp.model.hf.config_from_hf`
            those of a Llama of transformers cut by :func:`llama_plan`. For other models there is no
            prediction: count a step.
        layout: all four sizes; -1 has no meaning without ranks.
        batch_size: sequences in one *microbatch* of one data-parallel rank.
        seq_len: tokens in a sequence.
        n_microbatches: 1 without a pipeline.
        schedule: one of :func:`schedule_names`, with two stages a rank where it takes several;
            ignored with ``pp=1``.
        reshard_after_forward, mp_policy: as given to :func:`apply_fsdp2`.
        ac: the mode given to :func:`apply_ac`.
        dtype: dtype in which parameters are kept.
        gather_logits: as given to :func:`apply_tensor_parallel`.
        divisor: the ``divisor`` of ``PipelineSchedule.step``. If it is given, data ranks need not
            add up their tokens.
        clip: whether :func:`clip_grad_norm_` follows; False for such a Llama, whose ranks first
            tell one another what they hold.
        routed: how many rows each expert gets, whole numbers (data ranks, layers with experts,
            microbatches, experts); None is what a perfect balance gives, rounded to whole rows.

    Returns:
        One value a global rank.
    """
    check_microbatch(config, batch_size, seq_len)
    if layout.tp > 1:
        check_tensor_parallel(config, layout.tp, gather_logits)
    if _is_sequence_parallel(config, layout):
        check_sequence_divides(seq_len, layout.tp)
    if layout.pp == 1 and n_microbatches != 1:
        raise ValueError(
            f"n_microbatches={n_microbatches} needs a pipeline, but pp=1: predict one forward and"
            " backward with n_microbatches=1, and add up those of a step"
        )
    splits = "none"
    if layout.pp > 1:
        n_stages = layout.pp * len(get_stage_indices(schedule, 0, layout.pp))
        order_of(schedule, n_microbatches, n_stages, layout.pp)
        splits = splits_backward(schedule)
    if ac == "full" and layout.tp > 1 and splits == "some":
        raise ValueError(
            f"schedule={schedule!r} splits some backwards and not others, and how often torch then"
            " recomputes a block has no formula here: predict it with ac='none' or 'selective', or"
            " with 'zb_v'"
        )
    n_sparse = len(config.expert_layers)
    expected = (layout.dp_replicate * layout.dp_shard, n_sparse, n_microbatches, config.n_experts)
    if routed is not None and tuple(routed.shape) != expected:
        raise ValueError(
            f"routed has the shape {tuple(routed.shape)}: give (data ranks, layers with experts,"
            f" microbatches, experts) = {expected}"
        )
    ranks = _ranks(
        config,
        layout,
        schedule,
        reshard_after_forward,
        dtype,
        mp_policy,
        n_microbatches=n_microbatches,
        tokens=batch_size * seq_len,
        ac=ac,
        splits_backward=splits == "all",
        gathers_logits=gather_logits,
        asks_for_tokens=divisor is None,
        routed=routed,
    )
    parts = [_tensor_parallel, _experts, _fully_sharded, _pipeline, *([_clipping] if clip else [])]
    return tuple(sum((part(rank) for part in parts), _NOTHING) for rank in ranks)


def _fully_sharded(rank: _Rank) -> CollectiveCounts:
    """FSDP2: gathers by policy, one reduction a group and step."""
    counts = _NOTHING
    for group in (group for stage in rank.stages for group in stage.groups):
        elements = gathered_elements(group, rank.layout.dp_shard)
        dimension = "dp_shard" if group.ep == 1 else "efsdp"
        counts += _gathers(rank, dimension, elements * rank.computed.itemsize)
        counts += rank.over(dimension, "reduce_scatter", 1, elements * rank.reduced.itemsize)
        # Replicas add up what is already reduced, each rank its own shard.
        shard = elements // (rank.layout.dp_shard // group.ep)
        counts += rank.over("dp_replicate", "all_reduce", 1, shard * rank.reduced.itemsize)
    return counts


def _gathers(rank: _Rank, dimension: str, n_bytes: int) -> CollectiveCounts:
    """Count the all-gathers of one group.

    There is one before the first forward, and one after every forward that frees it.

    A backward leaves it gathered, so whatever the schedule, each of the m forwards makes the action
    after it gather.
    """
    m, policy = rank.n_microbatches, rank.reshard
    if policy is True:
        return rank.over(dimension, "all_gather", m + 1, n_bytes)
    counts = rank.over(dimension, "all_gather", 1, n_bytes)
    if policy is not False:  # the ranks that share a whole copy after forward
        counts += CollectiveCounts.of(f"dp_shard:{policy}", "all_gather", m, n_bytes)
    return counts


def _tensor_parallel(rank: _Rank) -> CollectiveCounts:
    """Count the sums over the ranks of ``tp``, for one microbatch after the other.

    See :func:`apply_tensor_parallel` for the matrices that are cut.
    """
    counts = _NOTHING
    for stage in rank.stages:
        for sparse in stage.has_experts:
            again = _forwards_again(rank, stage, sparse)
            # Experts get whole tokens and give whole ones back, so they have no sum to do.
            sums = 2 if sparse else 4
            # the sums of a plain block, each in two halves; between them, norms see parts
            if rank.sequence_parallel:
                counts += rank.over(
                    "tp", "all_gather", (4 + 2 * again) * rank.n_microbatches, rank.activation
                )
                counts += rank.over(
                    "tp", "reduce_scatter", (sums + again) * rank.n_microbatches, rank.activation
                )
            else:
                # forward sums the outputs of attention and feed-forward, backward the gradients of
                # their inputs
                counts += rank.over(
                    "tp", "all_reduce", (sums + again) * rank.n_microbatches, rank.activation
                )
        counts += _ends(rank, stage) * rank.n_microbatches
    if rank.sharded:
        counts += _norm_weights(rank, rank.computed)  # before FSDP2 reduces them
    return counts


def _forwards_again(rank: _Rank, stage: StagePlan, sparse: bool) -> int:
    """Return how often the backward of a checkpointed block runs its forward again.

    The forward's second sum, the feed-forward's, comes after the last product that backward needs,
    so recomputing stops before it: each time costs one sum. Selective checkpointing costs none:
    attention's one sum is its end.
    """
    if rank.ac != "full":
        return 0
    # torch's weight-gradient half recomputes the block once for each parameter. The first stage,
    # which has no input gradient to send, is not split, nor is one with attached losses, which puts
    # off weight gradients itself.
    parameters = sum(map(len, stage.sparse if sparse else stage.dense))
    attaches = stage.n_sparse and rank.config.router_losses
    return 1 + (parameters if rank.splits_backward and not stage.is_first and not attaches else 0)


def _experts(rank: _Rank) -> CollectiveCounts:
    """Exchanges over ``ep``: three in each forward of a layer's experts, two in its backward."""
    config, counts = rank.config, _NOTHING
    ranges = compute_layer_assignment(config.n_layers, rank.stages[0].n_stages)
    for stage in rank.stages:
        here = range(*ranges[stage.index])
        forwards = 1 + _forwards_again(rank, stage, sparse=True)
        for i in (i for i, layer in enumerate(config.expert_layers) if layer in here):
            numbers = rank.n_microbatches * forwards
            counts += rank.over(
                "ep", "all_to_all", numbers, config.n_experts * torch.int64.itemsize
            )
            for microbatch in range(rank.n_microbatches):
                rows = _rows_exchanged(rank, i, microbatch)
                n_bytes = rows * config.dim * rank.computed.itemsize
                counts += rank.over("ep", "all_to_all", 2 * forwards + 2, n_bytes)
    return counts


def _rows_exchanged(rank: _Rank, layer: int, microbatch: int) -> int:
    """Return the rows this rank sends to a layer's experts, or gets for its own.

    It is the larger of the two numbers.
    """
    if rank.routed is None:
        limit = min(1.0, rank.config.capacity_factor or 1.0)
        return round(rank.tokens * rank.config.top_k * limit)
    ep, here = rank.layout.ep, rank.at.dp_shard % rank.layout.ep
    mine = rank.at.dp_replicate * rank.layout.dp_shard + rank.at.dp_shard
    peers = (
        rank.routed[mine - here : mine - here + ep, layer, microbatch]
        .unflatten(-1, (ep, -1))
        .sum(-1)
    )
    return max(int(peers[here].sum()), int(peers[:, here].sum()))


def _ends(rank: _Rank, stage: StagePlan) -> CollectiveCounts:
    """Embedding and head, for one microbatch."""
    counts = _NOTHING
    if stage.is_first and rank.sequence_parallel:
        # gradient of the replicated embedding's output
        counts += rank.over("tp", "all_gather", 1, rank.activation)
    if not stage.is_last:
        return counts
    if rank.sequence_parallel:
        counts += rank.over("tp", "all_gather", 1, rank.activation)  # input of the head
    if shards_head(rank.config, rank.layout.tp):
        summed = "reduce_scatter" if rank.sequence_parallel else "all_reduce"
        counts += rank.over("tp", summed, 1, rank.activation)  # gradient of the head's input
        itemsize = rank.computed.itemsize
        if rank.gathers_logits:
            return counts + rank.over(
                "tp", "all_gather", 1, rank.tokens * rank.config.vocab_size * itemsize
            )
        # What VocabParallelCrossEntropy exchanges, in float32 at least: the largest logit, then two
        # sums.
        per_token = rank.tokens * max(itemsize, torch.float32.itemsize)
        counts += rank.over("tp", "all_reduce", 1, per_token) + rank.over(
            "tp", "all_reduce", 1, 2 * per_token
        )
    return counts


def _norm_weights(rank: _Rank, dtype: torch.dtype) -> CollectiveCounts:
    """Count the sums of gradients of norms whose inputs are cut over ``tp``.

    With sequence parallelism, two norms a layer and the final one saw parts of the sequence. The
    norms of queries and keys saw some of the heads.
    """
    counts, n_layers = _NOTHING, sum(stage.n_layers for stage in rank.stages)
    if rank.sequence_parallel:
        counts += rank.over("tp", "all_reduce", 2 * n_layers + 1, rank.config.dim * dtype.itemsize)
    if rank.config.qk_norm:
        counts += rank.over("tp", "all_reduce", 2 * n_layers, rank.config.head_dim * dtype.itemsize)
    return counts


def _pipeline(rank: _Rank) -> CollectiveCounts:
    """Messages between stages, and what every rank must hear of a step: a refusal, and the loss."""
    if rank.layout.pp == 1:
        return _NOTHING
    here = {stage.index for stage in rank.stages}
    n_stages = rank.stages[0].n_stages
    neighbours = [
        i for stage in here for i in (stage - 1, stage + 1) if 0 <= i < n_stages and i not in here
    ]
    # Over each boundary to another rank a microbatch's activation passes one way, and its gradient
    # the other.
    n_messages = len(neighbours) * rank.n_microbatches
    counts = CollectiveCounts.of("pp", "send", n_messages, rank.activation)
    counts += CollectiveCounts.of("pp", "recv", n_messages, rank.activation)
    counts += _asks_who_refuses(rank)
    counts += CollectiveCounts.of("pp", "all_reduce", 1, _FLOAT64)  # the loss
    counts += _attached_losses(rank)
    if n_stages - 1 in here:  # the number of counted tokens before the step, the loss after it
        for dimension in ("dp_replicate", "dp_shard"):
            counts += rank.over(dimension, "all_reduce", 1 + rank.asks_for_tokens, _FLOAT64)
    if rank.config.tie_embeddings and (0 in here) != (n_stages - 1 in here):
        embedding = Group(((rank.config.vocab_size, rank.config.dim),))
        gradient = (
            held_elements(embedding, rank.layout.dp_shard, rank.at.dp_shard) * rank.kept.itemsize
        )
        counts += CollectiveCounts.of("pp", "send", 1, gradient) + CollectiveCounts.of(
            "pp", "recv", 1, gradient
        )
    return counts


def _attached_losses(rank: _Rank) -> CollectiveCounts:
    """Count the messages for routers' losses.

    Before the step, ranks tell the weights of their microbatches. After it, they tell the sums of
    their stages' losses.
    """
    config, n_stages = rank.config, rank.stages[0].n_stages
    kinds = config.router_losses
    ranges = compute_layer_assignment(config.n_layers, n_stages)

    def told(pp_rank: int) -> int:
        """Return the number of bytes in which a rank tells the sums of its stages."""
        sums = {}
        for stage in get_stage_indices(rank.schedule, pp_rank, rank.layout.pp):
            for layer in range(*ranges[stage]):
                for kind in kinds if config.has_experts(layer) else ():
                    sums[f"layers.{layer}.{kind}"] = (stage, 0.0)
        # To the byte: a prediction without exceptions can be compared with a count as a whole.
        return len(pickle.dumps(sums))

    if not kinds or not config.n_experts:
        return _NOTHING
    n_ranks = prod(rank.sizes.values())
    counts = CollectiveCounts.of("pp", "broadcast", 1, rank.n_microbatches * _FLOAT64)
    counts += _asks_who_refuses(rank) * 2
    largest = max(map(told, range(rank.layout.pp)))
    return counts + CollectiveCounts.of(rank.everyone, "all_gather", 1, n_ranks * largest)


def _asks_who_refuses(rank: _Rank) -> CollectiveCounts:
    """Count one small message, over all ranks of the mesh: is anything wrong on one of them?"""
    alone = prod(rank.sizes.values()) == 1
    return _NOTHING if alone else CollectiveCounts.of(rank.everyone, "all_reduce", 1, MEETING_BYTES)


def _clipping(rank: _Rank) -> CollectiveCounts:
    """Count one float64 a rank and dimension.

    Norms are gathered and not reduced, so that every rank adds them up in the same order.
    """
    layout = rank.layout
    counts = _asks_who_refuses(rank) + rank.over("tp", "all_gather", 1, _FLOAT64 * layout.tp)
    # norm, and how many stages it is of
    counts += rank.over("pp", "all_gather", 1, 2 * _FLOAT64 * layout.pp)
    n_norms = 1
    if layout.ep > 1 and any(stage.n_sparse for stage in rank.stages):
        # dp_shard and ep are one group: that of all ranks
        if layout.ep == prod(rank.sizes.values()):
            n_norms = 2
        else:
            counts += rank.over("ep", "all_gather", 1, _FLOAT64 * layout.ep)
            counts += rank.over("efsdp", "all_gather", 1, _FLOAT64 * (layout.dp_shard // layout.ep))
    counts += rank.over("dp_shard", "all_gather", 1, n_norms * _FLOAT64 * layout.dp_shard)
    if not rank.sharded:
        counts += _norm_weights(rank, rank.kept)
    return counts


def predict_unsharded_bytes(
    config: ModelConfig,
    layout: DistributedConfig,
    *,
    schedule: str = "1f1b",
    reshard_after_forward: ReshardPolicy = "auto",
    dtype: torch.dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> tuple[int, ...]:
    """Return the most bytes of gathered parameters alive in a training step, by global rank.

    Padding is counted, a finished gather's buffer while it is copied out is not. Arguments are
    those of :func:`predict_collectives`.
    """
    return tuple(
        unsharded_elements(rank.stages, layout.dp_shard, rank.reshard, pipelined=layout.pp > 1)
        * (rank.computed.itemsize if rank.sharded else 0)
        for rank in _ranks(config, layout, schedule, reshard_after_forward, dtype, mp_policy)
    )


def measure_unsharded_bytes(
    fn: Callable[[], object], modules: nn.Module | Iterable[nn.Module]
) -> int:
    """Call ``fn`` and return the most bytes of gathered parameters held meanwhile.

    Only this rank's ``modules`` count.

    Looked at after every operation, which is slow: meant for small models.
    """
    with GatheredWatcher([modules] if isinstance(modules, nn.Module) else list(modules)) as watcher:
        fn()
    return watcher.peak
