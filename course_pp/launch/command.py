"""From what a learner types after ``torchrun`` to what is run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from course_pp.launch.where import Needs, Place, decide

_FLAGS = {"--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank", "-h", "--help"}
# What torchrun, a cluster or `get_world_info` sets for a rank: a launcher that inherits it would pass for a rank.
_OF_A_RANK = {
    *(f"{prefix}RANK" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")),
    *(f"{prefix}WORLD_SIZE" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")),
    *("MASTER_ADDR", "MASTER_PORT"),
    *(f"TORCHELASTIC_{what}" for what in ("RESTART_COUNT", "MAX_RESTARTS", "RUN_ID", "USE_AGENT_STORE", "ERROR_FILE")),
    *(f"SLURM_{what}" for what in ("PROCID", "LOCALID", "NODEID", "GTIDS", "TASK_PID", "NTASKS", "NPROCS")),
    *(f"SLURM_{what}" for what in ("NTASKS_PER_NODE", "TASKS_PER_NODE", "CPUS_PER_TASK", "TRES_PER_TASK")),
    # What the surrounding job asked for its own tasks; srun would ask the same for ours, of which there is one a node.
    *(f"SLURM_{what}" for what in ("GPUS", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "NTASKS_PER_GPU", "CPUS_PER_GPU")),
    *(f"SLURM_{what}" for what in ("NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "GPU_BIND", "DISTRIBUTION")),
    *(f"SLURM_{what}" for what in ("THREADS_PER_CORE", "HINT", "EXACT")),
    # Would cut the ranks off from labels and watchdog, or label their lines a second time.
    *("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV", "SLURM_LABELIO"),
}
_OF_A_STEP = ("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MEM_BIND")
_RENDEZVOUS = ("--rdzv-", "--master-", "--node-rank", "--standalone")
# Nodes number themselves as Slurm does, and meet at the first one, by address: its name may resolve nowhere.
_MEETING = """\
head=$(scontrol show node "$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)" \
| sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p")
: "${head:?Slurm tells no address of the first node}"
port=$((15000 + (7919 * SLURM_JOB_ID + SLURM_STEP_ID) % 15000))"""
# A set-up line that fails ends the task, and is named: many fail without a word.
_STRICT = 'set -e; trap "echo set-up failed: \\$BASH_COMMAND >&2" ERR'
_NODE_OPTIONS = " --node-rank=$SLURM_NODEID --master-addr=$head --master-port=$port"


@dataclass(frozen=True)
class Command:
    """A launch, ready to run.

    Attributes:
        argv: what is executed.
        shown: the same as a learner would type it in the current folder.
        environ: variables to add; they keep ``shown`` as short as it was typed.
        place: where the ranks run.
    """

    argv: tuple[str, ...]
    shown: str
    environ: Mapping[str, str]
    place: Place

    @property
    def local(self) -> bool:
        """Whether the ranks run on this machine."""
        return self.place.local


def build(
    args: Sequence[str],
    where: str | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> Command:
    """Build the launch of ``torchrun ARGS``.

    Under Slurm torchrun itself runs as one task on each node. On one node, the rendezvous takes a free port; several
    nodes meet at the first one. Variables that are set already win, and so does a rendezvous among the options.

    Raises:
        ValueError: no script is named; `where.decide` and `load_site` refuse.
        FileNotFoundError: the script is neither here nor below the folder that holds pyproject.toml or source_code.
    """
    __tracebackhide__ = True
    environ = os.environ if environ is None else environ
    args = list(args)
    at = script_index(args)
    if at is None:
        raise ValueError(
            f"no script in `torchrun {shlex.join(args)}` (args). "
            "Name one after the options, for example --nproc-per-node=2 source_code/pipeline_test.py"
        )
    options = [_dashed(option) for option in args[:at]]
    if not {"-m", "--module", "--no-python"} & set(options):
        args[at] = _found(args[at])
    nodes = _number(options, "--nnodes") or 1
    ranks = _number(options, "--nproc-per-node") if any(o.startswith("--nproc-per-node") for o in options) else 1
    chosen = any(o.startswith(_RENDEZVOUS) for o in options)
    place = decide(Needs(nodes, ranks, timeout_s), where, environ)
    meets = nodes > 1 and not chosen and not place.local
    run = [place.site.python or sys.executable, "-m", "torch.distributed.run"]
    return Command(
        argv=tuple(on_nodes(place, run, args, meets)),
        shown=shlex.join(on_nodes(place, ["torchrun"], args, meets)),
        environ=_defaults(nodes == 1 and not chosen, 1 if place.local else place.site.cpus_per_rank, environ),
        place=place,
    )


def on_nodes(place: Place, program: Sequence[str], args: Sequence[str], meets: bool = False) -> list[str]:
    """Return ``program args`` as it runs at a place: behind srun, in its container, after its set-up lines.

    ``meets`` adds torchrun's options by which several nodes find each other.
    """
    if place.local:
        return [*program, *args]
    program = [*shlex.split(place.site.container), *program]
    if not place.site.setup and not meets:
        return [*place.srun, *program, *args]
    last = f'exec {shlex.join(program)}{_NODE_OPTIONS if meets else ""} "$@"'
    # What stands on standard input is for the program.
    setup = [_STRICT, "{", *place.site.setup, "} </dev/null"] if place.site.setup else []
    lines = [*setup, *([_MEETING] if meets else []), last]
    return [*place.srun, "bash", "-c", "\n".join(lines), "bash", *args]


def of_no_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that describe one rank, or one step, of another run."""
    return {
        name: value for name, value in environ.items() if name not in _OF_A_RANK and not name.startswith(_OF_A_STEP)
    }


def script_index(args: Sequence[str]) -> int | None:
    """Return the index of the script, where torchrun's own options end. Most options take a value."""
    at = 0
    while at < len(args):
        if not args[at].startswith("-"):
            return at
        at += 1 if "=" in args[at] or _dashed(args[at]) in _FLAGS else 2
    return None


def _dashed(option: str) -> str:
    """Spell an option with dashes; torchrun takes underscores, too."""
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value


def _number(options: Sequence[str], wanted: str) -> int | None:
    """Return the value of an option, of ``MIN:MAX`` the larger; None if it is not given or no number."""
    for option, following in zip_longest(options, options[1:], fillvalue=""):
        name, _, value = option.partition("=")
        if name == wanted:
            most = (value or following).rsplit(":", 1)[-1]
            return int(most) if most.isdigit() else None
    return None


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


def _defaults(one_node: bool, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    wanted = {
        "OMP_NUM_THREADS": str(threads),
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
