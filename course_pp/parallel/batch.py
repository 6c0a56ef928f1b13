"""The batch of a pipeline: whether it fits this rank's stages, and its microbatches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from course_pp.base.torch_private import tree_flatten, tree_unflatten
from course_pp.model import PipelineStageModule
from course_pp.parallel.stage import ModelStage, check_microbatch
from course_pp.step.batch import Given, cut_keywords
from course_pp.step.loss import TokenLoss
from course_pp.step.values import ValueMeta


@dataclass(frozen=True)
class Microbatches:
    """The inputs of a rank's stages, one entry a microbatch.

    Attributes:
        arguments: positional arguments of the first stage; empty on ranks without it.
        keywords: keyword arguments of every stage.
        targets: targets of the loss; None on ranks without the last stage.
        counts: numbers of target tokens that the loss counts.
        ready: whether the caller made the microbatches, so that their shapes may differ.
    """

    arguments: list[tuple[Any, ...]]
    keywords: list[dict[str, Any]]
    targets: list[Any] | None = None
    counts: list[Any] = field(default_factory=list)
    ready: bool = True


class Batch:
    """Makes microbatches of the inputs a rank was given.

    Inputs that do not fit are a ValueError, as far as a rank can tell alone.

    Args:
        rows: the rows of a microbatch, or None if a whole batch cannot be cut by rows.
        counts_tokens: whether ``loss`` counts tokens; else it counts samples.
    """

    def __init__(
        self,
        stages: Sequence[ModelStage],
        n_microbatches: int,
        rows: int | None,
        loss: TokenLoss,
        counts_tokens: bool,
    ) -> None:
        self._stages, self._n_microbatches, self._rows = stages, n_microbatches, rows
        self._loss, self._counts_tokens = loss, counts_tokens
        module = stages[0].submod
        self._transformer = module if isinstance(module, PipelineStageModule) else None
        self.size = n_microbatches * (rows or 0)
        self._inputs: ValueMeta | None = None
        if stages[0].is_first and (takes := stages[0].takes) is not None:
            whole = (
                replace(meta, shape=(self.size, *meta.shape[1:])).empty("meta")
                for meta in takes.metas
            )
            self._inputs = ValueMeta.of(takes.unflatten(whole))

    def microbatches(self, given: Given, needs_target: bool) -> Microbatches:
        """Return the inputs of this rank's stages."""
        ready = given.is_ready(self._n_microbatches)
        if given.whole and not ready and self._rows is None:
            raise ValueError(
                f"{given.whole[0]} is of a whole batch, and cannot be cut by rows: the tensors that"
                " this pipeline was built for do not share their first dimension; give ready-made"
                " microbatches, arg_mbs=, or build the stages for tensors whose first dimension is"
                " the rows"
            )
        # Look first whether the stages take the keywords at all: a message about the spec of a
        # keyword that no stage takes would mislead.
        of_each: Sequence[Mapping[str, Any]] = given.kwarg_mbs or []
        for names in of_each or [given.kwargs]:
            for stage in self._stages:
                _refuse(stage.problem_of_keywords(names))
        arguments: list[tuple[Any, ...]] = [()] * self._n_microbatches
        if self._stages[0].is_first:
            arguments = (
                self._ready_arguments(given.arg_mbs)
                if ready
                else self._cut(self._checked(given.inputs))
            )
        targets = None
        if self._stages[-1].is_last and needs_target:
            targets = (
                self._ready_targets(given.target_mbs)
                if ready
                else self._cut(self._whole_target(given.target))
            )
        if ready:
            keywords = given.kwarg_mbs or [{}] * self._n_microbatches
        else:
            keywords = cut_keywords(
                given.kwargs, given.kwargs_chunk_spec, self.size, self._n_microbatches
            )
        counts = [] if targets is None else list(map(self._loss.count, targets))
        return Microbatches(arguments, keywords, targets, counts, ready)

    def nothing(self) -> Microbatches:
        """Return the microbatches of a middle rank, without arguments or targets.

        Such a rank is given nothing when the first and the last rank get ready-made microbatches.
        """
        n = self._n_microbatches
        return Microbatches([()] * n, [{}] * n)

    def missing(self, needs_target: bool) -> str | None:
        """Name the input this rank lacks, or return None.

        The caller asks this of a rank that was given nothing while other ranks got ready-made
        microbatches.
        """
        if self._stages[0].is_first:
            return _NO_ARGUMENTS
        return _NO_TARGETS if self._stages[-1].is_last and needs_target else None

    def problem_of_sizes(self, microbatches: Microbatches) -> str | None:
        """Return the first target whose size is not its microbatch's, as a message, or None.

        Call it once the stages know what crosses between them.
        """
        if self._transformer is None or not self._counts_tokens:
            return None
        for i, target in enumerate(microbatches.targets or ()):
            size = self._stages[-1].taken_by(i).metas[0].shape[:2]
            if isinstance(target, Tensor) and tuple(target.shape) != size:
                return (
                    f"target_mbs[{i}] has shape {tuple(target.shape)}, but its microbatch {size}:"
                    " give a target a token"
                )
        return None

    def _cut(self, values: Any) -> list[Any]:
        """Return ``values`` for each microbatch: tensors cut by rows, anything else repeated."""
        leaves, spec = tree_flatten(values)
        n = self._n_microbatches
        parts = [leaf.chunk(n) if isinstance(leaf, Tensor) else [leaf] * n for leaf in leaves]
        return [tree_unflatten([part[i] for part in parts], spec) for i in range(n)]

    def _checked(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not inputs or inputs == (None,):
            raise ValueError("inputs is missing on the rank that holds the first stage")
        given = _described("inputs", inputs)
        if given != self._inputs:
            assert self._inputs is not None  # settled
            ready = ""
            # ready-made microbatches may differ in shapes alone
            if given.kinds == self._inputs.kinds:
                ready = "give ready-made microbatches (arg_mbs= and target_mbs=), "
            raise ValueError(
                f"inputs is {given}, but the pipeline was built for {self._inputs}, of"
                f" n_microbatches × rows = {self._n_microbatches} × {self._rows} = {self.size}"
                f" rows: pass that, drop or pad a remainder, {ready}or build the stages for other"
                " inputs"
            )
        self._refuse_ids("inputs", inputs)
        # torch before 2.12 refuses strides like those of tokens[:, :-1], which contiguous() keeps
        # for a single row.
        leaves, spec = tree_flatten(inputs)
        whole = [
            x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        return tuple(tree_unflatten(whole, spec))

    def _ready_arguments(self, microbatches: list[tuple[Any, ...]] | None) -> list[tuple[Any, ...]]:
        declared = self._stages[0].takes
        assert declared is not None  # settled
        if microbatches is None:
            raise ValueError(_NO_ARGUMENTS)
        for i, arguments in enumerate(microbatches):
            given = _described(f"arg_mbs[{i}]", arguments)
            if given.kinds != declared.kinds or (
                self._transformer is not None and len(given.metas[0].shape) != 2
            ):
                raise ValueError(
                    f"arg_mbs[{i}] is {given}, but the pipeline was built for microbatches like"
                    f" {declared}: only their shapes may differ, not containers, dtypes or whether"
                    " there is a tensor"
                )
            if self._transformer is not None:
                check_microbatch(self._transformer.config, *given.metas[0].shape)
            self._refuse_ids(f"arg_mbs[{i}]", arguments)
        return microbatches

    def _refuse_ids(self, name: str, arguments: tuple[Any, ...]) -> None:
        tokens = arguments[0]
        if self._transformer is None or tokens.device.type != "cpu" or not tokens.numel():
            return  # looking would wait for a GPU
        low, high, vocab_size = (
            int(tokens.min()),
            int(tokens.max()),
            self._transformer.config.vocab_size,
        )
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name} holds token ids from {low} to {high}, but vocab_size={vocab_size}: use its"
                " tokenizer"
            )

    def _whole_target(self, target: Any) -> Tensor:
        if target is None:
            raise ValueError("target is missing on the rank that holds the last stage")
        if not isinstance(target, Tensor):
            raise ValueError(
                f"target is a {type(target).__name__}: pass a tensor whose first dimension is the"
                f" batch, {self.size}"
            )
        known: tuple[int, ...] = (self.size,)
        if self._transformer is not None and (takes := self._stages[0].takes) is not None:
            known = (self.size, takes.metas[0].shape[1])
        if tuple(target.shape[: len(known)]) != known:
            raise ValueError(
                f"target has shape {tuple(target.shape)}, but the pipeline was built for {known},"
                f" of n_microbatches × rows = {self._n_microbatches} × {self._rows} = {self.size}:"
                " drop or pad the remainder, or rebuild it"
            )
        self._refuse_dtype("target", target)
        return target

    def _ready_targets(self, microbatches: list[Any] | None) -> list[Any]:
        if microbatches is None:
            raise ValueError(_NO_TARGETS)
        for i, target in enumerate(microbatches):
            if not self._counts_tokens and not (
                isinstance(target, Tensor) and target.dim() and len(target)
            ):
                what = (
                    f"of shape {tuple(target.shape)}"
                    if isinstance(target, Tensor)
                    else f"a {type(target).__name__}"
                )
                raise ValueError(
                    f"target_mbs[{i}] is {what}, and the loss weighs a microbatch by its samples:"
                    " give a tensor whose first dimension is their number, at least 1, or a loss"
                    " that counts (TokenLoss)"
                )
            if isinstance(target, Tensor):
                self._refuse_dtype(f"target_mbs[{i}]", target)
        return microbatches

    def _refuse_dtype(self, name: str, target: Tensor) -> None:
        if self._transformer is not None and self._counts_tokens and target.dtype != torch.int64:
            shape = tuple(target.shape)
            raise ValueError(f"{name} is {target.dtype}: pass token ids, int64, of shape {shape}")


_NO_ARGUMENTS = (
    "arg_mbs is missing on the rank that holds the first stage: give a list of tuples, one a"
    " microbatch"
)
_NO_TARGETS = (
    "target_mbs is missing on the rank that holds the last stage: give a list, one target a"
    " microbatch"
)


# The facts that ranks exchange about a batch, unless every rank was given a whole one that fits.


@dataclass(frozen=True)
class RankBatch:
    """The batch of one rank, as the other ranks get to know it.

    Unlike in :meth:`course_pp.base.ranks.Ranks.each`, the other ranks' batches decide whether this
    one is refused.

    Attributes:
        pipeline: the lowest rank of its pipeline.
        lists: names of the arguments that hold ready-made microbatches.
        whole: names of the arguments that hold a whole batch.
        problem: reason to refuse the batch, whatever the other ranks were given.
        unfit: reason why this rank cannot use the batch.
        missing: the input this rank lacks if others were given ready-made microbatches.
        named: names of the keyword arguments that are given and not None, one set a microbatch.
        lacking: names of the keyword arguments that the stages take and that are not given, one
            set a microbatch.
        kinds: this rank's part of each microbatch's kind; see :mod:`course_pp.parallel.crossing`.
        draws: whether the stages drew random numbers in a step since ranks agreed that no stage
            does.
    """

    pipeline: int
    lists: list[str]
    whole: list[str]
    problem: str | None
    unfit: str | None
    missing: str | None
    named: list[set[str]]
    lacking: list[set[str]]
    kinds: list[bytes]
    draws: bool


def problem_between(told: Sequence[RankBatch]) -> str | None:
    """Return the reason to refuse the inputs of all ranks, listed by rank, or None.

    Every rank gets the same sentence, because every rank calls this on the same list.
    """
    for each in told:
        if each.problem is not None:
            return each.problem
    ready = next((rank for rank, each in enumerate(told) if each.lists), None)
    for rank, each in enumerate(told):
        if ready is not None and each.whole and not each.lists:
            return (
                f"rank {ready} was given {told[ready].lists[0]}, ready-made microbatches, and rank"
                f" {rank} {each.whole[0]}, of a whole batch: give every rank its microbatches, or"
                " every rank the whole batch"
            )
        problem = each.unfit if ready is None or each.lists else each.missing
        if problem is not None:
            return problem
    givers: dict[tuple[int, int, str], int] = {}
    for rank, each in enumerate(told):
        for i, names in enumerate(each.named):
            givers |= {(each.pipeline, i, name): rank for name in names}
    for rank, each in enumerate(told):
        for i, names in enumerate(each.lacking):
            for name in sorted(names):
                if (giver := givers.get((each.pipeline, i, name))) is not None:
                    return (
                        f"rank {giver} was given the keyword argument {name}, and rank {rank},"
                        " whose stage takes it, was not: give it to both; None will do"
                    )
    return None


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ValueError(problem)


def _described(name: str, arguments: tuple[Any, ...]) -> ValueMeta:
    try:
        return ValueMeta.of(arguments)
    except TypeError as error:
        raise ValueError(f"{name} holds {error}") from None
