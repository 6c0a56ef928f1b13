"""FSDP2: shards, gathering and freeing, the number of reductions, and precision."""

import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    clip_grad_norm_,
    default_mp_policy,
    get_dp_rank,
    get_pp_rank,
    init_distributed,
    resolve_reshard_after_forward,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.training.checkpoint import load, save
from tests.equality import adamw, full, sharded_adamw

CONFIG = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=20, max_seq_len=16
)


@pytest.mark.parametrize(
    ("policy", "sizes", "resolved"),
    [
        ("auto", {"dp_shard": 4}, True),
        ("auto", {"pp": 2, "dp_shard": 4}, False),
        ("auto", {"pp": 2}, False),
        ("auto", {"tp": 2}, True),
        (True, {"pp": 2, "dp_shard": 4}, True),
        (False, {"dp_shard": 4}, False),
        (2, {"dp_shard": 4}, 2),
        (3, {"dp_shard": 6}, 3),
    ],
)
def test_a_policy_means_what_it_says(
    policy: Any, sizes: dict[str, int], resolved: bool | int
) -> None:
    found = resolve_reshard_after_forward(policy, **sizes)
    assert found == resolved
    assert type(found) is type(resolved)


@pytest.mark.parametrize(
    ("policy", "sizes", "message"),
    [
        (
            3,
            {"dp_shard": 4},
            "reshard_after_forward=3 must divide dp_shard=4 and be neither 1 nor 4: say 2 or True",
        ),
        (4, {"dp_shard": 4}, r"say True \(free everything\)"),
        (1, {"dp_shard": 4}, r"say False \(keep everything\)"),
        (2, {"pp": 4}, "must divide dp_shard=1 and be neither 1 nor 1: say True, False or 'auto'"),
        (
            2,
            {"dp_shard": 4, "tp": 2},
            "=2 with tp=2: torch reshards.*say True, False or 'auto', or set these",
        ),
        (
            "never",
            {"dp_shard": 4},
            "reshard_after_forward='never' must be True, False or 'auto', or a number of ranks",
        ),
    ],
)
def test_a_policy_that_cannot_be_is_refused(
    policy: Any, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reshard_after_forward(policy, **sizes)


def test_without_a_data_parallel_dimension_nothing_changes_but_a_bad_policy_is_refused() -> None:
    model = Transformer(CONFIG)
    apply_fsdp2(model, None)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    with pytest.raises(ValueError, match="must divide dp_shard=1"):
        apply_fsdp2(model, None, reshard_after_forward=2)


def outputs_on_rank(rank: int) -> list[tuple[list[str], bool]]:
    """Return the results of :func:`_output` for a whole model and a last stage.

    Logits are gathered or not.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    return [
        _output(mesh, n_stages, gathered) for n_stages, gathered in product((1, 2), (False, True))
    ]


def _output(mesh: DeviceMesh, n_stages: int, gather_logits: bool) -> tuple[list[str], bool]:
    """Return the warnings of a forward, and whether its output is a view.

    The forward is the last stage's under tensor parallelism and FSDP2.
    """
    module = build_stage_module(CONFIG, n_stages - 1, n_stages)
    apply_tensor_parallel(module, mesh, gather_logits=gather_logits)
    apply_fsdp2(module, mesh)
    inputs = (
        torch.ones(1, 4, 32, requires_grad=True)
        if n_stages > 1
        else torch.zeros(1, 4, dtype=torch.int64)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = module(inputs)
    return [str(warning.message) for warning in caught], output._is_view()


def test_with_tensor_parallelism_the_output_is_no_view_on_which_hooks_could_be_lost() -> None:
    assert on_ranks(2, outputs_on_rank) == [[([], False)] * 4] * 2


def materialised_on_rank(rank: int, layout: DistributedConfig, config: ModelConfig) -> list[str]:
    """Return the differences of a stage made on meta from one made on its device.

    They are names of parameters and outputs.
    """
    mesh = init_distributed(layout, seed=0)
    index, n_stages = get_pp_rank(mesh), layout.pp
    with torch.device("meta"):
        late = build_stage_module(config, index, n_stages)
    direct = build_stage_module(config, index, n_stages)
    for module in (direct, late):
        apply_tensor_parallel(module, mesh)
        apply_fsdp2(module, mesh)
    late.to_empty(device="cpu")
    late.init_weights_and_freqs()
    inputs = torch.zeros(1, 4, dtype=torch.int64) if index == 0 else torch.ones(1, 4, config.dim)
    pairs = zip(direct.named_parameters(), late.parameters(), strict=True)
    different = [
        name for (name, p), other in pairs if not torch.equal(p.to_local(), other.to_local())
    ]
    return different + ([] if torch.equal(direct(inputs), late(inputs)) else ["output"])


@pytest.mark.parametrize(
    ("layout", "tied"),
    [(DistributedConfig(dp_shard=2, tp=2), False), (DistributedConfig(pp=2, dp_shard=2), True)],
)
def test_a_stage_sharded_on_the_meta_device_is_the_same_model(
    layout: DistributedConfig, tied: bool
) -> None:
    config = replace(CONFIG, n_layers=layout.pp, tie_embeddings=tied)
    assert on_ranks(4, materialised_on_rank, layout, config) == [[]] * 4


def precision_on_rank(rank: int, inputs: Tensor) -> dict[str, Any]:
    """Return the dtypes of a pipeline with mixed precision, and a refusal.

    The dtypes are those of computation and of storage. The refusal is of another dtype at a
    boundary.
    """
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2), seed=0)
    module = build_stage_module(CONFIG, get_pp_rank(mesh), 2)
    apply_ac(module, "full")
    apply_fsdp2(module, mesh)
    with pytest.raises(ValueError, match="param_dtype") as refusal:
        build_pipeline_stage(module, mesh, "cpu", 1, 8, torch.float32)
    computed: set[torch.dtype] = set()
    for layer in module.layers.values():
        layer.attn.register_forward_hook(
            lambda m, args, out: computed.update(x.dtype for x in (*args[:3], out))
        )
    stage = build_pipeline_stage(module, mesh, "cpu", 1, inputs.shape[1], torch.bfloat16)
    loss = build_pipeline_schedule(stage, len(inputs), CrossEntropy()).step(inputs, target=inputs)
    kept = {tensor.dtype for p in module.parameters() for tensor in (p, p.grad)}
    return {"refusal": str(refusal.value), "computed": computed, "kept": kept, "loss": loss.item()}


def test_mixed_precision_computes_in_one_dtype_and_keeps_another() -> None:
    inputs = torch.arange(4 * 16).view(4, 16) % CONFIG.vocab_size
    torch.manual_seed(0)
    expected = CrossEntropy()(Transformer(CONFIG)(inputs), inputs).item()
    for found in on_ranks(4, precision_on_rank, inputs):
        assert "stage 0 computes in torch.bfloat16" in found["refusal"]
        assert (
            "pass param_dtype=torch.bfloat16, or apply FSDP2 with default_mp_policy(torch.float32)"
            in found["refusal"]
        )
        assert found["computed"] == {torch.bfloat16}
        assert found["kept"] == {torch.float32}
        assert found["loss"] == pytest.approx(expected, rel=1e-2)


def said_on_rank(
    rank: int, policy: MixedPrecisionPolicy | None, dtype: torch.dtype, sharded: bool
) -> list[str]:
    mesh = init_distributed(DistributedConfig(pp=1 if sharded else 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            apply_fsdp2(nn.Linear(4, 4).to(dtype), mesh, policy, blocks=())
    return [str(warning.message) for warning in caught]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("policy", "dtype", "sharded", "says"),
    [
        (None, torch.float32, True, True),
        (None, torch.float64, True, False),
        (None, torch.float32, False, False),
        (default_mp_policy(), torch.float32, True, False),
    ],
    ids=["float32", "float64", "no data dimension", "chosen"],
)
def test_rank_0_says_once_that_a_float32_model_computes_in_bfloat16(
    policy: MixedPrecisionPolicy | None, dtype: torch.dtype, sharded: bool, says: bool
) -> None:
    first, second = on_ranks(2, said_on_rank, policy, dtype, sharded)
    assert [("default_mp_policy(torch.float32)" in line) for line in first] == [True] * says
    assert second == []


def half_gradient_on_rank(rank: int) -> Tensor:
    """Return the reduced gradient of a weight: 512 on the first rank and 2 on the others."""
    model = Transformer(CONFIG).bfloat16()
    apply_fsdp2(model, init_distributed(DistributedConfig(dp_shard=4)))
    model.norm.register_forward_hook(
        lambda module, args, out: module.weight * (2.0 if rank else 512.0)
    )
    model.head.register_forward_hook(lambda module, args, out: args[0] + 0 * out.sum())
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    return model.norm.weight.grad.full_tensor()


def test_a_half_precision_model_reduces_its_gradients_in_float32() -> None:
    # (512 + 2 + 2 + 2) / 4 = 129.5. A sum in bfloat16 would lose each 2, half of the spacing of
    # numbers beyond 512.
    for gradient in on_ranks(4, half_gradient_on_rank):
        assert torch.equal(gradient, torch.full_like(gradient, 129.5))
        assert gradient.dtype == torch.bfloat16


class Gated(nn.Module):
    """A layer and a gate. The gate's weight is one row, so the second of two shards is empty."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(4, n_outputs), nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.tanh(self.gate(x))


def gated() -> tuple[Gated, Gated]:
    """Return two modules whose gates have the same values."""
    torch.manual_seed(0)
    first, last = Gated(4).double(), Gated(1).double()
    last.gate.load_state_dict(first.gate.state_dict())
    return first, last


GATED_TIE = ({0: "gate.weight", 1: "gate.weight"},)


def step_of_empty_shards(
    rank: int, engine: str, folder: str, x: Tensor, y: Tensor
) -> dict[str, Any]:
    """Take a clipped step with a hook on each gradient; save it, and load it into zeros."""
    mesh = init_distributed(DistributedConfig(pp=2))
    module, pp_rank = gated()[get_pp_rank(mesh)], get_pp_rank(mesh)
    apply_fsdp2(module, mesh, blocks=())
    heard: set[str] = set()
    for name, weight in module.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: heard.add(name))
    x, y = (each.chunk(2)[get_dp_rank(mesh)] for each in (x, y))
    if engine == "parallel":
        stage = build_pipeline_stage(module, mesh, "cpu", inputs=x[:1])
        with pytest.raises(ValueError, match="tied="):
            build_pipeline_schedule(stage, 2, F.mse_loss)
        tied: Any = GATED_TIE
        loss = (
            build_pipeline_schedule(stage, 2, F.mse_loss, "1f1b", tied=tied)
            .step(x, target=y)
            .item()
        )
    else:  # which does not tie what is sharded
        tied = ()
        group = mesh.get_group("pp")
        pipeline = Pipeline(build("zb_h1", 2, 2), module, F.mse_loss, group=group, tied=[])
        loss = pipeline.step(x, target=y).item()
    gradients = {
        f"{pp_rank}.{name}": full(weight.grad).clone() for name, weight in module.named_parameters()
    }
    norm = clip_grad_norm_({pp_rank: module}, 0.1, device_mesh=mesh, tied=tied)
    optimizer = sharded_adamw([module])
    optimizer.step()
    weights = {
        f"{pp_rank}.{name}": full(weight.detach()).clone()
        for name, weight in module.named_parameters()
    }
    save(folder, 1, {pp_rank: module}, optimizer, device_mesh=mesh)
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    load(folder, {pp_rank: module}, optimizer, device_mesh=mesh)
    loaded = all(
        torch.equal(full(w.detach()), weights[f"{pp_rank}.{name}"])
        for name, w in module.named_parameters()
    )
    every = heard == {name for name, _ in module.named_parameters()}
    return {
        "loss": loss,
        "norm": norm.item(),
        "gradients": gradients,
        "weights": weights,
        "whole": loaded and every,
    }


@pytest.mark.parametrize("engine", ["parallel", "runtime"])
def test_a_rank_whose_shard_has_no_rows_takes_part_in_everything(
    engine: str, tmp_path: Path
) -> None:
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    first, last = gated()
    if engine == "parallel":
        last.gate.weight = first.gate.weight
    weights = list(nn.ModuleList([first, last]).parameters())
    optimizer = adamw([first, last])
    loss = F.mse_loss(last(first(x)), y)
    loss.backward()
    named = {
        f"{i}.{name}": w
        for i, each in enumerate((first, last))
        for name, w in each.named_parameters()
    }
    gradients = {name: w.grad.clone() for name, w in named.items()}
    norm = nn.utils.clip_grad_norm_(weights, 0.1)
    optimizer.step()
    for found in on_ranks(
        4, step_of_empty_shards, engine, str(tmp_path / "saved"), x, y, timeout_s=60.0
    ):
        assert found["whole"]
        assert (found["loss"], found["norm"]) == pytest.approx(
            (loss.item(), norm.item()), rel=1e-12
        )
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12)
            torch.testing.assert_close(
                found["weights"][name], named[name].detach(), rtol=0, atol=1e-11
            )


class TextAndImages(nn.Module):
    """A stage that may leave half of its parameters unused."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.images = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: Tensor, has_images: bool) -> Tensor:
        text = self.text(x)
        return text + self.images(x) if has_images else text


def text_and_images() -> TextAndImages:
    torch.manual_seed(0)
    return TextAndImages().double()


def some_with_images(data_rank: int) -> dict[str, Any]:
    """Return four microbatches of a data rank. Only the second one of rank 0 has images."""
    torch.manual_seed(1 + data_rank)
    x, y = torch.randn(2, 4, 2, 6, dtype=torch.float64)
    return {
        "arg_mbs": [(each,) for each in x],
        "kwarg_mbs": [{"has_images": data_rank == 0 and i == 1} for i in range(4)],
        "target_mbs": list(y),
    }


def images_on_one_rank(rank: int) -> list[dict[str, Tensor]]:
    """Return the gradients of either engine after two steps, added up."""
    mesh = init_distributed(DistributedConfig(dp_shard=2))
    assert mesh is not None
    found = []
    for engine in ("parallel", "runtime"):
        module: Any = text_and_images()
        apply_fsdp2(module, mesh, blocks=())
        module.set_reduce_scatter_unused_params(True)
        if engine == "parallel":
            stage = build_pipeline_stage(
                module, mesh, "cpu", inputs=torch.empty(2, 6).double(), outputs=()
            )
            pipeline: Any = build_pipeline_schedule(stage, 4, F.mse_loss, tied=[])
        else:
            alone = dist.new_group([rank], use_local_synchronization=True)
            pipeline = Pipeline(build("1f1b", 1, 4), module, F.mse_loss, group=alone, tied=[])
        for _ in range(2):
            pipeline.step(**some_with_images(get_dp_rank(mesh)))
        found.append({name: full(p.grad) for name, p in module.named_parameters()})
    return found


def test_a_part_that_one_data_rank_leaves_unused_has_the_gradients_of_one_process() -> None:
    module = text_and_images()
    for given in map(some_with_images, range(2)):
        for (x,), keywords, y in zip(*given.values(), strict=True):
            # in two steps, by two ranks with four microbatches
            (F.mse_loss(module(x, **keywords), y) / 4).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    for engines in on_ranks(2, images_on_one_rank, timeout_s=60):
        for gradients in engines:
            torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)
