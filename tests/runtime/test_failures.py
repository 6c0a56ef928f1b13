"""A failure on one rank is an error on every rank that names its origin; nothing hangs."""

import math
import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, StepFailed
from course_pp.schedule import Schedule, build
from tests.grids import crossed
from tests.processes import no_process_left
from tests.runtime.failing import (
    LIMIT_S,
    NAMED,
    SAMPLES,
    WIDTH,
    Caught,
    Fragile,
    M,
    Trouble,
    Where,
    assert_all_say,
    batch,
    caught,
    die,
    fragile,
    going_wrong,
    oversleep,
    run,
    trouble,
)
from tests.runtime.small import for_rank, stages_of, take_step

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with no_process_left():
        yield


def assert_failed(one: Caught, steps: int = 0) -> None:
    """With the pipeline's own error, in that step, and soon."""
    assert (one.kind, one.steps) == ("StepFailed", steps), one
    assert one.seconds < 10


RAISING = [
    *(("1f1b", 2, action) for action in ("0F0", "1B3")),
    *(("1f1b", 3, action) for action in ("0F2", "1F1", "2F3", "0B0", "1B2", "2B0")),
    *(("gpipe", 4, action) for action in ("0F3", "2F0", "3F3", "3B0", "1B3")),
    *(("zb_h1", 3, action) for action in ("1I1", "1W1")),
    *(("zb_v", 2, action) for action in ("0F0", "1F2", "2I1")),
    *(("zb_v", 3, action) for action in ("5F1", "4I2")),
    ("pipedream", 2, "1F2"),
    ("pipedream", 3, "1B2"),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "n", "action", "step"), crossed(RAISING, [0, 2]))
def test_a_stage_that_raises_is_named_on_every_rank(
    name: str, n: int, action: str, step: int
) -> None:
    schedule = build(name, n, M)
    where = Where(action, step)
    assert_all_say(run(schedule, [where]), schedule, where, "Trouble: the cable is loose")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "n", "step"), crossed([("1f1b", 3), ("gpipe", 2), ("gpipe", 4), ("zb_v", 2)], [0, 1])
)
def test_raising_in_the_very_last_action_reaches_ranks_that_have_done_theirs(
    name: str, n: int, step: int
) -> None:
    schedule = build(name, n, M)
    for rank in range(n):
        where = Where(str(schedule.actions[rank][-1].parts[-1]), step)
        assert_all_say(run(schedule, [where]), schedule, where, "Trouble: the cable is loose")


def test_a_stage_that_raises_while_it_recomputes_is_named_with_the_backward() -> None:
    schedule = build("1f1b", 2, M)
    # With recomputation the sixth call of the first stage is in its second backward.
    found = on_ranks(2, raising_at_call, schedule, 5, timeout_s=LIMIT_S)
    origins = {one.origin for one in found}
    assert len(origins) == 1
    assert re.match(
        r"rank 0, stage 0, microbatch \d, action 0[FB]\d: Trouble: the cable is loose",
        origins.pop(),
    )


def raising_at_call(rank: int, schedule: Schedule, call: int) -> Caught:
    module = Fragile(rank)
    module.mischief = {("F", call): trouble} if rank == 0 else {}
    return caught(Pipeline(schedule, module, F.mse_loss, recompute=True, timeout_s=20), 1, *batch())


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("1f1b", ["0F0", "2F0"]),
        ("1f1b", ["0F3", "1F1"]),
        ("1f1b", ["1B0", "2F1"]),
        ("gpipe", ["0F1", "1F0", "2F0"]),
    ],
)
def test_when_several_ranks_fail_each_rank_names_one_of_them(name: str, actions: list[str]) -> None:
    schedule = build(name, 3, M)
    wheres = [Where(action) for action in actions]
    found = run(schedule, wheres)
    origins = {where.text(schedule) + "Trouble: the cable is loose" for where in wheres}
    for one in found:
        assert_failed(one)
        assert one.origin in origins


def test_a_long_account_is_cut_and_still_says_where() -> None:
    schedule = build("1f1b", 2, M)
    where = Where("0F1")

    def raise_at_length() -> None:
        raise Trouble("längst " * 500)

    guilty, told = run(schedule, [where], raise_at_length)
    assert len(guilty.origin) > 3000
    assert told.origin.startswith(where.text(schedule) + "Trouble: längst längst")
    assert 450 < len(told.origin.encode()) <= 560
    assert guilty.origin.startswith(told.origin.rstrip("\N{REPLACEMENT CHARACTER}"))


def in_a_child(rank: int, *args: Any) -> tuple[int | None, Caught | None]:
    """Run ``going_wrong`` in a child, as a launcher ends all ranks when one dies."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)

    def work() -> None:
        dist.init_process_group("gloo")
        there.send(asdict(going_wrong(rank, *args)))

    child = fork.Process(target=work, daemon=True)
    child.start()
    there.close()
    result = None
    with suppress(EOFError):
        result = Caught(**here.recv()) if here.poll(LIMIT_S - 5) else None
    if result is None and child.is_alive():
        child.kill()
    child.join()
    return child.exitcode, result


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "n", "action", "step"),
    crossed(
        [
            *[
                ("1f1b", 2, "1F1"),
                ("1f1b", 3, "0F1"),
                ("gpipe", 3, "2B1"),
                ("1f1b", 4, "2F1"),
                ("zb_v", 2, "1F1"),
            ],
            ("pipedream", 3, "1B2"),
        ],
        [0, 1],
    ),
)
def test_when_a_rank_is_killed_the_others_say_what_they_waited_for_from_whom(
    name: str, n: int, action: str, step: int
) -> None:
    schedule = build(name, n, M)
    where = Where(action, step)
    guilty = schedule.rank_of(where.parsed.stage, where.parsed.microbatch)
    found = on_ranks(n, in_a_child, schedule, [where], die, {}, timeout_s=LIMIT_S, backend=None)
    assert found[guilty] == (-signal.SIGKILL, None)
    survivors = [rank for rank in range(n) if rank != guilty]
    for rank in survivors:
        exit_code, one = found[rank]
        assert exit_code == 0
        assert one is not None
        assert_failed(one, step)
        assert NAMED.match(one.origin), one.origin
        assert re.search(
            r"(waited for|sending|cannot be sent|cannot be heard any more)", one.origin
        ), one.origin
    assert any(f"rank {guilty}" in one.origin for _, one in found if one is not None)


@pytest.mark.parametrize(
    ("name", "n", "action", "transport"),
    crossed(
        [("1f1b", 2, "1F1"), ("1f1b", 3, "0F1"), ("zb_v", 2, "2F0")], ["gloo", "gloo without tags"]
    ),
)
def test_a_peer_that_sends_too_late_is_an_error_on_every_rank(
    name: str, n: int, action: str, transport: str
) -> None:
    schedule = build(name, n, M)
    where = Where(action, 1)
    guilty = schedule.rank_of(where.parsed.stage, where.parsed.microbatch)
    found = run(schedule, [where], oversleep, timeout_s=1.0, transport=transport)
    for one in found:
        assert_failed(one, steps=1)
        assert NAMED.match(one.origin), one.origin
    waiting = [one.origin for rank, one in enumerate(found) if rank != guilty]
    late = re.compile(
        r": waited for the (activation|gradient) of microbatch \d from stage \d from rank"
        rf" {guilty}, at most 1 s"
    )
    assert any(late.search(origin) for origin in waiting), waiting


def absent(rank: int, schedule: Schedule, missing: int) -> Caught:
    modules = {stage: Fragile(stage) for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, modules, F.mse_loss, timeout_s=1)
    if rank == missing:
        time.sleep(2)
        return Caught(0)
    return caught(pipeline, 1, *for_rank(rank, schedule, *batch()))


@pytest.mark.parametrize("missing", [0, 2, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_never_steps_is_waited_for_no_longer_than_the_limit(missing: int) -> None:
    schedule = build("1f1b", 3, M)
    found = on_ranks(3, absent, schedule, missing, timeout_s=LIMIT_S)
    for rank, one in enumerate(found):
        if rank != missing:
            assert_failed(one)
            assert NAMED.match(one.origin), one.origin
    assert any(f"from rank {missing}, at most 1 s" in one.origin for one in found)


def not_finite(
    rank: int, schedule: Schedule, value: float, microbatch: int
) -> tuple[list[float], list[int], float]:
    """Return the losses of ``step`` and ``eval`` that are not finite, and of a step after."""
    modules = {stage: Fragile(stage) for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, modules, F.mse_loss, timeout_s=20)
    inputs, targets = batch()
    poisoned = inputs.clone()
    poisoned[microbatch * SAMPLES // M] = value
    given = for_rank(rank, schedule, poisoned, targets)
    loss = take_step(pipeline, *given).item()
    odd = [i for i, share in enumerate(pipeline.shares) if not math.isfinite(share)]
    losses = [loss, pipeline.eval(given[0], target=given[1]).item()]
    return losses, odd, take_step(pipeline, *for_rank(rank, schedule, inputs, targets)).item()


@pytest.mark.parametrize(
    ("name", "n", "value"),
    crossed(
        [("1f1b", 2), ("gpipe", 3), ("zb_v", 2), ("1f1b", 1)], [(float("nan"),), (float("inf"),)]
    ),
)
def test_a_loss_that_is_not_finite_is_returned_everywhere_and_the_pipeline_can_go_on(
    name: str, n: int, value: float
) -> None:
    schedule = build(name, n, M)
    microbatch = 2
    for losses, odd, after in on_ranks(
        n, not_finite, schedule, value, microbatch, timeout_s=LIMIT_S
    ):
        assert not any(map(math.isfinite, losses))
        assert odd == [microbatch]
        assert math.isfinite(after)


class Changing(nn.Module):
    """A layer whose output fits the next one for ``healthy`` calls; then it is changed."""

    def __init__(self, change: Callable[[Tensor], Tensor], healthy: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.change = change
        self.healthy = healthy

    def forward(self, x: Tensor) -> Tensor:
        self.healthy -= 1
        return self.layer(x) if self.healthy >= 0 else self.change(self.layer(x))


def mismatched(
    rank: int, schedule: Schedule, change: Callable[[Tensor], Tensor], step: int
) -> Caught:
    module = Changing(change, step * M) if rank == 0 else nn.Linear(WIDTH, WIDTH)
    return caught(Pipeline(schedule, module, F.mse_loss, timeout_s=20), 3, *batch(torch.float32))


@pytest.mark.parametrize(
    ("change", "what"),
    [(lambda y: y[:, 1:], "shapes cannot be multiplied"), (Tensor.double, "same dtype")],
    ids=["shape", "dtype"],
)
@pytest.mark.parametrize(("name", "n", "step"), [("1f1b", 2, 1), ("gpipe", 3, 0)])
def test_what_the_next_stage_cannot_take_is_that_stages_error(
    name: str, n: int, step: int, change: Callable[[Tensor], Tensor], what: str
) -> None:
    schedule = build(name, n, M)
    where = Where("1F0", step)
    found = on_ranks(n, mismatched, schedule, change, step, timeout_s=LIMIT_S)
    for one in found:
        assert_failed(one, step)
        assert one.origin.startswith(where.text(schedule) + "RuntimeError: "), one.origin
        assert what in one.origin


class Strange(nn.Module):
    """Returns what cannot be sent."""

    def forward(self, x: Tensor) -> Any:
        return {"x": {x}}


def unsendable(rank: int, schedule: Schedule) -> Caught:
    module = Strange() if rank == 1 else nn.Identity()
    return caught(Pipeline(schedule, module, F.mse_loss, timeout_s=20), 1, *batch())


def test_what_cannot_cross_a_boundary_is_refused_on_every_rank() -> None:
    schedule = build("1f1b", 3, M)
    where = Where("1F0")
    found = on_ranks(3, unsendable, schedule, timeout_s=LIMIT_S)
    assert_all_say(found, schedule, where, found[1].origin.partition(": ")[2])
    assert "TypeError: a set cannot cross a stage boundary: return tensors" in found[1].origin


class Wide(nn.Module):
    """A layer whose output is too large for more than two receives to be posted ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            time.sleep(0.3)  # the stage before has sent all by now
            trouble()
        return self.layer(x)


def failing_with_mail_on_its_way(rank: int, schedule: Schedule, transport: str) -> list[Caught]:
    module = Wide()
    x = torch.randn(64 * schedule.n_microbatches, 256)
    first = Pipeline(schedule, module, F.mse_loss, timeout_s=20, transport=transport)
    ended = [caught(first, 1, x, x)]
    module.breaks = rank == 1
    ended.append(caught(first, 1, x, x))
    module.breaks = False
    return [
        *ended,
        caught(Pipeline(schedule, module, F.mse_loss, timeout_s=20, transport=transport), 2, x, x),
    ]


@pytest.mark.parametrize(("n", "transport"), crossed([2, 3], ["gloo", "gloo without tags"]))
def test_messages_that_nobody_takes_any_more_delay_no_rank_and_leave_the_group_in_order(
    n: int, transport: str
) -> None:
    schedule = build("gpipe", n, 8)
    found = on_ranks(n, failing_with_mail_on_its_way, schedule, transport, timeout_s=LIMIT_S)
    assert_all_say(
        [second for _, second, _ in found], schedule, Where("1F0"), "Trouble: the cable is loose"
    )
    for first, second, third in found:
        assert (first, third) == (Caught(1), Caught(2))
        assert second.seconds < 4


def test_the_launcher_shows_the_traceback_of_the_rank_where_it_began() -> None:
    with pytest.raises(StepFailed, match="rank 1, stage 1") as caught_here:
        on_ranks(2, fails_on_rank_one, timeout_s=20.0)
    assert "Raised first on rank 1 of 2" in str(caught_here.value.__notes__)
    assert 'raise Trouble("the cable is loose")' in str(caught_here.value.__cause__)


def fails_on_rank_one(rank: int) -> None:
    pipeline = Pipeline(build("1f1b", 2, M), fragile(rank, [Where("1F0")], trouble), F.mse_loss)
    take_step(pipeline, *batch())
