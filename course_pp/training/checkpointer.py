"""When a trainer's run is saved, and which checkpoint it resumes from."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.ranks import Ranks
from course_pp.parallel import is_rank_zero
from course_pp.training.checkpoint import AsyncSaver, CheckpointError, Loaded, load, resume, save
from course_pp.training.checkpoint.directory import (
    Draft,
    Retention,
    check_free,
    named,
    step_directories,
    step_of,
)
from course_pp.training.config import Count, SettingError, check_setting
from course_pp.training.logs import StepResult
from course_pp.training.preemption import Preempted, Preemption
from course_pp.training.trainer import NonFiniteGradient, Trainer


class Checkpointer:
    """Saves a run every few steps, after its last step, and when it is preempted.

    Make it on every rank.

        with Checkpointer(trainer, "checkpoints", device_mesh=mesh, save_every=100) as checkpointer:
            checkpointer.resume()
            trainer.fit(checkpointer.after_step)

    Args:
        root: the directory of the run's checkpoints, on a file system that all ranks share. None
            saves nothing and ignores `preemption`.
        device_mesh: the trainer's mesh.
        save_every: steps between checkpoints; None saves only after the last step and when
            preempted.
        asynchronous: True writes while training goes on.
        keep_last, keep_every, attachments: see :func:`course_pp.training.checkpoint.save`.
        preemption: listener for signals, asked after each step; None leaves signals alone.
    """

    def __init__(
        self,
        trainer: Trainer,
        root: str | os.PathLike[str] | None,
        *,
        device_mesh: DeviceMesh | None,
        save_every: int | None = None,
        asynchronous: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        attachments: Mapping[str, str | bytes] | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        check_setting("save_every", save_every, Count | None)
        # Refuse now, not after hours of training.
        Retention(keep_last, keep_every)
        self._keep: dict[str, Any] = {"keep_last": keep_last, "keep_every": keep_every}
        self._trainer = trainer
        self._mesh = device_mesh
        self._root = None if root is None else named(root)
        self._save_every = save_every
        self._attachments = attachments
        self._preemption = preemption

        # Refuse now a directory that cannot be written, and remove leftovers of a killed save.
        writes = self._root is not None and is_rank_zero()
        Ranks().collectively(lambda: Draft(named(root or ""), 0).discard() if writes else None)
        self._saver: AsyncSaver | None = None
        if asynchronous and root is not None:
            self._saver = AsyncSaver(root, device_mesh=device_mesh, **self._keep)
        self._saved_step: int | None = None

    def resume(self, source: str | os.PathLike[str] = "auto") -> Loaded | None:
        """Resume a run, or return None if it starts anew. Call it on every rank, before training.

        Args:
            source: ``"auto"`` takes the newest whole checkpoint in the directory, and starts anew
                if there is none. ``"never"`` starts anew. Anything else is the path of a
                checkpoint, or of a directory of another run's checkpoints.

        The run is refused if its directory already holds a later step. With ``"auto"`` a later step
        that is damaged makes way.
        """
        Ranks().collectively(lambda: _check_source(source))
        trainer, held = self._trainer, self._trainer.held
        loaded: Loaded | None = None
        if source == "auto" and self._root is not None:
            loaded = resume(
                self._root,
                held.saved,
                optimizer=trainer.optimizer,
                device_mesh=self._mesh,
                tied=held.tied,
            )
        elif source not in ("auto", "never"):
            loaded = load(
                source,
                held.saved,
                optimizer=trainer.optimizer,
                device_mesh=self._mesh,
                tied=held.tied,
            )
        if loaded is not None:
            trainer.load_state(loaded.extra)
        Ranks().collectively(lambda: self._check_room(take_up=source == "auto"))
        if source == "auto" and loaded is not None:
            self._saved_step = loaded.step
        return loaded

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Save if it is time; pass this method to :meth:`Trainer.fit`.

        If a signal asked any rank to end, save and raise Preempted.
        """
        if self._root is None:
            return
        every, step = self._save_every, trainer.step

        # A signal may have reached only some ranks.
        asked = None if self._preemption is None else self._preemption.agreed()
        if asked is not None:
            self._finish_writing()
            # Not in the background: the process is to end.
            if self._saved_step != step:
                self._save(self._root, None)
            raise Preempted(asked, step, self._root)
        if step == trainer.config.steps or (every is not None and step % every == 0):
            self._save(self._root, self._saver)

    def close(self) -> None:
        """Wait until the last checkpoint is complete."""
        if self._saver is not None:
            self._saver.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, NonFiniteGradient):
            # All ranks raised this one. After other failures a rank may be missing.
            self._finish_writing()

    def _finish_writing(self) -> None:
        """Wait for a save in the background. If it failed, warn only: the run is saved again."""
        if self._saver is None:
            return
        try:
            saved = self._saver.wait()
        except CheckpointError as error:
            if is_rank_zero():
                warnings.warn(
                    f"a checkpoint was not completed in the background: {error}", stacklevel=3
                )
            return
        if saved is not None:
            self._saved_step = saved.step

    def _save(self, root: Path, saver: AsyncSaver | None) -> None:
        trainer = self._trainer
        what: dict[str, Any] = {
            "step": trainer.step,
            "modules": trainer.held.saved,
            "optimizer": trainer.optimizer,
            "extra": trainer.state(),
            "attachments": self._attachments,
            "tied": trainer.held.tied,
        }
        if saver is not None:
            saver.save(**what)
        else:
            save(root, device_mesh=self._mesh, **self._keep, **what)
            self._saved_step = trainer.step

    def _check_room(self, take_up: bool) -> None:
        """Refuse a directory that holds a later step; with `take_up`, only if it is whole."""
        if self._root is None:
            return
        step = self._trainer.step
        later = [path for path in step_directories(self._root) if step_of(path) > step]
        if later and not take_up:
            raise CheckpointError(
                f"{later[0]} is there already, and this run goes on from step {step}: resume with"
                " auto, or save to another directory"
            )
        for path in later:
            check_free(path)


def _check_source(source: str | os.PathLike[str]) -> None:
    if source not in ("auto", "never") and not (os.fspath(source) and os.path.lexists(source)):
        problem = "{resume} must be auto, never, or the path of a checkpoint, and nothing is there"
        raise SettingError(problem, resume=os.fspath(source))
