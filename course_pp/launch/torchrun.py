"""``run_torchrun``: a torchrun that raises if a rank fails or hangs, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from course_pp.base.arguments import checked
from course_pp.launch import watch
from course_pp.launch.errors import (
    LaunchError,
    RanksHung,
    explain,
    is_echo,
    keep_first_frame,
    signal_name,
    waits_from,
)
from course_pp.launch.on_slurm import TASKS
from course_pp.launch.process import LAST_LINES, Command, Process, shared_folder
from course_pp.launch.ranks import refuse_bad_limit
from course_pp.launch.slurm import is_news
from course_pp.launch.surroundings import Lines, show
from course_pp.launch.watch import RankReport
from course_pp.launch.where import Needs, decide

_FLAGS = {
    "--standalone",
    "-m",
    "--module",
    "--no-python",
    "--run-path",
    "--virtual-local-rank",
    "-h",
    "--help",
}
_RENDEZVOUS = ("--rdzv-", "--master-", "--node-rank", "--standalone")
_ANSWER_LIMIT_S = 2.0
# Anyone can connect to a port: drop a connection whose first bytes do not carry our mark.
_MOST_INTRODUCTION_BYTES = 4096
_MARK = "COURSE_PP_TORCHRUN"
_SOCKET = "watch"
# The address of a Unix socket, with the zero at its end, has 104 bytes on macOS and 108 on Linux.
_MOST_ADDRESS_BYTES = 103


@checked
def run_torchrun(
    args: Sequence[str], *, timeout_s: float = 300.0, where: str | None = None
) -> tuple[str, ...]:
    """Run ``torchrun ARGS``; print the place, the exact command, and the ranks' lines with labels.

    Inside a Slurm job the ranks run in that job. Next to a cluster they run in a job of their own,
    and the job that `on_ranks` keeps for its next call is given up. Otherwise they run on this
    machine. torchrun labels the text that it finds when it looks, so a line that a rank writes in
    pieces may come out in pieces.

    Args:
        args: words that a learner types after ``torchrun``. The script is looked for here, then
            from the root of the repository.
        timeout_s: limit in seconds for the whole run, without the wait in a queue.
        where: ``"local"``, ``"slurm"``, or None to choose as above.

    Returns:
        The labelled lines, in the order in which they were printed.

    Raises:
        LaunchError: a rank failed, or Slurm refused or ended the job.
        RanksHung: ranks still ran at the limit; the message says which rank waits for which.
        FileNotFoundError: there is no such script.
    """
    __tracebackhide__ = True  # a reader looks for the line of the cell, not for ours
    try:
        refuse_bad_limit(timeout_s)
        command = build(args, where, timeout_s)
        print(f"{command.place.said}\n$ {command.shown}", flush=True)
        if not command.place.local and command.place.job is None:
            TASKS.release()
        with _Launched(command) as run:
            return run.follow(timeout_s)
    except Exception as error:
        keep_first_frame(error)
        raise


def torchrun_magic(line: str) -> None:
    """Run ``torchrun ARGS...`` for ``%torchrun [--timeout SECONDS] [--local] ARGS...``.

    The cell fails if a rank fails. ``--timeout`` is the limit after the wait in a queue (300 s
    unless given); ``--local`` stays on this machine.
    """
    __tracebackhide__ = True
    args, timeout_s, local = split_magic(line)
    run_torchrun(args, timeout_s=timeout_s, where="local" if local else None)


def split_magic(line: str) -> tuple[list[str], float, bool]:
    """Return (torchrun's arguments, seconds, local): the line without the magic's own options."""
    args = shlex.split(line)
    timeout_s = 300.0
    local = False
    at = 0
    # Only options before the script are ours; later ones belong to the script.
    while at < len(args) and args[at].startswith("-"):
        option, equals, value = args[at].partition("=")
        if option == "--local":
            local = True
            del args[at]
        elif option == "--timeout":
            words = 1 if equals else 2
            value = value or "".join(args[at + 1 : at + 2])
            try:
                timeout_s = float(value)
            except ValueError:
                raise ValueError(f"--timeout {value!r} is not a number of seconds.") from None
            del args[at : at + words]
        else:
            at += _words(args[at])
    return args, timeout_s, local


def build(args: Sequence[str], where: str | None = None, timeout_s: float = 300.0) -> Command:
    """Build the launch of ``torchrun ARGS``.

    Under Slurm torchrun itself runs as one task on each node. On one node, the rendezvous takes a
    free port; several nodes meet at the first one. A rendezvous among the options takes precedence
    over ours, and so do variables that are set already.
    """
    __tracebackhide__ = True
    args = list(args)
    at = script_index(args)
    if at is None:
        raise ValueError(
            f"no script in `torchrun {shlex.join(args)}` (args). Name one after the options, for"
            " example --nproc-per-node=2 source_code/pipeline_test.py"
        )
    options = [_dashed(option) for option in args[:at]]
    if not {"-m", "--module", "--no-python"} & set(options):
        args[at] = _found(args[at])

    nodes = _number(options, "--nnodes") or 1
    ranks: int | None = 1
    if any(option.startswith("--nproc-per-node") for option in options):
        ranks = _number(options, "--nproc-per-node")  # None for the word "gpu"
    place = decide(Needs(nodes, ranks, timeout_s), where)

    chosen = any(option.startswith(_RENDEZVOUS) for option in options)
    meets = nodes > 1 and not chosen and not place.local
    threads = 1 if place.local else place.site.cpus_per_rank
    run = [place.site.python or sys.executable, "-m", "torch.distributed.run"]
    return Command(
        argv=tuple(place.command(run, args, meets=meets)),
        shown=shlex.join(place.command(["torchrun"], args, meets=meets)),
        environ=_defaults(nodes == 1 and not chosen, threads),
        place=place,
    )


def script_index(args: Sequence[str]) -> int | None:
    """Return the index of the script, at which torchrun's own options end."""
    at = 0
    while at < len(args):
        if not args[at].startswith("-"):
            return at
        at += _words(args[at])
    return None


def _words(option: str) -> int:
    """Return how many words an option of torchrun takes: most take a value as the second one."""
    return 1 if "=" in option or _dashed(option) in _FLAGS else 2


def _dashed(option: str) -> str:
    """Spell an option with dashes. torchrun takes underscores, too."""
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value


def _number(options: Sequence[str], wanted: str) -> int | None:
    """Return the value of an option; None if it is not given or is no number.

    The value of ``MIN:MAX`` is MAX.
    """
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
    root = here
    for folder in (here, *here.parents):
        # A working copy from a wheel has the scripts, but no pyproject.toml.
        if (folder / "pyproject.toml").exists() or (folder / "source_code").is_dir():
            root = folder
            break
    if not path.is_absolute() and (root / path).exists():
        return os.path.relpath(root / path, here)
    where = f"{here}" if root == here else f"{here} nor in {root}"
    raise FileNotFoundError(f"there is no script {script!r} in {where}. Check its name and folder.")


def _defaults(one_node: bool, threads: int) -> dict[str, str]:
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PET_TEE": "3",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    if one_node:
        # A free port cannot clash with a neighbour's run. The loopback address needs no look-up of
        # the machine's own name, which fails on some laptops.
        wanted |= {
            "PET_STANDALONE": "1",
            "PET_LOCAL_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
    return {name: value for name, value in wanted.items() if name not in os.environ}


class _Peer:
    """A connection to the watchdog's socket, which a process of the run has made, or a stranger.

    Attributes:
        known: whether the other side has shown the ``mark``, a secret of the run's own processes.
        raised: the exception that the rank raised: a sentence, its time, and whether another rank's
            failure was its cause.
    """

    def __init__(self, connection: socket.socket, mark: str, one_clock: bool) -> None:
        self.connection = connection
        self._mark = mark
        self._one_clock = one_clock
        self.known = False
        self.heard_bytes = 0
        self.rank: int | None = None
        self.pid = 0
        self.report: RankReport | None = None
        self.raised: tuple[str, float, bool] | None = None
        self.gone = False

    def tell(self, line: str) -> None:
        """Take one line that came over the connection; ignore a stranger's."""
        try:
            fields: dict[str, Any] = json.loads(line)
            # Only processes of this run know the mark. A plain == would tell a stranger by its time
            # how much of a guess is right.
            introduced = self.known or hmac.compare_digest(
                fields["mark"].encode(), self._mark.encode()
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return
        if not introduced:
            return
        if not self.known:
            self.known = True
            self.rank = fields["rank"]
            self.pid = fields["pid"]
        elif "report" in fields:
            self.report = RankReport.from_dict(fields["report"])
        else:
            # The clocks of two nodes cannot be compared, so the moment of arrival counts.
            at = fields["at"] if self._one_clock else time.monotonic()
            self.raised = (fields["raised"], at, fields["elsewhere"])


class _Launched(Process):
    """One launcher with its ranks. Leaving the context ends them all.

    The ranks answer over the watchdog's socket, which `watch` connects to in each of them.
    """

    def __init__(self, command: Command) -> None:
        self._mark = uuid.uuid4().hex
        self._peers: list[_Peer] = []
        with contextlib.ExitStack() as started:
            if command.place.local:
                folder = Path(started.enter_context(_short_folder()))
                self._listener = started.enter_context(socket.socket(socket.AF_UNIX))
                self._listener.bind(str(folder / _SOCKET))
            else:
                # Ranks on other nodes cannot reach a socket in a folder, so we take a free port.
                folder = Path(started.enter_context(shared_folder(command.place.site.folder)))
                self._listener = started.enter_context(socket.socket(socket.AF_INET))
                self._listener.bind(("", 0))
            self._listener.listen(socket.SOMAXCONN)
            super().__init__(command, self._environ(folder), folder, started)
        self.watch(self._listener, self._accept)

    def follow(self, timeout_s: float) -> tuple[str, ...]:
        """Print the ranks' lines until all ranks have ended, and return the lines."""
        __tracebackhide__ = True
        self.wait(timeout_s)
        if (error := self.error()) is not None:
            raise error
        # Warnings of a launcher whose ranks all ended well.
        for line in self.launcher_said:
            if not is_news(line):
                show("stderr", line)
        return tuple(self.printed)

    def _environ(self, folder: Path) -> dict[str, str]:
        site = folder / "site"
        site.mkdir()
        shutil.copyfile(watch.__file__, site / "sitecustomize.py")
        (folder / "logs").mkdir()
        address = self._listener.getsockname()
        environ = {
            # Python runs a sitecustomize.py on this path first in every process.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
            "COURSE_PP_WATCH": address if isinstance(address, str) else str(address[1]),
            _MARK: self._mark,
        }
        if "PET_LOG_DIR" not in os.environ:
            environ["PET_LOG_DIR"] = str(folder / "logs")
        return environ

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The process is gone again, or we have as many files open as we may.
            return
        peer = _Peer(self._open.enter_context(connection), self._mark, one_clock=self.job is None)
        self._peers.append(peer)
        self.watch(connection, partial(self._hear, peer, Lines(peer.tell)))

    def _hear(self, peer: _Peer, lines: Lines) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = peer.connection.recv(1 << 16)
        lines.feed(data)
        peer.heard_bytes += len(data)
        # The first line of our own processes is short, and carries the mark.
        introduced = b"\n" in data or peer.heard_bytes > _MOST_INTRODUCTION_BYTES
        stranger = introduced and not peer.known
        if not data or stranger:
            peer.gone = True
            self.forget(peer.connection)
            peer.connection.close()
            if not peer.known:
                self._peers.remove(peer)
        elif self.job is not None and peer.known:
            self.job.started = True

    def a_rank_failed(self) -> bool:
        return any(_failed_ranks("\n".join(self.launcher_said)))

    def failure(self, exit_code: int) -> LaunchError:
        failed = dict(_failed_ranks("\n".join(self.launcher_said)))
        raised = {
            peer.rank: peer.raised for peer in self._peers if peer.rank is not None and peer.raised
        }
        if not failed:
            # With exit code 2 the arguments are wrong. The usage comes first, and only the last
            # line says which argument.
            shown = 1 if exit_code == 2 else LAST_LINES
            said = "\n".join(self.launcher_said[-shown:])
            return LaunchError(
                f"torchrun ended with exit code {exit_code} and named no rank. It said:\n{said}"
            )

        def precedence(rank: int) -> tuple[bool, float, bool]:
            summary, at, elsewhere = raised.get(rank, ("", float("inf"), False))
            # A rank that ended with SIGTERM was most likely ended by the launcher, because of
            # another rank.
            return is_echo(summary, elsewhere), at, failed[rank] == -signal.SIGTERM

        first = min(failed, key=precedence)
        code = failed[first]
        how = f"exit code {code}" if code >= 0 else signal_name(-code)
        if first in raised:
            # Our sentence goes on behind the message, which may end with a full stop.
            summary, _, _ = raised[first]
            how += f": {summary.removesuffix('.')}"
        last = self.ranks_said[first, "stderr"] or self.ranks_said[first, "stdout"]
        lines = "\n".join(["Its last lines:", *last]) if last else "It printed nothing."
        return LaunchError(f"rank {first} failed with {how}. {lines}")

    def hung(self, seconds: float) -> RanksHung:
        asked = [peer for peer in self._peers if peer.rank is not None and not peer.gone]
        for peer in asked:
            with contextlib.suppress(OSError):
                peer.connection.sendall(b"?")
        limit = time.monotonic() + _ANSWER_LIMIT_S
        while any(peer.report is None and not peer.gone for peer in asked):
            if time.monotonic() >= limit:
                break
            self.poll(limit - time.monotonic())
        # After a restart a rank has several connections. The last one counts.
        known = {peer.rank: peer for peer in self._peers if peer.rank is not None}
        waits = waits_from((rank, known[rank].report, known[rank].gone) for rank in sorted(known))
        if not waits:
            return RanksHung(
                f"still running after {seconds:g} s, and no rank has started that could be asked."
            )
        return RanksHung(explain(waits, seconds), waits)

    def end_ranks(self) -> None:
        """End what torchrun leaves behind on this machine: each rank leads a session of its own."""
        if self.job is not None:
            return  # the process ids are of other machines, where srun ends its ranks
        for peer in self._peers:
            if not peer.gone and peer.rank is not None:
                _kill(peer.pid)
        # A rank may have lost its connection, or started processes of its own.
        for pid in _marked(self._mark):
            if pid != self.pid:
                _kill(pid)


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder in which a socket can be bound.

    It lies in /tmp if the name of the usual place is too long.
    """
    make = partial(tempfile.TemporaryDirectory, prefix="course_pp_", ignore_cleanup_errors=True)
    folder = make()
    address = os.fsencode(os.path.join(folder.name, _SOCKET))
    # The folder also goes on PYTHONPATH, which a colon in its name would cut in two.
    if os.pathsep not in folder.name and len(address) <= _MOST_ADDRESS_BYTES:
        return folder
    folder.cleanup()
    return make(dir="/tmp")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> Iterator[int]:
    """Yield the ids of processes whose environment carries ``mark``; none where it is not shown."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                yield int(entry.parent.name)


def _failed_ranks(report: str) -> Iterator[tuple[int, int]]:
    """Yield (rank, exit code) of each failure in torchrun's closing report."""
    for match in re.finditer(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+)", report):
        yield int(match[1]), int(match[2])
