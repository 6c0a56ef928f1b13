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
    """The batches of a run, the same on every rank. Make it on every rank.

    The batch of a step follows from the step's number. Only a stream has a position of its own.

    Attributes:
        source: the training data.
        config: the given configuration, with epochs turned into steps.
    """

    def __init__(self, config: TrainConfig, train: Rows | Stream) -> None:
        self.source = train
        if isinstance(train, Stream):
            if config.epochs:
                raise SettingError(
                    "{epochs} cannot be used with a stream, which has no end", epochs=config.epochs
                )
            if config.workers:
                raise SettingError(
                    "{workers} cannot be used with a stream, which is read in order by each rank"
                    " itself",
                    workers=config.workers,
                )
            self.config = config
            self._batches: Batches | StreamedBatches = StreamedBatches(train, config.batch)
        else:
            self.config = config.on_rows(len(train))
            self._batches = Batches(train, config.batch, config.seed)
        self._ahead: Iterator[Sequences] | None = None

    def batch(self, step: int) -> Sequences:
        """Return the rows of ``step`` over all ranks. With a stream it is a collective."""
        if isinstance(self._batches, Batches):
            return self._batches[step] if self._ahead is None else next(self._ahead)

        # Each rank reads the stream by itself, and its source may have changed in between.
        stream = self._batches
        everyone = Ranks()
        batch = everyone.collectively(lambda: stream[step])
        digest = hashlib.sha256(batch.inputs.numpy().tobytes()).hexdigest()
        everyone.require_equal({"batch": digest})
        return batch

    def epoch(self, step: int) -> int:
        """Return the pass over the data that ``step`` is in, from 1.

        For a stream, ``step`` must be the step that is read next.
        """
        if isinstance(self._batches, Batches):
            return 1 + step // self._batches.steps_per_epoch
        return self._batches.epoch

    def read_ahead(self, first: int, stack: ExitStack) -> None:
        """Let workers read the batches of ``first`` and later steps, until ``stack`` is closed.

        Without workers in the configuration, or with a stream, do nothing.
        """
        last = self.config.steps
        if self.config.workers and first < last and isinstance(self._batches, Batches):
            self._ahead = read_ahead(self._batches, first, last, workers=self.config.workers)
            stack.callback(setattr, self, "_ahead", None)

    def state(self, step: int) -> dict[str, Any]:
        """Return the position before ``step``, for a checkpoint."""
        state: dict[str, Any] = {"next_batch": step, "digest": self.source.digest}
        if isinstance(self._batches, StreamedBatches):
            position = self._batches.state()
            if position:
                state["position"] = position
        return state

    def seek(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on with ``step`` from the position that :meth:`state` returned; a collective."""
        if isinstance(self._batches, StreamedBatches):
            stream = self._batches
            Ranks().collectively(lambda: stream.seek(step, state["position"]))
