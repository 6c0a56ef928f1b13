"""The trainer takes any modules and loss, on either engine, and equals one process.

Gradients are clipped, and a run is saved and resumed.
"""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    auto_split,
    get_pp_rank,
    get_pp_size,
    init_distributed,
)
from course_pp.training import Trainer, stages_of_rank
from course_pp.training.checkpointer import Checkpointer
from course_pp.training.data import Batches
from tests.training.small import MODEL, RUN, rows

CONFIG = replace(RUN, peak_flops=None)
TIED = [{0: "0.weight", 1: "2.weight"}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def halves() -> list[nn.Sequential]:
    """Two stages of a model that ties its ends and whose names tell nothing."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Embedding(MODEL.vocab_size, 16), Block())
    last = nn.Sequential(Block(), nn.LayerNorm(16), nn.Linear(16, MODEL.vocab_size, bias=False))
    last[2].weight = nn.Parameter(first[0].weight.detach().clone())
    return [first.double(), last.double()]


def train(
    rank: int, root: Path, engine: Any, cut: bool
) -> tuple[list[Any], dict[str, Tensor], float, float]:
    """Losses and norms of three steps, parameters here, validation loss, FLOPs of a step.

    A second run takes the last step.
    """
    config = replace(CONFIG, engine=engine)
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    seen = []
    [index], n_stages = stages_of_rank(config, get_pp_rank(mesh), get_pp_size(mesh))
    assert n_stages == 2

    def fresh() -> Trainer:
        stages: Any = {index: halves()[index]}
        if cut:  # the stages know the tie
            whole = nn.Sequential(*halves())
            whole[1][2].weight = whole[0][0].weight
            stages = [auto_split(whole, torch.zeros(2, 8, dtype=torch.long), at=["1"])[index]]
        tied = None if cut else TIED
        return Trainer(
            config, stages, rows(), rows(17, seed=1), device_mesh=mesh, loss_fn=mean_loss, tied=tied
        )

    first, second = fresh(), fresh()
    with Checkpointer(first, root, device_mesh=mesh, save_every=1) as checkpointer:
        for _ in range(2):
            result = first.train_step()
            checkpointer.after_step(first, result)
            seen.append((result.loss, result.grad_norm))
    with Checkpointer(second, root, device_mesh=mesh) as checkpointer:
        checkpointer.resume()
        fitted = second.fit(lambda _, result: seen.append((result.loss, result.grad_norm)))
    prefix = "" if cut else f"{index}."
    parameters = {
        f"{prefix}{n}": p.detach().clone() for n, p in second.modules[0].named_parameters()
    }
    return seen, parameters, second.evaluate(), fitted.speed.flops_of_a_step


def alone() -> tuple[list[Any], dict[str, Tensor], float]:
    """The same in one process, with plain PyTorch."""
    stages = nn.Sequential(*halves())
    stages[1][2].weight = stages[0][0].weight
    matrices = [stages[0][1].linear.weight, stages[1][0].linear.weight]
    decaying = {id(matrix) for matrix in matrices}
    others = [p for p in stages.parameters() if id(p) not in decaying]
    groups = [
        {"params": matrices, "weight_decay": CONFIG.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=CONFIG.lr)
    seen = []
    for step, factor in enumerate((1.0, 1.0, 0.55)):
        batch = Batches(rows(), CONFIG.batch, CONFIG.seed)[step]
        optimizer.zero_grad()
        loss = mean_loss(stages(batch.inputs), batch.targets)
        loss.backward()
        seen.append(
            (loss.item(), nn.utils.clip_grad_norm_(stages.parameters(), CONFIG.clip_norm).item())
        )
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.lr * factor
        optimizer.step()
    held_out = rows(17, seed=1)[torch.arange(16) * 17 // 16]
    parameters = {name: p.detach() for name, p in stages.named_parameters(remove_duplicate=False)}
    return seen, parameters, mean_loss(stages(held_out.inputs), held_out.targets).item()


@pytest.mark.parametrize("cut", [False, True], ids=["by hand", "auto_split"])
@pytest.mark.parametrize("engine", ["parallel", "runtime"])
def test_foreign_stages_with_a_tie_and_a_plain_loss_equal_one_process(
    engine: str, cut: bool, tmp_path: Path
) -> None:
    expected, parameters, validation = alone()
    ranks = on_ranks(2, train, tmp_path, engine, cut, timeout_s=60)
    held = {name for _, found, *_ in ranks for name in found}
    assert held == set(parameters)
    once = {p.data_ptr(): p.numel() for p in parameters.values()}  # a tied matrix has two names
    n_parameters = sum(once.values())
    for seen, found, evaluated, flops in ranks:
        assert seen == [pytest.approx(pair, rel=1e-11) for pair in expected]
        assert evaluated == pytest.approx(validation, rel=1e-11)
        assert flops == 6 * n_parameters * CONFIG.batch * 8
        for name, value in found.items():
            torch.testing.assert_close(
                value, parameters[name], rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )


def refused(rank: int) -> list[str]:
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    said = []
    for stages in ({0: halves()[0]}, {rank: "module"}, halves(), ["module"]):
        with pytest.raises(ValueError, match=r".") as refusal:
            Trainer(CONFIG, stages, rows(), device_mesh=mesh)
        said.append(str(refusal.value))
    return said


def test_stages_that_are_none_or_elsewhere_are_refused_on_every_rank() -> None:
    first, second = on_ranks(2, refused, timeout_s=60)
    assert first == second
    assert "modules holds stages [0], and schedule '1f1b' places stages [1] of 2 here" in first[0]
    assert "modules lists 2 stages, and schedule '1f1b' places stages [0] of 2 here" in first[2]
    assert all(
        "modules holds ['str']: pass the list of this rank's stages" in said for said in first[1::2]
    )


def without_parameters(rank: int, root: Path, engine: Any) -> tuple[float, float | None]:
    """A run whose last stage has none, saved and taken up; then one in which nothing is trained."""
    config = replace(RUN, engine=engine, precision="auto")
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    torch.manual_seed(0)
    logits = nn.Sequential(nn.Embedding(MODEL.vocab_size, 16), nn.Linear(16, MODEL.vocab_size)).to(
        torch.bfloat16
    )
    first, second = (
        Trainer(
            config,
            {rank: [stages, nn.Softplus()][rank]},
            rows(),
            device_mesh=mesh,
            loss_fn=mean_loss,
        )
        for stages in (logits, deepcopy(logits))
    )
    with Checkpointer(first, root, device_mesh=mesh, save_every=1) as checkpointer:
        checkpointer.after_step(first, first.train_step())
    with Checkpointer(second, root, device_mesh=mesh) as checkpointer:
        checkpointer.resume()
    assert second.train_step().loss == first.train_step().loss
    with pytest.raises(ValueError, match="no stage has a parameter"):
        Trainer(config, {rank: nn.Softplus()}, rows(), device_mesh=mesh, loss_fn=mean_loss)
    return first.fit().loss, first.config.precision


@pytest.mark.parametrize("engine", ["parallel", "runtime"])
def test_a_stage_without_parameters_trains_and_one_has_to_have_some(
    engine: str, tmp_path: Path
) -> None:
    first, second = on_ranks(2, without_parameters, tmp_path, engine, timeout_s=60)
    assert first == second
    assert first[1] == "bf16"


def cut_anew(rank: int, root: Path, pp: int) -> tuple[int | None, float]:
    """The first step and last loss of a run with a list of stages that have full names."""
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(MODEL.vocab_size, 16), *(Block() for _ in range(6)), nn.Linear(16, 23)
    ).double()
    config = replace(CONFIG, schedule="1f1b" if pp == 1 else "interleaved_1f1b")
    indices, n_stages = stages_of_rank(config, rank, pp)
    stages = [model[i * 8 // n_stages : (i + 1) * 8 // n_stages] for i in indices]
    trainer = Trainer(config, stages, rows(), device_mesh=mesh, loss_fn=mean_loss)
    with Checkpointer(trainer, root, device_mesh=mesh, save_every=1) as checkpointer:
        loaded = checkpointer.resume()
        if pp > 1:
            checkpointer.after_step(trainer, trainer.train_step())
        return loaded and loaded.step, trainer.train_step().loss


def test_a_list_of_stages_is_saved_by_full_names_and_taken_up_at_another_cut(
    tmp_path: Path,
) -> None:
    first, second = on_ranks(2, cut_anew, tmp_path, 2, timeout_s=60)
    [resumed] = on_ranks(1, cut_anew, tmp_path, 1, timeout_s=60)
    assert first == second
    assert resumed == (1, pytest.approx(first[1], rel=1e-11))
