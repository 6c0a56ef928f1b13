"""Hugging Face model directories: export to one, import from one, and fill stages from one.

A directory holds safetensors, ``config.json`` and the tokenizer.

    with weights_on_meta():
        model = LlamaForCausalLM(config)               # takes no memory
    stages = auto_split(model, example, n_stages=4)
    load_stage(stages[rank], folder, device=device)    # reads this stage's part of the files

Only JSON and safetensors are read. Pickled weights are not read, and no code of a directory runs.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.base.arguments import check_arguments, checked
from course_pp.base.imports import imports_of_extra
from course_pp.base.torch_private import own_buffers, own_parameters
from course_pp.model import ModelConfig, Transformer, config_from_hf, config_to_hf
from course_pp.model.hf import (
    EMBEDDING,
    HEAD,
    Form,
    Source,
    config_class,
    form_of,
    hf_file_tensors,
    name_to_hf,
    refuse_other_kinds,
    sources_in_files,
    sources_in_hf,
)
from course_pp.training.checkpoint.manifest import (
    CheckpointError,
    CheckpointRanks,
    opened,
    read_json,
    read_manifest,
    read_plain,
    sentence,
)
from course_pp.training.checkpoint.opening import Opened, open_checkpoint
from course_pp.training.checkpoint.saving import Saved, save
from course_pp.training.checkpoint.state import HF_CONFIG, STAGES, load_into

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_GENERATION = "generation_config.json"
_ROLES = ("pad", "bos", "eos")
_IDS = [f"{role}_token_id" for role in _ROLES]
_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ANEW = "get the directory anew, whole"
# Filling a stage of a large model over a slow file system may take hours.
_LIMIT_S = 24 * 3600.0
# The part of a file that was read takes memory until the file is closed.
_OPEN_BYTES = 2**24

States = Sequence[tuple[nn.Module, dict[str, Any]]]
"""Modules, each with its state_dict."""


@checked
def export_hf(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a checkpoint's model so that ``from_pretrained(directory)`` of transformers loads it.

    Attached tokenizer files are exported too, and ``config.json`` gets their ids that begin, end
    and pad a text.

    A model of transformers, saved whole or cut by ``auto_split``, is exported as its own class,
    with its own ``config.json``. It must have the names of that class: merge adapters into the
    weights before saving.

    Args:
        path: a checkpoint, or the directory of a run's checkpoints.
        directory: a directory that is new or empty. It appears when it is complete.
        dtype: dtype of the exported weights; None keeps the checkpoint's.
    """
    checkpoint = open_checkpoint(path)
    target = Path(os.path.abspath(directory))
    _, files = read_manifest(checkpoint.path)
    attached = {}
    for name in (*_TOKENIZER, _GENERATION):
        if name in files:
            attached[name] = _json_in(checkpoint.path / name)
    write: Callable[[Path], None]
    if checkpoint.state["config"] is None and HF_CONFIG in files:
        model = _model_of_transformers(checkpoint, dtype)
        write = partial(_write_transformers, model, attached)
    else:
        write = partial(_write, checkpoint, _config_of(checkpoint), attached, dtype)
    draft = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{directory} is not empty: export to a new directory")
        draft.mkdir(parents=True)
        write(draft)
        draft.rename(target)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise CheckpointError(
            f"{directory} cannot be written ({sentence(error)}): make room there, or export to"
            " another directory"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Path(directory)


def _write(
    checkpoint: Opened,
    config: ModelConfig,
    attached: Mapping[str, bytes],
    dtype: torch.dtype | None,
    directory: Path,
) -> None:
    from huggingface_hub import save_torch_state_dict

    weights = checkpoint.read(f"model.{name}" for name in sorted(checkpoint.weights))
    ours = {key.removeprefix("model."): tensor.to(dtype) for key, tensor in weights.items()}
    renamed = hf_file_tensors(ours, config)
    save_torch_state_dict(renamed, directory)
    special = _special_ids(attached)
    _write_attached(attached, special, directory)
    hf_config = config_to_hf(config)
    hf_config.architectures = [f"{type(hf_config).__name__.removesuffix('Config')}ForCausalLM"]
    hf_config.dtype = next(iter(renamed.values())).dtype
    for name, token in _token_ids(attached, special).items():
        setattr(hf_config, name, token)
    hf_config.save_pretrained(directory)


def _write_attached(
    attached: Mapping[str, bytes], special: Mapping[str, tuple[str, int]], directory: Path
) -> None:
    for name, content in attached.items():
        (directory / name).write_bytes(content)
    # Only our own tokenizer has special ids here; any other comes with its description.
    if special:
        roles = {f"{role}_token": token for role, (token, _) in special.items()}
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}, indent=1)
        (directory / _TOKENIZER[1]).write_text(text, encoding="utf-8")


def _write_transformers(model: Any, attached: Mapping[str, bytes], directory: Path) -> None:
    model.save_pretrained(directory)
    _write_attached(attached, _special_ids(attached), directory)


def _model_of_transformers(checkpoint: Opened, dtype: torch.dtype | None) -> Any:
    """Return the model that a checkpoint's ``config.json`` describes, filled with its weights."""
    model = _built_by_transformers(checkpoint)
    weights = _weights_of_transformers(checkpoint, dtype)
    expected = set(model.state_dict())
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    state = model.state_dict(keep_vars=True)

    kind = type(model).__name__
    where = checkpoint.path
    how = "merge adapters into the weights and save anew, or load it and call its save_pretrained"
    others = sorted(weights.keys() - expected)
    if others:
        raise CheckpointError(f"{where} has {_first_of(others)}, which {kind} does not have: {how}")
    missing = sorted(name for name, tensor in state.items() if tensor.is_meta)
    if missing:
        raise CheckpointError(f"{where} has no {_first_of(missing)}, which {kind} has: {how}")

    # config.json says which weights are tied. A tie there replaces one weight by another.
    for name, tensor in weights.items():
        is_same = state[name].data_ptr() == tensor.data_ptr()
        if not is_same and not torch.equal(state[name], tensor):
            raise CheckpointError(
                f"{where}: {name} is tied by {HF_CONFIG}, and was saved with values of its own:"
                " save it with config.tie_word_embeddings=False"
            )
    for name, first in _ties_of_transformers(checkpoint).items():
        if state[name] is not state[first]:
            raise CheckpointError(
                f"{where}: {name} and {first} were saved as one weight, and are two by"
                f" {HF_CONFIG}: save it with config.tie_word_embeddings=True"
            )
    return model


def _built_by_transformers(checkpoint: Opened) -> Any:
    """Return a model without weights, as ``config.json`` says. Only transformers' own code runs."""
    with imports_of_extra("hf"):
        import transformers

    described = json.loads(_json_in(checkpoint.path / HF_CONFIG))
    # Another implementation of attention may be code that transformers would fetch.
    kept = {name: value for name, value in described.items() if "attn_implementation" not in name}
    kind = next(iter(described.get("architectures") or ()), None)
    architecture: Any = getattr(transformers, str(kind), None)
    how = "load it into your model, and call its save_pretrained"
    is_class = isinstance(architecture, type)
    if not is_class or not issubclass(architecture, transformers.PreTrainedModel):
        raise CheckpointError(
            f"{checkpoint.path} is of {kind or 'a class'}, which transformers does not have: {how}"
        )
    try:
        kind_of_config: Any = architecture.config_class
        config = kind_of_config.from_dict(kept)
        with torch.device("meta"):
            return architecture(config)
    except Exception as error:
        what = " ".join(str(error).split())
        raise CheckpointError(
            f"{checkpoint.path}: {HF_CONFIG} makes no {kind} ({type(error).__name__}: {what:.300}):"
            f" {how}"
        ) from error


def _weights_of_transformers(checkpoint: Opened, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return a checkpoint's weights by the model's own names, a tied one under all its names."""
    weights = {}
    read = checkpoint.read(f"model.{name}" for name in sorted(checkpoint.weights))
    for key, tensor in read.items():
        kept = tensor.to(dtype) if tensor.is_floating_point() else tensor
        weights[_without_stage(key.removeprefix("model."))] = kept
    for name, first in _ties_of_transformers(checkpoint).items():
        weights[name] = weights[first]
    return weights


def _ties_of_transformers(checkpoint: Opened) -> dict[str, str]:
    """Return the name under which a tied weight was saved, for each of its other names."""
    names = checkpoint.state.get("tied", {})
    return {_without_stage(name): _without_stage(checkpoint.first_name(name)) for name in names}


def _without_stage(name: str) -> str:
    """Return a name without the stage that ``{index: stage}`` puts before it."""
    return re.sub(rf"^{re.escape(STAGES)}\d+\.", "", name)


def _json_in(path: Path) -> bytes:
    """Return the content of a file that holds a JSON object."""
    try:
        if not isinstance(read_json(path), dict):
            raise CheckpointError(f"{path.name} is damaged: it is not a JSON object")
        return read_plain(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error


def _config_of(checkpoint: Opened) -> ModelConfig:
    """Return the sizes of the model. Refuse a model that is not ours, or not whole."""
    try:
        config = ModelConfig(**checkpoint.state["config"])
        with torch.device("meta"):
            expected = set(Transformer(config).state_dict())
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path} does not say which model it is of: only course_pp's and"
            " transformers' can be exported; load it into your model, and call its save_pretrained"
        ) from error
    if config.tie_embeddings:
        expected.discard(HEAD)
    differ = sorted(expected ^ checkpoint.weights)
    if differ:
        article = "no" if differ[0] in expected else "a"
        raise CheckpointError(
            f"{checkpoint.path} is not of course_pp's Transformer, as an export needs: it has"
            f" {article} {differ[0]}"
        )
    return config


def _special_ids(attached: Mapping[str, bytes]) -> dict[str, tuple[str, int]]:
    """Return token and id of our tokenizer's special tokens, by role; {} for another tokenizer."""
    definition, description = _TOKENIZER[:2]
    if definition not in attached or description in attached:
        return {}
    # Loading a checkpoint must not need the package tokenizers.
    from course_pp.training.data import SPECIAL_TOKENS

    added = json.loads(attached[definition]).get("added_tokens", ())
    ids = {token["content"]: token["id"] for token in added}
    found = {}
    for role, token in zip(_ROLES, SPECIAL_TOKENS, strict=True):
        if token in ids:
            found[role] = (token, ids[token])
    return found


def _token_ids(
    attached: Mapping[str, bytes], special: Mapping[str, tuple[str, int]]
) -> dict[str, Any]:
    """Return ``eos_token_id`` and the like for ``config.json``.

    They are the ids that the model came with, or our tokenizer's.
    """
    if _GENERATION in attached:
        known = json.loads(attached[_GENERATION])
        return {name: known.get(name) for name in _IDS}
    return {f"{role}_token_id": token_id for role, (_, token_id) in special.items()}


@checked
def import_hf(source: str | os.PathLike[str], root: str | os.PathLike[str]) -> Saved:
    """Make a checkpoint of a Hugging Face model directory: step 0, without an optimizer.

    Attention is always the built-in one. No link is followed. Load the checkpoint with
    ``optimizer=None``, at any layout, in the dtype it has. If the directory does not hold exactly
    the weights that its ``config.json`` asks for, nothing is left in ``root``.
    """
    folder = Path(source)
    if not os.path.lexists(folder / "config.json") or not list(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} is not a model directory: it needs config.json and .safetensors files"
        )
    links = sorted(path.name for path in folder.iterdir() if path.is_symlink())
    if links:
        raise CheckpointError(f"{folder}: {links[0]} is a link: put the file itself in its place")
    described = json.loads(_json_in(folder / "config.json"))
    hf_config, config = _config_in(folder, described)
    model = _model_of(folder, config, _dtype_of(described))
    attachments = {}
    for name in (*_TOKENIZER, _GENERATION):
        if os.path.lexists(folder / name):
            attachments[name] = _json_in(folder / name)
    if _GENERATION not in attachments:
        ids = {name: getattr(hf_config, name, None) for name in _IDS}
        generation = {"_from_model_config": True, **ids}
        attachments[_GENERATION] = json.dumps(generation, indent=1).encode()
    return save(root, 0, model, device_mesh=None, attachments=attachments)


def _model_of(folder: Path, config: ModelConfig, dtype: torch.dtype | None) -> Transformer:
    """Return the model whose weights ``folder`` holds, on the CPU.

    Its rotary tables stay on the meta device.
    """
    found = {}
    for name, tensor in _found_in(folder).items():
        # Older releases of transformers saved these tables, which are computed anew.
        if not name.endswith("rotary_emb.inv_freq"):
            found[name] = tensor
    # Building an enormous number of layers would take long, only to find weights missing.
    if config.n_layers > len(found):
        raise CheckpointError(
            f"{folder} has {len(found)} weights, too few for the {config.n_layers:,} layers of its"
            f" config.json: {_ANEW}"
        )
    with torch.device("meta"):
        model = Transformer(config).to(dtype or _DTYPES.get(next(iter(found.values())).kind))
    state = model.state_dict(keep_vars=True)

    form = form_of(found)
    asked: set[str] = set()
    for name in state:
        asked.update(source.name for source in sources_in_hf(name, config, form))
    others = sorted(found.keys() - asked)
    if others:
        raise CheckpointError(
            f"{folder} has, beside what config.json asks for, {_first_of(others)}: {_ANEW}"
        )

    cpu = torch.device("cpu")
    planned = _plan([(model, state)], folder)
    ends = [found[name] for name in map(name_to_hf, (EMBEDDING, HEAD)) if name in found]
    if config.tie_embeddings and len(ends) == 2:
        own = state[EMBEDDING]
        both = [_read([(own, Source(end.name), end)], cpu)[id(own)] for end in ends]
        if ends[0].shape != ends[1].shape or not torch.equal(*both):
            raise CheckpointError(
                f"{folder} has different {ends[0].name} and {ends[1].name}, which are tied: {_ANEW}"
            )

    read = _read(planned, cpu)
    model.load_state_dict({name: read[id(own)] for name, own in state.items()}, assign=True)
    return model


def _config_in(folder: Path, described: Mapping[str, Any]) -> tuple[Any, ModelConfig]:
    """Return the configuration in ``config.json``, in the class of its model and as our sizes."""
    kind = described.get("model_type")
    refuse_other_kinds(kind)
    # Another implementation of attention may be code that transformers would fetch.
    kept = {name: value for name, value in described.items() if "attn_implementation" not in name}
    try:
        hf_config = config_class(str(kind)).from_dict(kept)
        return hf_config, config_from_hf(hf_config)
    except Exception as error:
        # A ValueError says that the model has a part that ours does not have.
        if type(error) is ValueError:
            raise
        what = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: config.json is damaged ({type(error).__name__}: {what})"
        ) from error


def _dtype_of(described: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that ``config.json`` asks for; None if it names none."""
    name = str(described.get("dtype") or described.get("torch_dtype"))
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if found in (torch.float64, torch.float32, torch.bfloat16, torch.float16) else None


def load_stage(
    stage: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    names: Callable[[str], str] | None = None,
) -> int:
    """Fill a stage that was built without weights from a directory of safetensors files.

    Call it on every rank. Files are read in pieces, so a rank needs memory for its stage and little
    more.

    Weights are cast to the stage's dtype. Tied weights may be in the files under any of their
    names, with or without the ``base_model_prefix`` of transformers' models. Persistent buffers are
    read like weights; the others stay as they were built. Weights of other stages are neither read
    nor missed. The stage's own ``load_state_dict`` and its hooks see the weights.

    Args:
        stage: a stage of :func:`~course_pp.parallel.auto_split` or
            :func:`~course_pp.model.build_stage_module`, or a list of all stages of this rank. Shard
            it and cast it afterwards.
        folder: a directory with ``model.safetensors``, or an index and its files, or any
            ``.safetensors`` files.
        device: device of the stage afterwards.
        names: function from a weight's name in the stage to its name in the files, for models whose
            weights transformers renames when it reads them.

    Returns:
        Number of bytes that were read from the files.

    Raises:
        CheckpointError: on every rank, with nothing filled on any: if a tensor is missing or does
            not fit, if a file is damaged, or if a tensor that files do not hold has lost its
            values, as under ``torch.device("meta")``.
    """
    ranks = CheckpointRanks(limit_s=_LIMIT_S)
    with ranks.refusing_together():
        check_arguments(load_stage, locals())
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    where = torch.device(device)
    states = ranks.collectively(
        lambda: [(each, each.state_dict(keep_vars=True)) for each in stages]
    )
    planned = ranks.collectively(lambda: _plan(states, Path(folder), names or str))
    read = ranks.collectively(lambda: _read(planned, where))
    ranks.collectively(lambda: _put(states, read, where))
    return sum(tensor.n_bytes for *_, tensor in planned)


@dataclass(frozen=True)
class _InFile:
    """A tensor in a safetensors file: its name, dtype, shape and bytes there."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    n_bytes: int


Planned = Sequence[tuple[Tensor, Source, _InFile]]
"""Weights: the stage's tensor, the part of it that a file holds, and the tensor in that file."""


def _plan(states: States, folder: Path, in_files: Callable[[str], str] = str) -> Planned:
    """Return each weight of the modules and its place in the files. Refuse if one is missing."""
    found = _found_in(folder)
    planned: list[tuple[Tensor, Source, _InFile]] = []
    missing: list[str] = []
    for choices, own in _sources_of(states, form_of(found)):
        for names, source in choices:
            found_names = [*map(in_files, names), *names]
            there = [found[name] for name in found_names if name in found]
            if not there:
                missing.append(names[0])
                continue
            tensor = there[0]
            # On the meta device, to compare shapes without any numbers.
            needs = source.place(torch.empty(own.shape, device="meta")).shape
            has = source.take(torch.empty(tensor.shape, device="meta")).shape
            if has != needs:
                raise CheckpointError(
                    f"{folder} has {tensor.name} as {tensor.shape}, and the model needs"
                    f" {tuple(needs)}: build it with the sizes of its config.json"
                )
            if (tensor.kind in _DTYPES) != own.is_floating_point():
                raise CheckpointError(
                    f"{folder} has {tensor.name} as {tensor.kind}, and the model as {own.dtype}:"
                    f" get it in one of {', '.join(_DTYPES)}"
                )
            planned.append((own, source, tensor))
    if missing:
        raise CheckpointError(
            f"{folder} has no {_first_of(missing)}, which the model needs: get the directory of"
            " this model, whole, or give load_stage names= if they are others there"
        )
    _refuse_lost(states)
    return planned


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _found_in(folder: Path) -> dict[str, _InFile]:
    """Return every tensor in the files of a model, by name.

    Links are followed, because downloaded models consist of them.
    """
    found = {}
    for path in _files_of(folder):
        with _safetensors(path) as file:
            for name in list(file.keys()):
                part = file.get_slice(name)
                kind, shape = part.get_dtype(), tuple(part.get_shape())
                # The number in a name such as F32 or F8_E4M3; BOOL has none.
                bits = int("".join(filter(str.isdigit, kind))[:2] or 8)
                n_bytes = torch.Size(shape).numel() * bits // 8
                found[name] = _InFile(path, name, kind=kind, shape=shape, n_bytes=n_bytes)
    if not found:
        raise CheckpointError(
            f"{folder} holds no .safetensors files: give the directory of a model"
        )
    return found


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a model: the one file, or the files in its index, or all files."""
    if (folder / _ONE).exists():
        return [folder / _ONE]
    if not (folder / _INDEX).exists():
        return sorted(folder.glob("*.safetensors"))
    index = read_json((folder / _INDEX).resolve())
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise CheckpointError(f"{folder}: {_INDEX} is damaged: it has no weight_map")
    names = sorted(set(weights.values()))
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder}: {_INDEX} is refused: it names {name!r}")
    return [folder / name for name in names]


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    with imports_of_extra("hf"):
        from safetensors import SafetensorError, safe_open

    try:
        with opened(path.resolve()), safe_open(path, framework="pt") as file:
            yield file
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged ({' '.join(str(error).split())}): {_ANEW}"
        ) from error


def _sources_of(
    states: States, form: Form
) -> Iterator[tuple[list[tuple[list[str], Source]], Tensor]]:
    """Yield each weight that files hold, with its parts there.

    A part has several names that it may have in the files. The weight's own name is the first.
    """
    parts: dict[int, dict[int, tuple[dict[str, None], Source]]] = {}
    own: dict[int, Tensor] = {}
    for stage, state in states:
        ties = [set(tie.values()) for tie in getattr(stage, "ties", ())]
        prefix = f"{getattr(stage, 'base_model_prefix', '')}."
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{name} is no tensor, and safetensors hold nothing else: set it after filling"
                )
            own[id(tensor)] = tensor
            tied_to: set[str] = set().union(*(tie for tie in ties if name in tie))
            known = [name, *sorted(tied_to - {name})]
            if isinstance(stage, Transformer):
                sources = [sources_in_hf(each, stage.config, form) for each in known]
            else:
                length = len(tensor) if tensor.dim() == 3 else 0
                sources = [sources_in_files(each, length, form) for each in known]
            for part, same in enumerate(zip(*sources, strict=True)):
                names = [each.name for each in same]
                if form == "mixtral":
                    names += [each.replace(".mlp.", ".block_sparse_moe.") for each in names]
                for each in list(names):
                    has_prefix = each.startswith(prefix)
                    names.append(each.removeprefix(prefix) if has_prefix else prefix + each)
                kept, _ = parts.setdefault(id(tensor), {}).setdefault(part, ({}, same[0]))
                kept.update(dict.fromkeys(names))
    for key, tensor in own.items():
        yield [(list(names), part) for names, part in parts[key].values()], tensor


def _refuse_lost(states: States) -> None:
    """Refuse a tensor on the meta device that no file fills."""
    for stage, state in states:
        # Our own model computes its rotary tables anew.
        if isinstance(stage, Transformer):
            continue
        given = {id(tensor) for tensor in state.values()}
        for name, own in (*stage.named_parameters(), *stage.named_buffers()):
            stands_for_another = getattr(own, "of_another_stage", False)
            if own.is_meta and id(own) not in given and not stands_for_another:
                raise ValueError(
                    f"{name} is on the meta device, and no file holds it: build the model in"
                    " memory, or buffers under weights_on_meta(), which leaves them as they are"
                )


def _read(planned: Planned, device: torch.device) -> dict[int, Tensor]:
    """Return full tensors from the files by the ``id`` of the weight, read in pieces.

    A file is closed and opened anew after some pieces, because the part of it that was read takes
    this process's memory, too.
    """
    full = {id(own): torch.empty(own.shape, dtype=own.dtype, device=device) for own, *_ in planned}
    by_file = sorted(planned, key=lambda each: (each[2].path, each[2].name))
    for path, group in groupby(by_file, key=lambda each: each[2].path):
        pieces = []
        for own, source, tensor in group:
            for rows in _rows(tensor):
                pieces.append((tensor.name, source, full[id(own)], rows))
        while pieces:
            n_bytes = 0
            with _safetensors(path) as file:
                while pieces and n_bytes < _OPEN_BYTES:
                    name, source, own, rows = pieces.pop(0)
                    to = source.place(own)
                    if rows is None:
                        part = source.take(file.get_tensor(name))
                    else:
                        to = to[rows]
                        part = source.take(file.get_slice(name)[rows])
                    to.copy_(part)
                    n_bytes += part.nbytes
    return full


def _rows(tensor: _InFile) -> Iterator[slice | None]:
    """Yield slices of as many rows as may be open at once, or None for a tensor without rows."""
    n_rows = tensor.shape[0] if tensor.shape else 0
    if n_rows == 0:
        yield None
        return
    step = max(1, _OPEN_BYTES * n_rows // max(1, tensor.n_bytes))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _put(states: States, read: Mapping[int, Tensor], device: torch.device) -> None:
    """Put the read tensors in the place of parameters and buffers, and move all others.

    Then each stage loads its state, so that its hooks see it.
    """
    # The new tensor by the id of the old one. The old one is kept, too: the id of a tensor that is
    # gone may be given to another.
    moved: dict[int, tuple[Tensor, Any]] = {}

    def on_device(own: Tensor) -> Any:
        if id(own) not in moved:
            tensor = read.get(id(own))
            if isinstance(own, nn.Parameter):
                tensor = own if tensor is None else nn.Parameter(tensor, own.requires_grad)
            elif tensor is None and getattr(own, "of_another_stage", False):
                # Only its shape counts.
                tensor = torch.zeros((), dtype=own.dtype, device=device).expand(own.shape)
            elif tensor is None:
                tensor = torch.empty_like(own, device=device) if own.is_meta else own.to(device)
            moved[id(own)] = (own, tensor)
            # One tensor may be met again, in its new place.
            moved[id(tensor)] = (tensor, tensor)
        return moved[id(own)][1]

    parts = [part for stage, _ in states for part in stage.modules()]
    for part in parts:
        for held in (own_parameters(part), own_buffers(part)):
            held.update({name: on_device(own) for name, own in held.items() if own is not None})
    for stage, state in states:
        if isinstance(stage, Transformer):
            stage.init_freqs_and_ties()
        state.update({name: read[id(own)] for name, own in state.items()})
        load_into(stage, state)
