"""Plans of tensor parallelism, made for what a module really holds: every matrix of a block columns first, rows second.

    q, k, v, gate, up   column-wise   a rank computes some heads, some channels; needs the whole input
    o, down             row-wise      a rank's product is one term of a sum; the ranks add up

A plan is a mapping from name patterns to torch's parallel styles. For another family write one: as a mapping, or as a
function of a module and ``tp`` that returns one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from course_pp.arguments import checked, refuse_unless
from course_pp.model import ModelConfig, Transformer
from course_pp.parallel.styles import GatheredColwiseParallel, PartOfSequence, SequencesDivide, WholeOutputs
from course_pp.plan.shapes import shards_head

__all__ = ["check_tensor_parallel", "llama_plan", "shards_head", "transformer_plan"]

Styles = dict[str, ParallelStyle]

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")

_MOST_TP = 4096  # no head and no width divides by more


def _check_size(function: str, tp: int) -> None:
    refuse_unless(1 <= tp <= _MOST_TP, function, "tp", tp, f"give the size of the tp dimension, 1 to {_MOST_TP:,}")


@checked
def transformer_plan(module: Transformer, tp: int, gather_logits: bool = True) -> Styles:
    """Plan for this package's model, or one stage of it.

    The embedding is replicated. The head is cut over the vocabulary if ``tp`` divides it and it is not tied to the
    embedding. Norms are sequence-parallel if ``module`` is a whole, untied model; its sequences must then be a multiple
    of ``tp`` long.

    Args:
        gather_logits: False leaves each rank its part of the vocabulary, in a DTensor.

    Raises:
        ValueError: if ``tp`` does not divide the heads or the feed-forward width, or if ``gather_logits=False`` and the
            head cannot be cut.
    """
    _check_size("transformer_plan", tp)
    config = module.config
    check_tensor_parallel(config, tp, gather_logits)
    whole = module.embed is not None and module.head is not None
    sequence_parallel = whole and not config.tie_embeddings
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: Styles = {
        # The input is made a DTensor once, so that its gradient is summed over the ranks once and not per matrix.
        # ``attn`` takes (x, cos, sin, mask), of which only x is a piece of the stream.
        "layers.*.attn": PrepareModuleInput(
            input_layouts=(stream, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        "layers.*.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "layers.*.attn.[qkv]_proj": ColwiseParallel(),
        "layers.*.mlp.gate_proj": ColwiseParallel(),
        "layers.*.mlp.up_proj": ColwiseParallel(),
        "layers.*.attn.o_proj": RowwiseParallel(output_layouts=stream),
        "layers.*.mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    if not config.gated_ffn:
        del plan["layers.*.mlp.gate_proj"]
    cut_head = shards_head(config, tp)
    if module.head is not None and cut_head:
        plan["head"] = _head(gather_logits, stream)
    if sequence_parallel:
        plan["layers.*.*_norm"] = plan["norm"] = SequenceParallel(use_local_output=True)
        plan["embed"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream)
        plan[""] = SequencesDivide()
        if not cut_head:
            plan["head"] = _whole_input(stream)
    return plan


def _whole_input(stream: Placement) -> ParallelStyle:
    """Return the style of a head that is not cut: it takes the whole input."""
    return PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=True)


def _head(gather_logits: bool, stream: Placement) -> ParallelStyle:
    if gather_logits:
        return GatheredColwiseParallel(input_layouts=stream)
    return ColwiseParallel(input_layouts=stream, use_local_output=False)


def check_tensor_parallel(config: ModelConfig, tp: int, gather_logits: bool) -> None:
    """Refuse a cut through a head, from the configuration alone: every rank raises, and none communicates.

    Raises:
        ValueError: as :func:`transformer_plan`.
    """
    _check_divides(tp, {"n_heads": config.n_heads, "n_kv_heads": config.kv_heads, "ffn_dim": config.hidden_dim})
    if not gather_logits and not shards_head(config, tp):
        raise ValueError(
            f"gather_logits=False needs an untied head whose vocab_size={config.vocab_size} is a multiple of "
            f"tp={tp}: leave it True, or pad the vocabulary"
        )


def _check_divides(tp: int, sizes: Mapping[str, int], where: str = "") -> None:
    for name, size in sizes.items():
        if size % tp:
            works = [k for k in range(1, tp) if all(each % k == 0 for each in sizes.values())]
            raise ValueError(
                f"tp={tp} must divide {name}={size}{where}, so that every rank holds whole heads and equal parts: "
                f"use tp={works[-1]}, or change {name}"
            )


@checked
def llama_plan(module: nn.Module, tp: int, gather_logits: bool = True, sequence_parallel: bool | None = None) -> Styles:
    """Plan for the Llama family of transformers (Llama, Mistral, Qwen2, Qwen3, Gemma, …), a model or any part of one.

    Every module that holds ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` is an attention, every one that holds
    ``gate_proj``, ``up_proj`` and ``down_proj`` a feed-forward. The embedding is replicated. ``lm_head`` is cut
    over the vocabulary if ``tp`` divides it and it is not tied to the embedding.

    Args:
        gather_logits: False leaves each rank its part of the vocabulary, in a DTensor for
            :class:`VocabParallelCrossEntropy`.
        sequence_parallel: whether norms between the blocks work on parts of the sequence, which must then be a multiple
            of ``tp`` long; else they are replicated. None means where possible: in a whole, untied model whose blocks
            hold an attention, a feed-forward and norms. Turn it off by
            ``plan=partial(llama_plan, sequence_parallel=False)``.

    Raises:
        ValueError: if ``tp`` does not divide the heads or the feed-forward width, if an attention holds other
            parameters, whose gradients would be silently wrong; if ``gather_logits=False`` and the head cannot be cut;
            or if ``sequence_parallel=True`` and norms cannot work on parts.
    """
    _check_size("llama_plan", tp)
    attentions, feed_forwards = dict(_holding(module, _ATTENTION)), dict(_holding(module, _FEED_FORWARD))
    problem = _problem_of_sequences(module, {*attentions.values(), *feed_forwards.values()})
    if sequence_parallel and problem is not None:
        raise ValueError(f"sequence_parallel=True, but {problem}: leave it out")
    parts = problem is None and sequence_parallel is not False
    stream: Placement = Shard(1) if parts else Replicate()
    plan: Styles = {}
    for name, part in attentions.items():
        _check_attention(name, part, tp)
        # Its callers pass the input by this name; passed by position, it is made a DTensor at each of the matrices.
        plan[name] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        plan |= {_join(name, each): ColwiseParallel() for each in _ATTENTION[:-1]}
        plan[_join(name, "o_proj")] = RowwiseParallel(output_layouts=stream)
        # Norms of each head's channels, (batch, seq, heads, channels): their gradients add up over the ranks' heads.
        norms = [each for each in _HEAD_NORMS if hasattr(part, each)]
        plan |= {_join(name, each): SequenceParallel(sequence_dim=2, use_local_output=True) for each in norms}
    for name, part in feed_forwards.items():
        _check_divides(tp, {"intermediate_size": _out_features(part, "up_proj")}, f" of {name!r}")
        plan[name] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        plan |= {_join(name, each): ColwiseParallel() for each in _FEED_FORWARD[:-1]}
        plan[_join(name, "down_proj")] = RowwiseParallel(output_layouts=stream)
    plan |= _plan_of_heads(module, tp, gather_logits, stream)
    return plan | _plan_of_sequences(module) if parts else plan


_BODY, _HEAD = ("embed_tokens", "layers", "norm"), "lm_head"


def _problem_of_sequences(module: nn.Module, cut: set[nn.Module]) -> str | None:
    """Return why norms cannot work on parts of the sequence between the modules in ``cut``; None if they can."""
    whole = f"the module is not a whole model, of {', '.join(_BODY)} and {_HEAD}"
    found = _with_parameters(module)
    body = next((part for name, part in found.items() if name != _HEAD), None)
    if body is None or len(found) != 2 or _HEAD not in found or {*_with_parameters(body)} != {*_BODY}:
        return whole
    head, layers = found[_HEAD], body.get_submodule("layers")
    if not isinstance(head, nn.Linear) or not isinstance(layers, nn.ModuleList):
        return whole
    if _is_tied(module, head):
        return "the head is tied to the embedding, which every rank holds"
    for name, block in layers.named_children():
        others = [each for each, part in _with_parameters(block).items() if part not in cut and "norm" not in each]
        others += [each for each, _ in block.named_parameters(recurse=False)]
        if others:
            return f"block {name!r} holds {', '.join(others)}, which llama_plan does not cut"
    return None


def _with_parameters(module: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in module.named_children() if next(part.parameters(), None) is not None}


def _plan_of_sequences(module: nn.Module) -> Styles:
    """Return styles that keep each rank to its part of the sequence, from the first block on, outside the cut modules.

    They do not begin at the embedding: behind it the model counts positions.
    """
    body = next(name for name in _with_parameters(module) if name != _HEAD)
    plan: Styles = {"": WholeOutputs(), f"{body}.norm": SequenceParallel(use_local_output=True)}
    for index, block in module.get_submodule(f"{body}.layers").named_children():
        norms = [name for name, _ in block.named_children() if "norm" in name]
        plan |= {f"{body}.layers.{index}.{name}": SequenceParallel(use_local_output=True) for name in norms}
    return plan | {f"{body}.layers.0": PartOfSequence()}


def _holding(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that have a Linear under each of ``names``."""
    for name, part in module.named_modules():
        if all(isinstance(getattr(part, each, None), nn.Linear) for each in names):
            yield name, part


def _check_attention(name: str, attention: nn.Module, tp: int) -> None:
    width = getattr(attention, "head_dim", None)
    if type(width) is not int:
        raise ValueError(
            f"{name!r} ({type(attention).__name__}) has no head_dim, without which llama_plan cannot tell whole heads: "
            "set it, or pass plan= a mapping"
        )
    known: dict[str, Sequence[int]] = {f"{norm}.weight": (width,) for norm in _HEAD_NORMS}
    known |= {own: p.shape for own, p in attention.named_parameters() if own.split(".")[0] in _ATTENTION}
    others = [own for own, p in attention.named_parameters() if tuple(known.get(own, ())) != tuple(p.shape)]
    if others:
        raise ValueError(
            f"{name!r} ({type(attention).__name__}) holds {', '.join(others)}, which llama_plan does not know: each "
            "rank would train them on its own heads alone. Pass a function that adds styles for them to what "
            "llama_plan returns for the rest, or a mapping"
        )
    q, k = (_out_features(attention, each) // width for each in ("q_proj", "k_proj"))
    _check_divides(tp, {"num_attention_heads": q, "num_key_value_heads": k}, f" of {name!r}")


def _out_features(module: nn.Module, name: str) -> int:
    return cast(nn.Linear, module.get_submodule(name)).out_features


def _plan_of_heads(module: nn.Module, tp: int, gather_logits: bool, stream: Placement) -> Styles:
    heads = [(n, p) for n, p in module.named_modules() if n.endswith(_HEAD) and isinstance(p, nn.Linear)]
    plan: Styles = {}
    for name, head in heads:
        tied = _is_tied(module, head)
        if not tied and head.out_features % tp == 0:
            plan[name] = _head(gather_logits, stream)
        elif not gather_logits:
            raise ValueError(
                f"gather_logits=False needs an untied head whose vocab_size={head.out_features} is a multiple of "
                f"tp={tp}, but {name!r} is {'tied' if tied else 'not'}: leave it True, or pad the vocabulary"
            )
        elif stream != Replicate():
            plan[name] = _whole_input(stream)
    return plan


def _is_tied(module: nn.Module, head: nn.Linear) -> bool:
    """Return whether the head is, or in a stage mirrors, the embedding."""
    users = [part for part in module.modules() for own in part.parameters(recurse=False) if own is head.weight]
    config = getattr(module, "config", None)
    return len(users) > 1 or bool(getattr(config, "tie_word_embeddings", False))


def _join(*names: str) -> str:
    return ".".join(filter(None, names))
