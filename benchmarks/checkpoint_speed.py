"""What a checkpoint costs: against torch's own, against plain files, and how long training stands
still.

    python benchmarks/checkpoint_speed.py [repeats] [ranks]

The ranks share a model by FSDP2, in float32 with AdamW's two moments. In each repeat they write
their parts to one plain file each and wait for the disk, and read them back; save and load the same
tensors with ``torch.distributed.checkpoint``, which has no checksums but CRC-32 of what it writes;
and with the course's, which computes XXH3 of all it writes and of all it reads. Both save
synchronously and while training goes on. Printed are medians of ratios within a repeat. What was
written lately is read from memory, so reading has no disk in it anywhere.
"""

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
import torch.distributed.checkpoint as dcp
from torch import Tensor

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import DistributedConfig, apply_fsdp2, default_mp_policy, init_distributed
from course_pp.training.checkpoint import AsyncSaver, load, save

CONFIG = ModelConfig(dim=768, n_layers=6, n_heads=12, vocab_size=4096, max_seq_len=64)


def seconds(work: Callable[[], object]) -> float:
    """How long the slowest rank takes."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def write_plainly(path: Path, tensors: list[Tensor]) -> None:
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(tensor.numpy().reshape(-1).view("uint8").data)
        file.flush()
        os.fsync(file.fileno())


def read_plainly(path: Path, tensors: list[Tensor]) -> None:
    with path.open("rb") as file:
        for tensor in tensors:
            file.readinto(tensor.numpy().reshape(-1).view("uint8").data)


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What both kinds of checkpoint hold, by name."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    slots = {
        f"{name}.{slot}": v
        for name, p in model.named_parameters()
        for slot, v in optimizer.state[p].items()
    }
    return found | slots


def measure(rank: int, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds by what was done, one number a repeat; ``bytes`` and ``staged`` in MB."""
    mesh = init_distributed(DistributedConfig())
    model = Transformer(CONFIG)
    apply_fsdp2(model, mesh, default_mp_policy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(CONFIG.vocab_size, (1, 65))

    def step() -> None:
        optimizer.zero_grad()
        CrossEntropy()(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    step()
    shared = [
        t.to_local() if hasattr(t, "to_local") else t for t in tensors_of(model, optimizer).values()
    ]
    parts = [t.detach().contiguous() for t in shared if t.dim()]
    copies = [torch.empty_like(part) for part in parts]
    # torch saves on a thread, whose messages must not meet the step's
    background = dist.new_group(backend="gloo")
    taken: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        taken.setdefault(what, []).append(value)

    with AsyncSaver(folder / "async", device_mesh=mesh, keep_last=1) as saver:
        for repeat in range(repeats + 1):
            plain, torchs, at = folder / f"plain{rank}", folder / f"torch{repeat}", repeat + 1
            state = tensors_of(model, optimizer)
            note("write plainly", seconds(partial(write_plainly, plain, parts)))
            note("torch's save", seconds(partial(dcp.save, state, checkpoint_id=torchs)))
            note(
                "save",
                seconds(
                    partial(
                        save, folder / "sync", at, model, optimizer, device_mesh=mesh, keep_last=1
                    )
                ),
            )
            note("step", seconds(step))
            begin = time.perf_counter()
            future = dcp.async_save(
                state, checkpoint_id=folder / f"torch{repeat} async", process_group=background
            )
            note("torch's stall", time.perf_counter() - begin)
            note("step while torch saves", seconds(step))
            future.result()
            note("torch's save in the background", time.perf_counter() - begin)
            dist.barrier()
            begin = time.perf_counter()
            saving = saver.save(at, model, optimizer)
            note("step while saving", seconds(step))
            saved = saving.result()
            note("save in the background", time.perf_counter() - begin)
            note("stall", saved.stall_s)
            note("bytes", saved.n_bytes / 1e6)
            note("staged", saved.staged_bytes / 1e6)
            dist.barrier()
            note("read plainly", seconds(partial(read_plainly, plain, copies)))
            note("torch's load", seconds(partial(dcp.load, state, checkpoint_id=torchs)))
            note(
                "load", seconds(partial(load, folder / "sync", model, optimizer, device_mesh=mesh))
            )
            if rank == 0:
                for path in folder.glob("torch*"):
                    shutil.rmtree(path)
            dist.barrier()
    return {what: values[1:] for what, values in taken.items()}  # the first repeat warms up


def main(repeats: int = 5, ranks: int = 2) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        taken = on_ranks(ranks, measure, folder, repeats, timeout_s=1000)[0]
    finally:
        shutil.rmtree(folder)

    def ratio(what: str, to: str) -> str:
        return (
            f"{statistics.median(a / b for a, b in zip(taken[what], taken[to], strict=True)):.2f}"
        )

    def median(what: str) -> float:
        return statistics.median(taken[what])

    print(
        f"torch {torch.__version__}, {ranks} ranks, {median('bytes'):.0f} MB, medians of {repeats}"
        " repeats\n"
    )
    print("| what | seconds | against | ratio |\n|---|---:|---|---:|")
    for what, to in (
        ("save", "torch's save"),
        ("load", "torch's load"),
        ("stall", "torch's stall"),
        ("save in the background", "torch's save in the background"),
        ("step while saving", "step while torch saves"),
        ("save", "write plainly"),
        ("torch's save", "write plainly"),
        ("load", "read plainly"),
        ("torch's load", "read plainly"),
        ("stall", "save"),
        ("step while saving", "step"),
    ):
        print(f"| {what} | {median(what):.3f} | {to} | {ratio(what, to)} |")
    print(f"\nmemory for the asynchronous copy: {median('staged'):.0f} MB a rank")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
