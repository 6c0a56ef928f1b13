"""Stages sharded by FSDP2: one process's gradients, reduced once a group and step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy
from course_pp.runtime import Pipeline, StepFailed
from course_pp.schedule import build
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stages_of, take_step

WIDTH, M, STEPS = 6, 8, 2
# Of a stage by what is wrapped: each is reduced once a step.
GROUPS = {"both": 3, "root": 1, "blocks": 3}


@dataclass(frozen=True)
class Layout:
    """Ranks, what FSDP2 wraps (``"root"``, ``"blocks"`` or ``"both"``), and whether it frees after
    forward.

    If the last stage is ``bare``, it has no weights that would tell who the other data ranks are.
    If the first is ``frozen``, no backward reaches it.
    """

    schedule: str
    pp: int = 2
    shard: int = 2
    replicate: int = 1
    wrapped: str = "both"
    resharded: bool = True
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    recompute: bool = False
    bare: bool = False
    frozen: bool = False
    transport: str | None = None
    tolerance: float = 1e-12

    @property
    def data(self) -> int:
        return self.shard * self.replicate


class Block(nn.Module):
    """Linear layers, whose weight gradients can wait, around a norm, whose cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


def make_stages(n: int, bare: bool = False, frozen: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    stages = [
        nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), Block()).double() for _ in range(n - bare)
    ]
    stages[0].requires_grad_(not frozen)
    return [*stages, nn.Sequential(nn.Softplus())] if bare else stages


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, y = torch.randn(2, 2 * M, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def wrap(stage: nn.Module, mesh: Any, layout: Layout) -> nn.Module:
    options = {"mesh": mesh, "reshard_after_forward": layout.resharded, "mp_policy": layout.policy}
    if layout.wrapped != "root":
        for block in stage.children():
            fully_shard(block, **options)
    if layout.wrapped != "blocks":
        fully_shard(stage, **options)
    return stage


class Reductions(TorchDispatchMode):
    """Counts reduce-scatters."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "reduce_scatter" in func.name()
        return func(*args, **(kwargs or {}))


def sharded(rank: int, layouts: Sequence[Layout]) -> list[tuple[dict[str, Tensor], int]]:
    return [one_layout(layout) for layout in layouts]


def one_layout(layout: Layout) -> tuple[dict[str, Tensor], int]:
    """Return whole gradients after the steps, and the reduce-scatters of the last step."""
    pipe, schedule, modules, mesh = pipeline_of(layout)
    replica = replica_of(mesh)
    counted = 0
    for step in range(STEPS):
        arguments = for_rank(mesh.get_local_rank("pp"), schedule, *batch_of(step, replica))
        with Reductions() as reductions:
            take_step(pipe, *arguments)
        counted = reductions.number
    return whole_gradients(modules), counted


def whole_gradients(modules: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {name: gradient.full_tensor() for name, gradient in own_gradients(modules).items()}


def own_gradients(modules: Mapping[int, nn.Module]) -> dict[str, Any]:
    """Return this rank's shard of the gradient of each parameter that is trained."""
    named = [
        (f"{stage}.{name}", p) for stage, m in modules.items() for name, p in m.named_parameters()
    ]
    return {name: parameter.grad for name, parameter in named if parameter.requires_grad}


def replica_of(mesh: Any) -> int:
    return mesh["dp_replicate", "dp_shard"]._flatten().get_local_rank()


def pipeline_of(layout: Layout, loss_fn: Any = F.mse_loss) -> Any:
    sizes = layout.pp, layout.replicate, layout.shard
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    data_mesh = mesh["dp_replicate", "dp_shard"] if layout.replicate > 1 else mesh["dp_shard"]
    schedule = build(layout.schedule, layout.pp, M)
    stages = make_stages(schedule.n_stages, layout.bare, layout.frozen)
    here = stages_of(mesh.get_local_rank("pp"), schedule)
    modules = {stage: wrap(stages[stage], data_mesh, layout) for stage in here}
    options = {"group": mesh.get_group("pp"), "recompute": layout.recompute, "timeout_s": 20}
    options["transport"] = layout.transport
    return Pipeline(schedule, modules, loss_fn, **options), schedule, modules, mesh


def in_one_process(layout: Layout) -> dict[str, Tensor]:
    stages = make_stages(build(layout.schedule, layout.pp, M).n_stages, frozen=layout.frozen)
    for step in range(STEPS):
        for replica in range(layout.data):
            x, y = batch_of(step, replica)
            (F.mse_loss(nn.Sequential(*stages)(x), y) / layout.data).backward()
    return own_gradients(dict(enumerate(stages)))


def assert_equals_one_process(layouts: Sequence[Layout]) -> None:
    n_ranks = layouts[0].pp * layouts[0].data
    with no_process_left():
        found = on_ranks(n_ranks, sharded, layouts, timeout_s=100.0)
    for number, layout in enumerate(layouts):
        expected = in_one_process(layout)
        assert set(expected) == {name for rank in found for name in rank[number][0]}
        for rank, row in enumerate(found):
            gradients, reductions = row[number]
            if layout.shard > 1 and layout.replicate == 1:
                n_stages = len({name.partition(".")[0] for name in gradients})
                assert reductions == GROUPS[layout.wrapped] * n_stages, (
                    f"{layout}, rank {rank}: reductions"
                )
            for name, gradient in gradients.items():
                difference = (gradient - expected[name]).abs().max() / expected[name].abs().max()
                assert difference <= layout.tolerance, (
                    f"{layout}, rank {rank}: {name} differs by {difference:.1e}"
                )


MIXED = MixedPrecisionPolicy(
    param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64
)
ON_4_RANKS = [
    *(Layout(name) for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")),
    Layout("zb_h1", wrapped="root", resharded=False),
    Layout("zb_v", wrapped="blocks"),
    Layout("zb_h1", resharded=False),
    Layout("zb_h1", recompute=True),
    Layout("zb_h1", shard=1, replicate=2),
    Layout("zb_v", policy=MIXED, tolerance=1e-6),
    Layout("zb_v", frozen=True),
]
ON_8_RANKS = [Layout("zb_v", pp=4), Layout("zb_h1", replicate=2)]
ON_3_RANKS = [
    *(Layout(name, pp=3, shard=1) for name in ("zb_h1", "zb_h2", "dualpipe_v")),
    Layout("1f1b", pp=3, shard=1, frozen=True),
]


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(ON_4_RANKS, id="4 ranks", marks=pytest.mark.long),
        pytest.param(ON_8_RANKS, id="8 ranks", marks=pytest.mark.long),
        pytest.param(ON_3_RANKS, id="3 ranks"),
    ],
)
def test_gradients_are_those_of_one_process_and_each_group_is_reduced_once(
    layouts: Sequence[Layout],
) -> None:
    assert_equals_one_process(layouts)


def unequal(replica: int) -> tuple[Tensor, Tensor]:
    """Return sequences of one token with ignored labels; some microbatches have no other."""
    x, y = batch_of(0, replica)
    labels = y.argmax(-1)
    labels[len(labels) - 5 * replica :] = -100
    return x[:, None], labels[:, None]


def with_unequal_tokens(
    rank: int, layout: Layout, divisor: float | None
) -> tuple[float, dict[str, Tensor]]:
    pipe, schedule, modules, mesh = pipeline_of(layout, CrossEntropy())
    arguments = for_rank(mesh.get_local_rank("pp"), schedule, *unequal(replica_of(mesh)))
    loss = take_step(pipe, *arguments, divisor=divisor)
    return loss.item(), whole_gradients(modules)


UNEQUAL = {
    "pp x shard": Layout("1f1b"),
    "hsdp": Layout("gpipe", pp=1, replicate=2),
    # As with NCCL, whose groups have names that all ranks must count alike.
    "no weights in the last stage": Layout("1f1b", bare=True, transport="gloo without tags"),
    "nor under hsdp": Layout("1f1b", replicate=2, bare=True),
}


@pytest.mark.parametrize("layout", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("told", [False, True], ids=["counted", "divisor given"])
def test_unequal_tokens_of_data_ranks_weigh_alike(layout: Layout, told: bool) -> None:
    x, labels = map(torch.cat, zip(*map(unequal, range(layout.data)), strict=True))
    stages = make_stages(layout.pp, layout.bare)
    loss = F.cross_entropy(nn.Sequential(*stages)(x).flatten(0, 1), labels.flatten())
    loss.backward()
    n_counted = float((labels != -100).sum()) if told else None
    for found, gradients in on_ranks(
        layout.pp * layout.data, with_unequal_tokens, layout, n_counted, timeout_s=60.0
    ):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in gradients.items():
            expected = nn.ModuleList(stages).get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def after_others(rank: int) -> list[tuple[float, float]]:
    """Return the losses of steps and evaluations after a step that failed in its middle."""
    layout = Layout("zb_h1", resharded=False)
    pipe, schedule, modules, mesh = pipeline_of(layout)
    pp_rank = mesh.get_local_rank("pp")
    replica = mesh.get_local_rank("dp_shard")
    arguments = for_rank(pp_rank, schedule, *batch_of(0, replica))
    take_step(pipe, *arguments)
    earlier = {name: gradient.clone() for name, gradient in own_gradients(modules).items()}
    calls = iter([False] * 2 + [True] + [False] * 100)

    def fail(*_: object) -> None:
        if pp_rank == 1 and next(calls):
            raise KeyError("my bug")

    hook = modules[pp_rank].register_forward_hook(fail)
    with pytest.raises(StepFailed, match="my bug"):
        take_step(pipe, *arguments)
    hook.remove()
    torch.testing.assert_close(own_gradients(modules), earlier, rtol=0, atol=0)
    training = Pipeline(schedule, modules, F.mse_loss, group=mesh.get_group("pp"), timeout_s=20)
    optimizer = torch.optim.SGD([p for m in modules.values() for p in m.parameters()], lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = take_step(training, *arguments)
        optimizer.step()
        evaluated = training.eval(arguments[0], target=arguments[1])
        found.append((loss.item(), evaluated.item()))
    return found


def test_a_failed_step_leaves_nothing_behind_and_evaluation_sees_the_weights_of_now() -> None:
    found = on_ranks(4, after_others, timeout_s=60.0)
    stages = make_stages(2)
    model = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [batch_of(0, replica) for replica in range(2)]

    def mean_loss() -> Tensor:
        return torch.stack([F.mse_loss(model(x), y) for x, y in batches]).mean()

    for step in range(2):
        optimizer.zero_grad()
        loss = mean_loss()
        loss.backward()
        optimizer.step()
        trained = loss.item()
        evaluated = mean_loss().item()
        for row in found:
            assert row[step] == pytest.approx((trained, evaluated), rel=1e-12)


WRONG_HALF = {
    "inputs": (0, lambda pipe, x, y: pipe.step(x[:1])),
    "target": (1, lambda pipe, x, y: pipe.step(target=y[:1])),
    "on": (1, lambda pipe, x, y: pipe.evaluate(on="first")),
}
"""Of a data rank, on which pipeline rank something is wrong, and its call there."""


def refused_on_one_data_rank(rank: int, bare: bool) -> list[str]:
    """Return this rank's message for each mistake of data rank 1, each in a new pipeline."""
    said = []
    for name, (guilty, wrong) in WRONG_HALF.items():
        pipe, schedule, _, mesh = pipeline_of(Layout("1f1b", bare=bare))
        pp_rank = mesh.get_local_rank("pp")
        replica = replica_of(mesh)
        x, y = batch_of(0, replica)
        given = for_rank(pp_rank, schedule, x, y)
        call = (
            partial(pipe.evaluate, given[0]) if name == "on" else partial(take_step, pipe, *given)
        )
        if (pp_rank, replica) == (guilty, 1):
            call = partial(wrong, pipe, x, y)
        with pytest.raises((ValueError, StepFailed)) as refusal:
            call()
        said.append(
            getattr(refusal.value, "what", str(refusal.value)).rpartition("ValueError: ")[2]
        )
    return said


@pytest.mark.parametrize("bare", [False, True], ids=["all sharded", "no weights in the last stage"])
def test_what_one_data_rank_refuses_is_refused_by_all_in_the_same_words(bare: bool) -> None:
    with no_process_left():
        found = on_ranks(4, refused_on_one_data_rank, bare, timeout_s=60.0)
    assert all(said == found[0] for said in found)
    assert all(name in sentence for name, sentence in zip(WRONG_HALF, found[0], strict=True))
