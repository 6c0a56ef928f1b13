"""Checkpoints that transformers loads, and transformers' models at any layout."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from course_pp.__main__ import main
from course_pp.launch import on_ranks
from course_pp.model import build_stage_module, config_from_hf
from course_pp.parallel import DistributedConfig, init_distributed
from course_pp.training.checkpoint import CheckpointError, export_hf, import_hf, load, save
from course_pp.training.data import BOT_ID, EOT_ID, PAD_ID, Tokenizer
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


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_sharded_checkpoint_is_exported_with_equal_logits(tied: bool, tmp_path: Path) -> None:
    config = config_of(tied)
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


def test_the_tokenizer_goes_along_and_the_dtype_is_chosen(tokenizer: Tokenizer, tmp_path: Path) -> None:
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
def test_an_imported_llama_gives_equal_logits_through_four_stages(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": tied}))
    theirs.save_pretrained(tmp_path / "hf")
    assert main(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    tokens = torch.randint(61, (2, 16))
    logits = on_ranks(4, _logits, config_from_hf(theirs.config), tmp_path / "run", tokens, timeout_s=110)[-1]
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


@dataclass
class OtherConfig:
    width: int = 1


class Other(torch.nn.Linear):
    """A model whose configuration is not ours."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.config = OtherConfig()


UP = "model.layers.1.mlp.up_proj.weight"
BROKEN: dict[str, Callable[[dict[str, Tensor]], object]] = {
    f"has no {UP}": lambda weights: weights.pop(UP),
    f"has, beside what config.json asks for, {UP}.more": lambda weights: weights.update({f"{UP}.more": torch.ones(1)}),
    f"has, in another shape than config.json asks for, {UP}": lambda weights: weights.update({UP: torch.ones(3, 32)}),
}


@pytest.mark.parametrize(("said", "break_it"), BROKEN.items(), ids=["missing", "unexpected", "of another shape"])
def test_weights_that_transformers_would_draw_at_random_or_leave_out_are_refused(
    said: str, break_it: Callable[[dict[str, Tensor]], object], tmp_path: Path
) -> None:
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    break_it(weights)
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{said}: get the directory anew"):
        import_hf(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("described", [True, False], ids=["generation_config.json", "config.json alone"])
def test_the_ids_that_begin_end_and_pad_a_text_survive_both_ways(described: bool, tmp_path: Path) -> None:
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
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (PAD_ID, BOT_ID, EOT_ID)
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (described["vocab_size"], described["pad_token_id"]) == (tokenizer.vocab_size + 12, 0)


def test_what_cannot_be_taken_along_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, torch.nn.Linear(1, 1), device_mesh=None)
    with pytest.raises(CheckpointError, match="does not say which model"):
        export_hf(tmp_path / "run", tmp_path / "hf")
    save(tmp_path / "other", 1, Other(), device_mesh=None)
    with pytest.raises(CheckpointError, match="does not say which model"):
        export_hf(tmp_path / "other", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(CheckpointError, match="is not empty"):
        export_hf(Small(CONFIG).saved(tmp_path / "small", 1), tmp_path / "run")
    LLAMA.save_pretrained(tmp_path / "pickled")
    torch.save({}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"needs config\.json and \.safetensors"):
        import_hf(tmp_path / "pickled", tmp_path / "imported")
