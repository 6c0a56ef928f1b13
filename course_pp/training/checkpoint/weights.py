"""Safetensors files of a Hugging Face model as one of ours; what does not fit is refused before it is read."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from course_pp.model import ModelConfig, Transformer
from course_pp.model.hf import EMBEDDING, HEAD, name_to_hf
from course_pp.training.checkpoint.manifest import opened, read_json
from course_pp.training.checkpoint.ranks import CheckpointError

__all__ = ["DTYPES", "files_of", "header", "open_safetensors", "read_weights"]

T = TypeVar("T")

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "BF16", "F16")
_ANEW = "get the directory anew, whole"

Found = dict[str, tuple[Path, tuple[int, ...]]]
"""File and shape of each tensor by name."""


def read_weights(folder: Path, config: ModelConfig, dtype: torch.dtype | None) -> Transformer:
    """Return the model whose weights ``folder`` holds, on the CPU; its rotary tables stay on the meta device.

    Args:
        folder: a model directory.
        config: what the weights must fit.
        dtype: of the weights; None keeps that of the first.

    Raises:
        CheckpointError: if a file is damaged, or a weight is missing, too many, of another shape, or quantized.
    """
    found = _found_in(folder)
    # An enormous number of layers would take as long to build as to look for.
    if config.n_layers > len(found):
        raise CheckpointError(
            f"{folder} has {len(found)} weights, too few for the {config.n_layers:,} layers of its config.json: {_ANEW}"
        )
    with torch.device("meta"):
        model = Transformer(config)
    expected = {name_to_hf(name): tuple(own.shape) for name, own in model.state_dict().items()}
    _compare(folder, expected, found, optional={name_to_hf(HEAD)} if config.tie_embeddings else set())
    tensors: dict[str, Tensor] = {}
    for path in sorted({path for path, _ in found.values()}):
        names = [name for name, (where, _) in found.items() if where == path]
        tensors |= open_safetensors(path, partial(_tensors, names))
    state = {name: tensors.get(name_to_hf(name)) for name in model.state_dict()}
    if config.tie_embeddings:
        head, embedding = state[HEAD], state[EMBEDDING]
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise CheckpointError(
                f"{folder} has different {name_to_hf(HEAD)} and {name_to_hf(EMBEDDING)}, which its config.json ties: "
                f"{_ANEW}"
            )
        state[HEAD] = embedding
    to = dtype or next(iter(tensors.values())).dtype
    model.load_state_dict({name: tensor.to(to) for name, tensor in state.items() if tensor is not None}, assign=True)
    return model


def _found_in(folder: Path) -> Found:
    """Return every weight in the files that make up the model."""
    found: Found = {}
    for path in files_of(folder):
        for name, (kind, shape) in open_safetensors(path, header).items():
            if name.endswith("rotary_emb.inv_freq"):
                continue  # a table that older versions saved
            if kind not in DTYPES:
                raise CheckpointError(f"{path} holds {name} as {kind}: get the model in one of {', '.join(DTYPES)}")
            found[name] = path, shape
    return found


def files_of(folder: Path, follow: bool = False) -> list[Path]:
    """Return the one file, or those of the index, or all. The index may be a link only if links are followed."""
    if (folder / _ONE).exists():
        return [folder / _ONE]
    if not (folder / _INDEX).exists():
        return sorted(folder.glob("*.safetensors"))
    index = read_json((folder / _INDEX).resolve() if follow else folder / _INDEX)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise CheckpointError(f"{folder}: {_INDEX} is damaged: it has no weight_map")
    names = sorted(set(weights.values()))
    if strange := [name for name in names if name != Path(name).name or not name.endswith(".safetensors")]:
        raise CheckpointError(f"{folder}: {_INDEX} is refused: it names {strange[0]!r}")
    return [folder / name for name in names]


def header(file: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the kind and shape of every tensor in an open file."""
    parts = {name: file.get_slice(name) for name in list(file.keys())}
    return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


def _tensors(names: Collection[str], file: Any) -> dict[str, Tensor]:
    return {name: file.get_tensor(name) for name in names}


def open_safetensors(path: Path, work: Callable[[Any], T]) -> T:
    from safetensors import SafetensorError, safe_open

    try:
        with opened(path), safe_open(path, framework="pt") as file:
            return work(file)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({' '.join(str(error).split())}): {_ANEW}") from error


def _compare(folder: Path, expected: Mapping[str, tuple[int, ...]], found: Found, optional: Collection[str]) -> None:
    """Refuse what is missing, of another shape, or too many."""
    problems = {
        "has no": sorted(expected.keys() - found.keys() - set(optional)),
        "has, in another shape than config.json asks for,": sorted(
            name for name, (_, shape) in found.items() if name in expected and shape != expected[name]
        ),
        "has, beside what config.json asks for,": sorted(found.keys() - expected.keys()),
    }
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{folder} {problem} {names[0]}{more}: {_ANEW}")
