"""A stage of a pipeline as torch's pipelining runs it: any module, its index, its values."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import Parameter, signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from course_pp.base.arguments import check_arguments
from course_pp.base.ranks import refusing_together
from course_pp.base.torch_private import (
    leave_out_of_backward,
    mixed_precision,
    tree_flatten,
    uncompiled,
)
from course_pp.model import ModelConfig, PipelineStageModule, Transformer
from course_pp.model.stages import Tie
from course_pp.parallel.experts import is_shared_out
from course_pp.parallel.mesh import get_pp_mesh, get_pp_rank, get_pp_size, lone_group
from course_pp.parallel.meta_device import meta_copy, run_on_meta
from course_pp.parallel.replaced_forward import (
    EightBits,
    casts_inputs,
    compute_dtypes,
    has_replaced,
    is_compiled,
    replaced_forwards,
    spelled,
)
from course_pp.parallel.split import SplitStage
from course_pp.parallel.torch_stage import LocalNeighboursStage, expect
from course_pp.step.hooks import problem_of_wrappers
from course_pp.step.late_weights import Deferring, WeightGradients
from course_pp.step.loss import Attached
from course_pp.step.random_streams import RandomStreams
from course_pp.step.values import ValueMeta, as_value, call

_TOO_LATE = (
    "no loss was attached in this pipeline's first step: attach 0 × loss from there on, until it is"
    " to count"
)


def build_pipeline_stage(
    stage_module: nn.Module,
    device_mesh: DeviceMesh | None,
    device: torch.device | str,
    batch_size: int | None = None,
    seq_len: int | None = None,
    param_dtype: torch.dtype | None = None,
    *,
    stage: int | None = None,
    n_stages: int | None = None,
    inputs: Any = None,
    outputs: Any = None,
) -> "ModelStage":
    """Wrap a stage module for torch's schedules.

    A stage is called with the value that the stage before it returned. A tuple or list gives the
    positional arguments, a dict the keyword arguments, and any other value is the only argument.
    Tensors may stand in tuples, dicts and dataclasses that torch's pytree knows. Tensors of a
    floating-point dtype carry gradients back.

    If a schedule splits backward in two, a stage of another model leaves only the weights of linear
    layers to the second half. Layers that are compiled, recomputed or cut by tensor parallelism do
    all in the first half.

    For modules that are not this package's, declare the first stage's arguments: ``inputs``, or
    token ids by ``batch_size`` and ``seq_len``. :func:`build_pipeline_schedule` then runs a copy of
    each stage on the meta device.

    Args:
        stage_module: one stage, already on ``device``; any module.
        device_mesh: the mesh of :func:`init_distributed`; without a ``pp`` dimension this rank
            holds every stage.
        batch_size: rows in one *microbatch*.
        seq_len: tokens in a sequence.
        param_dtype: dtype of the activations and gradients that cross stage boundaries; None is
            the dtype that the module computes in. If given, both must be the same.
        stage, n_stages: index of the stage, and number of stages. This package's modules and those
            of :func:`auto_split` know both; by default other modules are one stage a rank.
        inputs: the first stage's arguments for one microbatch; other stages ignore it. Only shapes
            and dtypes count, so meta tensors will do.
        outputs: this stage's return value for one microbatch. It is needed only if the stage cannot
            run on the meta device without the keyword arguments of a step. Meta tensors will do,
            and ``()`` for the last stage.

    Raises:
        ValueError: on every rank of the mesh, if the module or the mesh cannot be used. Also on a
            GPU without NCCL, which torch's pipeline needs to send.
        RuntimeError: if there is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: call init_distributed(config) before build_pipeline_stage"
        )
    with refusing_together(device_mesh):
        check_arguments(build_pipeline_stage, locals())
        index, n = _place(stage_module, device_mesh, stage, n_stages)
        _check_mesh(index, n, device_mesh, torch.device(device))
        wrapped = problem_of_wrappers(stage_module, f"stage {index}")
        if wrapped is not None:
            raise ValueError(wrapped)
        taken, given = _values(
            stage_module, index, batch_size, seq_len, param_dtype, inputs, outputs
        )

    group = None
    if (pp_mesh := get_pp_mesh(device_mesh)) is not None:
        group = pp_mesh.get_group()
    elif dist.get_world_size() > 1:
        group = lone_group(dist.group.WORLD)
    return ModelStage(
        stage_module, index, n, taken, given, device_mesh, param_dtype, torch.device(device), group
    )


def _place(
    module: nn.Module, device_mesh: DeviceMesh | None, stage: int | None, n_stages: int | None
) -> tuple[int, int]:
    """Return the index of a module's stage, and the number of stages."""
    if isinstance(module, Transformer) and not isinstance(module, PipelineStageModule):
        raise TypeError(
            f"a pipeline stage must be a PipelineStageModule, not {type(module).__name__}: "
            "cut the model with build_stage_module(config, stage, n_stages)"
        )
    inner = uncompiled(module)
    if isinstance(inner, PipelineStageModule | SplitStage):
        own = inner.stage_id, inner.num_stages
        if stage not in (None, own[0]) or n_stages not in (None, own[1]):
            given = f"stage={stage}, n_stages={n_stages}"
            raise ValueError(f"{given}, but the module is stage {own[0]} of {own[1]}: drop both")
        return own
    pp_size = get_pp_size(device_mesh)
    n_stages = pp_size if n_stages is None else n_stages
    if stage is None and n_stages != pp_size:
        raise ValueError(
            f"{n_stages} stages on {pp_size} pipeline ranks: say which one this is, stage=..."
        )
    stage = get_pp_rank(device_mesh) if stage is None else stage
    if not 0 <= stage < n_stages:
        raise ValueError(
            f"stage={stage} must lie between 0 and {n_stages - 1}, the last of n_stages={n_stages}"
        )
    return stage, n_stages


def _values(
    module: nn.Module,
    stage: int,
    batch_size: int | None,
    seq_len: int | None,
    param_dtype: torch.dtype | None,
    inputs: Any,
    outputs: Any,
) -> tuple[ValueMeta | None, ValueMeta | None]:
    """Return the values that a stage takes and returns, as far as they are known before it runs."""
    if isinstance(module, PipelineStageModule):
        if inputs is not None or outputs is not None:
            raise ValueError(
                "leave inputs= and outputs= out: a PipelineStageModule knows what it takes and"
                " returns"
            )
        return _values_of_transformer(module, batch_size, seq_len, param_dtype)
    # Other stages ignore inputs, but look at them, so that all ranks refuse bad ones.
    taken = _declared("inputs", inputs) or _tokens(batch_size, seq_len)
    given = _declared("outputs", outputs)
    check_declared_dtype(stage, given, param_dtype)
    return taken if stage == 0 else None, given


def _values_of_transformer(
    module: PipelineStageModule,
    batch_size: int | None,
    seq_len: int | None,
    param_dtype: torch.dtype | None,
) -> tuple[ValueMeta, ValueMeta]:
    rows, positions = check_microbatch(module.config, batch_size, seq_len)
    dtypes = compute_dtypes(module)
    if param_dtype is None:
        param_dtype = dtypes[0]
    if dtypes != (param_dtype,):
        remedy = "pass the module's own dtype, or convert it before building the stage"
        if mixed_precision(module) is not None:
            remedy = (
                f"pass param_dtype={spelled(dtypes)}, or apply FSDP2 with"
                f" default_mp_policy({param_dtype})"
            )
        # The neighbour would misread the message's bytes.
        raise ValueError(
            f"stage {module.stage_id} computes in {spelled(dtypes)}, but param_dtype declares that"
            f" {param_dtype} crosses its boundary: {remedy}"
        )

    hidden = torch.empty(rows, positions, module.config.dim, dtype=param_dtype, device="meta")
    takes = returns = hidden
    if module.stage_id == 0:
        takes = torch.empty(rows, positions, dtype=torch.int64, device="meta")
    if module.stage_id == module.num_stages - 1:
        returns = hidden.new_empty(rows, positions, module.config.vocab_size)
    return ValueMeta.of(takes), ValueMeta.of(returns)


def _declared(name: str, value: Any) -> ValueMeta | None:
    if value is None:
        return None
    try:
        return ValueMeta.of(value)
    except TypeError as error:
        raise TypeError(f"{name} holds {error}") from None


def _tokens(batch_size: int | None, seq_len: int | None) -> ValueMeta | None:
    if batch_size is None and seq_len is None:
        return None
    if batch_size is None or seq_len is None:
        raise ValueError(
            f"batch_size={batch_size} and seq_len={seq_len}: give both if the first stage takes"
            " token ids, else inputs=, what it is called with for one microbatch"
        )
    shape = (_check_size("batch_size", batch_size), _check_size("seq_len", seq_len))
    return ValueMeta.of(torch.empty(shape, dtype=torch.int64, device="meta"))


def _check_mesh(
    stage: int, n_stages: int, device_mesh: DeviceMesh | None, device: torch.device
) -> None:
    n_ranks, pp_size = dist.get_world_size(), get_pp_size(device_mesh)
    if device_mesh is not None and device_mesh.size() != n_ranks:
        raise ValueError(
            f"device_mesh {device_mesh.mesh_dim_names} has {device_mesh.size()} of {n_ranks} ranks:"
            " pass the whole mesh of init_distributed, or losses and refusals would not reach"
            " every rank"
        )
    if n_stages % pp_size:
        raise ValueError(
            f"stage {stage} is one of {n_stages}, which {pp_size} pipeline ranks cannot share "
            f"equally: cut the model into a multiple of {pp_size} stages"
        )
    # Sends and receives would take a pointer to GPU memory for one to host memory.
    sends_from_gpu = device.type == "cuda" and pp_size > 1
    if sends_from_gpu and "cuda:gloo" in dist.get_backend_config():
        raise ValueError(
            f"device={str(device)!r} over gloo: torch's pipeline cannot send GPU tensors through"
            " host memory, so train with engine='runtime' (course_pp.runtime) to share GPUs, or"
            " take backend='gloo' to compute on the CPU"
        )


def check_microbatch(
    config: ModelConfig, batch_size: int | None, seq_len: int | None
) -> tuple[int, int]:
    """Return the sizes of a microbatch, if the model has positions for them."""
    rows, positions = _check_size("batch_size", batch_size), _check_size("seq_len", seq_len)
    if positions > config.max_seq_len:
        raise ValueError(
            f"seq_len={seq_len} is over the model's max_seq_len={config.max_seq_len}: shorten the"
            " sequences, or build the model for longer ones"
        )
    return rows, positions


def _check_size(name: str, size: int | None) -> int:
    if size is None or size < 1:
        raise ValueError(f"{name}={size!r} must be a whole number of at least 1")
    return size


class ModelStage(LocalNeighboursStage):
    """torch's stage, with values of any shape and container between stages.

    Attributes:
        takes, returns: the stage's argument and return value for a microbatch of a whole batch;
            None where it is not known yet.
        crossing: the same two values for each microbatch of a step, if microbatches are ready-made.
        keywords: extra keyword arguments of the stage, one dict a microbatch. torch never sees
            them.
        ties: tied weights, by stage; :func:`build_pipeline_schedule` finds them.
        param_dtype: dtype of the tensors between stages; None is the dtype of each stage.
        can_split: whether torch is to split the stage's backward in two.
        weights: the microbatches' weights in the batch, for attached losses; None if no stage
            attached any in the first step.
        attached: the losses that microbatches of this step attach, by microbatch
            (:func:`course_pp.step.loss.attach_loss`).
        defers: whether the stage puts off weight gradients itself. It does if the schedule splits
            backward, and torch cannot split this stage's.
        runs_as: the stage that a pipeline made from this one, and runs; None until there is one.
        unused: {(stage, microbatch): for each tensor that the stage sent, whether the next stage
            left it unused}. One dict for all stages of this rank.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        n_stages: int,
        takes: ValueMeta | None,
        returns: ValueMeta | None,
        device_mesh: DeviceMesh | None,
        param_dtype: torch.dtype | None,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        shapes: dict[str, Any] = {}
        if takes is not None and returns is not None:
            # Without shapes torch would find them by one forward, which changes buffers. It treats
            # an empty tuple as if no shapes were given.
            nothing = torch.empty(0, device="meta")
            shapes["input_args"] = takes.empty("meta", requires_grad=stage > 0)
            shapes["output_args"] = returns.empty("meta", requires_grad=True) or nothing
        super().__init__(module, stage, n_stages, device, group=group, **shapes)
        self.param_dtype = param_dtype
        self.device_mesh = device_mesh
        self.takes = takes
        self.returns = returns
        self.crossing: Sequence[tuple[ValueMeta, ValueMeta]] = ()
        self.keywords: Sequence[Mapping[str, Any]] = ()
        self._microbatch = 0  # the one whose forward is at work
        self.ties: tuple[Tie, ...] = ()
        self.runs_as: ModelStage | None = None
        self._dtypes = compute_dtypes(module)
        # A product in eight bits makes both gradients at once, as a compiled graph does.
        makes_both = is_compiled(module) or has_replaced(module, EightBits)
        self.can_split = (
            isinstance(module, PipelineStageModule)
            and not makes_both
            and not _uses_one_twice(module)
        )
        self._keywords = _keywords_of(module)
        self.defers = False
        self._queues: dict[int, WeightGradients] = {}
        self.weights: torch.Tensor | None = None
        self.attached: dict[int, Attached] = {}
        self.streams: RandomStreams | None = None
        self.unused: dict[tuple[int, int], list[bool]] = {}
        self._telling: list[dist.Work] = []

    def settled(self) -> "ModelStage":
        """Return a stage like this one for one pipeline, once its values are known."""
        known = (
            self.takes,
            self.returns,
            self.device_mesh,
            self.param_dtype,
            self.device,
            self.group,
        )
        again = ModelStage(self.submod, self.stage_index, self.num_stages, *known)
        again._dtypes = self._dtypes
        self.runs_as = again.runs_as = again
        return again

    def received(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        assert self.takes is not None  # settled
        return self.takes.unflatten(tensors)

    def taken_by(self, microbatch: int) -> ValueMeta:
        """Return the value that the stage is called with for a microbatch of this step."""
        assert self.takes is not None  # settled
        return self.crossing[microbatch][0] if self.crossing else self.takes

    def returned_for(self, microbatch: int) -> ValueMeta:
        """Return the value that the stage returns for a microbatch of this step."""
        assert self.returns is not None  # settled
        return self.crossing[microbatch][1] if self.crossing else self.returns

    def message(self, output: Any, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of ``output`` to send; refuse an output the next stage cannot take."""
        try:
            tensors = self.returned_for(microbatch).flatten(output)
            return tuple(_Handed.apply(tensor) for tensor in tensors)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"stage {self.stage_index} returned {error}: what crosses may depend on the shapes"
                " of a microbatch, and on numbers among its keyword arguments, but not on what is"
                " in its tensors and objects"
            ) from error

    def problem_of_keywords(self, names: Iterable[str]) -> str | None:
        """Return the reason to refuse keyword arguments of these names, or None."""
        known = self._keywords
        tree = None if self.takes is None else self.takes.tree
        is_cut = isinstance(uncompiled(self.submod), SplitStage)
        for name in names:
            what = (
                f"keyword argument {name} goes to every stage, but stage {self.stage_index}, a"
                f" {type(self.submod).__name__}"
            )
            if isinstance(tree, Mapping) and name in tree:
                return (
                    f"{what}, is called with one of this name already: leave it out, or give it"
                    " another name"
                )
            if known is None or name in known:
                continue
            # A likely slip for target=, for which the general remedy below would be wrong.
            if name == "targets":
                return "targets is no argument of step or eval, nor of a stage: give it as target="
            if is_cut:
                return (
                    f"{what}, was cut with an example without it: give auto_split a dict that has"
                    " it as its example, and such a dict to build_pipeline_stage and to each step"
                    " as inputs"
                )
            return (
                f"{what}, takes {', '.join(known) or 'none'}: let its forward take it, or **kwargs"
            )
        return None

    def lacking(self, keywords: Mapping[str, Any]) -> set[str]:
        """Return the names of the module's arguments that neither cross nor are in ``keywords``."""
        assert self.takes is not None  # settled
        if self._keywords is None or isinstance(uncompiled(self.submod), SplitStage):
            return set()
        tree = self.takes.tree
        if isinstance(tree, Mapping):
            crossing = set(tree)
        else:
            n_crossing = len(tree) if type(tree) is tuple else 1
            crossing = set(self._keywords[:n_crossing])
        return set(self._keywords) - crossing - set(keywords)

    def problem_of_dtypes(self) -> str | None:
        """Return the problem of a module that was converted after the stage was built, or None."""
        now = compute_dtypes(self.submod)
        if now == self._dtypes:
            return None
        return (
            f"stage {self.stage_index} computes in {spelled(now)}, but computed in"
            f" {spelled(self._dtypes)} when it was built, and its neighbours count on that: convert"
            " a module before build_pipeline_stage"
        )

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on what torch received, and give torch what it sends."""
        if not self.is_first:
            # torch's tensors are leaves that require a gradient, which a module must not change in
            # place, as nn.ReLU(inplace=True) does. A tensor from a stage of this rank still belongs
            # to that stage, so it is copied.
            is_local = self.stage_index_to_group_rank[self.stage_index - 1] == self.group_rank
            own = torch.Tensor.clone if is_local else _Handed.apply
            args = tuple(map(own, args))
        keywords = self.keywords[self._microbatch]
        value = as_value(args) if self.is_first else self.received(args)
        output = call(self.submod, value, keywords)
        if not self.is_last:
            return self.message(output, self._microbatch)
        self._output = output
        leaves, _ = tree_flatten(output)
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run backward as torch does, except that torch does not split every graph.

        If ``can_split`` is False, or the microbatch has attached losses or a queue, ``I`` leaves
        only the weights of linear layers to ``W``.

        torch splits a graph where the paths from parameters meet the paths from inputs. By this
        rule a stage whose inputs carry no gradient would silently lose its own gradients. A
        parameter used at two depths, or a compiled block, would fail. A loss attached inside may
        put any parameter at two depths.
        """
        if not self.is_last and self._learns_unused():
            self._leave_unused(bwd_chunk_id)
        is_whole = bwd_chunk_id not in self.attached and bwd_chunk_id not in self._queues
        if self.can_split and is_whole:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            return
        queue = self._queues.get(bwd_chunk_id)
        with nullcontext() if queue is None else queue.collecting():
            super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
        if full_backward:
            self._compute_queued(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self.backward_state:  # torch has split it
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        else:
            self._compute_queued(bwd_chunk_id)

    def _compute_queued(self, microbatch: int) -> None:
        queue = self._queues.pop(microbatch, None)
        if queue is not None:
            queue.compute()

    def sent_back(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return gradients as they are sent: contiguous.

        A tensor that the stage did not use gets zeros.

        The stage before is told which tensors were not used. In one process the weights behind such
        a tensor get no gradient, and an optimizer leaves them alone. For a gradient of zero it
        would decay and move them.
        """
        if self.is_first:
            return tuple(gradients)
        if self._learns_unused():
            self._tell_unused(microbatch, [gradient is None for gradient in gradients])

        sent: list[torch.Tensor | None] = []
        metas = self.taken_by(microbatch).metas
        for gradient, meta in zip(gradients, metas, strict=True):
            if gradient is not None:
                sent.append(gradient.contiguous())
            elif meta.dtype.is_floating_point:
                sent.append(meta.empty(self.device).zero_())
            else:
                sent.append(None)
        return tuple(sent)

    def _learns_unused(self) -> bool:
        """Return whether this stage and its neighbours tell one another which tensors they leave
        unused.

        A stage of this package's model sends one tensor, which the next always uses. Where the
        group has no way over the CPU, every backward would wait for the GPU, and zeros remain.
        """
        is_ours = isinstance(self.submod, PipelineStageModule)
        return not is_ours and "cpu" in dist.get_backend_config(self.group)

    def _tell_unused(self, microbatch: int, unused: list[bool]) -> None:
        before = self.stage_index - 1
        rank = self.stage_index_to_group_rank[before]
        if rank == self.group_rank:
            self.unused[before, microbatch] = unused
            return
        told = torch.tensor(unused, dtype=torch.uint8)
        work = dist.isend(told, group=self.group, group_dst=rank, tag=self._tag(before, microbatch))
        assert work is not None  # this rank is in the group
        self._telling.append(work)

    def _leave_unused(self, microbatch: int) -> None:
        """Take the outputs that the next stage left unused out of this microbatch's backward."""
        rank = self.stage_index_to_group_rank[self.stage_index + 1]
        if rank == self.group_rank:
            unused = self.unused.pop((self.stage_index, microbatch))
        else:
            told = torch.zeros(len(self.returned_for(microbatch).metas), dtype=torch.uint8)
            tag = self._tag(self.stage_index, microbatch)
            dist.recv(told, group=self.group, group_src=rank, tag=tag)
            unused = told.bool().tolist()
        if any(unused) and not self._data_ranks_meet_in_backward():
            leave_out_of_backward(self, microbatch, unused)

    def _data_ranks_meet_in_backward(self) -> bool:
        """Return whether data ranks wait for one another in this stage's backward.

        FSDP2 reduces there, and experts shared out exchange rows. One data rank may use an output
        that another leaves unused, but all must go through the same backward.
        """
        parts = list(self.submod.modules())
        return any(isinstance(part, FSDPModule) or is_shared_out(part) for part in parts)

    def _tag(self, sender: int, microbatch: int) -> int:
        """Return the tag of the message that tells stage ``sender`` its unused outputs.

        torch's own messages have tag 0.
        """
        return 1 + sender + microbatch * self.num_stages

    def end_step(self) -> None:
        """Wait until the stage before has been told everything."""
        while self._telling:
            self._telling.pop().wait()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives before a forward, into buffers of the microbatch's own size."""
        if not self.is_first:
            _fit(self.args_recv_info[fwd_chunk_id], self.taken_by(fwd_chunk_id))
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives before a backward, into buffers of the microbatch's own size."""
        if not self.is_last:
            _fit(self.grad_recv_info[bwd_chunk_id], self.returned_for(bwd_chunk_id))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends after a forward.

        The last stage sends nothing, and torch would look for its receiver.
        """
        return [] if self.is_last else super().get_fwd_send_ops(fwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward as torch does; the last stage returns its module's output, for the loss."""
        deferring: AbstractContextManager[Any] = nullcontext()
        microbatch = self._microbatch = args[0] if args else kwargs["fwd_chunk_id"]
        if self.weights is None:
            attached = Attached(refusal=_TOO_LATE)
        else:
            attached = Attached(self.weights[microbatch], keeps_problem=True)
        if self.defers:
            queue = self._queues[microbatch] = WeightGradients()
            deferring = Deferring(queue)
        if self.streams is not None:
            self.streams.begin(self.stage_index, microbatch)

        with deferring, attached:
            sent = super().forward_one_chunk(*args, **kwargs)
        if attached.values or attached.problem:
            self.attached[microbatch] = attached
            self.defers = self.defers or self.can_split
        if not self.is_last:
            return sent
        output, self._output = self._output, None
        return output


def _fit(infos: Iterable[Any], value: ValueMeta) -> None:
    """Give the buffers that receive ``value`` its shapes; torch knows the declared ones only."""
    for info, meta in zip(infos, value.metas, strict=True):
        expect(info, meta.shape)


def _uses_one_twice(module: nn.Module) -> bool:
    """Return whether a parameter has two names in ``module``.

    Such a parameter is in a block used at two depths, as in ALBERT, or it is tied.

    torch's split backward would go through the second use's graph twice.
    """
    names = module.named_parameters(remove_duplicate=False)
    return len(list(names)) > len(list(module.parameters()))


class _Handed(torch.autograd.Function):
    """A tensor for torch's pipelining: contiguous, and with a graph node of its own.

    It is copied only if it is not contiguous.

    torch detaches a stage's outputs in place. That fails for a view. And if an output is the
    stage's own input, or saved by the graph, the rest of the backward would lose it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def find_outputs(stage: ModelStage, takes: ValueMeta, keywords: Mapping[str, Any]) -> ValueMeta:
    """Find on the meta device the value that a stage returns, or refuse the stage.

    Args:
        takes: the value that the stage is called with.
        keywords: its keyword arguments, which stay as they are.
    """
    given = {meta.dtype for meta in takes.metas if meta.dtype.is_floating_point}
    computed = compute_dtypes(stage.submod)
    do_differ = given and computed and given.isdisjoint(computed)
    # The meta device would let them pass.
    if do_differ and not casts_inputs(stage.submod):
        raise ValueError(
            f"stage {stage.stage_index} is called with {takes}, but computes in"
            f" {spelled(computed)}: convert the stages alike, or declare outputs= if it casts its"
            " inputs itself"
        )
    if stage.is_first and stage.is_last:
        return ValueMeta(())  # nothing crosses
    taken = takes.empty("meta")

    def returned() -> ValueMeta:
        output = call(meta_copy(stage.submod), takes.unflatten(taken), keywords)
        if stage.is_last:
            return ValueMeta(())  # its output is not sent
        return ValueMeta.of(output)

    try:
        found = run_on_meta(returned)
    except Exception as error:  # whatever a foreign forward raises
        if isinstance(stage.submod, SplitStage):
            taken_then, sent = stage.submod.sent_for_example()
            if ValueMeta.of(taken_then).metas == takes.metas:
                return ValueMeta.of(sent)  # its example had these shapes
        first_line, *_ = str(error).strip().splitlines() or ["no message"]
        reason = f"{type(error).__name__}: {first_line}"
        remedy = "mend the stage, or declare what crosses, build_pipeline_stage(..., outputs=...)"
        beside = f"and {', '.join(keywords)}" if keywords else "alone"
        if isinstance(stage.submod, SplitStage):
            remedy = "give auto_split an example of this size"
        raise ValueError(
            f"stage {stage.stage_index}, a {type(stage.submod).__name__} called with {takes}"
            f" {beside} on the meta device, does not say what it returns ({reason:.300}): {remedy}"
        ) from error
    check_declared_dtype(stage.stage_index, found, stage.param_dtype)
    return found


def check_declared_dtype(
    stage: int, given: ValueMeta | None, param_dtype: torch.dtype | None
) -> None:
    for meta in () if given is None or param_dtype is None else given.metas:
        if meta.dtype.is_floating_point and meta.dtype != param_dtype:
            raise ValueError(
                f"stage {stage} returns {meta}, but param_dtype={param_dtype}: declare what really"
                " crosses, or leave param_dtype out"
            )


def _keywords_of(module: nn.Module) -> list[str] | None:
    """Return the names under which a module takes arguments; None if it takes any."""
    inner = uncompiled(module)
    if isinstance(inner, SplitStage):
        return inner.keywords_of_example()
    around = list(replaced_forwards(inner.forward))
    forward = around[-1].forward if around else inner.forward
    takes = signature(forward).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in takes):
        return None
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in takes if parameter.kind in by_name]
