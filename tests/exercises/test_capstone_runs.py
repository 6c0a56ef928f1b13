"""The run of notebook 13: planned as it is saved, timed as it is logged, killed at its step."""

import json
import shlex
from pathlib import Path

import pytest

from course_pp.exercises.capstone.exercises import (
    BATCH,
    MODEL,
    SEQ_LEN,
    SIZES,
    TEXT,
    calibrated,
    planned_bytes,
    saved_bytes,
    step_seconds,
    train_and_die,
)
from course_pp.launch import RankDied
from course_pp.plan import Layout, predict

SHARDED = Layout(dp_shard=2, microbatch_size=8, precision="float32")
PIPED = Layout(2, microbatch_size=4, precision="float32")


@pytest.mark.parametrize("layout", [SHARDED, PIPED])
def test_what_all_ranks_hold_is_the_model_once(layout: Layout) -> None:
    held = planned_bytes(layout)
    assert sum(each["parameters"] for each in held) == 4 * MODEL.n_parameters
    assert [each["moments"] for each in held] == [2 * each["parameters"] for each in held]


def test_a_machine_is_calibrated_to_the_step_that_was_timed() -> None:
    for layout in (SHARDED, PIPED):
        mine = calibrated(0.25, layout)
        assert predict(MODEL, layout, mine, BATCH, SEQ_LEN).step_s == pytest.approx(0.25, rel=0.01)


def test_the_first_line_of_a_log_is_no_step(tmp_path: Path) -> None:
    lines = [
        {"event": "start"},
        *({"event": "train", "tokens_per_s": speed} for speed in (1.0, 512.0, 2048.0, 1024.0)),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert step_seconds(tmp_path) == 1.0


@pytest.mark.ranks
@pytest.mark.long
def test_a_run_dies_in_its_step_and_has_saved_what_was_planned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "notebooks")
    (tmp_path / "text.txt").write_text(200 * TEXT, encoding="utf-8")
    flags = (
        f"{SIZES} --text {shlex.quote(str(tmp_path / 'text.txt'))} --checkpoint-dir"
        f" {shlex.quote(str(tmp_path))}/run"
    )
    flags += " --dp-shard 2 --microbatches 1 --steps 4 --save-every 2 --log-every 1"
    with pytest.raises(RankDied, match="rank 1 was ended by SIGKILL"):
        train_and_die(flags, 2, 1, 4)
    assert [path.name for path in sorted((tmp_path / "run").glob("step_*"))] == ["step_00000002"]
    assert saved_bytes(tmp_path / "run") == planned_bytes(SHARDED)
