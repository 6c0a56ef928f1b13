"""To and from a Hugging Face model directory: safetensors, ``config.json``, and the tokenizer if it is there."""

import json
import os
from pathlib import Path

import torch

from course_pp.model import ModelConfig, config_to_hf, from_hf
from course_pp.model.hf import name_to_hf
from course_pp.training.checkpoint.contents import read_whole
from course_pp.training.checkpoint.loading import open_checkpoint
from course_pp.training.checkpoint.ranks import CheckpointError
from course_pp.training.checkpoint.saving import Saved, save
from course_pp.training.data import SPECIAL_TOKENS

__all__ = ["export_hf", "import_hf"]

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def export_hf(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> Path:
    """Write the model of a checkpoint so that ``AutoModelForCausalLM.from_pretrained(directory)`` loads it.

    Attachments named as a tokenizer's files go along.

    Args:
        path: a checkpoint, or the directory of a run's.
        directory: new or empty.
        dtype: None keeps the checkpoint's.

    Raises:
        CheckpointError: if the checkpoint is damaged or not of :class:`~course_pp.model.Transformer`, or
            ``directory`` holds something.
    """
    from huggingface_hub import save_torch_state_dict

    opened, target = open_checkpoint(path), Path(directory)
    if opened.state["config"] is None:
        raise CheckpointError(f"{opened.path} does not say which model it is of: only course_pp's can be exported")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty: export to a new directory")
    target.mkdir(parents=True, exist_ok=True)
    weights = read_whole(opened, [key for key in opened.keys if key.startswith("model.")])
    renamed = {name_to_hf(key.removeprefix("model.")): tensor.to(dtype) for key, tensor in weights.items()}
    save_torch_state_dict(renamed, target)
    hf_config = config_to_hf(ModelConfig(**opened.state["config"]))
    hf_config.architectures = ["LlamaForCausalLM"]
    hf_config.dtype = next(iter(renamed.values())).dtype
    hf_config.save_pretrained(target)
    for name in _TOKENIZER:
        if (opened.path / name).exists():
            (target / name).write_bytes((opened.path / name).read_bytes())
    _describe_tokenizer(target)
    return target


def _describe_tokenizer(directory: Path) -> None:
    """Say what the special tokens of our tokenizer are for; others bring their description along."""
    definition, description = (directory / name for name in _TOKENIZER[:2])
    if not definition.exists() or description.exists():
        return
    added = {token["content"] for token in json.loads(definition.read_bytes()).get("added_tokens", [])}
    roles = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
    special = {role: token for role, token in roles.items() if token in added}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}, indent=1)
    description.write_text(text, encoding="utf-8")


def import_hf(source: str | os.PathLike[str], root: str | os.PathLike[str]) -> Saved:
    """Make a checkpoint, step 0 without an optimizer, of a Hugging Face model directory.

    Only safetensors are read, never pickled weights or the model's own code. Load it with ``optimizer=None``, at any
    layout, in the dtype it has.

    Raises:
        CheckpointError: if there is no such directory, or no safetensors in it.
        ValueError: if the model uses something our decoder does not have.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(source)
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is not a model directory: it needs config.json and .safetensors files")
    hf_model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    tokenizer = {name: (folder / name).read_bytes() for name in _TOKENIZER if (folder / name).is_file()}
    return save(root, 0, from_hf(hf_model), device_mesh=None, attachments=tokenizer)
