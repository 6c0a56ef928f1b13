"""Skip connections under torch's schedules: values are carried along from stage to stage.

torch's schedules send from neighbour to neighbour only.

    stage 0 writes "encoded" ──► stage 1 ──► stage 2 ──► stage 3 reads "encoded"
                                └─ carry it, and its gradient back ─┘

Every boundary in between pays for it. In :class:`course_pp.runtime.Pipeline` each value goes
straight to the ranks that read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.arguments import check_arguments
from course_pp.base.ranks import Ranks, rank_by_stage, refusing_together
from course_pp.base.torch_private import tree_map
from course_pp.model import PipelineStageModule
from course_pp.parallel.mesh import get_pp_mesh
from course_pp.parallel.replaced_forward import Replaced, has_replaced
from course_pp.schedule.edges import Declared, declared_by, edges_from, taken_apart

_VALUE, _CARRIED = "value", "carried"


@dataclass(frozen=True)
class _Load:
    """The named values a stage receives beside its input, and those it passes on."""

    stage: int
    arrives: tuple[str, ...]
    leaves: tuple[str, ...]
    declared: Declared


class _Carrying(Replaced):
    """Passes on values which stages beyond its neighbour read."""

    def __init__(self, forward: Callable[..., Any], load: _Load) -> None:
        super().__init__(forward)
        self.load = load

    def in_copy(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return _Carrying(forward, self.load).run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        load, carried = self.load, {}
        if load.arrives:
            value, carried = kwargs.pop(_VALUE), kwargs.pop(_CARRIED)
            args = (
                tuple(value)
                if isinstance(value, tuple | list)
                else ()
                if isinstance(value, Mapping)
                else (value,)
            )
            kwargs = {**kwargs, **value} if isinstance(value, Mapping) else kwargs
        read = {name: carried[name] for name in load.declared.reads}
        output = self.forward(*args, **kwargs, **read)
        values: Mapping[str, Any] = {}
        if load.declared.writes:
            output, values = taken_apart(load.stage, load.declared.writes, output)
        if not load.leaves:
            return output
        # A view, as torch's split backward starts from what has a history.
        onward = {
            name: values[name] if name in values else tree_map(_view, carried[name])
            for name in load.leaves
        }
        return {_VALUE: output, _CARRIED: onward}


def _view(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf


def carry_along(
    modules: Mapping[int, nn.Module], device_mesh: DeviceMesh | None
) -> dict[int, nn.Module]:
    """Let stages read values of stages beyond their neighbours under torch's schedules.

    Stages declare their values as for :class:`course_pp.runtime.Pipeline`: a stage whose attribute
    ``writes`` lists names returns ``(output, {name: value})``; a stage whose ``reads`` lists names
    gets these values as keyword arguments.

        stages = carry_along({i: stage_modules[i] for i in get_stage_indices("1f1b", rank, 4)},
        mesh)

    Args:
        modules: this rank's stages by number; they are changed in place, and keep the names of
            their parameters. Before FSDP2 and :func:`build_pipeline_stage`.
        device_mesh: call it on all ranks of the mesh.

    Returns:
        The same modules, whose forwards now carry the values.

    Raises:
        ValueError: on every rank, for a value that no stage or two stages write, or that goes
            backwards; or for a stage that carries already, whose forward was replaced, or that is
            of this package's model.
    """
    with refusing_together(device_mesh):
        check_arguments(carry_along, locals())
        for stage, module in modules.items():
            if has_replaced(module, _Carrying):
                raise ValueError(
                    f"stage {stage} carries already: call carry_along once, with the modules as you"
                    " made them"
                )
        declared = {stage: declared_by(stage, module) for stage, module in modules.items()}

    pp_mesh = get_pp_mesh(device_mesh)
    everyone = [declared] if pp_mesh is None else Ranks(pp_mesh.get_group()).gather(declared)
    with refusing_together(device_mesh):
        loads = _loads(modules, everyone)

    for stage, module in modules.items():
        load = loads[stage]
        if load.arrives or load.leaves or load.declared.writes:
            _Carrying(module.forward, load).put_on(module)
    return dict(modules)


def _loads(
    modules: Mapping[int, nn.Module], everyone: Sequence[Mapping[int, Declared]]
) -> dict[int, _Load]:
    # refuses stages that two ranks hold, or none
    rank_by_stage([sorted(theirs) for theirs in everyone])
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
                f"stage {stage} is a PipelineStageModule, which cannot carry {names}: put it into a"
                " module of your own, or use course_pp.runtime, where values go straight to their"
                " readers"
            )
        if "forward" in vars(module):
            raise ValueError(
                f"stage {stage} is a {type(module).__name__} whose forward was replaced (compiled,"
                " or wrapped by another package), so it cannot carry: call carry_along first"
            )
    return loads
