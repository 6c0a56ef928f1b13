"""The bug clinic of notebook 09: three trainers that resume wrongly, and what each rank has to save to be healed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import expect_dict

__all__ = ["PATIENTS", "Symptoms", "checkpoint_entries", "grade_checkpoint_entries"]


def checkpoint_entries(
    stage: nn.Module, optimizer: torch.optim.Optimizer, coordinates: dict[str, int], step: int
) -> dict[str, Any]:
    """What this rank adds to the checkpoint: key -> tensor or number."""
    entries: dict[str, Any] = {"step": step}
    for name, parameter in stage.named_parameters():
        entries[f"model.{name}"] = parameter.detach()
        for slot, value in optimizer.state[parameter].items():
            entries[f"optimizer.{name}.{slot}"] = value
    place = ".".join(f"{dimension}{index}" for dimension, index in coordinates.items())
    entries[f"rng.{place}"] = torch.get_rng_state()
    return entries


_WIDTH, _ROWS, _SAVED_AT, _LAST = 8, 8, 3, 6
_Restore = Callable[["_Trainee", dict[str, Any]], None]


class _Trainee:
    """A rank of a two-stage pipeline with dropout; both stages have parameters of the same shapes."""

    def __init__(self, rank: int, dropout: float) -> None:
        from course_pp.runtime import Pipeline
        from course_pp.schedule import build

        torch.manual_seed(0)
        blocks = [[nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Dropout(dropout)] for _ in range(4)]
        mine = blocks[2 * rank : 2 * rank + 2]
        self.stage = nn.Sequential(*(layer for block in mine for layer in block)).double()
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=0.02)
        self.step = 0
        self._pipeline = Pipeline(build("1f1b", 2, 2), self.stage, mse_loss)
        torch.manual_seed(100 + rank)

    def losses(self, until: int) -> list[float]:
        """Train to the end of step ``until`` of the run; the mean losses of the steps taken."""
        found = []
        while self.step < until:
            x, target = _batch(self.step)
            self.optimizer.zero_grad()
            shares = self._pipeline.step(x, target)
            self.optimizer.step()
            found.append(sum(shares) / len(shares))
            self.step += 1
        return found

    @torch.no_grad()
    def probe(self) -> float:
        """Loss of one fixed batch, without dropout, so that nothing is drawn; on every rank."""
        x, target = _batch(_LAST)
        self.stage.eval()
        if dist.get_rank() == 0:
            x = self.stage(x)
        dist.broadcast(x, src=0)
        loss = mse_loss(self.stage(x), target)
        dist.broadcast(loss, src=1)
        self.stage.train()
        return loss.item()

    def saved(self) -> dict[str, Any]:
        """Everything that a trainer has to save of this rank."""
        moments = {i: {k: v.clone() for k, v in s.items()} for i, s in self.optimizer.state_dict()["state"].items()}
        weights = {name: p.detach().clone() for name, p in self.stage.named_parameters()}
        return {"weights": weights, "moments": moments, "rng": torch.get_rng_state(), "step": self.step}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue where ``saved`` was taken."""
        self.stage.load_state_dict(saved["weights"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": saved["moments"], "param_groups": groups})
        torch.set_rng_state(saved["rng"])
        self.step = saved["step"]


def _batch(step: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(step)
    both = torch.randn(2, _ROWS, _WIDTH, dtype=torch.float64, generator=seeded)
    return both[0], both[1]


def _keys_by_number(saved: dict[str, Any], everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks write their optimizer's state under its numbers; who writes last wins."""
    return {**saved, "moments": {number: state for each in everyone for number, state in each["moments"].items()}}


def _no_position(saved: dict[str, Any], everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The position in the data is lost, so they begin again."""
    return {**saved, "step": 0}


def _one_generator(saved: dict[str, Any], everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0 saves its generator, everyone restores it."""
    return {**saved, "rng": everyone[0]["rng"]}


_ILLNESSES = {"A": _keys_by_number, "B": _no_position, "C": _one_generator}


@dataclass(frozen=True)
class Symptoms:
    """How a patient resumed.

    Attributes:
        gaps: by how much the losses of the next steps differ from those of the run that went on.
        before, after: loss of one fixed batch, before saving and after resuming, without dropout.
    """

    gaps: list[float]
    before: float
    after: float


def _patient(illness: Callable[..., dict[str, Any]]) -> Callable[[int, float], Symptoms]:
    def run(rank: int, dropout: float) -> Symptoms:
        trainee = _Trainee(rank, dropout)
        trainee.losses(_SAVED_AT)
        before = trainee.probe()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, trainee.saved())
        right = trainee.losses(_LAST)
        resumed = _Trainee(rank, dropout)
        resumed.restore(illness(everyone[rank], everyone))
        after = resumed.probe()
        found = resumed.losses(resumed.step + _LAST - _SAVED_AT)
        return Symptoms([abs(a - b) for a, b in zip(found, right, strict=True)], before, after)

    return run


PATIENTS: dict[str, Callable[[int, float], Symptoms]] = {name: _patient(ill) for name, ill in _ILLNESSES.items()}
"""Trainers on two ranks, each ill in another way: called with rank and dropout, they save after three steps, resume,
and take three more."""


_N_RANKS, _N_LAYERS, _STEP = 4, 4, 1234
_LAYOUTS = ((4, 1), (2, 2), (1, 4))
_REGROUPED = (2, 2)


class _Stage(nn.Module):
    """Some of the whole model's layers, by their names in it."""

    def __init__(self, pp: int, index: int) -> None:
        super().__init__()
        per_stage = _N_LAYERS // pp
        layers = {}
        for number in range(index * per_stage, (index + 1) * per_stage):
            torch.manual_seed(number)
            layers[str(number)] = nn.Linear(3, 3, dtype=torch.float64)
        self.layers = nn.ModuleDict(layers)


class _Given(NamedTuple):
    """What the answer gave on one rank in one layout.

    Attributes:
        entries: as it returned them, tensors copied.
        generator: the state of the random number generator at the time.
        later: the keys it gave after one more step.
        turned: the keys it gave the generator when the coordinates came in the other order.
    """

    entries: Any
    generator: Tensor
    later: list[Any]
    turned: list[Any]


def _trained(pp: int, index: int, regrouped: bool = False) -> tuple[_Stage, torch.optim.AdamW]:
    """A stage after one step; regrouped, the optimizer has the same parameters in two groups, biases first."""
    stage = _Stage(pp, index)
    groups = [[p for p in stage.parameters() if p.dim() == dims] for dims in (1, 2)]
    optimizer = torch.optim.AdamW([{"params": each} for each in groups] if regrouped else stage.parameters())
    for parameter in stage.parameters():
        parameter.grad = parameter.detach() ** 2
    optimizer.step()
    return stage, optimizer


def _entries_on_rank(rank: int, fn: Callable[..., Any]) -> list[_Given]:
    """What the answer gives in each layout; the last is regrouped."""
    found = []
    for (pp, dp), regrouped in (*((layout, False) for layout in _LAYOUTS), (_REGROUPED, True)):
        stage, optimizer = _trained(pp, rank // dp, regrouped)
        torch.manual_seed(1000 * pp + rank)
        state = torch.get_rng_state()
        place = _coordinates(rank, dp)
        entries = fn(stage, optimizer, dict(place), _STEP)
        if isinstance(entries, dict):
            entries = {
                key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in entries.items()
            }
        turned = fn(stage, optimizer, dict(reversed(place.items())), _STEP)
        optimizer.step()
        later = fn(stage, optimizer, dict(place), _STEP + 1)
        found.append(_Given(entries, state, list(_dict(later)), _keys_of(state, turned)))
    return found


def _dict(entries: Any) -> dict[Any, Any]:
    return entries if isinstance(entries, dict) else {}


def _keys_of(generator: Tensor, entries: Any) -> list[Any]:
    return [key for key, value in _dict(entries).items() if _equal(value, generator)]


def _coordinates(rank: int, dp: int) -> dict[str, int]:
    return {"pp": rank // dp, "dp_shard": rank % dp}


def grade_checkpoint_entries(answer: Answer) -> None:
    ranks = answer.on_ranks(_N_RANKS, _entries_on_rank)
    regrouped = [rank.pop().entries for rank in ranks]
    merged = []
    for index, (pp, dp) in enumerate(_LAYOUTS):
        everyone = [expect_dict(rank[index].entries, f"checkpoint_entries on rank {r}") for r, rank in enumerate(ranks)]
        merged.append(_merge(everyone, f"With pp × dp_shard = {pp} × {dp}"))
    right = _right()
    for (pp, dp), found in zip(_LAYOUTS, merged, strict=True):
        _demand_numbers(found, right, f"With pp × dp_shard = {pp} × {dp}")
    for index, (pp, dp) in enumerate(_LAYOUTS):
        states = [rank[index].generator for rank in ranks]
        _demand_generators(merged[index], states, f"With pp × dp_shard = {pp} × {dp}")
    _compare_times(ranks)
    _compare_layouts(merged)
    _compare_places(ranks)
    _compare_groups(merged[_LAYOUTS.index(_REGROUPED)], regrouped)


def _merge(everyone: list[dict[Any, Any]], where: str) -> dict[Any, Any]:
    """Join all ranks' entries in one dictionary; refuse two meanings of one key."""
    merged: dict[Any, Any] = {}
    writer: dict[Any, int] = {}
    for rank, entries in enumerate(everyone):
        for key, value in entries.items():
            if key in merged and not _equal(merged[key], value):
                cause = "The key does not say of which parameter it is: two ranks mean different things by it."
                if not isinstance(value, Tensor | int | float):
                    cause = f"An entry is a tensor or a number, not an object of class {type(value).__name__}."
                elif _is_generator(value):
                    cause = "Every rank has a generator of its own: its key needs the rank's coordinates."
                elif any(part.isdigit() for part in str(key).split(".")) and "layers" not in str(key):
                    cause = (
                        "An optimizer numbers the parameters of its own rank: 0 is another one on each stage. "
                        "Take the parameter's name."
                    )
                symptom = f"{where} ranks {writer[key]} and {rank} both write `{key}`, with different values"
                raise Mistake(f"{symptom}: whoever writes last wins.", cause)
            merged[key], writer[key] = value, rank
    return merged


def _demand_numbers(found: dict[Any, Any], right: dict[str, Any], where: str) -> None:
    for name, value in right.items():
        if any(_equal(value, each) for each in found.values()):
            continue
        if name == "step":
            raise Mistake(
                f"{where} no entry holds the step, {value}.",
                "Whoever resumes has to know how many steps are done, or the data begin again.",
            )
        raise Mistake(f"{where} no entry holds {name}.", "Weights and every slot of the optimizer's state are needed.")


def _demand_generators(found: dict[Any, Any], states: list[Tensor], where: str) -> None:
    missing = [rank for rank, state in enumerate(states) if not any(_equal(state, each) for each in found.values())]
    if len(missing) == len(states):
        raise Mistake(f"{where} no rank's random number generator is saved.", "`torch.get_rng_state()` is its state.")
    if missing:
        raise Mistake(
            f"{where} the generator of rank {missing[0]} is not saved.",
            "After resuming, it would draw what another rank draws: the same dropout masks twice. Every rank saves "
            "its own.",
        )


def _compare_times(ranks: Sequence[Sequence[_Given]]) -> None:
    """Keys must not depend on values: who loads knows none of them."""
    for rank, layouts in enumerate(ranks):
        for given in layouts:
            if changed := sorted(map(str, set(given.entries) ^ set(given.later))):
                key = " ".join(changed[0].split())
                raise Mistake(
                    f"After one more step, rank {rank} writes other keys, such as `{key:.60}`.",
                    "Who loads knows names and coordinates, and none of the values: make the keys of those.",
                )


def _compare_layouts(merged: list[dict[Any, Any]]) -> None:
    """Every entry but the generators needs the same key in every layout."""
    first, *others = ({key: v for key, v in found.items() if not _is_generator(v)} for found in merged)
    for (pp, dp), other in zip(_LAYOUTS[1:], others, strict=True):
        strange = sorted(map(str, set(first) ^ set(other)))
        differing = [key for key in first if key in other and not _equal(first[key], other[key])]
        if strange or differing:
            key = (strange or differing)[0]
            p, d = _LAYOUTS[0]
            what = "is written with one of the two alone" if strange else "means something else with each"
            raise Mistake(
                f"`{key}` {what}: pp × dp_shard = {p} × {d} and {pp} × {dp}.",
                "Another layout looks for it by a key that it makes itself: names of the whole model work, numbers of "
                "stages and ranks do not.",
            )


def _compare_places(ranks: list[list[_Given]]) -> None:
    """Equal coordinates need equal keys for the generator in every layout, other coordinates another."""
    keys: dict[tuple[int, ...], Any] = {}
    for rank, found in enumerate(ranks):
        for (_, dp), given in zip(_LAYOUTS, found, strict=True):
            place = tuple(_coordinates(rank, dp).values())
            key = _keys_of(given.generator, given.entries)[0]
            same_key = keys.setdefault(place, key) == key
            if not same_key or any(other == key for at, other in keys.items() if at != place):
                raise Mistake(
                    f"`{key}` does not follow from the coordinates: other layouts have another rank there.",
                    "Rank 1 of 4 × 1 and rank 1 of 2 × 2 are in different places. Write all coordinates into the key.",
                )
    for rank, found in enumerate(ranks):
        for (_, dp), given in zip(_LAYOUTS, found, strict=True):
            here = _coordinates(rank, dp)
            for place, key in keys.items():
                if key in given.turned and place != tuple(here.values()):
                    raise Mistake(
                        f"`{key}` has two meanings: {dict(zip(here, place, strict=True))}, and, where a mesh has its "
                        f"dimensions in another order, {dict(reversed(here.items()))}.",
                        "Numbers alone do not say of which dimension. Write the names of the dimensions in, too.",
                    )


def _compare_groups(found: dict[Any, Any], regrouped: list[dict[Any, Any]]) -> None:
    """Entries must not depend on the order or the groups in which the optimizer has the parameters."""
    where = "With the parameters in two groups of the optimizer, biases first,"
    others = _merge([expect_dict(each, f"checkpoint_entries on rank {r}") for r, each in enumerate(regrouped)], where)
    for key, value in found.items():
        if key not in others or not _equal(value, others[key]):
            told = "holds what belongs to another parameter" if key in others else "is missing"
            raise Mistake(
                f"{where} `{key}` {told}.",
                "`optimizer.state_dict()` numbers parameters in the order of its groups, which need not be that of "
                "`named_parameters()`. `optimizer.state[parameter]` needs no number.",
            )


def _right() -> dict[str, Any]:
    stage, optimizer = _trained(1, 0)
    found: dict[str, Any] = {}
    for name, parameter in stage.named_parameters():
        found[f"the weight {name}"] = parameter.detach()
        for slot, value in optimizer.state[parameter].items():
            found[f"{slot} of {name}"] = value
    return {**found, "step": _STEP}


def _is_generator(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim():
        return a.dtype == b.dtype and torch.equal(a, b)
    if any(isinstance(value, Tensor) and value.dim() for value in (a, b)):
        return False
    try:
        return float(a) == float(b)
    except (TypeError, ValueError):
        return bool(a == b)
