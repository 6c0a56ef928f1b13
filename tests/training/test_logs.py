"""Logs hold each step once, also when a run was interrupted and taken up again."""

import json
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from course_pp.training.feed import Feed
from course_pp.training.logs import METRICS, Logs, Progress
from tests.training.small import RUN, rows


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


def write(folder: Path, first: int, steps: range) -> None:
    log = Logs(folder, first)
    for step in steps:
        log.write("train", step, {"loss": 1.0 / step})
    log.close()


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path: Path) -> None:
    write(tmp_path / "run", 0, range(1, 8))
    write(tmp_path / "run", 5, range(6, 9))
    assert steps_in(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_fresh_run_begins_a_fresh_log(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    write(tmp_path, 0, range(1, 3))
    assert steps_in(tmp_path) == [1, 2]


def test_the_bar_says_which_pass_over_the_data_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    feed, bar = Feed(RUN, rows(24)), Progress(0, 4, 10, True)  # 3 steps an epoch
    for step in range(4):
        bar.advance(1.0, feed.epoch(step))
    bar.close()
    assert re.findall(r"epoch \d:.*?/4", capsys.readouterr().err)[-1].startswith("epoch 2: 100%")


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 3))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"event": "tra')
    write(tmp_path, 2, range(3, 4))
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_record_is_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    log = Logs(tmp_path)
    log.write("train", 1, {"loss": 0.5})
    assert json.loads((tmp_path / METRICS).read_text()) == {"event": "train", "step": 1, "loss": 0.5}
    log.close()
    log.close()


def test_tensorboard_gets_every_number_of_every_step_once(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 8))
    write(tmp_path, 5, range(6, 9))
    board = EventAccumulator(str(tmp_path)).Reload()
    assert board.Tags()["scalars"] == ["train/loss"]
    scalars = [(scalar.step, scalar.value) for scalar in board.Scalars("train/loss")]
    assert scalars == [(step, pytest.approx(1 / step)) for step in range(1, 9)]
