"""Ready-made microbatches and keyword arguments: one process's gradients, or a refusal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy
from course_pp.parallel import find_ties
from course_pp.runtime import Pipeline, Recorder, StepFailed, run_step
from course_pp.schedule import Schedule, build
from course_pp.step.batch import cut_keywords
from tests import packed
from tests.equality import Trained, assert_same_training, sharded_adamw, train
from tests.packed import STEPS
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stages_of, take_step
from tests.runtime.stepping import TOLERANCE, gradients

pytestmark = pytest.mark.timeout(60)

WIDTH, M = 4, 4


@dataclass(frozen=True)
class Case:
    schedule: str
    masked: bool = False
    recompute: bool = False


def trained(rank: int, cases: Sequence[Case], dp: int) -> list[tuple[Trained, list[Tensor] | None]]:
    mesh = init_device_mesh("cpu", (2, dp), mesh_dim_names=("pp", "data"))
    return [train_case(case, mesh) for case in cases]


def train_case(case: Case, mesh: DeviceMesh) -> tuple[Trained, list[Tensor] | None]:
    """Return the result of training, and the outputs of the first batch before it."""
    (rank, replica), dp, schedule = (
        mesh.get_coordinate(),
        mesh["data"].size(),
        build(case.schedule, 2, M),
    )
    whole = packed.model(tied=dp == 1)  # here weights that are sharded cannot be tied
    mine = {stage: whole.cut(schedule.n_stages)[stage] for stage in stages_of(rank, schedule)}
    for module in mine.values() if dp > 1 else ():
        fully_shard(module, mesh=mesh["data"])
    tied = (
        [{0: "parts.embed.weight", schedule.n_stages - 1: "parts.head.weight"}] if dp == 1 else []
    )
    options = {
        "group": mesh.get_group("pp"),
        "tied": tied,
        "recompute": case.recompute,
        "timeout_s": 20,
    }
    pipeline = Pipeline(schedule, mine, CrossEntropy(), **options)

    def given(i: int) -> dict[str, Any]:
        return packed.given(
            STEPS[i][replica::dp][:M], 0 in mine, schedule.n_stages - 1 in mine, case.masked
        )

    lists = given(0)
    outputs = pipeline.evaluate(arg_mbs=lists.get("arg_mbs"), kwarg_mbs=lists["kwarg_mbs"])
    held = list(mine.values())
    return (
        train(held, len(STEPS), lambda i: pipeline.step(**given(i)), sharded_adamw(held)),
        outputs,
    )


SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")
ON_2_RANKS = [
    *(Case(name, masked=name in ("zb_h1", "zb_v")) for name in SCHEDULES),
    *(Case(name, recompute=True) for name in ("1f1b", "zb_v")),
    Case("chimera"),
]
ON_4_RANKS = [Case(name) for name in SCHEDULES]


@pytest.mark.parametrize(
    ("cases", "dp"), [(ON_2_RANKS, 1), (ON_4_RANKS, 2)], ids=["pp", "with FSDP2"]
)
def test_packed_documents_are_as_good_as_alone(
    cases: Sequence[Case], dp: int, subtests: Any
) -> None:
    data = packed.of_ranks(dp)
    whole = packed.model(tied=dp == 1)
    with torch.no_grad():
        expected = [whole(rows.tokens, rows.offsets) for rows in data[0]]
    with no_process_left():
        ranks = on_ranks(2 * dp, trained, cases, dp, timeout_s=50)
    reference = packed.one_process(data, tied=dp == 1)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(case)):
            assert_same_training([each for each, _ in found], reference, tied=find_ties(whole))
            outputs = [output for _, each in found for output in each or ()]
            assert len(outputs) == M * dp * len(build(case.schedule, 2, M).placement[-1])
            for output, known in zip(outputs, 2 * expected, strict=False):
                torch.testing.assert_close(output, known, rtol=0, atol=TOLERANCE)


# A whole batch, with keyword arguments.

ROWS = 10  # microbatches of 3, 3, 2 and 2


class Keyed(nn.Module):
    """Takes something of every kind by keyword, and in the middle a value from another stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.writes = ("skip",) if stage == 0 else ()
        self.reads = ("skip",) if stage == 2 else ()

    def forward(
        self, x: Tensor, mask: Tensor, lengths: Any, table: Any, scale: float, skip: Any = 0.0
    ) -> Any:
        weight = mask * lengths.lengths[:, None] * scale + table.values.sum()
        x = torch.tanh(self.linear(x)) * weight + skip
        return (x, {"skip": x.sin()}) if self.writes else x


class Table:
    """Nothing that could be cut."""

    def __init__(self) -> None:
        self.values = torch.arange(3.0).double()


class Lengths(NamedTuple):
    lengths: Tensor


def keyed_stages(n: int = 3) -> list[Keyed]:
    torch.manual_seed(0)
    return [Keyed(stage).double() for stage in range(n)]


def keyed_batch() -> tuple[Tensor, Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x, y, mask = torch.randn(3, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    lengths = Lengths(torch.arange(ROWS).double())
    return x, y, {"mask": mask, "lengths": lengths, "table": Table(), "scale": 0.1}


SPEC: dict[str, Any] = {"lengths": "rows", "table": "same"}


def keyed_step(
    rank: int, schedule: Schedule, recompute: bool
) -> tuple[float, Any, dict[str, Tensor | None]]:
    stages, (x, y, kwargs) = keyed_stages(schedule.n_stages), keyed_batch()
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    recorder = Recorder(memory=True)
    pipeline = Pipeline(
        schedule, mine, F.mse_loss, recompute=recompute, recorder=recorder, timeout_s=20
    )
    inputs, target = for_rank(rank, schedule, x, y)
    loss = pipeline.step(inputs, target=target, kwargs_chunk_spec=SPEC, **kwargs).item()
    evaluated = pipeline.eval(inputs, target=target, kwargs_chunk_spec=SPEC, **kwargs)
    assert evaluated.item() == pytest.approx(loss, rel=TOLERANCE)
    outputs = pipeline.evaluate(inputs, on="all", kwargs_chunk_spec=SPEC, **kwargs)
    return loss, outputs, gradients(mine)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("name", "n"), [("1f1b", 3), ("zb_v", 2), ("chimera", 2)])
def test_keyword_arguments_of_a_whole_batch_are_cut_as_they_are_said_to_be(
    name: str, n: int, recompute: bool
) -> None:
    schedule = build(name, n, M)
    stages, (x, y, kwargs) = keyed_stages(schedule.n_stages), keyed_batch()
    h = x
    read = {}
    for stage in stages:
        h = stage(h, **kwargs, **{name: read[name] for name in stage.reads})
        h, read = h if stage.writes else (h, read)
    loss = F.mse_loss(h, y)
    loss.backward()
    expected = gradients(dict(enumerate(stages)))
    for found, outputs, theirs in on_ranks(n, keyed_step, schedule, recompute, timeout_s=30):
        assert found == pytest.approx(loss.item(), rel=TOLERANCE)
        torch.testing.assert_close(outputs, h, rtol=0, atol=TOLERANCE)
        for each, gradient in theirs.items():
            torch.testing.assert_close(gradient, expected[each], rtol=0, atol=TOLERANCE)


class Scaled(nn.Module):
    """A stage that scales by a keyword, named as one of the package's, or by its input."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, scale: Tensor | None = None, *, microbatch: Tensor | None = None
    ) -> Any:
        if microbatch is not None:
            return self.linear(x) * microbatch
        return self.linear(x) * scale if self.is_last else (self.linear(x) * scale, scale)


def updated(rank: int, recompute: bool) -> list[list[Tensor]]:
    """Return the parameters after a step with updates, scaled by keyword and by input."""
    x, y, kwargs = keyed_batch()
    found = []
    for by_keyword in (True, False):
        torch.manual_seed(rank)
        stage = Scaled(is_last=rank == 1).double()
        optimizers = {rank: torch.optim.SGD(stage.parameters(), lr=0.1)}
        options = {
            "optimizers": optimizers,
            "versions": "stash",
            "recompute": recompute,
            "timeout_s": 20,
        }
        pipeline = Pipeline(build("pipedream", 2, M), stage, F.mse_loss, **options)
        if by_keyword:
            pipeline.step(x, target=y, microbatch=kwargs["mask"])
        else:
            pipeline.step(x, kwargs["mask"], target=y)
        found.append(list(stage.parameters()))
    return found


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_stages_that_update_their_own_weights_take_keyword_arguments(recompute: bool) -> None:
    for by_keyword, sent_along in on_ranks(2, updated, recompute, timeout_s=30):
        torch.testing.assert_close(by_keyword, sent_along, rtol=0, atol=0)


def test_a_recorded_step_takes_lists_and_counts_no_memory_that_is_the_callers() -> None:
    x, y, kwargs = keyed_batch()
    parts = [list(each.tensor_split(M)) for each in (x, y, kwargs["mask"])]
    found = []
    for how in ("by keyword", "by position", "as a dict"):
        torch.manual_seed(0)
        recorder = Recorder(memory=True)
        given = {"target_mbs": parts[1]}
        pairs = list(zip(parts[0], parts[2], strict=True))
        if how == "by keyword":
            given |= {
                "arg_mbs": [(x,) for x, _ in pairs],
                "kwarg_mbs": [{"microbatch": mask} for _, mask in pairs],
            }
        else:
            given |= {
                "arg_mbs": [
                    ({"x": x, "microbatch": m},) if how == "as a dict" else (x, m) for x, m in pairs
                ]
            }
        stage = Scaled(is_last=True).double()
        loss, _ = run_step(
            build("1f1b", 1, M), stage, None, None, F.mse_loss, recorder=recorder, **given
        )
        found.append((loss.item(), recorder.memory()[0].peaks))
    assert found[0] == found[1] == found[2]


# What is refused, on every rank.

X, Y, KEYED = keyed_batch()
READY = [(each,) for each in X.tensor_split(M)]
KEYS = cut_keywords(KEYED, SPEC, ROWS, M)
TARGETS = list(Y.tensor_split(M))
WHOLE = {"inputs": X, "target": Y, "kwargs_chunk_spec": SPEC, **KEYED}
MADE = {"arg_mbs": READY, "kwarg_mbs": KEYS, "target_mbs": TARGETS}
SHORT = {
    **KEYED,
    "mask": KEYED["mask"][:M],
    "lengths": Lengths(torch.ones(M)),
    "kwargs_chunk_spec": SPEC,
}
BIAS = {"bias": torch.ones(M, 2, 2)}

REFUSED: dict[str, tuple[Sequence[dict[str, Any]], str]] = {
    "another length": (
        [{**MADE, "kwarg_mbs": KEYS[1:]}, MADE],
        "kwarg_mbs has 3 entries, but the schedule has 4",
    ),
    "whole beside ready": (
        [MADE, {**MADE, "target": Y}],
        "target is of a whole batch, and arg_mbs, kwarg_mbs, target",
    ),
    "whole on one rank": (
        [MADE, WHOLE],
        "one rank was given a whole batch, another ready-made microbatches",
    ),
    "ready where nothing is needed": (
        [WHOLE, {"kwarg_mbs": KEYS}, WHOLE],
        "one rank was given a whole batch",
    ),
    "keywords alone": ([{"kwarg_mbs": KEYS}, MADE], "arg_mbs is missing on a rank that needs it"),
    "no tuple": (
        [{**MADE, "arg_mbs": TARGETS}, MADE],
        "arg_mbs[0] is a Tensor: give the tuple of the first stage's",
    ),
    "offsets": (
        [{**WHOLE, "cu": torch.arange(ROWS)}, WHOLE],
        "keyword argument cu is a tensor of shape (10,), a number",
    ),
    "offsets where no batch is": (
        [WHOLE, {"cu": torch.arange(ROWS)}, WHOLE],
        "keyword argument cu is a tensor of shape (10,), a number",
    ),
    "no rows": (
        [{**BIAS, **WHOLE}, WHOLE],
        "keyword argument bias is a tensor of shape (4, 2, 2), whose first dimensi",
    ),
    "no rows of a batch unseen": (
        [WHOLE, SHORT, WHOLE],
        "one rank has cut tensors of 10 rows, another of 4: give all",
    ),
    "an object": (
        [{**WHOLE, "kwargs_chunk_spec": {"lengths": "rows"}}, WHOLE],
        "keyword argument table is of class Table: say",
    ),
    "a misspelt name": (
        [{**WHOLE, "kwargs_chunk_spec": {"lenghts": "rows"}}, WHOLE],
        "kwargs_chunk_spec names 'lenghts'",
    ),
    "a keyword on one rank only": (
        [WHOLE, {}, WHOLE],
        "missing 4 required positional arguments: 'mask', 'lengths', 'table'",
    ),
    "a keyword of no stage": (
        [{**WHOLE, "labels": 1}, WHOLE],
        "got an unexpected keyword argument 'labels'",
    ),
    "a value of another stage": (
        [WHOLE, WHOLE, {**WHOLE, "skip": 1}],
        "got multiple values for keyword argument 'skip'",
    ),
    "the old word for the target": (
        [WHOLE, WHOLE, {"targets": Y, **KEYED, "kwargs_chunk_spec": SPEC}],
        "give target=",
    ),
    "the target by position": (
        [{**WHOLE, "inputs": (X, Y)}, WHOLE],
        "got multiple values for argument 'mask'",
    ),
    "no target": ([WHOLE, WHOLE, {**WHOLE, "target": None}], "target is missing"),
    "the input again": ([{**WHOLE, "x": 1}, WHOLE], "got multiple values for argument 'x'"),
}


def said(rank: int, given: Sequence[dict[str, Any]]) -> str:
    pipeline = Pipeline(build("1f1b", 3, M), keyed_stages()[rank], F.mse_loss, timeout_s=20)
    try:
        mine = dict(given[min(rank, len(given) - 1)])
        take_step(pipeline, mine.pop("inputs", None), mine.pop("target", None), **mine)
    except (ValueError, StepFailed) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_batch_is_refused_on_every_rank(what: str) -> None:
    given, sentence = REFUSED[what]
    with no_process_left():
        for found in on_ranks(3, said, given, timeout_s=30):
            assert sentence in found
