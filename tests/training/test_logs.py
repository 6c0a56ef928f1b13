"""Logs hold each step once, also when a run was interrupted and taken up again."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from course_pp.training import logs
from course_pp.training.logs import METRICS, Logs


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


def write(folder: Path, first: int, steps: range) -> None:
    log = Logs(folder, first)
    for step in steps:
        log.write("train", step, {"loss": 1.0 / step})
    log.close()


@pytest.fixture(autouse=True)
def _without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda name: None)


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path: Path) -> None:
    write(tmp_path / "run", 0, range(1, 8))
    write(tmp_path / "run", 5, range(6, 9))
    assert steps_in(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_fresh_run_begins_a_fresh_log(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    write(tmp_path, 0, range(1, 3))
    assert steps_in(tmp_path) == [1, 2]


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


def test_tensorboard_gets_every_number_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            calls.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append(("closed",))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(logs, "find_spec", lambda name: object())
    log = Logs(tmp_path, 4)
    log.write("train", 5, {"loss": 0.5, "peak_source": "given"})
    log.close()
    assert calls == [(str(tmp_path), 5), ("train/loss", 0.5, 5), ("closed",)]
