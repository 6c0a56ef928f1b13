"""The examples for models that are not ours are short, run, and equal one process."""

import importlib.util
import re
import sys
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_pp import parallel
from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    clip_grad_norm_,
    destroy_distributed,
    find_ties,
    init_distributed,
)
from course_pp.training.checkpoint import contents
from tests.equality import (
    GRADIENT_TOLERANCE,
    Trained,
    adamw,
    assert_same_training,
    snapshot_gradients,
    snapshot_parameters,
)
from tests.source_code.scripts import labelled_lines, run_script

EXAMPLES = Path(__file__).parents[2] / "source_code" / "examples"
COMPARE_THEMSELVES = ("lora.py", "multi_token.py", "vlm.py")
SCRIPTS = sorted({path.name for path in EXAMPLES.glob("*.py")} - {*COMPARE_THEMSELVES})
LONGEST = 110
LONGEST_IN_ALL = 200
RANKS_IMPORT = [
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2")),
    *("peft", "course_pp.training.checkpoint"),
]
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
    """Compute in the dtype of ``x``.

    transformers takes float32, which sometimes rounds sums of another order to different numbers.
    """
    return torch.nn.functional.rms_norm(
        x, module.weight.shape, module.weight, module.variance_epsilon
    )


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
    optimizer = adamw([model])
    losses = []
    norms = []
    gradients = {}
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


def train_on_rank(
    rank: int, name: str, tied: bool, layout: DistributedConfig, schedule: str
) -> Any:
    example = load(name)
    mesh = init_distributed(layout)
    parallel.default_mp_policy = MixedPrecisionPolicy  # to compute, and reduce, in float64
    pipeline = example.build(built(example, tied).double(), mesh, schedule)
    modules = pipeline.modules
    optimizer = adamw(modules)
    losses = []
    norms = []
    gradients = {}
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


def assert_equal(
    name: str, tied: bool, layout: DistributedConfig, schedule: str, **tolerances: float
) -> None:
    n_ranks = layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp
    ranks = on_ranks(n_ranks, train_on_rank, name, tied, layout, schedule, timeout_s=100)
    expected, norms = reference(name, tied)
    assert_same_training(
        [trained for trained, _ in ranks], expected, find_ties(built(load(name), tied))
    )
    for _, found in ranks:
        assert found == pytest.approx(norms, rel=1e-11)


def rounded_on_rank(rank: int, name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the first loss and gradients in the example's own bfloat16; parameters are float32."""
    example = load(name)
    mesh = init_distributed(IN_BFLOAT16)
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
    "name",
    [
        "llama",
        pytest.param("gpt2", marks=pytest.mark.full),
        pytest.param("convnet", marks=pytest.mark.full),
    ],
)
def test_an_example_in_bfloat16_differs_from_exact_numbers_by_rounding(name: str) -> None:
    """Within 4 · sqrt(16 · L) · u of float64, as one process in bfloat16 is too.

    u = 2^-9 is the most that rounding to bfloat16 changes a number by, relatively. From the inputs
    to a gradient lie at most 8 rounded products a layer on the way forward and as many back. Their
    errors have no common sign, so the 16 · L of them add up as a random walk does; 4 is for four
    standard deviations, and for layers that magnify a little.
    """
    ranks = on_ranks(4, rounded_on_rank, name, timeout_s=100)
    expected, _ = reference(name, tied=False)
    bound = 4 * (16 * N_LAYERS) ** 0.5 * 2**-9
    for loss, gradients in ranks:
        assert loss == pytest.approx(expected.losses[0], rel=bound)
        for key, gradient in gradients.items():
            exact = expected.gradients[key]
            assert (gradient - exact).norm() <= bound * exact.norm(), key


MODELS = (
    ("convnet", False),
    ("gpt2", True),
    ("gpt2", False),
    ("llama", True),
    ("llama", False),
)
CASES = [
    (name, tied, layout, schedule)
    for (name, tied), layout, schedule in product(MODELS, LAYOUTS, SCHEDULES)
    if layout.tp == 1 or name == "llama"
]
SAMPLE = [("gpt2", True, DistributedConfig(pp=2, dp_shard=2), "interleaved_1f1b")]
LONG = [
    ("convnet", False, DistributedConfig(pp=2, dp_shard=2), "zb_v"),
    ("llama", True, DistributedConfig(pp=2, dp_shard=1, tp=2), "1f1b"),
]


@pytest.mark.parametrize(
    ("name", "tied", "layout", "schedule"),
    [
        pytest.param(
            *case,
            marks=() if case in SAMPLE else pytest.mark.long if case in LONG else pytest.mark.full,
        )
        for case in CASES
    ],
)
def test_an_example_equals_one_process(
    name: str, tied: bool, layout: DistributedConfig, schedule: str
) -> None:
    assert_equal(name, tied, layout, schedule)


@pytest.mark.sample(3)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if "alone" not in name])
def test_an_example_runs_as_its_docstring_says(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = [line for line in labelled_lines(2, [str(EXAMPLES / script)]) if "loss" in line]
    assert len(steps) >= 5


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_short(script: str) -> None:
    code = (EXAMPLES / script).read_text().split('"""', 2)[2]
    assert len(code.strip().splitlines()) <= LONGEST


@pytest.mark.parametrize("script", COMPARE_THEMSELVES)
def test_an_example_that_compares_itself_is_short(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) < LONGEST_IN_ALL


def assert_equals_one_process(n_ranks: int, script: str, *arguments: str) -> list[str]:
    lines = labelled_lines(n_ranks, [str(EXAMPLES / script), *arguments])
    found = [re.search(r"equal to one process: (\S+?);?( |$)", line) for line in lines]
    differences = [float(each[1]) for each in found if each is not None]
    assert len(differences) == n_ranks, lines
    assert max(differences) <= GRADIENT_TOLERANCE
    return lines


@pytest.mark.parametrize(
    ("n_ranks", "schedule"),
    [
        (2, "interleaved_1f1b"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((4, "1f1b"), (2, "zb_v"))),
    ],
)
def test_a_second_head_in_the_middle_equals_one_process(n_ranks: int, schedule: str) -> None:
    lines = assert_equals_one_process(
        n_ranks, "multi_token.py", "--steps=2", f"--schedule={schedule}"
    )
    held = (
        "{0: 'gpt2.transformer.wte.weight', 2: 'second.embedding.weight', 3: 'gpt2.lm_head.weight'}"
    )
    assert sum(held in line for line in lines) == n_ranks


@pytest.mark.parametrize(
    ("first_layer", "on_rank_0"), [pytest.param(0, 8, marks=pytest.mark.long), (4, 0)]
)
def test_adapters_equal_one_process_and_are_saved_alone(
    first_layer: int, on_rank_0: int, tmp_path: Path
) -> None:
    flags = (f"--first-layer={first_layer}", f"--folder={tmp_path}")
    for n_ranks, steps in ((2, 2), (1, 3)):  # resumed on another number of ranks
        lines = assert_equals_one_process(n_ranks, "lora.py", *flags, f"--steps={steps}")
        assert sum(": loss " in line for line in lines) == (4 if n_ranks == 2 else 1)
        assert n_ranks == 1 or any(
            f"[rank 0] rank 0: losses, norms and {on_rank_0} adapter" in line for line in lines
        )
    weights = [entry.key for entry in contents(tmp_path) if entry.key.startswith("model.")]
    assert len(weights) == 2 * (8 - first_layer)
    assert all("lora_" in name for name in weights)


def test_adapters_without_peft_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ValueError, match=r"adapters come from peft, which cannot be imported.*pip install peft"
    ):
        load("lora").adapted(0)


def assert_refused(words: str, *arguments: str) -> None:
    ranks = run_script(2, [str(EXAMPLES / "vlm.py"), *arguments])
    assert [rank.code for rank in ranks] == [2, 2]
    assert all(re.search(words, rank.err) for rank in ranks), ranks


def test_images_equal_one_process_and_a_thaw_is_resumed_on_either_side(tmp_path: Path) -> None:
    flags = ("--thaw-at=2", f"--folder={tmp_path}")
    for steps, frozen in ((1, 1), (3, 1), (4, 0)):  # before the thaw, over it, after it
        lines = assert_equals_one_process(2, "vlm.py", *flags, f"--steps={steps}")
        assert sum("encoder frozen" in line for line in lines) == 2 * frozen
        if steps == 1:
            assert_refused(
                "--thaw-at is 0, but .* step 1 .* frozen: give 1 or more", "--thaw-at=0", flags[1]
            )
    assert_refused(
        "--thaw-at is 3, but .* step 4 .* frozen until 2: give 2",
        "--thaw-at=3",
        flags[1],
        "--steps=5",
    )


def test_images_that_fit_no_row_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(
        "row 0 has 4 images of 4 patches, 22 tokens with its text, but 16 fit: give",
        "--most-images=4",
    )
    monkeypatch.syspath_prepend(str(EXAMPLES))
    row = torch.zeros(7, dtype=torch.long), torch.zeros(1, 3, 8, 8)
    with pytest.raises(
        ValueError, match="row 0 has 1 images of 4 patches, and 7 tokens for them: give one"
    ):
        load("vlm").microbatches([row])


def torch_alone_on_rank(rank: int) -> tuple[torch.Tensor, list[float], list[float]]:
    """Return this rank's end of the tie after training, its norms, and the whole model's norms."""
    sys.path.insert(0, str(EXAMPLES))
    # to compute in float32
    parallel.apply_fsdp2 = partial(parallel.apply_fsdp2, mp_policy=MixedPrecisionPolicy())
    alone, ours = load("gpt2_torch_alone"), load("gpt2")
    module, norms = alone.main(steps=STEPS)
    end = (
        (module.transformer.wte if "wte" in module.transformer else module.lm_head)
        .weight.full_tensor()
        .detach()
    )
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
