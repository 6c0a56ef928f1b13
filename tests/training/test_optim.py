"""The learning rate rises, falls along a cosine, and is what LambdaLR sets."""

import json
import math

import pytest
import torch
from torch import nn

from course_pp.training import TrainConfig
from course_pp.training.optim import build_optimizer, build_scheduler, warmup_cosine

CONFIG = TrainConfig(steps=14, warmup_steps=4, lr=0.5, min_lr=0.2, weight_decay=0.3)


def test_it_rises_in_equal_steps_to_the_peak() -> None:
    assert [warmup_cosine(step, CONFIG) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_it_falls_along_a_cosine_and_stays_at_the_end() -> None:
    falling = [warmup_cosine(step, CONFIG) for step in range(4, 15)]
    assert falling[5] == pytest.approx(0.6)  # half-way between 1 and 0.2
    assert falling == sorted(falling, reverse=True)
    assert falling[10] == warmup_cosine(1000, CONFIG) == pytest.approx(0.2)
    # A cosine is symmetric about its middle.
    assert [a + b for a, b in zip(falling, reversed(falling), strict=True)] == pytest.approx([1.2] * 11)


@pytest.mark.parametrize("warmup", [0, 14])
def test_a_run_may_be_all_cosine_or_all_warm_up(warmup: int) -> None:
    config = TrainConfig(steps=14, warmup_steps=warmup)
    factors = [warmup_cosine(step, config) for step in range(14)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[0 if warmup == 0 else 13] == 1.0


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
    assert rates == [0.5 * warmup_cosine(step, CONFIG) for step in range(16)]


def test_the_schedulers_state_is_json() -> None:
    scheduler = build_scheduler(build_optimizer([nn.Linear(1, 1)], CONFIG), CONFIG)
    state = scheduler.state_dict()
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    assert math.isclose(state["base_lrs"][0], 0.5)
