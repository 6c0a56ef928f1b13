"""Checkpoints that transformers loads, and transformers' models at any layout."""

import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)

from course_pp.__main__ import main
from course_pp.launch import on_ranks
from course_pp.model import build_stage_module, config_from_hf
from course_pp.parallel import (
    DistributedConfig,
    apply_fsdp2,
    auto_split,
    find_ties,
    get_pp_rank,
    init_distributed,
)
from course_pp.training.checkpoint import (
    CheckpointError,
    export_hf,
    import_hf,
    load,
    load_stage,
    save,
)
from course_pp.training.data import BOT_ID, EOT_ID, PAD_ID, Tokenizer
from source_code.hf_pp.families import build, called, example, tensor_of
from tests.training.checkpoint.resuming import Case, config_of, data_of, train
from tests.training.checkpoint.small import CONFIG, Small

LLAMA = LlamaConfig(
    hidden_size=32,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=61,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    "tied", [pytest.param(False, marks=pytest.mark.long), True], ids=["untied", "tied"]
)
def test_a_sharded_checkpoint_is_exported_with_equal_logits(tied: bool, tmp_path: Path) -> None:
    config = config_of(tied, n_layers=4)
    data = data_of(config, 1)
    layout = Case(pp=2, schedule="zb_v", tp=2)
    root, exported = tmp_path / "run" / "sync", tmp_path / "hf"
    on_ranks(4, _save_at, layout, config, data, tmp_path / "run", timeout_s=110)
    assert main(["checkpoint", "export", str(root), str(exported)]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    assert theirs.dtype == torch.float64
    ours = Small(config).model
    load(root, ours, device_mesh=None)
    tokens = data[0][0]
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max() < 1e-6


def _save_at(rank, layout, config, data, root):
    train(rank, layout, config, data, root, save_at=1)


def test_the_tokenizer_goes_along_and_the_dtype_is_chosen(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    attachments = {"tokenizer.json": tokenizer.definition}
    save(tmp_path / "run", 1, Small().model, device_mesh=None, attachments=attachments)
    exported = export_hf(tmp_path / "run", tmp_path / "hf", torch.bfloat16)
    theirs = AutoTokenizer.from_pretrained(exported)
    text = "def f(x):\n    return x + 1"
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert (theirs.pad_token, theirs.bos_token, theirs.eos_token) == ("[PAD]", "[BOT]", "[EOT]")
    assert AutoModelForCausalLM.from_pretrained(exported).dtype == torch.bfloat16
    back = import_hf(exported, tmp_path / "back").path
    assert (back / "tokenizer.json").read_text() == tokenizer.definition


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_imported_llama_gives_equal_logits_through_four_stages(
    tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": tied}))
    theirs.save_pretrained(tmp_path / "hf")
    assert main(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    tokens = torch.randint(61, (2, 16))
    logits = on_ranks(
        4, _logits, config_from_hf(theirs.config), tmp_path / "run", tokens, timeout_s=110
    )[-1]
    with torch.no_grad():
        assert (theirs(tokens).logits - logits).abs().max() < 1e-6


@torch.no_grad()
def _logits(rank, config, root, tokens):
    mesh = init_distributed(DistributedConfig(pp=4))
    stage = build_stage_module(config, rank, 4)
    load(root, stage, device_mesh=mesh)
    x = torch.empty(*tokens.shape, config.dim) if rank else tokens
    if rank:
        dist.recv(x, rank - 1)
    x = stage(x)
    if rank < 3:
        dist.send(x, rank + 1)
    return x


SIZES = {
    name: LLAMA.to_dict()[name]
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
}
SIZES |= {
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
SIZES |= {"num_local_experts": 4, "num_experts_per_tok": 2}
WITH_EXPERTS = {
    "Mixtral": MixtralConfig(**SIZES),
    "Qwen3-MoE": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=12, head_dim=16, norm_topk_prob=True
    ),
}


@pytest.mark.parametrize("packed", [False, True], ids=["one matrix an expert", "packed"])
@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_models_with_experts_come_in_and_go_out(kind: str, packed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(WITH_EXPERTS[kind])
    nn.init.normal_(theirs.model.layers[3].mlp.gate.weight)
    theirs.save_pretrained(tmp_path / "hf", save_original_format=not packed)
    names = load_file(tmp_path / "hf" / WEIGHTS).keys()
    assert any(name.endswith("gate_up_proj") for name in names) == packed
    import_hf(tmp_path / "hf", tmp_path / "run")
    config = config_from_hf(theirs.config)
    model = Small(config).model
    load(tmp_path / "run", model.float(), device_mesh=None)
    x = tokens = torch.randint(61, (2, 16))
    for stage in (build_stage_module(config, i, 2) for i in range(2)):
        load_stage(stage, tmp_path / "hf")
        x = stage(x)
    again = AutoModelForCausalLM.from_pretrained(export_hf(tmp_path / "run", tmp_path / "back"))
    with torch.no_grad():
        expected = theirs(tokens).logits
        for logits in (model(tokens), x, again(tokens).logits):
            assert (logits - expected).abs().max() < 1e-5
    weights = load_file(tmp_path / "back" / WEIGHTS)
    assert packed or all(
        torch.equal(weights[name], tensor)
        for name, tensor in load_file(tmp_path / "hf" / WEIGHTS).items()
    )


UP = "model.layers.1.mlp.up_proj.weight"
BROKEN: dict[str, Callable[[dict[str, Tensor]], object]] = {
    f"has no {UP}, which": lambda weights: weights.pop(UP),
    f"has, beside what config.json asks for, {UP}.more": lambda weights: weights.update(
        {f"{UP}.more": torch.ones(1)}
    ),
    f"has {UP} as \\(3, 32\\), and": lambda weights: weights.update({UP: torch.ones(3, 32)}),
}


@pytest.mark.parametrize(
    ("said", "break_it"), BROKEN.items(), ids=["missing", "unexpected", "of another shape"]
)
def test_weights_that_transformers_would_draw_at_random_or_leave_out_are_refused(
    said: str, break_it: Callable[[dict[str, Tensor]], object], tmp_path: Path
) -> None:
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    break_it(weights)
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        import_hf(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "described", [True, False], ids=["generation_config.json", "config.json alone"]
)
def test_the_ids_that_begin_end_and_pad_a_text_survive_both_ways(
    described: bool, tmp_path: Path
) -> None:
    ids = {"bos_token_id": 16, "eos_token_id": [17, 18], "pad_token_id": 15}
    LlamaForCausalLM(LlamaConfig(**{**LLAMA.to_dict(), **ids})).save_pretrained(tmp_path / "hf")
    if not described:
        (tmp_path / "hf" / "generation_config.json").unlink()
    import_hf(tmp_path / "hf", tmp_path / "run")
    exported = AutoModelForCausalLM.from_pretrained(export_hf(tmp_path / "run", tmp_path / "back"))
    for config in (exported.config, exported.generation_config):
        assert {name: getattr(config, name) for name in ids} == ids


def test_a_vocabulary_larger_than_the_tokenizers_is_exported_with_the_tokenizers_ids(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    run = Small(replace(CONFIG, vocab_size=tokenizer.vocab_size + 12))
    attachments = {"tokenizer.json": tokenizer.definition}
    save(tmp_path / "run", 1, run.model, device_mesh=None, attachments=attachments)
    theirs = AutoModelForCausalLM.from_pretrained(export_hf(tmp_path / "run", tmp_path / "hf"))
    tokens = torch.randint(tokenizer.vocab_size + 12, (2, 8))
    with torch.no_grad():
        assert (theirs(tokens).logits - run.model(tokens)).abs().max() < 1e-6
    for config in (theirs.config, theirs.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (
            PAD_ID,
            BOT_ID,
            EOT_ID,
        )
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (described["vocab_size"], described["pad_token_id"]) == (tokenizer.vocab_size + 12, 0)


FOREIGN = ("GPT-2, language model", "Llama", "BERT", "T5", "GPT-NeoX")


def reloaded(theirs: Any, exported: Path) -> Any:
    """Return the model that transformers makes of an export, of the class that it was."""
    described = json.loads((exported / "config.json").read_text())
    assert described["architectures"] == [type(theirs).__name__]
    return type(theirs).from_pretrained(exported).eval()


@pytest.mark.parametrize("numbered", [False, True], ids=["a list", "by number"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_model_of_transformers_is_exported_from_its_stages(
    name: str, numbered: bool, tmp_path: Path
) -> None:
    theirs: Any = build(name).eval()
    stages = auto_split(theirs, example(name), 3)
    save(tmp_path / "run", 1, dict(enumerate(stages)) if numbered else stages, device_mesh=None)
    again = reloaded(theirs, export_hf(tmp_path / "run", tmp_path / "hf"))
    assert find_ties(again) == find_ties(theirs)
    assert torch.equal(
        tensor_of(called(again, example(name))), tensor_of(called(theirs, example(name)))
    )


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3-MoE"])
def test_experts_of_transformers_are_exported_as_they_publish_them(
    kind: str, tmp_path: Path
) -> None:
    theirs = AutoModelForCausalLM.from_config(WITH_EXPERTS[kind]).eval()
    tokens = torch.arange(20).view(2, 10)
    stages = auto_split(theirs, {"input_ids": tokens, "use_cache": False}, 2)
    save(tmp_path / "run", 1, stages, device_mesh=None)
    again = reloaded(theirs, export_hf(tmp_path / "run", tmp_path / "hf"))
    assert any(".experts.3." in name for name in load_file(tmp_path / "hf" / WEIGHTS))
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    half = AutoModelForCausalLM.from_pretrained(
        export_hf(tmp_path / "run", tmp_path / "half", torch.bfloat16)
    )
    assert half.dtype == torch.bfloat16


def tied_llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True, "use_cache": False})
    )


def save_shards_on_rank(rank: int, root: Path) -> None:
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2))
    tokens = torch.ones(1, 4, dtype=torch.int64)
    stage = auto_split(tied_llama(), {"input_ids": tokens}, 2)[get_pp_rank(mesh)]
    apply_fsdp2(stage, mesh, MixedPrecisionPolicy())
    save(root, 1, stage, device_mesh=mesh)


def test_a_model_of_transformers_is_exported_from_its_shards(tmp_path: Path) -> None:
    on_ranks(4, save_shards_on_rank, tmp_path / "run", timeout_s=60)
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    theirs, tokens = tied_llama(), torch.arange(20).view(2, 10)
    again = reloaded(theirs, tmp_path / "hf")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


class OnesOwn(nn.Linear):
    """A model of one's own, with a configuration of transformers."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.config = LLAMA


def with_an_adapter() -> nn.Module:
    model = tied_llama()
    model.model.layers[0].self_attn.q_proj.adapter = nn.Linear(1, 1)
    return model


def untied_by_hand() -> nn.Module:
    model = tied_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
    return model


def tied_by_hand() -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA.to_dict()))
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


UNEXPORTABLE: list[tuple[Callable[[], nn.Module], str]] = [
    (OnesOwn, "save_pretrained"),
    (with_an_adapter, "adapter"),
    (untied_by_hand, "tie_word_embeddings=False"),
    (tied_by_hand, "tie_word_embeddings=True"),
]


@pytest.mark.parametrize(("build_model", "word"), UNEXPORTABLE)
def test_a_foreign_model_that_transformers_would_load_otherwise_is_refused(
    build_model: Callable[[], nn.Module], word: str, tmp_path: Path
) -> None:
    model: Any = build_model()
    save(tmp_path / "run", 1, model, device_mesh=None)
    with pytest.raises(CheckpointError, match=word):
        export_hf(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    if word.startswith("tie"):  # the remedy
        model.config.tie_word_embeddings = word.endswith("True")
        save(tmp_path / "run", 2, model, device_mesh=None)
        again = LlamaForCausalLM.from_pretrained(export_hf(tmp_path / "run", tmp_path / "hf"))
        assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_what_cannot_be_taken_along_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, torch.nn.Linear(1, 1), device_mesh=None)
    with pytest.raises(CheckpointError, match="which model"):
        export_hf(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(CheckpointError, match="is not empty"):
        export_hf(Small(CONFIG).saved(tmp_path / "small", 1), tmp_path / "run")
    LLAMA.save_pretrained(tmp_path / "pickled")
    torch.save({}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"needs config\.json"):
        import_hf(tmp_path / "pickled", tmp_path / "imported")


def edited(**changes: object) -> Callable[[Path], None]:
    """Changes entries of config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def rewritten(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def truncated(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


def lying(folder: Path) -> None:
    """A header that claims more than the file holds."""
    content = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    (folder / WEIGHTS).write_bytes(
        content[:8] + content[8 : 8 + size].replace(b"[61,32]", b"[99,32]") + content[8 + size :]
    )


def quantized(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file({**weights, UP: torch.zeros(48, 32, dtype=torch.int8)}, folder / WEIGHTS)


def linked(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        target = folder.parent / f"secret {name}"
        if (folder / name).exists():
            (folder / name).rename(target)
        else:
            target.write_text("{}")
        (folder / name).symlink_to(target)

    return link


WEIGHTS = "model.safetensors"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (truncated, f"{WEIGHTS} is damaged"),
    "lying weights": (lying, f"{WEIGHTS} is damaged"),
    "quantized weights": (quantized, f"has {UP} as I8"),
    "ties that are two": (
        edited(tie_word_embeddings=True),
        "has different model.embed_tokens.weight and lm_head",
    ),
    "empty weights": (rewritten(WEIGHTS, ""), f"{WEIGHTS} is damaged"),
    "a link for weights": (linked(WEIGHTS), f"{WEIGHTS} is a link"),
    "a link for a tokenizer": (linked("tokenizer.json"), "tokenizer.json is a link"),
    "a tokenizer that is not JSON": (
        rewritten("tokenizer.json", "{"),
        "tokenizer.json is damaged: it is not JSON",
    ),
    "a tokenizer that is a list": (rewritten("tokenizer.json", "[]"), "tokenizer.json is damaged"),
    "brackets for a configuration": (
        rewritten("config.json", "[" * 400_000),
        "config.json is damaged: it is not JSON",
    ),
    "sizes that are none": (edited(hidden_size="x"), "config.json is damaged"),
    "more layers than weights": (
        edited(num_hidden_layers=10**9),
        "too few for the 1,000,000,000 layers",
    ),
    "an enormous vocabulary": (
        edited(vocab_size=10**15),
        "and the model needs (1000000000000000, 32)",
    ),
    "an index elsewhere": (
        lambda folder: (
            (folder / WEIGHTS).rename(folder / "weights.safetensors"),
            (folder / f"{WEIGHTS}.index.json").write_text(
                '{"weight_map": {"a": "../../x.safetensors"}}'
            ),
        ),
        "is refused: it names '../../x.safetensors'",
    ),
}


@pytest.mark.parametrize(("damage", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_model_directory_is_refused_by_file_and_leaves_nothing(
    damage: Callable[[Path], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "hf")
    damage(tmp_path / "hf")
    capsys.readouterr()
    assert main(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_attention_is_the_built_in_one_whatever_code_a_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "hf")
    hub = {"_attn_implementation": "someone/kernels", "attn_implementation": "someone/kernels"}
    remote = {
        "auto_map": {"AutoModelForCausalLM": "someone/code--model.Model"},
        "quantization_config": {"quant_method": "x"},
    }
    edited(**hub, **remote, max_position_embeddings=10**12)(tmp_path / "hf")
    monkeypatch.setattr(LlamaForCausalLM, "__init__", None)  # no model of transformers is made
    path = import_hf(tmp_path / "hf", tmp_path / "run").path
    assert not [file.name for file in path.iterdir() if b"someone" in file.read_bytes()]
    assert not list(tmp_path.glob("**/*.py"))


def test_an_export_that_fails_leaves_nothing_that_blocks_the_next(tmp_path: Path) -> None:
    run = Small()
    attached = save(
        tmp_path / "run", 1, run.model, device_mesh=None, attachments={"tokenizer.json": "{"}
    ).path
    with pytest.raises(CheckpointError, match=r"step_00000001: tokenizer\.json"):
        export_hf(attached, tmp_path / "out")
    path = save(tmp_path / "run", 2, run.model, device_mesh=None).path
    (path / "tokenizer.json").symlink_to("/etc/passwd")  # not in the manifest
    said = on_ranks(1, _export_on_a_full_disk, path, tmp_path / "out")[0]
    assert said.startswith(f"{tmp_path / 'out'} cannot be written (")
    assert said.endswith("make room there, or export to another directory")
    assert [found.name for found in tmp_path.iterdir()] == ["run"]
    (tmp_path / "out").mkdir()
    exported = export_hf(path, tmp_path / "out")
    assert not (exported / "tokenizer.json").exists()
    AutoModelForCausalLM.from_pretrained(exported)


def _export_on_a_full_disk(rank: int, path: Path, out: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as refused:
        export_hf(path, out)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(refused.value)


@pytest.mark.parametrize("action", ["export", "import"])
def test_an_interrupted_command_leaves_nothing(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    path, out = Small().saved(tmp_path / "run", 1), tmp_path / "out"
    export_hf(path, tmp_path / "hf")
    monkeypatch.setattr("course_pp.training.checkpoint.huggingface._special_ids", interrupt)
    monkeypatch.setattr("course_pp.training.checkpoint.saving.write_tensors", interrupt)
    arguments = {"export": [path, out], "import": [tmp_path / "hf", out]}
    assert main(["checkpoint", action, *map(str, arguments[action])]) == 130
    assert not out.exists() or not list(out.iterdir())


def test_a_qwen2_comes_back_as_one(tmp_path: Path) -> None:
    theirs = Qwen2ForCausalLM(Qwen2Config(**{**LLAMA.to_diff_dict(), "model_type": "qwen2"}))
    torch.nn.init.normal_(theirs.model.layers[1].self_attn.q_proj.bias)
    theirs.save_pretrained(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert isinstance(back, Qwen2ForCausalLM)
    tokens = torch.arange(8)[None]
    assert torch.equal(back(tokens).logits, theirs(tokens).logits)
