"""Kill a random rank at a random moment, resume, and repeat: is anything lost?

    python source_code/kill_drill.py --kills 50

A pipeline of two ranks trains and saves after every other step, in turns synchronously and
asynchronously. Every second kill waits until a save is going on. After each kill the drill looks
for processes that are left, and for checkpoints that were complete and are not any more. It
compares every loss, bit by bit, with the losses of a run that nobody interrupted. At the end it
prints a tally; the exit code is 1 if anything was wrong.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from pathlib import Path

import torch

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    init_distributed,
)
from course_pp.training.checkpoint import AsyncSaver, find_latest, resume, save, verify
from course_pp.training.checkpoint.directory import step_of

RANKS = 2
STEPS = 40
SAVE_EVERY = 2
BATCH = 4
SEQ_LEN = 16
MICROBATCHES = 4
CONFIG = ModelConfig(dim=64, n_layers=4, n_heads=4, vocab_size=128, max_seq_len=SEQ_LEN)
GOOD = ("kills", "during a save", "between saves", "checkpoints completed", "losses compared")
BAD = (
    "checkpoints lost",
    "damaged under a final name",
    "wrong losses",
    "orphans",
    "leftovers after the next save",
)


def train(rank: int, root: Path, log: Path, asynchronous: bool) -> None:
    """Train from the newest checkpoint to the last step; note losses and complete checkpoints."""
    mesh = init_distributed(DistributedConfig(pp=RANKS), seed=0)
    module = build_stage_module(CONFIG, rank, RANKS).double()
    stage = build_pipeline_stage(module, mesh, "cpu", BATCH // MICROBATCHES, SEQ_LEN, torch.float64)
    schedule = build_pipeline_schedule(stage, MICROBATCHES, CrossEntropy())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    saver = AsyncSaver(root, device_mesh=mesh, keep_last=3) if asynchronous else None
    loaded = resume(root, module, optimizer, device_mesh=mesh)
    (log / f"pid{rank}").write_text(str(os.getpid()))

    for step in range(loaded.step + 1 if loaded else 1, STEPS + 1):
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ_LEN + 1), generator=drawn)
        optimizer.zero_grad()
        loss = schedule.step(tokens[:, :-1], target=tokens[:, 1:]).item()
        optimizer.step()
        note(rank, log / "losses", [step, float(loss).hex()])
        if step % SAVE_EVERY == 0:
            if saver is None:
                done = save(root, step, module, optimizer, device_mesh=mesh, keep_last=3)
                note(rank, log / "complete", done.step)
                continue
            # An asynchronous save is known to be complete only when the next one waits for it.
            done = saver.wait()
            note(rank, log / "complete", done.step if done else 0)
            saver.save(step, module, optimizer)
    if saver is not None:
        saver.close()


def note(rank: int, path: Path, entry: object) -> None:
    """Append one line on rank 0, all of it or nothing."""
    if rank == 0:
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def noted(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cleared(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


def kill(
    root: Path, log: Path, in_save: bool, dice: random.Random, over: threading.Event, hit: list[str]
) -> None:
    """Wait for a random moment after all ranks train, and kill one; ``hit`` says what it did."""
    # Folders that the kill before has left; they go when the next save begins.
    left = set(root.glob(".step_*"))
    victim = dice.randrange(RANKS)
    least = dice.randrange(4)  # checkpoints to let through
    delay_s = dice.uniform(0, 0.02 if in_save else 0.2)

    def is_saving() -> bool:
        return any(file.parent not in left for file in root.glob(".step_*.tmp-*/*"))

    def is_time() -> bool:
        if len(list(log.glob("pid*"))) < RANKS or len(noted(log / "complete")) < least:
            return False
        return is_saving() or not in_save

    while not is_time():
        if over.wait(0.0005):
            return
    if not over.wait(delay_s):
        hit.append("during a save" if is_saving() else "between saves")
        os.kill(int((log / f"pid{victim}").read_text()), signal.SIGKILL)


def one_kill(
    root: Path, log: Path, number: int, dice: random.Random, expected: dict[int, str]
) -> Counter:
    """Train until the kill, and count its damage; return no counts if the run ended before it."""
    over = threading.Event()
    hit: list[str] = []
    in_save = number % 2 == 0
    killer = threading.Thread(
        target=kill, args=(root, cleared(log), in_save, dice, over, hit), daemon=True
    )
    killer.start()
    try:
        on_ranks(RANKS, train, root, log, number % 4 < 2, timeout_s=300)
    except Exception:
        if not hit:
            raise
    over.set()
    killer.join()
    if not hit:
        cleared(root)
        return Counter()
    complete = noted(log / "complete")
    losses = noted(log / "losses")
    latest = find_latest(root)
    newest = step_of(latest) if latest else 0
    found = {
        "kills": 1,
        hit[0]: 1,
        "checkpoints completed": len(complete),
        "losses compared": len(losses),
        "checkpoints lost": int(newest < max(complete, default=0)),
        "damaged under a final name": sum(bool(verify(path)) for path in root.glob("step_*")),
        "wrong losses": sum(expected[step] != loss for step, loss in losses),
        "orphans": sum(Path(f"/proc/{path.read_text()}").exists() for path in log.glob("pid*")),
    }
    return Counter(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill ranks at random moments and count what is lost."
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    tally: Counter[str] = Counter()
    # `resume` warns if it takes an older checkpoint in place of a damaged one.
    warnings.simplefilter("error", UserWarning)
    with tempfile.TemporaryDirectory() as folder:
        root = cleared(Path(folder) / "checkpoints")
        log = cleared(Path(folder) / "log")
        on_ranks(RANKS, train, root, log, False, timeout_s=300)
        expected = dict(noted(log / "losses"))
        cleared(root)
        while tally["kills"] < arguments.kills:
            tally += one_kill(root, log, tally["kills"], dice, expected)
            done = f"{tally['kills']} of {arguments.kills} kills"
            print(done, end="\r", file=sys.stderr, flush=True)
        # A save removes the folders of saves that were cut short.
        save(root, STEPS + 1, torch.nn.Linear(1, 1), device_mesh=None)
        tally["leftovers after the next save"] = len(list(root.glob(".step_*")))
    for what in (*GOOD, *BAD):
        print(f"{what:<32}{tally[what]:>6}")
    sys.exit(any(tally[what] for what in BAD))


if __name__ == "__main__":
    main()
