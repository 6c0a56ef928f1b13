"""What a model is cut between: its units, the modules that one stage holds as a whole.

    GPT2LMHeadModel            on the way to a list of blocks: every stage runs its forward
      transformer              likewise
        wte, wpe, drop         units
        h ── 0, 1, 2, …        units: the members of a list of like modules
        ln_f                   a unit
      lm_head                  a unit

A module without parameters whose result depends on no unit, such as one that computes rotary angles from positions, is
not a unit: every stage computes it for itself.
"""

from collections.abc import Iterator

from torch import nn

from course_pp.parallel.blocks import runs_of_like_modules

__all__ = ["candidates", "draws_random_numbers", "replaced_on_the_way"]

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may be units, by their first name, in the order in which the model names them."""
    on_the_way = _ancestors(model)
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    for name, part in model.named_modules():
        for child, module in part._modules.items() if name in on_the_way else ():
            path = f"{name}.{child}" if name else child
            if module is not None and path not in on_the_way and module not in seen:
                seen.add(module)
                found[path] = module
    return found


def replaced_on_the_way(model: nn.Module) -> str | None:
    """Return the name of a module on the way whose forward was replaced: a copy of it would run the whole model.

    ``torch.compile`` and accelerate's hooks put such a forward on the module itself; on a unit it does no harm.
    """
    for name in sorted(_ancestors(model)):
        part = model.get_submodule(name)
        forward = vars(part).get("forward")
        is_own = forward is None or getattr(forward, "__self__", None) is part
        if not is_own or getattr(part, "_compiled_call_impl", None) is not None:
            return name
    return None


def draws_random_numbers(module: nn.Module) -> bool:
    """Return whether a module, or a part of it, is a dropout: which stage runs it decides who draws which numbers."""
    return any(isinstance(part, _RANDOM) for part in module.modules())


def _ancestors(model: nn.Module) -> set[str]:
    """Return the names of the model, and of all modules on the way from it to a list of blocks, that list included."""
    found = {""}
    for run in runs_of_like_modules(model):
        for name in run:
            found |= set(_prefixes(name))
    # A module's second name, such as that of an encoder's embedding, leads the same way.
    ways = {id(model.get_submodule(name)) for name in found}
    return {name for name, part in model.named_modules(remove_duplicate=False) if id(part) in ways}


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])
