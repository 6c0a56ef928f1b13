"""The place of this process among the ranks, and its GPU, as torchrun and Slurm give them.

torchrun's variables come first, else Slurm's, else this is a single process.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from course_pp.base.arguments import checked
from course_pp.base.imports import MissingExtra

Backend = Literal["gloo", "nccl"]

# below Linux's ephemeral ports (32768 and up), so nothing else is handed one
_PORTS = range(15_000, 30_000)
_SCONTROL_LIMIT_S = 20
_LEFT_TO_THE_LAUNCHER_S = 5.0
_INTERRUPTED = 128 + signal.SIGINT  # the exit code of a shell for a program ended by Ctrl-C


def get_world_info() -> tuple[int, int, int]:
    """Return ``(rank, local_rank, world_size)``; ``(0, 0, 1)`` outside any launcher.

    torchrun's RANK, LOCAL_RANK and WORLD_SIZE come first. Without them the SLURM_PROCID,
    SLURM_LOCALID and SLURM_NTASKS of ``srun`` are read and exported under torchrun's names, with
    MASTER_ADDR and MASTER_PORT derived from the job, so that ``init_method="env://"`` works under
    bare ``srun`` too.

    A batch script that runs Python without ``srun`` has Slurm's variables too, and would wait for
    tasks that were never started: start it with ``srun``, also for one task.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return _read("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "SLURM_PROCID" in os.environ:
        rank, local_rank, world_size = _read("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(world_size))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(_slurm_local_world_size(world_size)))
        os.environ.setdefault("MASTER_ADDR", _slurm_master_address())
        # A port that every task of the step computes alike, and two steps of one job do not share.
        job, step = (
            int(re.sub(r"\D", "", os.environ.get(k, "")) or 0)
            for k in ("SLURM_JOB_ID", "SLURM_STEP_ID")
        )
        os.environ.setdefault("MASTER_PORT", str(_PORTS[(7919 * job + step) % len(_PORTS)]))
        return rank, local_rank, world_size
    return 0, 0, 1


def _read(*names: str) -> tuple[int, int, int]:
    values = []
    for name in names:
        text = os.environ.get(name)
        if text is None or not text.isdigit():
            raise ValueError(
                f"environment variable {name} is {text!r}, but {', '.join(names)} must all be whole"
                " numbers: start the ranks with torchrun or srun, or unset all three to run as one"
                " process"
            )
        values.append(int(text))
    rank, local_rank, world_size = values
    if rank >= world_size:
        raise ValueError(
            f"{names[0]}={rank} must be below {names[2]}={world_size}: unset or correct them"
        )
    return rank, local_rank, world_size


def _slurm_local_world_size(world_size: int) -> int:
    """Return the tasks on this node, from a text such as ``"2(x3),1"``.

    It means three nodes with two tasks each, then one node with one.
    """
    text = (
        os.environ.get("SLURM_STEP_TASKS_PER_NODE")
        or os.environ.get("SLURM_TASKS_PER_NODE")
        or str(world_size)
    )
    per_node = []
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        per_node += [int(tasks)] * int(repeat or 1)
    node = int(os.environ.get("SLURM_NODEID", 0))
    return per_node[node] if node < len(per_node) else world_size


def _slurm_master_address() -> str:
    """Return the name of the first node if it is a host's, else its address.

    Virtual nodes have names that are no hosts'; Slurm itself reaches them at this address.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    n_nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if n_nodes == "1" or not nodes:
        return "127.0.0.1"
    node = first_host(nodes)
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        asked = ["scontrol", "show", "node", node]
        answer = subprocess.run(
            asked, capture_output=True, text=True, timeout=_SCONTROL_LIMIT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    match = re.search(r"\bNodeAddr=(\S+)", answer)
    if match is None:
        raise ValueError(
            f"Slurm node {node!r} is no host's name and scontrol knows no address: set MASTER_ADDR"
            " yourself"
        )
    return match[1]


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``"gpu[03-05,9],cpu1"`` gives ``"gpu03"``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if match is None:
        raise ValueError(f"Slurm node list {nodelist!r} names no host: set MASTER_ADDR yourself")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def is_rank_zero() -> bool:
    """Return whether this is global rank 0.

    The process group says so if there is one, else the launcher's variables.
    """
    return (dist.get_rank() if dist.is_initialized() else get_world_info()[0]) == 0


@contextmanager
def refusals_said_once(program: str) -> Iterator[None]:
    """End a script with exit code 2 and one message on a ``ValueError`` or a missing extra.

    Without it, every rank would print a traceback.

    An interrupt (Ctrl-C, SIGINT) ends it with exit code 130 and one line of rank 0.

    Rank 0 prints the message. The others wait five seconds, in which the launcher ends them. If
    they are still there, the problem was theirs alone, and they print it.
    """
    try:
        yield
    except (ValueError, MissingExtra) as error:
        rank = get_world_info()[0]
        if rank > 0:
            time.sleep(_LEFT_TO_THE_LAUNCHER_S)
        where = f" (rank {rank})" if rank > 0 else ""
        print(f"{program}: error{where}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        if get_world_info()[0] == 0:
            print(f"{program}: interrupted", file=sys.stderr, flush=True)
        sys.exit(_INTERRUPTED)


def is_task_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether this rank is a task of bare ``srun``.

    Under torchrun a task of ``srun`` is all ranks of a node, so the answer is no.
    """
    return "SLURM_PROCID" in environ and not any(
        name.startswith("TORCHELASTIC_") for name in environ
    )


@checked
def get_device(backend: Backend | None = None, *, share: bool = False) -> torch.device:
    """Return this rank's device.

    It is a GPU of its own if every rank of this host has one, else the CPU, with a warning.

    Args:
        backend: as in :class:`DistributedConfig`; ``"gloo"`` means the CPU, and ``"nccl"`` refuses
            it.
        share: with fewer GPUs than ranks, neighbouring ranks get one GPU together.
            `course_pp.runtime` can run them.
    """
    n_gpus, n_ranks, rank = visible_gpus()
    counted = f"{n_gpus} GPUs for {n_ranks} ranks"
    if backend == "nccl" and n_gpus < n_ranks:
        raise ValueError(
            f"backend='nccl' needs a GPU for each rank, but this host has {counted}: start fewer"
            " ranks, or use backend='gloo'"
        )
    if backend == "gloo" or not n_gpus:
        return torch.device("cpu")
    if n_gpus >= n_ranks:
        return torch.device("cuda", rank)
    if share:
        return torch.device("cuda", rank * n_gpus // n_ranks)
    warnings.warn(
        f"this host has {counted}: computing on the CPU. Start a rank a GPU, let the runtime's"
        " ranks share them (share_gpus=True), or say backend='gloo' if that is what you want",
        stacklevel=3,
    )
    return torch.device("cpu")


def visible_gpus() -> tuple[int, int, int]:
    """Return ``(n_gpus, n_ranks, rank)``.

    This rank sees ``n_gpus`` GPUs. ``n_ranks`` ranks see these same GPUs, and this one is number
    ``rank`` among them.
    """
    _, local_rank, world_size = get_world_info()
    n, n_local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if n and _has_gpus_of_its_own(os.environ, n, n_local):
        return n, 1, 0
    return n, n_local, local_rank


def _has_gpus_of_its_own(environ: Mapping[str, str], n_visible: int, n_local: int) -> bool:
    """Return whether this rank's GPUs are hidden from the other ranks of its node.

    No variable holds what srun was asked for (``--gpus-per-task``, ``--ntasks-per-gpu=1``,
    ``--gpu-bind=single:1``), so the answer is inferred. If ``n_visible`` GPUs for each of
    ``n_local`` ranks are no more than the node's GPUs, as Slurm counts them, each rank has its own.
    If Slurm does not count them, the options of the batch script decide.
    """
    if not is_task_of_srun(environ):
        return False
    dealt_out = n_visible * n_local <= int(environ.get("SLURM_GPUS_ON_NODE", 0))
    asked = (
        "SLURM_GPUS_PER_TASK" in environ
        or "1" in (environ.get("SLURM_NTASKS_PER_GPU"), environ.get("SLURM_NTASKS_PER_TRES"))
        or re.search(r"\b(single:1$|per_task:|map_gpu:)", environ.get("SLURM_GPU_BIND", ""))
        is not None
    )
    return dealt_out or (n_visible < n_local and asked)
