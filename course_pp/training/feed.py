"""The batches of a trainer, and its position in them."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from course_pp.base.ranks import Ranks
from course_pp.training.config import SettingError, TrainConfig
from course_pp.training.data import Batches, Rows, Sequences, Stream, StreamedBatches
from course_pp.training.data.sequences import read_ahead


class Feed:
    """The batches of a run, the same on every rank; made on every rank.

    A step's batch of rows follows from its number; a stream has a position. In ``config`` epochs
    are steps.
    """

    def __init__(self, config: TrainConfig, train: Rows | Stream) -> None:
        self.source = train
        if isinstance(train, Stream):
            for name, why in (
                ("epochs", "has no end"),
                ("workers", "is read in order by each rank itself"),
            ):
                if value := getattr(config, name):
                    raise SettingError(
                        f"{{{name}}} cannot be used with a stream, which {why}", **{name: value}
                    )
            self.config = config
            self._batches: Batches | StreamedBatches = StreamedBatches(train, config.batch)
        else:
            self.config = config.on_rows(len(train))
            self._batches = Batches(train, config.batch, config.seed)
        self._ahead: Iterator[Sequences] | None = None

    def batch(self, step: int) -> Sequences:
        """Return the rows of ``step``, over all ranks; a collective, where the ranks read a stream each."""
        if isinstance(self._batches, Batches):
            return self._batches[step] if self._ahead is None else next(self._ahead)
        stream, everyone = self._batches, Ranks()
        batch = everyone.collectively(lambda: stream[step])
        everyone.require_equal(
            {"batch": hashlib.sha256(batch.inputs.numpy().tobytes()).hexdigest()}
        )
        return batch

    def epoch(self, step: int) -> int:
        """Return which pass over the data ``step`` is in, from 1; of a stream, the pass of what is read next."""
        if isinstance(self._batches, Batches):
            return 1 + step // self._batches.steps_per_epoch
        return self._batches.epoch

    def read_ahead(self, first: int, stack: ExitStack) -> None:
        """Let the configuration's workers read what steps from ``first`` on need, until ``stack`` is closed."""
        if self.config.workers and first < self.config.steps and isinstance(self._batches, Batches):
            self._ahead = read_ahead(self._batches, first, self.config.steps, self.config.workers)
            stack.callback(setattr, self, "_ahead", None)

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint needs to go on with ``step``."""
        position = self._batches.state() if isinstance(self._batches, StreamedBatches) else None
        return {"next_batch": step, "digest": self.source.digest} | (
            {"position": position} if position else {}
        )

    def seek(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on with ``step`` from the position that :meth:`state` returned; a collective."""
        if isinstance(self._batches, StreamedBatches):
            stream = self._batches
            Ranks().collectively(lambda: stream.seek(step, state["position"]))
