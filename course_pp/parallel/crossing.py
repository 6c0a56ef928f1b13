"""The values that cross between stages for ready-made microbatches: agreed on before the step.

torch receives into buffers that are there beforehand, so both ends must know their shapes. The
value that a stage returns may depend on the shapes of a microbatch, and on numbers and strings
among its keyword arguments: these are the kind of the microbatch.

    kinds of all microbatches ──gather──► any new kind?
        yes:  stage 0 says what it returns ──gather──► stage 1 says … ──gather──► … ──► step
        no:   step

All ranks remember the same kinds, so every rank finds the same kinds to be new.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_pp.base.ranks import Ranks
from course_pp.base.torch_private import tree_map
from course_pp.model import PipelineStageModule
from course_pp.parallel.batch import Microbatches, RankBatch
from course_pp.parallel.fsdp import reshard
from course_pp.parallel.stage import ModelStage, find_outputs
from course_pp.step.values import ValueMeta, as_value, call, meta_of

Kind = tuple[bytes, ...]
"""Digests of a microbatch's inputs, one from each rank of the pipeline."""

Crossing = tuple[ValueMeta, ValueMeta]
"""The values that a stage takes and returns."""

_MOST_KINDS = 10_000  # beyond, all are forgotten; a kind takes a few kilobytes


class Crossings:
    """The values this rank's stages take and return for each kind of microbatch.

    All ranks of ``everyone`` know the same kinds.
    """

    def __init__(self, stages: Sequence[ModelStage], everyone: Ranks) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._n_stages, self._everyone = stages[0].num_stages, everyone
        self._known: dict[Kind, dict[int, Crossing]] = {}

    def agree(self, told: Sequence[RankBatch], pipeline: int, mine: Microbatches) -> None:
        """Tell this rank's stages which values cross in a step; a collective.

        Args:
            told: the batches of all ranks.
            pipeline: the pipeline this rank belongs to, named by its lowest rank.

        Raises:
            ValueError: on every rank, if nothing tells what a stage returns.
        """
        kinds: dict[int, list[Kind]] = {}
        for each in told:
            of_its = kinds.setdefault(each.pipeline, [()] * len(each.kinds))
            kinds[each.pipeline] = [
                (*kind, digest) for kind, digest in zip(of_its, each.kinds, strict=True)
            ]
        if len(self._known) > _MOST_KINDS:
            self._known.clear()
        new = dict.fromkeys(
            kind for theirs in kinds.values() for kind in theirs if kind not in self._known
        )
        if new:
            self._learn(list(new), kinds[pipeline], mine)
        for index, stage in self._stages.items():
            stage.crossing = [self._known[kind][index] for kind in kinds[pipeline]]

    def _learn(self, new: Sequence[Kind], here: Sequence[Kind], mine: Microbatches) -> None:
        """Ask one stage after the other what it returns for new kinds."""
        found: dict[Kind, list[Crossing]] = {kind: [] for kind in new}
        for index in range(self._n_stages):
            questions: dict[Kind, _Question] = {}
            for kind in dict.fromkeys(here if index in self._stages else ()):
                i = here.index(kind)
                if kind in self._known:
                    takes = self._known[kind][index][0]
                else:
                    takes = (
                        found[kind][-1][1] if index else ValueMeta.of(as_value(mine.arguments[i]))
                    )
                questions[kind] = _Question(
                    self._stages[index], takes, mine.arguments[i], mine.keywords[i]
                )
            said: dict[Kind, Crossing] = {}
            unsaid: dict[Kind, str] = {}
            for kind in questions.keys() & found.keys():
                try:
                    said[kind] = questions[kind].takes, questions[kind].answer()
                except ValueError as error:
                    unsaid[kind] = str(error)
            everyone = self._everyone.gather((said, unsaid))
            answers = {kind: both for theirs, _ in everyone for kind, both in theirs.items()}
            if silent := {
                kind: why
                for _, theirs in everyone
                for kind, why in theirs.items()
                if kind not in answers
            }:
                for theirs in self._everyone.each(partial(_tried, silent, questions)):
                    answers |= theirs
            for kind, both in answers.items():
                found[kind].append(both)
        self._known |= {
            kind: {index: both[index] for index in self._stages} for kind, both in found.items()
        }


@dataclass(frozen=True)
class _Question:
    """The question which value a stage returns for a microbatch."""

    stage: ModelStage
    takes: ValueMeta
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def answer(self) -> ValueMeta:
        """Return the stage's value; raise a ValueError if only a run of the stage can tell it."""
        stage, declared = self.stage, self.stage.returns
        assert declared is not None  # settled
        if stage.is_last:
            return declared  # which nobody is sent
        if isinstance(stage.submod, PipelineStageModule):
            sizes = self.takes.metas[0].shape[:2]
            return ValueMeta(
                tree_map(lambda meta: replace(meta, shape=(*sizes, *meta.shape[2:])), declared.tree)
            )
        try:
            return _like_declared(stage, find_outputs(stage, self.takes, self.keywords))
        except ValueError:
            if self.takes == stage.takes:
                return declared
            raise

    @torch.no_grad()
    def try_out(self) -> ValueMeta:
        """Run the stage once, on zeros unless it is the first.

        Buffers and random numbers stay as they were.
        """
        stage, module = self.stage, self.stage.submod
        value = as_value(self.arguments)
        if not stage.is_first:
            value = self.takes.unflatten(
                tensor.zero_() for tensor in self.takes.empty(stage.device)
            )
        value = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
        before = {buffer: buffer.clone() for buffer in module.buffers()}
        with torch.random.fork_rng([stage.device] if stage.device.type == "cuda" else []):
            output = call(module, value, self.keywords)
        for buffer, kept in before.items():
            buffer.copy_(kept)
        reshard(module)
        return _like_declared(stage, ValueMeta.of(output))


def _tried(kinds: Mapping[Kind, str], questions: Mapping[Kind, _Question]) -> dict[Kind, Crossing]:
    """Run a stage for each of ``kinds``, and return its answers.

    ``kinds`` maps each kind to the reason why the stage must be run. Replicas gather FSDP2's shards
    together, so a replica without a microbatch of the kind runs the stage on another one.
    """
    found: dict[Kind, Crossing] = {}
    for kind, why in kinds.items() if questions else ():
        question = questions.get(kind) or next(iter(questions.values()))
        try:
            found[kind] = question.takes, question.try_out()
        except Exception as error:  # whatever a foreign forward raises
            raise ValueError(
                f"{why}; tried on zeros, it raised {type(error).__name__}: {error}"
            ) from error
    return {kind: both for kind, both in found.items() if kind in questions}


def _like_declared(stage: ModelStage, found: ValueMeta) -> ValueMeta:
    assert stage.returns is not None  # settled
    if found.kinds != stage.returns.kinds:
        raise ValueError(
            f"stage {stage.stage_index} returns {found} for a microbatch, but {stage.returns} when"
            " the pipeline was built: only shapes may differ, not containers, dtypes or whether"
            " there is a tensor"
        )
    return found


def kinds_of(microbatches: Microbatches) -> list[bytes]:
    """Return this rank's part of the kinds of its microbatches."""
    both = zip(microbatches.arguments, microbatches.keywords, strict=True)
    return [_digest(arguments, keywords) for arguments, keywords in both]


def _digest(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bytes:
    plain = bool, int, float, str
    named = {
        name: repr(value) if isinstance(value, plain) else _shapes(value)
        for name, value in keywords.items()
    }
    return hashlib.blake2b(f"{ValueMeta.of(arguments)} {named}".encode(), digest_size=16).digest()


def _shapes(value: Any) -> Any:
    """Return a value's containers, filled with descriptions of their leaves.

    A tensor is described by its shape and dtype, anything else by its type.
    """
    if isinstance(value, dict):
        return {key: _shapes(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(_shapes, value)]
    return meta_of(value) if isinstance(value, Tensor) else type(value).__qualname__
