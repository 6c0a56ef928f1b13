"""Save: take what a rank holds, write it under another name, declare it complete, and rename it.

What several ranks hold under one name are parts of one sharded tensor, equal copies, which are
compared by digest, or buffers, such as the statistics of BatchNorm, of which the lowest
data-parallel rank's are saved. Else it is refused.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from course_pp.base.arguments import check_arguments
from course_pp.model import Transformer
from course_pp.training.checkpoint.directory import Draft, Retention, check_free, named
from course_pp.training.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    STATE,
    CheckpointError,
    Digest,
    Ranks,
    is_plain_name,
    write_file,
    write_manifest,
)
from course_pp.training.checkpoint.state import (
    DIMENSIONS,
    HF_CONFIG,
    STAGES,
    Group,
    Modules,
    RankState,
    Ties,
    check_ties_are_declared_alike,
    config_of,
    hf_config_of,
    keyed,
    merged,
    mesh_coordinates,
    optimizer_groups,
    rng_tensors,
    state_of,
)
from course_pp.training.checkpoint.tensors import write_tensors, writing_to

Attachments = Mapping[str, str | bytes]
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        n_bytes: size of all its files.
        stall_s: seconds for which training stood still on this rank.
        write_s: seconds from the first byte to the directory's name.
        staged_bytes: CPU memory that this rank copied its part to; 0 for a synchronous save.
    """

    path: Path
    step: int
    n_bytes: int
    stall_s: float
    write_s: float
    staged_bytes: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves: its tensors by key, referred to and not copied; and on rank 0 the small files by name."""

    step: int
    tensors: dict[str, Tensor]
    files: dict[str, bytes]


def save(
    root: str | os.PathLike[str],
    step: int,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_mesh: DeviceMesh | None,
    extra: Mapping[str, Any] | None = None,
    attachments: Attachments | None = None,
    tied: Ties | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Saved:
    """Write ``root/step_…``. Call it on every rank, between two steps, with the same arguments but
    the modules.

    Args:
        root: the directory of the run's checkpoints, on a file system that all ranks share.
        step: number of finished steps.
        modules: this rank's stages, or the whole model, as they are trained (after FSDP2). If the
            names in a stage are not the full model's, as in a plain ``nn.Sequential``, pass
            ``{index: stage}``: names then begin with the stage, and the checkpoint fits any
            placement of the same stages.
        optimizer: made from their parameters; None saves weights alone.
        device_mesh: that of :func:`init_distributed`; None for one process, or for a bare pipeline
            of ranks.
        extra: whatever else the run needs to go on, as JSON: scheduler, position in the data,
            tokenizer's digest. Rank 0's counts. Tuples come back as lists, keys as text.
        attachments: small files to travel with the checkpoint, such as ``{"tokenizer.json":
            definition}``; rank 0's. The ``config.json`` of a model of transformers goes along by
            itself.
        tied: tied weights that lie on several ranks: for each its names, ``["embed.weight",
            "head.weight"]``, or with ``{index: stage}`` those by stage, ``{0: "embed.weight", 3:
            "head.weight"}``, as for :class:`course_pp.runtime.Pipeline`. Such a weight is saved
            once, and loads under each of its names. Ties within a rank are found, as are those of
            our own model; None takes those that stages of ``auto_split`` know.
        keep_last, keep_every: which older checkpoints stay; see :class:`Retention`.

    Raises:
        CheckpointError: on every rank with the same sentence, if the ranks do not hold one whole
            model, if two of them hold different tensors under one name or were given different
            ties, if another rank is in another call, or if it cannot be written; nothing new is
            left in ``root`` then.
    """
    begin, ranks = time.perf_counter(), Ranks()
    with ranks.refusing_together():
        check_arguments(save, locals())
    retention = Retention(keep_last, keep_every)
    snapshot = take(step, modules, optimizer, device_mesh, extra, attachments, tied, ranks)
    path, n_bytes, write_s = _write(named(root), snapshot, retention, ranks)
    return Saved(path, step, n_bytes, time.perf_counter() - begin, write_s)


def _write(
    root: Path, snapshot: Snapshot, retention: Retention, ranks: Ranks
) -> tuple[Path, int, float]:
    """Return the checkpoint's directory, its bytes, and the seconds it took."""
    begin = time.perf_counter()
    draft: Draft | None = None

    def start() -> Path:
        nonlocal draft
        draft = Draft(root, snapshot.step)
        check_free(draft.final)
        return draft.path

    def finish() -> tuple[Path, int]:
        assert draft is not None  # rank 0 began it
        _check_shared(directory, everyone)
        files = {name: digest for mine in everyone for name, digest in mine.items()}
        with writing_to(root):
            files |= {
                name: write_file(directory / name, content)
                for name, content in snapshot.files.items()
            }
            write_manifest(directory, snapshot.step, files)
            draft.publish()
        retention.apply(newest=draft.final)
        return draft.final, sum(digest.bytes for digest in files.values())

    try:
        directory = ranks.first(start)
        tensors = {key: tensor.detach() for key, tensor in snapshot.tensors.items()}
        everyone = ranks.gather(write_tensors(directory, tensors, ranks))
        path, n_bytes = ranks.first(finish)
    finally:
        if draft is not None:
            draft.discard()  # unless it was published
    return path, n_bytes, time.perf_counter() - begin


def _check_shared(directory: Path, written: Sequence[Mapping[str, Digest]]) -> None:
    for rank, files in enumerate(written):
        for name, digest in files.items():
            path = directory / name
            if not path.exists() or path.stat().st_size != digest.bytes:
                here = f"is not in {directory.parent} as rank 0 sees it"
                raise CheckpointError(
                    f"{name}, written by rank {rank}, {here}: save where all ranks see the same"
                )


class Saving:
    """A save that goes on while training does."""

    def __init__(self, step: int, staged_bytes: int) -> None:
        self.step = step
        self.staged_bytes = staged_bytes
        self.stall_s = 0.0
        self._future: Future[tuple[Path, int, float]] = Future()

    def done(self) -> bool:
        """Return whether it is complete, or has failed."""
        return self._future.done()

    def result(self) -> Saved:
        """Wait for the checkpoint; raises as :func:`save` does."""
        path, n_bytes, write_s = self._future.result()
        return Saved(path, self.step, n_bytes, self.stall_s, write_s, self.staged_bytes)


class AsyncSaver:
    """Saves while training goes on: a copy in CPU memory at once, the writing in a thread.

    The copy is made to the same memory each time. One save is written at a time: the next waits for
    it. If it failed, the next :meth:`save`, :meth:`wait` or :meth:`close` says so. Use it as a
    context manager, or call :meth:`close` before the process group is destroyed.

    Ranks have a process group of their own for it, so that messages of the background never meet
    those of training. The arguments are those of :func:`save`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        device_mesh: DeviceMesh | None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        with Ranks().refusing_together():
            check_arguments(AsyncSaver, locals())
        self._root, self._device_mesh = named(root), device_mesh
        self._retention = Retention(keep_last, keep_every)
        self._buffers: dict[str, Tensor] = {}
        self._saving: Saving | None = None
        group: Any = None if Ranks().size == 1 else dist.new_group(backend="gloo")
        self._background = Ranks(group)

    def save(
        self,
        step: int,
        modules: Modules,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        attachments: Attachments | None = None,
        tied: Ties | None = None,
    ) -> Saving:
        """Begin to write ``root/step_…``; return as soon as training may change the tensors.

        Arguments and refusals are those of :func:`save`; also refuse if the save before failed.
        """
        begin = time.perf_counter()
        self.wait()
        with Ranks().refusing_together():
            check_arguments(AsyncSaver.save, locals())
        snapshot = take(
            step, modules, optimizer, self._device_mesh, extra, attachments, tied, Ranks()
        )
        staged = Snapshot(step, self._stage(snapshot.tensors), snapshot.files)
        saving = Saving(step, sum(local_part(tensor).nbytes for tensor in staged.tensors.values()))
        # A daemon: a training loop that has failed must not wait at its end for ranks that are
        # gone.
        threading.Thread(
            target=self._work, args=(saving, staged), name="checkpoint", daemon=True
        ).start()
        self._saving = saving
        saving.stall_s = time.perf_counter() - begin
        return saving

    def wait(self) -> Saved | None:
        """Wait until the last save is complete; None if there was none since the last call."""
        saving, self._saving = self._saving, None
        return None if saving is None else saving.result()

    def close(self) -> None:
        """Wait for the last save and let go of the memory; safe to call repeatedly."""
        try:
            self.wait()
        finally:
            self._buffers.clear()

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()

    def _work(self, saving: Saving, snapshot: Snapshot) -> None:
        try:
            saving._future.set_result(
                _write(self._root, snapshot, self._retention, self._background)
            )
        except BaseException as error:
            saving._future.set_exception(error)

    @torch.no_grad()
    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of ``tensors`` on the CPU, laid out over the ranks as they are."""
        staged = {}
        for key, tensor in tensors.items():
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty_like(tensor.detach(), device="cpu")
            local_part(buffer).copy_(local_part(tensor))
            staged[key] = buffer
        self._buffers = staged
        return staged


@dataclass(frozen=True)
class _RankModel:
    """The part of the model that a rank holds, as the other ranks get to know it.

    Attributes:
        names, met, declared, aliases, indices: as in :class:`RankState`.
        expected: the names that all ranks together must hold, if the model is ours.
    """

    names: set[str]
    met: set[str]
    declared: list[tuple[str, ...]]
    aliases: dict[str, str]
    indices: set[tuple[int, int | None]]
    config: dict[str, Any] | None
    expected: set[str]
    groups: list[Group]


def take(
    step: int,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None,
    device_mesh: DeviceMesh | None,
    extra: Mapping[str, Any] | None,
    attachments: Attachments | None,
    tied: Ties | None,
    ranks: Ranks,
) -> Snapshot:
    """Check that the ranks together hold one whole model, each tensor once, and describe the run."""
    state = RankState()

    def look() -> _RankModel:
        nonlocal state
        if step < 0:
            raise CheckpointError(f"step={step} must be at least 0")
        state = state_of(modules, tied)
        groups = [] if optimizer is None else optimizer_groups(optimizer, state.ends)
        return _RankModel(
            names=set(state.owned),
            met=state.met,
            declared=state.declared,
            aliases=state.aliases,
            indices=state.indices,
            config=config_of(state),
            expected=_whole_model(state),
            groups=groups,
        )

    everyone = ranks.each(look)
    config = _check_whole(everyone)
    coordinates = mesh_coordinates(device_mesh, ranks.rank)
    left_to_others = check_copies(state, optimizer, coordinates["pp"], ranks)
    tensors = keyed(list(state.owned.items()), optimizer)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in left_to_others}

    def describe() -> dict[str, bytes]:
        layout = {**dict.fromkeys(DIMENSIONS, 1), "pp": ranks.size}
        if device_mesh is not None:
            sizes = dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=True))
            layout = {name: sizes.get(name, 1) for name in DIMENSIONS}
        groups = [
            asdict(group) for group in merged(group for told in everyone for group in told.groups)
        ]
        described = {
            "step": step,
            "config": config,
            "layout": layout,
            "seed": torch.initial_seed(),
            "optimizer": (
                None if optimizer is None else {"kind": type(optimizer).__name__, "groups": groups}
            ),
            "extra": dict(extra or {}),
            "tied": {alias: first for told in everyone for alias, first in told.aliases.items()},
        }
        try:
            # Infinity and NaN are not in JSON, though it would write them.
            files = {STATE: json.dumps(described, indent=1, allow_nan=False).encode()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"extra must be JSON (finite numbers, text, lists, dictionaries): {error}"
            ) from error
        of_transformers = hf_config_of(state)
        if of_transformers is not None:  # an export needs it
            files[HF_CONFIG] = of_transformers.encode()
        for name, content in (attachments or {}).items():
            if (
                not is_plain_name(name)
                or name in (MANIFEST, STATE, METADATA)
                or name.endswith(".distcp")
            ):
                raise CheckpointError(f"{name!r} cannot be attached: choose another, plain name")
            files[name] = content.encode() if isinstance(content, str) else content
        return files

    files = ranks.first(describe)
    return Snapshot(step, tensors | rng_tensors(coordinates), files if ranks.rank == 0 else {})


def _whole_model(state: RankState) -> set[str]:
    """Return the names that all ranks together must hold, if the model is ours."""
    configs = [module.config for module in state.modules if isinstance(module, Transformer)]
    if not configs:
        return set()
    with torch.device("meta"):
        return {name for name, _ in Transformer(configs[0]).named_parameters()}


def _check_whole(everyone: list[_RankModel]) -> dict[str, Any] | None:
    """Check that the ranks together passed all of one model; return its sizes, None if its modules have none."""
    found = set().union(*(told.names for told in everyone))
    for told in everyone:
        if missing := sorted(told.expected - found):
            more = f"{len(missing)} parameters of the model are missing"
            raise CheckpointError(
                f"no rank passed a module with {missing[0]} ({more}): pass all stages of every rank"
            )
    stages = set().union(*(told.indices for told in everyone))
    n_stages = max((n or index + 1 for index, n in stages), default=0)
    if stages and (missing_stages := sorted(set(range(n_stages)) - {index for index, _ in stages})):
        raise CheckpointError(
            f"no rank passed stage {missing_stages[0]} of {n_stages}: pass all stages of every rank"
        )
    check_ties_are_declared_alike([(told.declared, told.met) for told in everyone])
    return next((told.config for told in everyone if told.config), None)


@dataclass(frozen=True)
class Copy:
    """What other ranks are told of a tensor that one rank holds under a key of the checkpoint.

    Attributes:
        number: among those of this rank under this key; more than one where it holds several ends
            of a tied weight.
        name: what the rank itself calls it; another end of a tied weight has another name.
        place: where the rank is along the pipeline; ranks at one place hold the same stages.
        is_buffer: True if no optimizer trains it.
        shape, dtype: of all of it.
        mesh: ranks and placements of a sharded tensor; None for any other.
    """

    rank: int
    number: int
    name: str
    place: int
    is_buffer: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: tuple[object, ...] | None


def check_copies(
    state: RankState, optimizer: torch.optim.Optimizer | None, place: int, ranks: Ranks
) -> set[str]:
    """Check that every name means one tensor; a collective. ``place`` is where this rank is along
    the pipeline.

    Return the keys of buffers that this rank must not write: a lower rank at the same place does.
    """
    tensors: dict[str, list[Tensor]] = {}
    mine: dict[str, list[Copy]] = {}

    def tell() -> dict[str, list[Copy]]:
        for name, end in state.ends:
            own, is_buffer = state.own_names.get(id(end), name), name in state.buffers
            for key, tensor in keyed([(name, end)], optimizer).items():
                held = tensors.setdefault(key, [])
                what = own, place, is_buffer, tuple(tensor.shape), tensor.dtype, _mesh_of(tensor)
                mine.setdefault(key, []).append(Copy(ranks.rank, len(held), *what))
                held.append(tensor)
        return mine

    holders: dict[str, list[Copy]] = {}
    for theirs in ranks.each(tell):
        for key, copies in theirs.items():
            holders.setdefault(key, []).extend(copies)
    counted = {key: list(_counted(holders[key])) for key in sorted(holders)}
    to_compare = {}
    for key, copies in counted.items():
        for copy in copies:
            if (copy.shape, copy.dtype) != (copies[0].shape, copies[0].dtype):
                raise _difference(key, copies[0], copy)
        parts_of_one = (
            copies[0].mesh is not None and len({(copy.name, copy.mesh) for copy in copies}) == 1
        )
        if len(copies) > 1 and not parts_of_one:
            to_compare[key] = copies
    if to_compare:
        digests = ranks.each(
            lambda: {
                key: [_digest(each) for each in tensors[key]]
                for key in to_compare
                if key in tensors
            }
        )
        for key, copies in to_compare.items():
            first: dict[Box, tuple[Copy, bytes]] = {}
            for copy in copies:
                box, digest = digests[copy.rank][key][copy.number]
                before, expected = first.setdefault(box, (copy, digest))
                if digest != expected:
                    # where pieces overlap otherwise, DCP refuses to write
                    raise _difference(key, before, copy)
    return {key for key in mine if all(copy.rank != ranks.rank for copy in counted[key])}


def _mesh_of(tensor: Tensor) -> tuple[object, ...] | None:
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    return tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape), tensor.placements


def _counted(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Yield all copies, but of plain buffers only the first at each place."""
    places: set[tuple[str, int]] = set()
    for copy in copies:
        if copy.is_buffer and copy.mesh is None:
            if (copy.name, copy.place) in places:
                continue
            places.add((copy.name, copy.place))
        yield copy


def _digest(tensor: Tensor) -> tuple[Box, bytes]:
    """Return which part of a tensor this rank holds, and a digest of its bytes."""
    box: Box = (0,) * tensor.dim(), tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        [chunk] = tensor.__create_chunk_list__()
        box = tuple(chunk.offsets), tuple(chunk.sizes)
    content = local_part(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return box, hashlib.blake2b(content.data, digest_size=16).digest()


def _difference(key: str, one: Copy, other: Copy) -> CheckpointError:
    kind, _, name = key.partition(".")
    parameter, _, slot = name.rpartition(".")
    what, where = (
        name if kind == "model" else f"{slot} of {parameter}",
        f"rank {one.rank} and rank {other.rank}",
    )
    if one.name != other.name:
        ends = f"{one.name} of rank {one.rank} and {other.name} of rank {other.rank}"
        how = "give both the sum of their gradients in every step, or leave the tie away"
        return CheckpointError(f"{ends} are tied and differ in {what}: {how}")
    if one.place == other.place or one.name.startswith(STAGES):
        how = "give it the same gradients on all ranks that hold it, in every step"
        return CheckpointError(f"{where} hold copies of {what} that differ: {how}")
    how = "pass the stages as {index: stage}, so that their names begin with the stage"
    return CheckpointError(f"{where} hold different tensors under one name, {what}: {how}")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
