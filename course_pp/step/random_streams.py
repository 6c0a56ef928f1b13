"""The random numbers that a stage draws while it trains, as for dropout: a stream of its own.

:func:`course_pp.parallel.init_distributed` seeds all ranks alike, so that they make equal weights
and equal batches from torch's default generator. In a training step that would give every stage and
every data rank the same dropout mask. So each forward of a step draws from a stream of its own:

    default generator ──digest──► (step, data rank, stage, microbatch) ──seed──► this forward,
                                                                                 and recomputing it

Ranks of ``tp`` agree on all four, and draw the same. After the step the default generator is as it
was before. It moves on by one number if a stage drew any, and thereby to the next step's streams.
All ranks move on together: in ``parallel``, if a stage first draws in a later step, at the next
call. So a checkpoint, which holds the default generator, holds the streams too; and a model without
random numbers changes nothing.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

RandomState = tuple[Tensor, Tensor | None]
"""The state of torch's default generator on the CPU, and on a GPU if that is the device."""


def get_random_state(device: torch.device) -> RandomState:
    """Return the state of the default generators from which modules on ``device`` draw."""
    if device.type != "cuda":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.cuda.get_rng_state(device)


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put the default generators back into ``state``."""
    on_cpu, on_cuda = state
    torch.set_rng_state(on_cpu)
    if on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda, device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the default generators after the body."""
    before = get_random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


class RandomStreams:
    """The streams of one rank's stages.

    Attributes:
        drew: whether a stage drew a random number in the last step.
    """

    def __init__(self, device: torch.device, data_rank: int) -> None:
        self._device = device
        self._data_rank = data_rank
        self._step = b""
        self._seeded: bytes | None = None
        self.drew = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a training step inside; restore the default generator afterwards.

        Each forward of the step calls :meth:`begin`.
        """
        self._step = hashlib.blake2b(torch.get_rng_state().numpy().tobytes()).digest()
        self._seeded = None
        self.drew = False
        with random_state_kept(self._device):
            yield
            self._see_whether_drawn()

    def begin(self, stage: int, microbatch: int) -> None:
        """Seed the default generators for a forward of ``stage``."""
        self._see_whether_drawn()
        place = f"{self._data_rank} {stage} {microbatch}"
        digest = hashlib.blake2b(self._step + place.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        # Reading the state takes time, and one draw is enough to know.
        if not self.drew:
            self._seeded = self._state()

    def _see_whether_drawn(self) -> None:
        if self._seeded is not None and not self.drew:
            self.drew = self._state() != self._seeded

    def _state(self) -> bytes:
        """Return the generators' states as bytes, which compare ten times as fast as tensors."""
        state = torch.get_rng_state().numpy().tobytes()
        if self._device.type == "cuda":
            state += torch.cuda.get_rng_state(self._device).numpy().tobytes()
        return state


def move_on() -> None:
    """Take the default generator to the next step's streams. Call it on all ranks of a pipeline."""
    torch.rand(())
