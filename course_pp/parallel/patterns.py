"""Modules by name pattern: one rule for plans, blocks and attention.

A pattern is matched one part of a dotted name at a time, as torch's ``parallelize_module`` does, so ``model.layers.*``
is every layer and nothing inside one.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["listed", "modules_matching", "nearest"]


def modules_matching(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the parts of ``module`` whose name matches, by name, in order; a part that has two names is there twice.

    Args:
        pattern: such as ``layers.*.mlp.down_proj``; ``*``, ``?`` and ``[...]`` stay within one part of the name. The
            empty pattern is ``module`` itself.
    """
    parts = pattern.split(".")
    return {
        name: part
        for name, part in module.named_modules(remove_duplicate=False)
        if bool(name) == bool(pattern) and _matches(name.split("."), parts)
    }


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """At most three of ``names`` that look most like ``name``, best first."""
    return get_close_matches(name, [each for each in names if each], n=3, cutoff=0.4)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return the names in quotation marks, the first few of many."""
    names = list(names)
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
