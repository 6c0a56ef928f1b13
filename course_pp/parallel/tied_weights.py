"""Weights that several pipeline stages share, such as the input embedding and the output head.

Each stage holds a copy. The copies stay equal if they start equal and each is given the sum of all
their gradients.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_pp.base.ranks import Ranks
from course_pp.model import PipelineStageModule
from course_pp.model.stages import Tie
from course_pp.parallel.split import SplitStage
from course_pp.step.ties import (
    Look,
    SharedWeights,
    Weight,
    WeightPlace,
    looks_of,
    problem_of_broken_ties,
    problem_of_forgotten_ties,
    problem_of_left_out_copies,
    problem_of_two_ties,
    ties_of_cut,
)

SharedName = Tie | Sequence[str]
"""A tie as a user writes it: by stage, or the names one parameter has in the whole model."""


def agree_on_ties(
    modules: Mapping[int, nn.Module], tied: Iterable[SharedName] | None, pipeline: Ranks
) -> tuple[Tie, ...]:
    """Return the weights that several stages hold.

    This package's model knows its own; for other models they are as declared.

    A collective of the pipeline's ranks. It refuses weights that look tied and are not declared,
    and a weight with several names in one stage that is no longer one parameter.
    """
    own = next(
        (m for m in modules.values() if isinstance(m, PipelineStageModule | SplitStage)), None
    )
    of_cut = ties_of_cut(modules)
    known = own.ties if tied is None and own is not None else tied
    shared = [names for names in known or () if not isinstance(names, Mapping)]

    def look() -> dict[int, tuple[list[str], Mapping[str, Look]]]:
        for index, module in modules.items():
            if problem := problem_of_broken_ties(index, module, shared):
                raise ValueError(problem)
        looks = looks_of(modules if known is None or tied else {})
        mine: dict[int, tuple[list[str], Mapping[str, Look]]] = {}
        for index, module in modules.items():
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            mine[index] = (names, looks.get(index, {}))
        return mine

    everyone = dict(sorted(stage for rank in pipeline.each(look) for stage in rank.items()))
    ties = _ties_of_stages(known or (), {index: held for index, (held, _) in everyone.items()})
    pipeline.refuse(problem_of_two_ties(modules, ties))
    found = {index: look for index, (_, look) in everyone.items()}
    problem = (
        problem_of_forgotten_ties(found)
        if known is None
        else problem_of_left_out_copies(found, ties, of_cut)
    )
    if problem is not None:
        raise ValueError(problem)
    return ties


def _ties_of_stages(
    tied: Iterable[SharedName], names: Mapping[int, Sequence[str]]
) -> tuple[Tie, ...]:
    """Return each tie as {stage: name}; a weight that only one stage holds is not a tie.

    ``names`` are the names of each stage's parameters, second names of one parameter included.
    """
    ties: list[dict[int, str]] = []
    for shared in tied:
        if isinstance(shared, Mapping):
            tie = dict(shared)
        else:
            lost = [name for name in shared if not any(name in held for held in names.values())]
            if lost:
                raise ValueError(
                    f"tied={tuple(shared)!r}, but no stage has a parameter {lost[0]!r}"
                )
            tie = {
                stage: next((n for n in shared if n in held), "") for stage, held in names.items()
            }
            tie = {stage: name for stage, name in tie.items() if name}
        for stage, name in tie.items():
            if name not in names.get(stage, ()):
                held = ", ".join(names.get(stage, ())) or "none: there is no such stage"
                raise ValueError(
                    f"tied={tie}, but stage {stage} has no parameter {name!r}; it has {held}"
                )
        if len(tie) > 1:
            ties.append(tie)
    return tuple(ties)


class TiedWeights:
    """This rank's part in keeping tied weights equal.

    Args:
        owner: the group rank that holds each stage.
        ranks: the ranks of the pipeline.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        modules: Mapping[int, nn.Module],
        owner: Mapping[int, int],
        ranks: Ranks,
    ) -> None:
        self.ties = tuple(ties)
        self._modules = modules
        self._ranks = ranks
        self._weights: list[Weight] = []
        for tie in self.ties:
            places = [WeightPlace(owner[stage], stage, name) for stage, name in tie.items()]
            self._weights.append(tuple(sorted(places)))
        self._shared = SharedWeights(ranks.rank, self._weights, modules)

    def problem(self, *, values: bool) -> str | None:
        """Return the problem with the copies, the same on every rank, or None.

        A collective of the pipeline's ranks.

        Args:
            values: whether to compare the values too, by a checksum. Copies that were equal once
                stay equal.
        """
        if not self.ties:
            return None
        mine = {place: _facts(copy, values) for place, copy in self._shared.copies().items()}
        told: dict[WeightPlace, _Facts] = {}
        for theirs in self._ranks.gather(mine):
            told |= theirs
        for tie, weight in zip(self.ties, self._weights, strict=True):
            by_stage = sorted(weight, key=lambda place: place.stage)
            ends = {place.stage: told[place] for place in by_stage if place in told}
            if (problem := _problem_of(tie, ends)) is not None:
                return problem
        return None

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Give every copy the sum of the gradients computed inside the ``with`` block.

        A weight that the block used on no rank is left without a gradient.
        """
        with self._shared.apart() as copies:
            yield
            self._fill_used(copies)
            self._shared.add(self._exchanged())

    def _fill_used(self, copies: Mapping[WeightPlace, nn.Parameter]) -> None:
        """Give zeros to this rank's copies of a weight that another rank has used.

        The ranks then agree on which gradients they exchange.
        """
        # This package's model uses its tied weights in every step, and need not ask.
        all_are_used = any(
            isinstance(module, PipelineStageModule) for module in self._modules.values()
        )
        for weight in self._weights:
            here = [copies[place] for place in weight if place in copies]
            used = all_are_used
            if not all_are_used:
                used_here = any(copy.grad is not None for copy in here)
                used = bool(self._ranks.largest(int(used_here)))
            for copy in here:
                if used and copy.requires_grad and copy.grad is None:
                    copy.grad = torch.zeros_like(copy)

    def _exchanged(self) -> dict[int, list[Tensor | None]]:
        """Exchange gradients with the peers; return theirs by rank.

        One batch, so that two ranks that send to each other cannot wait for each other.
        """
        received: dict[int, list[Tensor | None]] = {}
        swaps = []
        for peer in self._shared.peers:
            received[peer] = []
            for gradient in self._shared.for_rank(peer):
                room = None if gradient is None else torch.empty_like(gradient)
                received[peer].append(room)
                if gradient is not None and room is not None:
                    group = self._ranks.group
                    ours = _local(gradient).contiguous()
                    swaps.append(dist.P2POp(dist.isend, ours, group=group, group_peer=peer))
                    swaps.append(dist.P2POp(dist.irecv, _local(room), group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(swaps) if swaps else ():
            work.wait()
        return received


# Facts about a copy: whether it is trained, dtype and shape of its shard, a checksum of its values.
_Facts = tuple[bool, str, str]


def _facts(end: nn.Parameter, values: bool) -> _Facts:
    local, digest = _local(end.detach()), ""
    if values and not local.is_meta:
        # here: ranks take over what the last ones imported only if that is torch and this package
        import xxhash

        digest = xxhash.xxh3_64_hexdigest(
            local.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return (
        end.requires_grad,
        f"{str(end.dtype).removeprefix('torch.')} {tuple(local.shape)}",
        digest,
    )


def _problem_of(tie: Tie, ends: Mapping[int, _Facts]) -> str | None:
    frozen = [stage for stage, (is_trained, _, _) in ends.items() if not is_trained]
    if frozen and len(frozen) < len(ends):
        return (
            f"one end of the tied weight {dict(tie)} is frozen, that of stage {frozen[0]}, and"
            " another is not: freeze all ends, or none"
        )
    if len({shard for _, shard, _ in ends.values()}) > 1:
        shards = ", ".join(f"{shard} on stage {stage}" for stage, (_, shard, _) in ends.items())
        return (
            f"a rank's parts of the tied weight {dict(tie)} are {shards}: shard and convert all"
            " ends alike"
        )
    if len({digest for _, _, digest in ends.values()}) > 1:
        return (
            f"the tied weight {dict(tie)} holds other values on stage {max(ends)} than on stage"
            f" {min(ends)}: copy one to the other before the first step, or they would be trained"
            " apart"
        )
    return None


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor if it is not sharded.

    If both ends of a tie are sharded, the peer's part has the same rows.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
