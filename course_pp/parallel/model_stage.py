"""A stage as torch's pipelining runs it: any module, and what crosses its boundaries."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import Parameter, signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.model import PipelineStageModule
from course_pp.model.stages import Tie
from course_pp.module_extras import uncompiled
from course_pp.parallel._torch import LocalNeighboursStage, tree_flatten
from course_pp.parallel.boundary import Boundary, as_value, call
from course_pp.parallel.meta_device import meta_copy, run_on_meta
from course_pp.parallel.replaced_forward import (
    Compiled,
    casts_inputs,
    compute_dtypes,
    has_replaced,
    replaced_forwards,
    spelled,
)
from course_pp.parallel.split import SplitStage
from course_pp.weight_gradients import Deferring, WeightGradients

__all__ = ["ModelStage", "check_declared_dtype", "find_outputs"]


class ModelStage(LocalNeighboursStage):
    """torch's stage, and what crosses its boundaries.

    Attributes:
        takes, returns: what it is called with and gives back for one microbatch; None where that is not known yet.
            (torch 2.11 has an attribute ``inputs`` of its own.)
        ties: tied weights, by stage; :func:`build_pipeline_schedule` finds them.
        device_mesh: the mesh it was built on.
        param_dtype: dtype of what crosses the boundaries; None is whatever the stages compute in.
        can_split: whether torch can split its backward in two.
        defers: whether it puts off weight gradients itself, for a schedule that splits what torch cannot.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        n_stages: int,
        inputs: Boundary | None,
        outputs: Boundary | None,
        device_mesh: DeviceMesh | None,
        param_dtype: torch.dtype | None,
        **options: Any,
    ) -> None:
        super().__init__(module, stage, n_stages, **options)
        self.param_dtype = param_dtype
        self.device_mesh = device_mesh
        self.takes, self.returns = inputs, outputs
        self.ties: tuple[Tie, ...] = ()
        self._dtypes = compute_dtypes(module)
        self.can_split = isinstance(module, PipelineStageModule) and not has_replaced(module, Compiled)
        self._keywords = _keywords_of(module)
        self._options = options
        self.defers = False
        self._queues: dict[int, WeightGradients] = {}

    def settle(self, inputs: Boundary, outputs: Boundary) -> None:
        """Tell torch what crosses the boundaries: it would otherwise find out by one forward, which changes buffers."""
        self.takes, self.returns = inputs, outputs
        super().__init__(
            self.submod,
            self.stage_index,
            self.num_stages,
            input_args=inputs.empty("meta", requires_grad=not self.is_first),
            output_args=outputs.empty("meta", requires_grad=True) or torch.empty(0, device="meta"),
            **self._options,
        )

    def received(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return what the stage before returned, put together from what it sent."""
        assert self.takes is not None  # settled
        return self.takes.unflatten(tensors)

    def message(self, output: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors of ``output`` that are sent.

        Raises:
            ValueError: if the next stage expects something else.
        """
        assert self.returns is not None  # settled
        try:
            return tuple(_Handed.apply(tensor) for tensor in self.returns.flatten(output))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"stage {self.stage_index} returned {error}: a stage must return the same shapes for every microbatch, "
                "whatever is in it"
            ) from error

    def problem_of_keywords(self, names: Iterable[str]) -> str | None:
        """Return the problem with keyword arguments of these names; None if the module takes them."""
        known, tree = self._keywords, None if self.takes is None else self.takes.tree
        for name in names:
            what = f"keyword argument {name} goes to every stage, but stage {self.stage_index}, a "
            what += type(self.submod).__name__
            if isinstance(tree, Mapping) and name in tree:
                return f"{what}, is called with one of this name already: leave it out, or give it another name"
            if known is not None and name not in known and isinstance(uncompiled(self.submod), SplitStage):
                return (
                    f"{what}, was cut with an example without it: give auto_split a dict that has it as its example, "
                    "and such a dict to build_pipeline_stage and to each step as inputs"
                )
            if known is not None and name not in known:
                return f"{what}, takes {', '.join(known) or 'none'}: let its forward take it, or **kwargs"
        return None

    def problem_of_dtypes(self) -> str | None:
        """Return the problem if the module was converted to another dtype after the stage was built."""
        now = compute_dtypes(self.submod)
        if now == self._dtypes:
            return None
        return (
            f"stage {self.stage_index} computes in {spelled(now)}, but computed in {spelled(self._dtypes)} when it "
            "was built, and its neighbours count on that: convert a module before build_pipeline_stage"
        )

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on what torch received, and give torch what it sends."""
        if not self.is_first:
            # Leaves that require a gradient could not be changed in place, as by nn.ReLU(inplace=True); what a stage of
            # this rank returned is that stage's, and is copied.
            own = torch.Tensor.clone if self._is_local(self.stage_index - 1) else _Handed.apply
            args = tuple(map(own, args))
        output = call(self.submod, as_value(args) if self.is_first else self.received(args), kwargs)
        if not self.is_last:
            return self.message(output)
        self._output = output
        return tuple(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor))

    def _is_local(self, stage: int) -> bool:
        return self.stage_index_to_group_rank[stage] == self.group_rank

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward as torch does; but in a foreign module, ``I`` leaves only the weights of linear layers to ``W``.

        torch splits a graph where the paths from parameters meet those from inputs. There, a stage whose inputs carry
        no gradient would silently lose its own. A parameter used at two depths would fail in the middle of a step, and
        so would a compiled block, which is one node of the graph.
        """
        if self.can_split:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            return
        queue = self._queues.get(bwd_chunk_id)
        with nullcontext() if queue is None else queue.collecting():
            super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
        if full_backward:
            self._compute_queued(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weight-gradient half of one microbatch."""
        if self.can_split:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        else:
            self._compute_queued(bwd_chunk_id)

    def _compute_queued(self, microbatch: int) -> None:
        queue = self._queues.pop(microbatch, None)
        if queue is not None:
            queue.compute()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends after a forward; torch would look for a receiver of the last stage's output too."""
        return [] if self.is_last else super().get_fwd_send_ops(fwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward as torch does; the last stage returns what its module returned, for the loss function."""
        deferring: AbstractContextManager[Any] = nullcontext()
        if self.defers:
            microbatch = args[0] if args else kwargs["fwd_chunk_id"]
            queue = self._queues[microbatch] = WeightGradients()
            deferring = Deferring(queue)
        with deferring:
            sent = super().forward_one_chunk(*args, **kwargs)
        if not self.is_last:
            return sent
        output, self._output = self._output, None
        return output


class _Handed(torch.autograd.Function):
    """A tensor for torch's pipelining: contiguous, copied only if it is not, and with a graph node of its own.

    torch detaches a stage's outputs in place. That fails for a view. And if an output is the stage's own input, or
    saved by the graph, the rest of the backward would lose it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def find_outputs(stage: ModelStage) -> Boundary:
    """Return what a stage returns when it is called with its ``inputs``; nothing is computed.

    Raises:
        ValueError: if that cannot be found on the meta device; names the remedy.
    """
    assert stage.takes is not None
    given, computed = {m.dtype for m in stage.takes.metas if m.dtype.is_floating_point}, compute_dtypes(stage.submod)
    if given and computed and given.isdisjoint(computed) and not casts_inputs(stage.submod):
        raise ValueError(  # the meta device would let them pass
            f"stage {stage.stage_index} is called with {stage.takes}, but computes in {spelled(computed)}: convert "
            "the stages alike, or declare outputs= if it casts its inputs itself"
        )
    taken = stage.takes.empty("meta")

    def returned() -> Boundary:
        output = call(meta_copy(stage.submod), stage.received(taken))
        return Boundary(()) if stage.is_last else Boundary.of(output)  # nobody is sent what the last one returns

    try:
        found = run_on_meta(returned)
    except Exception as error:  # whatever a foreign forward raises
        if (known := _known(stage)) is not None:
            return known
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        remedy = "mend the stage, or declare what crosses, build_pipeline_stage(..., outputs=...)"
        if isinstance(stage.submod, SplitStage):
            remedy = "give auto_split an example of this size"
        raise ValueError(
            f"stage {stage.stage_index}, a {type(stage.submod).__name__} called with {stage.takes} alone on the meta "
            f"device, does not say what it returns ({reason:.300}): {remedy}"
        ) from error
    check_declared_dtype(stage.stage_index, found, stage.param_dtype)
    return found


def _known(stage: ModelStage) -> Boundary | None:
    """Return what a stage of :func:`auto_split` returned for its example, if these inputs are like the example's."""
    if not isinstance(stage.submod, SplitStage) or stage.takes is None:
        return None
    taken, sent = stage.submod.sent_for_example()
    return Boundary.of(sent) if Boundary.of(taken).metas == stage.takes.metas else None


def check_declared_dtype(stage: int, given: Boundary | None, param_dtype: torch.dtype | None) -> None:
    """Refuse a stage that returns another dtype than ``param_dtype``.

    Raises:
        ValueError: naming the tensor.
    """
    for meta in () if given is None or param_dtype is None else given.metas:
        if meta.dtype.is_floating_point and meta.dtype != param_dtype:
            raise ValueError(
                f"stage {stage} returns {meta}, but param_dtype={param_dtype}: declare what really crosses, or leave "
                "param_dtype out"
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
    return [p.name for p in takes if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
