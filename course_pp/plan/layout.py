"""The layout of a run: the mesh, the schedule, the precision."""

import math
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from math import gcd, prod
from typing import Literal

from course_pp.base.arguments import checked
from course_pp.base.shapes import Coordinates, StagePlan, coordinates, cut_by_tp, stage_plans
from course_pp.base.sizes import ModelConfig
from course_pp.plan.cluster import Cluster, nearest
from course_pp.schedule import Schedule, build, find


@dataclass(frozen=True)
class Precision:
    """Bytes of an element, in four places.

    Attributes:
        kept: bytes of parameters and gradients between steps.
        computed: bytes of weights and activations in products.
        reduced: bytes of gradients while ranks sum them.
        optimizer: bytes of the optimizer's whole state for an element of a parameter.
    """

    kept: int
    computed: int
    reduced: int
    optimizer: int


_MOST_RANKS = 2**20
_MOST_FORWARDS = 1_000_000  # of a step that is simulated

PRECISIONS = {
    # This stack's default under FSDP2: kept in float32, computed in bfloat16, reduced in float32.
    "mixed": Precision(4, 2, 4, 8),
    # Megatron-LM's: parameters and gradients in 16 bits, a float32 copy and two moments in the
    # optimizer.
    "megatron": Precision(2, 2, 2, 12),
    "bfloat16": Precision(2, 2, 4, 4),
    "float32": Precision(4, 4, 4, 8),
    "float64": Precision(8, 8, 8, 16),
}


@cache
def torch_receives_ahead() -> bool:
    """Return True if the installed torch makes all receive buffers of a step beforehand.

    Releases before 2.15 do. Without torch the answer is False, as for the newest release.
    """
    try:
        numbers = version("torch").split(".")
    except PackageNotFoundError:
        return False
    return (int(numbers[0]), int(numbers[1])) < (2, 15)


@checked
@dataclass(frozen=True)
class Layout:
    """One way to lay a run out.

    Schedules that do not end a step or keep stages twice are refused.

    Attributes:
        pp, tp, dp_shard, dp_replicate: sizes of the mesh, as in ``DistributedConfig``.
        schedule, n_chunks: schedule of the pipeline, as :func:`course_pp.schedule.build` takes it;
            ignored with ``pp=1``.
        microbatch_size: sequences in a microbatch of one data-parallel rank.
        reshard: True frees a gathered layer after forward, False keeps it; ``"auto"`` frees without
            a pipeline and keeps with one.
        ac: activation checkpointing: of whole layers (``full``), of attention (``selective``), or
            ``none``.
        precision: one of :data:`PRECISIONS`. Under FSDP2 ``mixed`` gathers weights in 16 bits, once
            for all microbatches. On one data-parallel rank there is no FSDP2: each product casts
            its weights (``parallel.compute_in``), and each microbatch in flight keeps its own
            copies of them.
        sequence_parallel: True if norms work on parts of the sequence; None as in the stack: only
            without a pipeline.
        flash: True if attention keeps no scores and skips the half that the causal mask hides.
        fused_norms: True if a norm keeps only its input, as CUDA's kernels do. On the CPU it keeps
            two float32 copies.
        splits_head: True if logits stay cut over the vocabulary (``gather_logits=False``).
        scatter_gather: True if each tensor-parallel rank sends a part of a message, and they gather
            it behind the link (Narayanan et al. 2021, section 4.1). This stack sends it whole.
        overlap: True if data-parallel traffic runs beside work that does not need it; False waits
            for all of it.
        reduces: when gradients are reduced. ``"backward"`` reduces layer by layer beside the last
            microbatch's backward, as torch's DDP does. ``"after"`` reduces after a stage's last
            backward, while its rank waits. ``"auto"`` is ``"after"`` under a ``PipelineSchedule``,
            so with a pipeline or several microbatches, and ``"backward"`` where the step is one
            forward and one backward, as in a loop of one's own.
        receives_ahead: True if every message of a step has its receive buffer from the start, as in
            torch before 2.15; False takes one buffer a boundary. The default follows the installed
            torch, and without torch the newest.
        ep: number of neighbours among ``dp_shard`` ranks, with different data, that share the
            experts of a layer.
        imbalance: load of the fullest expert over the mean load. A capacity factor of the model
            limits it.
    """

    pp: int = 1
    tp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    schedule: str = "1f1b"
    n_chunks: int | None = None
    microbatch_size: int = 1
    reshard: bool | Literal["auto"] = "auto"
    ac: Literal["none", "selective", "full"] = "none"
    precision: str = "mixed"
    sequence_parallel: bool | None = None
    flash: bool = True
    fused_norms: bool = True
    splits_head: bool = True
    scatter_gather: bool = False
    overlap: bool = True
    reduces: Literal["auto", "backward", "after"] = "auto"
    receives_ahead: bool = field(default_factory=torch_receives_ahead)
    ep: int = 1
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "dp_shard", "dp_replicate", "microbatch_size", "ep"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"{name}={size}: give at least 1")
            if size > _MOST_RANKS:
                raise ValueError(f"{name}={size}: give at most {_MOST_RANKS:,}")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"unknown precision={self.precision!r}: {nearest(self.precision, list(PRECISIONS))}"
            )
        if self.dp_shard % self.ep:
            raise ValueError(
                f"ep={self.ep} must divide dp_shard={self.dp_shard}, whose ranks share the experts:"
                f" the largest below that works is ep={_largest_divisor(self.ep, self.dp_shard)}"
            )
        if not 1 <= self.imbalance < math.inf:
            raise ValueError(
                f"imbalance={self.imbalance}: give the fullest expert's load over the mean, at"
                " least 1"
            )
        entry = find(self.schedule)
        if entry.updates:
            raise ValueError(
                f"schedule={self.schedule!r} has no step that ends: plan a synchronous one"
            )
        if any(len(ranks) > 1 for ranks in entry.placement(self.pp, self.n_chunks)):
            raise ValueError(
                f"schedule={self.schedule!r} keeps every stage on two ranks, and summing their"
                " gradients has no formula here: plan one that keeps each once, such as"
                " 'dualpipe_v'"
            )

    @property
    def n_ranks(self) -> int:
        return self.pp * self.tp * self.n_data

    @property
    def n_data(self) -> int:
        return self.dp_shard * self.dp_replicate

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The pipeline ranks of each stage."""
        if self.pp == 1:
            return ((0,),)
        return find(self.schedule).placement(self.pp, self.n_chunks)

    @property
    def bytes_of(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def frees_after_forward(self) -> bool:
        if self.reshard == "auto":
            return self.pp == 1
        return self.reshard

    @property
    def casts_weights(self) -> bool:
        """True if each product casts its weights, because no FSDP2 gathers them in fewer bits."""
        return self.n_data == 1 and self.bytes_of.computed < self.bytes_of.kept

    def is_scheduled(self, n_microbatches: int) -> bool:
        """Return True if ``PipelineSchedule`` runs the step.

        It runs every step but one of a single forward and a single backward.
        """
        return self.pp > 1 or n_microbatches > 1

    def reduces_in_backward(self, n_microbatches: int) -> bool:
        if self.reduces == "auto":
            return not self.is_scheduled(n_microbatches)
        return self.reduces == "backward"

    def splits_sequence(self, model: ModelConfig) -> bool:
        if self.sequence_parallel is None:
            return self.tp > 1 and self.pp == 1 and not model.tie_embeddings
        return self.sequence_parallel and self.tp > 1

    def expert_load(self, model: ModelConfig) -> float:
        """Return the load of the fullest rank's experts over the mean of ``ep`` ranks.

        One of its experts has ``imbalance`` times the mean load, and all others share the rest. No
        expert takes more than the capacity.
        """
        most = model.n_experts if model.capacity_factor is None else model.capacity_factor
        others = (model.n_experts - self.imbalance) / max(1, model.n_experts - 1)
        n_here = model.n_experts // self.ep
        return (min(self.imbalance, most) + (n_here - 1) * min(others, most)) / n_here

    def place(self, rank: int) -> Coordinates:
        return coordinates(
            rank, pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, tp=self.tp
        )

    def stages(self, model: ModelConfig, pp_rank: int) -> list[StagePlan]:
        here = [stage for stage, ranks in enumerate(self.placement) if pp_rank in ranks]
        return stage_plans(model, here, n_stages=self.n_stages, tp=self.tp, ep=self.ep)

    def stages_of_all(self, model: ModelConfig) -> list[StagePlan]:
        everything = range(self.n_stages)
        return stage_plans(model, everything, n_stages=self.n_stages, tp=self.tp, ep=self.ep)

    def n_microbatches(self, global_batch: int) -> int:
        """Return the microbatches of one data-parallel rank, in a step of ``global_batch``."""
        each = self.n_data * self.microbatch_size
        if global_batch < 1 or global_batch % each:
            near = max(each, round(global_batch / each) * each)
            raise ValueError(
                f"global_batch={global_batch} must be a multiple of data ranks × microbatch_size ="
                f" {self.n_data} × {self.microbatch_size} = {each}, in sequences of all ranks"
                f" together: the nearest is {near}"
            )
        m = global_batch // each
        # A user may mistake tokens for sequences, and would wait forever.
        if m * self.n_stages > _MOST_FORWARDS:
            raise ValueError(
                f"global_batch={global_batch} makes {m * self.n_stages:,} forwards of a pipeline,"
                f" each of which is simulated: give a batch of at most {_MOST_FORWARDS:,} of them"
            )
        return m

    def order(self, n_microbatches: int) -> Schedule:
        name = self.schedule if self.pp > 1 else "1f1b"
        return _built(name, self.pp, n_microbatches=n_microbatches, n_chunks=self.n_chunks)

    def check(self, model: ModelConfig, cluster: Cluster) -> None:
        """Refuse a layout that does not fit the model or the cluster."""
        if self.n_ranks != cluster.n_gpus:
            sizes = {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
            n_ranks = prod(sizes.values())
            spelled = " × ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"{spelled} = {n_ranks} ranks, but the cluster has {cluster.n_nodes} ×"
                f" {cluster.gpus_per_node} = {cluster.n_gpus} GPUs: change one of them"
            )
        check_ep(model, self.ep, self.dp_shard)
        columns = gcd(model.dim, model.expert_hidden_dim)
        if self.ep > 1 and columns % (self.dp_shard // self.ep):
            raise ValueError(
                f"dp_shard / ep = {self.dp_shard // self.ep} ranks hold the same experts and must"
                f" divide their columns, dim={model.dim} and expert_dim={model.expert_hidden_dim}:"
                " change dp_shard or ep"
            )
        if model.n_experts and self.imbalance > model.n_experts / model.top_k:
            raise ValueError(
                f"imbalance={self.imbalance} is more than n_experts / top_k ="
                f" {model.n_experts / model.top_k:g}, where every token goes to the fullest expert"
            )
        divided = cut_by_tp(model)
        for name, size in divided.items():
            if size % self.tp:
                works = _largest_divisor(self.tp, gcd(*divided.values()))
                raise ValueError(
                    f"tp={self.tp} must divide {name}={size}: the largest below that works is"
                    f" tp={works}"
                )
        if self.n_stages > model.n_layers:
            raise ValueError(
                f"{self.n_stages} stages need at least as many layers, and the model has"
                f" {model.n_layers}: lower pp or n_chunks"
            )

    def with_(self, **changes: object) -> "Layout":
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        sizes = {
            "pp": self.pp,
            "tp": self.tp,
            "shard": self.dp_shard,
            "replicate": self.dp_replicate,
            "ep": self.ep,
        }
        mesh = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"
        order = ""
        if self.pp > 1:
            order = f" {self.schedule}"
            if self.n_chunks:
                order += f"×{self.n_chunks}"
        return f"{mesh}{order} mb={self.microbatch_size} ac={self.ac}"


def check_ep(model: ModelConfig, ep: int, n_ranks: int) -> None:
    """Refuse expert parallelism without experts, and numbers of ranks that do not divide them.

    ``ep`` must also divide ``n_ranks``.
    """
    if ep > 1 and not model.n_experts:
        raise ValueError(f"ep={ep} shares experts, but the model has n_experts=0: leave ep at 1")
    if ep < 1 or (ep > 1 and model.n_experts % ep):
        raise ValueError(
            f"ep={ep} must divide n_experts={model.n_experts}: the largest below that works is "
            f"ep={_largest_divisor(ep, gcd(model.n_experts, n_ranks))}"
        )


def _largest_divisor(below: int, n: int) -> int:
    return max((k for k in range(1, below) if n % k == 0), default=1)


@lru_cache(maxsize=16)  # a search asks for the same orders again and again
def _built(name: str, n_ranks: int, n_microbatches: int, n_chunks: int | None) -> Schedule:
    chunks = n_chunks if n_ranks > 1 else None
    return build(name, n_ranks, n_microbatches=n_microbatches, n_chunks=chunks)
