"""A model's blocks: the repeated modules of which it mostly consists.

Each block is checkpointed, compiled and sharded by itself.

    model ─┬─ embed
           ├─ layers ── 0, 1, 2, …     blocks: the longest run of one class in one container
           └─ head

Everything else, here ``embed`` and ``head``, belongs to the root.

Blocks, attentions and the matrices of a plan are given by name patterns, which are matched one part
of a dotted name at a time, as torch's ``parallelize_module`` does: ``model.layers.*`` is every
layer and nothing inside one.
"""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TypeGuard

from torch import nn

from course_pp.base.arguments import checked
from course_pp.base.torch_private import own_children
from course_pp.step.hooks import problem_of_wrappers

Blocks = type[nn.Module] | str | Sequence[type[nn.Module] | str] | None
"""The choice of the modules that are blocks: see :func:`find_blocks`."""

_LISTS = (nn.ModuleList, nn.ModuleDict)  # they have no forward, so nothing can be done to them


@checked
def find_blocks(module: nn.Module, blocks: Blocks = None) -> dict[str, nn.Module]:
    """Find the blocks of ``module``, by their names in it, in order.

    Args:
        module: any model, or a stage of one.
        blocks: a class of modules; a name pattern such as ``"model.layers.*"``, whose ``*`` stays
            within one part of a dotted name; or several of these. ``()`` makes the whole module one
            block, named ``""``. With None the function looks for the longest run of modules of one
            class in a ModuleList, ModuleDict or Sequential, at any depth, but not within a run that
            was found. Parts without parameters do not count.

    Raises:
        ValueError: if there are none, two runs are equally long, one block is inside another or has
            two names, or ``module`` holds a wrapper such as DistributedDataParallel.
    """
    problem = problem_of_wrappers(module, "the module")
    if problem is not None:
        raise ValueError(problem)
    if blocks is None:
        return _longest_run(module)
    wanted = [blocks] if isinstance(blocks, str | type) else list(blocks)
    found = {} if wanted else {"": module}
    for each in wanted:
        matching = modules_wanted(module, each)
        if not matching:
            raise ValueError(problem_of_none(module, each, "blocks"))
        found |= matching
    _check_apart(found)
    return found


def modules_wanted(module: nn.Module, each: type[nn.Module] | str) -> dict[str, nn.Module]:
    """Return the parts of a class, or whose names match a pattern, by name; there may be none."""
    if isinstance(each, str):
        return modules_matching(module, each)
    return {
        n: part
        for n, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, each)
    }


def problem_of_none(module: nn.Module, each: type[nn.Module] | str, option: str) -> str:
    """Return the message for an ``option=each`` that matches nothing."""
    if not isinstance(each, str):
        return (
            f"{option}={each.__name__} matches no module of {type(module).__name__}:"
            f" {_what_is_there(module)}"
        )
    names = [name for name, _ in module.named_modules()]
    return (
        f"{option}={each!r} matches no module of {type(module).__name__}: the nearest names are "
        f"{listed(nearest(each, names) or [n for n, _ in module.named_children()])}"
    )


def _check_apart(found: dict[str, nn.Module]) -> None:
    """Refuse a block that has two names or lies inside another: it would be transformed twice."""
    names: dict[nn.Module, str] = {}
    for name, block in found.items():
        if names.setdefault(block, name) != name:
            raise ValueError(
                f"blocks {names[block]!r} and {name!r} are one module under two names: name it once"
            )
    for name, block in found.items():
        inner = next(
            (names[part] for part in block.modules() if part is not block and part in names), None
        )
        if inner is not None:
            outer = repr(name) if name else "the module itself"
            raise ValueError(
                f"block {inner!r} is inside {outer}, which is a block too: choose blocks of one"
                " level, such as one class or one pattern"
            )


def runs_of_like_modules(module: nn.Module) -> list[dict[str, nn.Module]]:
    """Return every outermost run of modules of one class in a container.

    A container is a ModuleList, a ModuleDict or a Sequential.
    """
    return list(_runs(module, "", lone=False)) or list(_runs(module, "", lone=True))


def _longest_run(module: nn.Module) -> dict[str, nn.Module]:
    runs = runs_of_like_modules(module)
    if not runs:
        raise ValueError(
            f"{type(module).__name__} holds no ModuleList, ModuleDict or Sequential of like"
            f" modules, so its blocks cannot be found: {_what_is_there(module)}"
        )
    longest = max(map(len, runs))
    best = [run for run in runs if len(run) == longest]
    if len(best) > 1:
        (first, one), (second, other) = (next(iter(run.items())) for run in best[:2])
        raise ValueError(
            f"{type(module).__name__} holds {longest} {type(one).__name__} from {first!r} on and as"
            f" many {type(other).__name__} from {second!r} on, so its blocks cannot be told: pass"
            " blocks=, a class, a name pattern or several, or () for the whole module as one block"
        )
    _check_apart(best[0])
    return best[0]


def _runs(module: nn.Module, name: str, *, lone: bool) -> Iterator[dict[str, nn.Module]]:
    """Return every outermost run of like modules at or below ``module``.

    ``lone`` says whether a Sequential of one module counts. It is mostly a wrapper, while a
    ModuleList of one module is a short list.
    """
    here = {}
    for child, part in own_children(module).items():
        if _is_here(part):
            here[f"{name}.{child}" if name else child] = part
    taken: set[str] = set()
    if isinstance(module, (*_LISTS, nn.Sequential)):
        least = 2 if len(here) > 1 or (isinstance(module, nn.Sequential) and not lone) else 1
        for kind, group in groupby(here.items(), key=lambda item: type(item[1])):
            run = dict(group)
            if (
                len(run) >= least
                and not issubclass(kind, _LISTS)
                and any(map(_has_parameters, run.values()))
            ):
                taken |= set(run)
                yield run
    for child, part in here.items():
        if child not in taken:
            yield from _runs(part, child, lone=lone)


def _is_here(part: nn.Module | None) -> TypeGuard[nn.Module]:
    """Return whether a part belongs to this stage.

    A stage of auto_split holds placeholders for the blocks of other stages.
    """
    return part is not None and not getattr(type(part), "of_another_stage", False)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _what_is_there(module: nn.Module) -> str:
    parts = (
        p
        for p in module.modules()
        if p is not module and not isinstance(p, _LISTS) and _has_parameters(p)
    )
    kinds = list(dict.fromkeys(type(part).__name__ for part in parts))
    there = f"it has {', '.join(kinds[:8])}; " if kinds else ""
    return f"{there}pass blocks= a class or a name pattern, or () for the whole module as one block"


def modules_matching(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the parts of ``module`` whose name matches, by name, in order.

    A part with two names is there twice.

    In ``layers.*.mlp.down_proj``, ``*`` stays within one part of the name. The empty pattern is
    ``module`` itself.
    """
    parts = pattern.split(".")

    def matches(name: str) -> bool:
        own = name.split(".")
        return (
            bool(name) == bool(pattern)
            and len(own) == len(parts)
            and all(map(fnmatchcase, own, parts))
        )

    return {
        name: part for name, part in module.named_modules(remove_duplicate=False) if matches(name)
    }


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """At most three of ``names`` that look most like ``name``, best first."""
    return get_close_matches(name, [each for each in names if each], n=3, cutoff=0.4)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return the names in quotation marks, the first few of many."""
    names = list(names)
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
