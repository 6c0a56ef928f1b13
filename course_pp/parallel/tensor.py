"""Tensor parallelism: the matrices of any model cut over the ranks of ``tp``, as a plan says.

A block whose matrices are cut by columns first and rows second costs two sums over the ranks in forward and two in
backward; between the two nothing is sent.

Plain: every rank holds the whole residual stream, and a sum is an all-reduce. Sequence-parallel: a rank holds some
positions of the stream, norms work on those, and the all-reduce becomes a reduce-scatter and an all-gather of the
same bytes, with activations between blocks divided by tp.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3; sequence parallelism: Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from course_pp.arguments import check_arguments
from course_pp.collective import Ranks, on_every_rank
from course_pp.model import Transformer
from course_pp.parallel.blocks import listed, modules_matching, nearest
from course_pp.parallel.mesh import get_pp_mesh, get_tp_mesh
from course_pp.parallel.order import check_order
from course_pp.parallel.plans import transformer_plan
from course_pp.parallel.styles import PartOfSequence, SequencesDivide, WholeOutputs

__all__ = ["Plan", "apply_tensor_parallel"]

Plan = Mapping[str, ParallelStyle] | Callable[..., Mapping[str, ParallelStyle]] | None
"""Styles by name pattern, or what makes them of a module and ``tp``."""

_CUT_NOTHING = (
    *(PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput),
    *(PartOfSequence, SequencesDivide, WholeOutputs),
)


def apply_tensor_parallel(
    model: nn.Module | Sequence[nn.Module],
    device_mesh: DeviceMesh | None,
    plan: Plan = None,
    *,
    gather_logits: bool = True,
) -> tuple[str, ...]:
    """Cut the matrices of ``model`` over ``tp``, in place; a no-op where the mesh has no ``tp`` dimension.

    Inputs and outputs stay what they were, ordinary tensors, unless a plan says otherwise, so a stage sends its
    neighbours whole activations. What no pattern matches is replicated.

    Args:
        model: any model, or one stage of it, or the list of this rank's stages. Every rank of ``tp`` must hold the same
            weights; nothing of them is sent. The ranks of the mesh compare what their stages hold: call this on all of
            them at once.
        plan: styles of torch's ``parallelize_module`` by name pattern, whose ``*`` stays within one part of a dotted
            name; or a function ``(module, tp)`` that returns them, such as :func:`llama_plan`. None is
            :func:`transformer_plan`, for this package's model.
        gather_logits: False leaves each rank its part of the vocabulary, in a DTensor (batch, seq, vocab) for
            :class:`VocabParallelCrossEntropy`; for plans that are functions and take it.

    Returns:
        The names of the modules that have a style.

    Raises:
        ValueError: on every rank of the mesh, if a foreign model has no plan, a size is not a multiple of ``tp``, a
            pattern matches nothing on any stage, two match one module, a style cannot cut what it matches, or would
            part tied weights, or logits cannot stay cut. Also after checkpointing or FSDP2.
    """
    given = locals()

    def look() -> tuple[DeviceMesh | None, list[_Styles]]:
        check_arguments(apply_tensor_parallel, given)
        models = [model] if isinstance(model, nn.Module) else list(model)
        for each in models:
            check_order(each, "tensor parallel")
        mesh = get_tp_mesh(device_mesh)
        return mesh, [] if mesh is None else [_styles_of(each, plan, mesh.size(), gather_logits) for each in models]

    mesh, found = on_every_rank(device_mesh, look)
    if mesh is None:
        return ()
    if plan is None:
        plan, ranks = transformer_plan, Ranks(alone=True)  # it looks at the configuration, the same on every rank
    else:
        pp_mesh = get_pp_mesh(device_mesh)
        ranks = Ranks(alone=True) if pp_mesh is None else Ranks(pp_mesh.get_group())
    _check_every_pattern([styles.model for styles in found], plan, found, ranks)
    for styles in found:
        for name, (_, style) in styles.items():
            _apply(styles.model.get_submodule(name), style, mesh)
    return tuple(name for styles in found for name in styles)


def _apply(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    # src_data_rank=None: each rank cuts its own copy, which is everyone's; nothing is sent.
    parallelize_module(module, mesh, style, src_data_rank=None)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name])  # SequenceParallel forgets which are frozen


class _Styles(dict[str, tuple[str, ParallelStyle]]):
    """Pattern and style of each module of one ``model``, by the module's name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _styles_of(model: nn.Module, plan: Plan, tp: int, gather_logits: bool) -> _Styles:
    """Return what the plan makes of one module.

    Raises:
        ValueError: as :func:`apply_tensor_parallel`, but for patterns that match nothing.
    """
    styles = _Styles(model)
    uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for pattern, style in _mapping(model, plan, tp, gather_logits).items():
        for name, module in modules_matching(model, pattern).items():
            if name in styles:
                raise ValueError(
                    f"patterns {styles[name][0]!r} and {pattern!r} both match {name!r}: give each module one style"
                )
            _check_style(name, module, style, tp)
            if not isinstance(style, _CUT_NOTHING):
                _check_sharing(model, name, module, uses)
            styles[name] = pattern, style
    return styles


def _mapping(model: nn.Module, plan: Plan, tp: int, gather_logits: bool) -> Mapping[str, ParallelStyle]:
    kind = type(model).__name__
    if plan is None and isinstance(model, Transformer):
        plan = transformer_plan
    if plan is None:
        raise ValueError(
            f"apply_tensor_parallel has no plan for {kind}: pass plan=llama_plan if its blocks are like those of "
            "Llama, Mistral and Qwen2 in transformers (q_proj, …, down_proj); or a mapping from name patterns to "
            'torch\'s styles, such as {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}'
        )
    options = {} if gather_logits else {"gather_logits": False}
    if not isinstance(plan, Mapping):
        if options and "gather_logits" not in signature(plan).parameters:
            raise ValueError(
                f"gather_logits=False, but plan {_name(plan)} takes no gather_logits: let it return a head of "
                "ColwiseParallel(use_local_output=False), and leave gather_logits out here"
            )
        plan = plan(model, tp, **options)
    elif options:
        raise ValueError(
            "gather_logits=False is for plans that are functions: in a mapping, give the head "
            "ColwiseParallel(use_local_output=False), and leave gather_logits out"
        )
    strange = [each for each in plan.items() if not (isinstance(each[0], str) and isinstance(each[1], ParallelStyle))]
    if strange:
        pattern, style = strange[0]
        raise ValueError(
            f"plan holds {pattern!r}: {type(style).__name__}, but maps name patterns to torch's ParallelStyle objects, "
            "such as ColwiseParallel()"
        )
    return plan


def _name(plan: object) -> str:
    return str(getattr(plan, "__name__", type(plan).__name__))


_CUT = {
    # Which size of a module a style divides among the ranks.
    (ColwiseParallel, nn.Linear): "out_features",
    (ColwiseParallel, nn.Embedding): "embedding_dim",
    (RowwiseParallel, nn.Linear): "in_features",
    (RowwiseParallel, nn.Embedding): "num_embeddings",
}


def _check_style(name: str, module: nn.Module, style: ParallelStyle, tp: int) -> None:
    """Refuse what torch would refuse without a name, or cut into unequal parts."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    size = next((s for (cut, kind), s in _CUT.items() if isinstance(style, cut) and isinstance(module, kind)), None)
    if size is None:
        raise ValueError(
            f"{type(style).__name__} cuts nn.Linear and nn.Embedding, but {name!r} is a {type(module).__name__}: give "
            "it a ParallelStyle of its own, or replace it by nn.Linear"
        )
    if getattr(module, size) % tp:
        raise ValueError(
            f"tp={tp} must divide {size}={getattr(module, size)} of {name!r}, which {type(style).__name__} cuts: use "
            "a tp that divides it, or leave it out of the plan"
        )


def _check_sharing(model: nn.Module, name: str, module: nn.Module, uses: Counter[nn.Parameter]) -> None:
    """Refuse to cut a tied weight: the module would get parts of its own, and the tie would be gone."""
    inside = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
    for own, parameter in module.named_parameters():
        if uses[parameter] > inside[parameter]:
            shared = [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]
            raise ValueError(
                f"{name}.{own} is one parameter under the names {listed(shared)}, and cutting it in {name!r} would "
                "part them: leave these modules out of the plan"
            )


def _check_every_pattern(models: Sequence[nn.Module], plan: Plan, found: Iterable[_Styles], ranks: Ranks) -> None:
    """Refuse, on every rank, a pattern that matches no module of any stage.

    Raises:
        ValueError: naming the pattern and what looks like it.
    """
    mine = {pattern for styles in found for pattern, _ in styles.values()}
    names = [name for model in models for name, _ in model.named_modules()]
    given = list(plan) if isinstance(plan, Mapping) else []
    near = {pattern: nearest(pattern, names) for pattern in given if pattern not in mine}
    everyone = ranks.gather((mine, near))
    matched = {pattern for patterns, _ in everyone for pattern in patterns}
    lost = next((pattern for _, near in everyone for pattern in near if pattern not in matched), None)
    where = "on any stage" if ranks.size > 1 else f"of {type(models[0]).__name__}"
    if lost is not None:
        like = dict.fromkeys(name for _, near in everyone for name in near.get(lost, ()))
        hint = f"the nearest names are {listed(like)}" if like else "look at model.named_modules()"
        several = "; pass a list of all of this rank's stages if there are several" if ranks.size > 1 else ""
        raise ValueError(f"plan: pattern {lost!r} matches no module {where}: {hint}{several}")
    if not matched:
        raise ValueError(
            f"plan {_name(plan)} finds nothing to cut {where}: pass a mapping from name patterns to torch's styles"
        )
