"""The contents of a checkpoint, and its demands on modules and optimizer that load it."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from course_pp.launch import on_ranks
from course_pp.model import build_stage_module
from course_pp.parallel import DistributedConfig, apply_fsdp2, init_distributed
from course_pp.training.checkpoint import CheckpointError, contents, load, save
from course_pp.training.checkpoint.state import rng_keys
from tests.equality import adamw
from tests.training.checkpoint.small import CONFIG, Small


def test_an_optimizer_that_has_not_stepped_is_loaded_as_one_that_has_not(tmp_path: Path) -> None:
    fresh, stepped = Small(), Small()
    stepped.step()
    save(tmp_path, 0, fresh.model, fresh.optimizer, device_mesh=None)
    load(tmp_path, stepped.model, stepped.optimizer, device_mesh=None)
    assert not stepped.optimizer.state
    assert stepped.step(7) == fresh.step(7)


def test_options_come_back_by_parameter_and_implementation_does_not(tmp_path: Path) -> None:
    def grouped(run: Small, lr: float, foreach: bool) -> torch.optim.AdamW:
        matrices = [p for p in run.model.parameters() if p.dim() > 1]
        norms = [p for p in run.model.parameters() if p.dim() == 1]
        groups = [{"params": norms, "weight_decay": 0.0}, {"params": matrices, "weight_decay": lr}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9), foreach=foreach)

    run = Small()
    save(tmp_path, 0, run.model, grouped(run, 0.1, foreach=True), device_mesh=None)
    loaded = grouped(run, 0.5, foreach=False)
    load(tmp_path, run.model, loaded, device_mesh=None)
    assert [(g["lr"], g["weight_decay"], g["foreach"]) for g in loaded.param_groups] == [
        (0.1, 0.0, False),
        (0.1, 0.1, False),
    ]
    assert loaded.param_groups[0]["betas"] == (0.8, 0.9)
    with pytest.raises(CheckpointError, match="other options"):
        load(tmp_path, run.model, run.optimizer, device_mesh=None)


def test_a_group_that_is_empty_on_a_stage_gets_its_options_back(tmp_path: Path) -> None:
    for groups in on_ranks(2, _groups_after_loading, tmp_path):
        decayed, plain, unused = groups
        assert (decayed["lr"], decayed["weight_decay"], decayed["initial_lr"]) == (0.05, 0.3, 0.1)
        assert (plain["lr"], plain["weight_decay"], plain["initial_lr"]) == (0.1, 0.0, 0.2)
        assert unused["initial_lr"]


def _groups_after_loading(rank, root):
    """A matrix on the first stage and a bias on the second: each has two empty groups."""
    stage = nn.ParameterDict({("weight", "bias")[rank]: torch.ones((2, 2) if rank == 0 else (2,))})
    own = list(stage.parameters())

    def optimizer(lr: float, weight_decay: float) -> torch.optim.AdamW:
        decayed = {"params": own if rank == 0 else [], "weight_decay": weight_decay}
        plain = {"params": own if rank else [], "weight_decay": 0.0, "lr": 2 * lr}
        return torch.optim.AdamW([decayed, plain, {"params": []}], lr=lr)

    run = optimizer(0.1, 0.3)
    scheduler = LambdaLR(run, lambda step: 0.5**step)
    run.step()
    scheduler.step()
    save(root, 1, stage, run, device_mesh=None)
    loaded = optimizer(1.0, 0.0)
    load(root, stage, loaded, device_mesh=None)
    # which refuses a group without initial_lr
    LambdaLR(loaded, lambda step: 0.5**step, last_epoch=0)
    groups = [dict(group) for group in loaded.param_groups]
    for group in groups:
        del group["params"]
    return groups


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    run = Small()
    path = run.saved(tmp_path, 1)
    optimizer = torch.optim.Adam(run.model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"AdamW, .* Adam: "):
        load(path, run.model, optimizer, device_mesh=None)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_without_an_optimizer_only_weights_are_loaded(tmp_path: Path) -> None:
    run, other = Small(), Small(seed=1)
    run.saved(tmp_path, 1)
    state = torch.get_rng_state()
    load(tmp_path, other.model, device_mesh=None)
    assert torch.equal(torch.get_rng_state(), state)
    assert not other.optimizer.state
    path = save(tmp_path, 2, run.model, device_mesh=None).path
    with pytest.raises(CheckpointError, match="without an optimizer"):
        load(path, other.model, other.optimizer, device_mesh=None)


def test_an_optimizer_of_other_modules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shape \(11, 16\)"):
        save(tmp_path, 1, Small().model, adamw([Small().model]), device_mesh=None)


def test_an_optimizer_that_keeps_more_than_tensors_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: model(torch.ones(1)).sum().backward() or torch.zeros(()))
    with pytest.raises(CheckpointError, match="LBFGS keeps a int"):
        save(tmp_path, 1, model, optimizer, device_mesh=None)


def test_a_stage_that_was_not_passed_is_missed(tmp_path: Path) -> None:
    stages = [build_stage_module(CONFIG, i, 2) for i in range(2)]
    save(tmp_path, 1, stages, device_mesh=None)
    with pytest.raises(CheckpointError, match="no rank's modules"):
        load(tmp_path, stages[1:], device_mesh=None)


def test_the_generators_of_torch_python_and_numpy_continue(tmp_path: Path) -> None:
    run = Small()
    run.saved(tmp_path, 1)
    expected = torch.rand(3), random.random(), np.random.normal()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    load(tmp_path, run.model, run.optimizer, device_mesh=None)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert np.random.normal() == expected[2]


def test_new_pipeline_ranks_draw_what_the_first_draws_and_new_data_ranks_their_own(
    tmp_path: Path,
) -> None:
    run = Small()
    run.saved(tmp_path, 1)
    expected = torch.rand(()).item()
    drawn = on_ranks(4, _draw_after_loading, tmp_path)
    assert drawn[::2] == [expected, expected]  # with pp=0 and pp=1, the data rank that was there
    assert drawn[1] == drawn[3] != expected
    assert drawn == on_ranks(4, _draw_after_loading, tmp_path)


def test_a_new_tensor_parallel_rank_takes_the_generator_of_its_neighbour() -> None:
    saved = {f"rng.pp{pp}.dp_replicate0.dp_shard0.tp0.cpu": None for pp in range(2)}
    place = {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "tp": 3}
    assert rng_keys(place, saved) == {"cpu": "rng.pp1.dp_replicate0.dp_shard0.tp0.cpu"}
    assert rng_keys({**place, "dp_shard": 1}, saved) == {}


def _draw_after_loading(rank, root):
    run = Small()
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2))
    load(root, run.model, run.optimizer, device_mesh=mesh)
    return torch.rand(()).item()


def test_parameters_that_fsdp2_keeps_gathered_are_saved_as_shards(tmp_path: Path) -> None:
    assert all(on_ranks(2, _save_gathered, tmp_path))
    entries = {entry.key: entry for entry in contents(tmp_path)}
    assert (
        len(entries["model.embed.weight"].pieces)
        == len(entries["optimizer.embed.weight.exp_avg"].pieces)
        == 2
    )


def _save_gathered(rank, root):
    mesh = init_distributed(DistributedConfig())
    model = Small().model
    apply_fsdp2(model, mesh, reshard_after_forward=False)
    optimizer = adamw([model])
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens).sum().backward()
    optimizer.step()
    with torch.no_grad():
        before = model(tokens)
    gathered = not isinstance(model.norm.weight, DTensor)
    save(root, 1, model, optimizer, device_mesh=mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load(root, model, optimizer, device_mesh=mesh)
    with torch.no_grad():
        return gathered and torch.equal(model(tokens), before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    run = Small()
    path = run.saved(tmp_path / "run", 1)
    weight = {"model.norm.weight": torch.zeros(16, dtype=torch.float64)}
    dcp.load(weight, checkpoint_id=path, no_dist=True)
    assert run.model.norm is not None
    assert torch.equal(weight["model.norm.weight"], run.model.norm.weight)
    dcp_to_torch_save(path, tmp_path / "one_file.pt")
    everything = torch.load(tmp_path / "one_file.pt", weights_only=True)
    assert torch.equal(everything["model.norm.weight"], run.model.norm.weight)
