"""Save: write this rank's tensors under another name, declare them complete, and rename.

Several ranks may hold tensors under one name in three cases: as parts of one sharded tensor; as
equal copies, which are compared by digest; or as buffers, such as the statistics of BatchNorm. Of a
buffer, the lowest data-parallel rank's is saved. Everything else is refused.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    CheckpointRanks,
    Digest,
    is_plain_name,
    write_file,
    write_manifest,
)
from course_pp.training.checkpoint.state import (
    DIMENSIONS,
    HF_CONFIG,
    STAGES,
    Modules,
    OptimizerGroup,
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
        staged_bytes: size of this rank's copy in CPU memory; 0 for a synchronous save.
    """

    path: Path
    step: int
    n_bytes: int
    stall_s: float
    write_s: float
    staged_bytes: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The part of a checkpoint that one rank saves.

    Attributes:
        tensors: this rank's tensors by key, referred to and not copied.
        files: small files by name, on rank 0; none on other ranks.
    """

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
    """Write ``root/step_…``.

    Call it on every rank, between two steps, with the same arguments but the modules.

    Args:
        root: the directory of the run's checkpoints, on a file system that all ranks share.
        step: number of finished steps.
        modules: this rank's stages, or the whole model, as they are trained (after FSDP2). If the
            names in a stage are not the full model's, as in a plain ``nn.Sequential``, pass
            ``{index: stage}``. Names then begin with the stage, and the checkpoint fits any
            placement of the same stages.
        optimizer: optimizer of their parameters; None saves only weights.
        device_mesh: the mesh of :func:`init_distributed`; None for one process, or for a pipeline
            of ranks without a mesh.
        extra: JSON that the run needs to go on: scheduler, position in the data, digest of the
            tokenizer. Rank 0's is saved. Tuples come back as lists, keys as text.
        attachments: small files to keep with the checkpoint, such as ``{"tokenizer.json":
            definition}``. Rank 0's are saved. The ``config.json`` of a model of transformers is
            added.
        tied: tied weights that lie on several ranks, each with its names: ``["embed.weight",
            "head.weight"]``. With ``{index: stage}`` the names stand by stage, ``{0:
            "embed.weight", 3: "head.weight"}``, as for :class:`course_pp.runtime.Pipeline`. Such a
            weight is saved once, and loads under each of its names. Ties within a rank are found,
            and ties of our own model. None takes the ties that stages of ``auto_split`` know.
        keep_last, keep_every: which older checkpoints stay; see :class:`Retention`.

    Raises:
        CheckpointError: on every rank with the same sentence: if the ranks do not hold one whole
            model, if two of them hold different tensors under one name or were given different
            ties, if another rank is in another call, or if the checkpoint cannot be written.
            Nothing new is left in ``root`` then.
    """
    begin = time.perf_counter()
    ranks = CheckpointRanks()
    with ranks.refusing_together():
        check_arguments(save, locals())
    retention = Retention(keep_last, keep_every)
    snapshot = take(
        step,
        modules,
        optimizer=optimizer,
        device_mesh=device_mesh,
        extra=extra,
        attachments=attachments,
        tied=tied,
        ranks=ranks,
    )
    path, n_bytes, write_s = _write(named(root), snapshot, retention=retention, ranks=ranks)
    stall_s = time.perf_counter() - begin
    return Saved(path, step, n_bytes=n_bytes, stall_s=stall_s, write_s=write_s)
    begin, ranks = time.perf_counter(), CheckpointRanks()
    with ranks.refusing_together():
        check_arguments(save, locals())
    retention = Retention(keep_last, keep_every)
    snapshot = take(step, modules, optimizer, device_mesh, extra, attachments, tied, ranks)
    path, n_bytes, write_s = _write(named(root), snapshot, retention, ranks)
    return Saved(path, step, n_bytes, time.perf_counter() - begin, write_s)


def _write(
    root: Path, snapshot: Snapshot, retention: Retention, ranks: CheckpointRanks
) -> tuple[Path, int, float]:
    """Write a checkpoint; return its directory, its bytes, and the seconds it took."""
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
        files: dict[str, Digest] = {}
        for theirs in everyone:
            files |= theirs
        with writing_to(root):
            for name, content in snapshot.files.items():
                files[name] = write_file(directory / name, content)
            write_manifest(directory, snapshot.step, files)
            draft.publish()
        # Last, so that an old checkpoint stays until the new one is complete.
        retention.apply(newest=draft.final)
        return draft.final, sum(digest.bytes for digest in files.values())

    try:
        directory = ranks.first(start)
        tensors = {key: tensor.detach() for key, tensor in snapshot.tensors.items()}
        everyone = ranks.gather(write_tensors(directory, tensors, ranks))
        path, n_bytes = ranks.first(finish)
    finally:
        # A published draft has nothing left to discard.
        if draft is not None:
            draft.discard()
    return path, n_bytes, time.perf_counter() - begin


def _check_shared(directory: Path, written: Sequence[Mapping[str, Digest]]) -> None:
    """Refuse a directory in which rank 0 does not see the files of other ranks."""
    for rank, files in enumerate(written):
        for name, digest in files.items():
            path = directory / name
            if not path.exists() or path.stat().st_size != digest.bytes:
                raise CheckpointError(
                    f"{name}, written by rank {rank}, is not in {directory.parent} as rank 0 sees"
                    " it: save where all ranks see the same"
                )


class Saving:
    """A save that goes on while training does."""

    def __init__(self, step: int, staged_bytes: int) -> None:
        self.step = step
        self.staged_bytes = staged_bytes
        self.stall_s = 0.0
        self._future: Future[tuple[Path, int, float]] = Future()

    def done(self) -> bool:
        """Return True if it is complete or has failed."""
        return self._future.done()

    def result(self) -> Saved:
        """Wait for the checkpoint and return it; raise as :func:`save` does."""
        path, n_bytes, write_s = self._future.result()
        return Saved(
            path,
            self.step,
            n_bytes=n_bytes,
            stall_s=self.stall_s,
            write_s=write_s,
            staged_bytes=self.staged_bytes,
        )


class AsyncSaver:
    """Saves while training goes on: copies to CPU memory at once, and writes in a thread.

    Each save copies to the same memory. One save is written at a time: the next waits for it. If it
    failed, the next :meth:`save`, :meth:`wait` or :meth:`close` says so. Use it as a context
    manager, or call :meth:`close` before the process group is destroyed.

    It has a process group of its own, so that messages of the background never meet messages of
    training. For the arguments see :func:`save`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        device_mesh: DeviceMesh | None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        with CheckpointRanks().refusing_together():
            check_arguments(AsyncSaver, locals())
        self._root = named(root)
        self._device_mesh = device_mesh
        self._retention = Retention(keep_last, keep_every)
        self._buffers: dict[str, Tensor] = {}
        self._saving: Saving | None = None
        # gloo, because the copies are in CPU memory.
        group: Any = None if CheckpointRanks().size == 1 else dist.new_group(backend="gloo")
        self._background = CheckpointRanks(group)

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

        For arguments and refusals see :func:`save`. It also refuses if the last save failed.
        """
        begin = time.perf_counter()
        self.wait()
        with CheckpointRanks().refusing_together():
            check_arguments(AsyncSaver.save, locals())
        snapshot = take(
            step,
            modules,
            optimizer=optimizer,
            device_mesh=self._device_mesh,
            extra=extra,
            attachments=attachments,
            tied=tied,
            ranks=CheckpointRanks(),
        )
        staged = Snapshot(step, self._stage(snapshot.tensors), snapshot.files)
        saving = Saving(step, sum(local_part(tensor).nbytes for tensor in staged.tensors.values()))
        # A daemon: if training failed, the process must not wait at its end for ranks that are
        # gone.
        work = threading.Thread(
            target=self._work, args=(saving, staged), name="checkpoint", daemon=True
        )
        work.start()
        self._saving = saving
        saving.stall_s = time.perf_counter() - begin
        return saving

    def wait(self) -> Saved | None:
        """Wait until the last save is complete, and return it.

        Return None if there was no save since the last call.
        """
        saving, self._saving = self._saving, None
        return None if saving is None else saving.result()

    def close(self) -> None:
        """Wait for the last save and free the memory. It is safe to call repeatedly."""
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
            written = _write(
                self._root, snapshot, retention=self._retention, ranks=self._background
            )
            saving._future.set_result(written)
        # Any error: a thread that dies silently would leave its caller waiting for the result.
        except BaseException as error:
            saving._future.set_exception(error)

    @torch.no_grad()
    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the CPU, laid out over the ranks as they are."""
        staged = {}
        for key, tensor in tensors.items():
            buffer = self._buffers.get(key)
            # A tensor may have another shape or dtype than at the last save.
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
        names: names of the tensors that it saves; the next fields are as in :class:`RankState`.
        config: sizes of our own model; None for any other.
        expected: names of the whole model, if it is ours.
        groups: parameter groups of its optimizer.
    """

    names: set[str]
    met: set[str]
    declared: list[tuple[str, ...]]
    aliases: dict[str, str]
    indices: set[tuple[int, int | None]]
    config: dict[str, Any] | None
    expected: set[str]
    groups: list[OptimizerGroup]


def take(
    step: int,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None,
    device_mesh: DeviceMesh | None,
    extra: Mapping[str, Any] | None,
    attachments: Attachments | None,
    tied: Ties | None,
    ranks: CheckpointRanks,
) -> Snapshot:
    """Check that the ranks together hold one whole model, each tensor once; describe the run."""
    state = RankState()

    def look() -> _RankModel:
        nonlocal state
        if step < 0:
            raise CheckpointError(f"step={step} must be at least 0")
        state = state_of(modules, tied)
        return _RankModel(
            names=set(state.owned),
            met=state.met,
            declared=state.declared,
            aliases=state.aliases,
            indices=state.indices,
            config=config_of(state),
            expected=_whole_model(state),
            groups=[] if optimizer is None else optimizer_groups(optimizer, state.ends),
        )

    everyone = ranks.each(look)
    config = _check_whole(everyone)
    coordinates = mesh_coordinates(device_mesh, ranks.rank)
    left_to_others = check_copies(state, optimizer, place=coordinates["pp"], ranks=ranks)
    tensors = keyed(list(state.owned.items()), optimizer)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in left_to_others}

    def describe() -> dict[str, bytes]:
        layout = {**dict.fromkeys(DIMENSIONS, 1), "pp": ranks.size}
        if device_mesh is not None:
            sizes = dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=True))
            layout = {name: sizes.get(name, 1) for name in DIMENSIONS}
        groups: list[OptimizerGroup] = []
        aliases: dict[str, str] = {}
        for told in everyone:
            groups += told.groups
            aliases |= told.aliases
        described: dict[str, Any] = {
            "step": step,
            "config": config,
            "layout": layout,
            "seed": torch.initial_seed(),
            "optimizer": None,
            "extra": dict(extra or {}),
            "tied": aliases,
        }
        if optimizer is not None:
            described["optimizer"] = {
                "kind": type(optimizer).__name__,
                "groups": [asdict(group) for group in merged(groups)],
            }
        try:
            # allow_nan=False: infinity and NaN are not JSON, but Python would write them.
            files = {STATE: json.dumps(described, indent=1, allow_nan=False).encode()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"extra must be JSON (finite numbers, text, lists, dictionaries): {error}"
            ) from error

        # An export of transformers' models needs their configuration.
        of_transformers = hf_config_of(state)
        if of_transformers is not None:
            files[HF_CONFIG] = of_transformers.encode()
        for name, content in (attachments or {}).items():
            is_taken = name in (MANIFEST, STATE, METADATA) or name.endswith(".distcp")
            if is_taken or not is_plain_name(name):
                raise CheckpointError(f"{name!r} cannot be attached: choose another, plain name")
            files[name] = content.encode() if isinstance(content, str) else content
        return files

    files = ranks.first(describe)
    tensors |= rng_tensors(coordinates)
    return Snapshot(step, tensors, files if ranks.rank == 0 else {})


def _whole_model(state: RankState) -> set[str]:
    """Return the names that all ranks together must hold, if the model is ours."""
    configs = [module.config for module in state.modules if isinstance(module, Transformer)]
    if not configs:
        return set()
    with torch.device("meta"):  # which takes no memory
        return {name for name, _ in Transformer(configs[0]).named_parameters()}


def _check_whole(everyone: list[_RankModel]) -> dict[str, Any] | None:
    """Check that the ranks together passed all of one model.

    Return its sizes, or None if its modules have none.
    """
    found = set().union(*(told.names for told in everyone))
    for told in everyone:
        missing = sorted(told.expected - found)
        if missing:
            raise CheckpointError(
                f"no rank passed a module with {missing[0]} ({len(missing)} parameters of the model"
                " are missing): pass all stages of every rank"
            )

    stages = set().union(*(told.indices for told in everyone))
    n_stages = max((n or index + 1 for index, n in stages), default=0)
    missing_stages = set(range(n_stages)) - {index for index, _ in stages}
    if missing_stages:
        raise CheckpointError(
            f"no rank passed stage {min(missing_stages)} of {n_stages}: pass all stages of every"
            " rank"
        )

    check_ties_are_declared_alike([(told.declared, told.met) for told in everyone])
    return next((told.config for told in everyone if told.config), None)


@dataclass(frozen=True)
class Copy:
    """Facts about a tensor that one rank holds under a key of the checkpoint, for other ranks.

    Attributes:
        rank: rank that holds it.
        number: its number among the rank's tensors under this key. A rank that holds several ends
            of a tied weight has several.
        name: name of the tensor on that rank; another end of a tied weight has another name.
        place: position of the rank along the pipeline. Ranks at one place hold the same stages.
        is_buffer: True if no optimizer trains it.
        shape: shape of the whole tensor, where it is sharded.
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
    state: RankState, optimizer: torch.optim.Optimizer | None, place: int, ranks: CheckpointRanks
) -> set[str]:
    """Check that every name means one tensor; a collective.

    Return the keys of buffers that this rank must not write, because a lower rank at the same place
    writes them.

    Args:
        place: position of this rank along the pipeline.
    """
    tensors: dict[str, list[Tensor]] = {}
    mine: dict[str, list[Copy]] = {}

    def tell() -> dict[str, list[Copy]]:
        for name, end in state.ends:
            for key, tensor in keyed([(name, end)], optimizer).items():
                held = tensors.setdefault(key, [])
                copy = Copy(
                    rank=ranks.rank,
                    number=len(held),
                    name=state.own_names.get(id(end), name),
                    place=place,
                    is_buffer=name in state.buffers,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    mesh=_mesh_of(tensor),
                )
                mine.setdefault(key, []).append(copy)
                held.append(tensor)
        return mine

    holders: dict[str, list[Copy]] = {}
    for theirs in ranks.each(tell):
        for key, copies in theirs.items():
            holders.setdefault(key, []).extend(copies)
    counted = {key: list(_counted(holders[key])) for key in sorted(holders)}

    to_compare = {}
    for key, copies in counted.items():
        first = copies[0]
        for copy in copies:
            if (copy.shape, copy.dtype) != (first.shape, first.dtype):
                raise _difference(key, first, copy)
        alike = all((copy.name, copy.mesh) == (first.name, first.mesh) for copy in copies)
        are_parts_of_one = first.mesh is not None and alike
        if len(copies) > 1 and not are_parts_of_one:
            to_compare[key] = copies
    # All ranks have the same keys to compare, so all go into this exchange or none.
    if to_compare:
        digests = ranks.each(lambda: _digests(tensors, to_compare.keys()))
        for key, copies in to_compare.items():
            seen: dict[Box, tuple[Copy, bytes]] = {}
            for copy in copies:
                box, digest = digests[copy.rank][key][copy.number]
                before, expected = seen.setdefault(box, (copy, digest))
                # Pieces that overlap but are not the same box are refused by DCP.
                if digest != expected:
                    raise _difference(key, before, copy)

    not_mine = set()
    for key in mine:
        if all(copy.rank != ranks.rank for copy in counted[key]):
            not_mine.add(key)
    return not_mine


def _digests(
    tensors: Mapping[str, list[Tensor]], keys: Collection[str]
) -> dict[str, list[tuple[Box, bytes]]]:
    """Return the digests of this rank's tensors under some keys."""
    found = {}
    for key in keys:
        if key in tensors:
            found[key] = [_digest(tensor) for tensor in tensors[key]]
    return found


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
    """Return the part of a tensor that this rank holds, and a digest of its bytes."""
    box: Box = (0,) * tensor.dim(), tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        [chunk] = tensor.__create_chunk_list__()
        box = tuple(chunk.offsets), tuple(chunk.sizes)
    # As bytes, because NumPy has no bfloat16.
    content = local_part(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return box, hashlib.blake2b(content.data, digest_size=16).digest()


def _difference(key: str, one: Copy, other: Copy) -> CheckpointError:
    """Return the refusal of two tensors under one key, by the likeliest cause."""
    kind, _, what = key.partition(".")
    if kind == "optimizer":
        parameter, _, slot = what.rpartition(".")
        what = f"{slot} of {parameter}"
    where = f"rank {one.rank} and rank {other.rank}"
    if one.name != other.name:
        return CheckpointError(
            f"{one.name} of rank {one.rank} and {other.name} of rank {other.rank} are tied and"
            f" differ in {what}: give both the sum of their gradients in every step, or leave the"
            " tie away"
        )
    if one.place == other.place or one.name.startswith(STAGES):
        return CheckpointError(
            f"{where} hold copies of {what} that differ: give it the same gradients on all ranks"
            " that hold it, in every step"
        )
    return CheckpointError(
        f"{where} hold different tensors under one name, {what}: pass the stages as {{index:"
        " stage}, so that their names begin with the stage"
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
