"""Ready-made microbatches and keyword arguments: loss and gradients of one process, or one refusal on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_pp.launch import on_ranks
from course_pp.microbatches import cut_keywords
from course_pp.model import CrossEntropy
from course_pp.runtime import Pipeline, PipelineError, Recorder, run_step
from course_pp.schedule import Schedule, build
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stages_of
from tests.runtime.stepping import TOLERANCE, gradients, through

pytestmark = pytest.mark.timeout(60)

WIDTH, VOCABULARY, M = 4, 7, 4


class Packed(NamedTuple):
    """Where the documents of a microbatch begin and end, its rows put one after another; and no tensor."""

    offsets: Tensor
    name: str


class Microbatch(NamedTuple):
    tokens: Tensor
    target: Tensor
    packed: Packed


def microbatches(seed: int) -> list[Microbatch]:
    """Rows of three documents of unequal length; microbatches differ in rows, lengths and counted tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(M):
        rows, lengths = 1 + (i + seed) % 3, [2 + i % 2, 1 + seed, 4]
        tokens, target = torch.randint(VOCABULARY, (2, rows, sum(lengths)), generator=generator)
        target[:, : i % 3] = -100
        if i == 2:
            target[:] = -100
        found.append(Microbatch(tokens, target, Packed(torch.tensor([0, *lengths * rows]).cumsum(0), "packed")))
    return found


class Stage(nn.Module):
    """Attention within documents, whose offsets come by keyword."""

    def __init__(self, stage: int, n_stages: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.mix, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if stage == n_stages - 1 else None

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        assert type(packed) is Packed
        x = x if self.embed is None else self.embed(x)
        documents = [self.attended(x.flatten(0, 1)[a:b]) for a, b in pairwise(packed.offsets.tolist())]
        x = x + self.linear(torch.cat(documents).view(x.shape))
        return x if self.head is None else self.head(x)

    def attended(self, x: Tensor) -> Tensor:
        scores = self.mix(x) @ x.T
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ x


def make_stages(n: int, tied: bool) -> list[Stage]:
    torch.manual_seed(0)
    stages = [Stage(i, n).double() for i in range(n)]
    if tied:
        stages[-1].head.weight.data.copy_(stages[0].embed.weight.data)
    return stages


@dataclass(frozen=True)
class Case:
    schedule: str
    data: int = 1
    tied: bool = False
    recompute: bool = False

    @property
    def ties(self) -> list[dict[int, str]]:
        return [{0: "embed.weight", build(self.schedule, 2, M).n_stages - 1: "head.weight"}] if self.tied else []


class Found(NamedTuple):
    """Of two steps, whose gradients add up; outputs are the second batch's, by microbatch, where they are."""

    losses: list[float]
    outputs: list[Tensor] | None
    gradients: dict[str, Tensor]


def trained(rank: int, cases: Sequence[Case]) -> list[Found]:
    return [one_case(case) for case in cases]


def one_case(case: Case) -> Found:
    mesh = init_device_mesh("cpu", (2, case.data), mesh_dim_names=("pp", "data"))
    rank, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("data")
    schedule = build(case.schedule, 2, M)
    stages = make_stages(schedule.n_stages, case.tied)
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    for module in mine.values() if case.data > 1 else ():
        fully_shard(module, mesh=mesh["data"])
    options = {"group": mesh.get_group("pp"), "tied": case.ties, "recompute": case.recompute, "timeout_s": 20}
    pipeline = Pipeline(schedule, mine, CrossEntropy(), **options)
    losses = []
    for step in range(2):
        batch = microbatches(2 * step + replica)
        arg_mbs = [(each.tokens,) for each in batch] if 0 in mine else None
        target_mbs = [each.target for each in batch] if schedule.n_stages - 1 in mine else None
        kwarg_mbs = [{"packed": each.packed} for each in batch]
        losses.append(sum(pipeline.step(arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs)))
    outputs = pipeline.evaluate(arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs)
    whole = {
        f"{i}.{n}": getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for i, m in mine.items()
        for n, p in m.named_parameters()
    }
    return Found(losses, outputs, whole)


def document_by_document(case: Case) -> Found:
    """Each document alone, in one row of its own."""
    n = build(case.schedule, 2, M).n_stages
    stages = make_stages(n, case.tied)
    losses = []
    for step in range(2):
        batch = [each for replica in range(case.data) for each in microbatches(2 * step + replica)]
        count = sum((each.target != -100).sum() for each in batch)
        total = 0.0
        for each in batch:
            for a, b in pairwise(each.packed.offsets.tolist()):
                x = each.tokens.flatten()[None, a:b]
                for stage in stages:
                    x = stage(x, Packed(torch.tensor([0, b - a]), "alone"))
                loss = CrossEntropy().total(x, each.target.flatten()[None, a:b]) / count
                loss.backward()
                total += loss.item()
        losses.append(total)
    outputs = [through([partial(stage, packed=each.packed) for stage in stages], each.tokens) for each in batch]
    gradients = {f"{i}.{name}": p.grad for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
    for tie in case.ties:
        names = [f"{stage}.{name}" for stage, name in tie.items()]
        gradients.update(dict.fromkeys(names, sum(gradients[name] for name in names)))
    return Found(losses, outputs, gradients)


SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")
ON_2_RANKS = [
    *(Case(name, tied=tied) for name in SCHEDULES for tied in (False, True)),
    *(Case(name, recompute=True) for name in ("1f1b", "zb_v")),
    Case("chimera"),
]
ON_4_RANKS = [Case(name, data=2) for name in SCHEDULES]


@pytest.mark.parametrize("cases", [ON_2_RANKS, ON_4_RANKS], ids=["pp", "with FSDP2"])
def test_packed_documents_are_as_good_as_alone(cases: Sequence[Case], subtests: Any) -> None:
    with no_process_left():
        ranks = on_ranks(2 * cases[0].data, trained, cases, timeout_s=50)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(case)):
            expected = document_by_document(case)
            assert {name for rank in found for name in rank.gradients} == set(expected.gradients)
            outputs = [output for rank in found for output in rank.outputs or ()]
            assert len(outputs) == M * case.data * len(build(case.schedule, 2, M).placement[-1])
            for output, known in zip(outputs, 2 * expected.outputs, strict=False):
                torch.testing.assert_close(output, known, rtol=0, atol=TOLERANCE)
            for rank in found:
                assert rank.losses == pytest.approx(expected.losses, rel=TOLERANCE)
                for name, gradient in rank.gradients.items():
                    torch.testing.assert_close(gradient, expected.gradients[name], rtol=0, atol=TOLERANCE)


# A whole batch, with keyword arguments.

ROWS = 10  # microbatches of 3, 3, 2 and 2


class Keyed(nn.Module):
    """Takes something of every kind by keyword, and in the middle a value from another stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.linear = stage, nn.Linear(WIDTH, WIDTH)
        self.writes, self.reads = (("skip",) if stage == 0 else ()), (("skip",) if stage == 2 else ())

    def forward(self, x: Tensor, mask: Tensor, lengths: Any, table: Any, scale: float, skip: Any = 0.0) -> Any:
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


def keyed_step(rank: int, schedule: Schedule, recompute: bool) -> tuple[float, Any, dict[str, Tensor | None]]:
    stages, (x, y, kwargs) = keyed_stages(schedule.n_stages), keyed_batch()
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    recorder = Recorder(memory=True)
    pipeline = Pipeline(schedule, mine, F.mse_loss, recompute=recompute, recorder=recorder, timeout_s=20)
    loss = sum(pipeline.step(*for_rank(rank, schedule, x, y), kwargs_chunk_spec=SPEC, **kwargs))
    outputs = pipeline.evaluate(for_rank(rank, schedule, x, y)[0], on="all", kwargs_chunk_spec=SPEC, **kwargs)
    return loss, outputs, gradients(mine)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("name", "n"), [("1f1b", 3), ("zb_v", 2), ("chimera", 2)])
def test_keyword_arguments_of_a_whole_batch_are_cut_as_they_are_said_to_be(name: str, n: int, recompute: bool) -> None:
    schedule = build(name, n, M)
    stages, (x, y, kwargs) = keyed_stages(schedule.n_stages), keyed_batch()
    h, read = x, {}
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
    """Scales by what comes by keyword, under a name that the package uses too, or else with the input."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last, self.linear = is_last, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None, *, microbatch: Tensor | None = None) -> Any:
        if microbatch is not None:
            return self.linear(x) * microbatch
        return self.linear(x) * scale if self.is_last else (self.linear(x) * scale, scale)


def updated(rank: int, recompute: bool) -> list[list[Tensor]]:
    """The parameters after a step that updates them on the way: scales by keyword, and sent along."""
    x, y, kwargs = keyed_batch()
    found = []
    for by_keyword in (True, False):
        torch.manual_seed(rank)
        stage = Scaled(is_last=rank == 1).double()
        optimizers = {rank: torch.optim.SGD(stage.parameters(), lr=0.1)}
        options = {"optimizers": optimizers, "versions": "stash", "recompute": recompute, "timeout_s": 20}
        pipeline = Pipeline(build("pipedream", 2, M), stage, F.mse_loss, **options)
        if by_keyword:
            pipeline.step(x, y, microbatch=kwargs["mask"])
        else:
            pipeline.step((x, kwargs["mask"]), y)
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
        recorder, given = Recorder(memory=True), {"target_mbs": parts[1]}
        pairs = list(zip(parts[0], parts[2], strict=True))
        if how == "by keyword":
            given |= {"arg_mbs": [(x,) for x, _ in pairs], "kwarg_mbs": [{"microbatch": mask} for _, mask in pairs]}
        else:
            given |= {"arg_mbs": [({"x": x, "microbatch": m},) if how == "as a dict" else (x, m) for x, m in pairs]}
        stage = Scaled(is_last=True).double()
        losses, _ = run_step(build("1f1b", 1, M), stage, None, None, F.mse_loss, recorder=recorder, **given)
        found.append((losses, recorder.memory()[0].peaks))
    assert found[0] == found[1] == found[2]


# What is refused, on every rank.

X, Y, KEYED = keyed_batch()
READY = [(each,) for each in X.tensor_split(M)]
KEYS = cut_keywords(KEYED, SPEC, ROWS, M)
TARGETS = list(Y.tensor_split(M))
WHOLE = {"inputs": X, "targets": Y, "kwargs_chunk_spec": SPEC, **KEYED}
MADE = {"arg_mbs": READY, "kwarg_mbs": KEYS, "target_mbs": TARGETS}
SHORT = {**KEYED, "mask": KEYED["mask"][:M], "lengths": Lengths(torch.ones(M)), "kwargs_chunk_spec": SPEC}
BIAS = {"bias": torch.ones(M, 2, 2)}

REFUSED: dict[str, tuple[Sequence[dict[str, Any]], str]] = {
    "another length": ([{**MADE, "kwarg_mbs": KEYS[1:]}, MADE], "kwarg_mbs has 3 entries, but the schedule has 4"),
    "whole beside ready": (
        [MADE, {**MADE, "targets": Y}],
        "targets is of a whole batch, and arg_mbs, kwarg_mbs, target",
    ),
    "whole on one rank": ([MADE, WHOLE], "one rank was given a whole batch, another ready-made microbatches"),
    "ready where nothing is needed": ([WHOLE, {"kwarg_mbs": KEYS}, WHOLE], "one rank was given a whole batch"),
    "keywords alone": ([{"kwarg_mbs": KEYS}, MADE], "arg_mbs is missing on a rank that needs it"),
    "no tuple": ([{**MADE, "arg_mbs": TARGETS}, MADE], "arg_mbs[0] is a Tensor: give the tuple of the first stage's"),
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
    "no rows of a batch unseen": ([WHOLE, SHORT, WHOLE], "one rank has cut tensors of 10 rows, another of 4: give all"),
    "an object": (
        [{**WHOLE, "kwargs_chunk_spec": {"lengths": "rows"}}, WHOLE],
        "keyword argument table is a Table: say",
    ),
    "a misspelt name": (
        [{**WHOLE, "kwargs_chunk_spec": {"lenghts": "rows"}}, WHOLE],
        "kwargs_chunk_spec names 'lenghts'",
    ),
    "a keyword on one rank only": (
        [WHOLE, {}, WHOLE],
        "missing 4 required positional arguments: 'mask', 'lengths', 'table'",
    ),
    "a keyword of no stage": ([{**WHOLE, "target": 1}, WHOLE], "got an unexpected keyword argument 'target'"),
    "a value of another stage": (
        [WHOLE, WHOLE, {**WHOLE, "skip": 1}],
        "got multiple values for keyword argument 'skip'",
    ),
    "the input again": ([{**WHOLE, "x": 1}, WHOLE], "got multiple values for argument 'x'"),
}


def said(rank: int, given: Sequence[dict[str, Any]]) -> str:
    pipeline = Pipeline(build("1f1b", 3, M), keyed_stages()[rank], F.mse_loss, timeout_s=20)
    try:
        pipeline.step(**given[min(rank, len(given) - 1)])
    except (ValueError, PipelineError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_batch_is_refused_on_every_rank(what: str) -> None:
    given, sentence = REFUSED[what]
    with no_process_left():
        for found in on_ranks(3, said, given, timeout_s=30):
            assert sentence in found
