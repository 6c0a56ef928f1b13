"""Which directories appear, stay and go."""

import errno
import fcntl
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from course_pp.training.checkpoint import (
    AsyncSaver,
    CheckpointError,
    find_latest,
    load,
    save,
    saving,
    verify,
)
from course_pp.training.checkpoint.directory import Draft
from tests.training.checkpoint.small import SHARD, Small, flip_byte


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def save_steps(root: Path, *steps: int, **retention: int) -> None:
    for step in steps:
        save(root, step, torch.nn.Linear(1, 1), device_mesh=None, **retention)


def test_the_last_ones_stay_and_every_nth_for_ever(tmp_path: Path) -> None:
    save_steps(tmp_path, *range(1, 10), keep_last=2, keep_every=4)
    assert names(tmp_path) == [f"step_{step:08d}" for step in (4, 8, 9)]


def test_a_damaged_checkpoint_neither_counts_as_one_to_keep_nor_goes(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step_00000003" / "manifest.json").unlink()
    save_steps(tmp_path, 4, keep_last=2)
    assert names(tmp_path) == [f"step_{step:08d}" for step in (2, 3, 4)]


def test_a_run_that_went_back_keeps_what_it_writes_beside_later_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    flip_byte(tmp_path / "step_00000030" / SHARD)
    assert save(tmp_path, 25, torch.nn.Linear(1, 1), device_mesh=None, keep_last=1).path.is_dir()
    assert names(tmp_path) == ["step_00000025", "step_00000030"]


@pytest.mark.parametrize(
    ("retention", "said"),
    [
        ({"keep_last": 0}, "keep_last=0 must be"),
        ({"keep_every": 5}, "needs keep_last"),
        ({"keep_last": True}, "True"),
    ],
)
def test_a_retention_that_makes_no_sense_is_refused(
    retention: dict[str, int], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        save_steps(tmp_path, 1, **retention)


def test_the_next_save_removes_what_a_killed_one_left_and_nothing_that_is_being_written(
    tmp_path: Path,
) -> None:
    for name in (
        ".step_00000001.tmp-dead",
        ".step_00000001.tmp-alive",
        ".step_00000001.old-dead",
        ".step_1.tmp-x",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    writer = os.open(tmp_path / ".step_00000001.tmp-alive", os.O_RDONLY)
    fcntl.flock(writer, fcntl.LOCK_EX)
    save_steps(tmp_path, 2)
    os.close(writer)
    assert names(tmp_path) == [".step_00000001.tmp-alive", ".step_1.tmp-x", "step_00000002"]
    save_steps(tmp_path, 3)
    assert ".step_00000001.tmp-alive" not in names(tmp_path)


@pytest.mark.parametrize("gone", ["manifest.json", "state.json", SHARD])
def test_a_whole_checkpoint_of_the_step_is_not_replaced_but_a_damaged_one_of_ours_is(
    gone: str, tmp_path: Path
) -> None:
    save_steps(tmp_path, 1)
    with pytest.raises(
        CheckpointError,
        match="step_00000001 is a whole checkpoint",
    ):
        save_steps(tmp_path, 1)
    (tmp_path / "step_00000001" / gone).unlink()
    save_steps(tmp_path, 1)
    assert names(tmp_path) == ["step_00000001"]
    assert verify(tmp_path / "step_00000001") == []


def of_a_later_version(path: Path) -> None:
    save_steps(path.parent, 1)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace("version 2", "version 3"))


def years_of_work(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").touch()


STRANGERS: dict[str, Callable[[Path], object]] = {
    "another's directory": years_of_work,
    "a later version": of_a_later_version,
    "a file": Path.touch,
    "a link to a directory": lambda path: path.symlink_to(path.parent, target_is_directory=True),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
}


@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS)
def test_what_this_version_has_not_written_does_not_make_way(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    final = tmp_path / "step_00000001"
    make(final)
    before = os.lstat(final)
    with pytest.raises(CheckpointError, match="step_00000001 has the name"):
        save_steps(tmp_path, 1)
    assert names(tmp_path) == ["step_00000001"]
    assert os.lstat(final).st_ino == before.st_ino


def test_of_two_runs_that_write_the_same_step_the_first_stays(tmp_path: Path) -> None:
    late = Draft(tmp_path, 1)
    save_steps(tmp_path, 1)
    with pytest.raises(CheckpointError, match="whole checkpoint"):
        late.publish()
    late.discard()
    assert names(tmp_path) == ["step_00000001"]
    assert verify(tmp_path / "step_00000001") == []


def save_in_background(root: Path) -> None:
    with AsyncSaver(root, device_mesh=None) as saver:
        saver.save(1, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_disk_that_is_full_at_the_end_leaves_nothing(
    name: str, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: bytes) -> object:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, content)

    real = saving.write_file
    monkeypatch.setattr(saving, "write_file", write)
    monkeypatch.setattr("course_pp.training.checkpoint.manifest.write_file", write)
    said = (
        f"cannot be written to {tmp_path}: {os.strerror(errno.ENOSPC)}; make room there, or save to"
        " another"
    )
    with pytest.raises(CheckpointError, match=said):
        save_in_background(tmp_path) if asynchronous else save_steps(tmp_path, 1)
    assert names(tmp_path) == []


def test_nothing_in_a_checkpoint_names_this_machine(tmp_path: Path) -> None:
    path = Small().saved(tmp_path, 1)
    for file in path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def test_small_files_travel_along_and_cannot_take_the_place_of_others(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    path = save(tmp_path, 1, model, device_mesh=None, attachments={"tokenizer.json": "{}"}).path
    assert (path / "tokenizer.json").read_text() == "{}"
    (path / "tokenizer.json").write_text("[]")
    assert verify(path) == ["tokenizer.json is damaged: its bytes are not those that were written"]
    for name in ("state.json", "../up", "__0_0.distcp"):
        with pytest.raises(CheckpointError, match="cannot be attached"):
            save(tmp_path, 2, model, device_mesh=None, attachments={name: ""})


@pytest.mark.parametrize("value", [torch.ones(1), math.nan, -math.inf], ids=str)
def test_extra_must_be_json(value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="extra must be JSON"):
        save(tmp_path, 1, torch.nn.Linear(1, 1), device_mesh=None, extra={"value": value})


def test_an_asynchronous_save_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    run, other = Small(), Small(seed=1)
    with AsyncSaver(tmp_path, device_mesh=None, keep_last=2) as saver:
        for step in range(1, 4):
            run.step(step)
            before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
            saving = saver.save(step, run.model, run.optimizer, extra={"at": step})
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.zero_()
            saved = saving.result()
            assert load(saved.path, other.model, other.optimizer, device_mesh=None).extra == {
                "at": step
            }
            assert all(torch.equal(p, before[name]) for name, p in other.model.named_parameters())
            load(saved.path, run.model, run.optimizer, device_mesh=None)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    n_numbers = sum(p.numel() for p in run.model.parameters())
    assert saved.staged_bytes >= 3 * 8 * n_numbers  # weights and two moments, in float64
    assert 0 < saved.stall_s < saved.stall_s + saved.write_s
    assert saved.n_bytes == sum(
        p.stat().st_size for p in saved.path.iterdir() if p.name != "manifest.json"
    )


def test_what_fails_in_the_background_is_raised_at_the_next_save_and_at_the_end(
    tmp_path: Path,
) -> None:
    model, blocked = torch.nn.Linear(1, 1), tmp_path / "file"
    blocked.touch()
    saver = AsyncSaver(blocked, device_mesh=None)
    saver.save(1, model)
    with pytest.raises(CheckpointError, match="cannot hold"):
        saver.save(2, model)
    saver.save(3, model)
    with pytest.raises(CheckpointError, match="cannot hold"):
        saver.close()
    saver.close()


def test_a_loop_that_fails_is_not_kept_waiting_by_a_save(tmp_path: Path) -> None:
    def loop() -> None:
        with AsyncSaver(tmp_path / "file", device_mesh=None) as saver:
            saver.save(1, torch.nn.Linear(1, 1))
            raise RuntimeError("the loop")

    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="the loop"):
        loop()


def test_find_latest_orders_by_number(tmp_path: Path) -> None:
    save_steps(tmp_path, 99_999_999, 100_000_000)
    assert find_latest(tmp_path) == tmp_path / "step_100000000"
