"""From what a learner types after ``torchrun`` to what is run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

_FLAGS = {"--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank", "-h", "--help"}
_ANSWER_LIMIT_S = 5.0
# What torchrun, a cluster or `get_world_info` sets for a rank: a launcher that inherits it would pass for a rank.
_OF_A_RANK = {
    *(f"{prefix}RANK" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")),
    *(f"{prefix}WORLD_SIZE" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")),
    *("MASTER_ADDR", "MASTER_PORT"),
    *(f"TORCHELASTIC_{what}" for what in ("RESTART_COUNT", "MAX_RESTARTS", "RUN_ID", "USE_AGENT_STORE", "ERROR_FILE")),
}
_RENDEZVOUS = ("--rdzv-", "--master-", "--node-rank", "--standalone")


@dataclass(frozen=True)
class Command:
    """A launch, ready to run.

    Attributes:
        argv: what is executed.
        shown: the same as a learner would type it in the current folder.
        environ: variables to add; they keep ``shown`` as short as it was typed.
        local: whether the ranks run on this machine.
    """

    argv: tuple[str, ...]
    shown: str
    environ: Mapping[str, str]
    local: bool


def build(args: Sequence[str], local: bool = False, environ: Mapping[str, str] | None = None) -> Command:
    """Builds the launch of ``torchrun ARGS``.

    Inside or next to Slurm (``srun`` is on PATH and a cluster answers) torchrun itself runs as one Slurm task on each
    node, unless ``local``. On one node, the rendezvous takes a free port; variables that are set already win.

    Raises:
        ValueError: no script is named.
        FileNotFoundError: the script is neither here nor below the folder that holds pyproject.toml or source_code.
    """
    environ = os.environ if environ is None else environ
    args = list(args)
    at = script_index(args)
    if at is None:
        raise ValueError(
            f"no script in `torchrun {shlex.join(args)}`. "
            "Name one after the options, for example --nproc-per-node=2 source_code/pipeline_test.py"
        )
    options = [_dashed(option) for option in args[:at]]
    if not {"-m", "--module", "--no-python"} & set(options):
        args[at] = _found(args[at])
    nodes = _n_nodes(args[:at])
    slurm = _srun(nodes) if not local and _has_slurm(environ) else []
    return Command(
        argv=(*slurm, sys.executable, "-m", "torch.distributed.run", *args),
        shown=shlex.join([*slurm, "torchrun", *args]),
        environ=_defaults(nodes == 1 and not any(o.startswith(_RENDEZVOUS) for o in options), environ),
        local=not slurm,
    )


def of_no_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what describes one rank of another run."""
    return {name: value for name, value in environ.items() if name not in _OF_A_RANK}


def script_index(args: Sequence[str]) -> int | None:
    """Where torchrun's own options end. All but a few of them take a value."""
    at = 0
    while at < len(args):
        if not args[at].startswith("-"):
            return at
        at += 1 if "=" in args[at] or _dashed(args[at]) in _FLAGS else 2
    return None


def _dashed(option: str) -> str:
    """torchrun spells every option with dashes or underscores."""
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value


def _n_nodes(options: Sequence[str]) -> int:
    for option, following in zip_longest(options, options[1:], fillvalue=""):
        name, _, value = option.partition("=")
        if name == "--nnodes":
            most = (value or following).rsplit(":", 1)[-1]
            return int(most) if most.isdigit() else 1
    return 1


def _has_slurm(environ: Mapping[str, str]) -> bool:
    """Whether there is a cluster behind ``srun``: Slurm's tools may be installed without one."""
    path = environ.get("PATH")
    if not shutil.which("srun", path=path):
        return False
    if "SLURM_JOB_ID" in environ:
        return True
    sinfo = shutil.which("sinfo", path=path)
    if sinfo is None:
        return False
    try:
        return not subprocess.run([sinfo], env=environ, capture_output=True, timeout=_ANSWER_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return False


def _srun(nodes: int) -> list[str]:
    return ["srun", "-N", str(nodes), "-n", str(nodes)]


def _found(script: str) -> str:
    path = Path(script)
    if path.exists():
        return script
    here = Path.cwd()
    root = next(
        (f for f in (here, *here.parents) if (f / "pyproject.toml").exists() or (f / "source_code").is_dir()), here
    )
    if not path.is_absolute() and (root / path).exists():
        return os.path.relpath(root / path, here)
    where = f"{here}" if root == here else f"{here} nor in {root}"
    raise FileNotFoundError(f"there is no script {script!r} in {where}. Check its name and folder.")


def _defaults(one_node: bool, environ: Mapping[str, str]) -> dict[str, str]:
    wanted = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PET_TEE": "3",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    if one_node:
        # Port 0 of the loopback address: no clash with a neighbour, no look-up of the machine's own name.
        wanted |= {
            "PET_STANDALONE": "1",
            "PET_LOCAL_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
    return {name: value for name, value in wanted.items() if name not in environ}
