"""The bug clinic of notebook 07: two tensor-parallel blocks that are ill, and a norm that counts some twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import gelu, linear

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import close, expect_number

__all__ = ["PATIENTS", "grade_whole_norm", "whole_norm"]


class _Sum(torch.autograd.Function):
    """Sums over the group in forward, in backward, in both or nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: bool, backward: bool) -> Tensor:
        ctx.group, ctx.sums = group, backward
        return _summed(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(gradient, ctx.group) if ctx.sums else gradient, None, None, None


class _Gather(torch.autograd.Function):
    """Puts the ranks' outputs side by side; backward takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.chunk(dist.get_world_size(ctx.group), dim=-1)[dist.get_rank(ctx.group)].contiguous(), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _row_first(block: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    up, down = block.up.weight.chunk(n, dim=1)[rank], block.down.weight.chunk(n, dim=0)[rank]
    part = _Sum.apply(block.norm(x), group, False, True).chunk(n, dim=-1)[rank]
    return x + _Gather.apply(linear(gelu(linear(part, up)), down), group)


def _no_sum_in_backward(block: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    up, down = block.up.weight.chunk(n, dim=0)[rank], block.down.weight.chunk(n, dim=1)[rank]
    return x + _Sum.apply(linear(gelu(linear(block.norm(x), up)), down), group, True, False)


PATIENTS: dict[str, Callable[[Any, Tensor, dist.ProcessGroup], Tensor]] = {
    "A": _row_first,
    "B": _no_sum_in_backward,
}
"""Forwards ``(block, x, group)`` of a whole block, of whose weights each uses its rank's parts. All of them are ill."""


def whole_norm(cut: list[torch.Tensor], copied: list[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """The norm of the whole model's gradient, from this rank's: parts, and copies that all ranks of the stage have."""
    total = torch.stack([g.square().sum() for g in cut]).sum()
    dist.all_reduce(total, group=mesh.get_group("tp"))
    total += torch.stack([g.square().sum() for g in copied]).sum()
    dist.all_reduce(total, group=mesh.get_group("pp"))
    return total.sqrt()


_N_RANKS = 4
_MESHES = ((2, 2), (4, 1), (1, 4))


def grade_whole_norm(answer: Answer) -> None:
    ranks = answer.on_ranks(_N_RANKS, _norms_on_rank)
    for index, (pp, tp) in enumerate(_MESHES):
        what = f"whole_norm on a mesh of pp × tp = {pp} × {tp}"
        found = [expect_number(norms[index], what) for norms in ranks]
        right = _Squares(pp, tp).right()
        if all(close(norm, right) for norm in found):
            continue
        per_rank = ", ".join(f"{norm:.8g}" for norm in found)
        if all(close(norm, found[0]) for norm in found):
            symptom = f"With pp × tp = {pp} × {tp} every rank says {found[0]:.8g}; the norm is {right:.8g}."
        else:
            symptom = f"With pp × tp = {pp} × {tp} the ranks say {per_rank}; the norm is {right:.8g} on all of them."
        raise Mistake(symptom, _why(found, _Squares(pp, tp)))


def _norms_on_rank(rank: int, fn: Callable[..., Any]) -> list[Any]:
    norms = []
    for pp, tp in _MESHES:
        mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
        cut, copied = _gradients(*divmod(rank, tp))
        value = fn(cut, copied, mesh)
        norms.append(value.detach().clone() if isinstance(value, Tensor) else value)
        same = zip((*cut, *copied), (g for row in _gradients(*divmod(rank, tp)) for g in row), strict=True)
        if not all(torch.equal(a, b) for a, b in same):
            raise Mistake("The gradients have changed.", "To measure is not yet to clip: work on copies.")
    return norms


def _gradients(stage: int, place: int) -> tuple[list[Tensor], list[Tensor]]:
    """What rank (stage, place) holds: parts that differ by place, and copies that do not."""

    def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [(1 + stage) * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]

    return drawn(10 * stage + place, (4, 3), (3, 4)), drawn(100 + stage, (5,), (3,))


class _Squares:
    """Squares of norms by (stage, place), and what comes out when they are put together in one way or another."""

    def __init__(self, pp: int, tp: int) -> None:
        self.pp, self.tp = pp, tp
        held = {(s, t): _gradients(s, t) for s in range(pp) for t in range(tp)}
        self.lists = held
        self.cut = {at: _square(cut) for at, (cut, _) in held.items()}
        self.copied = {at: _square(copied) for at, (_, copied) in held.items()}

    def right(self) -> float:
        return self._root(sum(self.cut.values()) + sum(self.copied[s, 0] for s in range(self.pp)))

    def copies_counted_each(self, *_: int) -> float:
        return self._root(sum(self.cut.values()) + sum(self.copied.values()))

    def without_copies(self, *_: int) -> float:
        return self._root(sum(self.cut.values()))

    def of_the_stage(self, stage: int, _: int) -> float:
        return self._root(sum(self.cut[stage, t] for t in range(self.tp)) + self.copied[stage, 0])

    def copies_of_the_own_stage(self, stage: int, _: int) -> float:
        return self._root(sum(self.cut.values()) + self.copied[stage, 0])

    def of_the_stage_with_copies(self, stage: int, _: int) -> float:
        return self._root(sum(self.cut[stage, t] + self.copied[stage, t] for t in range(self.tp)))

    def over_stages_only(self, _: int, place: int) -> float:
        return self._root(sum(self.cut[s, place] + self.copied[s, place] for s in range(self.pp)))

    def of_the_rank(self, stage: int, place: int) -> float:
        return self._root(self.cut[stage, place] + self.copied[stage, place])

    def squared(self, *_: int) -> float:
        return self.right() ** 2

    def norms_of_stages_added(self, *_: int) -> float:
        return sum(self.of_the_stage(s, 0) for s in range(self.pp))

    def norms_added(self, *_: int) -> float:
        return sum(self.of_the_rank(*at) for at in self.cut)

    def averaged(self, *_: int) -> float:
        total = sum(self.cut.values()) + sum(self.copied.values())
        return self._root(total / (self.pp * self.tp))

    @staticmethod
    def _root(square: float) -> float:
        return square**0.5


_WRONG: tuple[tuple[Callable[[_Squares, int, int], float], str], ...] = (
    (
        _Squares.copies_counted_each,
        "Every rank of a stage has the same `copied`, and each adds them: they count tp times instead of once.",
    ),
    (_Squares.without_copies, "`copied` is missing."),
    (_Squares.copies_of_the_own_stage, "Other stages have other `copied`: sum these over `pp` as well."),
    (_Squares.of_the_stage, "That is the norm of one stage: sum over `pp` as well."),
    (
        _Squares.of_the_stage_with_copies,
        "That is the norm of one stage, in which `copied` counts tp times: sum `cut` over `tp`, and all over `pp`.",
    ),
    (_Squares.over_stages_only, "The other ranks of `tp` hold other parts of the same weights: sum `cut` over `tp`."),
    (_Squares.of_the_rank, "That is what this rank alone holds: nothing is added up over ranks."),
    (_Squares.squared, "The root is missing."),
    (_Squares.norms_of_stages_added, "Norms do not add up, their squares do: 3 and 4 make 5."),
    (_Squares.norms_added, "Norms do not add up, their squares do: 3 and 4 make 5."),
    (_Squares.averaged, "The squares are averaged over the ranks; they are to be summed."),
)


def _why(found: Sequence[float], squares: _Squares) -> str:
    places = [divmod(rank, squares.tp) for rank in range(_N_RANKS)]
    for rule, cause in _WRONG:
        if all(close(norm, rule(squares, *at)) for norm, at in zip(found, places, strict=True)):
            return cause
    return ""


def _square(tensors: Sequence[Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors)
