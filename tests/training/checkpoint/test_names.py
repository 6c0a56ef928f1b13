"""One name is one tensor, over all ranks; modules of any kind, tied weights, and sets of stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import build_stage_module
from course_pp.parallel import DistributedConfig, auto_split, init_distributed
from course_pp.training.checkpoint import AsyncSaver, CheckpointError, contents, load, save
from tests.equality import adamw
from tests.training.checkpoint.small import CONFIG

N_STAGES = 4
TIE = ["wte.weight", "lm_head.weight"]


def stage(index: int, step: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain stage whose names say nothing of where it is, after a step of its optimizer."""
    torch.manual_seed(index)
    module = nn.Sequential(nn.Linear(2, 2))
    optimizer = adamw([module])
    if step:
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return module, optimizer


def some_of(indices: range) -> tuple[dict[int, nn.Module], torch.optim.Optimizer]:
    """Stages, and one optimizer that has taken a step."""
    stages = {index: stage(index, step=False)[0] for index in indices}
    optimizer = adamw(stages.values())
    for module in stages.values():
        module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return stages, optimizer


def refusal(work: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """What is said."""
    with pytest.raises(CheckpointError) as refused:
        work(*arguments, device_mesh=None, **options)
    return str(refused.value)


@dataclass
class ForeignConfig:
    """As in transformers: JSON would make text of the numbers."""

    id2label: dict[int, str] = field(default_factory=lambda: {0: "LABEL_0"})


class Foreign(nn.Module):
    """A language model that is not ours, or an end of it; its matrix is one or two parameters."""

    def __init__(self, ends: str = "both", tied: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = ForeignConfig()
        weight = nn.Parameter(torch.randn(5, 3))
        if ends != "last":
            self.wte = nn.Embedding(5, 3)
            self.wte.weight = weight
            self.body = nn.Linear(3, 3)
        if ends != "first":
            self.lm_head = nn.Linear(3, 5, bias=False)
            self.lm_head.weight = weight if tied else nn.Parameter(weight.detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.body(self.wte(tokens)))

    def stepped(self, by: float = 1.0) -> torch.optim.Optimizer:
        optimizer = adamw([self])
        for parameter in self.parameters():
            parameter.grad = parameter.detach() * by
        optimizer.step()
        return optimizer


def _refusals(rank: int, root: Path) -> list[str]:
    module, optimizer = stage(rank)
    replica, its_optimizer = stage(0)
    drifted = nn.ModuleDict({"norm": nn.LayerNorm(2)})  # starts equal
    said = [refusal(save, root, 1, module, optimizer)]
    with AsyncSaver(root, device_mesh=None) as saver:
        with pytest.raises(CheckpointError) as refused:
            saver.save(1, module, optimizer)
        said.append(str(refused.value))
    assert not root.exists()
    save(root, 1, replica, its_optimizer, device_mesh=None)
    save(root, 2, drifted, device_mesh=None)
    its_optimizer.state[replica[0].bias]["exp_avg"] += rank  # type: ignore[index]
    said.append(refusal(save, root, 3, replica, its_optimizer))
    said.append(refusal(save, root, 3, nn.Linear(2, 2 + rank)))
    said.append(refusal(save, root, 3, {0: module}))
    said.append(refusal(save, root, 3, {2 * rank: module}))
    numbered, _ = stage(rank)
    numbered.stage_id = rank
    numbered.num_stages = 3
    said.append(
        refusal(save, root, 3, nn.ModuleDict({str(rank): module, "s": numbered}), None, tied=[TIE])
    )
    part = nn.ModuleDict({str(rank): module})
    part.stage_id = rank
    part.num_stages = 3
    said.append(refusal(save, root, 3, part))
    end = Foreign(("first", "last")[rank], seed=rank)
    said.append(refusal(save, root, 3, end, None, tied=[TIE]))
    said.append(
        refusal(
            save, root, 3, {rank: end}, None, tied=[{0: "wte.weight", 1: "a"}, {1: "a", 2: "b"}]
        )
    )
    said.append(
        refusal(save, root, 3, Foreign(("first", "last")[rank]), None, tied=[TIE] if rank else [])
    )
    said.append(refusal(load, root, drifted, None, tied=[TIE] if rank else None))
    said.append(refusal(save, root, 3, build_stage_module(CONFIG, 0, 2)))
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    said.append(refusal(save, root, 3, auto_split(model, torch.ones(1, 2), 3)[rank]))
    assert sorted(path.name for path in root.iterdir()) == ["step_00000001", "step_00000002"]
    return said


def test_what_would_lose_a_tensor_is_refused_on_every_rank(tmp_path: Path) -> None:
    said, other = on_ranks(2, _refusals, tmp_path / "run")
    assert said == other
    clash = (
        "rank 0 and rank 1 hold different tensors under one name, {}: pass the stages as {{index:"
        " stage}}"
    )
    expected = [
        clash.format("0.bias"),
        clash.format("0.bias"),
        clash.format("exp_avg of 0.bias"),
        clash.format("bias"),
        "rank 0 and rank 1 hold copies of stages.0.0.bias that differ",
        "no rank passed stage 1 of 3: pass all stages",
        "tied= names lm_head.weight, which no rank's modules have",
        "no rank passed stage 2 of 3: pass all stages",
        "wte.weight of rank 0 and lm_head.weight of rank 1 are tied and differ in wte.weight",
        "stages.1.a is in two ties: write one tie",
        (
            "rank 1 was given tied=[('wte.weight', 'lm_head.weight')], rank 0 []: give every rank"
            " the same, or leave tied= away on all"
        ),
        (
            "rank 1 was given tied=[('wte.weight', 'lm_head.weight')], rank 0 []: give every rank"
            " the same, or leave tied= away on all"
        ),
        "no rank passed a module with head.weight",
        "no rank passed stage 2 of 3: pass all stages",
    ]
    for sentence, beginning in zip(said, expected, strict=True):
        assert sentence.startswith(beginning)


@pytest.mark.parametrize(
    "work", [lambda m: (save, "", 1, m), lambda m: (load, "", m)], ids=["save", "load"]
)
def test_an_empty_name_is_not_the_working_directory(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(*work(nn.Linear(2, 2))).startswith("'' names no directory")
    assert not list(tmp_path.iterdir())


def _save_some(rank: int, root: Path, each: int) -> None:
    stages, optimizer = some_of(range(rank, N_STAGES, N_STAGES // each))
    save(root / f"each{each}", 1, stages, optimizer, device_mesh=None)


def _load_some(rank: int, path: Path, each: int) -> list[Tensor]:
    stages, optimizer = some_of(range(rank * each, (rank + 1) * each))
    for module in stages.values():
        for parameter in module.parameters():
            parameter.data.zero_()
    load(path, stages, optimizer, device_mesh=None)
    parameters = [p for module in stages.values() for p in module.parameters()]
    moments = [optimizer.state[p]["exp_avg"] for p in parameters]
    return [p.detach() for p in parameters] + moments


def test_stages_with_an_index_are_read_at_any_placement(tmp_path: Path) -> None:
    for each in (2, 1):
        on_ranks(N_STAGES // each, _save_some, tmp_path, each)
    keys = []
    for each in (1, 2):
        found = {entry.key for entry in contents(tmp_path / f"each{each}")}
        keys.append({key for key in found if "rng" not in key})
    assert keys[0] == keys[1] >= {"model.stages.3.0.weight", "optimizer.stages.0.0.bias.exp_avg"}
    for saved, each in ((2, 1), (1, 4)):
        found = on_ranks(N_STAGES // each, _load_some, tmp_path / f"each{saved}", each)
        for rank, tensors in enumerate(found):
            stages, optimizer = some_of(range(rank * each, (rank + 1) * each))
            parameters = [p for module in stages.values() for p in module.parameters()]
            expected = [*parameters, *(optimizer.state[p]["exp_avg"] for p in parameters)]
            assert all(map(torch.equal, tensors, expected))
    modules, _ = some_of(range(N_STAGES))
    assert "pass {index: stage}" in refusal(
        load, tmp_path / "each2", nn.Sequential(nn.Linear(2, 2))
    )
    del modules[3]
    assert "stages.3.0.bias, which no rank's modules have" in refusal(
        load, tmp_path / "each2", modules
    )


def test_stages_of_our_own_model_have_the_full_models_names_with_an_index_too(
    tmp_path: Path,
) -> None:
    stages = {index: build_stage_module(CONFIG, index, 2) for index in range(2)}
    path = save(tmp_path, 1, stages, device_mesh=None).path
    load(path, [build_stage_module(CONFIG, 0, 1)], device_mesh=None)
    assert "stage 1 was passed as 0" in refusal(save, tmp_path, 2, {0: stages[1], 1: stages[0]})
    with pytest.raises(CheckpointError, match=r"two modules .* 0\.weight"):
        save(tmp_path, 2, [stage(0)[0], stage(1)[0]], device_mesh=None)


def _ends(rank: int, root: Path) -> None:
    end = Foreign(("first", "last")[rank])
    optimizer = end.stepped()
    save(root / "declared", 1, end, optimizer, device_mesh=None, tied=[TIE])
    save(
        root / "by stage",
        1,
        {rank: end},
        optimizer,
        device_mesh=None,
        tied=[{0: TIE[0], 1: TIE[1]}],
    )
    save(root / "undeclared", 1, end, optimizer, device_mesh=None)
    cut = auto_split(Foreign(), torch.ones(1, 4, dtype=torch.long), at=["lm_head"])[rank]
    save(root / "carried", 1, cut, Foreign.stepped(cut), device_mesh=None)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in end.parameters():
            parameter += rank
    save(root / "apart", 1, end, optimizer, device_mesh=None)


def _load_ends(rank: int, root: Path, tied: Any, cut: bool = False) -> list[Tensor]:
    """An end of the model, from a checkpoint that was written with both in one place, or in two."""
    end = Foreign(("first", "last")[rank], seed=7)
    if cut:
        end = auto_split(Foreign(seed=7), torch.ones(1, 4, dtype=torch.long), at=["lm_head"])[rank]  # type: ignore[assignment]
    optimizer = end.stepped(-1.0)
    load(root, end, optimizer, device_mesh=None, tied=tied)
    return values(end, optimizer)


def values(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for p in module.parameters() for v in (p.detach(), optimizer.state[p]["exp_avg"])]


def test_a_tied_weight_of_any_model_is_saved_once_and_loads_at_any_layout(tmp_path: Path) -> None:
    whole = Foreign()
    optimizer = whole.stepped()
    save(tmp_path / "found", 1, whole, optimizer, device_mesh=None)
    on_ranks(2, _ends, tmp_path)
    for root in ("found", "declared", "carried"):
        keys = [
            entry.key for entry in contents(tmp_path / root) if not entry.key.startswith("rng.")
        ]
        assert "model.wte.weight" in keys
        assert not [key for key in keys if "lm_head" in key]
    keys = [entry.key for entry in contents(tmp_path / "by stage")]
    assert "model.stages.0.wte.weight" in keys
    assert not [key for key in keys if "lm_head" in key]
    known = (
        ("found", (), False),
        ("declared", None, False),
        ("carried", None, False),
        ("undeclared", None, True),
    )
    for root, tied, cut in (*known, ("undeclared", [TIE], False)):
        ends = on_ranks(2, _load_ends, tmp_path / root, tied, cut)
        assert all(map(torch.equal, ends[0], values(whole, optimizer)))
        assert all(map(torch.equal, ends[1], values(whole, optimizer)[:2]))
    for root in ("found", "declared", "carried", "undeclared"):
        for tied_here in (True, False):
            other = Foreign(tied=tied_here, seed=7)
            its = other.stepped(-1.0)
            load(tmp_path / root, other, its, device_mesh=None)
            found = values(other, its)
            assert all(
                map(torch.equal, found, values(whole, optimizer) + values(whole, optimizer)[:2])
            )
    before = Foreign(seed=7)
    said = refusal(load, tmp_path / "apart", before)
    assert said.startswith("wte.weight and lm_head.weight are one weight here, and ")
    assert torch.equal(before.wte.weight, Foreign(seed=7).wte.weight)


def test_a_tie_with_a_name_that_nobody_has_is_refused_on_loading_too(tmp_path: Path) -> None:
    save(tmp_path, 1, Foreign(), None, device_mesh=None)
    said = refusal(load, tmp_path, Foreign(), None, tied=[("head", "wte.weight")])
    assert "tied= names head, which no rank's modules have" in said


@pytest.mark.parametrize("tied", [["ab"], [["wte.weight"]], [{0: "wte.weight"}], [[1, 2]]])
def test_a_tie_that_is_none_is_refused(tied: Any, tmp_path: Path) -> None:
    said = refusal(save, tmp_path, 1, Foreign(), None, tied=tied)
    assert "must give at least two names of one weight" in said or said.startswith(
        f"save: tied is {tied} (a list): pass"
    )


def _statistics(rank: int, root: Path) -> tuple[float, float]:
    mesh = init_distributed(DistributedConfig())
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(rank)  # type: ignore[operator, union-attr]
    save(root, 1, model, device_mesh=mesh)
    with torch.no_grad():
        model[1].bias += rank  # type: ignore[operator]
    with pytest.raises(CheckpointError) as refused:
        save(root, 2, model, device_mesh=mesh)
    assert str(refused.value).startswith(
        "rank 0 and rank 1 hold copies of 1.bias that differ: give it the same gradients"
    )
    model[1].running_mean.fill_(9)  # type: ignore[operator, union-attr]
    load(root, model, device_mesh=mesh)
    return model[1].running_mean[0].item(), model[1].bias[0].item()  # type: ignore[index, union-attr]


def test_of_data_parallel_ranks_the_lowest_ones_statistics_are_saved(tmp_path: Path) -> None:
    assert on_ranks(2, _statistics, tmp_path) == [(0.0, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager")])
def test_what_wraps_a_module_or_a_part_of_it_changes_no_name(
    wrap: Callable[..., nn.Module], tmp_path: Path
) -> None:
    module, optimizer = stage(0)
    save(tmp_path / "plain", 1, module, optimizer, device_mesh=None)
    save(tmp_path / "wrapped", 1, wrap(module), optimizer, device_mesh=None)
    inside = nn.Sequential(torch.compile(module[0], backend="eager"))
    save(tmp_path / "inside", 1, inside, optimizer, device_mesh=None)
    keys = []
    for each in ("plain", "wrapped", "inside"):
        keys.append({entry.key for entry in contents(tmp_path / each)})
    assert keys[0] == keys[1] == keys[2] > {"model.0.weight", "optimizer.0.weight.exp_avg"}
    other, its = stage(1)
    load(tmp_path / "plain", wrap(other), its, device_mesh=None)
    assert torch.equal(other[0].weight, module[0].weight)
