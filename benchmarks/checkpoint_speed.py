"""What a checkpoint costs: against writing and reading the same bytes plainly, and how long training stands still.

    python benchmarks/checkpoint_speed.py [repeats] [ranks]

The ranks share a model by FSDP2, in float32 with AdamW's two moments. In each repeat they write their parts to one
plain file each and wait for the disk, save synchronously, save asynchronously, read the plain files back, and load.
Printed are medians of ratios within a repeat. What was written lately is read from memory, so reading has no disk in
it, in either case. A save computes a SHA-256 of all it writes and a load of all it reads; the row "with SHA-256" does
that to the plain files too.
"""

import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import DistributedConfig, apply_fsdp2, init_distributed
from course_pp.training.checkpoint import AsyncSaver, load, save

CONFIG = ModelConfig(dim=768, n_layers=6, n_heads=12, vocab_size=4096, max_seq_len=64)


def seconds(work: Callable[[], object]) -> float:
    """How long the slowest rank takes."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def write_plainly(path: Path, tensors: list[Tensor], sha256: bool) -> None:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for tensor in tensors:
            content = tensor.numpy().reshape(-1).view("uint8").data
            if sha256:
                digest.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_plainly(path: Path, tensors: list[Tensor], sha256: bool) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for tensor in tensors:
            content = tensor.numpy().reshape(-1).view("uint8").data
            file.readinto(content)
            if sha256:
                digest.update(content)


def measure(rank: int, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds by what was done, one number a repeat; ``bytes`` and ``staged`` in MB."""
    mesh = init_distributed(DistributedConfig())
    model = Transformer(CONFIG)
    apply_fsdp2(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(CONFIG.vocab_size, (1, 65))

    def step() -> None:
        optimizer.zero_grad()
        CrossEntropy()(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in (*model.parameters(), *states)]
    parts = [t.detach().contiguous() for t in tensors if t.dim()]
    copies = [torch.empty_like(part) for part in parts]
    taken: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        taken.setdefault(what, []).append(value)

    with AsyncSaver(folder / "async", device_mesh=mesh, keep_last=1) as saver:
        for repeat in range(repeats + 1):
            plain, at = folder / f"plain{rank}", repeat + 1
            for sha256, name in ((False, "plain"), (True, "plain with SHA-256")):
                note(f"write {name}", seconds(partial(write_plainly, plain, parts, sha256)))
            note("save", seconds(partial(save, folder / "sync", at, model, optimizer, device_mesh=mesh, keep_last=1)))
            note("step", seconds(step))
            saving = saver.save(at, model, optimizer)
            note("step while saving", seconds(step))
            saved = saving.result()
            note("stall", saved.stall_s)
            note("write in the background", saved.write_s)
            note("bytes", saved.n_bytes / 1e6)
            note("staged", saved.staged_bytes / 1e6)
            dist.barrier()
            for sha256, name in ((False, "plain"), (True, "plain with SHA-256")):
                note(f"read {name}", seconds(partial(read_plainly, plain, copies, sha256)))
            note("load", seconds(partial(load, folder / "sync", model, optimizer, device_mesh=mesh)))
    return {what: values[1:] for what, values in taken.items()}  # the first repeat warms up


def main(repeats: int = 5, ranks: int = 2) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        taken = on_ranks(ranks, measure, folder, repeats, timeout_s=1000)[0]
    finally:
        shutil.rmtree(folder)

    def ratio(what: str, to: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(taken[what], taken[to], strict=True)):.2f}"

    def median(what: str) -> float:
        return statistics.median(taken[what])

    print(f"torch {torch.__version__}, {ranks} ranks, {median('bytes'):.0f} MB, medians of {repeats} repeats\n")
    print("| what | seconds | against | ratio |\n|---|---:|---|---:|")
    for what, to in (
        ("save", "write plain"),
        ("save", "write plain with SHA-256"),
        ("load", "read plain"),
        ("load", "read plain with SHA-256"),
        ("stall", "save"),
        ("write in the background", "save"),
        ("step while saving", "step"),
    ):
        print(f"| {what} | {median(what):.3f} | {to} | {ratio(what, to)} |")
    print(f"\nmemory for the asynchronous copy: {median('staged'):.0f} MB a rank")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
