"""Any module can be a stage, whatever crosses its boundaries, and equals one process."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    auto_split,
    build_pipeline_schedule,
    build_pipeline_stage,
    carry_along,
    clip_grad_norm_,
    default_mp_policy,
    destroy_distributed,
    find_ties,
    get_pp_rank,
    get_stage_indices,
    init_distributed,
)
from course_pp.parallel.meta_device import meta_copy, run_on_meta
from course_pp.parallel.stage import find_outputs
from tests.equality import assert_same_training, full, snapshot_gradients, train
from tests.parallel.foreign import Chain, freeze_gradients, models
from tests.parallel.whole_models import build

N_MICROBATCHES = 4
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")


def stages_on_rank(name: str, schedule: str, pp: int, mesh: Any) -> tuple[list[Chain], Any]:
    foreign = models()[name]
    model = foreign.model()
    indices = get_stage_indices(schedule, get_pp_rank(mesh), pp)
    n_stages = pp * len(indices)
    modules = [model.cut(n_stages)[i] for i in indices]
    stages = [
        build_pipeline_stage(
            module, mesh, "cpu", stage=i, n_stages=n_stages, inputs=foreign.example(N_MICROBATCHES)
        )
        for i, module in zip(indices, modules, strict=True)
    ]
    return modules, build_pipeline_schedule(
        stages, N_MICROBATCHES, foreign.loss, schedule, tied=find_ties(model)
    )


def train_on_rank(rank: int, pp: int) -> dict[tuple[str, str], Any]:
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    found = {}
    for name, foreign in models().items():
        for schedule in SCHEDULES:
            modules, pipeline = stages_on_rank(name, schedule, pp, mesh)
            norms: list[float] = []

            def step(_: int) -> torch.Tensor:
                loss = pipeline.step(*foreign.inputs, target=foreign.target, **foreign.kwargs)  # noqa: B023
                for module in modules:  # noqa: B023
                    freeze_gradients(module)
                norms.append(clip_grad_norm_(pipeline.stages, 1e9, device_mesh=mesh).item())  # noqa: B023
                return loss

            trained = train(modules, 2, step)
            evaluated = pipeline.evaluate(*foreign.inputs, on="all", **foreign.kwargs)
            found[name, schedule] = trained, norms[0], evaluated
    return found


@pytest.mark.parametrize(
    "pp", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_any_model_equals_one_process(pp: int, subtests: pytest.Subtests) -> None:
    ranks = on_ranks(pp, train_on_rank, pp)
    for name, foreign in models().items():
        reference, model = foreign.train(), foreign.model()
        norm = torch.linalg.vector_norm(
            torch.stack([g.norm() for g in foreign.train(1).gradients.values()])
        ).item()
        model.load_state_dict(reference.parameters, strict=False)
        expected = model(*foreign.inputs, **foreign.kwargs)
        for schedule in SCHEDULES:
            with subtests.test(model=name, schedule=schedule):
                assert_same_training(
                    [rank[name, schedule][0] for rank in ranks], reference, tied=find_ties(model)
                )
                for rank in ranks:
                    _, found, evaluated = rank[name, schedule]
                    assert found == pytest.approx(norm, rel=1e-12)
                    logits, whole = (
                        o["logits"] if isinstance(o, dict) else o for o in (evaluated, expected)
                    )
                    torch.testing.assert_close(logits, whole, rtol=1e-9, atol=1e-9)


class Aside(nn.Module):
    """A stage that passes a side on beside the rest, through a layer of its own.

    The end uses the side for the rows that ask for it.
    """

    def __init__(self, place: int, last: bool) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.main, self.never, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = last

    def forward(self, x: Tensor, never: Tensor, sometimes: Tensor, asked: Tensor) -> Any:
        x, never, sometimes = (
            torch.tanh(self.main(x)),
            self.never(never),
            torch.tanh(self.sometimes(sometimes)),
        )
        if not self.last:
            return x, never, sometimes, asked
        return x + sometimes * asked[:, None] if asked.any() else x


def asides(n: int, tied: bool) -> list[Aside]:
    """Return stages with a side. The first and the last share a weight of it if ``tied``."""
    stages = [Aside(i, i == n - 1).double() for i in range(n)]
    if tied:
        stages[-1].sometimes.weight = stages[0].sometimes.weight
    return stages


def aside_inputs(asked: list[int]) -> tuple[Tensor, ...]:
    """Return rows, two a microbatch. The rows numbered ``asked`` use the side."""
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flags = torch.zeros(8, dtype=torch.int64)
    flags[asked] = 1
    return x, x, x, flags


def step_aside(modules: Any, optimizer: torch.optim.Optimizer, run: Any) -> dict[str, Any]:
    """Run two steps of AdamW; return the second one's gradients, and the parameters.

    Some of the gradients are None.
    """
    for _ in range(2):
        optimizer.zero_grad()
        run()
        gradients = {(i, n): p.grad for i, m in modules.items() for n, p in m.named_parameters()}
        gradients = {
            key: None if gradient is None else full(gradient) for key, gradient in gradients.items()
        }
        optimizer.step()
    parameters = {(i, n): full(p) for i, m in modules.items() for n, p in m.named_parameters()}
    return {"gradients": gradients, "parameters": parameters}


def decaying(modules: Any) -> torch.optim.Optimizer:
    parameters = dict.fromkeys(p for module in modules.values() for p in module.parameters())
    return torch.optim.AdamW(list(parameters), lr=0.1, weight_decay=0.5)


def asides_on_rank(
    rank: int, pp: int, schedule: str, asked: list[int], tied: bool
) -> dict[str, Any]:
    mesh = init_distributed(DistributedConfig(pp=pp))
    indices = get_stage_indices(schedule, rank, pp)
    n = pp * len(indices)
    modules = {i: asides(n, tied)[i] for i in indices}
    inputs = aside_inputs(asked)
    example = tuple(tensor[:2] for tensor in inputs)
    stages = [
        build_pipeline_stage(m, mesh, "cpu", stage=i, n_stages=n, inputs=example)
        for i, m in modules.items()
    ]
    ties = [{0: "sometimes.weight", n - 1: "sometimes.weight"}] if tied else None
    pipeline = build_pipeline_schedule(stages, 4, nn.MSELoss(), schedule, tied=ties)
    return step_aside(
        modules, decaying(modules), lambda: pipeline.step(*inputs, target=inputs[0].cos())
    )


def asides_in_one_process(n: int, asked: list[int], tied: bool) -> dict[str, Any]:
    modules = dict(enumerate(asides(n, tied)))
    inputs = aside_inputs(asked)

    def run() -> None:
        value: Any = inputs
        for module in modules.values():
            value = module(*value)
        nn.functional.mse_loss(value, inputs[0].cos()).backward()

    return step_aside(modules, decaying(modules), run)


@pytest.mark.parametrize(
    ("pp", "schedule", "asked", "tied"),
    [
        pytest.param(3, "1f1b", [], False, id="never"),
        pytest.param(3, "1f1b", [], True, id="never, tied"),
        pytest.param(3, "1f1b", [5], True, id="in one microbatch, tied"),
        pytest.param(2, "interleaved_1f1b", [5], False, id="several stages a rank"),
        pytest.param(2, "zb_v", [2], False, id="neighbours on one rank, split"),
    ],
)
def test_a_tensor_that_a_step_leaves_unused_gives_no_gradient_and_moves_nothing(
    pp: int, schedule: str, asked: list[int], tied: bool
) -> None:
    expected = asides_in_one_process(pp if schedule == "1f1b" else 2 * pp, asked, tied)
    assert any(gradient is None for gradient in expected["gradients"].values())
    seen = set()
    for rank in on_ranks(pp, asides_on_rank, pp, schedule, asked, tied):
        for kind, found in rank.items():
            for key, value in found.items():
                seen.add(key)
                torch.testing.assert_close(
                    value, expected[kind][key], rtol=1e-12, atol=1e-12, msg=f"{kind} of {key}"
                )
    assert seen == expected["parameters"].keys()


class Ragged(nn.Module):
    """A stage that drops negative numbers, so that its shape depends on its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Asking(nn.Linear):
    """A stage that returns another shape when it is told of a negative number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[: 1 if (x < 0).any() else 2]


class Sized(nn.Module):
    """A stage that returns one column fewer if the first number is negative.

    No declaration of shapes can say this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, : 3 if not x.is_meta and x[0, 0] < 0 else 4]


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(4, 4, dtype=dtype)


X, WIDE = torch.zeros(2, 4), torch.zeros(2, 5)

# The argument from which each of two ranks builds its stage, and the message that all get.
REFUSED: dict[str, tuple[Any, str]] = {
    "no inputs": (
        lambda rank: (linear(), {}),
        "nothing says what the first stage takes: pass build_pipeline_stage(..., inputs=",
    ),
    "one size of two": (
        lambda rank: (linear(), {"batch_size": 2}),
        (
            "batch_size=2 and seq_len=None: give both if the first stage takes token ids, else"
            " inputs=, what it is called"
        ),
    ),
    "shapes that depend on data": (
        lambda rank: (linear() if rank else Ragged(), {"inputs": X}),
        (
            "stage 0, a Ragged called with float32 (2, 4) alone on the meta device, does not say"
            " what it returns"
        ),
    ),
    "a shape that depends on an answer": (
        lambda rank: (linear() if rank else Asking(4, 4), {"inputs": X}),
        (
            "does not say what it returns (ValueError: float32 (2, 4) or float32 (1, 4), as it"
            " depends on values): mend"
        ),
    ),
    "a size that only an example could show": (
        lambda rank: (auto_split(nn.Sequential(linear(), Ragged()), X, 2)[rank], {"inputs": X[:1]}),
        ": give auto_split an example of this size",
    ),
    "a stage of a model cut for more ranks": (
        lambda rank: (
            auto_split(nn.Sequential(*(linear() for _ in range(4))), X, 4)[rank],
            {"inputs": X},
        ),
        "rank 0 holds stages [0] of 4, but",
    ),
    "a stage under another number": (
        lambda rank: (
            auto_split(nn.Sequential(linear(), linear()), X, 2)[rank],
            {"inputs": X, "stage": 1 - rank},
        ),
        "but the module is stage 0 of 2: drop both",
    ),
    "neighbours that differ": (
        lambda rank: (linear(), {"inputs": X, "outputs": WIDE if rank == 0 else None}),
        (
            "stage 1, a Linear called with float32 (2, 5) alone on the meta device, does not say"
            " what it returns"
        ),
    ),
    "a dtype that is not computed in": (
        lambda rank: (linear(torch.float64 if rank == 1 else torch.float32), {"inputs": X}),
        (
            "stage 1 is called with float32 (2, 4), but computes in torch.float64: convert the"
            " stages alike"
        ),
    ),
    "a wrapper": (
        lambda rank: (nn.DataParallel(linear()), {"inputs": X}),
        "wrapped in DataParallel",
    ),
    "text at a boundary": (
        lambda rank: (linear(), {"inputs": "x"}),
        "inputs holds a str: only tensors",
    ),
    "a tie nobody has": (
        lambda rank: (linear(), {"inputs": X, "tied": [("weight", "head")]}),
        "no stage has a parameter 'head'",
    ),
    "a tie with a stage that is not there": (
        lambda rank: (linear(), {"inputs": X, "tied": [{0: "weight", 5: "weight"}]}),
        "stage 5 has no parameter 'weight'; it has none",
    ),
    "ties that differ": (
        lambda rank: (linear(), {"inputs": X, "tied": [{0: "weight", 1: "bias"}] * rank}),
        "rank 1 was given tied=[{0: 'weight', 1: 'bias'}], rank 0 []",
    ),
    "a tie of unlike weights": (
        lambda rank: (linear(), {"inputs": X, "tied": [{0: "weight", 1: "bias"}]}),
        "are float32 (4, 4) on stage 0, float32 (4,) on stage 1",
    ),
}


def refusals_on_rank(rank: int) -> dict[str, str]:
    mesh = init_distributed(DistributedConfig(pp=2))
    found = {}
    for name, (given, _) in REFUSED.items():
        module, options = given(rank)
        tied = options.pop("tied", None)
        try:
            stage = build_pipeline_stage(module, mesh, "cpu", **options)
        except (TypeError, ValueError) as error:
            found[name] = f"alone: {error}"
            continue
        found[name] = "not refused"
        try:
            schedule = "interleaved_1f1b" if stage.num_stages > 2 else "gpipe"
            build_pipeline_schedule(stage, 2, nn.MSELoss(), schedule, tied=tied, timeout_s=20)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_a_pipeline_is_refused_in_words() -> None:
    first, second = on_ranks(2, refusals_on_rank, timeout_s=60)
    for name, (_, words) in REFUSED.items():
        told = [one for one in (first[name], second[name]) if not one.startswith("alone: ")]
        assert len(set(told)) <= 1, name
        assert words in first[name], name


def sharded_inside_on_rank(rank: int) -> list[str]:
    """Return the refusal of a stage of which only parts are sharded, by schedule."""
    mesh, said = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp_shard")), []
    for schedule in ("zb_h1", "gpipe"):
        module = nn.Sequential(linear(), linear())
        fully_shard(module[rank], mesh=mesh["dp_shard"])
        stage = build_pipeline_stage(module, mesh, "cpu", inputs=X)
        try:
            build_pipeline_schedule(stage, 2, nn.MSELoss(), schedule)
        except ValueError as refusal:
            said.append(str(refusal))
    return said


def test_a_split_backward_refuses_stages_of_which_only_parts_are_sharded() -> None:
    first, second = on_ranks(2, sharded_inside_on_rank, timeout_s=60)
    assert first == second
    [refusal] = first
    assert (
        "schedule 'zb_h1' splits backward in two, and FSDP2 shards '0' of stage 0, but not the"
        " stage:" in refusal
    )


def wrong_batches_on_rank(rank: int) -> list[str]:
    """Return the refusals of batches that do not fit a pipeline of two microbatches of two rows."""
    mesh = init_distributed(DistributedConfig(pp=2))
    torch.manual_seed(0)
    stage = build_pipeline_stage(linear(), mesh, "cpu", inputs=X)
    pipeline = build_pipeline_schedule(stage, 2, nn.MSELoss(), "gpipe")
    batch, found = torch.ones(4, 4), []
    for arguments, keywords in [
        ((), {"target": batch}),
        ((batch[:3],), {"target": batch}),
        ((batch.double(),), {"target": batch}),
        ((batch, batch), {"target": batch}),
        ((batch,), {"target": batch[:3]}),
        ((batch,), {"target": batch, "mask": batch}),
    ]:
        with pytest.raises(ValueError, match=r".") as refusal:
            pipeline.step(*arguments, **keywords)
        found.append(str(refusal.value))
    pipeline.step(batch, target=batch)
    stage.submod.double()
    with pytest.raises(ValueError, match=r".") as refusal:
        pipeline.step(batch, target=batch)
    return [*found, str(refusal.value)]


def test_a_batch_that_does_not_fit_is_refused_on_every_rank() -> None:
    first, second = on_ranks(2, wrong_batches_on_rank, timeout_s=60)
    assert first == second
    words = [
        "inputs is missing on the rank that holds the first stage",
        (
            "inputs is float32 (3, 4), but the pipeline was built for float32 (4, 4), of"
            " n_microbatches × rows = 2 × 2"
        ),
        "inputs is float64 (4, 4), but",
        "inputs is (float32 (4, 4), float32 (4, 4))",
        "target has shape (3, 4)",
        (
            "keyword argument mask goes to every stage, but stage 0, a Linear, takes input: let its"
            " forward take it"
        ),
        "computes in torch.float64, but computed in torch.float32 when it was built",
    ]
    for told, expected in zip(first, words, strict=True):
        assert expected in told


def waits(x: torch.Tensor, *, in_vain: bool) -> torch.Tensor:
    """Loop until all values are above 0. If ``in_vain``, loop for ever."""
    while not (x > 0).all() or (in_vain and (x > 0).any()):
        x = x + 1
    return x


def test_a_loop_over_questions_on_meta_ends_by_the_answer_that_ends_it() -> None:
    x = torch.empty(3, device="meta")
    assert run_on_meta(partial(waits, x, in_vain=False)).shape == (3,)
    with pytest.raises(RuntimeError, match="asks for values without end"):
        run_on_meta(partial(waits, x, in_vain=True))


class Writes(nn.Linear):
    writes = ("early",)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), {"early": x}


class Reads(nn.Linear):
    reads = ("early",)

    def forward(self, x: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + early


def odd_keywords_on_rank(rank: int) -> list[str]:
    """Return the refusals of a keyword that only the wrapping of a stage would take."""
    mesh, batch, found = init_distributed(DistributedConfig(pp=2)), torch.ones(4, 4), []
    cut = auto_split(nn.Sequential(linear(), linear()), {"input": X}, 2)[rank]
    compiled = torch.compile(
        auto_split(nn.Sequential(linear(), linear()), X, 2)[rank], backend="eager"
    )
    carrying = carry_along({rank: Reads(4, 4) if rank else Writes(4, 4)}, mesh)[rank]
    whole = torch.compile(linear(), backend="eager")
    for module, inputs in (cut, {"input": X}), (carrying, X), (whole, X), (compiled, X):
        stage = build_pipeline_stage(module, mesh, "cpu", inputs=inputs)
        pipeline = build_pipeline_schedule(stage, 2, nn.MSELoss(), "gpipe")
        given = {"input": batch} if module is cut else batch
        for run in (
            partial(pipeline.step, target=batch),
            partial(pipeline.eval, target=batch),
            pipeline.evaluate,
        ):
            with pytest.raises(ValueError, match=r".") as refusal:
                run(given, mask=batch)
            found.append(str(refusal.value))
        pipeline.step(given, target=batch)
        if module is cut:
            with pytest.raises(
                ValueError, match="is called with one of this name already: leave it out"
            ):
                pipeline.evaluate(given, input=batch)
    return found[::3] if found[::3] == found[1::3] == found[2::3] else found


def test_a_keyword_that_a_stage_does_not_take_is_refused_on_every_rank_whatever_wraps_the_stage() -> (
    None
):
    first, second = on_ranks(2, odd_keywords_on_rank, timeout_s=60)
    assert first == second
    goes = "keyword argument mask goes to every stage, but stage 0, a "
    of_cut, of_carrying, of_whole, of_compiled = first
    assert of_cut.startswith(
        f"{goes}SequentialStage, was cut with an example without it: give auto_split a dict that"
    )
    assert of_carrying == f"{goes}Writes, takes x: let its forward take it, or **kwargs"
    assert of_whole.startswith(f"{goes}OptimizedModule, takes input: let")
    assert of_compiled.startswith(f"{goes}OptimizedModule, was cut with an example without it")


def unequal_on_rank(rank: int) -> str:
    mesh = init_distributed(DistributedConfig(pp=2))
    torch.manual_seed(rank)
    stage = build_pipeline_stage(Sized(), mesh, "cpu", inputs=X)
    pipeline = build_pipeline_schedule(
        stage, 2, nn.MSELoss(), "gpipe", tied=[{0: "linear.bias", 1: "linear.bias"}]
    )
    with pytest.raises(ValueError, match=r".") as refusal:
        pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return str(refusal.value)


def test_tied_weights_that_start_unequal_are_refused_before_the_first_step() -> None:
    for refusal in on_ranks(2, unequal_on_rank, timeout_s=60):
        assert (
            "the tied weight {0: 'linear.bias', 1: 'linear.bias'} holds other values on stage 1"
            in refusal
        )


def changing_on_rank(rank: int) -> None:
    mesh = init_distributed(DistributedConfig(pp=2))
    stage = build_pipeline_stage(Sized(), mesh, "cpu", inputs=X)
    pipeline = build_pipeline_schedule(stage, 2, nn.MSELoss(), "gpipe")
    pipeline.step(-torch.ones(4, 4), target=torch.ones(4, 4))


def test_a_stage_that_returns_what_it_did_not_declare_is_named() -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        on_ranks(2, changing_on_rank, timeout_s=60)
    assert "stage 0 returned float32 (2, 3) where float32 (2, 4) was declared" in str(
        caught.value.__cause__
    )


class Counting(nn.Module):
    """A module with a parameter under two names, a buffer, and a replaced forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"hidden": self.second(self.first(x)), "count": self.calls[None]}


@pytest.fixture
def lone_rank() -> Iterator[None]:
    init_distributed(DistributedConfig())
    yield
    destroy_distributed()


@pytest.mark.usefixtures("lone_rank")
def test_what_a_wrapped_stage_returns_is_found_without_touching_it() -> None:
    """The stage is checkpointed, compiled and sharded in half precision.

    Its copy for the trial keeps only the dtype.
    """
    module = nn.Sequential(Counting())
    apply_ac(module, "full", blocks=Counting)
    module[0].register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    module[0].compile(backend="eager")
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)), mp_policy=default_mp_policy())
    stage = build_pipeline_stage(module, None, "cpu", stage=0, n_stages=2, inputs=torch.zeros(3, 4))
    found = find_outputs(stage, stage.takes, {})
    assert str(found) == "{'hidden': bfloat16 (3, 4), 'count': float32 (1,)}"
    assert module[0].calls.item() == 0
    copy = meta_copy(module)
    assert copy[0].second.weight is copy[0].first.weight
    assert {tensor.device.type for tensor in copy.state_dict().values()} == {"meta"}


@pytest.mark.usefixtures("lone_rank")
def test_what_torch_compile_returns_is_a_stage_and_stays_as_it_is() -> None:
    module, x = nn.Sequential(linear(), nn.Tanh(), linear()), torch.randn(4, 4)
    nn.MSELoss()(module(x), x).backward()
    expected = snapshot_gradients([module])
    module.zero_grad()
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, nn.Module)
    stage = build_pipeline_stage(compiled, None, "cpu", inputs=X)
    build_pipeline_schedule(stage, 2, nn.MSELoss(), "1f1b").step(x, target=x)
    torch.testing.assert_close(snapshot_gradients([module]), expected)


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.slow
@pytest.mark.parametrize("compiles_last", [False, True])
def test_what_a_compiled_stage_returns_has_the_dtype_of_its_mixed_precision(
    compiles_last: bool,
) -> None:
    def compiled(module: nn.Module) -> nn.Module:
        found = torch.compile(module, backend="eager")
        assert isinstance(found, nn.Module)
        return found

    module: nn.Module = nn.Sequential(linear())
    module = fully_shard(
        module if compiles_last else compiled(module), mp_policy=default_mp_policy()
    )
    module = compiled(module) if compiles_last else module
    assert module(X).dtype == meta_copy(module)(X.to("meta")).dtype == torch.bfloat16


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_whole_model_of_experts_is_a_stage(implementation: str) -> None:
    """Neither of the two ways to compute experts runs on the meta device.

    They are a grouped product in float32, and a loop over the experts that have rows.
    """
    model: Any = build("mixtral").float()
    model.set_experts_implementation(implementation)
    tokens = torch.arange(16).view(4, 4)

    def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
        return (output.logits - target).square().mean()

    loss_of(model(tokens), torch.ones(4, 4, 1)).backward()
    expected = snapshot_gradients([model])
    model.zero_grad()
    stage = build_pipeline_stage(model, None, "cpu", 2, 4)
    build_pipeline_schedule(stage, 2, loss_of, "1f1b").step(tokens, target=torch.ones(4, 4, 1))
    torch.testing.assert_close(snapshot_gradients([model]), expected)


PRODUCTS = [  # the shapes of both, and where each of two groups ends
    ((6, 4), (2, 4, 8), [4, 6]),
    ((2, 6, 4), (2, 4, 8), None),
    ((2, 6, 4), (4, 8), [4, 8]),
    ((6, 8), (8, 8), [4, 8]),
]


@pytest.mark.parametrize(("one", "other", "ends"), PRODUCTS)
def test_a_product_of_groups_has_the_same_shape_on_the_meta_device(
    one: Any, other: Any, ends: Any
) -> None:
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    product = F.grouped_mm(torch.ones(one), torch.ones(other), offs=offsets)
    on_meta = [torch.ones(shape, device="meta") for shape in (one, other)]
    assert run_on_meta(lambda: F.grouped_mm(*on_meta, offs=offsets)).shape == product.shape
