"""Optimizers resume exactly, the right parameters decay, and the rate follows its curve."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig
from course_pp.training import TrainConfig
from course_pp.training.checkpoint import load, save
from course_pp.training.config import Optimizer
from course_pp.training.optim import build_optimizer, build_scheduler, lr_factor, parameter_groups
from tests.training.small import MODEL, RUN, trainer

EVERY = [*get_args(Optimizer)]
CONFIG = TrainConfig(steps=14, warmup_steps=4, lr=0.5, min_lr=0.2, weight_decay=0.3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 1.0, 1.0, *(0.6 + 0.4 * math.cos(math.pi * i / 8) for i in range(1, 9)), 0.2]),
        ({"warmup_steps": 0}, [0.6 + 0.4 * math.cos(math.pi * i / 10) for i in range(11)] + [0.2]),
        ({"warmup_steps": 10}, [*(i / 10 for i in range(1, 11)), 1.0, 0.2]),
        ({"lr_schedule": "linear"}, [0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2]),
        ({"lr_schedule": "wsd"}, [0.5, *[1.0] * 8, 0.6, 0.2, 0.2]),
        ({"lr_schedule": "wsd", "decay_steps": 4}, [0.5, *[1.0] * 6, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"lr_schedule": "constant"}, [0.5, *[1.0] * 11]),
    ],
    ids=["cosine", "all cosine", "all warm-up", "linear", "a fifth", "four steps", "constant"],
)
def test_the_rate_rises_in_equal_steps_and_falls_along_a_curve(
    options: dict[str, Any], expected: list[float]
) -> None:
    config = TrainConfig(**{"steps": 10, "warmup_steps": 2, "min_lr": 0.2, **options})
    assert [lr_factor(step, config) for step in range(12)] == pytest.approx(expected)


def test_the_optimizer_is_adamw_at_the_rate_of_each_step() -> None:
    module = nn.Linear(3, 2)
    optimizer = build_optimizer([module], CONFIG)
    scheduler = build_scheduler(optimizer, CONFIG)
    group, biases = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (group["weight_decay"], biases["weight_decay"]) == (0.3, 0.0)
    assert (group["params"], biases["params"]) == ([module.weight], [module.bias])
    rates = []
    for _ in range(16):
        rates.append(group["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.5 * lr_factor(step, CONFIG) for step in range(16)]


class Foreign(nn.Module):
    """A model of somebody else, whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(5, 4), nn.EmbeddingBag(5, 4)
        self.c, self.d = nn.LayerNorm((3, 4)), nn.Conv2d(1, 2, 3)
        self.e, self.f = nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.f.weight = self.a.weight
        self.g = nn.Linear(4, 5)


def test_only_matrices_of_a_foreign_model_decay_and_each_is_trained_once() -> None:
    model = Foreign()
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for group in parameter_groups([model], 0.1, [{0: "g.weight"}]):
        found.append([names[id(p)] for p in group["params"]])
    decaying, others = found
    assert decaying == ["d.weight", "e.weight"]
    assert others == [
        "a.weight",
        "b.weight",
        "c.weight",
        "c.bias",
        "d.bias",
        "e.bias",
        "g.weight",
        "g.bias",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "SGD", "betas": (0.9, 0.95)}, "optimizer='SGD' takes dampening, "),
        (
            {"optimizer": "SGD", "optimizer_options": {"momentun": 0.9}},
            "nesterov, and not momentun: leave it out",
        ),
        ({"optimizer_options": {"lr": 0.9}}, "and not lr: leave it out"),
        (
            {"optimizer": "SGD", "optimizer_options": {"nesterov": True}},
            "optimizer='SGD' refuses its options: Nesterov",
        ),
        ({"betas": (0.9, 1.0)}, "optimizer='AdamW' refuses its options: Invalid beta parameter"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused_by_name(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        build_optimizer([nn.Linear(2, 2)], TrainConfig(**options))
    assert words in str(refusal.value)


def each_optimizer(
    rank: int, names: list[str], root: Path, dp_shard: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Losses of a run with each optimizer, and of a run resumed after the first step."""
    layout = DistributedConfig(dp_shard=dp_shard)
    losses = {}
    for i, name in enumerate(names):
        curve: Any = ("cosine", "linear", "wsd", "constant")[i % 4]
        config = replace(RUN, microbatches=1, optimizer=name, lr_schedule=curve)
        if name == "SGD":
            config = replace(config, optimizer_options={"momentum": 0.9, "nesterov": True})
        first, second = (trainer(config, replace(MODEL, n_layers=1), layout) for _ in range(2))
        whole = [first.train_step().loss]
        save(
            root / name,
            1,
            first.modules,
            first.optimizer,
            device_mesh=first._mesh,
            extra=first.state(),
        )
        loaded = load(root / name, second.modules, second.optimizer, device_mesh=second._mesh)
        second.load_state(loaded.extra)
        whole += [first.train_step().loss for _ in range(2)]
        losses[name] = whole, [second.train_step().loss for _ in range(2)]
    return losses


@pytest.mark.parametrize(
    "names", [["NAdam", "SGD", "Adagrad"], pytest.param(EVERY, marks=pytest.mark.full)]
)
def test_optimizers_and_curves_go_on_exactly_and_shard_like_one_process(
    names: list[str], tmp_path: Path
) -> None:
    [alone] = on_ranks(1, each_optimizer, names, tmp_path / "1", 1, timeout_s=60)
    for sharded in on_ranks(2, each_optimizer, names, tmp_path / "2", 2, timeout_s=60):
        for name, (expected, found) in sharded.items():
            assert found == expected[1:], name
            assert expected == pytest.approx(alone[name][0], rel=1e-11), name


def of_epochs(rank: int) -> int:
    return trainer(replace(RUN, steps=200, epochs=2)).config.steps


def test_epochs_become_steps() -> None:
    assert on_ranks(1, of_epochs, timeout_s=60) == [2 * (24 // RUN.batch)]
