"""Tensor parallelism: every matrix of a block cut over the ranks of ``tp``, columns first, rows second.

    q, k, v, gate, up   column-wise   a rank computes some heads, some channels; needs the whole input
    o, down             row-wise      a rank's product is one term of a sum; the ranks add up

Between the two nothing is sent, so a block costs two sums over the ranks in forward and two in backward.

Plain: every rank holds the whole residual stream, and a sum is an all-reduce. Sequence-parallel: a rank holds some
positions of the stream, norms work on those, and the all-reduce becomes a reduce-scatter and an all-gather of the
same bytes, with activations between blocks divided by tp.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3; sequence parallelism: Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course_pp.arguments import checked
from course_pp.model import DecoderLayer, ModelConfig, Transformer
from course_pp.parallel.mesh import get_tp_mesh
from course_pp.parallel.order import check_order
from course_pp.parallel.vocab_parallel import gather_vocabulary

__all__ = ["apply_tensor_parallel", "check_sequence_divides", "check_tensor_parallel", "shards_head"]


@checked
def apply_tensor_parallel(model: nn.Module, device_mesh: DeviceMesh | None, *, gather_logits: bool = True) -> None:
    """Cut the matrices of ``model`` over ``tp``, in place; a no-op where the mesh has no ``tp`` dimension.

    Inputs and outputs stay what they were, ordinary tensors, so a stage sends its neighbours whole activations. The
    embedding is replicated. The head is cut over the vocabulary if ``tp`` divides it and it is not tied to the
    embedding. Norms are sequence-parallel if ``model`` is a whole, untied model; its sequences must then be a multiple
    of ``tp`` long.

    Args:
        model: a :class:`Transformer` or one stage of it. Every rank of ``tp`` must hold the same weights; nothing is
            sent.
        gather_logits: False leaves each rank its part of the vocabulary, in a DTensor (batch, seq, vocab) for
            :class:`VocabParallelCrossEntropy`.

    Raises:
        TypeError: if ``model`` is not a Transformer or a stage of one.
        ValueError: if ``tp`` does not divide the heads or the feed-forward width, if logits are to stay cut but the
            head cannot be, or after checkpointing or FSDP2.
    """
    check_order(model, "tensor parallel")
    if not isinstance(model, Transformer):
        raise TypeError(f"apply_tensor_parallel takes a Transformer or a stage of one, not {type(model).__name__}")
    transformer = model
    mesh, config = get_tp_mesh(device_mesh), transformer.config
    if mesh is None:
        return
    check_tensor_parallel(config, mesh.size(), gather_logits)
    cut_head = shards_head(config, mesh.size())
    sequence_parallel = _is_whole(transformer) and not config.tie_embeddings
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    for layer in (layer for layer in transformer.layers.values() if isinstance(layer, DecoderLayer)):
        _parallelize(layer, mesh, _layer_plan(stream))
    _parallelize(model, mesh, _ends_plan(transformer, stream, cut_head, gather_logits))
    if cut_head and gather_logits and transformer.head is not None:
        transformer.head.register_forward_hook(_GatherLogits(mesh))
    if sequence_parallel:
        model.register_forward_pre_hook(_SequencesDivide(mesh.size()))


def shards_head(config: ModelConfig, tp: int) -> bool:
    """Whether the head is cut over the vocabulary: it cannot be where it is, or mirrors, a replicated embedding."""
    return not config.tie_embeddings and config.vocab_size % tp == 0


def _is_whole(model: Transformer) -> bool:
    return model.embed is not None and model.head is not None


def _layer_plan(stream: Placement) -> dict[str, ParallelStyle]:
    """How one block is cut. ``attn`` takes (x, cos, sin, mask), of which only x is a piece of the stream."""
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        # The input is made a DTensor once, so that its gradient is summed over the ranks once and not per matrix.
        "attn": PrepareModuleInput(
            input_layouts=(stream, None, None, None), desired_input_layouts=(whole, None, None, None)
        ),
        "attn.q_proj": ColwiseParallel(),
        "attn.k_proj": ColwiseParallel(),
        "attn.v_proj": ColwiseParallel(),
        "attn.o_proj": RowwiseParallel(output_layouts=stream),
        "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    if stream.is_shard():
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("attn_norm", "mlp_norm")}
    return plan


def _ends_plan(model: Transformer, stream: Placement, cut_head: bool, gather_logits: bool) -> dict[str, ParallelStyle]:
    """How embedding, final norm and head are cut, where they are here."""
    plan: dict[str, ParallelStyle] = {}
    if stream.is_shard():
        plan["embed"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream)
        plan["norm"] = SequenceParallel(use_local_output=True)
        if not cut_head:
            plan["head"] = PrepareModuleInput(
                input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=True
            )
    if model.head is not None and cut_head:
        plan["head"] = ColwiseParallel(
            input_layouts=stream,
            use_local_output=gather_logits,
        )
    return plan


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    if plan:
        # src_data_rank=None: each rank cuts its own copy, which is everyone's; nothing is sent.
        parallelize_module(module, mesh, plan, src_data_rank=None)


def check_tensor_parallel(config: ModelConfig, tp: int, gather_logits: bool) -> None:
    """Refuse a cut through a head, from the configuration alone: every rank raises, and none communicates.

    Raises:
        ValueError: as :func:`apply_tensor_parallel`.
    """
    for name, size in (("n_heads", config.n_heads), ("n_kv_heads", config.kv_heads), ("ffn_dim", config.hidden_dim)):
        if size % tp:
            works = [k for k in range(1, tp) if config.n_heads % k == config.kv_heads % k == config.hidden_dim % k == 0]
            raise ValueError(
                f"tp={tp} must divide {name}={size}, so that every rank holds whole heads and equal parts: "
                f"use tp={works[-1]}, or change {name}"
            )
    if not gather_logits and not shards_head(config, tp):
        raise ValueError(
            f"gather_logits=False needs an untied head whose vocab_size={config.vocab_size} is a multiple of "
            f"tp={tp}: leave it True, or pad the vocabulary"
        )


def check_sequence_divides(seq_len: int, tp: int) -> None:
    """Refuse a sequence that the ranks of ``tp`` cannot share equally: DTensor would pad it, our residuals not.

    Raises:
        ValueError: naming the next length that works.
    """
    if seq_len % tp:
        raise ValueError(
            f"seq_len={seq_len} must be a multiple of tp={tp} for sequence-parallel norms: "
            f"pad it to {-(-seq_len // tp) * tp}"
        )


class _SequencesDivide:
    """Looks at every input of a whole model."""

    def __init__(self, tp: int) -> None:
        self.tp = tp

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dim() > 1:
            check_sequence_divides(args[0].shape[1], self.tp)


class _GatherLogits:
    """Puts the parts of the vocabulary together, after the head."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], part: Tensor) -> Tensor:
        return gather_vocabulary(part, self.mesh.get_group())
