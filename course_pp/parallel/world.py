"""Who am I among the ranks: torchrun's variables, else Slurm's, else a single process."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from course_pp.arguments import checked

__all__ = ["get_node", "get_world_info", "has_gpus_of_its_own", "is_rank_zero", "is_task_of_srun", "refusals_said_once"]

_PORTS = range(15_000, 30_000)  # below Linux's ephemeral ports (32768 and up), so nothing else is handed one
_SCONTROL_LIMIT_S = 20
_LEFT_TO_THE_LAUNCHER_S = 5.0


def get_world_info() -> tuple[int, int, int]:
    """Return ``(rank, local_rank, world_size)``; ``(0, 0, 1)`` outside any launcher.

    torchrun's RANK, LOCAL_RANK and WORLD_SIZE come first. Without them the SLURM_PROCID, SLURM_LOCALID and
    SLURM_NTASKS of ``srun`` are read and exported under torchrun's names, with MASTER_ADDR and MASTER_PORT
    derived from the job, so that ``init_method="env://"`` works under bare ``srun`` too.

    A batch script that runs Python without ``srun`` has Slurm's variables too, and would wait for tasks that were never
    started: start it with ``srun``, also for one task.

    Raises:
        ValueError: if a launcher set some of its variables but not all, or one is not a number; or if the address of
            the job's first node cannot be found.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return _read("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "SLURM_PROCID" in os.environ:
        rank, local_rank, world_size = _read("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(world_size))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(_slurm_local_world_size(world_size)))
        os.environ.setdefault("MASTER_ADDR", _slurm_master_address())
        os.environ.setdefault("MASTER_PORT", str(_slurm_master_port()))
        return rank, local_rank, world_size
    return 0, 0, 1


def is_rank_zero() -> bool:
    """Return True on global rank 0, by the process group if there is one, else by the launcher's variables."""
    return (dist.get_rank() if dist.is_initialized() else get_world_info()[0]) == 0


def get_node() -> str:
    """Return a name of this rank's node that differs from that of every other node.

    Slurm's number of the node comes with the host's name: virtual nodes share one host, and a number that was inherited
    from a batch script is 0 everywhere.
    """
    return f"{os.environ.get('SLURM_NODEID', '')}@{socket.gethostname()}"


def is_task_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether this rank is a task of bare ``srun``; under torchrun, the task is all ranks of the node."""
    return "SLURM_PROCID" in environ and not any(name.startswith("TORCHELASTIC_") for name in environ)


def has_gpus_of_its_own(environ: Mapping[str, str], n_visible: int, n_local: int) -> bool:
    """Return whether this rank's ``n_visible`` GPUs are hidden from the other ``n_local - 1`` ranks of its node.

    That is so with srun's ``--gpus-per-task``, ``--ntasks-per-gpu=1`` and ``--gpu-bind=single:1``. It is inferred from
    the GPUs that the tasks have got, because no variable holds what srun was asked for; if Slurm does not count the
    node's GPUs, from what the batch script was asked for.
    """
    if not is_task_of_srun(environ):
        return False
    dealt_out = n_visible * n_local <= int(environ.get("SLURM_GPUS_ON_NODE", 0))
    asked = (
        "SLURM_GPUS_PER_TASK" in environ
        or "1" in (environ.get("SLURM_NTASKS_PER_GPU"), environ.get("SLURM_NTASKS_PER_TRES"))
        or re.search(r"\b(single:1$|per_task:|map_gpu:)", environ.get("SLURM_GPU_BIND", "")) is not None
    )
    return dealt_out or (n_visible < n_local and asked)


@checked
@contextmanager
def refusals_said_once(program: str) -> Iterator[None]:
    """End a script on a ``ValueError`` with exit code 2 and one message, not one traceback a rank.

    Every rank refuses a bad argument at once, and rank 0 prints the message. The others wait five seconds, in which the
    launcher ends them. If they are still there, the problem was theirs alone, and they print it.
    """
    try:
        yield
    except ValueError as error:
        rank = get_world_info()[0]
        if rank > 0:
            time.sleep(_LEFT_TO_THE_LAUNCHER_S)
        where = f" (rank {rank})" if rank > 0 else ""
        print(f"{program}: error{where}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _read(*names: str) -> tuple[int, int, int]:
    values = []
    for name in names:
        text = os.environ.get(name)
        if text is None or not text.isdigit():
            raise ValueError(
                f"environment variable {name} is {text!r}, but {', '.join(names)} must all be whole numbers: "
                "start the ranks with torchrun or srun, or unset all three to run as one process"
            )
        values.append(int(text))
    rank, local_rank, world_size = values
    if rank >= world_size:
        raise ValueError(f"{names[0]}={rank} must be below {names[2]}={world_size}: unset or correct them")
    return rank, local_rank, world_size


def _slurm_local_world_size(world_size: int) -> int:
    """Tasks on this node, from a description such as ``"2(x3),1"``: three nodes with two tasks, then one with one."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or str(world_size)
    per_node = []
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        per_node += [int(tasks)] * int(repeat or 1)
    node = int(os.environ.get("SLURM_NODEID", 0))
    return per_node[node] if node < len(per_node) else world_size


def _slurm_master_address() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    n_nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_JOB_NUM_NODES", "1")
    return _address(first_host(nodes)) if n_nodes != "1" and nodes else "127.0.0.1"


def _address(node: str) -> str:
    """Return the node's name if it is a host's, else the address at which Slurm itself reaches it (virtual nodes)."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        asked = ["scontrol", "show", "node", node]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=_SCONTROL_LIMIT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    match = re.search(r"\bNodeAddr=(\S+)", answer)
    if match is None:
        raise ValueError(
            f"Slurm node {node!r} is no host's name and scontrol knows no address: set MASTER_ADDR yourself"
        )
    return match[1]


def _slurm_master_port() -> int:
    """Return a port every task of the step computes alike, and two steps of one job do not share."""
    job, step = (int(re.sub(r"\D", "", os.environ.get(k, "")) or 0) for k in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _PORTS[(7919 * job + step) % len(_PORTS)]


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: ``"gpu[03-05,9],cpu1"`` gives ``"gpu03"``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if match is None:
        raise ValueError(f"Slurm node list {nodelist!r} names no host: set MASTER_ADDR yourself")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])
