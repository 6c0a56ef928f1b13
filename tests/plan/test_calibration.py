"""What a cluster can do is found again from a few steps that were timed on it."""

import random
from dataclasses import replace

import pytest

from course_pp.plan import (
    Cluster,
    Constants,
    Layout,
    ModelConfig,
    TimedStep,
    calibrate,
    gpu_named,
    predict,
)

HERE = Cluster(1, 2, gpu_named("laptop"), latency=1e-4)
THERE = Cluster(
    1,
    2,
    replace(HERE.gpu, peak=2.3e11, memory_bandwidth=4e9),
    intra_bandwidth=3e8,
    inter_bandwidth=3e8,
    latency=2e-3,
)
CONSTANTS = Constants(memory_passes=5.0)


def asked(draw: random.Random, n: int):
    """Runs of two ranks, of every kind in turn."""
    kinds = [
        Layout(2, precision="float32"),
        Layout(tp=2, precision="float32"),
        Layout(dp_shard=2, precision="float32"),
    ]
    for i in range(n):
        model = ModelConfig(64 * draw.randint(1, 8), draw.randint(2, 8), 2, 2048, max_seq_len=256)
        yield (
            model,
            kinds[i % 3].with_(overlap=False),
            2 * draw.randint(1, 8),
            64 * draw.randint(1, 4),
        )


def test_a_calibrated_cluster_predicts_steps_that_it_was_not_shown():
    draw = random.Random(0)
    steps = [
        TimedStep(*run, predict(*run[:2], THERE, *run[2:], CONSTANTS).step_s)
        for run in asked(draw, 8)
    ]
    found, constants = calibrate(steps, HERE)
    assert found.gpu.source == "measured"
    for model, layout, batch, seq_len in asked(draw, 12):
        expected = predict(model, layout, THERE, batch, seq_len, CONSTANTS).step_s
        assert predict(model, layout, found, batch, seq_len, constants).step_s == pytest.approx(
            expected, rel=0.01
        )


def test_a_latency_that_no_factor_can_change_is_refused():
    steps = [TimedStep(*run, 1.0) for run in asked(random.Random(0), 5)]
    with pytest.raises(ValueError, match=r"latency=0\.0"):
        calibrate(steps, replace(HERE, latency=0.0))


def steps_of(n: int, scale=lambda i: 1.0) -> list[TimedStep]:
    runs = asked(random.Random(0), n)
    return [
        TimedStep(*run, scale(i) * predict(*run[:2], THERE, *run[2:], CONSTANTS).step_s)
        for i, run in enumerate(runs)
    ]


def test_one_step_five_times_is_one_step_and_takes_time():
    (step,) = steps_of(1)
    with pytest.raises(
        ValueError,
        match="1 different steps for 5",
    ):
        calibrate([step] * 5, HERE)
    with pytest.raises(ValueError, match=r"seconds=0\.0"):
        replace(step, seconds=0.0)


@pytest.mark.parametrize("unit", [1e3, 1e-5])
def test_times_in_another_unit_are_refused(unit):
    with pytest.raises(
        ValueError,
        match=r"took .*e.0\d times as long",
    ):
        calibrate(steps_of(5, lambda i: unit), HERE)


@pytest.mark.slow
def test_steps_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"steps\[\d+\] .* contradict"):
        calibrate(
            steps_of(8, lambda i: (6.0, 1 / 6)[i % 2]) + steps_of(8, lambda i: (1 / 6, 6.0)[i % 2]),
            HERE,
        )
