"""A pipeline refuses wrong arguments on every rank, with a remedy."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.schedule import Schedule, build
from tests.processes import no_process_left
from tests.runtime.failing import (
    LIMIT_S,
    WIDTH,
    Caught,
    Fragile,
    M,
    Where,
    assert_all_say,
    batch,
    caught,
)
from tests.runtime.small import parse

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with no_process_left():
        yield


BAD_STEPS: dict[str, tuple[dict[str, Any], int, str]] = {
    # What a step is given instead, on which rank it is missed, and how that rank says it.
    "no inputs": (
        {"inputs": None},
        0,
        "inputs is None on a rank that needs it: give a batch, or 4 microbat",
    ),
    "a list": (
        {"inputs": [torch.ones(1, WIDTH)] * 4},
        0,
        "inputs is a list: give a batch in one piece, or 4 ready-made",
    ),
    "a batch too small": (
        {"targets": torch.ones(3, WIDTH)},
        2,
        "targets has tensors of 3 samples, to be cut into 4",
    ),
    "an array": ({"inputs": object()}, 0, "inputs: a object cannot"),
    "a microbatch without samples": (
        {
            "inputs": None,
            "targets": None,
            "arg_mbs": [(torch.ones(n, WIDTH).double(),) for n in (2, 0, 2, 2)],
            "target_mbs": [torch.ones(n, WIDTH).double() for n in (2, 0, 2, 2)],
        },
        2,
        "the targets of microbatch 1 have no samples",
    ),
    "a mean over nothing": (
        {"divisor": 0},
        -1,
        "divisor is 0: give the number of tokens that the mean is over",
    ),
}


def bad_step(rank: int, schedule: Schedule, given: Mapping[str, Any]) -> tuple[Caught, Caught]:
    pipeline = Pipeline(schedule, Fragile(rank), F.mse_loss, timeout_s=20)
    inputs, targets = batch()
    arguments: dict[str, Any] = {"inputs": inputs, "targets": targets, "divisor": None, **given}
    return caught(pipeline, 1, **arguments), caught(pipeline, 1, **arguments)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("given", "guilty", "says"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_with_bad_arguments_says_so_on_the_rank_and_is_over_on_the_others(
    given: Mapping[str, Any], guilty: int, says: str
) -> None:
    for rank, (first, second) in enumerate(
        on_ranks(3, bad_step, build("1f1b", 3, M), given, timeout_s=LIMIT_S)
    ):
        if guilty in (rank, -1):
            assert first.kind in ("ValueError", "TypeError")
            assert first.text.startswith(says), first.text
        else:
            assert first.kind == "StepFailed"
            assert f"rank {guilty}, before the first action: " in first.origin, first.origin
            assert says[:60] in first.origin
        assert first.seconds < 10
        assert second.kind == "RuntimeError"
        assert second.text.startswith(
            "this pipeline cannot go on, build another one; its last step failed: rank "
        )


def not_scalar(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def no_tensor(output: Tensor, target: Tensor) -> Any:
    return (output - target).square().mean().item()


def with_loss(rank: int, schedule: Schedule, loss_fn: Any) -> Caught:
    return caught(Pipeline(schedule, Fragile(rank), loss_fn, timeout_s=20), 1, *batch())


@pytest.mark.parametrize(
    ("loss_fn", "returned"),
    [(not_scalar, "a tensor of shape (2, 4)"), (no_tensor, "a float")],
    ids=["per element", "a float"],
)
def test_a_loss_that_is_no_scalar_tensor_is_an_error_of_the_last_stage(
    loss_fn: Any, returned: str
) -> None:
    schedule = build("1f1b", 2, M)
    found = on_ranks(2, with_loss, schedule, loss_fn, timeout_s=LIMIT_S)
    what = (
        f"ValueError: loss_fn returned {returned}: return a scalar tensor, the mean over the"
        " microbatch"
    )
    assert_all_say(found, schedule, Where("1F0"), what)


def refused(
    rank: int, arguments: Sequence[tuple[Schedule, Any, Mapping[str, Any]]]
) -> tuple[str, float]:
    """Return the constructor's refusal of each rank's arguments, and its time."""
    schedule, stages, options = arguments[rank]
    started = time.monotonic()
    try:
        Pipeline(schedule, stages, **{"loss_fn": F.mse_loss, "timeout_s": 20, **options})
    except ValueError as error:
        return str(error), time.monotonic() - started
    return "nothing", time.monotonic() - started


GOOD = build("1f1b", 2, M)
LAYER = nn.Linear(WIDTH, WIDTH)
UPDATING = parse("0F0 0B0 0U0", "1F0 1B0 1U0")
REPLICATED = parse("0F0 0B0", "0F1 0B1", placement=[(0, 1)])
STUCK = parse("0B0 0F0", "1F0 1B0")
BAD_PIPELINES: dict[str, tuple[list[tuple[Schedule, Any, Mapping[str, Any]]], str]] = {
    # Each rank's arguments, and what all ranks say.
    "too many ranks": (
        [(build("1f1b", 3, M), LAYER, {})] * 2,
        r"3 ranks.* on a group of 2 ranks: build it with n_ranks=2",
    ),
    "an illegal schedule": ([(STUCK, LAYER, {})] * 2, r"cannot run: .*0B0"),
    "updates": (
        [(UPDATING, LAYER, {})] * 2,
        r"updates weights within the step \(U\): pass optimizers",
    ),
    "no time": (
        [(GOOD, LAYER, {"timeout_s": 0})] * 2,
        r"timeout_s is 0 \(an int\): give seconds above 0",
    ),
    "a number as loss on one rank": (
        [(GOOD, LAYER, {}), (GOOD, LAYER, {"loss_fn": 3})],
        r"rank 1: .*loss_fn is 3: pass a function",
    ),
    "an unknown transport": (
        [(GOOD, LAYER, {"transport": "mpi"})] * 2,
        r"transport 'mpi' cannot carry tensors on cpu",
    ),
    "NCCL without it": (
        [(GOOD, LAYER, {"transport": "nccl"})] * 2,
        r"transport 'nccl' cannot carry tensors on cpu",
    ),
    "stages of another rank": (
        [(GOOD, {1: LAYER}, {}), (GOOD, {0: LAYER}, {})],
        (
            r"rank 0: given stages \[1\], but the schedule places stages \[0\] here: pass \{stage:"
            r" module\}"
        ),
    ),
    "one module for two stages": (
        [(build("zb_v", 2, M), LAYER, {})] * 2,
        r"given one Linear, but .* stages \[0, 3\] here",
    ),
    "another order on one rank": (
        [(GOOD, LAYER, {}), (build("gpipe", 2, M), LAYER, {})],
        r"""rank 1 was given schedule="Schedule\('gpipe'""",
    ),
    "recomputing on one rank": (
        [(GOOD, LAYER, {"recompute": True}), (GOOD, LAYER, {})],
        r"rank 1 was given recompute=False, rank 0 True",
    ),
    "a tie to nothing": (
        [(GOOD, LAYER, {"tied": [{0: "weight", 1: "head"}]})] * 2,
        r"stage 1 has no parameter 'head'; it has weight, bias",
    ),
    "a tie of one": (
        [(GOOD, LAYER, {"tied": [{0: "weight"}]})] * 2,
        r"is in 1 stage: give a name for each of at least two",
    ),
    "a time in letters on one rank": (
        [(GOOD, LAYER, {}), (GOOD, LAYER, {"timeout_s": "60"})],
        r"rank 1: Pipeline: timeout_s is '60' \(a str\): pass a number",
    ),
    "replicas of different shapes": (
        [(REPLICATED, LAYER, {}), (REPLICATED, nn.Linear(WIDTH, 2), {})],
        (
            rf"rank 1 has 'weight' of stage 0 as \(2, {WIDTH}\) torch.float32 trained of value \w+,"
            r" another replica as"
        ),
    ),
    "replicas that start apart": (
        [(REPLICATED, LAYER, {}), (REPLICATED, nn.Linear(WIDTH, WIDTH), {})],
        (
            r"rank 1 has 'weight' of stage 0 as .* of value .*, another replica as .*: give all"
            r" replicas of a stage the"
        ),
    ),
    "ties on one rank": (
        [(GOOD, LAYER, {"tied": [{0: "weight", 1: "weight"}]}), (GOOD, LAYER, {})],
        r"rank 1 was given tied=None, rank 0 \[\{",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("arguments", "says"), BAD_PIPELINES.values(), ids=BAD_PIPELINES)
def test_a_pipeline_that_cannot_work_is_refused_on_every_rank_before_the_first_message(
    arguments: list[tuple[Schedule, Any, Mapping[str, Any]]], says: str
) -> None:
    for text, seconds in on_ranks(2, refused, arguments, timeout_s=LIMIT_S):
        assert re.search(says, text), text
        assert seconds < 10
