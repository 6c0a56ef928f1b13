"""The examples for models that are not ours: short, equal to one process on every layout, and able to run."""

import importlib.util
import sys
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_pp import parallel
from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig, clip_grad_norm_, destroy_distributed, find_ties, init_distributed
from tests.equality import Trained, adamw, assert_same_training, snapshot_gradients, snapshot_parameters
from tests.source_code.scripts import labelled_lines

EXAMPLES = Path(__file__).parents[2] / "source_code" / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
LONGEST = 80
RANKS_IMPORT = ["transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"]
STEPS, MAX_NORM = 2, 0.5

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")
LAYOUTS = [
    DistributedConfig(pp=2, dp_shard=1),
    DistributedConfig(pp=2, dp_shard=2),
    DistributedConfig(pp=4, dp_shard=1),
    DistributedConfig(pp=4, dp_shard=2),
    DistributedConfig(pp=2, dp_replicate=2, dp_shard=2),
    DistributedConfig(pp=2, dp_shard=1, tp=2),
    DistributedConfig(pp=2, dp_shard=2, tp=2),
]


def load(name: str) -> ModuleType:
    """The example as a module; ranks load it by themselves."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """In the dtype of ``x``: transformers takes float32, which now and then rounds sums of another order apart."""
    return torch.nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def built(example: ModuleType, tied: bool) -> Any:
    if "llama" in example.__name__:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        LlamaRMSNorm.forward = rms_norm
    takes_it = "tied" in signature(example.build_model).parameters
    return example.build_model(tied) if takes_it else example.build_model()


def reference(name: str, tied: bool) -> tuple[Trained, list[float]]:
    """One process, each batch in one piece; gradients are the first step's, before clipping."""
    example = load(name)
    model = built(example, tied).double()
    optimizer, losses, norms, gradients = adamw([model]), [], [], {}
    for step in range(STEPS):
        inputs, target = example.batch(step, None)
        output = model(inputs.double() if inputs.is_floating_point() else inputs)
        output = getattr(output, "logits", output)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or snapshot_gradients([model])
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return Trained(losses, gradients, snapshot_parameters([model])), norms


def whole(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in values.items()}


def train_on_rank(rank: int, name: str, tied: bool, layout: DistributedConfig, schedule: str) -> Any:
    example, mesh = load(name), init_distributed(layout)
    parallel.default_mp_policy = MixedPrecisionPolicy  # to compute, and reduce, in float64
    pipeline = example.build(built(example, tied).double(), mesh, schedule)
    modules = pipeline.modules
    optimizer, losses, norms, gradients = adamw(modules), [], [], {}
    for step in range(STEPS):
        inputs, target = example.batch(step, mesh)
        optimizer.zero_grad()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        losses.append(pipeline.step(inputs, target=target).item())
        gradients = gradients or whole(snapshot_gradients(modules))
        norms.append(clip_grad_norm_(pipeline.stages, MAX_NORM, device_mesh=mesh).item())
        optimizer.step()
    trained = Trained(losses, gradients, whole(snapshot_parameters(modules)))
    destroy_distributed()
    return trained, norms


def assert_equal(name: str, tied: bool, layout: DistributedConfig, schedule: str, **tolerances: float) -> None:
    n_ranks = layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp
    ranks = on_ranks(n_ranks, train_on_rank, name, tied, layout, schedule, timeout_s=100)
    expected, norms = reference(name, tied)
    assert_same_training([trained for trained, _ in ranks], expected, find_ties(built(load(name), tied)))
    for _, found in ranks:
        assert found == pytest.approx(norms, rel=1e-11)


def rounded_on_rank(rank: int, name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The first loss and gradients as the example computes them, in bfloat16 with float32 parameters."""
    example, mesh = load(name), init_distributed(IN_BFLOAT16)
    pipeline = example.build(built(example, tied=False), mesh, "1f1b")
    inputs, target = example.batch(0, mesh)
    loss = pipeline.step(inputs, target=target).item()
    gradients = whole(snapshot_gradients(pipeline.modules))
    destroy_distributed()
    return loss, gradients


IN_BFLOAT16 = DistributedConfig(pp=2, dp_shard=2)
N_LAYERS = 14  # of the deepest example


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gpt2", marks=pytest.mark.full), pytest.param("convnet", marks=pytest.mark.full)]
)
def test_an_example_in_bfloat16_differs_from_exact_numbers_by_rounding(name: str) -> None:
    """Within 4 · sqrt(16 · L) · u of float64, as one process in bfloat16 is too.

    u = 2^-9 is the most that rounding to bfloat16 changes a number by, relatively. From the inputs to a gradient lie at
    most 8 rounded products a layer on the way forward and as many back. Their errors have no common sign, so the 16 · L
    of them add up as a random walk does; 4 is for four standard deviations, and for layers that magnify a little.
    """
    ranks = on_ranks(4, rounded_on_rank, name, timeout_s=100)
    (expected, _), bound = reference(name, False), 4 * (16 * N_LAYERS) ** 0.5 * 2**-9
    for loss, gradients in ranks:
        assert loss == pytest.approx(expected.losses[0], rel=bound)
        for key, gradient in gradients.items():
            exact = expected.gradients[key]
            assert (gradient - exact).norm() <= bound * exact.norm(), key


CASES = [
    (name, tied, layout, schedule)
    for name in ("convnet", "gpt2", "llama")
    for tied in ((False,) if name == "convnet" else (True, False))
    for layout in LAYOUTS
    if layout.tp == 1 or name == "llama"
    for schedule in SCHEDULES
]
SAMPLE = [("gpt2", True, DistributedConfig(pp=2, dp_shard=2), "interleaved_1f1b")]
LONG = [
    ("convnet", False, DistributedConfig(pp=2, dp_shard=2), "zb_v"),
    ("llama", True, DistributedConfig(pp=2, dp_shard=1, tp=2), "1f1b"),
]


@pytest.mark.parametrize(
    ("name", "tied", "layout", "schedule"),
    [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.long if case in LONG else pytest.mark.full)
        for case in CASES
    ],
)
def test_an_example_equals_one_process(name: str, tied: bool, layout: DistributedConfig, schedule: str) -> None:
    assert_equal(name, tied, layout, schedule)


@pytest.mark.sample(3)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if "alone" not in name])
def test_an_example_runs_as_its_docstring_says(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    steps = [line for line in labelled_lines(2, [str(EXAMPLES / script)]) if "loss" in line]
    assert len(steps) >= 5


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_short(script: str) -> None:
    code = (EXAMPLES / script).read_text().split('"""', 2)[2]
    assert len(code.strip().splitlines()) <= LONGEST


def torch_alone_on_rank(rank: int) -> tuple[torch.Tensor, list[float], list[float]]:
    """This rank's end of the tie after training, the norms it clipped by, and those of the whole model."""
    sys.path.insert(0, str(EXAMPLES))
    parallel.apply_fsdp2 = partial(parallel.apply_fsdp2, mp_policy=MixedPrecisionPolicy())  # to compute in float32
    alone, ours = load("gpt2_torch_alone"), load("gpt2")
    module, norms = alone.main(steps=STEPS)
    end = (module.transformer.wte if "wte" in module.transformer else module.lm_head).weight.full_tensor().detach()
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2))
    pipeline = ours.build(ours.build_model(), mesh, "1f1b")
    optimizer, expected = torch.optim.AdamW(pipeline.parameters(), lr=1e-3), []
    for step in range(STEPS):
        inputs, target = ours.batch(step, mesh)
        optimizer.zero_grad()
        pipeline.step(inputs, target=target)
        expected.append(clip_grad_norm_(pipeline.stages, 1.0, device_mesh=mesh).item())
        optimizer.step()
    destroy_distributed()
    return end, norms, expected


@pytest.mark.long
def test_torch_alone_goes_wrong_in_silence_as_the_table_says() -> None:
    ranks = on_ranks(4, torch_alone_on_rank, timeout_s=100)
    (embedding, first, _), *_, (head, last, whole) = ranks
    assert (embedding - head).abs().max() > 1e-3
    assert first != pytest.approx(last, rel=0.01)
    assert whole[0] > 1.05 * max(first[0], last[0])
    assert all(expected == pytest.approx(whole, rel=1e-6) for *_, expected in ranks)
