"""The runs of notebook 09: a model at any layout, deaths, saves of every kind, patients."""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_pp.exercises.dcp_checkpointing.exercises import checkpoint_entries, overlaps
from course_pp.exercises.formula import flawed
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
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.training.checkpoint import AsyncSaver, Piece, save
from course_pp.training.data import Batches, Sequences

CONFIG = ModelConfig(dim=32, n_layers=4, n_heads=4, vocab_size=128, max_seq_len=256)
"""The sizes of the model, whose tokens are bytes."""

_TEXT = (
    b"A checkpoint is found by looking, never by a pointer that can lie. It is whole when "
    b"its manifest is there, and the manifest is written last. Ranks die, clusters shrink, "
    b"and the run goes on where it stopped. "
)
_SEQ_LEN = 64
_ROWS = 8
_MICROBATCHES = 4
_WINDOWS = torch.tensor([list((_TEXT + _TEXT)[i : i + _SEQ_LEN + 1]) for i in range(len(_TEXT))])

DATA = Sequences(_WINDOWS[:, :-1], _WINDOWS[:, 1:])
"""Every window of 64 characters of a short text, and the character that follows each."""

PROMPT = torch.tensor([list(b"Ranks die")])


class Trainee:
    """The model in float64, with its optimizer and its data, at any layout.

    A rank has at most one pipeline stage.

    Attributes:
        mesh: mesh of the ranks, None for one process.
        module, optimizer: this rank's part of the model, and its optimizer.
        batches: the rows of each step, a function of seed and step.
    """

    def __init__(self, layout: DistributedConfig) -> None:
        self.mesh = init_distributed(layout, seed=0)
        self.batches = Batches(DATA, _ROWS)
        pp = get_pp_size(self.mesh)
        self.module = build_stage_module(CONFIG, get_pp_rank(self.mesh), pp).double()
        apply_tensor_parallel(self.module, self.mesh)
        apply_fsdp2(self.module, self.mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self._pipeline: Any = None
        if pp > 1:
            stage = build_pipeline_stage(
                self.module,
                self.mesh,
                "cpu",
                _ROWS // _MICROBATCHES,
                _SEQ_LEN,
                param_dtype=torch.float64,
            )
            self._pipeline = build_pipeline_schedule(stage, _MICROBATCHES, CrossEntropy())

    def step(self, step: int, die: bool = False) -> float:
        """Train on the rows of ``step``; return the loss of the batch.

        ``die`` ends this rank by SIGKILL half-way.
        """
        rows = self.batches[step]
        if die:
            forwards = count(1)
            self.module.register_forward_pre_hook(
                lambda *_: _die() if next(forwards) == 3 else None
            )
        self.optimizer.zero_grad()
        if self._pipeline is not None:
            loss = self._pipeline.step(rows.inputs, target=rows.targets)
        else:
            loss = CrossEntropy()(self.module(rows.inputs), rows.targets)
            loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def save_fresh(folder: Path, layouts: Mapping[str, DistributedConfig]) -> None:
    """Save the untrained model at each layout of four ranks, into a run of the layout's name."""
    for name, layout in layouts.items():
        on_ranks(4, _save_fresh, layout, folder / name)


def _save_fresh(rank: int, layout: DistributedConfig, root: Path) -> None:
    fresh = Trainee(layout)
    save(root, 0, fresh.module, device_mesh=fresh.mesh)


def run_script(line: str) -> None:
    """Run a script with arguments on two ranks, which have torch imported.

    The script is found where ``%torchrun`` finds it.
    """
    name, *arguments = shlex.split(line)
    folders = (Path.cwd(), *Path.cwd().parents)
    script = next((folder / name for folder in folders if (folder / name).exists()), Path(name))
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
    setattr(dcp.FileSystemWriter, "write_data", _die)  # noqa: B010


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pieces_read(
    pieces: Sequence[Piece], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> list[Piece]:
    """Return what a rank that wants the rectangle at ``offsets`` reads of a tensor's pieces."""
    reads = overlaps(
        (offsets, sizes), {piece.file: (piece.offsets, piece.sizes) for piece in pieces}
    )
    return [Piece(*box, file, 0) for file, box in reads.items()]


def saves_in_a_hurry(folder: Path) -> str:
    """Save step 2 by hand on two ranks without a barrier.

    Once rank 1 is slow to write, and once rank 0 is slow to rename.

    Returns:
        The checkpoint that each rank finds as the newest when its save returns, and the files that
        there are then.
    """
    told = []
    for slow, what in ((1, "rank 1 writes late"), (0, "rank 0 renames late")):
        place = folder / f"rank {slow} is slow"
        found = on_ranks(2, _save_in_a_hurry, place, slow)
        told.append(
            f"{what}: back with"
            f" {', '.join(f'{newest} (rank {r})' for r, newest in enumerate(found))}"
        )
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
    while not path.exists():
        time.sleep(0.005)


@dataclass(frozen=True)
class SavedMeanwhile:
    """Six asynchronous saves, with training going on.

    Attributes:
        copied: bytes that a save copied, divided by the bytes of the weights.
        stalls: the time for which training stood still at each save, as a share of the time of a
            synchronous save.
        slower: median time of a step while a save is written, divided by its time without.
    """

    copied: float
    stalls: tuple[float, ...]
    slower: float

    def __str__(self) -> str:
        later = sorted(self.stalls[1:])[len(self.stalls[1:]) // 2]
        return (
            f"training stood still for {self.stalls[0]:.0%} of a synchronous save at the first,"
            f" {later:.0%} at the later ones\na step meanwhile takes × {self.slower:.2f}"
        )


def save_meanwhile(folder: Path) -> SavedMeanwhile:
    """Save a model of four square layers on one rank: once synchronously, then asynchronously."""
    return on_ranks(1, _save_meanwhile, folder)[0]


def _save_meanwhile(rank: int, folder: Path, width: int = 1024, n_saves: int = 6) -> SavedMeanwhile:
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
    optimizer = torch.optim.AdamW(layers.parameters())
    x = torch.randn(64, width)
    alone = sorted(_timed_step(layers, optimizer, x) for _ in range(11))[5]
    whole = save(folder / "sync", 0, layers, optimizer, device_mesh=None).stall_s
    stalls = []
    during = []
    staged = 0
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
    begin = time.perf_counter()
    y = x
    for layer in layers:
        y = layer(y).tanh()
    y.sum().backward()
    optimizer.step()
    return time.perf_counter() - begin


_SAVED_AT, _LAST = 3, 6
_Save = Callable[..., dict[str, Any]]


class ResumeSymptoms(NamedTuple):
    """The symptoms of a patient that resumed.

    Attributes:
        gaps: differences of the next steps' losses from those of the run that went on.
        before, after: loss of one fixed batch, before saving and after resuming, without dropout.
    """

    gaps: list[float]
    before: float
    after: float


class _DropoutTrainer:
    """A rank of a two-stage pipeline with dropout; both stages have the same shapes."""

    def __init__(self, rank: int, dropout: float) -> None:
        torch.manual_seed(0)
        blocks: list[nn.Module] = [
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
        ]
        mine = OrderedDict((str(i), blocks[i]) for i in (2 * rank, 2 * rank + 1))
        self.rank = rank
        self.stage = nn.Sequential(mine).double()
        self.step = 0
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=0.02)
        self._pipeline = Pipeline(build("1f1b", 2, 2), self.stage, mse_loss)
        torch.manual_seed(100 + rank)

    def losses(self, until: int) -> list[float]:
        """Train to the end of step ``until``; return the mean share of the loss in each step."""
        found = []
        while self.step < until:
            self.optimizer.zero_grad()
            x, target = _noise(self.step)
            self._pipeline.step(x, target=target)
            self.optimizer.step()
            found.append(fmean(self._pipeline.shares))
            self.step += 1
        return found

    def probe(self) -> float:
        """Loss of one fixed batch, without dropout, so that nothing is drawn; on every rank."""
        x, target = _noise(_LAST)
        self.stage.eval()
        loss = mse_loss(self._pipeline.evaluate(x, on="all"), target)
        self.stage.train()
        return loss.item()

    def entries(self, save: _Save) -> dict[str, Any]:
        return save(self.stage, self.optimizer, {"pp": self.rank}, self.step)

    def resume(self, save: _Save, saved: Mapping[str, Any]) -> None:
        """Continue with what stands under the keys that ``save`` gives here."""
        for parameter in self.stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # before its first step it has no moments
        for key, value in self.entries(save).items():
            if key.startswith("rng"):
                torch.set_rng_state(saved[key])
            elif isinstance(value, Tensor):
                value.copy_(saved[key])
        self.step = saved.get("step", 0)


def _noise(step: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, 8, 8, dtype=torch.float64, generator=seeded)
    return x, target


def _resumed(save: _Save, rank: int, dropout: float) -> ResumeSymptoms:
    trainer, again = _DropoutTrainer(rank, dropout), _DropoutTrainer(rank, dropout)
    trainer.losses(_SAVED_AT)
    before = trainer.probe()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, trainer.entries(save))
    right = trainer.losses(_LAST)
    # The last rank to write a key wins.
    again.resume(save, {key: value for entries in everyone for key, value in entries.items()})
    after = again.probe()
    found = again.losses(again.step + _LAST - _SAVED_AT)
    return ResumeSymptoms([abs(a - b) for a, b in zip(found, right, strict=True)], before, after)


PATIENTS: dict[str, Callable[[int, float], ResumeSymptoms]] = {
    name: partial(_resumed, flawed(checkpoint_entries, flaw))
    for name, flaw in {
        "A": ("optimizer.{name}", "optimizer.{[*stage.state_dict()].index(name)}"),
        "B": ('{"step": step}', "{}"),
        "C": ("rng.{place}", "rng"),
    }.items()
}
"""Trainers on two ranks, each ill in another way: called with rank and dropout, they save after
three steps, resume, and take three more.
"""
