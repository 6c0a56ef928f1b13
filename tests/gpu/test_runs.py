"""Whole training runs on a GPU: every precision, compiled, saved and resumed."""

from pathlib import Path

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig, get_device, init_distributed
from course_pp.training.checkpoint import load, save
from tests.source_code.scripts import labelled_lines

COMPILING_S = 600  # without a cache of what was compiled before
TRAIN = str(Path(__file__).parents[2] / "source_code" / "train.py")


def draw_on_rank(rank: int, root: str) -> list[list[float]]:
    """What the GPU draws after a checkpoint, and again after it was loaded."""
    init_distributed(DistributedConfig())
    model = torch.nn.Linear(2, 2).to(get_device())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device=get_device())).sum().backward()
    optimizer.step()
    torch.rand(3, device=get_device())
    saved = save(root, 1, model, optimizer, device_mesh=None)
    drawn = [torch.rand(4, device=get_device()).tolist()]
    load(saved.path, model, optimizer, device_mesh=None)
    return [*drawn, torch.rand(4, device=get_device()).tolist()]


@pytest.mark.ranks
def test_a_checkpoint_holds_the_generator_of_the_gpu(tmp_path: Path) -> None:
    [(before, after)] = on_ranks(1, draw_on_rank, str(tmp_path), backend=None)
    assert before == after


@pytest.mark.ranks
@pytest.mark.timeout(COMPILING_S + 130)
@pytest.mark.parametrize("engine", ["parallel", "runtime"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_trains_saves_and_resumes(
    engine: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = [
        TRAIN,
        "--model",
        "tiny",
        "--global-batch-size",
        "8",
        "--engine",
        engine,
        "--precision",
        precision,
    ]
    run += ["--microbatches", "2", "--checkpoint-dir", "saved"]
    first = labelled_lines(1, [*run, "--steps", "2", "--compile"], COMPILING_S)
    assert any("on cuda:0" in line for line in first)
    assert any("resumed" in line for line in labelled_lines(1, [*run, "--steps", "3"]))
