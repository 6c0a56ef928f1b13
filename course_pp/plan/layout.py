"""How a run is laid out: the mesh, the schedule, the precision."""

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
    """Bytes of an element: as parameters and gradients are kept, computed with, reduced; of the optimizer's state."""

    kept: int
    computed: int
    reduced: int
    optimizer: int


_MOST_RANKS = 2**20
_MOST_FORWARDS = 1_000_000

PRECISIONS = {
    # This stack's default under FSDP2: everything kept in float32, computed with in bfloat16,
    # reduced in float32.
    "mixed": Precision(4, 2, 4, 8),
    # Megatron-LM's: 16-bit parameters and gradients; a float32 copy and two moments in the
    # optimizer.
    "megatron": Precision(2, 2, 2, 12),
    "bfloat16": Precision(2, 2, 4, 4),
    "float32": Precision(4, 4, 4, 8),
    "float64": Precision(8, 8, 8, 16),
}


@cache
def torch_receives_ahead() -> bool:
    """Return whether the torch that is installed makes all receive buffers of a step beforehand:
    before 2.15.

    Without torch the answer is that of the newest.
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

    Attributes:
        pp, tp, dp_shard, dp_replicate: sizes of the mesh, as ``DistributedConfig`` has them.
        schedule, n_chunks: of the pipeline, as :func:`course_pp.schedule.build` takes them; ignored
            with ``pp=1``.
        microbatch_size: sequences in a microbatch of one data-parallel rank.
        reshard: whether a gathered layer is freed after forward; ``"auto"`` frees without a
            pipeline, keeps with one.
        ac: activation checkpointing: of whole layers (``full``), of attention (``selective``),
            none.
        precision: one of :data:`PRECISIONS`. Under FSDP2 ``mixed`` gathers weights in 16 bits, once
            for all microbatches. On one data-parallel rank there is no FSDP2: each product casts
            its weights (``parallel.compute_in``), and each microbatch in flight keeps its own
            copies of them.
        sequence_parallel: whether norms work on parts of the sequence; None as the stack does:
            without a pipeline.
        flash: whether attention keeps no scores and skips what the causal mask hides.
        fused_norms: whether a norm keeps its input alone, as CUDA's kernels do; on the CPU it keeps
            two float32 copies.
        splits_head: whether logits stay cut over the vocabulary (``gather_logits=False``).
        scatter_gather: whether tensor-parallel ranks send a part of a message each and gather it
            behind the link (Narayanan et al. 2021, section 4.1); this stack sends it whole.
        overlap: whether data-parallel traffic runs beside the work it need not wait for; else all
            of it is waited for.
        receives_ahead: whether every message of a step has its receive buffer from the start, as
            torch before 2.15 has it; else there is one a boundary. The default is the way of the
            torch that is installed, and without torch that of the newest.
        reduces: when gradients are reduced: layer by layer beside the last microbatch's
            ``backward``, as torch's DDP does; ``after`` a stage's last backward, while its rank
            waits; ``"auto"`` is the latter under a ``PipelineSchedule``, so with a pipeline or
            several microbatches, and the former where one forward and one backward are the step, as
            in a loop of one's own.
        ep: groups of this many ranks of ``dp_shard``, neighbours with different data, share the
            experts of a layer.
        imbalance: the load of the fullest expert over the mean load; a capacity factor of the model
            limits it.

    Schedules that do not end a step or keep stages twice are refused.
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
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
            if getattr(self, name) > _MOST_RANKS:
                raise ValueError(f"{name}={getattr(self, name)}: give at most {_MOST_RANKS:,}")
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
        """For each stage its pipeline ranks."""
        return find(self.schedule).placement(self.pp, self.n_chunks) if self.pp > 1 else ((0,),)

    @property
    def bytes_of(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def frees_after_forward(self) -> bool:
        return self.pp == 1 if self.reshard == "auto" else self.reshard

    @property
    def casts_weights(self) -> bool:
        """Whether products cast weights that are kept wider, as no FSDP2 gathers them so."""
        return self.n_data == 1 and self.bytes_of.computed < self.bytes_of.kept

    def is_scheduled(self, n_microbatches: int) -> bool:
        """Return whether a step is more than one forward and one backward, so that ``PipelineSchedule`` takes it."""
        return self.pp > 1 or n_microbatches > 1

    def reduces_in_backward(self, n_microbatches: int) -> bool:
        return self.reduces == "backward" or (
            self.reduces == "auto" and not self.is_scheduled(n_microbatches)
        )

    def splits_sequence(self, model: ModelConfig) -> bool:
        if self.sequence_parallel is None:
            return self.tp > 1 and self.pp == 1 and not model.tie_embeddings
        return self.sequence_parallel and self.tp > 1

    def expert_load(self, model: ModelConfig) -> float:
        """Return how much work the experts of the fullest rank have over the mean of ``ep`` ranks.

        One of its experts has ``imbalance`` times the mean load, and all others share the rest;
        none takes more than the capacity.
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
        return stage_plans(model, here, self.n_stages, self.tp, self.ep)

    def stages_of_all(self, model: ModelConfig) -> list[StagePlan]:
        return stage_plans(model, range(self.n_stages), self.n_stages, self.tp, self.ep)

    def n_microbatches(self, global_batch: int) -> int:
        """Of one data-parallel rank, in a step of ``global_batch`` sequences."""
        each = self.n_data * self.microbatch_size
        if global_batch < 1 or global_batch % each:
            near = max(each, round(global_batch / each) * each)
            raise ValueError(
                f"global_batch={global_batch} must be a multiple of data ranks × microbatch_size ="
                f" {self.n_data} × {self.microbatch_size} = {each}, in sequences of all ranks"
                f" together: the nearest is {near}"
            )
        m = global_batch // each
        if m * self.n_stages > _MOST_FORWARDS:
            raise ValueError(
                f"global_batch={global_batch} makes {m * self.n_stages:,} forwards of a pipeline,"
                f" each of which is simulated: give a batch of at most {_MOST_FORWARDS:,} of them"
            )
        return m

    def order(self, n_microbatches: int) -> Schedule:
        name = self.schedule if self.pp > 1 else "1f1b"
        return _built(name, self.pp, n_microbatches, self.n_chunks)

    def check(self, model: ModelConfig, cluster: Cluster) -> None:
        """Refuse what cannot be laid out."""
        if self.n_ranks != cluster.n_gpus:
            sizes = {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
            spelled = " × ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"{spelled} = {prod(sizes.values())} ranks, but the cluster has {cluster.n_nodes} ×"
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
        }
        sizes["ep"] = self.ep
        mesh = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"
        order = (
            f" {self.schedule}" + (f"×{self.n_chunks}" if self.n_chunks else "")
            if self.pp > 1
            else ""
        )
        return f"{mesh}{order} mb={self.microbatch_size} ac={self.ac}"


def check_ep(model: ModelConfig, ep: int, n_ranks: int) -> None:
    """Refuse expert parallelism without experts, and what does not divide them; ``n_ranks`` is what ``ep`` divides."""
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
    return build(name, n_ranks, n_microbatches, n_chunks if n_ranks > 1 else None)
