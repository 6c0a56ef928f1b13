"""Runs a script on ranks as a launcher would, but the ranks fork from a process that has torch."""

import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from course_pp.launch import on_ranks
from course_pp.parallel import world
from tests.processes import no_process_left

# What train.py imports and a test of it does not: see ``RANKS_IMPORT`` in tests/conftest.py.
TRAIN_IMPORTS = (
    "course_pp.training.flags",
    "course_pp.training.checkpointer",
    "torch.utils.tensorboard",
)


@dataclass(frozen=True)
class Ended:
    """How a script ended on one rank."""

    code: Any
    out: str
    err: str


def run_script(n_ranks: int, arguments: Sequence[str], timeout_s: float = 100.0) -> list[Ended]:
    """Run the script and its arguments on ``n_ranks`` ranks, in the current folder."""
    with no_process_left():
        return on_ranks(n_ranks, _run, list(arguments), backend=None, timeout_s=timeout_s)


def labelled_lines(n_ranks: int, arguments: Sequence[str], timeout_s: float = 100.0) -> list[str]:
    """Return the lines of a script that succeeds, each labelled with its rank as by torchrun."""
    ranks = run_script(n_ranks, arguments, timeout_s)
    assert [rank.code for rank in ranks] == [0] * n_ranks, "\n".join(rank.err for rank in ranks)
    lines = []
    for i, rank in enumerate(ranks):
        lines += [f"[rank {i}] {line}" for line in (rank.out + rank.err).splitlines()]
    return lines


def _run(rank: int, arguments: list[str]) -> Ended:
    sys.argv = arguments
    code = 0
    sys.path.insert(0, str(Path(arguments[0]).parent))  # as python does
    world._LEFT_TO_THE_LAUNCHER_S = 0.1  # there is none that would end them first
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    return Ended(code, out.getvalue(), err.getvalue())
