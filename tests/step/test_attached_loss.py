"""A loss in the middle of the model gives one process's gradients and sums, under both engines."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, Transformer, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    PipelineSchedule,
    apply_ac,
    apply_compile,
    apply_fsdp2,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_dp_rank,
    get_dp_size,
    get_pp_rank,
    get_pp_size,
    get_stage_indices,
    init_distributed,
)
from course_pp.runtime import Pipeline, StepFailed
from course_pp.schedule import build, names
from course_pp.step.loss import TokenLoss, attach_loss
from tests.equality import Trained, assert_same_training, snapshot_gradients
from tests.grids import crossed
from tests.parallel.small import model_config
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stages_of, take_step
from tests.runtime.stepping import Done, assert_equal_steps, gradients, through

pytestmark = pytest.mark.timeout(60)

WIDTH, SEQ_LEN, VOCABULARY, M = 4, 3, 7, 4
SYNCHRONOUS = [name for name in names() if name != "pipedream"]

Batch = tuple[list[Tensor], list[Tensor]]


class Part(nn.Module):
    """A stage with two losses of its own: one depends on its input, the other on a weight alone."""

    def __init__(self, stage: int, n_stages: int, attach: bool) -> None:
        super().__init__()
        self.stage = stage
        self.attach = attach
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if stage == n_stages - 1 else None
        self.losses: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        router = self.router(x).softmax(-1).square().mean()
        x = self.with_loss(x + F.gelu(self.linear(x)), 0.7 * router, f"router {self.stage}")
        x = self.with_loss(x, 0.3 * self.linear.weight.square().sum(), f"decay {self.stage}")
        return x if self.head is None else self.head(x)

    def with_loss(self, x: Tensor, loss: Tensor, name: str) -> Tensor:
        if self.attach:
            return attach_loss(x, loss, name)
        self.losses[name] = loss
        return x


def parts(n_stages: int, attach: bool = True) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Part(stage, n_stages, attach).double() for stage in range(n_stages)]


def batch(n_microbatches: int, seed: int = 0) -> Batch:
    """Return microbatches of one to three rows and unequal token counts, 0 in the third."""
    generator = torch.Generator().manual_seed(seed)
    rows = [1 + i % 3 for i in range(n_microbatches)]
    inputs, targets = (
        [torch.randint(VOCABULARY, (n, SEQ_LEN), generator=generator) for n in rows]
        for _ in range(2)
    )
    for i, target in enumerate(targets):
        target[:, : i % 3] = -100
    targets[2][:] = -100
    return inputs, targets


def mean_square(logits: Tensor, target: Tensor) -> Tensor:
    """A loss that averages over samples and counts no tokens."""
    return (logits.square() * (target + 1)[..., None]).mean()


def in_one_process(
    stages: Sequence[nn.Module],
    steps: Sequence[Batch],
    loss_fn: Any,
    collect: Callable[[], dict[str, Tensor]],
) -> tuple[list[Done], list[dict[str, float]]]:
    """Return each step's losses, gradients and sums of attached losses.

    ``collect`` returns the attached losses of the last forward.
    """
    done = []
    sums = []
    for inputs, targets in steps:
        counts = [loss_fn.count(t) if isinstance(loss_fn, TokenLoss) else len(t) for t in targets]
        losses = []
        total = {}
        for x, target, count in zip(inputs, targets, counts, strict=True):
            weight = float(count) / float(sum(counts))
            loss = weight * loss_fn(through(stages, x), target)
            attached = {name: weight * each for name, each in collect().items()}
            (loss + sum(attached.values())).backward()
            losses.append(loss.item())
            total = {name: total.get(name, 0.0) + each.item() for name, each in attached.items()}
        done.append(Done(losses, gradients(dict(enumerate(stages)))))
        sums.append(total)
        for stage in stages:
            stage.zero_grad()
    return done, sums


def parts_in_one_process(
    n_stages: int, steps: Sequence[Batch], loss_fn: Any
) -> tuple[list[Done], list[dict[str, float]]]:
    stages = parts(n_stages, attach=False)
    return in_one_process(
        stages, steps, loss_fn, lambda: {n: x for s in stages for n, x in s.losses.items()}
    )


def runtime_steps(
    rank: int, name: str, n_ranks: int, steps: Sequence[Batch], loss_fn: Any, recompute: bool
) -> tuple[list[Done], list[dict[str, float]]]:
    schedule = build(name, n_ranks, len(steps[0][0]))
    stages = parts(schedule.n_stages)
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, mine, loss_fn, recompute=recompute, timeout_s=20)
    done = []
    sums = []
    for inputs, targets in steps:
        take_step(pipeline, *for_rank(rank, schedule, inputs, targets))
        done.append(Done(list(pipeline.shares), gradients(mine)))
        sums.append(pipeline.attached)
        for module in mine.values():
            module.zero_grad()
    return done, sums


def assert_equal_sums(
    found: Sequence[Sequence[dict[str, float]]], expected: Sequence[dict[str, float]]
) -> None:
    for rank, sums in enumerate(found):
        torch.testing.assert_close(
            sums, expected, rtol=1e-12, atol=0, msg=lambda m, r=rank: f"rank {r}: {m}"
        )


@pytest.mark.parametrize(
    ("name", "recompute", "loss_fn"),
    crossed(
        SYNCHRONOUS,
        [False, True],
        [pytest.param(mean_square, id="samples"), pytest.param(CrossEntropy(), id="tokens")],
    ),
)
def test_the_runtime_adds_an_attached_loss_under_every_schedule(
    name: str, recompute: bool, loss_fn: Any
) -> None:
    steps = [batch(4), batch(4, 1)]
    n_stages = build(name, 2, 4).n_stages
    with no_process_left():
        found = on_ranks(2, runtime_steps, name, 2, steps, loss_fn, recompute, timeout_s=30.0)
    expected, sums = parts_in_one_process(n_stages, steps, loss_fn)
    assert_equal_steps([done for done, _ in found], expected)
    assert_equal_sums([each for _, each in found], sums)


def sharded_runtime_step(
    rank: int, data: Batch
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    stage = mesh.get_local_rank("pp")
    replica = mesh.get_local_rank("dp_shard")
    module = parts(2)[stage]
    fully_shard(module, mesh=mesh["dp_shard"])
    schedule = build("zb_h1", 2, M)
    mine = (part[M * replica : M * (replica + 1)] for part in data)
    pipeline = Pipeline(schedule, module, CrossEntropy(), group=mesh.get_group("pp"), timeout_s=20)
    loss = take_step(pipeline, *for_rank(stage, schedule, *mine))
    whole = {f"{stage}.{name}": p.grad.full_tensor() for name, p in module.named_parameters()}
    return loss.item(), whole, pipeline.attached


def test_the_runtime_averages_attached_losses_over_data_ranks() -> None:
    data = batch(2 * M)
    [expected], [sums] = parts_in_one_process(2, [data], CrossEntropy())
    for loss, whole, attached in on_ranks(4, sharded_runtime_step, data, timeout_s=30.0):
        assert loss == pytest.approx(sum(expected.losses), rel=1e-12)
        assert attached == pytest.approx(sums, rel=1e-12)
        for name, gradient in whole.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=0, atol=1e-12)


def test_an_update_within_the_step_takes_the_whole_attached_loss() -> None:
    inputs, targets = batch(M)
    [stage] = parts(1)
    [alone] = parts(1, attach=False)
    optimizer, plain = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (stage, alone))
    schedule = build("pipedream", 1, M)
    pipeline = Pipeline(
        schedule, stage, CrossEntropy(), optimizers={0: optimizer}, versions="stash", tied=()
    )
    take_step(pipeline, inputs, targets)
    for x, target in zip(inputs, targets, strict=True):
        plain.zero_grad()
        (CrossEntropy()(alone(x), target) + sum(alone.losses.values())).backward()
        plain.step()
    torch.testing.assert_close(
        list(stage.parameters()), list(alone.parameters()), rtol=0, atol=1e-12
    )


# The production stack. Its microbatches have equally many rows, of which unequally many tokens
# count.

ROWS = 8


class Recipe(NamedTuple):
    schedule: str
    layout: DistributedConfig = DistributedConfig(pp=2)
    ac: Literal["none", "full"] = "none"
    tied: bool = False
    foreign: bool = False
    compiled: bool = False


RECIPES = [
    *(
        Recipe(name)
        for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", "gpipe")
    ),
    *(Recipe(name, foreign=True) for name in ("1f1b", "zb_h1", "zb_v", "dualpipe_v")),
    *(Recipe(name, tied=True) for name in ("1f1b", "zb_v")),
    *(Recipe(name, ac="full") for name in ("interleaved_1f1b", "zb_v")),
    Recipe("zb_h1", compiled=True),
]
SHARDED = [
    *(Recipe(name, DistributedConfig(pp=2, dp_shard=2)) for name in ("1f1b", "zb_v")),
    Recipe("interleaved_1f1b", DistributedConfig(pp=2, dp_shard=2), ac="full", tied=True),
]


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, target = (
        torch.randint(VOCABULARY, (ROWS, SEQ_LEN), generator=generator) for _ in range(2)
    )
    target[0, 1:] = -100
    target[2:4] = -100
    target[5] = -100
    return inputs, target


def with_losses(model: nn.Module, attach: bool) -> dict[str, Tensor]:
    """Give each feed-forward of the decoder two losses, by a hook; return their dict."""
    losses: dict[str, Tensor] = {}

    def hook(name: str, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        for what, loss in {
            "square": output.square().mean(),
            "decay": decay_of(module.up_proj),
        }.items():
            output = attach_loss(output, loss, f"{what} {name}") if attach else output
            losses[f"{what} {name}"] = loss
        return output

    for name, layer in model.layers.items():
        layer.mlp.register_forward_hook(partial(hook, name))
    return losses


def decay_of(linear: nn.Linear) -> Tensor:
    return 0.1 * linear.weight.square().mean()


def stage_modules(recipe: Recipe, rank: int, pp: int) -> list[nn.Module]:
    indices = get_stage_indices(recipe.schedule, rank, pp)
    n_stages = pp * len(indices)
    if recipe.foreign:
        return [parts(n_stages)[i] for i in indices]
    modules = [build_stage_module(model_config(recipe.tied), i, n_stages).double() for i in indices]
    for module in modules:
        with_losses(module, attach=True)
    return modules


def build_pipeline(
    recipe: Recipe, loss_fn: Any = None
) -> tuple[Any, list[nn.Module], PipelineSchedule]:
    mesh = init_distributed(recipe.layout, seed=0)
    modules = stage_modules(recipe, get_pp_rank(mesh), get_pp_size(mesh))
    indices = get_stage_indices(recipe.schedule, get_pp_rank(mesh), get_pp_size(mesh))
    for module in modules:
        apply_ac(module, recipe.ac)
        if recipe.compiled:
            apply_compile(module, backend="eager")
        if recipe.layout.dp_shard > 1:
            apply_fsdp2(module, mesh)
    sizes = (mesh, "cpu", ROWS // M // get_dp_size(mesh), SEQ_LEN)
    n_stages = len(indices) * get_pp_size(mesh)
    stages = [
        build_pipeline_stage(module, *sizes, stage=i, n_stages=n_stages)
        for i, module in zip(indices, modules, strict=True)
    ]
    pipeline = build_pipeline_schedule(
        stages, M, loss_fn or CrossEntropy(), recipe.schedule, tied=() if recipe.foreign else None
    )
    return mesh, modules, pipeline


def parallel_steps(
    rank: int, recipes: Sequence[Recipe]
) -> list[tuple[Trained, list[dict[str, float]], bool]]:
    """Return the result of two steps, and whether evaluation between them changes nothing."""
    results = []
    for recipe in recipes:
        mesh, modules, pipeline = build_pipeline(recipe)
        losses = []
        sums = []
        same = True
        for seed in range(2):
            inputs, target = (
                part.chunk(get_dp_size(mesh))[get_dp_rank(mesh)] for part in rows(seed)
            )
            losses.append(pipeline.step(inputs, target=target).item())
            before = snapshot_gradients(modules)
            pipeline.eval(inputs, target=target)
            after = snapshot_gradients(modules)
            same = same and all(torch.equal(before[name], after[name]) for name in before)
            sums.append(pipeline.attached)
        gradients = (
            {f"{m.stage}.{n}": p.grad for m in modules for n, p in m.named_parameters()}
            if recipe.foreign
            else after
        )
        results.append((Trained(losses, gradients, {}), sums, same))
    return results


def recipe_in_one_process(recipe: Recipe) -> tuple[Trained, list[dict[str, float]]]:
    n_microbatches = M * max(1, recipe.layout.dp_shard)
    steps = [tuple(list(part.chunk(n_microbatches)) for part in rows(seed)) for seed in range(2)]
    if recipe.foreign:
        n_stages = 2 * len(get_stage_indices(recipe.schedule, 0, 2))
        done, sums = parts_in_one_process(n_stages, steps, CrossEntropy())
    else:
        torch.manual_seed(0)
        model = Transformer(model_config(recipe.tied)).double()
        losses = with_losses(model, attach=False)
        done, sums = in_one_process([model], steps, CrossEntropy(), lambda: losses)
    total = {name: done[0].gradients[name] + done[1].gradients[name] for name in done[0].gradients}
    if not recipe.foreign:
        total = {name.removeprefix("0."): gradient for name, gradient in total.items()}
    return Trained([sum(each.losses) for each in done], total, {}), sums


@pytest.mark.parametrize(
    ("n_ranks", "recipes"), [(2, RECIPES), (4, SHARDED)], ids=["pp", "with FSDP2"]
)
def test_parallel_adds_an_attached_loss_under_what_torch_runs(
    n_ranks: int, recipes: list[Recipe], subtests: Any
) -> None:
    with no_process_left():
        ranks = on_ranks(n_ranks, parallel_steps, recipes, timeout_s=50.0)
    for recipe, found in zip(recipes, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(recipe)):
            expected, sums = recipe_in_one_process(recipe)
            trained, theirs, same = zip(*found, strict=True)
            tied = (("embed.weight", "head.weight"),) if recipe.tied else ()
            assert_same_training(list(trained), expected, tied)
            assert_equal_sums(theirs, sums)
            assert all(same), "eval has changed gradients"


# What is refused, on every rank.


class Wrong(nn.Module):
    """A stage that attaches ``what``, as far as it goes wrong there."""

    def __init__(self, stage: int, what: str) -> None:
        super().__init__()
        self.stage = stage
        self.what = what
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        loss = y.square().mean()
        match self.what if self.stage == 1 or self.what == "in two stages" else "":
            case "no scalar":
                return attach_loss(y, y.square(), "aux")
            case "a number":
                return attach_loss(y, 1.0, "aux")  # type: ignore[arg-type]
            case "no gradient":
                return attach_loss(y, loss.detach(), "aux")
            case "to integers":
                attach_loss(y.long(), loss, "aux")
            case "twice":
                return attach_loss(attach_loss(y, loss, "aux"), loss, "aux")
            case "to nothing":
                attach_loss(y, loss, "aux")
            case "in two stages":
                return attach_loss(y, loss, "aux")
            case "in one stage":
                return attach_loss(y, loss, "aux")
        return y


REFUSALS = {
    "no scalar": r"loss is a tensor of shape \(2, 4\)",
    "a number": "loss is a float",
    "no gradient": "loss has no gradient",
    "to integers": "tensor is torch.int64",
    "twice": "used twice in this microbatch",
    "to nothing": "no gradient came back through its tensor",
    "in two stages": "in stages 0 and 1: give each loss its own name",
}
ZEROS = torch.zeros(ROWS, WIDTH, dtype=torch.float64)


def in_parallel(module: nn.Module) -> PipelineSchedule:
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=ZEROS[: ROWS // M])
    return build_pipeline_schedule(stage, M, F.mse_loss, "1f1b", tied=())


def refused(rank: int, engine: str, what: str) -> str:
    module = Wrong(rank, what).double()
    options = {"recompute": engine == "runtime, recomputed", "timeout_s": 20}
    if engine == "parallel":
        step = partial(in_parallel(module).step, target=ZEROS)
    else:
        step = partial(
            Pipeline(build("1f1b", 2, M), module, F.mse_loss, **options).step, target=ZEROS
        )
    with pytest.raises((StepFailed, ValueError)) as refusal:
        step(ZEROS)
    return str(refusal.value)


@pytest.mark.parametrize("engine", ["runtime", "runtime, recomputed", "parallel"])
@pytest.mark.parametrize(("what", "words"), REFUSALS.items(), ids=REFUSALS)
def test_a_wrong_loss_is_refused_on_every_rank(what: str, words: str, engine: str) -> None:
    with no_process_left():
        for told in on_ranks(2, refused, engine, what, timeout_s=30.0):
            assert re.search(rf"attach_loss\(name='aux'\).*{words}", told), told


def attached_too_late(rank: int) -> None:
    module = Wrong(rank, "").double()
    pipeline = in_parallel(module)
    pipeline.step(ZEROS, target=ZEROS)
    module.what = "in one stage"
    try:
        pipeline.step(ZEROS, target=ZEROS)
    except RuntimeError as error:  # torch wraps what a stage raises
        raise error.__cause__ or error from None


def test_parallel_refuses_a_loss_that_begins_after_the_first_step() -> None:
    with (
        no_process_left(),
        pytest.raises(ValueError, match="no loss was attached in this pipeline's first step"),
    ):
        on_ranks(2, attached_too_late, timeout_s=30.0)


def attached_in_turn(rank: int) -> list[dict[str, float]]:
    """Return both engines' sums after a step that attaches, and after one that does not."""
    module = Wrong(rank, "").double()
    ours = in_parallel(module)
    plain = Pipeline(build("1f1b", 2, M), module, F.mse_loss)
    found = []
    for module.what in ("in one stage", ""):
        ours.step(ZEROS, target=ZEROS)
        plain.step(ZEROS, target=ZEROS)
        found += [ours.attached, plain.attached]
    return found


def test_sums_are_those_of_the_last_step() -> None:
    for first, again, *rest in on_ranks(2, attached_in_turn, timeout_s=30.0):
        assert first == pytest.approx(again)
        assert list(first) == ["aux"]
        assert rest == [{}, {}]


def messages_when_nobody_attaches(rank: int) -> tuple[list[int], dict[str, float]]:
    """Broadcasts in each of two steps, by which weights would be told."""
    pipeline = in_parallel(Wrong(rank, "").double())
    counted: list[int] = []
    for _ in range(2):
        with patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
            pipeline.step(ZEROS, target=ZEROS)
        counted.append(broadcast.call_count)
    return counted, pipeline.attached


def test_weights_are_not_told_when_nobody_attaches() -> None:
    assert on_ranks(2, messages_when_nobody_attaches) == [([1, 0], {})] * 2


# One process.


def test_without_a_pipeline_an_attached_loss_counts_once() -> None:
    x = torch.ones(3, requires_grad=True)
    y = attach_loss(2 * x, 5 * x.sum(), "aux")
    assert torch.equal(y, 2 * x)
    y.relu_().sum().backward()
    assert x.grad.tolist() == [7.0] * 3


def test_without_gradients_nothing_is_attached() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert attach_loss(x, x.sum(), "aux") is x


def attached_in_block(x: Tensor) -> Tensor:
    return attach_loss(2 * x, 5 * x.sum(), "aux")


def test_a_checkpoint_attaches_once_and_a_reentrant_one_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    checkpoint(attached_in_block, x, use_reentrant=False).sum().backward()
    assert x.grad.tolist() == [7.0] * 3
    with pytest.raises(RuntimeError, match="in a reentrant checkpoint"):
        checkpoint(attached_in_block, x, use_reentrant=True).sum().backward()


def test_a_traced_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match="attach_loss in a traced or compiled module"):
        torch.export.export(Wrong(1, "in two stages"), (torch.zeros(2, WIDTH),))
