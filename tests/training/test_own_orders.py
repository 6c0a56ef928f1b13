"""A file in place of a schedule's name: its order trains as one process, or is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from course_pp.launch import on_ranks
from course_pp.schedule import build, search, to_torch_csv
from course_pp.training import TrainConfig, stages_of_rank
from course_pp.training.checkpointer import Checkpointer
from course_pp.training.config import ORDER_FILE, read_order, what_changed, write_order
from tests.processes import no_process_left
from tests.training.small import (
    MODEL,
    RUN,
    TIED,
    Trained,
    assert_equals,
    in_one_process,
    train,
    trainer,
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """An order without a name: two microbatches over a V of four stages, in the least memory."""
    path = tmp_path / "own.csv"
    found = search(2, 2, memory_limit=2, n_chunks=2, placement="v", seconds=0.2).schedule
    path.write_text(to_torch_csv(found))
    return path


def trained(rank: int, schedule: str, root: Path) -> dict[str, Any]:
    """Run both engines to the end, and resume one from the other's checkpoint."""
    seen: dict[str, Any] = {}
    for engine in ("parallel", "runtime"):
        seen[engine] = train(rank, replace(RUN, engine=engine, schedule=schedule), TIED)  # type: ignore[arg-type]
    first = trainer(replace(RUN, steps=1, warmup_steps=1, schedule=schedule), TIED)
    files = {ORDER_FILE: write_order(read_order(schedule))}
    with Checkpointer(
        first, root, device_mesh=first._mesh, save_every=1, attachments=files
    ) as checkpointer:
        first.fit(checkpointer.after_step)
    kept = str(next(root.glob(f"*/{ORDER_FILE}")))
    second = trainer(replace(RUN, engine="runtime", schedule=kept), TIED)
    with Checkpointer(second, None, device_mesh=second._mesh) as checkpointer:
        checkpointer.resume(next(root.glob("step_*")))
        seen["resumed"] = [second.train_step().loss for _ in range(2)]
    return seen


def test_an_order_in_a_file_equals_one_process_on_both_engines_and_is_kept_with_the_checkpoint(
    own: Path, tmp_path: Path
) -> None:
    with no_process_left():
        ranks = on_ranks(2, trained, str(own), tmp_path / "run", timeout_s=60)
    reference: Trained = in_one_process(RUN, TIED)
    for engine in ("parallel", "runtime"):
        assert_equals([rank[engine] for rank in ranks], reference)
    for rank in ranks:
        assert rank["resumed"] == pytest.approx(reference.losses[1:], rel=1e-11)


def test_two_copies_of_a_stage_are_read_off_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "both ways.csv"
    order = build("chimera", 2, 2)
    path.write_text(write_order(order))
    assert read_order(str(path)).actions == order.actions
    config = replace(RUN, schedule=str(path), engine="runtime")
    assert stages_of_rank(config, 1, 2) == ([0, 1], 2)
    with pytest.raises(
        ValueError,
        match="stage 0 on 2 ranks",
    ):
        stages_of_rank(replace(config, engine="parallel"), 1, 2)


def test_other_pipeline_ranks_than_the_order_has_are_refused(own: Path) -> None:
    with pytest.raises(ValueError, match=r"2 ranks, .* 3 pipeline ranks"):
        stages_of_rank(replace(RUN, schedule=str(own)), 0, 3)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, "it cannot be read ([Errno 2] No such file or directory"),
        (
            lambda path: path.write_bytes(b"\xff\xfe0F0"),
            "it cannot be read ('utf-8' codec can't decode",
        ),
        (lambda path: path.write_text(""), "has no actions"),
        (
            lambda path: path.write_text("0F0,{0B0}\n"),
            "own.csv': row 1, column 2 of the CSV text: cannot read '{0B0}'",
        ),
        (lambda path: path.write_text("0F0,0B0\n1F0\n"), "1B0 is missing"),
        (
            lambda path: path.write_text("0F0,0F1\n1F0,1F1\n"),
            "it has forwards alone, and a run trains",
        ),
        (lambda path: path.write_text("0F0,0B0,0U0\n"), "update their weights within the step (U)"),
        (lambda path: path.write_text("0B0,0F0\n1F0,1B0\n"), "its order cannot run: "),
        (
            lambda path: path.write_text("0F0,0B0\n\n1F0,1B0\n"),
            "it gives rank 1 nothing to do, as row 2 is blank",
        ),
        (
            lambda path: path.write_text(to_torch_csv(build("1f1b", 2, 4))),
            "4 microbatches, and microbatches=2: make",
        ),
    ],
    ids=[
        "missing",
        "bytes",
        "empty",
        "cell",
        "half",
        "forwards",
        "updates",
        "deadlock",
        "idle",
        "sizes",
    ],
)
def test_a_file_that_no_run_can_have_is_refused_by_name(
    write: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.csv"
    write(path)
    with pytest.raises(ValueError, match=r"own\.csv'") as refusal:
        replace(RUN, schedule=str(path))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "\n\n",
        lambda text: text + ",,,\n",
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n") + "\r\n",
        lambda text: text.replace(",", ";"),
        lambda text: text.replace(",", ", "),
    ],
    ids=["blank lines", "blank cells", "byte order mark", "windows", "semicolons", "spaces"],
)
def test_a_file_as_editors_and_spreadsheets_leave_it_is_read(
    change: Callable[[str], str], tmp_path: Path
) -> None:
    path, order = tmp_path / "own.csv", build("1f1b", 2, 2)
    path.write_bytes(change(to_torch_csv(order)).encode())
    assert read_order(str(path)).actions == order.actions


def test_a_run_that_goes_on_in_another_order_is_told_so_and_how_to_keep_to_the_one_before(
    own: Path,
) -> None:
    order, folder = read_order(str(own)), own.parent
    saved = {"schedule": str(own), "microbatches": 2}
    gone = what_changed(saved, folder, "1f1b", None)
    assert gone is not None
    assert f"--schedule {own} --microbatches 2" in gone
    kept = folder / ORDER_FILE
    kept.write_text(write_order(order))
    assert what_changed(saved, folder, "elsewhere.csv", order) is None
    for name, other in (("1f1b", None), ("elsewhere.csv", build("1f1b", 2, 2))):
        said = what_changed(saved, folder, name, other)
        assert said is not None
        assert said.startswith(f"schedule {name!r} now, {str(own)!r} before: ")
        assert f"--schedule {kept} --microbatches 2" in said


def test_a_run_that_goes_on_in_an_order_of_another_name_is_told_so(tmp_path: Path) -> None:
    assert what_changed({"schedule": "1f1b"}, tmp_path, "Schedule1F1B", None) is None
    assert what_changed({}, tmp_path, "1f1b", None) is None
    assert what_changed({"schedule": "of tomorrow"}, tmp_path, "1f1b", None) is not None
    said = what_changed({"schedule": "zb_h1"}, tmp_path, "own.csv", build("1f1b", 2, 2))
    assert said is not None
    assert said.endswith("--schedule zb_h1")


def differing(rank: int, folder: Path) -> str:
    """The same name, and on each rank another order."""
    path = folder / str(rank) / "own.csv"
    path.parent.mkdir()
    path.write_text(to_torch_csv(build(("1f1b", "gpipe")[rank], 2, 2)))
    config = replace(RUN, schedule=str(path))
    object.__setattr__(config, "schedule", "own.csv")
    with pytest.raises(ValueError, match="order in the schedule's file") as refusal:
        trainer(config, MODEL)
    return str(refusal.value)


def test_ranks_that_read_different_files_of_one_name_all_refuse(tmp_path: Path) -> None:
    first, second = on_ranks(2, differing, tmp_path, timeout_s=60)
    assert first == second


def test_a_name_that_is_none_says_that_a_file_may_be_given() -> None:
    with pytest.raises(
        ValueError, match=r"unknown schedule '\{own\}'.*or a file that ends in \.csv"
    ):
        TrainConfig(schedule="{own}")
