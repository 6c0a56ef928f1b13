"""A throw-away Slurm cluster on this machine: a controller, virtual nodes ``n1``, ``n2``, …, GPUs
that are only names.

    python tests/slurm/cluster.py       # prints what to export, serves until Ctrl-C

Every file, socket and key lies in one folder, every port is one that was free, and what is started
is stopped by the PID files in that folder: no systemd, nothing under /etc or /run. Any user can run
it; as root nothing changes.
"""

import argparse
import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"

# Below Linux's ephemeral ports, so that a node which is started again finds its port free; the
# ports above these are where ranks meet under srun.
_PORTS = range(10_000, 15_000)
# Debian's daemons are not on a user's PATH
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
_UP_LIMIT_S = 30
_DOWN_LIMIT_S = 10


def missing_programs() -> list[str]:
    """Programs of Slurm and munge that are not installed."""
    return [name for name in PROGRAMS if not shutil.which(name, path=_PATH)]


@dataclass(frozen=True)
class Job:
    """A line of ``squeue``."""

    id: str
    name: str
    state: str
    reason: str


@dataclass(frozen=True)
class Cluster:
    """A running cluster with one partition, ``gpu``; a context manager that stops it."""

    folder: Path
    nodes: tuple[str, ...]

    @classmethod
    def start(
        cls,
        folder: Path,
        nodes: int = 2,
        gpus: int = 4,
        cpus: int = 8,
        first_job_id: int | None = None,
    ) -> "Cluster":
        """Start a cluster in ``folder`` and wait until every node is idle.

        Args:
            folder: made if it is not there. munge wants it, and every folder above it, to be
                readable by all and writable by its owner only (or sticky, as /tmp), and Unix
                sockets want its name to be short.
            nodes: virtual nodes, all on this machine.
            gpus: devices a node of the generic resource ``gpu``.
            cpus: processors a node claims to have, however many there are.
            first_job_id: by chance unless it is given.

        Raises:
            RuntimeError: if a program is missing, or the cluster does not come up; then nothing of
                it is left.
        """
        if missing := missing_programs():
            raise RuntimeError(f"{', '.join(missing)} not found: {INSTALL}")
        cluster = cls(folder.resolve(), tuple(f"n{i}" for i in range(1, nodes + 1)))
        if first_job_id is None:
            first_job_id = random.SystemRandom().randrange(1, 10_000) * 100
        cluster._write_files(gpus, cpus, first_job_id)
        try:
            cluster._launch(
                "munged",
                *(f"--{kind}-file={cluster.folder / file}" for kind, file in _MUNGE_FILES.items()),
                f"--socket={cluster.folder / 'munge.socket'}",
            )
            cluster._launch("slurmctld", "-f", str(cluster._conf))
            for name in cluster.nodes:
                cluster.start_node(name, wait=False)
            cluster._wait_until_idle(cluster.nodes)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs in its environment to use this cluster."""
        return {"SLURM_CONF": str(self._conf), "PATH": _PATH}

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Cancel every job and end every daemon; the folder stays. Safe to call repeatedly."""
        # Jobs of a lost node end when the controller gives it up; the daemons are ended however
        # that goes.
        with contextlib.suppress(subprocess.SubprocessError, RuntimeError):
            self.cancel_all()
            self._wait_for("jobs to end", lambda: not self.jobs(), _DOWN_LIMIT_S)
        for name in self.nodes:
            self.stop_node(name)
        for daemon in ("slurmctld", "munged"):
            self._end(daemon)

    def stop_node(self, name: str) -> None:
        """End the node's slurmd, as if the machine was lost; its steps run on until Slurm notices.

        It is safe to call this repeatedly.
        """
        self._end(name)

    def start_node(self, name: str, wait: bool = True) -> None:
        """Start the node's slurmd, and ``wait`` until the controller calls the node idle."""
        self._launch("slurmd", "-f", str(self._conf), "-N", name)
        if wait:
            self._wait_until_idle((name,))

    def jobs(self) -> list[Job]:
        """What is running, queued or completing."""
        lines = self._output("squeue", "--noheader", "--format=%i|%j|%T|%r").splitlines()
        return [Job(*line.split("|")) for line in lines]

    def cancel_all(self) -> None:
        """Cancel every job, whatever its state."""
        if jobs := self.jobs():
            self._output("scancel", *(job.id for job in jobs))

    def step_processes(self) -> dict[int, str]:
        """Processes that a job of this cluster started, by id, with what they run."""
        own = f"SLURM_CONF={self._conf}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                command = (
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
                if (
                    own in variables
                    and any(v.startswith(b"SLURM_JOB_ID=") for v in variables)
                    and command
                ):
                    found[int(folder.name)] = command
        return found

    def wait_until_empty(self, limit_s: float) -> list[str]:
        """Wait until no job and no process of a job is left; return those left after the limit."""
        limit = time.monotonic() + limit_s
        while left := [
            *map(str, self.jobs()),
            *(f"process {pid}: {c}" for pid, c in self.step_processes().items()),
        ]:
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        return left

    @property
    def _conf(self) -> Path:
        return self.folder / "slurm.conf"

    def _write_files(self, gpus: int, cpus: int, first_job_id: int) -> None:
        for folder in (self.folder, self.folder / "state", self.folder / "dev"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
        key = self.folder / _MUNGE_FILES["key"]
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        for i in range(gpus):
            # Slurm drops a GPU that is no character device, and looks through links.
            (self.folder / "dev" / f"gpu{i}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(
            f"Name=gpu File={self.folder}/dev/gpu[0-{gpus - 1}]\n"
        )
        controller_port, *ports = _free_ports(1 + len(self.nodes))
        node_lines = [
            f"NodeName={name} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
            f" RealMemory=4096 Gres=gpu:{gpus} State=UNKNOWN"
            for name, port in zip(self.nodes, ports, strict=True)
        ]
        self._conf.write_text(
            _CONF.format(
                folder=self.folder,
                host=_host(),
                user=getpass.getuser(),
                port=controller_port,
                first_job_id=first_job_id,
                node_lines="\n".join(node_lines),
                nodes=",".join(self.nodes),
            )
        )

    def _launch(self, *command: str) -> None:
        """Start a daemon, which returns once it runs in the background.

        It must not keep the caller's streams open.
        """
        done = subprocess.run(
            command,
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(
                f"{command[0]} ended with exit code {done.returncode}: {done.stdout}{done.stderr}"
            )

    def _output(self, *command: str) -> str:
        environ = {**os.environ, **self.environ}
        return subprocess.run(
            command, env=environ, check=True, capture_output=True, text=True, timeout=20
        ).stdout

    def _wait_until_idle(self, names: tuple[str, ...]) -> None:
        def idle() -> bool:
            states = self._output("sinfo", "--noheader", "--Node", "--format=%N %t").split("\n")
            return all(f"{name} idle" in states for name in names)

        self._wait_for(f"{', '.join(names)} to be idle", idle, _UP_LIMIT_S)

    def _wait_for(self, what: str, condition: Callable[[], bool], limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while True:
            # the controller does not answer yet
            with contextlib.suppress(subprocess.CalledProcessError):
                if condition():
                    return
            if time.monotonic() > limit:
                logs = "\n".join(
                    log.read_text()[-1000:] for log in sorted(self.folder.glob("*.log"))
                )
                raise RuntimeError(
                    f"waited {limit_s} s for {what}. Last lines of the logs:\n{logs}"
                )
            time.sleep(0.1)

    def _end(self, daemon: str) -> None:
        """End the process in a PID file, if it is still ours."""
        file = self.folder / f"{daemon}.pid"
        if not file.exists() or not (text := file.read_text().strip()):
            return
        pid = int(text)
        for number in (signal.SIGTERM, signal.SIGKILL):
            limit = time.monotonic() + _DOWN_LIMIT_S
            while _runs(pid, self.folder):
                os.kill(pid, number)
                time.sleep(0.05)
                if time.monotonic() > limit:
                    break
        file.unlink(missing_ok=True)


def _runs(pid: int, folder: Path) -> bool:
    """Return whether the process runs and serves ``folder``.

    A PID file may outlive its process, and another process may get the same id.
    """
    try:
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _free_ports(n: int) -> list[int]:
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == n:
            return ports
    raise RuntimeError(f"fewer than {n} free ports from {_PORTS.start} to {_PORTS.stop - 1}")


_MUNGE_FILES = {"key": "munge.key", "pid": "munged.pid", "log": "munged.log", "seed": "munge.seed"}

_CONF = """\
ClusterName=course
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=8
CredType=cred/munge
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1000
GresTypes=gpu
SlurmdParameters=config_overrides
# Without it an impossible request waits for ever.
EnforcePartLimits=ALL
ReturnToService=2
# Tests count their jobs at the end. Ports are made of job ids, so that clusters on this machine
# have different ones.
MinJobAge=3600
FirstJobId={first_job_id}
KillWait=2
SlurmctldTimeout=60
SlurmdTimeout=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{node_lines}
PartitionName=gpu Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def temporary_cluster(
    nodes: int = 2, gpus: int = 4, cpus: int = 8, first_job_id: int | None = None
) -> Iterator[Cluster]:
    """A cluster in a temporary folder, which goes with it."""
    # In /tmp, whatever TMPDIR says: its name is short, and munge trusts it.
    with (
        tempfile.TemporaryDirectory(prefix="slurm_", dir="/tmp") as folder,
        Cluster.start(Path(folder), nodes, gpus, cpus, first_job_id) as cluster,
    ):
        yield cluster


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("nodes", 2), ("gpus", 4), ("cpus", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    # Also where a shell that put us into the background has told us to ignore interrupts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        temporary_cluster(args.nodes, args.gpus, args.cpus) as cluster,
    ):
        print(f"export SLURM_CONF={cluster.environ['SLURM_CONF']}", flush=True)
        hint = "# for each terminal that is to see the cluster, also the one that starts JupyterLab"
        print(f"{hint}\n# Ctrl-C here, or kill {os.getpid()}, ends it", file=sys.stderr, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
