"""Skip connections under torch's schedules, which send from neighbour to neighbour only: values are carried along.

    stage 0 writes "encoded" ──► stage 1 ──► stage 2 ──► stage 3 reads "encoded"
                                └─ carry it, and its gradient back ─┘

Every boundary in between pays for it; :func:`carried_bytes` counts it, beside what :class:`course_pp.runtime.Pipeline`
sends: there each value goes straight to the ranks that read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import check_arguments
from course_pp.collective import Ranks, on_every_rank, rank_by_stage
from course_pp.model import PipelineStageModule
from course_pp.module_extras import uncompiled
from course_pp.parallel._torch import tree_map
from course_pp.parallel.mesh import get_pp_mesh
from course_pp.parallel.pipeline import PipelineSchedule
from course_pp.parallel.replaced_forward import Replaced, replaced_forwards
from course_pp.parallel.stage_values import ValueMeta
from course_pp.schedule import Edge
from course_pp.schedule.edges import Declared, declared_by, edges_from, taken_apart

_VALUE, _CARRIED = "value", "carried"


@dataclass(frozen=True)
class _Load:
    """The named values that one stage gets from the stage before beside its output, and those it passes on."""

    stage: int
    arrives: tuple[str, ...]
    leaves: tuple[str, ...]
    declared: Declared


class _Carrying(Replaced):
    """Passes on values which stages beyond its neighbour read; put on by :func:`carry_along`."""

    def __init__(self, forward: Callable[..., Any], load: _Load) -> None:
        super().__init__(forward)
        self.load = load

    def in_copy(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return it around the copy's forward: what is carried crosses boundaries too."""
        return _Carrying(forward, self.load).run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with the values it reads, and return its output beside those that go on."""
        load, carried = self.load, {}
        if load.arrives:
            value, carried = kwargs.pop(_VALUE), kwargs.pop(_CARRIED)
            args = tuple(value) if isinstance(value, tuple | list) else () if isinstance(value, Mapping) else (value,)
            kwargs = {**kwargs, **value} if isinstance(value, Mapping) else kwargs
        read = {name: carried[name] for name in load.declared.reads}
        output = self.forward(*args, **kwargs, **read)
        values: Mapping[str, Any] = {}
        if load.declared.writes:
            output, values = taken_apart(load.stage, load.declared.writes, output)
        if not load.leaves:
            return output
        # A view, as torch's split backward starts from what has a history.
        onward = {name: values[name] if name in values else tree_map(_view, carried[name]) for name in load.leaves}
        return {_VALUE: output, _CARRIED: onward}


def _view(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf


def carry_along(modules: Mapping[int, nn.Module], device_mesh: DeviceMesh | None) -> dict[int, nn.Module]:
    """Let stages read values of stages beyond their neighbours under torch's schedules.

    Stages declare their values as for :class:`course_pp.runtime.Pipeline`: a stage whose attribute ``writes`` lists
    names returns ``(output, {name: value})``; a stage whose ``reads`` lists names gets these values as keyword
    arguments.

        stages = carry_along({i: stage_modules[i] for i in get_stage_indices("1f1b", rank, 4)}, mesh)

    Args:
        modules: this rank's stages by number; they are changed in place, and keep the names of their parameters.
            Before FSDP2 and :func:`build_pipeline_stage`.
        device_mesh: call it on all ranks of the mesh.

    Returns:
        The same modules, whose forwards now carry the values.

    Raises:
        ValueError: on every rank, for a value that no stage or two stages write, or that goes backwards; for a stage
            that no rank or two ranks hold, that carries already, or whose forward was replaced; and for a stage of this
            package's model in between, which knows only its own boundaries.
    """
    asked = locals()

    def declare() -> dict[int, Declared]:
        check_arguments(carry_along, asked)
        for stage, module in modules.items():
            if _carrying(module) is not None:
                raise ValueError(
                    f"stage {stage} carries already: call carry_along once, with the modules as you made them"
                )
        return {stage: declared_by(stage, module) for stage, module in modules.items()}

    declared = on_every_rank(device_mesh, declare)
    pp_mesh = get_pp_mesh(device_mesh)
    everyone = [declared] if pp_mesh is None else Ranks(pp_mesh.get_group()).gather(declared)
    loads = on_every_rank(device_mesh, lambda: _loads(modules, everyone))
    for stage, module in modules.items():
        load = loads[stage]
        if load.arrives or load.leaves or load.declared.writes:
            _Carrying(module.forward, load).put_on(module)
    return dict(modules)


def _carrying(module: nn.Module) -> _Carrying | None:
    around = replaced_forwards(uncompiled(module).forward)
    return next((each for each in around if isinstance(each, _Carrying)), None)


def _loads(modules: Mapping[int, nn.Module], everyone: Sequence[Mapping[int, Declared]]) -> dict[int, _Load]:
    """Return the load of each of this rank's stages, from what all stages declare."""
    rank_by_stage([sorted(theirs) for theirs in everyone])  # refuses stages that two ranks hold, or none
    declared = {stage: said for theirs in everyone for stage, said in theirs.items()}
    edges, loads = edges_from(declared), {}
    for stage, module in modules.items():
        arrives = tuple(edge.name for edge in edges if edge.writer < stage <= edge.readers[-1])
        leaves = tuple(edge.name for edge in edges if edge.writer <= stage < edge.readers[-1])
        loads[stage] = _Load(stage, arrives, leaves, declared[stage])
        if not arrives and not leaves:
            continue
        if isinstance(module, PipelineStageModule):
            names = ", ".join(map(repr, dict.fromkeys((*arrives, *leaves))))
            raise ValueError(
                f"stage {stage} is a PipelineStageModule, which cannot carry {names}: put it into a module of your "
                "own, or use course_pp.runtime, where values go straight to their readers"
            )
        if "forward" in vars(module):
            raise ValueError(
                f"stage {stage} is a {type(module).__name__} whose forward was replaced (compiled, or wrapped "
                "by another package), so it cannot carry: call carry_along first"
            )
    return loads


@dataclass(frozen=True)
class CarryingCost:
    """The bytes that skip connections add to a torch pipeline, for one microbatch in one direction.

    Attributes:
        edges: the values, and which stages write and read them.
        sizes: bytes of each value.
        ranks: the rank of each stage.
    """

    edges: tuple[Edge, ...]
    sizes: Mapping[str, int]
    ranks: tuple[int, ...]

    @property
    def by_boundary(self) -> tuple[dict[str, int], ...]:
        """For each boundary (s lies between stages s and s + 1) the bytes of each value that crosses it."""
        return tuple(
            {e.name: self.sizes[e.name] for e in self.edges if e.writer <= s < e.readers[-1]}
            for s in range(len(self.ranks) - 1)
        )

    @property
    def carried(self) -> int:
        """Bytes sent between ranks to carry the values."""
        return sum(sum(row.values()) for s, row in enumerate(self.by_boundary) if self.ranks[s] != self.ranks[s + 1])

    @property
    def by_stage(self) -> tuple[dict[str, int], ...]:
        """For each stage the bytes of each value that it keeps of a microbatch, from forward to backward.

        These are the values that it makes and those that it gets, even if it only passes them on. A value between two
        stages of one rank counts in both. A rank keeps that much for each microbatch in flight (``peak_activations`` of
        the schedule's timeline).
        """
        return tuple(
            {e.name: self.sizes[e.name] for e in self.edges if e.writer <= s <= e.readers[-1]}
            for s in range(len(self.ranks))
        )

    @property
    def direct(self) -> int:
        """Bytes sent if each value went straight to each rank that reads it, once."""
        return sum(
            self.sizes[edge.name] * len({self.ranks[reader] for reader in edge.readers} - {self.ranks[edge.writer]})
            for edge in self.edges
        )

    def __str__(self) -> str:
        def row(name: str, values: Mapping[str, int]) -> str:
            return f"{name:<16}{sum(values.values()):>14,}  {', '.join(values) or '-'}"

        head = f"{'boundary':<16}{'bytes':>14}  values carried"
        rows = [row(f"stage {s} to {s + 1}", carried) for s, carried in enumerate(self.by_boundary)]
        total = f"{'between ranks':<16}{self.carried:>14,}  against {self.direct:,} if sent to their readers only"
        kept = [row(f"kept in stage {s}", held) for s, held in enumerate(self.by_stage)]
        return "\n".join((head, *rows, total, *kept))


def carried_bytes(pipeline: PipelineSchedule) -> CarryingCost:
    """Count the bytes that :func:`carry_along` adds to the messages of one microbatch. Call it on every rank at once.

    Floating-point values cost the same again on the way back, as gradients. ``print`` the result for a table.

    Raises:
        RankMissing: if a rank does not come.
    """
    mine: dict[int, tuple[Declared, dict[str, int]]] = {}
    for stage in pipeline.stages:
        carrying = _carrying(stage.submod)
        assert stage.takes is not None  # settled
        tree = stage.takes.tree
        arrives = tree[_CARRIED] if isinstance(tree, Mapping) and _CARRIED in tree else {}
        sizes = {n: sum(meta.empty("meta").nbytes for meta in ValueMeta(each).metas) for n, each in arrives.items()}
        mine[stage.stage_index] = Declared() if carrying is None else carrying.load.declared, sizes
    everyone = Ranks(pipeline.stages[0].group).gather(mine)
    owner = rank_by_stage([sorted(theirs) for theirs in everyone])
    found = {stage: said for theirs in everyone for stage, said in theirs.items()}
    edges = edges_from({stage: declared for stage, (declared, _) in found.items()})
    sizes = {name: size for _, row in found.values() for name, size in row.items()}
    return CarryingCost(edges, sizes, tuple(owner[stage] for stage in sorted(owner)))
