"""A trainer's run through real checkpoints: failures while saving, and resuming."""

import json
import math
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig, clip_grad_norm_
from course_pp.training import TrainConfig, Trainer
from course_pp.training.checkpoint import (
    AsyncSaver,
    CheckpointError,
    diff,
    find_latest,
    load,
    save,
    saving,
    verify,
)
from course_pp.training.checkpointer import Checkpointer
from course_pp.training.logs import METRICS, Logs
from course_pp.training.optim import build_scheduler
from course_pp.training.preemption import Preempted, Preemption
from course_pp.training.trainer import NonFiniteGradient
from tests.processes import no_process_left
from tests.training.checkpoint.small import SHARD, flip_byte
from tests.training.small import MODEL, RUN, trainer

ALONE, PIPELINE, SHARDED = (
    DistributedConfig(),
    DistributedConfig(pp=2),
    DistributedConfig(dp_shard=2),
)
RUNTIME = replace(RUN, engine="runtime")


def run(n_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    with no_process_left():
        return on_ranks(n_ranks, fn, *args, timeout_s=60)


def trained(
    rank: int,
    config: TrainConfig,
    layout: DistributedConfig,
    root: Path,
    source: Path | str = "auto",
) -> tuple[list[float], list[list[Any]], list[str]]:
    """Losses of the steps to the last, the rows of this rank's first stage, and warnings."""
    losses: list[float] = []
    rows: list[list[Any]] = []
    run = trainer(config, MODEL, layout)

    def look(_: Any, inputs: tuple[Any, ...]) -> None:
        if run.modules[0].training:
            rows[-1].extend(inputs[0].tolist())

    def after_step(_: Trainer, result: Any) -> None:
        losses.append(result.loss)
        checkpointer.after_step(run, result)
        rows.append([])

    if run.modules[0].stage_id == 0:
        run.modules[0].register_forward_pre_hook(look)
    random.seed(0)
    with (
        warnings.catch_warnings(record=True) as said,
        Checkpointer(run, root, device_mesh=run._mesh, save_every=1) as checkpointer,
    ):
        checkpointer.resume(source)
        rows.append([])
        run.fit(after_step)
    return (
        losses,
        rows[:-1],
        [str(warning.message) for warning in said if warning.category is UserWarning],
    )


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[float], list[list[Any]]]:
    """Folder, losses and rows of a run of one rank."""
    root = tmp_path_factory.mktemp("uninterrupted")
    ((losses, rows, _),) = run(1, trained, RUN, ALONE, root)
    return root, losses, rows


def test_another_number_of_data_parallel_ranks_goes_on_with_the_same_rows(
    uninterrupted: tuple[Path, list[float], list[list[Any]]], tmp_path: Path
) -> None:
    root, losses, rows = uninterrupted
    ranks = run(2, trained, RUN, SHARDED, tmp_path, root / "step_00000001")
    for mine, _, _ in ranks:
        assert mine == pytest.approx(losses[1:], rel=1e-11)
    parts = zip(*(seen for _, seen, _ in ranks), strict=True)
    assert [[*first, *second] for first, second in parts] == rows[1:]
    assert all(len(part) == RUN.batch // 2 for _, seen, _ in ranks for part in seen)


def test_a_run_goes_on_with_the_other_engine_and_back(
    uninterrupted: tuple[Path, list[float], list[list[Any]]], tmp_path: Path
) -> None:
    root, losses, _ = uninterrupted
    there = run(2, trained, RUNTIME, PIPELINE, tmp_path / "there", root / "step_00000001")
    back = run(1, trained, RUN, ALONE, tmp_path / "back", tmp_path / "there" / "step_00000002")
    for ranks, first in ((there, 1), (back, 2)):
        for mine, *_ in ranks:
            assert mine == pytest.approx(losses[first:], rel=1e-11)


def test_auto_takes_the_checkpoint_before_a_damaged_one_and_replaces_that(
    uninterrupted: tuple[Path, list[float], list[list[Any]]], tmp_path: Path
) -> None:
    root, losses, _ = uninterrupted
    run(1, trained, RUN, ALONE, tmp_path)
    flip_byte(tmp_path / "step_00000003" / SHARD)
    ((again, _, said),) = run(1, trained, RUN, ALONE, tmp_path)
    assert again == losses[2:]
    assert any("step_00000002, because newer ones are not whole" in words for words in said)
    assert diff(tmp_path / "step_00000003", root / "step_00000003") == []


def with_a_full_disk(rank: int, root: Path, logs: Path) -> tuple[int, list[str]]:
    """Steps taken and warnings of a run whose log folder is full from step 2 on."""
    write = Logs.write

    def write_to_a_full_disk(self: Logs, event: str, step: int, values: Any) -> None:
        if step == 2:
            self._file = open("/dev/full", "a")  # noqa: SIM115
        write(self, event, step, values)

    Logs.write = write_to_a_full_disk  # type: ignore[method-assign]
    run = trainer(replace(RUN, log_folder=str(logs), log_every=1), MODEL, PIPELINE)
    with (
        warnings.catch_warnings(record=True) as said,
        Checkpointer(run, root, device_mesh=run._mesh, save_every=3) as checkpointer,
    ):
        fitted = run.fit(checkpointer.after_step)
    return fitted.steps, [
        str(warning.message) for warning in said if str(logs) in str(warning.message)
    ]


def test_a_run_whose_log_folder_is_full_goes_on_and_saves(tmp_path: Path) -> None:
    told = run(2, with_a_full_disk, tmp_path / "saved", tmp_path / "logs")
    assert [steps for steps, _ in told] == [3, 3]
    assert sorted(len(said) for _, said in told) == [0, 1]
    latest = find_latest(tmp_path / "saved")
    assert latest is not None
    assert latest.name == "step_00000003"
    lines = (tmp_path / "logs" / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def ending(rank: int, root: Path, what: str) -> tuple[str, list[str]]:
    """The error and the warnings of a run whose save of step 2 fails or is slow."""
    real = saving._write

    def write(root: Path, snapshot: Any, **rest: Any) -> Any:
        if snapshot.step == 2 and what == "signal":
            raise CheckpointError("the disk is full for a moment")
        return real(root, snapshot, **rest)

    def after_step(_: Trainer, result: Any) -> None:
        if run.step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.after_step(run, result)
        if run.step == 2 and what == "divergence":
            next(run.modules[0].parameters()).data.view(-1)[0] = math.nan

    run = trainer(replace(RUN, steps=6))
    saving._write = write
    try:
        with warnings.catch_warnings(record=True) as said, Preemption() as preemption:
            checkpointer = Checkpointer(
                run,
                root,
                device_mesh=run._mesh,
                save_every=2,
                asynchronous=True,
                preemption=preemption,
            )
            with checkpointer:
                run.fit(after_step)
    except (Preempted, NonFiniteGradient) as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return str(error), [
            str(warning.message) for warning in said if warning.category is UserWarning
        ]
    finally:
        saving._write = real
    return "nothing", []


def test_a_run_that_is_preempted_after_a_save_failed_saves_nevertheless(tmp_path: Path) -> None:
    (first, said), (second, _) = run(2, ending, tmp_path, "signal")
    assert first == second
    assert first.startswith(f"SIGTERM: saved in {tmp_path} after step 3")
    assert any("not completed in the background: the disk is full" in words for words in said)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.name == "step_00000003"


def test_a_run_that_diverges_completes_the_save_that_goes_on(tmp_path: Path) -> None:
    (first, _), (second, _) = run(2, ending, tmp_path, "divergence")
    assert first == second
    assert "step 3: the norm of the gradient is nan" in first
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
    assert verify(tmp_path / "step_00000002") == []


def refusals(rank: int, root: Path, source: Path) -> list[str]:
    """What is said before training of runs that could not be taken up, or not be saved."""
    run = trainer(RUN)
    said = []
    (root / "file").touch()
    for folder in ("later", "mixed"):
        (root / folder / "step_00000003").mkdir(parents=True, exist_ok=True)
    attempts: list[tuple[str, Any, int]] = [
        ("file", "auto", 1),
        ("new", "", 1),
        ("new", "always", 1),
        ("new", root / "nothing", 1),
        ("new", "auto", 0),
        ("later", source, 1),
        ("later", "never", 1),
        ("later", "auto", 1),
        ("mixed", "auto", 1),
    ]
    refused = (
        r"cannot hold|must be auto|must be a whole number|is there already|none of the"
        r" checkpoints|has the name"
    )
    for folder, resume_from, save_every in attempts:
        with pytest.raises(ValueError, match=refused) as refusal:
            Checkpointer(run, root / folder, device_mesh=run._mesh, save_every=save_every).resume(
                resume_from
            )
        said.append(str(refusal.value))
    return said


def test_what_could_not_be_saved_or_taken_up_is_refused_on_every_rank_before_training(
    uninterrupted: tuple[Path, list[float], list[list[Any]]], tmp_path: Path
) -> None:
    whole = uninterrupted[0] / "step_00000001"
    shutil.copytree(whole, tmp_path / "mixed" / whole.name)
    first, second = run(2, refusals, tmp_path, whole)
    assert first == second
    expected = (
        "cannot hold checkpoints",
        "resume='' must be auto, never, or the path of a checkpoint",
        "resume='always' must be auto, never, or the path of a checkpoint",
        "nothing' must be auto, never, or the path of a checkpoint",
        "save_every=0 must be a whole number of at least 1",
        "step_00000003 is there already, and this run goes on from step 1: resume with auto",
        "step_00000003 is there already",
        "none of the checkpoints",
        "step_00000003 has the name of a checkpoint, but this version has not written it",
    )
    for words, sentence in zip(expected, first, strict=True):
        assert words in sentence


def resumed_from_one_group(rank: int, root: str) -> list[dict[str, Any]]:
    """Parameters after a run with one parameter group, as in version 1, and resumed half-way."""
    found = []
    for resumes in (False, True):
        run = trainer(RUN)
        if not resumes:
            parameters = [p for module in run.modules for p in module.parameters()]
            run.optimizer = torch.optim.AdamW(parameters, lr=RUN.lr, weight_decay=RUN.weight_decay)
            run.scheduler = build_scheduler(run.optimizer, RUN)
        with Checkpointer(
            run, None if resumes else root, device_mesh=run._mesh, save_every=1
        ) as checkpointer:
            if resumes:
                checkpointer.resume(Path(root) / "step_00000001")
                assert {group["weight_decay"] for group in run.optimizer.param_groups} == {
                    RUN.weight_decay
                }
            run.fit(checkpointer.after_step)
        found.append(
            {name: p.detach().clone() for m in run.modules for name, p in m.named_parameters()}
        )
    return found


def test_a_run_whose_optimizer_had_one_parameter_group_goes_on_as_it_began(tmp_path: Path) -> None:
    [(straight, resumed)] = on_ranks(1, resumed_from_one_group, str(tmp_path))
    for name, parameter in straight.items():
        assert resumed[name].equal(parameter), name


def alone_in(rank: int, root: Path) -> list[str]:
    """What is said where rank 0 is in one call, and rank 1 takes a step; then both train on."""
    run = trainer(RUN, MODEL, PIPELINE)
    mesh = run._mesh
    held = run.held.saved
    said = []
    checkpointer = Checkpointer(run, root, device_mesh=mesh, save_every=1 if rank == 0 else None)
    with AsyncSaver(root, device_mesh=mesh) as saver:
        for call in (
            lambda: save(root, 1, held, run.optimizer, device_mesh=mesh),
            lambda: load(root, held, device_mesh=mesh),
            lambda: saver.save(1, held),
            lambda: clip_grad_norm_(run.modules, 1.0, device_mesh=mesh),
            lambda: run.fit(checkpointer.after_step),
        ):
            with pytest.raises(ValueError, match="same calls") as refusal:
                (run.train_step if rank and "fit" not in call.__code__.co_names else call)()
            said.append(str(refusal.value).partition(":")[0])
    # Rank 0 alone looks: it may begin the next draft before rank 1 comes here.
    assert rank or not list(root.iterdir())

    saving = Checkpointer(run, root, device_mesh=mesh, save_every=1).after_step

    def by_another_way(*given: Any) -> None:
        saving(*given)

    run.fit(by_another_way if rank else saving)
    return said


def test_a_call_that_one_rank_alone_makes_is_named_on_both_before_any_message(
    tmp_path: Path,
) -> None:
    first, second = run(2, alone_in, tmp_path)
    assert first == second
    calls = ["save()", "load()", "save()", "clip_grad_norm_()", "after_step()"]
    assert first == [f"rank 0 is in {call}, rank 1 in train_step()" for call in calls]
