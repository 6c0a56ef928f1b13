"""Models of other packages train under every mesh as in one process.

Loss, gradients and parameters are equal.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from course_pp.launch import on_ranks
from course_pp.model import (
    CrossEntropy,
    ModelConfig,
    Transformer,
    build_stage_module,
    hf_state_dict,
    load_hf_state_dict,
)
from course_pp.parallel import (
    DistributedConfig,
    apply_expert_parallel,
    apply_fsdp2,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_dp_rank,
    get_pp_rank,
    get_stage_indices,
    init_distributed,
    llama_plan,
)
from tests import equality
from tests.model.test_model_hf import CONFIGS, random_model, theirs_with
from tests.parallel import whole_models
from tests.parallel.layouts import Case, build_modules, build_pipeline, data_of, model_config
from tests.parallel.whole_models import Recipe, assert_equals, train_on_rank

Sizes = dict[str, int]
RANKS_IMPORT = [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("llama", "gpt2", "qwen3", "mixtral", "qwen3_moe")
]

BY_NAME = {"[0-9].up": ColwiseParallel(), "[0-9].down": RowwiseParallel()}
SHARDED: Sizes = {"dp_shard": 2}
HYBRID: Sizes = {"dp_replicate": 2, "dp_shard": 2}
CUT: Sizes = {"tp": 2}
SHARED_OUT: Sizes = {"dp_shard": 2, "ep": 2}
# By number of ranks, because to start ranks costs more than to train on them.
JOBS: dict[int, list[tuple[Sizes, Recipe]]] = {
    2: [
        (SHARDED, Recipe("llama")),
        (SHARDED, Recipe("llama, tied", ac="full", blocks=())),
        (SHARDED, Recipe("gpt2", ac="selective")),
        (SHARDED, Recipe("sequential", ac="full", blocks="[12]")),
        (SHARDED, Recipe("convolutional")),
        (CUT, Recipe("llama", llama_plan, ac="selective")),
        (CUT, Recipe("llama", partial(llama_plan, sequence_parallel=False))),
        (CUT, Recipe("llama, odd words", llama_plan)),
        (CUT, Recipe("llama, tied", llama_plan)),
        (CUT, Recipe("qwen3", llama_plan)),
        (CUT, Recipe("sequential", BY_NAME)),
        (CUT, Recipe("mixtral", llama_plan)),
        (SHARED_OUT, Recipe("mixtral", ac="full")),
        (SHARED_OUT, Recipe("mixtral, crowded")),  # one of the ranks computes nothing
        (SHARED_OUT, Recipe("qwen3 moe", experts="model.layers.[12].mlp.experts")),
    ],
    4: [
        ({"dp_shard": 4, "ep": 2}, Recipe("mixtral")),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, Recipe("qwen3 moe")),
        ({"dp_shard": 2, "ep": 2, "tp": 2}, Recipe("qwen3 moe", llama_plan)),
        (HYBRID, Recipe("gpt2", ac="full")),
        (HYBRID, Recipe("convolutional", reshard=False)),
        ({"dp_shard": 2, "tp": 2}, Recipe("llama", llama_plan, ac="full")),
        ({"dp_shard": 2, "tp": 2}, Recipe("qwen3", llama_plan)),
        ({"dp_shard": 2, "tp": 2}, Recipe("sequential", BY_NAME)),
        ({"pp": 1, "cp": 2, "dp_shard": 1, "tp": 2}, Recipe("llama", llama_plan, ac="full")),
        ({"pp": 1, "cp": 2, "dp_shard": 2, "tp": 1}, Recipe("llama, tied", llama_plan, ac="full")),
    ],
}


def train_jobs_on_rank(rank: int, jobs: Sequence[tuple[Sizes, Recipe]]) -> list[Any]:
    return [train_on_rank(mesh_of(sizes), recipe) for sizes, recipe in jobs]


def mesh_of(sizes: Sizes) -> DeviceMesh | None:
    """Return a mesh.

    Only our own function knows ``ep``, and only torch's takes other dimensions than ours.
    """
    if "ep" in sizes:
        return init_distributed(DistributedConfig(**sizes))
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_foreign_model_trains_as_in_one_process(n_ranks: int, subtests: pytest.Subtests) -> None:
    ranks = on_ranks(n_ranks, train_jobs_on_rank, JOBS[n_ranks], timeout_s=110)
    for (sizes, recipe), found in zip(JOBS[n_ranks], zip(*ranks, strict=True), strict=True):
        with subtests.test(f"{recipe.model} on {sizes}"):
            assert_equals([trained for trained, _ in found], recipe.model, sizes)


def pipeline_on_rank(
    rank: int, case: Case, config: ModelConfig, data: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of one step on a mesh that has a dimension of another kind."""
    mesh = init_device_mesh("cpu", (2, 2, 1, 1), mesh_dim_names=("pp", "cp", "dp_shard", "tp"))
    torch.manual_seed(0)
    modules = build_modules(case, config, mesh)
    loss = build_pipeline(case, modules, mesh, case.batch, CrossEntropy()).step(
        data[0], target=data[1]
    )
    return loss.item(), {
        n: p.grad.full_tensor() for module in modules for n, p in module.named_parameters()
    }


def test_a_pipeline_lets_a_dimension_of_another_kind_be() -> None:
    case = Case(pp=2, schedule="1f1b")
    config = replace(model_config(case, tied=True), n_layers=2)
    [(inputs, target), *_], _ = data_of(config, case.batch, padded=False)
    torch.manual_seed(0)
    model = Transformer(config).double()
    expected = CrossEntropy()(model(inputs), target)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for loss, found in on_ranks(4, pipeline_on_rank, case, config, (inputs, target)):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for name, gradient in found.items():
            source = "embed.weight" if name == "head.weight" else name
            torch.testing.assert_close(gradient, gradients[source], rtol=0, atol=1e-12)


def logits_on_rank(
    rank: int, jobs: Sequence[tuple[ModelConfig, Any, torch.Tensor]]
) -> list[torch.Tensor]:
    """Return the logits of this rank's rows, for each model cut in two, then in four."""
    found = []
    for (config, state, tokens), schedule in product(jobs, ("1f1b", "interleaved_1f1b")):
        mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2, ep=2), seed=0)
        indices = get_stage_indices(schedule, get_pp_rank(mesh), 2)
        modules = [build_stage_module(config, i, 2 * len(indices)).double() for i in indices]
        for module in modules:
            load_hf_state_dict(module, state)
            apply_expert_parallel(module, mesh)
            apply_fsdp2(module, mesh)
        mine = tokens.chunk(2)[get_dp_rank(mesh)]
        stages = [
            build_pipeline_stage(module, mesh, "cpu", 1, tokens.shape[1]) for module in modules
        ]
        pipeline = build_pipeline_schedule(stages, len(mine), CrossEntropy(), schedule)
        found.append(pipeline.evaluate(mine, on="all"))
    return found


def test_weights_of_transformers_compute_the_same_cut_and_shared_out() -> None:
    tokens = torch.randint(61, (8, 6), generator=torch.Generator().manual_seed(0))
    models = [
        random_model(replace(CONFIGS[name], n_layers=4, n_experts=4))
        for name in ("mixtral", "qwen3_moe")
    ]
    with torch.no_grad():
        expected = [theirs_with(model)(tokens).logits for model in models for _ in range(2)]
    jobs = [(model.config, hf_state_dict(model), tokens) for model in models]
    for rank, found in enumerate(on_ranks(4, logits_on_rank, jobs, timeout_s=60)):
        for logits, theirs in zip(found, expected, strict=True):
            # Their routers' softmax is in float32.
            torch.testing.assert_close(logits, theirs.chunk(2)[rank % 2], rtol=0, atol=1e-6)


def adapted(**where: Any) -> nn.Module:
    """Return Mixtral with adapters of peft, no part of which is zero."""
    from peft import LoraConfig, inject_adapter_in_model

    model = whole_models.build("mixtral")
    inject_adapter_in_model(LoraConfig(r=2, **where), model)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model.double()


ON_ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


def adapted_on_rank(rank: int) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the refusal of adapters around experts, and gradients of adapters elsewhere."""
    mesh = init_distributed(DistributedConfig(dp_shard=2, ep=2), seed=0)
    model = adapted(target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ValueError, match="base_layer") as refusal:
        apply_expert_parallel(model, mesh)
    model = adapted(**ON_ATTENTION)
    apply_expert_parallel(model, mesh)
    apply_fsdp2(model, mesh)
    inputs, target = (part.chunk(2)[rank] for part in whole_models.data_of("mixtral")[0])
    whole_models.loss_of(model, inputs, target).backward()
    return str(refusal.value), gradients_of_adapters(model)


def gradients_of_adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: equality.full(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_around_experts_are_refused_and_those_elsewhere_equal_one_process() -> None:
    model = adapted(**ON_ATTENTION)
    whole_models.loss_of(model, *whole_models.data_of("mixtral")[0]).backward()
    expected = gradients_of_adapters(model)
    assert all("lora_" in name for name in expected)
    ranks = on_ranks(2, adapted_on_rank, timeout_s=100)
    assert ranks[0][0] == ranks[1][0]
    for _, found in ranks:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
