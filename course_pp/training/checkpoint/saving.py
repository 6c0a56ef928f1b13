"""Save: take what a rank holds, write it under another name, declare it complete, and rename it."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import check_arguments, refuse_bad_timeout
from course_pp.training.checkpoint.directory import Draft, Retention, check_free, named
from course_pp.training.checkpoint.manifest import CheckpointError, Digest, Ranks, write_file, write_manifest
from course_pp.training.checkpoint.snapshot import Attachments, Snapshot, local_part, take
from course_pp.training.checkpoint.state import Modules, Ties
from course_pp.training.checkpoint.tensors import write_tensors, writing_to


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
    """Write ``root/step_…``. Call it on every rank, between two steps, with the same arguments but the modules.

    Args:
        root: the directory of the run's checkpoints, on a file system that all ranks share.
        step: number of finished steps.
        modules: this rank's stages, or the whole model, as they are trained (after FSDP2). If the names in a stage are
            not the full model's, as in a plain ``nn.Sequential``, pass ``{index: stage}``: names then begin with the
            stage, and the checkpoint fits any placement of the same stages.
        optimizer: made from their parameters; None saves weights alone.
        device_mesh: that of :func:`init_distributed`; None for one process, or for a bare pipeline of ranks.
        extra: whatever else the run needs to go on, as JSON: scheduler, position in the data, tokenizer's digest. Rank
            0's counts. Tuples come back as lists, keys as text.
        attachments: small files to travel with the checkpoint, such as ``{"tokenizer.json": definition}``; rank 0's.
        tied: tied weights that lie on several ranks: for each its names, ``["embed.weight", "head.weight"]``, or with
            ``{index: stage}`` those by stage, ``{0: "embed.weight", 3: "head.weight"}``, as for
            :class:`course_pp.runtime.Pipeline`. Such a weight is saved once, and loads under each of its names. Ties
            within a rank are found, as are those of our own model; None takes those that stages of ``auto_split`` know.
        keep_last, keep_every: which older checkpoints stay; see :class:`Retention`.

    Raises:
        CheckpointError: on every rank with the same sentence, if the ranks do not hold one whole model, if two of them
            hold different tensors under one name or were given different ties, if another rank is in another call, or
            if it cannot be written; nothing new is left in ``root`` then.
    """
    given = locals()
    begin, ranks = time.perf_counter(), Ranks()
    ranks.each(lambda: check_arguments(save, given))
    retention = Retention(keep_last, keep_every)
    snapshot = take(step, modules, optimizer, device_mesh, extra, attachments, tied, ranks)
    path, n_bytes, write_s = _write(named(root), snapshot, retention, ranks)
    return Saved(path, step, n_bytes, time.perf_counter() - begin, write_s)


def _write(root: Path, snapshot: Snapshot, retention: Retention, ranks: Ranks) -> tuple[Path, int, float]:
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
            files |= {name: write_file(directory / name, content) for name, content in snapshot.files.items()}
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
                raise CheckpointError(f"{name}, written by rank {rank}, {here}: save where all ranks see the same")


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

    The copy is made to the same memory each time. One save is written at a time: the next waits for it. If it failed,
    the next :meth:`save`, :meth:`wait` or :meth:`close` says so. Use it as a context manager, or call :meth:`close`
    before the process group is destroyed.

    Args:
        root, device_mesh, keep_last, keep_every: as for :func:`save`.
        timeout_s: seconds that ranks wait for one another while writing. They have a process group of their own for it,
            so that messages of the background never meet those of training.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        device_mesh: DeviceMesh | None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        timeout_s: float = 300,
    ) -> None:
        given = locals()
        Ranks().each(lambda: check_arguments(AsyncSaver, given))
        refuse_bad_timeout("AsyncSaver", timeout_s)
        self._root, self._device_mesh = named(root), device_mesh
        self._retention = Retention(keep_last, keep_every)
        self._buffers: dict[str, Tensor] = {}
        self._saving: Saving | None = None
        alone = Ranks().size == 1
        group = None if alone else dist.new_group(backend="gloo", timeout=timedelta(seconds=float(timeout_s)))
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
        given = locals()
        begin = time.perf_counter()
        self.wait()
        Ranks().each(lambda: check_arguments(AsyncSaver.save, given))
        snapshot = take(step, modules, optimizer, self._device_mesh, extra, attachments, tied, Ranks())
        staged = Snapshot(step, self._stage(snapshot.tensors), snapshot.files)
        saving = Saving(step, sum(local_part(tensor).nbytes for tensor in staged.tensors.values()))
        # A daemon: a training loop that has failed must not wait at its end for ranks that are gone.
        threading.Thread(target=self._work, args=(saving, staged), name="checkpoint", daemon=True).start()
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def _work(self, saving: Saving, snapshot: Snapshot) -> None:
        try:
            saving._future.set_result(_write(self._root, snapshot, self._retention, self._background))
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
