"""The shapes of a decoder's parameters on one rank, in FSDP2's groups.

Tensor and expert parallelism have cut them already.

Pure Python: the planner and the stack's own predictions count elements from the same shapes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from course_pp.base.sizes import ModelConfig, compute_layer_assignment


def shards_head(config: ModelConfig, tp: int) -> bool:
    """Return whether the head is cut over the vocabulary.

    A head that is a replicated embedding, or its copy, is not cut.
    """
    return not config.tie_embeddings and config.vocab_size % tp == 0


def cut_by_tp(model: ModelConfig) -> dict[str, int]:
    """Return the sizes that ``tp`` must divide."""
    sizes = {"n_heads": model.n_heads, "n_kv_heads": model.kv_heads}
    if len(model.expert_layers) < model.n_layers:
        sizes["ffn_dim"] = model.hidden_dim
    return sizes


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers and reduces together.

    Attributes:
        shapes: the shape of each parameter, as tensor and expert parallelism leave it.
        ep: the number of ranks that hold different experts, so that ``dp_shard / ep`` ranks share
            this group. Above 1 the group holds experts, and FSDP2 cuts them by columns.
    """

    shapes: tuple[Shape, ...] = ()
    ep: int = 1

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def n_elements(self) -> int:
        return sum(map(prod, self.shapes))


Layer = tuple[Group, ...]
"""One decoder layer: its group, and a second group of its experts under expert parallelism."""


@dataclass(frozen=True)
class Coordinates:
    """The place of a rank in the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int


@dataclass(frozen=True)
class StagePlan:
    """One stage on one rank, as shapes of its parameters in FSDP2's groups.

    Tensor parallelism has cut them already.

    Attributes:
        index: the stage's number, from 0 to ``n_stages - 1``.
        root: embedding, final norm and head, if the stage has them.
        dense: a decoder layer without experts.
        sparse: a decoder layer with experts.
        has_experts: True for each decoder layer of the stage that has experts, else False.
    """

    index: int
    n_stages: int
    root: Group
    dense: Layer
    sparse: Layer
    has_experts: tuple[bool, ...]

    @property
    def n_layers(self) -> int:
        return len(self.has_experts)

    @property
    def n_sparse(self) -> int:
        return sum(self.has_experts)

    @property
    def layers(self) -> list[Layer]:
        return [self.sparse if sparse else self.dense for sparse in self.has_experts]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.n_stages - 1

    @property
    def groups(self) -> list[Group]:
        return [
            *([self.root] if self.root else []),
            *(group for layer in self.layers for group in layer),
        ]

    def total(self, of: Callable[[Group], int]) -> int:
        """Return the sum over the groups; layers of one kind, being alike, are asked once."""
        dense, sparse = (sum(map(of, layer)) for layer in (self.dense, self.sparse))
        return of(self.root) + (self.n_layers - self.n_sparse) * dense + self.n_sparse * sparse


def coordinates(rank: int, *, pp: int, dp_replicate: int, dp_shard: int, tp: int) -> Coordinates:
    """Return a global rank's place in a mesh of these sizes, the last dimension running fastest."""
    rest, at_tp = divmod(rank, tp)
    rest, at_shard = divmod(rest, dp_shard)
    at_pp, at_replicate = divmod(rest, dp_replicate)
    if not 0 <= at_pp < pp:
        raise ValueError(f"rank {rank} of {pp * dp_replicate * dp_shard * tp}: give 0 to one less")
    return Coordinates(at_pp, at_replicate, at_shard, at_tp)


def stage_plans(
    config: ModelConfig, indices: Iterable[int], n_stages: int, tp: int, ep: int = 1
) -> list[StagePlan]:
    """Return the stages ``indices`` of ``n_stages``, layers split evenly."""
    has_experts = tuple(map(config.has_experts, range(config.n_layers)))
    ranges = compute_layer_assignment(config.n_layers, n_stages)
    dense, sparse = _dense(config, tp), _sparse(config, tp, ep) if config.n_experts else ()
    return [
        StagePlan(
            i,
            n_stages,
            _root(config, tp, i, n_stages),
            dense,
            sparse,
            has_experts[slice(*ranges[i])],
        )
        for i in indices
    ]


def gathered_elements(group: Group, dp_shard: int) -> int:
    """Rows are padded to a multiple of the ranks that share the group."""
    n_shards = dp_shard // group.ep
    return sum(-(-n // n_shards) * n_shards * size for n, size in _cut(group, n_shards))


def held_elements(group: Group, dp_shard: int, at: int) -> int:
    """Return the elements of a group that rank ``at`` of ``dp_shard`` holds.

    The last ranks may have few, or none.
    """
    n_shards, shard, held = dp_shard // group.ep, at // group.ep, 0
    for n, size in _cut(group, n_shards):
        each = -(-n // n_shards)
        held += max(0, min(each, n - shard * each)) * size
    return held


def _cut(group: Group, n_shards: int) -> list[tuple[int, int]]:
    """Return for each shape how many slices FSDP2 shares out, and their size.

    The slices are rows; of experts they are columns, if FSDP2 can cut those.
    """
    by_columns = [int(group.ep > 1 and shape[1] % n_shards == 0) for shape in group.shapes]
    return [
        (shape[i], prod(shape) // shape[i])
        for shape, i in zip(group.shapes, by_columns, strict=True)
    ]


def unsharded_elements(
    stages: Iterable[StagePlan], dp_shard: int, policy: bool | int, *, pipelined: bool
) -> int:
    """Return the most elements of gathered parameters alive in a step.

    ``parallel.traffic_and_memory`` has the formula.

    ``policy`` is ``reshard_after_forward``. The backward of a pipelined step keeps what it
    gathered.
    """
    left = Fraction(not policy) if isinstance(policy, bool) else Fraction(1, policy)
    n_elements = Fraction(0)
    for stage in stages:
        kinds = [
            [gathered_elements(group, dp_shard) for group in layer]
            for layer in (stage.dense, stage.sparse)
        ]
        layers = [kinds[sparse] for sparse in stage.has_experts]
        every, most = sum(map(sum, layers)), 0
        for i, layer in enumerate(layers):
            # A layer in use, and the group that backward gathers ahead; from one shard there is
            # nothing to gather.
            ahead = layers[i - 1][0] if i and dp_shard > 1 else 0
            most = max(most, sum(layer) + ahead)
        full = every if pipelined else most
        n_elements += gathered_elements(stage.root, dp_shard) + full + left * (every - full)
    return int(n_elements)


def _root(config: ModelConfig, tp: int, index: int, n_stages: int) -> Group:
    matrix: Shape = (config.vocab_size, config.dim)
    root: list[Shape] = [matrix] if index == 0 else []
    if index == n_stages - 1:
        root.append((config.dim,))
        if shards_head(config, tp):
            root.append((config.vocab_size // tp, config.dim))
        elif n_stages > 1 or not config.tie_embeddings:
            # a whole tied model has one matrix for both ends
            root.append(matrix)
    return Group(tuple(root))


def _dense(config: ModelConfig, tp: int) -> Layer:
    return (Group(_attention(config, tp) + _feed_forward(config, config.hidden_dim, tp)),)


def _sparse(config: ModelConfig, tp: int, ep: int) -> Layer:
    """Tensor parallelism cuts attention alone: experts are whole on each of its ranks."""
    dim, width = config.dim, config.expert_hidden_dim
    n_here, n_inner = config.n_experts // ep, config.n_ffn_matrices - 1
    experts: tuple[Shape, ...] = ((n_here, dim, width),) * n_inner + ((n_here, width, dim),)
    rest = (*_attention(config, tp), (config.n_experts, dim))
    if config.n_shared_experts:
        rest += _feed_forward(config, config.n_shared_experts * width, 1)
    return (Group(rest), Group(experts, ep)) if ep > 1 else (Group(rest + experts),)


def _attention(config: ModelConfig, tp: int) -> tuple[Shape, ...]:
    """Return the shapes of attention and both norms.

    Tensor parallelism takes rows from column-wise matrices, and columns from row-wise ones.
    """
    dim, q_dim, kv_dim = config.dim, config.q_dim, config.kv_heads * config.head_dim
    shapes: tuple[Shape, ...] = (
        (dim,),
        (q_dim // tp, dim),
        (kv_dim // tp, dim),
        (kv_dim // tp, dim),
    )
    shapes += ((dim, q_dim // tp), (dim,))
    if config.qkv_bias:
        shapes += ((q_dim // tp,), (kv_dim // tp,), (kv_dim // tp,))
    return shapes + ((config.head_dim,),) * (2 * config.qk_norm)


def _feed_forward(config: ModelConfig, width: int, tp: int) -> tuple[Shape, ...]:
    return ((width // tp, config.dim),) * (config.n_ffn_matrices - 1) + ((config.dim, width // tp),)
