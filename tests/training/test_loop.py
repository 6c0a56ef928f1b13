"""What the loop does beside training: garbage at fixed steps, another time limit once the first step is done."""

import gc
import time
from dataclasses import replace
from typing import Any

from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig
from tests.training.small import RUN, trainer


def collections(rank: int) -> tuple[list[int], list[bool], bool]:
    """After which steps garbage was collected, whether Python would have, and whether it will again."""
    run, seen, enabled = trainer(replace(RUN, steps=5, gc_every=2), layout=DistributedConfig()), [], []

    def heard(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            seen.append(run.step)

    gc.callbacks.append(heard)
    run.fit(lambda *_: enabled.append(gc.isenabled()))
    gc.callbacks.remove(heard)
    return [step for step in seen if 0 < step <= 4], enabled, gc.isenabled()


def test_garbage_is_collected_at_fixed_steps() -> None:
    [(seen, enabled, after)] = on_ranks(1, collections, timeout_s=60)
    assert seen == [2, 4]
    assert enabled == [False] * 5
    assert after


def late(rank: int) -> tuple[list[int], str]:
    """Steps that were done, and what ended the run, where rank 1 is late before the first step and after it."""
    run, done = trainer(replace(RUN, step_timeout=0.3)), []

    def after_step(*_: Any) -> None:
        done.append(run.step)
        if rank == 1:
            time.sleep(2)

    if rank == 1:
        time.sleep(1)
    try:
        run.fit(after_step)
    except RuntimeError as error:
        return done, type(error).__name__
    return done, "nothing"


def test_the_first_step_may_take_longer_than_the_others() -> None:
    first, _ = on_ranks(2, late, timeout_s=60)
    assert first[0] == [1]
    assert first[1] != "nothing"
