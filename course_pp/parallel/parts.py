"""Which parts of the model each rank passed, and which of their parameters are one weight in several places.

This package's stages tell how many there are and which weights they share. Those of a foreign model do not, so their
ranks compare what they were given: each stage once, and a tied weight counted on the first stage that holds it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from course_pp.collective import Ranks, difference
from course_pp.model import PipelineStageModule, Transformer
from course_pp.model.stages import Tie
from course_pp.parallel.mesh import get_pp_mesh, get_pp_rank, get_pp_size
from course_pp.parallel.model_stage import ModelStage
from course_pp.parallel.split.stage import SplitStage
from course_pp.tied import Look, looks_of, problem_of_forgotten_ties

__all__ = ["Part", "Parts", "agree_on_parts", "note_of", "parts_of"]

Part = nn.Module | PipelineStage


@dataclass(frozen=True)
class Parts:
    """What this rank passed.

    Attributes:
        modules: one a stage.
        stages: the index of each module's stage; None where it cannot be told.
        n_stages: stages of the whole pipeline; None where no module can tell.
        ties: for each tied weight the parameter's name by stage.
        ties_are_known: whether the caller or a stage has said which weights are tied.
    """

    modules: tuple[nn.Module, ...]
    stages: tuple[int | None, ...]
    n_stages: int | None
    ties: tuple[Tie, ...] = field(default=())
    ties_are_known: bool = True

    @property
    def are_ours(self) -> bool:
        """Whether all modules are this package's: they know their number and ties, so ranks need not compare first."""
        return not self.ties and all(isinstance(module, Transformer) for module in self.modules)

    def ends(self, tie: Tie) -> list[tuple[int, nn.Parameter]]:
        """Return this rank's places of a tied weight: stage and parameter."""
        return [
            (stage, module.get_parameter(tie[stage]))
            for stage, module in zip(self.stages, self.modules, strict=True)
            if stage is not None and stage in tie
        ]

    def uncounted(self) -> set[int]:
        """Return the ids of the parameters that repeat a weight another stage counts."""
        heads = [m for m in self.modules if isinstance(m, Transformer) and m.head is not None]
        ends = [(stage == min(tie), parameter) for tie in self.ties for stage, parameter in self.ends(tie)]
        repeats = [m.tied_weight for m in heads] + [p for first, p in ends if not first]
        return {id(p) for p in repeats if p is not None} - {id(p) for first, p in ends if first}


def parts_of(
    model_or_stages: Part | Iterable[Part] | Mapping[int, Part],
    tied: Sequence[Tie] | None,
    device_mesh: DeviceMesh | None,
) -> Parts:
    """Read the arguments of :func:`clip_grad_norm_`.

    Raises:
        TypeError: for what is neither a module nor a stage, or a tie that is no mapping of stages to names.
    """
    if isinstance(model_or_stages, Mapping):
        numbers, given = list(model_or_stages), list(model_or_stages.values())
    else:
        alone = isinstance(model_or_stages, nn.Module | PipelineStage)
        given = [model_or_stages] if alone else list(model_or_stages)  # type: ignore[arg-type]
        numbers = [None] * len(given)
    modules = [part.submod if isinstance(part, PipelineStage) else part for part in given]
    strangers = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]
    if strangers or not modules:
        raise TypeError(
            f"model_or_stages holds {strangers or 'nothing'}: pass a model, a stage, or the list of this rank's stages"
        )
    stages = [_stage_index(part) if number is None else number for number, part in zip(numbers, given, strict=True)]
    if stages == [None]:  # one stage a rank is stage r on rank r
        stages = [get_pp_rank(device_mesh)]
    n_stages = next((n for part in given if (n := _n_stages(part)) is not None), None)
    if tied is None and not all(isinstance(module, Transformer) for module in modules):
        known = (part.ties for part in (*given, *modules) if isinstance(part, ModelStage | SplitStage))
        tied = next(known, None)
    is_whole = len(modules) == 1 and get_pp_size(device_mesh) == 1
    return Parts(tuple(modules), tuple(stages), n_stages, _ties(tied), tied is not None or is_whole)


def agree_on_parts(parts: Parts, device_mesh: DeviceMesh | None, copies: int = 1) -> Ranks:
    """Check, on every rank at once, that the parts of a foreign model make up one model.

    Returns:
        The ranks that compared.

    Raises:
        ValueError: on every rank, if it cannot be known that these ranks hold the whole model; if a stage is missing or
            there twice; for ties that differ, or name a stage or parameter that does not exist; or for weights that
            look tied, if nobody has said whether they are.
    """
    everyone = _ranks_of(parts, device_mesh)
    mine = _Held(
        _column(device_mesh),
        parts.stages,
        parts.n_stages,
        tuple(dict(tie) for tie in parts.ties),
        _problem_of_stages(parts) or _problem_of_ties(parts),
        () if parts.ties_are_known else _shapes_of_embeddings(parts.modules),
    )
    held = everyone.gather(mine)
    problem = (
        next((f"rank {rank}: {one.problem}" for rank, one in enumerate(held) if one.problem), None)
        or difference([{"tied": list(one.ties)} for one in held])
        or next(
            filter(None, (_problem_of_column(held, column, copies) for column in {one.column for one in held})), None
        )
    )
    problem = problem or _problem_of_forgotten_ties(parts, held, device_mesh, everyone)
    if problem is not None:
        raise ValueError(problem)
    return everyone


@dataclass(frozen=True)
class _Held:
    """What a rank tells the others: the ranks of one ``column`` of the mesh make up one pipeline.

    ``embeddings`` are their shapes, where nobody has said what is tied.
    """

    column: tuple[int, ...]
    stages: tuple[int | None, ...]
    n_stages: int | None
    ties: tuple[dict[int, str], ...]
    problem: str | None
    embeddings: tuple[tuple[int, ...], ...] = ()


def note_of(column: Iterable[int], stages: Iterable[int], n_stages: int | None) -> object:
    """Return what a rank tells the others of parts that share no weight; its size does not depend on which it holds."""
    return _Held(tuple(column), tuple(stages), n_stages, (), None)


def _stage_index(part: Part) -> int | None:
    if isinstance(part, PipelineStage):
        return int(part.stage_index)
    return part.stage_id if isinstance(part, PipelineStageModule | SplitStage) else None


def _n_stages(part: Part) -> int | None:
    if isinstance(part, PipelineStage):
        return int(part.num_stages)
    return part.num_stages if isinstance(part, PipelineStageModule | SplitStage) else None


def _ties(tied: Sequence[Tie] | None) -> tuple[Tie, ...]:
    ties = () if tied is None else tuple(tied)
    for tie in ties:
        if not isinstance(tie, Mapping) or len(tie) < 2:
            raise TypeError(
                f"tied={tied!r} must list for each tied weight its name by stage, at least two of them, such as "
                '[{0: "embed.weight", 3: "head.weight"}]'
            )
    return ties


def _problem_of_stages(parts: Parts) -> str | None:
    strange = [stage for stage in parts.stages if stage is not None and (type(stage) is not int or stage < 0)]
    return f"stage {strange[0]!r} must be a whole number of at least 0: pass {{stage: module}}" if strange else None


def _problem_of_ties(parts: Parts) -> str | None:
    if parts.ties and None in parts.stages:
        return f"tied={list(parts.ties)}, but it is unknown which stages the modules are: pass {{stage: module, …}}"
    for tie in parts.ties:
        for stage, module in zip(parts.stages, parts.modules, strict=True):
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            if stage is not None and stage in tie and tie[stage] not in names:
                return f"tied={dict(tie)}, but stage {stage} has no parameter {tie[stage]!r}: it has {', '.join(names)}"
    return None


def _shapes_of_embeddings(modules: Iterable[nn.Module]) -> tuple[tuple[int, ...], ...]:
    embeddings = (part for module in modules for part in module.modules() if isinstance(part, nn.Embedding))
    return tuple(tuple(part.weight.shape) for part in embeddings)


def _problem_of_forgotten_ties(
    parts: Parts, held: Sequence[_Held], device_mesh: DeviceMesh | None, everyone: Ranks
) -> str | None:
    """Return which weight would count twice, as nobody has said that it is tied; None if there is none.

    Values are compared only where a weight has the shape of an embedding: this happens in every step. Two embeddings
    of one shape are judged by the layers around them, so all are looked at.
    """
    found = Counter(shape for one in held if one.column == held[0].column for shape in one.embeddings)
    if not found:
        return None
    shapes = None if max(found.values()) > 1 else found.keys()
    pp_rank, pp_size = get_pp_rank(device_mesh), get_pp_size(device_mesh)
    # Modules whose stage nobody has said are numbered as if stages went round the ranks.
    numbers = [pp_rank + i * pp_size if stage is None else stage for i, stage in enumerate(parts.stages)]
    mine = everyone.collectively(lambda: looks_of(dict(zip(numbers, parts.modules, strict=True)), shapes))
    looks: dict[int, dict[str, Look]] = {}
    for one, theirs in zip(held, everyone.gather(mine), strict=True):
        if one.column == held[0].column:
            looks |= theirs
    return problem_of_forgotten_ties(looks)


def _problem_of_column(held: Sequence[_Held], column: tuple[int, ...], copies: int) -> str | None:
    """Return what keeps the stages of one pipeline from being the whole model."""
    ranks = [one for one in held if one.column == column]
    stages = [stage for one in ranks for stage in one.stages]
    known = [stage for stage in stages if stage is not None]
    n_stages = next((one.n_stages for one in ranks if one.n_stages is not None), len(stages) // copies)
    twice = [stage for stage, times in Counter(known).items() if times > copies]
    if twice:
        return f"stage {twice[0]} was passed twice: pass each rank's own stages, as {{stage: module, …}}"
    if len(stages) != n_stages * copies or any(not 0 <= stage < n_stages for stage in known):
        return (
            f"clip_grad_norm_ was given stages {sorted(known)} of {n_stages}, so its norm would not be the whole "
            "model's: pass the list of all of this rank's stages on every rank"
        )
    lost = [stage for tie in held[0].ties for stage in tie if stage not in known]
    return f"tied names stage {lost[0]!r}, but the stages are 0 to {n_stages - 1}" if lost else None


def _column(device_mesh: DeviceMesh | None) -> tuple[int, ...]:
    """Return this rank's place in the mesh but for ``pp``; without a mesh each rank has the whole model."""
    if device_mesh is None:
        return (Ranks().rank,)
    place = zip(device_mesh.mesh_dim_names or (), device_mesh.get_coordinate() or (), strict=False)
    return tuple(coordinate for name, coordinate in place if name != "pp")


def _ranks_of(parts: Parts, device_mesh: DeviceMesh | None) -> Ranks:
    """Return the ranks that hold the model between them."""
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if device_mesh is not None and device_mesh.size() == n_ranks:
        return Ranks()
    if device_mesh is not None:
        pp_mesh = get_pp_mesh(device_mesh)
        return Ranks(alone=True) if pp_mesh is None else Ranks(pp_mesh.get_group())
    meshes = {p.device_mesh.size() for module in parts.modules for p in module.parameters() if isinstance(p, DTensor)}
    if n_ranks == 1 or n_ranks in meshes:
        return Ranks()
    names = ", ".join(type(module).__name__ for module in parts.modules)
    raise ValueError(
        f"device_mesh is None in a process group of {n_ranks} ranks, and {names} does not say whether it is the whole "
        "model or a part of it: pass device_mesh=, the mesh of init_distributed, whose pp dimension tells"
    )


def check_own_parts(parts: Parts, device_mesh: DeviceMesh | None) -> None:
    """Refuse what this package's stages can tell alone, without a message.

    Raises:
        ValueError: for a part of the model without a mesh, or a whole model on a mesh with several ``pp`` ranks.
    """
    modules, n_stages = parts.modules, parts.n_stages
    complete = n_stages is not None and len({id(module) for module in modules}) == n_stages
    if device_mesh is None and any(map(_is_part, modules)) and not complete:
        held = f"{len(modules)} of {n_stages} stages" if n_stages else "part of the model"
        raise ValueError(
            f"this rank holds {held} but device_mesh is None, so its norm would not be the whole model's: "
            "pass device_mesh=, the mesh of init_distributed"
        )
    if get_pp_size(device_mesh) > 1 and not any(map(_is_part, modules)):
        raise ValueError(
            f"this rank holds the whole model, but the mesh has pp={get_pp_size(device_mesh)} ranks of stages, whose "
            "norms would be added up: pass this rank's stages, or build the mesh with pp=1"
        )


def _is_part(module: nn.Module) -> bool:
    return isinstance(module, Transformer) and (module.embed is None or module.head is None)
