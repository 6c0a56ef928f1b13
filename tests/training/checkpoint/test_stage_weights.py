"""A stage built without weights is filled from its part of the files, and is the model's."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, build_stage_module, config_to_hf
from course_pp.parallel import auto_split, weights_on_meta
from course_pp.training.checkpoint import CheckpointError, load_stage
from source_code.hf_pp.families import FAMILIES, OWN, build, called, example, tensor_of

GPT2 = "GPT-2, language model"


def saved(name: str, folder: Path) -> nn.Module:
    """A family's model, in shards as transformers writes them."""
    model = build(name).eval()
    if name in OWN:
        save_file(
            {key: tensor.contiguous() for key, tensor in model.state_dict().items()},
            folder / "any.safetensors",
        )
    else:
        model.save_pretrained(folder, max_shard_size="20KB")
    return model


def empty_stages(name: str, n_stages: int) -> list[nn.Module]:
    with weights_on_meta():
        model = build(name).eval()
    return auto_split(model, example(name), n_stages)


def in_turn(stages: list[nn.Module], given: Any) -> Any:
    value = called(stages[0], given)
    for stage in stages[1:]:
        value = stage(**value)
    return tensor_of(value)


def as_vit_was(name: str) -> str:
    changes = (
        (r"vit\.layers", "vit.encoder.layer"),
        (r"attention\.o_proj", "attention.output.dense"),
    )
    changes += (
        (r"attention\.q_proj", "attention.attention.query"),
        (r"attention\.k_proj", "attention.attention.key"),
    )
    changes += (
        (r"attention\.v_proj", "attention.attention.value"),
        (r"mlp\.fc1", "intermediate.dense"),
    )
    for pattern, with_ in (*changes, (r"mlp\.fc2", "output.dense")):
        name = re.sub(pattern, with_, name)
    return name


# transformers saves these under the names that they had once
RENAMED: dict[str, Callable[[str], str]] = {
    "GPT-NeoX": lambda name: name.replace("lm_head", "embed_out"),
    "ViT": as_vit_was,
}
SAMPLE = (GPT2, "T5", "BERT", "one block, repeated")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in FAMILIES]
)
def test_stages_filled_from_files_are_the_model(name: str, tmp_path: Path) -> None:
    model, batch = saved(name, tmp_path), example(name, seed=1)
    stages = empty_stages(name, 3)
    for stage in stages:
        load_stage(stage, tmp_path, names=RENAMED.get(name))
    assert not any(
        tensor.is_meta for stage in stages for tensor in (*stage.parameters(), *stage.buffers())
    )
    assert torch.equal(in_turn(stages, batch), tensor_of(called(model, batch)))


def test_weights_of_two_stages_of_a_rank_stay_one(tmp_path: Path) -> None:
    saved(GPT2, tmp_path)
    stages = empty_stages(GPT2, 4)
    load_stage([stages[0], stages[3]], tmp_path)
    (tie,) = stages[0].ties
    assert stages[0].get_parameter(tie[0]) is stages[3].get_parameter(tie[3])


def test_a_weight_that_was_tied_before_it_was_held_stays_one() -> None:
    with weights_on_meta():
        one, other, weight = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))
        one.weight = weight
        other.weight = weight
    assert one.weight.is_meta
    assert one.weight is other.weight


def test_the_names_of_a_model_without_its_head_are_known(tmp_path: Path) -> None:
    model = build(GPT2).eval()
    save_file(
        {key: tensor.clone() for key, tensor in model.transformer.state_dict().items()},
        tmp_path / "a.safetensors",
    )
    stages = empty_stages(GPT2, 2)
    for stage in stages:
        load_stage(stage, tmp_path)
    assert torch.equal(in_turn(stages, example(GPT2)), tensor_of(called(model, example(GPT2))))


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_the_courses_model_are_filled_too(tied: bool, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    config = ModelConfig(
        dim=32, n_layers=3, n_heads=4, vocab_size=61, max_seq_len=16, tie_embeddings=tied
    )
    model = LlamaForCausalLM(config_to_hf(config)).eval()
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        stages = [build_stage_module(config, stage, 2) for stage in range(2)]
    for stage in stages:
        load_stage(stage, tmp_path)
    tokens = torch.arange(16).view(2, 8)
    torch.testing.assert_close(stages[1](stages[0](tokens)), model(tokens).logits)


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 40,
}
SIZES |= {
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "use_cache": False,
    "num_experts_per_tok": 2,
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
    },
    "Qwen3Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "mlp_only_layers": [0],
    },
}


def with_experts(kind: str) -> nn.Module:
    """Return a model of transformers in float32.

    Its experts are one product in groups.
    """
    config = getattr(transformers, f"{kind}Config")(**SIZES, **OF_EXPERTS[kind])
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return model


@pytest.mark.parametrize("packed", [False, True], ids=["one matrix an expert", "packed"])
@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_experts_of_transformers_are_cut_without_weights_and_filled(
    kind: str, packed: bool, tmp_path: Path
) -> None:
    """Files hold a matrix for each expert, or all of a layer's packed as in memory."""
    model, example = with_experts(kind), {"input_ids": torch.arange(20).view(2, 10)}
    model.save_pretrained(tmp_path, save_original_format=not packed)
    (file,) = tmp_path.glob("*.safetensors")
    assert any("gate_up_proj" in name for name in load_file(file)) == packed
    with weights_on_meta():
        empty = with_experts(kind)
    stages = auto_split(empty, example, 2)
    for stage in stages:
        load_stage(stage, tmp_path)
    assert torch.equal(in_turn(stages, example), tensor_of(model(**example)))


def test_files_with_another_number_of_experts_are_refused(tmp_path: Path) -> None:
    with_experts("Mixtral").save_pretrained(tmp_path)
    with weights_on_meta(), patch.dict(OF_EXPERTS["Mixtral"], num_local_experts=3):
        empty = with_experts("Mixtral")
    with pytest.raises(CheckpointError, match="sizes"):
        load_stage(
            auto_split(empty, {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, 2), tmp_path
        )


def test_links_are_followed_as_downloaded_models_consist_of_them(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    model = saved("Llama", tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    stages = empty_stages("Llama", 2)
    for stage in stages:
        load_stage(stage, tmp_path / "snapshot")
    assert torch.equal(
        in_turn(stages, example("Llama")), tensor_of(called(model, example("Llama")))
    )


def refused_on_rank(rank: int, folder: Path, device: Any = "cpu") -> tuple[str, bool]:
    """What both ranks say; ``device`` is rank 1's alone."""
    stage = empty_stages("Sequential", 2)[rank]
    try:
        load_stage(stage, folder, device=device if rank == 1 else "cpu")
    except CheckpointError as error:
        return str(error), all(parameter.is_meta for parameter in stage.parameters())
    return "", False


def without(state: dict[str, torch.Tensor]) -> None:
    del state["1.up.bias"], state["2.up.bias"]


def of_another_shape(state: dict[str, torch.Tensor]) -> None:
    state["1.up.bias"] = torch.zeros(3, dtype=torch.float64)


def of_integers(state: dict[str, torch.Tensor]) -> None:
    state["1.up.bias"] = torch.zeros(48, dtype=torch.int8)


SPOILED = [
    (
        without,
        (
            "has no 1.up.bias and 1 more, which the model needs: get the directory of this model,"
            " whole"
        ),
    ),
    (
        of_another_shape,
        "has 1.up.bias as (3,), and the model needs (48,): build it with the sizes of",
    ),
    (of_integers, "has 1.up.bias as I8, and the model as torch.float64: get it in one of F64, F32"),
]


@pytest.mark.parametrize(("spoil", "said"), SPOILED)
def test_files_that_do_not_fit_are_refused_on_every_rank(
    spoil: Any, said: str, tmp_path: Path
) -> None:
    saved("Sequential", tmp_path)
    state = load_file(tmp_path / "any.safetensors")
    spoil(state)
    save_file(state, tmp_path / "any.safetensors")
    ranks = on_ranks(2, refused_on_rank, tmp_path)
    assert ranks[0] == ranks[1]
    assert said in ranks[0][0]
    assert ranks[0][1], "something was filled"


def test_an_argument_of_a_wrong_class_on_one_rank_is_refused_on_both(tmp_path: Path) -> None:
    saved("Sequential", tmp_path)
    ranks = on_ranks(2, refused_on_rank, tmp_path, 1.5, timeout_s=30)
    assert ranks[0] == ranks[1]
    assert "load_stage: device is 1.5 (a float): pass" in ranks[0][0]


def test_a_directory_without_weights_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    stage, _ = empty_stages("Sequential", 2)
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        load_stage(stage, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_stage(stage, tmp_path)


class Buffered(nn.Module):
    """Buffers of modules and of the model itself, some of them in checkpoints and some not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("allowed", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x + self.shift))
        return self.last(x * self.table) * self.allowed


def saved_buffers(folder: Path) -> Buffered:
    """Buffers have other values than a model has when it is built."""
    model = Buffered()
    with torch.no_grad():
        for name, buffer in model.state_dict().items():
            if "weight" not in name and "bias" not in name:
                buffer.copy_((torch.arange(buffer.numel()).view(buffer.shape) * 3 + 2) % 5)
    save_file(model.state_dict(), folder / "model.safetensors")
    return model.eval()


def test_buffers_are_read_if_checkpoints_hold_them_and_stay_as_they_were_built_if_not(
    tmp_path: Path,
) -> None:
    model, x = saved_buffers(tmp_path), torch.randn(3, 4)
    with weights_on_meta():
        stages = auto_split(Buffered().eval(), x, at=["norm", "last"])
    for stage in stages:
        assert load_stage(stage, tmp_path) == sum(
            tensor.nbytes for tensor in stage.state_dict().values()
        )
    assert torch.equal(in_turn(stages, x), model(x))
    assert stages[1].norm.num_batches_tracked == 2
    assert "norm.running_mean" not in stages[0].state_dict()


def test_of_buffers_on_the_meta_device_those_that_no_file_holds_are_refused_by_name(
    tmp_path: Path,
) -> None:
    model, x = saved_buffers(tmp_path), torch.randn(3, 4)
    with torch.device("meta"):
        lost = Buffered().eval()
    stages = auto_split(lost, x.to("meta"), at=["norm", "last"])
    with pytest.raises(
        ValueError,
        match="table is on the meta device",
    ):
        load_stage(stages, tmp_path)
    for stage in stages:
        stage.table = torch.arange(4.0)
    load_stage(stages, tmp_path)
    assert torch.equal(in_turn(stages, x), model(x))


class Stateful(nn.Linear):
    def get_extra_state(self) -> int:
        return 7


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="_extra_state"):
        load_stage(Stateful(2, 2), tmp_path)
