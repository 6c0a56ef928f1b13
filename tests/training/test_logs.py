"""Logs hold each step once, also in a resumed run; utilisation is FLOPs over the peak."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, Transformer, build_stage_module
from course_pp.training.engines import HeldStages, flops_of_a_sequence
from course_pp.training.feed import Feed
from course_pp.training.logs import METRICS, Logs, Peak, ProgressBar, Speed, find_peak, matmul_flops
from tests.training.small import MODEL, RUN, SEQ_LEN, rows


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


def write(folder: Path, first: int, steps: range) -> None:
    log = Logs(folder, first)
    for step in steps:
        log.write("train", step, {"loss": 1.0 / step})
    log.close()


def test_a_fresh_run_begins_a_fresh_log_and_half_a_line_of_a_killed_one_is_dropped(
    tmp_path: Path,
) -> None:
    write(tmp_path, 0, range(1, 4))
    write(tmp_path, 0, range(1, 3))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"event": "tra')
    write(tmp_path, 2, range(3, 4))
    assert steps_in(tmp_path) == [1, 2, 3]


def test_the_bar_says_which_pass_over_the_data_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    feed, bar = Feed(RUN, rows(24)), ProgressBar(0, 4, 10, True)  # 3 steps an epoch
    for step in range(4):
        bar.advance(1.0, feed.epoch(step))
    bar.close()
    assert re.findall(r"epoch \d:.*?/4", capsys.readouterr().err)[-1].startswith("epoch 2: 100%")


def test_a_record_is_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    log = Logs(tmp_path)
    log.write("train", 1, {"loss": 0.5})
    assert json.loads((tmp_path / METRICS).read_text()) == {
        "event": "train",
        "step": 1,
        "loss": 0.5,
    }
    log.close()
    log.close()


def test_a_resumed_run_replaces_the_steps_it_does_again_also_in_tensorboard(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 8))
    write(tmp_path, 5, range(6, 9))
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    board = EventAccumulator(str(tmp_path)).Reload()
    assert board.Tags()["scalars"] == ["train/loss"]
    scalars = [(scalar.step, scalar.value) for scalar in board.Scalars("train/loss")]
    assert scalars == [(step, pytest.approx(1 / step)) for step in range(1, 9)]


def test_training_flops_are_those_torch_counts_with_causal_attention_halved() -> None:
    model, batch = Transformer(MODEL), rows(1)
    with FlopCounterMode(display=False) as counter:
        CrossEntropy()(model(batch.inputs), batch.targets).backward()
    counted = counter.get_flop_counts()["Global"]
    matrices = sum(flops for operator, flops in counted.items() if "attention" not in str(operator))
    attention = 3 * 4 * MODEL.dim * MODEL.n_layers * SEQ_LEN * (SEQ_LEN + 1) / 2
    held = HeldStages({0: build_stage_module(MODEL, 0, 1)}, 1, None)
    assert flops_of_a_sequence(held, SEQ_LEN) == matrices + attention


def test_speed_is_tokens_and_flops_over_the_seconds_of_the_steps() -> None:
    speed = Speed(tokens_of_a_step=100, flops_of_a_step=6e9, peak=Peak(1e10, "given"))
    assert (speed.tokens_per_s, speed.utilisation) == (0.0, 0.0)
    speed = speed.after(1.0).after(3.0)
    assert speed.tokens_per_s == 50.0
    assert speed.utilisation == pytest.approx(0.3)


def peaks(rank: int) -> tuple[Peak, Peak]:
    cpu = torch.device("cpu")
    return find_peak(2e12, cpu, torch.float32), find_peak(None, cpu, torch.float32)


def test_the_peak_is_that_of_all_ranks_and_says_where_it_comes_from() -> None:
    (given, measured), (_, on_the_other) = on_ranks(2, peaks, timeout_s=60)
    assert given == Peak(4e12, "given")
    assert measured == on_the_other
    assert measured.source == "measured"
    assert measured.flops > 0


def test_a_measured_peak_counts_two_operations_for_each_multiply_add(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("course_pp.training.logs.time.perf_counter", lambda: next(clock))
    assert matmul_flops(torch.device("cpu"), torch.float64) == 2 * 768**3
