"""Which sequences a rank sees at which step."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from course_pp.arguments import checked
from course_pp.training.data.sequences import Rows, Sequences


@checked
@dataclass(frozen=True, eq=False)
class Batches:
    """The batch of every step: `batches[step]`, for step 0, 1, 2, … without end.

    There is no position to save. A step's global batch follows from `seed` and the step alone, so a run
    resumes at any step, and with any number of data-parallel ranks. Each data-parallel rank gets a contiguous
    part of the global batch, in rank order; pipeline and tensor-parallel ranks pass equal arguments and get
    equal parts. Each epoch has its own permutation and leaves out the rows that do not fill a batch.

    Attributes:
        sequences: the same on every rank.
        global_batch: rows of a step over all data-parallel ranks.
        seed: of the permutations, at least 0.
        dp_rank, dp_size: this data-parallel rank, and their number.

    Raises:
        ValueError: `global_batch` does not divide by `dp_size`, or exceeds the data; a rank outside
            `dp_size`; a negative seed or step.
    """

    sequences: Rows
    global_batch: int
    seed: int = 0
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        _check(self.sequences, self.global_batch, self.dp_rank, self.dp_size)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or more")

    @property
    def steps_per_epoch(self) -> int:
        return len(self.sequences) // self.global_batch

    def __getitem__(self, step: int) -> Sequences:
        """Return this rank's rows at `step`, `global_batch / dp_size` of them."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.sequences))
        first = step_in_epoch * self.global_batch
        rows = torch.from_numpy(order[first : first + self.global_batch])
        return self.sequences[rows_of_rank(rows, self.dp_rank, self.dp_size)]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the permutation of an epoch, drawn once and not at every step of it."""
    return np.random.default_rng((seed, epoch)).permutation(n)


@checked
def validation_batches(
    sequences: Rows,
    global_batch: int,
    max_batches: int | None = None,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> tuple[Sequences, ...]:
    """Return the same full batches at every call, this data-parallel rank's part of each.

    With `max_batches` the rows are spread evenly over the data, so that few batches still sample many
    documents. Rows that do not fill a batch are left out.

    Raises:
        ValueError: as `Batches`; `max_batches` under 1.
    """
    _check(sequences, global_batch, dp_rank, dp_size)
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches={max_batches}: must be at least 1; leave it out to use all data")
    n_full = len(sequences) // global_batch
    n_batches = n_full if max_batches is None else min(max_batches, n_full)
    n_rows = n_batches * global_batch
    rows = torch.arange(n_rows) * len(sequences) // n_rows
    return tuple(sequences[rows_of_rank(batch, dp_rank, dp_size)] for batch in rows.split(global_batch))


def rows_of_rank(rows: Tensor, dp_rank: int, dp_size: int) -> Tensor:
    """Return the part of a global batch (rows, ...) that a data-parallel rank takes: contiguous, in rank order."""
    return rows.tensor_split(dp_size)[dp_rank]


def _check(sequences: Rows, global_batch: int, dp_rank: int, dp_size: int) -> None:
    if dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank={dp_rank}, dp_size={dp_size}: need 0 <= dp_rank < dp_size; check the mesh")
    if global_batch < 1:
        raise ValueError(f"global_batch={global_batch}: must be at least 1")
    if global_batch % dp_size:
        smaller = global_batch // dp_size * dp_size
        nearest = f"{smaller} or {smaller + dp_size}" if smaller else f"{dp_size}"
        raise ValueError(
            f"global_batch={global_batch} does not divide by dp_size={dp_size}: every data-parallel rank "
            f"takes an equal part; choose {nearest}"
        )
    if global_batch > len(sequences):
        raise ValueError(
            f"global_batch={global_batch} is larger than the data, {len(sequences)} sequences: choose "
            f"{len(sequences)} or less, a smaller seq_len, or more text"
        )


def read_ahead(batches: Batches, first: int, last: int, workers: int) -> Iterator[Sequences]:
    """Return ``batches[first]`` to ``batches[last - 1]``, which processes read before they are asked for.

    The same batches in the same order as without: each is a function of its number, so there is no position to keep.
    The processes end with the iterator.
    """
    loader = DataLoader(_Steps(batches, last), batch_size=None, sampler=range(first, last), num_workers=workers)
    return iter(loader)


@dataclass(frozen=True, eq=False)
class _Steps(Dataset[Sequences]):
    batches: Batches
    last: int

    def __len__(self) -> int:
        return self.last

    def __getitem__(self, step: int) -> Sequences:
        return self.batches[step]
