"""Checkpoints that transformers loads, and transformers' models at any layout."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from course_pp.__main__ import main
from course_pp.launch import on_ranks
from course_pp.model import build_stage_module, config_from_hf
from course_pp.parallel import DistributedConfig, init_distributed
from course_pp.training.checkpoint import CheckpointError, export_hf, import_hf, load, save
from course_pp.training.data import Tokenizer
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


def test_what_cannot_be_taken_along_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, torch.nn.Linear(1, 1), device_mesh=None)
    with pytest.raises(CheckpointError, match="does not say which model"):
        export_hf(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is not empty"):
        export_hf(Small(CONFIG).saved(tmp_path / "small", 1), tmp_path / "run")
    LLAMA.save_pretrained(tmp_path / "pickled")
    torch.save({}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"needs config\.json and \.safetensors"):
        import_hf(tmp_path / "pickled", tmp_path / "imported")
