"""Replaced forwards of a model: recomputed in backward, compiled, or in half precision.

A replacement keeps what it replaced, so several lie one around the other. Unlike a wrapper module,
it changes neither the parameters' names nor the module's class. Hooks of the module, such as
FSDP2's, run around it: once, and not again in a recomputation. (``nn.Module.compile`` would put
hooks into the graph.)

    FSDP2 gathers ─► compiled forward of a block ─► FSDP2 frees
                  or checkpoint ( compiled forward )

Each block is compiled by itself, so that one compilation serves all that are alike; FSDP2's work
between blocks would break a larger graph into the same pieces.

Half precision is for ranks without FSDP2, while parameters stay in float32:

    what arrives ─► float32 ─► forward, products in half precision ─► half precision ─► what is sent

FSDP2 gathers parameters in half precision (:func:`default_mp_policy`). Without it each product
casts its operands (``torch.autocast``), and norms, softmax and the residual stream inside a stage
stay in float32. Both send half precision, and add the gradients of microbatches up in float32, so
they differ by rounding alone. Memory differs: autocast keeps copies of the weights for each
microbatch in flight, FSDP2 one copy for all.

Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from course_pp.base.arguments import check_arguments, checked
from course_pp.base.ranks import refusing_together
from course_pp.base.torch_private import (
    is_compiled_in_place,
    mixed_precision,
    own_buffers,
    tree_flatten,
    tree_map,
    uncompiled,
    version_of,
)
from course_pp.model import MoE
from course_pp.parallel.blocks import Blocks, find_blocks, listed, nearest


class Replaced:
    """A replacement of a module's ``forward``; ``forward`` is what it had before."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module returns."""
        raise NotImplementedError

    def put_on(self, module: nn.Module) -> None:
        """Make this the forward of ``module``.

        The forward is the bound method, because torch.compile compiles anew for each callable
        object.
        """
        module.forward = self.run

    def in_copy(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward that takes this one's place in a copy on the meta device.

        A copy has no numbers, so it does not matter there how a result is computed.
        """
        return forward


def replaced_forwards(forward: Any) -> Iterator[Replaced]:
    """Yield the replacements around a module's forward, outermost first.

    There are none if the forward is the module's own.
    """
    while isinstance(replaced := getattr(forward, "__self__", None), Replaced):
        yield replaced
        forward = replaced.forward


def has_replaced(module: nn.Module, kind: type[Replaced]) -> bool:
    """Return whether the forward of ``module``, or of a part of it, is of this kind."""
    return any(
        isinstance(each, kind)
        for part in module.modules()
        for each in replaced_forwards(part.forward)
    )


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` or a part of it is compiled.

    It may be compiled by :func:`apply_compile`, in place, or in a wrapper.
    """
    for part in module.modules():
        if uncompiled(part) is not part or is_compiled_in_place(part):
            return True
    return has_replaced(module, Compiled)


class Compiled(Replaced):
    """Runs what ``torch.compile`` makes of it, when it first runs."""

    def __init__(self, forward: Callable[..., Any], backend: str) -> None:
        super().__init__(forward)
        self._compiled = torch.compile(forward, backend=backend)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)


class Uncompiled(Replaced):
    """A forward that stays out of its block's compiled graph.

    Experts need this: the sizes they compute with depend on the number of rows each of them gets.
    """

    @torch.compiler.disable
    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class Recomputed(Replaced):
    """Keeps only its arguments, and is run again in backward."""

    def put_on(self, module: nn.Module) -> None:
        super().put_on(module)
        self._module = module

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        for name in ("past_key_values", "layer_past"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is a {type(kwargs[name]).__name__}, which recomputing a checkpointed"
                    " block would fill again: train with use_cache=False (model.config.use_cache ="
                    " False)"
                )
        options: dict[str, Any] = {}
        if not torch.compiler.is_compiling() and next(self._module.buffers(), None) is not None:
            options["context_fn"] = _Buffers(self._module).contexts
        return checkpoint(self.forward, *args, use_reentrant=False, **options, **kwargs)


class _Buffers:
    """The buffers of a module as one forward found them.

    The recomputation of this forward uses them and leaves the module's own buffers alone.

    Otherwise BatchNorm would count each microbatch twice, and a spectral norm be recomputed from a
    later value. Enter it around each recomputation: torch's half of weight gradients has one for
    each parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if own_buffers(part)]
        self._before: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self._now: list[tuple[nn.Module, dict[str, Tensor | None]]] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._noted(), self

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep copies of the buffers that the forward inside changes."""
        there = [
            (part, {n: b for n, b in own_buffers(part).items() if b is not None})
            for part in self._parts
        ]
        versions = [_versions(buffers) for _, buffers in there]
        copies = [
            (part, {name: buffer.clone() for name, buffer in buffers.items()})
            for part, buffers in there
        ]
        yield
        for copied, (part, buffers), before in zip(copies, there, versions, strict=True):
            # BatchNorm counts its batches in the open, but changes its statistics behind autograd's
            # back.
            changed = any(
                own_buffers(part).get(name) is not buffer for name, buffer in buffers.items()
            )
            if changed or _versions(buffers) != before:
                self._before.append(copied)

    def __enter__(self) -> None:
        """Let the forward inside find those buffers, and change copies of them."""
        self._now = [(part, dict(own_buffers(part))) for part, _ in self._before]
        for part, buffers in self._before:
            own_buffers(part).update({name: buffer.clone() for name, buffer in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for part, held in self._now:
            own_buffers(part).update(held)


def _versions(buffers: Mapping[str, Tensor]) -> list[int]:
    return [version_of(buffer) for buffer in buffers.values()]


class EightBits(Replaced):
    """Multiplies in float8 what the linear layer multiplies; ``config`` is torchao's."""

    def __init__(self, layer: nn.Linear, config: Any) -> None:
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

        super().__init__(layer.forward)
        self._layer, self._config = layer, config
        self._products = Float8Linear.from_float(layer, config).linear_mm_config
        self._multiply = matmul_with_hp_or_float8_args.apply

    def run(self, input: Tensor) -> Tensor:
        kind, layer = input.device.type, self._layer
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        output: Tensor = self._multiply(input, layer.weight.t(), self._products, self._config)
        return output if layer.bias is None else output + layer.bias.to(output.dtype)


class HalfPrecision(Replaced):
    """Computes in bfloat16 or float16, under autocast, on float32 and to half precision."""

    def __init__(self, forward: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(forward)
        self.dtype = dtype

    def in_copy(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return HalfPrecision(forward, self.dtype).run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = (tree_map(self._widened, value) for value in (args, kwargs))
        device = next(
            (leaf.device for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)),
            None,
        )
        kind = "cpu" if device is None or device.type == "meta" else device.type
        with torch.autocast(kind, dtype=self.dtype):
            output = self.forward(*args, **kwargs)
        return tree_map(self._narrowed, output)

    def _widened(self, leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == self.dtype else leaf

    def _narrowed(self, leaf: Any) -> Any:
        return (
            leaf.to(self.dtype)
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32
            else leaf
        )


@checked
def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Let ``module`` compute in ``dtype``, in place; after activation checkpointing.

    Args:
        module: any, with parameters in float32.
        dtype: bfloat16 or float16. A no-op for what the parameters are in, or FSDP2 computes in
            already.
    """
    now = next(iter(compute_dtypes(module)), torch.get_default_dtype())
    if now == dtype:
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"compute_in(..., {dtype}): compute in torch.bfloat16 or torch.float16, or in {now} as"
            " it is"
        )
    if now != torch.float32:
        raise ValueError(
            f"a {type(module).__name__} that computes in {now} cannot compute in {dtype}: keep its"
            " parameters in float32, or under FSDP2 give apply_fsdp2 the policy"
            " default_mp_policy(dtype)"
        )
    HalfPrecision(module.forward, dtype).put_on(module)


def compute_dtypes(module: nn.Module) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a module computes and sends, each once.

    With mixed precision it is one dtype, without it the dtypes of the parameters.
    """
    policy = mixed_precision(module)
    mixed = _half_precision(module) if policy is None else policy.output_dtype or policy.param_dtype
    if mixed is not None:
        return (mixed,)
    return tuple(dict.fromkeys(p.dtype for p in module.parameters() if p.is_floating_point()))


def casts_inputs(module: nn.Module) -> bool:
    """Return whether mixed precision casts what a module is called with."""
    policy = mixed_precision(module)
    if policy is None:
        return _half_precision(module) is not None
    return policy.param_dtype is not None and policy.cast_forward_inputs


def _half_precision(module: nn.Module) -> torch.dtype | None:
    around = replaced_forwards(module.forward)
    return next((each.dtype for each in around if isinstance(each, HalfPrecision)), None)


def spelled(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes))) or "no dtype, as it has no parameters"


def apply_ac(
    model: nn.Module,
    mode: Literal["none", "full", "selective"],
    *,
    blocks: Blocks = None,
    device_mesh: DeviceMesh | None = None,
) -> tuple[str, ...]:
    """Checkpoint the blocks of ``model`` in place.

    Call it after tensor parallelism, before compilation and FSDP2.

    Results do not change. Each microbatch keeps the state of the random number generators it was
    computed with, so dropout is recomputed as it was. Under a schedule that splits backward
    (``zb_v``, ``interleaved_zb``, ``dualpipe_v``) torch runs a checkpointed module's forward again
    for each of its parameters, not just once.

    Args:
        model: any model, or one stage of it.
        mode: ``"none"``, a no-op; ``"full"``, every block, of which only the input is kept (Chen et
            al. 2016, arXiv:1604.06174); ``"selective"``, in every block the part whose class is
            named ``…Attention…`` (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
        blocks: see :func:`find_blocks`.
        device_mesh: call on all its ranks; if one refuses, all refuse. None asks no other rank.

    Returns:
        The names of the modules that are recomputed.
    """
    found: dict[str, nn.Module] = {}
    with refusing_together(device_mesh):
        check_arguments(apply_ac, locals())
        if mode != "none":
            check_order(model, "activation checkpointing")
            found = find_blocks(model, blocks)
        if mode == "selective":
            found = dict(_attention_of(name, block) for name, block in found.items())

    for module in found.values():
        Recomputed(module.forward).put_on(module)
    return tuple(found)


def _attention_of(name: str, block: nn.Module) -> tuple[str, nn.Module]:
    found = _outermost_attention(block)
    if len(found) != 1:
        which = f" ({listed(found)})" if found else ""
        kinds = ", ".join(
            f"{child!r} ({type(part).__name__})" for child, part in block.named_children()
        )
        raise ValueError(
            f"block {name!r} has {len(found)} parts whose class is named …Attention…{which}, but"
            " 'selective' recomputes one: choose mode='full', with blocks= a name pattern of what"
            f" to recompute; a block has {kinds or 'no parts'}"
        )
    [(inner, module)] = found.items()
    return ".".join(filter(None, (name, inner))), module


def _outermost_attention(block: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for child, part in block.named_children():
        if "Attention" in type(part).__name__:
            found[prefix + child] = part
        else:
            found |= _outermost_attention(part, f"{prefix}{child}.")
    return found


@checked
def apply_compile(
    model: nn.Module, *, blocks: Blocks = None, backend: str = "inductor"
) -> tuple[str, ...]:
    """Compile the blocks of ``model`` in place: after activation checkpointing, before FSDP2.

    Parameters keep their names. Results differ by rounding, because products and sums are done in
    another order. Random numbers, as in dropout, are drawn differently. Each rank compiles a block
    when it first runs, and again for other shapes, for evaluation and without gradients: allow
    minutes for the first step. If a schedule splits backward, a stage with compiled blocks does
    both halves in the first. Layers with experts stay out of the graph.

    Args:
        model: any model, or one stage of it, on its device.
        blocks: see :func:`find_blocks`.
        backend: one of ``torch.compiler.list_backends(exclude_tags=())``.

    Returns:
        The names of the blocks.

    Raises:
        ValueError: also for blocks that tensor parallelism has cut and ``"selective"`` checkpoints
            in part.
        RuntimeError: if the backend does not work on this machine; says what is missing.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(
            f"backend={backend!r} must be one of {listed(nearest(backend, known) or known)}"
        )
    check_order(model, "compile")
    found = find_blocks(model, blocks)
    problem = _problem_of(backend, next((p.device.type for p in model.parameters()), "cpu"))
    if problem is not None:
        raise RuntimeError(problem)
    for name, block in found.items():
        inner = next(
            (n for n, part in block.named_modules() if n and has_replaced(part, Recomputed)), None
        )
        # torch 2.13 would compile a graph that cannot run: it saves the mesh as if it were a
        # tensor.
        cut = (p for p in block.parameters() if isinstance(p, DTensor))
        if inner is not None and any("ep" not in (p.device_mesh.mesh_dim_names or ()) for p in cut):
            raise ValueError(
                f"block {name!r} is cut by tensor parallelism and its {inner!r} is recomputed,"
                " which torch cannot compile in one piece: use apply_ac(..., 'full') or 'none'"
            )
    for block in found.values():
        for part in (part for part in block.modules() if isinstance(part, MoE)):
            Uncompiled(part.forward).put_on(part)
        around = next(replaced_forwards(block.forward), None)
        if isinstance(around, Recomputed):
            around.forward = Compiled(around.forward, backend).run
        else:
            Compiled(block.forward, backend).put_on(block)
    return tuple(found)


@cache
def _problem_of(backend: str, device: str) -> str | None:
    """Return the reason why ``backend`` cannot compile for ``device``, found on one addition."""
    if device == "meta":
        return None
    ones = torch.ones(2, device=device)
    try:
        torch.compile(lambda x: x + x, backend=backend)(ones)
    except Exception as error:  # whatever a foreign compiler raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (
            f"torch.compile with backend={backend!r} does not work for {device} here"
            f" ({type(error).__name__}: {lines[0] if lines else 'no message'}): install what is"
            " missing (g++ and Python's headers for a CPU, Triton for a GPU), or leave"
            " apply_compile out"
        )
    return None


# The order in which a model is transformed. Tensor and expert parallelism cut the matrices that
# FSDP2 then shards once more, and could not find them inside FSDP2's shards. Checkpointing has to
# lie inside FSDP2's hooks: outside them, recomputing a block would gather its parameters a second
# time. Compilation sees what checkpointing has put in place, and not the hooks that FSDP2 adds.

Step = Literal[
    "tensor parallel", "expert parallel", "float8", "activation checkpointing", "compile", "FSDP2"
]
_CALLS: dict[Step, str] = {
    "tensor parallel": "apply_tensor_parallel",
    "expert parallel": "apply_expert_parallel",
    "float8": "apply_float8",
    "activation checkpointing": "apply_ac",
    "compile": "apply_compile",
    "FSDP2": "apply_fsdp2",
}


def check_order(model: nn.Module, step: Step) -> None:
    """Refuse to take ``step`` a second time, or after a step that must follow it."""
    cut_over = {
        name
        for p in model.parameters()
        if isinstance(p, DTensor)
        for name in p.device_mesh.mesh_dim_names or ()
    }
    found: dict[Step, bool] = {
        "tensor parallel": "tp" in cut_over,
        "expert parallel": "ep" in cut_over,
        "float8": has_replaced(model, EightBits),
        "activation checkpointing": has_replaced(model, Recomputed),
        "compile": has_replaced(model, Compiled),
        "FSDP2": any(isinstance(module, FSDPModule) for module in model.modules()),
    }
    order = list(_CALLS)
    too_late = [done for done in order[order.index(step) :] if found[done]]
    if too_late:
        raise ValueError(
            f"{_CALLS[step]} was called on a model that already has {' and '.join(too_late)}, but"
            f" the order is stage → {' → '.join(order)}, each at most once: build the stage anew"
            f" and call {', '.join(_CALLS.values())}"
        )
