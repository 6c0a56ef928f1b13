"""Ready-made microbatches of any shape, and objects that go with them, equal one process."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, Transformer
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_fsdp2,
    attach_loss,
    auto_split,
    build_pipeline_schedule,
    build_pipeline_stage,
    find_ties,
    get_dp_rank,
    get_dp_size,
    get_pp_rank,
    get_pp_size,
    get_stage_indices,
    init_distributed,
)
from course_pp.step.batch import cut_keywords, rows_to_cut
from tests.equality import (
    Trained,
    assert_equals_one_process,
    assert_same_training,
    batches,
    sharded_adamw,
    snapshot_gradients,
    snapshot_parameters,
    train,
)
from tests.packed import (
    DIM,
    N_MICROBATCHES,
    STEPS,
    Block,
    Mask,
    Offsets,
    Rows,
    given,
    model,
    of_ranks,
    one_process,
    packed,
)
from tests.parallel.small import build, model_config


@dataclass(frozen=True)
class Case:
    schedule: str
    masked: bool = False
    recomputes: bool = False


CASES = (
    Case("1f1b"),
    Case("interleaved_1f1b", masked=True),
    Case("zb_h1"),
    Case("zb_v", recomputes=True),
    Case("dualpipe_v"),
)


def train_on_rank(rank: int, cases: Sequence[Case], dp: int) -> list[tuple[Trained, list[float]]]:
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=dp), seed=0)
    return [train_case(case, mesh) for case in cases]


def train_case(case: Case, mesh: Any) -> tuple[Trained, list[float]]:
    whole, pp = model(), get_pp_size(mesh)
    indices = get_stage_indices(case.schedule, get_pp_rank(mesh), pp)
    modules = [whole.cut(pp * len(indices))[i] for i in indices]
    ties, example = find_ties(whole), torch.empty(1, 8, dtype=torch.int64, device="meta")
    for module in modules:
        apply_ac(module, "full" if case.recomputes else "none", blocks=Block)
        if get_dp_size(mesh) > 1:
            apply_fsdp2(module, mesh, blocks=Block)
    n_stages = pp * len(indices)
    sent = torch.empty(1, 8, DIM, dtype=torch.float64, device="meta")
    stages = [
        build_pipeline_stage(
            module, mesh, "cpu", stage=i, n_stages=n_stages, inputs=example, outputs=sent
        )
        for i, module in zip(indices, modules, strict=True)
    ]
    pipeline = build_pipeline_schedule(
        stages, N_MICROBATCHES, CrossEntropy(), case.schedule, tied=ties
    )
    evaluated = []

    def step(i: int) -> Tensor:
        lists = given_to(
            pipeline, STEPS[i][get_dp_rank(mesh) :: get_dp_size(mesh)][:N_MICROBATCHES], case.masked
        )
        evaluated.append(pipeline.eval(**lists).item())
        return pipeline.step(**lists)

    return train(modules, len(STEPS), step, sharded_adamw(modules)), evaluated


def given_to(pipeline: Any, data: Sequence[Rows], masked: bool = False) -> dict[str, Any]:
    return given(data, pipeline.stages[0].is_first, pipeline.stages[-1].is_last, masked)


@pytest.mark.parametrize(("cases", "dp"), [(CASES, 1), (CASES[1:4], 2)])
def test_packed_sequences_equal_their_documents_one_by_one(
    cases: tuple[Case, ...], dp: int, subtests: pytest.Subtests
) -> None:
    reference, ranks = (
        one_process(of_ranks(dp)),
        on_ranks(2 * dp, train_on_rank, cases, dp, timeout_s=100),
    )
    for i, case in enumerate(cases):
        with subtests.test(case=case):
            assert_same_training([rank[i][0] for rank in ranks], reference, tied=find_ties(model()))
            for rank in ranks:
                assert rank[i][1] == pytest.approx(rank[i][0].losses, rel=1e-12)


class Noted(nn.Linear):
    """A stage that cannot run on the meta device.

    It returns as many positions as it is told to, and a tensor that no stage reads. It attaches a
    loss, which one process multiplies by the microbatch's ``share``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(DIM, DIM)
        self.name, self.share = name, 1.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(
        self, x: Tensor, unread: Tensor | None = None, *, keep: int | None = None
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        assert x.detach().numpy().ndim == 3
        y = super().forward(x)[:, :keep].tanh()
        return attach_loss(y, self.share * y.square().mean(), name=self.name), x.sum(-1)


class First(Noted):
    def forward(self, x: Tensor, *, keep: int | None = None) -> Any:
        return super().forward(x, keep=keep)


class Last(Noted):
    def forward(self, x: Tensor, unread: Tensor, *, keep: int | None = None) -> Any:
        return super().forward(x, unread, keep=keep)[0]


KEPT = [[(2, 5, 3), (1, 4, 4), (3, 6, 2), (1, 4, 4)], [(1, 7, 7), (2, 5, 3), (2, 5, 4), (4, 2, 1)]]
"""(Rows, length, length that stages keep) of each microbatch of two data ranks."""


def noted_stages(n: int) -> list[Noted]:
    torch.manual_seed(0)
    return [
        (First if i == 0 else Last if i == n - 1 else Noted)(f"of {i}").double() for i in range(n)
    ]


def noted_data(rank: int) -> list[tuple[Tensor, Tensor, int]]:
    torch.manual_seed(rank)
    sizes = [((rows, length, DIM), (rows, keep, DIM), keep) for rows, length, keep in KEPT[rank]]
    return [(torch.randn(x).double(), torch.randn(y).double(), keep) for x, y, keep in sizes]


def noted_in_one_process(n: int, dp: int) -> Trained:
    stages, data = noted_stages(n), [each for rank in range(dp) for each in noted_data(rank)]
    n_rows, loss = sum(len(x) for x, _, _ in data), torch.zeros(())
    for x, y, keep in data:
        value: Any = (x,)
        for stage in stages:
            stage.share = len(x) / n_rows
        for stage in stages[:-1]:
            value = stage(*value, keep=keep)
        loss = loss + nn.functional.mse_loss(stages[-1](*value, keep=keep), y) * len(x) / n_rows
    loss.backward()
    module = nn.ModuleDict({str(i): stage for i, stage in enumerate(stages)})
    return Trained([loss.item()], snapshot_gradients([module]), snapshot_parameters([module]))


def noted_on_rank(rank: int, schedule: str, dp: int) -> tuple[Trained, list[float], Any]:
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=dp), seed=0)
    indices = get_stage_indices(schedule, get_pp_rank(mesh), 2)
    held, stages = {}, []
    for i in indices:
        module = held[str(i)] = noted_stages(2 * len(indices))[i]
        if dp > 1:
            apply_fsdp2(module, mesh, blocks=())
        shapes = torch.zeros(1, 3, DIM).double(), torch.zeros(1, 3).double()
        options = {"inputs": shapes[0], "outputs": shapes, "stage": i, "n_stages": 2 * len(indices)}
        stages.append(build_pipeline_stage(module, mesh, "cpu", **options))
    pipeline = build_pipeline_schedule(
        stages, N_MICROBATCHES, nn.functional.mse_loss, schedule, tied=[]
    )
    data = noted_data(get_dp_rank(mesh))
    lists: dict[str, Any] = {"kwarg_mbs": [{"keep": keep} for _, _, keep in data]}
    lists["arg_mbs"] = [(x,) for x, _, _ in data]  # ignored but on the first rank
    loss = pipeline.step(**lists, target_mbs=[y for _, y, _ in data])
    named = nn.ModuleDict(held)
    calls = [module.calls.item() for module in held.values()]
    trained = Trained([loss.item()], snapshot_gradients([named]), snapshot_parameters([named]))
    return trained, calls, pipeline.evaluate(**lists, on="all")


@pytest.mark.parametrize(("schedule", "dp"), [("1f1b", 2), ("zb_v", 1)])
def test_stages_that_meta_cannot_tell_of_are_tried_once_and_stay_as_they_are(
    schedule: str, dp: int
) -> None:
    """It also holds under FSDP2, whose replicas have microbatches of other shapes.

    A plain loss weighs microbatches by their rows.
    """
    ranks = on_ranks(2 * dp, noted_on_rank, schedule, dp, timeout_s=60)
    n_stages = 2 * len(ranks[0][1])
    assert_same_training([trained for trained, _, _ in ranks], noted_in_one_process(n_stages, dp))
    for rank, (_, calls, outputs) in enumerate(ranks):
        assert calls == [N_MICROBATCHES] * len(calls)
        sizes = KEPT[rank % dp]
        assert [tuple(output.shape) for output in outputs] == [
            (rows, keep, DIM) for rows, _, keep in sizes
        ]


DATA = [packed(2, 8, seed=i) for i in range(N_MICROBATCHES)]
WHOLE = packed(4, 8, seed=4)
# the same documents in each row
SAME = replace(WHOLE, offsets=Offsets(torch.tensor([[0, 3, 5, 8]]).expand(4, -1), 3))


def replaced(name: str, i: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Put another entry into a list, if the list is given."""

    def replace(lists: dict[str, Any]) -> None:
        if name in lists:
            lists[name] = [*lists[name][:i], value, *lists[name][i + 1 :]]

    return replace


def on(rank: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[int, dict[str, Any]], None]:
    return lambda here, lists: change(lists) if here == rank else None


SHORT = Offsets(DATA[0].offsets.starts, 0)

# A change of one rank's right arguments, and the message that all ranks get.
WRONG: dict[str, tuple[Callable[[int, dict[str, Any]], None], str]] = {
    "three of four": (
        on(1, lambda g: g["kwarg_mbs"].pop()),
        "kwarg_mbs has 3 entries, but the schedule has 4 micro",
    ),
    "a tuple": (
        on(0, lambda g: g.update(arg_mbs=tuple(g["arg_mbs"]))),
        "arg_mbs is a tuple: give a list, one entry",
    ),
    "a tensor": (
        on(0, replaced("arg_mbs", 1, DATA[0].tokens)),
        "arg_mbs[1] is a Tensor: give the tuple of the first",
    ),
    "whole beside": (
        on(1, lambda g: g.update(target=WHOLE.targets)),
        (
            "target is of a whole batch, and kwarg_mbs, target_mbs of ready-made microbatches: give"
            " all of them by"
        ),
    ),
    "whole elsewhere": (
        on(1, lambda g: (g.clear(), g.update(target=WHOLE.targets, offsets=None))),
        (
            "rank 0 was given arg_mbs, ready-made microbatches, and rank 1 target, of a whole"
            " batch: give every rank"
        ),
    ),
    "no arguments": (
        on(0, lambda g: g.pop("arg_mbs")),
        "arg_mbs is missing on the rank that holds the first stage",
    ),
    "nothing at the end": (
        on(1, lambda g: g.clear()),
        "target_mbs is missing on the rank that holds the last stage",
    ),
    "an object on one rank": (
        on(1, lambda g: g.pop("kwarg_mbs")),
        (
            "rank 0 was given the keyword argument offsets, and rank 1, whose stage takes it, was"
            " not: give it to both"
        ),
    ),
    "another dtype": (
        on(0, replaced("arg_mbs", 2, (DATA[2].tokens.float(),))),
        (
            "arg_mbs[2] is float32 (2, 8), but the pipeline was built for microbatches like int64"
            " (1, 8): only"
        ),
    ),
    "another structure": (
        on(0, replaced("arg_mbs", 2, (DATA[2].tokens, None))),
        "arg_mbs[2] is (int64 (2, 8), None), but the pipeline was built for",
    ),
    "an object as an argument": (
        on(0, replaced("arg_mbs", 0, ("text",))),
        "arg_mbs[0] holds a str: only tensors",
    ),
    "a target that cannot be counted": (
        on(1, replaced("target_mbs", 3, "text")),
        "has no attribute 'sum'",
    ),
    "a stage that raises": (
        on(0, lambda g: g.update(kwarg_mbs=[{"offsets": SHORT}] * N_MICROBATCHES)),
        (
            "stage 0, a Packed called with int64 (2, 8) and offsets on the meta device, does not"
            " say what it returns (ValueError: a document is longer than 0): mend the stage, or"
            " declare what crosses, build_pipeline_stage(..., outputs=...); tried on zeros, it"
            " raised ValueError: a document is longer than 0"
        ),
    ),
    "nothing to cut": (
        on(0, lambda g: g.update(kwargs_chunk_spec={"offsets": "rows"})),
        "kwargs_chunk_spec is of a whole batch, and arg_mbs, kwarg_mbs of ready-made microbatches",
    ),
}

# The same for a whole batch of four rows.
WRONG_WHOLE: dict[str, tuple[Callable[[int, dict[str, Any]], None], str]] = {
    "nobody says": (
        on(1, lambda g: g.pop("kwargs_chunk_spec")),
        "Offsets: say kwargs_chunk_spec=",
    ),
    "a number for each row, or not": (
        on(0, lambda g: g.update(offsets=torch.ones(4), kwargs_chunk_spec=None)),
        (
            "keyword argument offsets is a tensor of shape (4,), a number for each row or offsets:"
            " say kwargs_chunk_spec"
        ),
    ),
    "other rows": (
        on(0, lambda g: g.update(offsets=torch.ones(5, 2), kwargs_chunk_spec=None)),
        (
            "offsets is a tensor of shape (5, 2), whose first dimension is not the whole batch, 4:"
            " say kwargs_chunk_spec"
        ),
    ),
    "rows that are none": (
        on(0, lambda g: g.update(offsets=(torch.ones(4), torch.ones(())))),
        (
            "keyword argument offsets is, or holds, a tensor of shape (), and kwargs_chunk_spec"
            " cuts it by rows"
        ),
    ),
    "no such argument": (
        on(1, lambda g: g.update(kwargs_chunk_spec={"ofsets": "same"})),
        "kwargs_chunk_spec names 'ofsets', but the keyword arguments are offsets: leave it out",
    ),
    "another word": (
        on(1, lambda g: g.update(kwargs_chunk_spec={"offsets": 0})),
        "kwargs_chunk_spec['offsets'] is 0: give 'rows' or 'same'",
    ),
    "an object on one rank": (
        on(0, lambda g: (g.pop("offsets"), g.pop("kwargs_chunk_spec"))),
        (
            "rank 1 was given the keyword argument offsets, and rank 0, whose stage takes it, was"
            " not: give it to both"
        ),
    ),
}


class Pair(NamedTuple):
    starts: Tensor
    ends: Tensor


UNSAID = {
    "a BlockMask": create_block_mask(lambda b, h, q, k: q >= k, 4, None, 8, 8, device="cpu"),
    "an object": WHOLE.offsets,
    "offsets that are no rows": Pair(torch.arange(10), torch.arange(10)),
    "offsets that are rows": Pair(torch.arange(4), torch.arange(4)),
    "a tensor of offsets": torch.arange(10),
    "a tensor of rows": torch.arange(4),
    "a scalar": torch.ones(()),
    "a list": [torch.ones(4, 2)],
    "no tensor": {"a": 1},
}


@pytest.mark.parametrize("value", UNSAID.values(), ids=UNSAID)
@pytest.mark.parametrize("rows", [4, 0], ids=["rows known", "rows unknown"])
def test_an_argument_of_which_nobody_said_what_it_is_is_offered_what_it_can_be(
    value: Any, rows: int
) -> None:
    with pytest.raises(ValueError, match="kwarg_mbs=") as refusal:
        cut_keywords({"given": value}, None, rows, N_MICROBATCHES)
    works = {"same"}
    spec: Any = {"given": "rows"}
    with suppress(ValueError):
        cut_keywords(
            {"given": value}, spec, rows or rows_to_cut({"given": value}, spec), N_MICROBATCHES
        )
        works.add("rows")
    assert {word for word in ("rows", "same") if repr(word) in str(refusal.value)} == works
    assert (
        len(cut_keywords({"given": value}, {"given": "same"}, rows, N_MICROBATCHES))
        == N_MICROBATCHES
    )


def refusals_on_rank(rank: int) -> tuple[dict[str, str], list[float]]:
    """Return the refusal of each mistake, and then the losses of right steps."""
    mesh, said = init_distributed(DistributedConfig(pp=2), seed=0), {}
    example, sent = torch.zeros(1, 8).long(), torch.zeros(1, 8, DIM).double()
    stage = build_pipeline_stage(model().cut(2)[rank], mesh, "cpu", inputs=example, outputs=sent)
    pipeline = build_pipeline_schedule(
        stage, N_MICROBATCHES, CrossEntropy(), "1f1b", tied=find_ties(model())
    )
    whole = {
        "offsets": WHOLE.offsets,
        "target": WHOLE.targets,
        "kwargs_chunk_spec": {"offsets": "rows"},
    }
    for changes, inputs, right in (
        (WRONG, (), given_to(pipeline, DATA)),
        (WRONG_WHOLE, (WHOLE.tokens,), whole),
    ):
        for name, (change, _) in changes.items():
            lists = {
                key: list(value) if isinstance(value, list) else value
                for key, value in right.items()
            }
            change(rank, lists)
            wrong = inputs if "target" in lists else ()
            with pytest.raises((ValueError, TypeError), match=r".") as refusal:
                pipeline.step(*wrong, **lists)
            said[f"{name}, {len(inputs)}"] = str(refusal.value)
    losses = [pipeline.step(**given_to(pipeline, DATA)), pipeline.step(WHOLE.tokens, **whole)]
    same = {
        "offsets": None,
        "mask": Mask(Offsets(SAME.offsets.starts[:1], 3), 8),
        "kwargs_chunk_spec": {"mask": "same"},
    }
    losses.append(pipeline.eval(SAME.tokens, target=SAME.targets, **same))
    return said, [loss.item() for loss in losses]


def test_what_does_not_go_together_is_refused_on_every_rank_and_right_steps_go_on() -> None:
    ranks = on_ranks(2, refusals_on_rank, timeout_s=60)
    assert ranks[0] == ranks[1]
    said, losses = ranks[0]
    for n, changes in enumerate((WRONG, WRONG_WHOLE)):
        for name, (_, words) in changes.items():
            assert words in said[f"{name}, {n}"], name
    expected = [one_process([data]).losses[0] for data in (DATA, [WHOLE], [SAME])]
    assert losses == pytest.approx(expected, rel=1e-12)


class Cutting(nn.Linear):
    """A stage that returns as many positions as an object says. Ranks do not compare objects."""

    def forward(self, x: Tensor, sizes: Any) -> Tensor:
        return super().forward(x)[:, : sizes["keep"]]


def cutting_on_rank(rank: int) -> None:
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    stage = build_pipeline_stage(
        Cutting(4, 4), mesh, "cpu", inputs=torch.zeros(1, 3, 4), outputs=torch.zeros(1, 3, 4)
    )
    pipeline = build_pipeline_schedule(stage, 2, nn.functional.mse_loss, "gpipe")
    lists = {"arg_mbs": [(torch.zeros(2, 5, 4),)] * 2, "target_mbs": [torch.zeros(2, 5, 4)] * 2}
    pipeline.step(**lists, kwarg_mbs=[{"sizes": {"keep": keep}} for keep in (5, 4)])


def test_a_shape_that_depends_on_what_is_in_an_object_is_named() -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        on_ranks(2, cutting_on_rank, timeout_s=60)
    words = (
        "stage 0 returned float32 (2, 4, 4) where float32 (2, 5, 4) was declared: what crosses may"
        " depend on the"
    )
    assert words in str(caught.value.__cause__)


LENGTHS = [(2, 8), (1, 16), (3, 5), (1, 2)]


def own_on_rank(rank: int, tied: bool) -> tuple[Trained, list[str], Any]:
    """Return gradients, refusals and outputs of the course's own model, whose sizes are known."""
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    modules, pipeline = build(model_config(tied), mesh, 2, rank, "zb_v", CrossEntropy())
    said = []
    for i, change in enumerate(
        (lambda t: t[:, :1].repeat(1, 17), lambda t: t + 61, lambda t: t.T, lambda t: t.float())
    ):
        data = own_data()
        name = ("arg_mbs", "target_mbs")[i // 2]
        lists: dict[str, Any] = {
            "arg_mbs": [(x,) for x, _ in data],
            "target_mbs": [y for _, y in data],
        }
        entry = lists[name][2]
        lists[name][2] = (change(entry[0]),) if name == "arg_mbs" else change(entry)
        with pytest.raises(ValueError, match=r".") as refusal:
            pipeline.step(**lists)
        said.append(str(refusal.value))
    lists = {"arg_mbs": [(x,) for x, _ in own_data()], "target_mbs": [y for _, y in own_data()]}
    loss = pipeline.step(**lists).item()
    trained = Trained([loss], snapshot_gradients(modules), snapshot_parameters(modules))
    return trained, said, pipeline.evaluate(arg_mbs=lists["arg_mbs"], on="all")


def own_data() -> list[tuple[Tensor, Tensor]]:
    return [batches(model_config(False), *size, 1, seed=i)[0] for i, size in enumerate(LENGTHS)]


@pytest.mark.parametrize("tied", [False, True])
def test_this_packages_model_takes_microbatches_of_any_size(tied: bool) -> None:
    config, loss_fn = model_config(tied), CrossEntropy()
    torch.manual_seed(0)
    whole = Transformer(config).double()
    losses = [
        loss_fn.total(whole(x), y) / sum(y.numel() for _, y in own_data()) for x, y in own_data()
    ]
    sum(losses).backward()
    expected = Trained(
        [sum(losses).item()], snapshot_gradients([whole]), snapshot_parameters([whole])
    )
    ranks = on_ranks(2, own_on_rank, tied, timeout_s=60)
    assert_equals_one_process([trained for trained, _, _ in ranks], expected, config)
    words = [
        "seq_len=17 is over the model's max_seq_len=16: shorten the sequences",
        "arg_mbs[2] holds token ids from 64 to 119, but vocab_size=61",
        "target_mbs[2] has shape (5, 3), but its microbatch (3, 5): give a target a token",
        "target_mbs[2] is torch.float32: pass token ids, int64, of shape (3, 5)",
    ]
    for _, said, outputs in ranks:
        assert said == ranks[0][1]
        for word, one in zip(words, said, strict=True):
            assert word in one
        for output, (x, _) in zip(outputs, own_data(), strict=True):
            torch.testing.assert_close(output, whole(x), rtol=1e-9, atol=1e-9)


class Pooled(nn.Linear):
    """A last stage whose output has no length, so that a loss accepts an input of any."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


def frozen_and_pooled() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(DIM, DIM).double().requires_grad_(False), Pooled(DIM, DIM).double()]


def shorter_data() -> list[tuple[Tensor, Tensor]]:
    """Return microbatches of which none is longer than the declared one."""
    torch.manual_seed(1)
    lengths = (3, 8, 5, 2)
    return [(torch.randn(2, n, DIM).double(), torch.randn(2, DIM).double()) for n in lengths]


def behind_a_frozen_stage(rank: int) -> tuple[float, list[Tensor | None]]:
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    module = frozen_and_pooled()[rank]
    declared = torch.empty(2, 8, DIM, dtype=torch.float64)
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=declared)
    pipeline = build_pipeline_schedule(stage, N_MICROBATCHES, nn.functional.mse_loss, "1f1b")
    data = shorter_data()
    loss = pipeline.step(arg_mbs=[(x,) for x, _ in data], target_mbs=[y for _, y in data])
    return loss.item(), [parameter.grad for parameter in module.parameters()]


def test_shorter_microbatches_behind_a_frozen_stage_are_read_to_their_end_alone() -> None:
    """A frozen stage gets no gradient, so no message would show a buffer that is too long."""
    whole = nn.Sequential(*frozen_and_pooled())
    losses = [nn.functional.mse_loss(whole(x), y) for x, y in shorter_data()]
    loss = torch.stack(losses).mean()
    loss.backward()
    (first, frozen), (last, trained) = on_ranks(2, behind_a_frozen_stage, timeout_s=60)
    assert (first, last) == pytest.approx((loss.item(), loss.item()), rel=1e-12)
    assert frozen == [None, None]
    for gradient, parameter in zip(trained, whole[1].parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12)


class Positioned(nn.Module):
    """A model with three positions a token, as in Qwen2-VL: their first dimension is not rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()) + positions.sum(0)[..., None].sin()


def positioned() -> nn.Module:
    torch.manual_seed(0)
    return Positioned().double()


def positioned_data() -> list[tuple[Tensor, Tensor]]:
    inputs = [x for x, _ in shorter_data()]
    return [(x, torch.randint(9, (3, *x.shape[:2])).double()) for x in inputs]


def positioned_on_rank(rank: int) -> tuple[Trained, list[str]]:
    mesh, data = init_distributed(DistributedConfig(pp=2)), positioned_data()
    module = auto_split(positioned(), data[0], 2)[rank]
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=data[0])
    pipeline = build_pipeline_schedule(stage, N_MICROBATCHES, nn.functional.mse_loss, "1f1b")
    x, positions = data[0]
    whole = (x.repeat(N_MICROBATCHES, 1, 1), positions.repeat(1, N_MICROBATCHES, 1))
    said = []
    for run in (pipeline.step, pipeline.eval):
        with pytest.raises(ValueError, match="arg_mbs") as refusal:
            run(*whole, target=whole[0])
        said.append(str(refusal.value))
    targets = [x for x, _ in data]
    return train([module], 2, lambda _: pipeline.step(arg_mbs=data, target_mbs=targets)), said


def test_ready_microbatches_need_no_rows_in_their_first_dimension() -> None:
    """A whole batch needs rows in the first dimension, so it is refused on every rank."""
    model = positioned()

    def step(_: int) -> Tensor:
        losses = [nn.functional.mse_loss(model(*given), given[0]) for given in positioned_data()]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss

    one = train([model], 2, step)
    ranks = on_ranks(2, positioned_on_rank, timeout_s=60)
    assert_same_training([trained for trained, _ in ranks], one)
    assert ranks[0][1] == ranks[1][1]
