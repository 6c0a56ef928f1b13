"""To and from a Hugging Face model directory: safetensors, ``config.json``, and the tokenizer if it is there."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from course_pp.arguments import checked
from course_pp.model import ModelConfig, Transformer, config_from_hf, config_to_hf
from course_pp.model.hf import HEAD, name_to_hf, refuse_other_kinds
from course_pp.training.checkpoint.contents import read_whole
from course_pp.training.checkpoint.manifest import read_json, read_manifest, read_plain
from course_pp.training.checkpoint.opening import Opened, open_checkpoint
from course_pp.training.checkpoint.ranks import CheckpointError, sentence
from course_pp.training.checkpoint.saving import Saved, save
from course_pp.training.checkpoint.weights import read_weights
from course_pp.training.data import SPECIAL_TOKENS

__all__ = ["export_hf", "import_hf"]

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_GENERATION = "generation_config.json"
_ROLES = ("pad", "bos", "eos")
_IDS = [f"{role}_token_id" for role in _ROLES]


@checked
def export_hf(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> Path:
    """Write the model of a checkpoint so that ``AutoModelForCausalLM.from_pretrained(directory)`` loads it.

    Attached tokenizer files are exported too, and ``config.json`` gets their ids that begin, end and pad a text.

    Args:
        path: a checkpoint, or the directory of a run's checkpoints.
        directory: new or empty; it appears when it is complete.
        dtype: None keeps the checkpoint's.

    Raises:
        CheckpointError: if the checkpoint is damaged or not of :class:`~course_pp.model.Transformer`; if ``directory``
            holds something, or cannot be written.
    """
    opened, target = open_checkpoint(path), Path(os.path.abspath(directory))
    config, attached = _config_of(opened), _attached_to(opened)
    draft = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{directory} is not empty: export to a new directory")
        draft.mkdir(parents=True)
        _write(draft, opened, config, attached, dtype)
        draft.rename(target)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise CheckpointError(
            f"{directory} cannot be written ({sentence(error)}): make room there, or export to another directory"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Path(directory)


def _write(
    directory: Path, opened: Opened, config: ModelConfig, attached: Mapping[str, bytes], dtype: torch.dtype | None
) -> None:
    """Write everything that transformers needs."""
    from huggingface_hub import save_torch_state_dict

    weights = read_whole(opened, [key for key in opened.keys if key.startswith("model.")])
    renamed = {name_to_hf(key.removeprefix("model.")): tensor.to(dtype) for key, tensor in weights.items()}
    save_torch_state_dict(renamed, directory)
    for name, content in attached.items():
        (directory / name).write_bytes(content)
    ours = _special_ids(attached)
    if ours:  # other tokenizers bring their description along
        roles = {f"{role}_token": token for role, (token, _) in ours.items()}
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}, indent=1)
        (directory / _TOKENIZER[1]).write_text(text, encoding="utf-8")
    hf_config = config_to_hf(config)
    hf_config.architectures = [f"{type(hf_config).__name__.removesuffix('Config')}ForCausalLM"]
    hf_config.dtype = next(iter(renamed.values())).dtype
    for name, token in _token_ids(attached, ours).items():
        setattr(hf_config, name, token)
    hf_config.save_pretrained(directory)


def _attached_to(opened: Opened) -> dict[str, bytes]:
    """Return the tokenizer's files in a checkpoint; nothing that its manifest does not name."""
    _, files = read_manifest(opened.path)
    return {name: _json_in(opened.path / name) for name in (*_TOKENIZER, _GENERATION) if name in files}


def _json_in(path: Path) -> bytes:
    """Return the content of a file that holds a JSON object.

    Raises:
        CheckpointError: if it holds anything else, is a link, or cannot be read.
    """
    try:
        if not isinstance(read_json(path), dict):
            raise CheckpointError(f"{path.name} is damaged: it is not a JSON object")
        return read_plain(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error


def _config_of(opened: Opened) -> ModelConfig:
    """Return the sizes of the model, if it is one of ours and all of it is there."""
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


def _special_ids(attached: Mapping[str, bytes]) -> dict[str, tuple[str, int]]:
    """Role, token and id of the special tokens, if the tokenizer is ours."""
    definition, description = _TOKENIZER[:2]
    if definition not in attached or description in attached:
        return {}
    added = json.loads(attached[definition]).get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    ids = {token.get("content"): token["id"] for token in tokens if type(token.get("id")) is int}
    return {role: (token, ids[token]) for role, token in zip(_ROLES, SPECIAL_TOKENS, strict=True) if token in ids}


def _token_ids(attached: Mapping[str, bytes], special: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Return ``eos_token_id`` and the like for ``config.json``, as the model came with or our tokenizer has them."""
    if _GENERATION in attached:
        known = json.loads(attached[_GENERATION])
        return {name: known.get(name) for name in _IDS}
    return {f"{role}_token_id": token_id for role, (_, token_id) in special.items()}


@checked
def import_hf(source: str | os.PathLike[str], root: str | os.PathLike[str]) -> Saved:
    """Make a checkpoint, step 0 without an optimizer, of a Hugging Face model directory.

    Only JSON and safetensors are read, by this package: never pickled weights, nor code that the directory holds or
    names, so attention is always the built-in one. No link is followed. Load the checkpoint with ``optimizer=None``, at
    any layout, in the dtype it has.

    Raises:
        CheckpointError: if there is no such directory, a file in it is damaged or a link, or it does not hold exactly
            the weights that its ``config.json`` asks for; nothing is left in ``root`` then.
        ValueError: if the model uses something our decoder does not have.
    """
    folder = Path(source)
    if not os.path.lexists(folder / "config.json") or not list(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is not a model directory: it needs config.json and .safetensors files")
    described = json.loads(_json_in(folder / "config.json"))
    hf_config = _hf_config(folder, described)
    config = _readable(folder, lambda: config_from_hf(hf_config))
    model = read_weights(folder, config, _dtype_of(described))
    names = (*_TOKENIZER, _GENERATION)
    attachments = {name: _json_in(folder / name) for name in names if os.path.lexists(folder / name)}
    if _GENERATION not in attachments:
        ids = {name: getattr(hf_config, name, None) for name in _IDS}
        attachments[_GENERATION] = json.dumps({"_from_model_config": True, **ids}, indent=1).encode()
    return save(root, 0, model, device_mesh=None, attachments=attachments)


def _hf_config(folder: Path, described: Mapping[str, Any]) -> Any:
    """Return what ``config.json`` says, as the class of its model reads it."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config

    kinds: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}
    kind = described.get("model_type")
    refuse_other_kinds(kind)
    # How transformers computes attention, and whose code it fetches for that, is not a matter of the model.
    kept = {name: value for name, value in described.items() if "attn_implementation" not in name}
    return _readable(folder, lambda: kinds[str(kind)].from_dict(kept))


def _readable(folder: Path, work: Callable[[], Any]) -> Any:
    """Run ``work`` on ``config.json``; pass refusals of unsupported models on, and report any other error as damage."""
    try:
        return work()
    except Exception as error:
        if type(error) is ValueError:
            raise
        what = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: config.json is damaged ({type(error).__name__}: {what})") from error


def _dtype_of(described: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that ``config.json`` asks for; None if it names none."""
    name = str(described.get("dtype") or described.get("torch_dtype"))
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if found in (torch.float64, torch.float32, torch.bfloat16, torch.float16) else None
