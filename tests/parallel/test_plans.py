"""Plans of tensor parallelism: their results, and refusals by name before any cut."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer
from course_pp.parallel import apply_tensor_parallel, llama_plan, transformer_plan
from tests.parallel.whole_models import Block, gpt2, llama, sequential

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
OURS = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=20, max_seq_len=16
)


class FakeMesh(DeviceMesh):
    """A mesh on paper: names and sizes, without ranks."""

    def __init__(self, **sizes: int) -> None:
        self.sizes, self._mesh_dim_names = sizes, tuple(sizes)

    def __getitem__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: self.sizes[name])


def test_the_plan_for_llamas_holds_what_the_model_holds() -> None:
    plan = llama_plan(llama(), 2)
    assert len(plan) == 3 * (9 + 2) + 4
    assert len(llama_plan(llama(), 2, sequence_parallel=False)) == 3 * 9 + 1
    assert "model.layers.2.self_attn.q_proj" in plan
    assert "lm_head" in plan
    assert "lm_head" not in llama_plan(llama(tied=True), 2)
    assert "lm_head" not in llama_plan(llama(vocab_size=35), 2, sequence_parallel=False)
    assert len(llama_plan(strange_block(), 2)) == len(llama_plan(llama().model, 2)) + 1 == 3 * 9 + 1
    stage = nn.Module()
    stage.only = llama().model.layers[1].mlp
    assert list(llama_plan(stage, 2)) == [
        "only",
        "only.gate_proj",
        "only.up_proj",
        "only.down_proj",
    ]


def odd_heads() -> nn.Module:
    return llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)


def widened() -> nn.Module:
    """Return a model with norms over all heads, as in OLMo 2."""
    model = llama()
    model.model.layers[0].self_attn.k_norm = nn.RMSNorm(16)
    return model


def strange_block() -> nn.Module:
    model = llama()
    model.model.layers[1].adapter = nn.Linear(32, 32)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any], str]] = {
    "no plan": (
        llama,
        2,
        {},
        "apply_tensor_parallel has no plan for LlamaForCausalLM: pass plan=llama_plan if",
    ),
    "no such name": (
        sequential,
        2,
        {"plan": {"[0-9].up": COLUMNS, "1.dwn": ROWS}},
        "plan: pattern '1.dwn' matches no module of Sequential: the nearest names are '1.down'",
    ),
    "two patterns": (
        sequential,
        2,
        {"plan": {"1.*": SequenceParallel(), "*.up": COLUMNS}},
        r"patterns '1\.\*' and '\*\.up' both match '1\.up': give each module one style",
    ),
    "uneven columns": (
        sequential,
        5,
        {"plan": {"*.up": COLUMNS}},
        r"tp=5 must divide out_features=64 of '1\.up', which ColwiseParallel cuts",
    ),
    "uneven rows": (
        sequential,
        5,
        {"plan": {"*.down": ROWS}},
        r"tp=5 must divide in_features=64 of '1\.down'",
    ),
    "no linear": (
        gpt2,
        2,
        {"plan": {"transformer.h.*.attn.c_attn": COLUMNS}},
        (
            r"ColwiseParallel cuts nn.Linear and nn.Embedding, but"
            r" 'transformer\.h\.0\.attn\.c_attn' is a Conv1D"
        ),
    ),
    "tied": (
        lambda: llama(tied=True),
        2,
        {"plan": {"lm_head": COLUMNS}},
        (
            "lm_head.weight is one parameter under the names 'model.embed_tokens.weight',"
            " 'lm_head.weight', and cutting"
        ),
    ),
    "heads": (
        odd_heads,
        2,
        {"plan": llama_plan},
        "tp=2 must divide num_key_value_heads=3 of 'model.layers.0",
    ),
    "our heads": (
        lambda: Transformer(OURS),
        4,
        {},
        "tp=4 must divide n_kv_heads=2, .* use tp=2, or change n_kv_heads",
    ),
    "width": (
        lambda: llama(intermediate_size=49),
        2,
        {"plan": llama_plan},
        "tp=2 must divide intermediate_size=49 of",
    ),
    "norms over heads": (
        widened,
        2,
        {"plan": llama_plan},
        r"holds k_norm\.weight, which llama_plan does not know",
    ),
    "nothing to cut": (
        gpt2,
        2,
        {"plan": llama_plan},
        "plan llama_plan finds nothing to cut of GPT2LMHeadModel",
    ),
    "logits of a tied head": (
        lambda: llama(tied=True),
        2,
        {"plan": llama_plan, "gather_logits": False},
        "gather_logits=False needs an untied head .* but 'lm_head' is tied",
    ),
    "logits of a mapping": (
        sequential,
        2,
        {"plan": {"4": COLUMNS}, "gather_logits": False},
        "gather_logits=False is for plans that are functions: in a mapping, give the head",
    ),
    "our plan for others": (
        llama,
        2,
        {"plan": transformer_plan},
        "transformer_plan: module is a LlamaForCausalLM",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_cut(name: str) -> None:
    build_model, tp, options, message = REFUSED[name]
    model = build_model()
    with pytest.raises(ValueError, match=message):
        apply_tensor_parallel(model, FakeMesh(tp=tp), **options)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def stages_on_rank(rank: int) -> dict[str, Any]:
    """Return the cut parts of two stages, each on its rank, and refusals of plans.

    A plan is refused if one of the stages cannot follow it.
    """
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    said: dict[str, Any] = {}

    def stage() -> nn.Module:
        return nn.ModuleDict({"head": nn.Linear(4, 6)} if rank else {"0": Block(4)})

    frozen = stage().requires_grad_(False)
    said["cut"] = apply_tensor_parallel(
        frozen, mesh, {"*.up": COLUMNS, "*.norm": SequenceParallel(), "head": COLUMNS}
    )
    said["trained"] = [name for name, p in frozen.named_parameters() if p.requires_grad]
    for name, plan in (
        ("neither", {"*.up": COLUMNS, "haed": COLUMNS}),
        ("one", {"*.norm": COLUMNS, "head": ROWS}),
    ):
        with pytest.raises(ValueError, match=r"plan|cuts") as refusal:
            apply_tensor_parallel(stage(), mesh, plan)
        said[name] = str(refusal.value)
    both = nn.ModuleDict({"0": Block(4)}), nn.ModuleDict({"head": nn.Linear(4, 6)})
    said["listed"] = apply_tensor_parallel(both, mesh, {"*.up": COLUMNS, "head": COLUMNS})
    return said


def test_the_stages_of_a_pipeline_refuse_a_plan_together() -> None:
    first, last = on_ranks(2, stages_on_rank)
    assert (first["cut"], last["cut"]) == (("0.up", "0.norm"), ("head",))
    assert first["trained"] == last["trained"] == []
    assert first["neither"] == last["neither"]
    assert (
        "pattern 'haed' matches no module on any stage: the nearest names are 'head'"
        in first["neither"]
    )
    assert first["one"] == last["one"]
    assert (
        "ColwiseParallel cuts nn.Linear and nn.Embedding, but '0.norm' is a LayerNorm"
        in first["one"]
    )
    assert first["listed"] == last["listed"] == ("0.up", "head")


def whole_sequences_on_rank(rank: int) -> list[str]:
    """Return the refusals of calls that need whole sequences, if ranks hold parts of them."""
    model, said = llama(), []
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), llama_plan)
    for length, keywords in [
        (6, {"logits_to_keep": 1}),
        (6, {"output_hidden_states": True}),
        (5, {}),
    ]:
        with pytest.raises(ValueError, match=r".") as refusal:
            model(torch.zeros(1, length, dtype=torch.int64), **keywords)
        said.append(str(refusal.value))
    return said


def test_a_llama_whose_norms_see_parts_refuses_calls_that_need_whole_sequences() -> None:
    first, second = on_ranks(2, whole_sequences_on_rank)
    assert first == second
    assert "logits_to_keep=1 needs whole sequences" in first[0]
    assert "output_hidden_states=True needs whole sequences" in first[1]
    assert (
        "seq_len=5 must be a multiple of tp=2 for sequence-parallel norms: pad it to 6, or build"
        " the plan" in first[2]
    )
