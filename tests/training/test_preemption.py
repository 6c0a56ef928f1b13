"""A signal that reaches one rank ends the run on all of them, with a whole checkpoint."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from course_pp.launch import on_ranks
from course_pp.training import Trainer
from course_pp.training.checkpoint import find_latest
from course_pp.training.checkpointer import Checkpointer
from course_pp.training.preemption import Preempted, Preemption
from tests.processes import no_process_left
from tests.training.small import RUN, trainer

ASKING = (signal.SIGUSR1, signal.SIGTERM)


def preempted(rank: int, root: Path, options: dict[str, Any]) -> tuple[str, list[Any]]:
    """The end of a run whose second rank hears signals twice, and the handlers afterwards."""

    def signals_in_step_two(run: Trainer, result: Any) -> None:
        if rank == 1 and run.step == 2:
            for number in (*ASKING, *ASKING):
                os.kill(os.getpid(), number)
        checkpointer.after_step(run, result)

    run = trainer(RUN)
    try:
        with Preemption() as preemption:
            checkpointer = Checkpointer(
                run, root, device_mesh=run._mesh, preemption=preemption, **options
            )
            with checkpointer:
                checkpointer.resume()
                run.fit(signals_in_step_two)
    except Preempted as error:
        after = [signal.getsignal(number) for number in ASKING]
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)
        return str(error), after
    return f"ended after step {run.step}", []


@pytest.mark.parametrize(
    "options", [{}, {"asynchronous": True, "save_every": 1}], ids=["sync", "async"]
)
def test_all_ranks_save_and_stop_when_one_hears_a_signal_and_go_on_later(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with no_process_left():
        first, second = on_ranks(2, preempted, tmp_path, options, timeout_s=60)
        assert first == second
        assert first == (
            f"SIGTERM: saved in {tmp_path} after step 2; go on with --checkpoint-dir {tmp_path}",
            [1, 1],
        )
        found = find_latest(tmp_path)
        assert found is not None
        assert found.name == "step_00000002"
        assert [said for said, _ in on_ranks(2, preempted, tmp_path, options, timeout_s=60)] == [
            "ended after step 3"
        ] * 2


def test_signals_mean_again_what_they_meant_when_a_run_ends_by_itself() -> None:
    before = [signal.getsignal(number) for number in ASKING]
    with Preemption() as preemption:
        assert preemption.agreed() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.agreed() is signal.SIGUSR1
    assert [signal.getsignal(number) for number in ASKING] == before
