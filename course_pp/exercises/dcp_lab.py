"""What notebook 09 runs: a small model at any layout, chosen deaths, hurried saves, and one beside steps."""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from course_pp.exercises.dcp_checkpointing import overlaps
from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_pp_rank,
    get_pp_size,
    init_distributed,
)
from course_pp.training.checkpoint import AsyncSaver, Piece, save
from course_pp.training.data import Batches, Sequences

__all__ = [
    "CONFIG",
    "DATA",
    "PROMPT",
    "SavedMeanwhile",
    "Trainee",
    "die_before_writing",
    "pieces_read",
    "run_script",
    "save_fresh",
    "save_meanwhile",
    "saves_in_a_hurry",
]

CONFIG = ModelConfig(dim=32, n_layers=4, n_heads=4, vocab_size=128, max_seq_len=256)
"""A byte is a token."""

_TEXT = (
    b"A checkpoint is found by looking, never by a pointer that can lie. It is whole when "
    b"its manifest is there, and the manifest is written last. Ranks die, clusters shrink, "
    b"and the run goes on where it stopped. "
)
_SEQ_LEN, _ROWS, _MICROBATCHES = 64, 8, 4
_WINDOWS = torch.tensor([list((_TEXT + _TEXT)[i : i + _SEQ_LEN + 1]) for i in range(len(_TEXT))])

DATA = Sequences(_WINDOWS[:, :-1], _WINDOWS[:, 1:])
"""Every window of 64 characters of a short text, and the character that follows each."""

PROMPT = torch.tensor([list(b"Ranks die")])

_PATIENCE_S = 60.0


class Trainee:
    """The model at any layout of at most one pipeline stage a rank, in float64, with its optimizer and its data.

    Make it on every rank.

    Attributes:
        mesh: of the ranks, None for one process.
        module: this rank's part of the model.
        optimizer: of that part.
        batches: the rows of each step, a function of seed and step.
    """

    def __init__(self, layout: DistributedConfig) -> None:
        self.mesh, self.batches = init_distributed(layout, seed=0), Batches(DATA, _ROWS)
        pp = get_pp_size(self.mesh)
        self.module = build_stage_module(CONFIG, get_pp_rank(self.mesh), pp).double()
        apply_tensor_parallel(self.module, self.mesh)
        apply_fsdp2(self.module, self.mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self._pipeline: Any = None
        if pp > 1:
            sizes: dict[str, Any] = {
                "batch_size": _ROWS // _MICROBATCHES,
                "seq_len": _SEQ_LEN,
                "param_dtype": torch.float64,
            }
            stage = build_pipeline_stage(self.module, self.mesh, "cpu", **sizes)
            self._pipeline = build_pipeline_schedule(stage, _MICROBATCHES, CrossEntropy())

    def step(self, step: int, die: bool = False) -> float:
        """Train on the rows of ``step``; return the loss of the batch. ``die`` ends this rank by SIGKILL half-way."""
        rows = self.batches[step]
        if die:
            self._die_in_the_third_microbatch()
        self.optimizer.zero_grad()
        if self._pipeline is not None:
            loss = self._pipeline.step(rows.inputs, target=rows.targets)
        else:
            loss = CrossEntropy()(self.module(rows.inputs), rows.targets)
            loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def _die_in_the_third_microbatch(self) -> None:
        forwards: list[None] = []

        def count(*_: Any) -> None:
            forwards.append(None)
            if len(forwards) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        self.module.register_forward_pre_hook(count)


def save_fresh(folder: Path, layouts: Mapping[str, DistributedConfig]) -> None:
    """Save the untrained model at each layout of four ranks, into a run of the layout's name."""
    for name, layout in layouts.items():
        on_ranks(4, _save_fresh, layout, folder / name)


def _save_fresh(rank: int, layout: DistributedConfig, root: Path) -> None:
    fresh = Trainee(layout)
    save(root, 0, fresh.module, device_mesh=fresh.mesh)


def run_script(line: str) -> None:
    """Run a script and its arguments on two ranks of ``on_ranks``, which have torch imported.

    Raises:
        FileNotFoundError: the script is neither here nor in a folder above, where ``%torchrun`` looks for it, too.
    """
    name, *arguments = shlex.split(line)
    here = Path.cwd()
    script = next((folder / name for folder in (here, *here.parents) if (folder / name).exists()), None)
    if script is None:
        raise FileNotFoundError(f"there is no script {name!r} in {here} or above. Check its name and folder.")
    # No process group: the script makes its own, for the devices it finds.
    on_ranks(2, _as_script, script, arguments, backend=None)


def _as_script(rank: int, script: Path, arguments: Sequence[str]) -> None:
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def die_before_writing() -> None:
    """Let this process end by SIGKILL when it is about to write its file of the next checkpoint."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(dcp.FileSystemWriter, "write_data", die)  # noqa: B010


def pieces_read(pieces: Sequence[Piece], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Piece]:
    """Return what a rank that wants the rectangle at ``offsets`` reads of a tensor's pieces."""
    reads = overlaps((offsets, sizes), {piece.file: (piece.offsets, piece.sizes) for piece in pieces})
    return [Piece(*box, file, 0) for file, box in reads.items()]


def saves_in_a_hurry(folder: Path) -> str:
    """Save step 2 by hand on two ranks, with no barrier: once rank 1 is slow to write, once rank 0 to rename.

    Returns:
        What each rank finds as the newest when its save returns, and which files there are then.
    """
    told = []
    for slow, what in ((1, "rank 1 writes late"), (0, "rank 0 renames late")):
        place = folder / f"rank {slow} is slow"
        found = on_ranks(2, _save_in_a_hurry, place, slow)
        told.append(f"{what}: back with {', '.join(f'{newest} (rank {r})' for r, newest in enumerate(found))}")
        told += [f"    {'/'.join(path.parts[-2:])}" for path in sorted(place.glob("*_2/*"))]
    return "\n".join(told)


def _save_in_a_hurry(rank: int, folder: Path, slow: int) -> str:
    draft, final, back = (folder / name for name in ("draft_2", "step_2", "rank 1 is back"))
    (folder / "step_1").mkdir(parents=True, exist_ok=True)
    if rank == 1 == slow:
        _wait_for(final)
    draft.mkdir(exist_ok=True)
    (draft / f"piece of rank {rank}").touch()
    if rank == 0:
        if slow == 0:
            _wait_for(back)
        draft.rename(final)
    newest = max(path.name for path in folder.glob("step_*"))
    if rank == 1:
        back.touch()
    return newest


def _wait_for(path: Path) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} has not appeared within {_PATIENCE_S:.0f} s")
        time.sleep(0.005)


@dataclass(frozen=True)
class SavedMeanwhile:
    """Six asynchronous saves, with training going on.

    Attributes:
        copied: bytes that a save copied, over those of the weights.
        stalls: for each save, how long training stood still, as a share of a synchronous save's time.
        slower: how many times as long a step takes while a save is written; the median.
    """

    copied: float
    stalls: tuple[float, ...]
    slower: float

    def __str__(self) -> str:
        later = sorted(self.stalls[1:])[len(self.stalls[1:]) // 2]
        return (
            f"training stood still for {self.stalls[0]:.0%} of a synchronous save at the first, {later:.0%} at the "
            f"later ones\na step meanwhile takes × {self.slower:.2f}"
        )


def save_meanwhile(folder: Path) -> SavedMeanwhile:
    """Save a model of four square layers on one rank, synchronously and then six times asynchronously."""
    return on_ranks(1, _save_meanwhile, folder)[0]


def _save_meanwhile(rank: int, folder: Path, width: int = 1024, n_saves: int = 6) -> SavedMeanwhile:
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
    optimizer, x = torch.optim.AdamW(layers.parameters()), torch.randn(64, width)
    alone = sorted(_timed_step(layers, optimizer, x) for _ in range(11))[5]
    whole = save(folder / "sync", 0, layers, optimizer, device_mesh=None).stall_s
    stalls, during, staged = [], [], 0
    with AsyncSaver(folder / "async", device_mesh=None) as saver:
        for number in range(n_saves):
            saving = saver.save(number, layers, optimizer)
            stalls.append(saving.stall_s / whole)
            staged = saving.staged_bytes
            during.append(_timed_step(layers, optimizer, x) / alone)
            while not saving.done():
                during.append(_timed_step(layers, optimizer, x) / alone)
    copied = staged / sum(p.nbytes for p in layers.parameters())
    return SavedMeanwhile(copied, tuple(stalls), sorted(during)[len(during) // 2])


def _timed_step(layers: nn.ModuleList, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    begin, y = time.perf_counter(), x
    for layer in layers:
        y = layer(y).tanh()
    y.sum().backward()
    optimizer.step()
    return time.perf_counter() - begin
