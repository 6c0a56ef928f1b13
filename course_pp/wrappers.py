"""Wrappers of modules: what is inside one, and those that a pipeline cannot run a stage in.

The latter gather or reduce by themselves and count on one forward and one backward a step. A pipeline has several
forwards in flight and may put weight gradients off, so gradients would be wrong without a word.
"""

import sys
from collections.abc import Iterator

from torch import nn

__all__ = ["is_flattened", "problem_of_wrappers", "uncompiled"]


def problem_of_wrappers(module: nn.Module, what: str) -> str | None:
    """Return why ``module`` cannot be a stage because of what it, or a part of it, is wrapped in; None if it can.

    Args:
        what: the module's name in the sentence, such as ``stage 2``.
    """
    for path, part in module.named_modules():
        wrapper = next((kind for kind in _wrappers() if isinstance(part, kind)), None)
        if wrapper is not None:
            return (
                f"{f'{path!r} of {what}' if path else what} is wrapped in {wrapper.__name__}, which counts on one "
                "forward and one backward a step: give the module inside it, and for data-parallel ranks shard that "
                "with fully_shard (FSDP2)"
            )
    return None


def is_flattened(parameter: nn.Parameter) -> bool:
    """Return whether FullyShardedDataParallel (FSDP1) has made a parameter a piece of a flat one, or this is flat."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and (
        isinstance(parameter, fsdp.FlatParameter) or getattr(parameter, "_fsdp_flattened", False)
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside what ``torch.compile`` returns, or ``module`` itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def _wrappers() -> Iterator[type]:
    """Yield what is refused. Most is looked for and not imported: whoever has applied it has done so."""
    yield nn.DataParallel
    yield nn.parallel.DistributedDataParallel
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        yield fsdp.FullyShardedDataParallel
    # DDP without a wrapper, by `replicate`: the class has no public name.
    if (replicate := sys.modules.get("torch.distributed._composable.replicate")) is not None:
        yield replicate.DDP
