"""Stages built without weights, filled from safetensors files: no process ever holds the whole model.

    with weights_on_meta():
        model = LlamaForCausalLM(config)               # takes no memory
    stages = auto_split(model, example, n_stages=4)
    load_stage(stages[rank], folder, device=device)    # reads this stage's part of the files

Files are read in pieces, so a rank needs memory for its stage and little more.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.arguments import check_arguments
from course_pp.model import Transformer
from course_pp.model.hf import name_to_hf
from course_pp.training.checkpoint.ranks import CheckpointError, Ranks
from course_pp.training.checkpoint.state import load_into
from course_pp.training.checkpoint.weights import DTYPES, files_of, header, open_safetensors

__all__ = ["load_stage"]

States = Sequence[tuple[nn.Module, dict[str, Any]]]
"""A rank's stages, each with its state_dict."""

_LIMIT_S = 24 * 3600.0
_OPEN_BYTES = 2**24


def load_stage(
    stage: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    names: Callable[[str], str] | None = None,
) -> int:
    """Fill a stage that was built without weights from a directory of safetensors files; call it on every rank.

    Weights are cast to the stage's dtype. Weights tied within the stage or between stages may be in the files under any
    of their names, with or without the ``base_model_prefix`` of transformers' models. Persistent buffers are read like
    weights; the others stay as they were built. What other stages need is neither read nor missed. The stage's own
    ``load_state_dict`` and its hooks see what was read.

    Args:
        stage: of :func:`~course_pp.parallel.auto_split` or :func:`~course_pp.model.build_stage_module`; or all of a
            rank's, in a list. Shard it and cast it afterwards.
        folder: a directory with ``model.safetensors``, or an index and its files, or any ``.safetensors`` files.
        device: where to put the stage.
        names: for a weight's name in the stage its name in the files, where transformers renames what it reads.

    Returns:
        Bytes that were read of the files.

    Raises:
        CheckpointError: on every rank, with nothing filled on any: if a tensor is missing, has another shape or a dtype
            that cannot be cast, a file is damaged, an argument is of a wrong class, the stage has state that is no
            tensor, or a parameter or buffer that files do not hold has lost its values, as under
            ``torch.device("meta")``. Later, if a stage's ``load_state_dict`` fails.
    """
    given, ranks = locals(), Ranks(limit_s=_LIMIT_S)
    ranks.collectively(lambda: check_arguments(load_stage, given))
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    where = torch.device(device)
    states = ranks.collectively(lambda: [(each, each.state_dict(keep_vars=True)) for each in stages])
    planned = ranks.collectively(lambda: _plan(states, Path(folder), names or str))
    full = ranks.collectively(lambda: _read(planned, where))
    read = {id(weight.own): tensor for weight, tensor in zip(planned, full, strict=True)}
    ranks.collectively(lambda: _put(states, read, where))
    return sum(weight.n_bytes for weight in planned)


@dataclass(frozen=True)
class _Weight:
    """A parameter or buffer of a stage, and where it is.

    Attributes:
        own: what is replaced.
        path: of the file.
        name: there.
        n_bytes: there.
    """

    own: Tensor
    path: Path
    name: str
    n_bytes: int


def _plan(states: States, folder: Path, in_files: Callable[[str], str]) -> list[_Weight]:
    """Return where each weight of the stages is."""
    found = _found_in(folder)
    weights: list[_Weight] = []
    missing: list[str] = []
    for names, own in _names_of(states):
        there = [name for name in dict.fromkeys([*map(in_files, names), *names]) if name in found]
        if not there:
            missing.append(names[0])
            continue
        path, kind, shape, n_bytes = found[there[0]]
        if shape != tuple(own.shape):
            raise CheckpointError(
                f"{folder} has {there[0]} as {shape}, and the stage needs {tuple(own.shape)}: build the model with the "
                "sizes of its config.json"
            )
        if (kind in DTYPES) != own.is_floating_point():
            raise CheckpointError(
                f"{folder} has {there[0]} as {kind}, and the stage as {own.dtype}: get the model in one of "
                f"{', '.join(DTYPES)}"
            )
        weights.append(_Weight(own, path, there[0], n_bytes))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{folder} has no {missing[0]}{more}, which a stage needs: get the directory of this model, whole, or say "
            "names= if it has others there"
        )
    _refuse_lost(states)
    return weights


def _found_in(folder: Path) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
    """File, dtype, shape and bytes of each tensor. Links are followed: models that were downloaded consist of them."""
    paths = [path.resolve() for path in files_of(folder, follow=True)]
    if not paths:
        raise CheckpointError(f"{folder} holds no .safetensors files: give the directory of a model")
    found = {}
    for path in paths:
        for name, (kind, shape) in open_safetensors(path, header).items():
            bits = int("".join(filter(str.isdigit, kind))[:2] or 8)
            found[name] = path, kind, shape, torch.Size(shape).numel() * bits // 8
    return found


def _names_of(states: States) -> Iterator[tuple[list[str], Tensor]]:
    """Return each weight that files hold, and the names it may have there, its own first."""
    names: dict[int, dict[str, None]] = {}
    own: dict[int, Tensor] = {}
    for stage, state in states:
        ties = [set(tie.values()) for tie in getattr(stage, "ties", ())]
        prefix = f"{getattr(stage, 'base_model_prefix', '')}."
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{name} is no tensor, and safetensors hold nothing else: fill a stage without it, and set it then"
                )
            own[id(tensor)] = tensor
            known = [name, *sorted({other for tie in ties if name in tie for other in tie} - {name})]
            if isinstance(stage, Transformer):
                known = [*map(name_to_hf, known)]
            known += [each.removeprefix(prefix) if each.startswith(prefix) else prefix + each for each in known]
            names.setdefault(id(tensor), {}).update(dict.fromkeys(known))
    return ((list(names[key]), tensor) for key, tensor in own.items())


def _refuse_lost(states: States) -> None:
    for stage, state in states:
        given = {id(tensor) for tensor in state.values()}
        for name, own in (*stage.named_parameters(), *stage.named_buffers()):
            if isinstance(stage, Transformer) or not own.is_meta or id(own) in given or _is_placeholder(own):
                continue
            how = (
                "in memory"
                if isinstance(own, nn.Parameter)
                else "under weights_on_meta(), which leaves buffers as they are"
            )
            raise ValueError(f"{name} is on the meta device, and no file holds it: build the model {how}")


def _is_placeholder(buffer: Tensor) -> bool:
    """Return whether a tensor stands for a parameter of another stage, of which only the shape counts."""
    return getattr(buffer, "of_another_stage", False)


def _read(weights: Sequence[_Weight], device: torch.device) -> list[Tensor]:
    """Read the weights in pieces: the open part of a file takes this process's memory too."""
    full = [torch.empty(each.own.shape, dtype=each.own.dtype, device=device) for each in weights]
    pieces = [(w.path, w.name, to, rows) for w, to in zip(weights, full, strict=True) for rows in _rows(w)]
    for path, group in groupby(sorted(pieces, key=lambda piece: piece[:2]), key=lambda piece: piece[0]):
        for batch in _batches(list(group)):
            open_safetensors(path, partial(_fill, batch))
    return full


_Piece = tuple[Path, str, Tensor, slice | None]
"""File, name there, the tensor to be filled, and which rows of it."""


def _rows(weight: _Weight) -> Iterator[slice | None]:
    """Return a weight in pieces of as many rows as may be open at once; None for one without rows."""
    n_rows = weight.own.shape[0] if weight.own.dim() else 0
    step = max(1, _OPEN_BYTES * n_rows // max(1, weight.n_bytes))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)) if n_rows else iter([None])


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yield pieces of one file, as many at a time as may be open at once."""
    batch: list[_Piece] = []
    n_bytes = 0
    for piece in pieces:
        _, _, to, rows = piece
        size = to[rows].nbytes if rows is not None else to.nbytes
        if batch and n_bytes + size > _OPEN_BYTES:
            yield batch
            batch, n_bytes = [], 0
        batch.append(piece)
        n_bytes += size
    yield batch


def _fill(batch: Sequence[_Piece], file: Any) -> None:
    for _, name, to, rows in batch:
        if rows is None:
            to.copy_(file.get_tensor(name))
        else:
            to[rows].copy_(file.get_slice(name)[rows])


def _put(states: States, read: Mapping[int, Tensor], device: torch.device) -> None:
    """Put what was read in the place of parameters and buffers, wherever they are, and let the stages load it.

    Buffers that no file holds are moved: tables, and the shapes of what other stages hold.
    """
    moved: dict[int, tuple[Tensor, Any]] = {}  # with the tensor of that id, which must not be used again

    def on_device(own: Tensor) -> Any:
        if id(own) not in moved:
            tensor = read.get(id(own))
            if isinstance(own, nn.Parameter):
                tensor = own if tensor is None else nn.Parameter(tensor, own.requires_grad)
            elif tensor is None and _is_placeholder(own):
                tensor = torch.zeros((), dtype=own.dtype, device=device).expand(own.shape)
            elif tensor is None:
                tensor = torch.empty_like(own, device=device) if own.is_meta else own.to(device)
            moved[id(own)], moved[id(tensor)] = (own, tensor), (tensor, tensor)
        return moved[id(own)][1]

    for part in (part for stage, _ in states for part in stage.modules()):
        for held in (part._parameters, part._buffers):
            held.update({name: on_device(own) for name, own in held.items() if own is not None})
    for stage, state in states:
        if isinstance(stage, Transformer):
            stage.init_freqs_and_ties()
        state.update({name: read[id(own)] for name, own in state.items()})
        load_into(stage, state)
