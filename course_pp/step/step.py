"""The methods and attributes of a pipeline, the same in both engines.

    loss = pipeline.step(inputs, target=target)      # gradients are in .grad
    loss = pipeline.eval(inputs, target=target)      # no gradients
    outputs = pipeline.evaluate(inputs)              # no gradients and no loss

:class:`course_pp.runtime.Pipeline` and :class:`course_pp.parallel.PipelineSchedule` implement
:class:`AnyPipeline`. Their own docstrings say only where they differ.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from course_pp.step.batch import ChunkSpec


class AnyPipeline(ABC):
    """A pipeline of either engine.

    Call every method on all ranks of the pipeline at once. The rank of the first stage must give
    the inputs, the rank of the last stage the target. An argument for which a rank has no use is
    ignored.

    Attributes:
        attached: the sums of the last step's attached losses by name, on every rank; see
            :func:`attach_loss`.
        ties: weights that several stages share, each as its name by stage.
    """

    attached: dict[str, float]
    ties: Sequence[Mapping[int, str]]

    @abstractmethod
    def step(
        self,
        *inputs: Any,
        target: Any = None,
        divisor: float | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run forward and backward over a batch. Gradients are added to those in ``.grad``, as by
        ``loss.backward()``.

        Give a whole batch, or ready-made microbatches in three lists with an entry for each.
        Ready-made microbatches may differ in shape, from one another and from step to step::

            pipeline.step(tokens, target=target, attention_mask=mask)
            pipeline.step(
                arg_mbs=[(x,) for x in xs],
                kwarg_mbs=[{"offsets": o} for o in offsets],
                target_mbs=ys,
            )

        Hooks of ``parameter.register_hook`` are called for each microbatch, as in gradient
        accumulation. Hooks of ``register_post_accumulate_grad_hook`` are called once, when the loss
        is known: an optimizer may step there. Under HSDP, ``set_requires_all_reduce(False)`` on the
        stages leaves the all-reduce to a later step.

        Args:
            inputs: the first stage's arguments for the whole batch: tensors, alone or in tuples and
                dicts, which are cut along their first dimension. A dict alone gives keyword
                arguments.
            target: the target of the whole batch, cut in the same way.
            divisor: the number of tokens of the global batch that the loss is averaged over
                (samples, if the loss does not count tokens). None counts them, over data-parallel
                ranks too. If the gradients of several steps add up, give the number in all of them.
            arg_mbs: in place of ``inputs``, the tuple of the first stage's arguments for each
                microbatch. A dict alone in the tuple gives keyword arguments.
            kwarg_mbs: in place of ``kwargs``, a dict of keyword arguments for each microbatch.
                Every stage of this rank gets them untouched: offsets of packed sequences, a
                ``BlockMask``, any object.
            target_mbs: in place of ``target``, the target of each microbatch.
            kwargs_chunk_spec: a word for each name in ``kwargs``: ``"rows"`` cuts the argument's
                tensors along their first dimension, also in tuples and dicts; ``"same"`` gives the
                argument to every microbatch untouched.
            kwargs: keyword arguments of this rank's stages for the whole batch. Tensors of two
                dimensions or more, the first of which is the batch, are cut by rows. Numbers,
                strings and None go to every microbatch. Any other argument needs a word in
                ``kwargs_chunk_spec``.

        Returns:
            The mean loss of the global batch, a float64 scalar without gradient, the same on every
            rank. Microbatches weigh by counted tokens if the loss is a :class:`TokenLoss`, else by
            samples. A microbatch without a counted token has weight 0. A batch without one has loss
            0.

            A loss that is infinite or not a number is returned, as in one process, and hooks after
            accumulation are called. Do not update the weights then. If gradients are not finite
            either, ``MeshGradScaler`` skips the update, and
            ``clip_grad_norm_(..., error_if_nonfinite=True)`` raises, both on every rank.

        Raises:
            ValueError: if an argument cannot be used, before the first action.
            StepFailed: if another rank fails in mid-step.
        """

    @abstractmethod
    def eval(
        self,
        *inputs: Any,
        target: Any = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the loss as :meth:`step` does, without gradients, at any time between steps.

        Modules stay in the mode they are in: call ``module.eval()`` first if they have dropout.
        """

    @abstractmethod
    def evaluate(
        self,
        *inputs: Any,
        on: Literal["last", "all"] = "last",
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the model's outputs for a batch, without gradients or a loss, at any time between
        steps.

        Args:
            inputs, arg_mbs, kwarg_mbs, kwargs_chunk_spec, kwargs: as in :meth:`step`.
            on: the ranks that get the outputs: ``"last"``, those of the last stage, or ``"all"``.

        Returns:
            The last stage's output for the whole batch, in its own containers: tensors are
            concatenated along their first dimension, scalars stacked. If microbatches differ in
            more than rows, a list with one output for each. None on a rank that gets no outputs.
        """
