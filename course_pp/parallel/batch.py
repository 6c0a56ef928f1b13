"""The batch of a pipeline: whether it fits, and how it is cut into microbatches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from course_pp.model import PipelineStageModule
from course_pp.parallel._torch import tree_flatten, tree_unflatten
from course_pp.parallel.stage import ModelStage
from course_pp.parallel.stage_values import ValueMeta


class Batch:
    """Checks whole batches of ``size`` rows for this rank's stages, and cuts them into microbatches of ``rows``."""

    def __init__(self, stages: Sequence[ModelStage], n_microbatches: int, rows: int, counts_tokens: bool) -> None:
        self._stages, self._n_microbatches, self._rows = stages, n_microbatches, rows
        self._counts_tokens = counts_tokens
        module = stages[0].submod
        self._transformer = module if isinstance(module, PipelineStageModule) else None
        self.size = n_microbatches * rows
        self._inputs: ValueMeta | None = None
        if stages[0].is_first and (takes := stages[0].takes) is not None:
            whole = (replace(meta, shape=(self.size, *meta.shape[1:])).empty("meta") for meta in takes.metas)
            self._inputs = ValueMeta.of(takes.unflatten(whole))

    def problem(
        self, inputs: tuple[Any, ...], target: object, kwargs: dict[str, Any], needs_target: bool
    ) -> str | None:
        """Return what is wrong with a batch on this rank; None if it fits."""
        problems = [stage.problem_of_dtypes() for stage in self._stages]
        if self._stages[0].is_first:
            problems.append(self._problem_of_inputs(inputs))
        if self._stages[-1].is_last and needs_target:
            problems.append(self._problem_of_target(target))
        problems += [self._problem_of_keyword(name, value) for name, value in kwargs.items()]
        problems += [stage.problem_of_keywords(kwargs) for stage in self._stages]
        return next((problem for problem in problems if problem is not None), None)

    def cut(self, values: Any) -> list[Any]:
        """Return ``values`` for each microbatch: tensors are cut by rows, anything else is repeated."""
        leaves, spec = tree_flatten(values)
        n = self._n_microbatches
        parts = [leaf.chunk(n) if isinstance(leaf, Tensor) else [leaf] * n for leaf in leaves]
        return [tree_unflatten([part[i] for part in parts], spec) for i in range(n)]

    def _problem_of_inputs(self, inputs: tuple[Any, ...]) -> str | None:
        if not inputs or inputs == (None,):
            return "inputs is missing on the rank that holds the first stage"
        try:
            given = ValueMeta.of(inputs)
        except TypeError as error:
            return f"inputs holds {error}"
        if given != self._inputs:
            return (
                f"inputs is {given}, but the pipeline was built for {self._inputs}, of n_microbatches × rows = "
                f"{self._n_microbatches} × {self._rows} = {self.size} rows: pass that, drop or pad a remainder, or "
                "build the stages for other sizes"
            )
        if self._transformer is not None and inputs[0].device.type == "cpu":  # looking would wait for a GPU
            low, high, vocab_size = int(inputs[0].min()), int(inputs[0].max()), self._transformer.config.vocab_size
            if low < 0 or high >= vocab_size:
                return f"inputs holds token ids from {low} to {high}, but vocab_size={vocab_size}: use its tokenizer"
        return None

    def _problem_of_target(self, target: object) -> str | None:
        if target is None:
            return "target is missing on the rank that holds the last stage"
        if not isinstance(target, Tensor):
            return f"target is a {type(target).__name__}: pass a tensor whose first dimension is the batch, {self.size}"
        known: tuple[int, ...] = (self.size,)
        if self._transformer is not None and (takes := self._stages[0].takes) is not None:
            known = (self.size, takes.metas[0].shape[1])
        if tuple(target.shape[: len(known)]) != known:
            return (
                f"target has shape {tuple(target.shape)}, but the pipeline was built for {known}, of n_microbatches × "
                f"rows = {self._n_microbatches} × {self._rows} = {self.size}: drop or pad the remainder, or rebuild it"
            )
        if self._transformer is not None and self._counts_tokens and target.dtype != torch.int64:
            return f"target is {target.dtype}: pass token ids, int64, of shape {known}"
        return None

    def _problem_of_keyword(self, name: str, value: object) -> str | None:
        if isinstance(value, Tensor):
            if value.dim() == 0 or value.shape[0] != self.size:
                return (
                    f"keyword argument {name} has shape {tuple(value.shape)}, but its first dimension must be the "
                    f"whole batch, {self.size}: expand it"
                )
        elif value is not None and not isinstance(value, bool | int | float | str):
            return (
                f"keyword argument {name} is a {type(value).__name__}: pass tensors whose first dimension is the "
                "whole batch, or plain numbers and strings, each under a name of its own"
            )
        return None
