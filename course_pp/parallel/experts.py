"""Expert parallelism: ranks of ``ep`` share out the experts; tokens travel to them and back.

    rank 0   x, by expert ─┐ counts ┌─► experts 0, 1 ─┐         ┌─► one row for each of x
                           ├─► rows ┤                 ├─► rows ─┤
    rank 1   x, by expert ─┘        └─► experts 2, 3 ─┘         └─► one row for each of x

Ranks of ``ep`` hold different data and one part of the experts each: expert e is on rank e //
(n_experts / ep). Each call of a layer's experts makes three all-to-all exchanges: the counts of
rows, the rows, and the experts' results. Backward makes two, of the gradients of results and rows.
A rank enters every exchange, even if it neither sends nor gets a row, because an exchange waits for
all ranks.

The gradient of an expert adds up over the tokens of all ranks of ``ep``. All other gradients are
averages over all data ranks. So the owner of an expert divides its gradient by ``ep`` at once, and
FSDP2 averages it over the ranks that hold the same expert.

Lepikhin et al. 2020, "GShard", arXiv:2006.16668, section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from course_pp.base.arguments import check_arguments
from course_pp.base.ranks import Ranks, refusing_together
from course_pp.base.torch_private import all_to_all, own_parameters
from course_pp.model import Transformer
from course_pp.model.experts import Experts
from course_pp.parallel.blocks import Blocks, modules_wanted, problem_of_none
from course_pp.parallel.mesh import get_ep_mesh
from course_pp.parallel.replaced_forward import Replaced, check_order, replaced_forwards
from course_pp.step.hooks import problem_of_wrappers
from course_pp.step.late_weights import part_of


def apply_expert_parallel(
    model: nn.Module | Sequence[nn.Module], device_mesh: DeviceMesh | None, experts: Blocks = None
) -> tuple[str, ...]:
    """Share the experts of ``model`` out over ``ep``, in place; a no-op without ``ep`` in the mesh.

    Apply it after tensor parallelism, under which every rank of ``tp`` gets whole tokens and
    computes whole experts.

    Args:
        model: any model, or one stage of it, or the list of this rank's stages. Every rank of
            ``ep`` must hold the same weights. Call this on all ranks of the mesh at once.
        experts: the modules that hold the experts of a layer: a class, a name pattern, or several.
            Their parameters have one expert in each row, and they are called with ``(x, counts)``:
            rows (n, dim) sorted by expert, and how many each has, some or all 0, as
            :class:`course_pp.model.experts.Experts`; or with ``(hidden_states, top_k_index,
            top_k_weights)`` as Mixtral's and Qwen3-MoE's of transformers. None finds these.

    Returns:
        The names of these modules.

    Raises:
        ValueError: on every rank of the mesh, if there are none in any stage, or some cannot be
            shared out; or after checkpointing, compilation or FSDP2.
    """
    with refusing_together(device_mesh):
        check_arguments(apply_expert_parallel, locals())
        models = _listed(model)
        for each in models:
            check_order(each, "expert parallel")
        mesh = get_ep_mesh(device_mesh)
        found: list[dict[str, nn.Module]] = []
        if mesh is not None:
            found = [_experts_of(each, experts, mesh.size()) for each in models]

    if mesh is None:
        return ()
    _refuse_unmatched(models, _wanted(experts))
    # Of this package's model, stages may have none of its experts.
    ours = experts is None and any(
        isinstance(each, Transformer) and each.config.n_experts for each in models
    )
    if not any(Ranks().gather(ours or any(found))):
        raise ValueError(
            "apply_expert_parallel finds no experts on any stage: name them with experts=, a class"
            f" or a name pattern of modules that {_CALLED}; or leave ep at 1"
        )
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for module in dict.fromkeys(part for parts in found for part in parts.values()):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in shared:
                shared[parameter] = _own_part(parameter, mesh)
            module.register_parameter(name, shared[parameter])
        kind = _kind_of(module)
        assert kind is not None  # looked at before
        kind(module, mesh.get_group()).put_on(module)
    return tuple(name for parts in found for name in parts)


def _listed(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def _refuse_unmatched(models: Sequence[nn.Module], wanted: Sequence[type[nn.Module] | str]) -> None:
    """Refuse, on every rank, what matches no module of any stage; one stage may have none of it."""
    lacking = [not any(modules_wanted(model, each) for model in models) for each in wanted]
    said = [
        problem_of_none(models[0], each, "experts") if lacks else ""
        for each, lacks in zip(wanted, lacking, strict=True)
    ]
    for problems in zip(*Ranks().gather(said), strict=True):
        if all(problems):
            raise ValueError(problems[0])


def _wanted(experts: Blocks) -> list[type[nn.Module] | str]:
    return (
        [] if experts is None else [experts] if isinstance(experts, str | type) else list(experts)
    )


def _experts_of(model: nn.Module, experts: Blocks, ep: int) -> dict[str, nn.Module]:
    """Return the modules to share out, by name. A stage may have none.

    Refuse a module that cannot be shared out.
    """
    if problem := problem_of_wrappers(model, "the model"):
        raise ValueError(problem)
    if experts is None:
        found = {name: part for name, part in model.named_modules() if _holds_experts(part)}
    else:
        found = {
            name: part
            for each in _wanted(experts)
            for name, part in modules_wanted(model, each).items()
        }
    for name, part in found.items():
        _check(name, part, ep)
    return found


def _holds_experts(module: nn.Module) -> bool:
    return isinstance(module, Experts) or (
        _kind_of(module) is ExchangedChoices and bool(_rows(module))
    )


def _check(name: str, module: nn.Module, ep: int) -> None:
    what = f"{name!r} ({type(module).__name__})"
    if name.endswith(".base_layer"):  # as peft calls a module around which it puts adapters
        raise ValueError(
            f"{what} is wrapped in adapters of all its experts, of which each rank would hold a"
            " part: leave experts out of peft's target_parameters and adapt other layers, or use"
            " ep=1"
        )
    if _kind_of(module) is None:
        raise ValueError(
            f"{what} is called with ({', '.join(_arguments(module))}): experts {_CALLED}"
        )
    cut = [own for own, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if cut:
        raise ValueError(
            f"{what} holds {cut[0]!r}, which tensor parallelism has cut: leave experts out of its"
            " plan; each rank of tp computes whole ones"
        )
    rows = _rows(module)
    if len(set(rows.values())) != 1 or set(rows) != {own for own, _ in module.named_parameters()}:
        shapes = ", ".join(f"{own} {tuple(p.shape)}" for own, p in module.named_parameters())
        raise ValueError(
            f"{what} holds {shapes or 'no parameters'}: each must have one expert in each row"
        )
    [n_experts] = set(rows.values())
    whole = next(
        (own for own, b in module.named_buffers() if b.dim() and len(b) == n_experts), None
    )
    if whole is not None:
        raise ValueError(
            f"{what} holds the buffer {whole!r} of {n_experts} rows, of which each rank would use"
            " the first ones: make it a parameter without a gradient"
        )
    if n_experts % ep:
        works = [k for k in range(1, n_experts + 1) if n_experts % k == 0]
        raise ValueError(
            f"ep={ep} must divide the {n_experts} experts of {what}, so that every rank holds as"
            f" many: use ep={' or '.join(map(str, works))}"
        )


def _rows(module: nn.Module) -> dict[str, int]:
    return {
        name: parameter.shape[0]
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim()
    }


def _own_part(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter whose local tensor is a copy of this rank's part of the rows."""
    # Without the clone, a view would keep the memory of all experts alive.
    part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    return nn.Parameter(
        DTensor.from_local(part, mesh, (Shard(0),), run_check=False), parameter.requires_grad
    )


class Exchanged(Replaced):
    """Experts that are called with rows sorted by expert; each computes on the rank that holds it.

    The arguments are x (n, dim), and counts (n_experts,), the number of rows of each expert.
    """

    takes: tuple[str, ...] = ("x", "counts")

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(module.forward)
        self._module, self._group, self._ep_size = module, group, dist.get_world_size(group)

    @torch.compiler.disable
    def run(self, x: Tensor, counts: Tensor) -> Tensor:
        return self._exchange(x, counts, self.forward)

    def _exchange(
        self, x: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return for each row of ``x`` what its expert makes of it.

        Args:
            compute: takes rows (n, dim) sorted by this rank's experts, and how many each has; may
                change their dtype.
        """
        n_here = len(counts) // self._ep_size
        sent = counts.view(self._ep_size, n_here)
        came = torch.empty_like(sent)  # by rank and expert
        dist.all_to_all_single(came, sent, group=self._group)
        n_sent, n_came = torch.stack((sent.sum(1), came.sum(1))).tolist()  # one wait for a GPU
        rows = all_to_all(x, n_sent, n_came, self._group)
        # Rows arrive rank by rank, sorted by expert within each; the experts need them sorted by
        # expert over all ranks, and the results go back in the order of arrival.
        by_rank = torch.arange(n_here, device=x.device).repeat(self._ep_size)
        expert = by_rank.repeat_interleave(came.flatten(), output_size=len(rows))
        order = expert.argsort(stable=True)
        with self._own_experts() as experts:
            computed = compute(rows[order], came.sum(0))[order.argsort()].to(x.dtype)
        # Experts may skip an expert without rows. All ranks must enter backward's exchange all the
        # same, and FSDP2 waits for a gradient of each parameter. This package's experts skip
        # nothing, and the gradients of their weights may wait for `W`.
        if not isinstance(self._module, Experts):
            computed = _Depends.apply(computed, rows, *experts)
        return all_to_all(computed, n_came, n_sent, self._group)

    @contextmanager
    def _own_experts(self) -> Iterator[list[Tensor]]:
        """Let the module find this rank's experts as if there were no others; yield them.

        Their gradients are divided by the number of ranks that share the experts out.
        """
        own: dict[str, Any] = {
            name: part_of(parameter, _MeanGradient.apply(parameter.to_local(), self._ep_size))
            for name, parameter in self._module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        }
        # Not torch.func.functional_call, which does the same, but then calls the module: this
        # forward again, without end, and the module's hooks, such as FSDP2's, which run around us
        # already.
        with patch.dict(own_parameters(self._module), own):
            yield list(own.values())


class ExchangedChoices(Exchanged):
    """Experts of transformers, which are called with tokens and their choices.

    The arguments are tokens (n, dim), the experts each token chose (n, top_k), and the weights of
    the choices (n, top_k).
    """

    takes = ("hidden_states", "top_k_index", "top_k_weights")

    @torch.compiler.disable
    def run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        [n_here] = {len(p.to_local()) for p in self._module.parameters() if isinstance(p, DTensor)}

        def compute(rows: Tensor, counts: Tensor) -> Tensor:
            """Each row is a token with one choice, of weight 1."""
            if not len(rows):  # of which some implementations make an error
                return rows
            here = torch.arange(n_here, device=rows.device)
            expert = here.repeat_interleave(counts, output_size=len(rows))[:, None]
            # A number, which functional_call would not replace either.
            with patch.dict(vars(self._module), {"num_experts": n_here}):
                return self.forward(
                    rows, expert, torch.ones_like(expert, dtype=top_k_weights.dtype)
                )

        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=n_here * self._ep_size)
        rows = self._exchange(hidden_states[order // top_k_index.shape[1]], counts, compute)
        choices = rows[order.argsort()].view(*top_k_index.shape, -1)
        return (choices * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


class _MeanGradient(torch.autograd.Function):
    """A parameter whose gradient, a sum over the tokens of ``n`` data ranks, becomes a mean."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, n: int) -> Tensor:
        ctx.n = n
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.n, None


class _Depends(torch.autograd.Function):
    """The experts' output, with a backward that reaches rows and experts whatever was computed.

    It adds zeros to the gradient of the rows. It gives an expert no gradient, and
    :class:`_MeanGradient` makes zeros if nothing else gives it one.
    """

    @staticmethod
    def forward(ctx: Any, computed: Tensor, rows: Tensor, *experts: Tensor) -> Tensor:
        ctx.shape, ctx.n_experts = rows.shape, len(experts)
        return computed.view_as(computed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, gradient.new_zeros(ctx.shape), *[None] * ctx.n_experts


_KINDS: tuple[type[Exchanged], ...] = (Exchanged, ExchangedChoices)
_CALLED = "are called with " + " or ".join(f"({', '.join(kind.takes)})" for kind in _KINDS)


def _kind_of(module: nn.Module) -> type[Exchanged] | None:
    arguments = _arguments(module)
    return next((kind for kind in _KINDS if kind.takes == arguments), None)


def _arguments(module: nn.Module) -> tuple[str, ...]:
    around = list(replaced_forwards(module.forward))
    return tuple(signature(around[-1].forward if around else module.forward).parameters)


def is_shared_out(module: nn.Module) -> bool:
    """Return whether a module's own parameters are experts shared out over ``ep``."""
    return any(
        isinstance(p, DTensor) and "ep" in (p.device_mesh.mesh_dim_names or ())
        for p in module.parameters(recurse=False)
    )
