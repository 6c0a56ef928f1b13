"""To and from a Hugging Face model directory: safetensors, ``config.json``, and the tokenizer if it is there."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from course_pp.model import ModelConfig, Transformer, config_to_hf, from_hf
from course_pp.model.hf import HEAD, name_to_hf
from course_pp.training.checkpoint.contents import read_whole
from course_pp.training.checkpoint.opening import Opened, open_checkpoint
from course_pp.training.checkpoint.ranks import CheckpointError
from course_pp.training.checkpoint.saving import Saved, save
from course_pp.training.data import SPECIAL_TOKENS

__all__ = ["export_hf", "import_hf"]

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_GENERATION = "generation_config.json"
_ROLES = ("pad", "bos", "eos")


def export_hf(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> Path:
    """Write the model of a checkpoint so that ``AutoModelForCausalLM.from_pretrained(directory)`` loads it.

    Attachments named as a tokenizer's files go along, and what they say of the ids that begin, end and pad a text.

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
    config = _config_of(opened)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty: export to a new directory")
    target.mkdir(parents=True, exist_ok=True)
    weights = read_whole(opened, [key for key in opened.keys if key.startswith("model.")])
    renamed = {name_to_hf(key.removeprefix("model.")): tensor.to(dtype) for key, tensor in weights.items()}
    save_torch_state_dict(renamed, target)
    for name in (*_TOKENIZER, _GENERATION):
        if (opened.path / name).exists():
            (target / name).write_bytes((opened.path / name).read_bytes())
    ours = _special_ids(target)
    _describe_tokenizer(target, ours)
    hf_config = config_to_hf(config)
    hf_config.architectures = ["LlamaForCausalLM"]
    hf_config.dtype = next(iter(renamed.values())).dtype
    for role, token in _token_ids(target, ours).items():
        setattr(hf_config, role, token)
    hf_config.save_pretrained(target)
    return target


def _config_of(opened: Opened) -> ModelConfig:
    """The sizes of the model, if it is one of ours and all of it is there."""
    try:
        config = ModelConfig(**opened.state["config"])
        with torch.device("meta"):
            expected = {f"model.{name}" for name in Transformer(config).state_dict()}
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{opened.path} does not say which model it is of: only course_pp's can be exported"
        ) from error
    if config.tie_embeddings:
        expected.discard(f"model.{HEAD}")
    found = {key for key in opened.keys if key.startswith("model.")}
    if differ := sorted(expected ^ found):
        raise CheckpointError(
            f"{opened.path} is not of course_pp's Transformer: it has {'no' if differ[0] in expected else 'a'} "
            f"{differ[0].removeprefix('model.')}; only that can be exported"
        )
    return config


def _special_ids(directory: Path) -> dict[str, tuple[str, int]]:
    """Role, token and id of the special tokens, if the tokenizer in ``directory`` is ours."""
    definition, description = (directory / name for name in _TOKENIZER[:2])
    if not definition.exists() or description.exists():
        return {}
    ids = {token["content"]: token["id"] for token in json.loads(definition.read_bytes()).get("added_tokens", [])}
    return {role: (token, ids[token]) for role, token in zip(_ROLES, SPECIAL_TOKENS, strict=True) if token in ids}


def _describe_tokenizer(directory: Path, special: dict[str, tuple[str, int]]) -> None:
    """Say what the special tokens of our tokenizer are for; others bring their description along."""
    if special:
        roles = {f"{role}_token": token for role, (token, _) in special.items()}
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}, indent=1)
        (directory / _TOKENIZER[1]).write_text(text, encoding="utf-8")


def _token_ids(directory: Path, special: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """``eos_token_id`` and the others for ``config.json``, as the model came with or as our tokenizer has them."""
    names = [f"{role}_token_id" for role in _ROLES]
    generation = directory / _GENERATION
    if generation.exists():
        known = json.loads(generation.read_bytes())
        return {name: known.get(name) for name in names}
    return {f"{role}_token_id": token_id for role, (_, token_id) in special.items()}


def import_hf(source: str | os.PathLike[str], root: str | os.PathLike[str]) -> Saved:
    """Make a checkpoint, step 0 without an optimizer, of a Hugging Face model directory.

    Only safetensors are read, never pickled weights or the model's own code. Load it with ``optimizer=None``, at any
    layout, in the dtype it has.

    Raises:
        CheckpointError: if there is no such directory, no safetensors in it, or not exactly the weights that its
            ``config.json`` asks for.
        ValueError: if the model uses something our decoder does not have.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(source)
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is not a model directory: it needs config.json and .safetensors files")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype="auto",
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    hf_model, found = loaded
    for kind, problem in _PROBLEMS.items():
        if keys := sorted(key if isinstance(key, str) else key[0] for key in found[kind]):
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise CheckpointError(f"{folder} {problem} {keys[0]}{more}: get the directory anew, whole")
    attachments = {name: (folder / name).read_bytes() for name in _TOKENIZER if (folder / name).is_file()}
    attachments[_GENERATION] = hf_model.generation_config.to_json_string().encode()
    return save(root, 0, from_hf(hf_model), device_mesh=None, attachments=attachments)


# What transformers fills with random numbers or leaves out, and would only warn of.
_PROBLEMS = {
    "missing_keys": "has no",
    "mismatched_keys": "has, in another shape than config.json asks for,",
    "unexpected_keys": "has, beside what config.json asks for,",
}
