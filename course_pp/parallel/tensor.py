"""Tensor parallelism: the matrices of any model cut over the ranks of ``tp``, as a plan says.

    q, k, v, gate, up   column-wise   a rank computes some heads or channels from the whole input
    o, down             row-wise      a rank's product is one term of a sum; the ranks add up

A block whose matrices are cut by columns first and rows second costs two sums over the ranks in
forward and two in backward; between the two nothing is sent.

Without sequence parallelism every rank holds the whole residual stream, and a sum is an all-reduce.
With it a rank holds some positions of the stream, and norms work on these positions. The all-reduce
becomes a reduce-scatter and an all-gather of the same bytes, and activations between blocks are
divided by tp.

A plan is a mapping from name patterns to torch's parallel styles, made for what a module really
holds. For another family than :func:`transformer_plan` and :func:`llama_plan` know, write one: as a
mapping, or as a function of a module and ``tp`` that returns one.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3; sequence parallelism: Korthikanti
et al. 2022, arXiv:2205.05198, section 4.2.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course_pp.base.arguments import check_arguments, checked, refuse_below
from course_pp.base.ranks import Ranks, refusing_together
from course_pp.base.shapes import cut_by_tp, shards_head
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel.blocks import listed, modules_matching, nearest
from course_pp.parallel.mesh import get_pp_mesh, get_tp_mesh
from course_pp.parallel.replaced_forward import check_order

Plan = Mapping[str, ParallelStyle] | Callable[..., Mapping[str, ParallelStyle]] | None
"""Styles by name pattern, or a function that makes them for a module and ``tp``."""

Styles = dict[str, ParallelStyle]
_Found = dict[str, tuple[str, ParallelStyle]]  # pattern and style of a module, by its name


def apply_tensor_parallel(
    model: nn.Module | Sequence[nn.Module],
    device_mesh: DeviceMesh | None,
    plan: Plan = None,
    *,
    gather_logits: bool = True,
) -> tuple[str, ...]:
    """Cut the matrices of ``model`` over ``tp``, in place; a no-op without ``tp`` in the mesh.

    Inputs and outputs stay ordinary, whole tensors unless a plan says otherwise. What no pattern
    matches is replicated.

    Args:
        model: any model, or one stage of it, or the list of this rank's stages. Every rank of
            ``tp`` must hold the same weights. Call this on all ranks of the mesh at once.
        plan: styles of torch's ``parallelize_module`` by name pattern, whose ``*`` stays within one
            part of a dotted name; or a function ``(module, tp)`` that returns them, such as
            :func:`llama_plan`. None is :func:`transformer_plan`, for this package's model.
        gather_logits: False leaves each rank its part of the vocabulary, in a DTensor (batch, seq,
            vocab) for :class:`VocabParallelCrossEntropy`; for plans that are functions and take it.

    Returns:
        The names of the modules that have a style.

    Raises:
        ValueError: on every rank of the mesh, for a plan that cannot be carried out, or after
            checkpointing or FSDP2.
    """
    with refusing_together(device_mesh):
        check_arguments(apply_tensor_parallel, locals())
        models = [model] if isinstance(model, nn.Module) else list(model)
        for each in models:
            check_order(each, "tensor parallel")
        mesh = get_tp_mesh(device_mesh)
        found: list[tuple[nn.Module, _Found]] = []
        if mesh is not None:
            found = [(each, _styles_of(each, plan, mesh.size(), gather_logits)) for each in models]

    if mesh is None:
        return ()
    pp_mesh = get_pp_mesh(device_mesh)
    # transformer_plan looks at the configuration, the same on every rank.
    ranks = Ranks(alone=True) if plan is None or pp_mesh is None else Ranks(pp_mesh.get_group())
    _check_every_pattern(plan, found, ranks)
    for whole, styles in found:
        for name, (_, style) in styles.items():
            module = whole.get_submodule(name)
            trained = {own: parameter.requires_grad for own, parameter in module.named_parameters()}
            # src_data_rank=None: each rank cuts its own copy, which is everyone's; nothing is sent.
            parallelize_module(module, mesh, style, src_data_rank=None)
            for own, parameter in module.named_parameters():
                parameter.requires_grad_(trained[own])  # SequenceParallel forgets which are frozen
    return tuple(name for _, styles in found for name in styles)


def _styles_of(model: nn.Module, plan: Plan, tp: int, gather_logits: bool) -> _Found:
    """Return the styles of the plan for one module; patterns may match nothing."""
    found: _Found = {}
    uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for pattern, style in _mapping(model, plan, tp, gather_logits).items():
        for name, module in modules_matching(model, pattern).items():
            if name in found:
                raise ValueError(
                    f"patterns {found[name][0]!r} and {pattern!r} both match {name!r}: give each"
                    " module one style"
                )
            if isinstance(style, ColwiseParallel | RowwiseParallel):
                _check_size(name, module, style, tp)
            if not isinstance(style, _CUT_NOTHING):
                _check_sharing(model, name, module, uses)
            found[name] = pattern, style
    return found


def _mapping(
    model: nn.Module, plan: Plan, tp: int, gather_logits: bool
) -> Mapping[str, ParallelStyle]:
    if plan is None and isinstance(model, Transformer):
        plan = transformer_plan
    if plan is None:
        raise ValueError(
            f"apply_tensor_parallel has no plan for {type(model).__name__}: pass plan=llama_plan if"
            " its blocks are like those of Llama, Mistral and Qwen2 in transformers (q_proj, …,"
            " down_proj); or a mapping from name patterns to torch's styles, such as"
            ' {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}'
        )
    if not isinstance(plan, Mapping):
        return plan(model, tp) if gather_logits else plan(model, tp, gather_logits=False)
    if not gather_logits:
        raise ValueError(
            "gather_logits=False is for plans that are functions: in a mapping, give the head "
            "ColwiseParallel(use_local_output=False), and leave gather_logits out"
        )
    return plan


_CUT = {
    # Which size of a module a style divides among the ranks.
    (ColwiseParallel, nn.Linear): "out_features",
    (ColwiseParallel, nn.Embedding): "embedding_dim",
    (RowwiseParallel, nn.Linear): "in_features",
    (RowwiseParallel, nn.Embedding): "num_embeddings",
}


def _check_size(name: str, module: nn.Module, style: ParallelStyle, tp: int) -> None:
    """Refuse sizes that torch would refuse without a name, or would cut into unequal parts."""
    size = next(
        (
            s
            for (cut, kind), s in _CUT.items()
            if isinstance(style, cut) and isinstance(module, kind)
        ),
        None,
    )
    if size is None:
        raise ValueError(
            f"{type(style).__name__} cuts nn.Linear and nn.Embedding, but {name!r} is a"
            f" {type(module).__name__}: give it a ParallelStyle of its own, or replace it by"
            " nn.Linear"
        )
    if getattr(module, size) % tp:
        raise ValueError(
            f"tp={tp} must divide {size}={getattr(module, size)} of {name!r}, which"
            f" {type(style).__name__} cuts: use a tp that divides it, or leave it out of the plan"
        )


def _check_sharing(
    model: nn.Module, name: str, module: nn.Module, uses: Counter[nn.Parameter]
) -> None:
    """Refuse to cut a tied weight.

    The module would get a part of its own, which is no longer tied to the other module's weight.
    """
    inside = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
    for own, parameter in module.named_parameters():
        if uses[parameter] > inside[parameter]:
            shared = [
                n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter
            ]
            raise ValueError(
                f"{name}.{own} is one parameter under the names {listed(shared)}, and cutting it in"
                f" {name!r} would part them: leave these modules out of the plan"
            )


def _check_every_pattern(
    plan: Plan, found: Sequence[tuple[nn.Module, _Found]], ranks: Ranks
) -> None:
    """Refuse, on every rank, a pattern that matches no module of any stage.

    The message names the modules whose names look like the pattern.
    """
    mine = {pattern for _, styles in found for pattern, _ in styles.values()}
    names = [name for model, _ in found for name, _ in model.named_modules()]
    given = list(plan) if isinstance(plan, Mapping) else []
    near = {pattern: nearest(pattern, names) for pattern in given if pattern not in mine}
    everyone = ranks.gather((mine, near))
    matched = {pattern for patterns, _ in everyone for pattern in patterns}
    lost = next(
        (pattern for _, near in everyone for pattern in near if pattern not in matched), None
    )
    where = "on any stage" if ranks.size > 1 else f"of {type(found[0][0]).__name__}"
    if lost is not None:
        like = dict.fromkeys(name for _, near in everyone for name in near.get(lost, ()))
        hint = f"the nearest names are {listed(like)}" if like else "look at model.named_modules()"
        several = (
            "; pass a list of all of this rank's stages if there are several"
            if ranks.size > 1
            else ""
        )
        raise ValueError(f"plan: pattern {lost!r} matches no module {where}: {hint}{several}")
    if not matched:
        raise ValueError(
            f"plan {getattr(plan, '__name__', type(plan).__name__)} finds nothing to cut {where}:"
            " pass a mapping from name patterns to torch's styles"
        )


# Styles beside torch's own.


class GatheredColwiseParallel(ColwiseParallel):
    """Column-wise, with the parts put together behind the module, for a head with whole logits.

    torch's ``output_layouts=Replicate()`` sums gradients that are equal on every rank, and returns
    a view, on which hooks of FSDP2 can be lost.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        group = device_mesh.get_group()
        module.register_forward_hook(lambda _, args, part: _GatherVocabulary.apply(part, group))
        return module


class SequencesDivide(ParallelStyle):
    """Cuts nothing; refuses inputs (batch, seq, …) of other lengths than multiples of ``tp``."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args:
                check_sequence_divides(args[0].shape[1], device_mesh.size())

        module.register_forward_pre_hook(look)
        return module


class PartOfSequence(ParallelStyle):
    """Hands a module this rank's part of its first argument (batch, seq, …).

    Every rank has the whole argument; each gets its part of the sequence.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take_part(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            check_sequence_divides(args[0].shape[1], device_mesh.size(), f", or {_WITHOUT}")
            whole = DTensor.from_local(args[0], device_mesh, (Replicate(),), run_check=False)
            return (whole.redistribute(placements=(Shard(1),)).to_local(), *args[1:]), kwargs

        module.register_forward_pre_hook(take_part, with_kwargs=True)
        return module


class WholeOutputs(ParallelStyle):
    """Cuts nothing; refuses keywords that need whole sequences, of which each rank has a part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name in ("logits_to_keep", "output_hidden_states"):
                asked = kwargs.get(name)
                if isinstance(asked, Tensor) or asked:
                    raise ValueError(
                        f"{name}={asked} needs whole sequences, of which each rank of tp holds a"
                        f" part: {_WITHOUT}"
                    )

        module.register_forward_pre_hook(look, with_kwargs=True)
        return module


_CUT_NOTHING = (
    *(PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput),
    *(PartOfSequence, SequencesDivide, WholeOutputs),
)
_WITHOUT = "build the plan with partial(llama_plan, sequence_parallel=False)"


def check_sequence_divides(seq_len: int, tp: int, otherwise: str = "") -> None:
    """Refuse a sequence that the ranks of ``tp`` cannot share equally.

    DTensor would pad the sequence, but the residual stream, a plain tensor, has no padding.
    """
    if seq_len % tp:
        raise ValueError(
            f"seq_len={seq_len} must be a multiple of tp={tp} for sequence-parallel norms: "
            f"pad it to {-(-seq_len // tp) * tp}{otherwise}"
        )


# Plans.

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@checked
def transformer_plan(module: Transformer, tp: int, gather_logits: bool = True) -> Styles:
    """Plan for this package's model, or one stage of it.

    The embedding is replicated, and so are routers and experts, which get whole tokens. The head is
    cut over the vocabulary if ``tp`` divides it and it is not tied to the embedding. Norms are
    sequence-parallel if ``module`` is a whole, untied model; its sequences must then be a multiple
    of ``tp`` long.

    Raises:
        ValueError: as :func:`check_tensor_parallel`.
    """
    refuse_below(1, "transformer_plan", tp=tp)
    config = module.config
    check_tensor_parallel(config, tp, gather_logits)
    whole = module.embed is not None and module.head is not None
    sequence_parallel = whole and not config.tie_embeddings
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: Styles = {
        # The input is made a DTensor once, so that its gradient is summed over the ranks once and
        # not per matrix. ``attn`` takes (x, cos, sin, mask), of which only x is a piece of the
        # stream.
        "layers.*.attn": PrepareModuleInput(
            input_layouts=(stream, None, None, None),
            desired_input_layouts=(Replicate(), None, None, None),
        ),
        "layers.*.attn.[qkv]_proj": ColwiseParallel(),
        "layers.*.attn.o_proj": RowwiseParallel(output_layouts=stream),
    }
    if config.qk_norm:  # of each head's channels, (batch, heads, seq, channels)
        plan["layers.*.attn.[qk]_norm"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    for name in module.layers:
        plan |= _plan_of_mlp(config, int(name), stream)
    cut_head = shards_head(config, tp)
    if module.head is not None and cut_head:
        plan["head"] = _head(gather_logits, stream)
    if sequence_parallel:
        plan["layers.*.*_norm"] = plan["norm"] = SequenceParallel(use_local_output=True)
        plan["embed"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=stream
        )
        plan[""] = SequencesDivide()
        if not cut_head:
            plan["head"] = _whole_input(stream)
    return plan


def _plan_of_mlp(config: ModelConfig, layer: int, stream: Placement) -> Styles:
    """Return the styles of a layer's feed-forward block; experts are not cut."""
    name = f"layers.{layer}.mlp"
    if not config.has_experts(layer):
        inner = _FEED_FORWARD if config.gated_ffn else _FEED_FORWARD[1:]
        plan: Styles = {
            name: PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        }
        plan |= {f"{name}.{each}": ColwiseParallel() for each in inner[:-1]}
        return plan | {f"{name}.{inner[-1]}": RowwiseParallel(output_layouts=stream)}
    if stream == Replicate():
        return {}
    return {
        name: PrepareModuleInputOutput(
            input_layouts=(stream,),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=stream,
        )
    }


def _whole_input(stream: Placement) -> ParallelStyle:
    """Return the style of a head that is not cut: it gets its input whole."""
    return PrepareModuleInput(
        input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=True
    )


def _head(gather_logits: bool, stream: Placement) -> ParallelStyle:
    if gather_logits:
        return GatheredColwiseParallel(input_layouts=stream)
    return ColwiseParallel(input_layouts=stream, use_local_output=False)


def check_tensor_parallel(config: ModelConfig, tp: int, gather_logits: bool) -> None:
    """Refuse a ``tp`` that does not divide the widths it cuts, or logits that cannot stay cut."""
    _check_divides(tp, cut_by_tp(config))
    if not gather_logits and not shards_head(config, tp):
        raise ValueError(
            f"gather_logits=False needs an untied head whose vocab_size={config.vocab_size} is a"
            f" multiple of tp={tp}: leave it True, or pad the vocabulary"
        )


def _check_divides(tp: int, sizes: Mapping[str, int], where: str = "") -> None:
    for name, size in sizes.items():
        if size % tp:
            works = [
                k
                for k in range(1, 1 + min(tp, *sizes.values()))
                if all(n % k == 0 for n in sizes.values())
            ]
            raise ValueError(
                f"tp={tp} must divide {name}={size}{where}, so that every rank holds whole heads"
                f" and equal parts: use tp={works[-1]}, or change {name}"
            )


@checked
def llama_plan(
    module: nn.Module, tp: int, gather_logits: bool = True, sequence_parallel: bool = True
) -> Styles:
    """Plan for models of the Llama family of transformers, or any part of one.

    The family includes Llama, Mistral, Qwen2, Qwen3 and Gemma.

    Every module that holds ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` is an attention, every
    one that holds ``gate_proj``, ``up_proj`` and ``down_proj`` a feed-forward. The embedding is
    replicated. ``lm_head`` is cut over the vocabulary if ``tp`` divides it and it is not tied to
    the embedding.

    Args:
        gather_logits: as of :func:`apply_tensor_parallel`.
        sequence_parallel: whether norms between the blocks work on parts of the sequence where
            possible: in a whole, untied model whose blocks hold an attention, a feed-forward and
            norms. Sequences must then be a multiple of ``tp`` long. Turn it off by
            ``plan=partial(llama_plan, sequence_parallel=False)``.

    Raises:
        ValueError: also if an attention holds other parameters, whose gradients would be silently
            wrong.
    """
    refuse_below(1, "llama_plan", tp=tp)
    attentions, feed_forwards = (
        dict(_holding(module, _ATTENTION)),
        dict(_holding(module, _FEED_FORWARD)),
    )
    parts = sequence_parallel and _can_share_sequences(
        module, {*attentions.values(), *feed_forwards.values()}
    )
    stream: Placement = Shard(1) if parts else Replicate()
    plan: Styles = {}
    for name, part in attentions.items():
        _check_attention(name, part, tp)
        # Its callers pass the input by this name; passed by position, it is made a DTensor at each
        # of the matrices.
        plan[name] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan |= {_join(name, each): ColwiseParallel() for each in _ATTENTION[:-1]}
        plan[_join(name, "o_proj")] = RowwiseParallel(output_layouts=stream)
        # Norms of each head's channels, (batch, seq, heads, channels): their gradients add up over
        # the ranks' heads.
        norms = [each for each in _HEAD_NORMS if hasattr(part, each)]
        plan |= {
            _join(name, each): SequenceParallel(sequence_dim=2, use_local_output=True)
            for each in norms
        }
    for name, part in feed_forwards.items():
        _check_divides(tp, {"intermediate_size": _out_features(part, "up_proj")}, f" of {name!r}")
        plan[name] = PrepareModuleInput(
            input_layouts=(stream,), desired_input_layouts=(Replicate(),)
        )
        plan |= {_join(name, each): ColwiseParallel() for each in _FEED_FORWARD[:-1]}
        plan[_join(name, "down_proj")] = RowwiseParallel(output_layouts=stream)
    plan |= _plan_of_heads(module, tp, gather_logits, stream)
    return plan | _plan_of_sequences(module) if parts else plan


_BODY, _HEAD = ("embed_tokens", "layers", "norm"), "lm_head"


def _can_share_sequences(module: nn.Module, cut: set[nn.Module]) -> bool:
    """Return whether norms can work on parts of the sequence between the modules in ``cut``."""
    found = _with_parameters(module)
    body = next((part for name, part in found.items() if name != _HEAD), None)
    if (
        body is None
        or len(found) != 2
        or _HEAD not in found
        or {*_with_parameters(body)} != {*_BODY}
    ):
        return False
    head, layers = found[_HEAD], body.get_submodule("layers")
    if (
        not isinstance(head, nn.Linear)
        or not isinstance(layers, nn.ModuleList)
        or _is_tied(module, head)
    ):
        return False
    return not any(
        any(
            part not in cut and "norm" not in name for name, part in _with_parameters(block).items()
        )
        or next(block.named_parameters(recurse=False), None)
        for block in layers
    )


def _with_parameters(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: part
        for name, part in module.named_children()
        if next(part.parameters(), None) is not None
    }


def _plan_of_sequences(module: nn.Module) -> Styles:
    """Return styles that keep each rank to its part of the sequence outside the cut modules.

    They begin at the first block, not at the embedding, because the model counts positions behind
    the embedding.
    """
    body = next(name for name in _with_parameters(module) if name != _HEAD)
    plan: Styles = {"": WholeOutputs(), f"{body}.norm": SequenceParallel(use_local_output=True)}
    for index, block in module.get_submodule(f"{body}.layers").named_children():
        norms = [name for name, _ in block.named_children() if "norm" in name]
        plan |= {
            f"{body}.layers.{index}.{name}": SequenceParallel(use_local_output=True)
            for name in norms
        }
    return plan | {f"{body}.layers.0": PartOfSequence()}


def _holding(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_modules():
        if all(isinstance(getattr(part, each, None), nn.Linear) for each in names):
            yield name, part


def _check_attention(name: str, attention: nn.Module, tp: int) -> None:
    width = getattr(attention, "head_dim", None)
    if type(width) is not int:
        raise ValueError(
            f"{name!r} ({type(attention).__name__}) has no head_dim, without which llama_plan"
            " cannot tell whole heads: set it, or pass plan= a mapping"
        )
    known: dict[str, Sequence[int]] = {f"{norm}.weight": (width,) for norm in _HEAD_NORMS}
    known |= {
        own: p.shape for own, p in attention.named_parameters() if own.split(".")[0] in _ATTENTION
    }
    others = [
        own
        for own, p in attention.named_parameters()
        if tuple(known.get(own, ())) != tuple(p.shape)
    ]
    if others:
        raise ValueError(
            f"{name!r} ({type(attention).__name__}) holds {', '.join(others)}, which llama_plan"
            " does not know: each rank would train them on its own heads alone. Pass a function"
            " that adds styles for them to what llama_plan returns for the rest, or a mapping"
        )
    q, k = (_out_features(attention, each) // width for each in ("q_proj", "k_proj"))
    _check_divides(tp, {"num_attention_heads": q, "num_key_value_heads": k}, f" of {name!r}")


def _out_features(module: nn.Module, name: str) -> int:
    return cast(nn.Linear, module.get_submodule(name)).out_features


def _plan_of_heads(module: nn.Module, tp: int, gather_logits: bool, stream: Placement) -> Styles:
    heads = [
        (n, p) for n, p in module.named_modules() if n.endswith(_HEAD) and isinstance(p, nn.Linear)
    ]
    plan: Styles = {}
    for name, head in heads:
        tied = _is_tied(module, head)
        if not tied and head.out_features % tp == 0:
            plan[name] = _head(gather_logits, stream)
        elif not gather_logits:
            raise ValueError(
                f"gather_logits=False needs an untied head whose vocab_size={head.out_features} is"
                f" a multiple of tp={tp}, but {name!r} is {'tied' if tied else 'not'}: leave it"
                " True, or pad the vocabulary"
            )
        elif stream != Replicate():
            plan[name] = _whole_input(stream)
    return plan


def _is_tied(module: nn.Module, head: nn.Linear) -> bool:
    """Return whether the head is, or in a stage mirrors, the embedding."""
    users = [
        part
        for part in module.modules()
        for own in part.parameters(recurse=False)
        if own is head.weight
    ]
    config = getattr(module, "config", None)
    return len(users) > 1 or bool(getattr(config, "tie_word_embeddings", False))


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


# Logits whose vocabulary is cut over the ranks: put together, or their cross-entropy without doing
# so.
#
#     loss of a token = log Σ exp(logit) − logit of the target
#
# A rank knows its part of the sum, and perhaps the target's logit. Three numbers a token are
# exchanged, largest logit, sum and target's logit, where gathering would exchange the whole
# vocabulary. Backward exchanges nothing.


@dataclass(frozen=True)
class VocabParallelCrossEntropy(CrossEntropy):
    """:class:`CrossEntropy` of the logits of a head that is cut with ``gather_logits=False``.

    The loss is the same on every rank.

    Attributes:
        takes_cut_logits: the mark of such a loss: a step then passes on its errors as they are.
    """

    takes_cut_logits: ClassVar[bool] = True

    def total(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum over the counted tokens; a scalar, in float32 at least.

        Args:
            logits: DTensor (batch, seq, vocab), cut in its last dimension.
            target: token ids (batch, seq), the same on every rank of ``tp``; looked at on the CPU
                alone, as a GPU would have to be waited for.
        """
        if not isinstance(logits, DTensor) or logits.placements != (Shard(logits.dim() - 1),):
            raise TypeError(
                f"logits are a {type(logits).__name__} that is not cut over the vocabulary: call "
                "apply_tensor_parallel(..., gather_logits=False), or use CrossEntropy()"
            )
        counted = target != self.ignore_index
        if (
            target.device.type == "cpu"
            and not ((target >= 0) & (target < logits.shape[-1]) | ~counted).all()
        ):
            raise ValueError(
                f"target holds token ids from {int(target[counted].min())} to"
                f" {int(target[counted].max())}, which must lie in [0, vocab_size) = [0,"
                f" {logits.shape[-1]}): use the tokenizer this model was sized for"
            )
        part = logits.to_local()
        if part.dtype.itemsize < 4:
            part = part.float()
        mesh = logits.device_mesh
        first = mesh.get_local_rank() * part.shape[-1]
        total: Tensor = _TotalLoss.apply(part, target - first, counted, mesh.get_group())
        return total


class _TotalLoss(torch.autograd.Function):
    """The sum of the cross-entropies of tokens whose logits are cut over the ranks of ``tp``.

    logits (batch, seq, vocab / tp), target (batch, seq) -> scalar. Targets are counted from this
    rank's first token id.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, counted: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        # Subtracting the largest logit keeps exp from overflowing and does not change the loss.
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[..., None]
        here = counted & (target >= 0) & (target < logits.shape[-1])
        target = target.where(here, 0)[..., None]
        of_target = logits.gather(-1, target)[..., 0].where(here, 0)
        weights = logits.exp()
        sums = torch.stack([weights.sum(-1), of_target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(weights / sums[0, ..., None], target, here, counted)
        return (sums[0].log() - sums[1]).where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, target, here, counted = ctx.saved_tensors
        of_logits = probabilities.scatter_add(-1, target, -here[..., None].to(probabilities.dtype))
        return of_logits * counted[..., None] * gradient, None, None, None


class _GatherVocabulary(torch.autograd.Function):
    """All ranks' logits (batch, seq, vocab / tp), put together as (batch, seq, vocab).

    The result is the same on every rank.

    Every rank computes the same loss from them, so backward takes its part of the gradient and
    exchanges nothing.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None
