"""What one rank writes down: JSON lines, TensorBoard's files, progress in a terminal; and traces of every rank."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

__all__ = ["METRICS", "JsonLines", "Logs", "Progress", "tracing"]

METRICS = "metrics.jsonl"


class Logs:
    """Records of a run, as JSON lines and for TensorBoard.

    Args:
        folder: made if it is not there.
        step: finished steps. What an interrupted run wrote about later ones is dropped: they are done again.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0) -> None:
        self._lines = JsonLines(Path(folder) / METRICS, step)
        # Only the rank that writes pays for the import.
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one record; its numbers are TensorBoard's scalars, named ``event/name``."""
        self._lines.write({"event": event, "step": step, **values})
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        """Write what is still in memory; safe to call repeatedly."""
        self._lines.close()
        self._board.close()


class JsonLines:
    """One JSON object a line, each of them on disk before the next step.

    Args:
        step: records of later steps are dropped, and a last line that a killed process left half.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if _is_of_past(line, step)]
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept))
        os.replace(beside, path)
        self._file = path.open("a")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record``."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Safe to call repeatedly."""
        self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _is_of_past(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    # A run from the beginning keeps nothing, not even the heading that another wrote before its first step.
    return step > 0 and isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step


class Progress:
    """A bar in a terminal; where output is kept, a line now and then reads better.

    Args:
        is_logging_rank: whether this rank shows anything.
    """

    def __init__(self, step: int, steps: int, every: int, is_logging_rank: bool) -> None:
        self._step, self._steps, self._every = step, steps, every
        self._shown, self._in_terminal = is_logging_rank, sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=step, unit="step", disable=not (is_logging_rank and self._in_terminal))

    def advance(self, loss: float, epoch: int) -> None:
        """Show one more step, with its loss and the pass over the data that it is in."""
        self._step += 1
        self._bar.set_description(f"epoch {epoch}", refresh=False)
        self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self._bar.update()
        if not self._in_terminal and self._step % self._every == 0:
            self.say(f"step {self._step}/{self._steps}  loss {loss:.3f}")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._shown:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Safe to call repeatedly."""
        self._bar.close()


def tracing(folder: str | os.PathLike[str], rank: int, steps: int) -> AbstractContextManager[torch.profiler.profile]:
    """Return a profiler that skips two steps, which open connections, and traces ``steps`` to ``trace_rank….json``.

    Call ``step()`` on it after each step. Open the file in Perfetto or ``chrome://tracing``.
    """
    path = Path(folder) / f"trace_rank{rank}.json"
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    )
