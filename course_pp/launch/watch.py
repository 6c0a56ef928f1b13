"""Inside a rank: answers what the rank is doing, and ends it when nobody is left to ask.

Every blocking call of ``torch.distributed`` ends in a method of ``ProcessGroup`` that returns a
``Work``, or in ``Work.wait``. `instrument` wraps these, so that the peer of a pending ``irecv`` is
known long after the call. The user's source line comes from the frames of the main thread.

This module imports the standard library only and nothing from its package: a copy of it named
``sitecustomize.py`` stands on the PYTHONPATH of ranks of torchrun, and so runs first in each of
their processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType, TracebackType
from typing import Any, cast

# Of each operation the methods; the underscored ones are what torch 2.11 calls from its public
# functions.
_COLLECTIVES = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "all_gather": (
        *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced"),
        *("all_gather_single", "all_gather_single_coalesced", "_allgather_base"),
    ),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "reduce_scatter": (
        *("reduce_scatter", "reduce_scatter_tensor_coalesced"),
        *("reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base"),
    ),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "barrier": ("barrier", "monitored_barrier"),
}
_CONNECT_S = 2.0
_POINT_TO_POINT = {"send": ("send",), "recv": ("recv", "recv_anysource")}


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True)
class WatchedCall:
    """A message or a collective that has begun."""

    operation: str  # its name in ``torch.distributed``
    group: tuple[int, ...]  # global ranks of the process group
    # global rank at the other end of a message; None for a receive from any rank, too
    peer: int | None = None
    collective: bool = True  # whether every rank of the group has to join


@dataclass(frozen=True)
class RankReport:
    """What a rank does now, and its innermost source line outside this package, torch and the standard library."""

    rank: int
    call: WatchedCall | None  # None when it is not in a call of ``torch.distributed``
    file: str
    line: int
    text: str

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RankReport:
        call = fields["call"]
        if call is not None:
            call = WatchedCall(**{**call, "group": tuple(call["group"])})
        return cls(**{**fields, "call": call})


class Calls:
    """Which call each thread is blocked in, and which call each pending ``Work`` belongs to."""

    def __init__(self) -> None:
        self._blocked: dict[int, WatchedCall] = {}
        self._pending: weakref.WeakKeyDictionary[Any, WatchedCall] = weakref.WeakKeyDictionary()
        # Asking torch takes longer than a small message does.
        self._ranks: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()

    def ranks_of(self, group: Any, c10d: ModuleType) -> tuple[int, ...]:
        """Return the global ranks of ``group``, or its own numbering if it was never registered."""
        ranks = self._ranks.get(group)
        if ranks is None:
            try:
                ranks = tuple(c10d.get_process_group_ranks(group))
            except Exception:
                ranks = tuple(range(group.size()))
            self._ranks[group] = ranks
        return ranks

    @contextlib.contextmanager
    def blocked_in(self, call: WatchedCall | None) -> Iterator[None]:
        thread = threading.get_ident()
        outer = self._blocked.get(thread)
        if call is not None:
            self._blocked[thread] = call
        try:
            yield
        finally:
            if outer is None:
                self._blocked.pop(thread, None)
            else:
                self._blocked[thread] = outer

    # Graders listen at these two: which messages were waited for.

    def begin(self, work: Any, call: WatchedCall) -> None:
        with contextlib.suppress(TypeError):
            self._pending[work] = call

    def of(self, work: Any) -> WatchedCall | None:
        return self._pending.get(work)

    def current(self, thread: int) -> WatchedCall | None:
        """Return the call that ``thread`` is blocked in, else that of any other: backward has its own threads."""
        return self._blocked.get(thread) or next(iter(list(self._blocked.values())), None)


def instrument(c10d: ModuleType) -> None:
    """Wrap the blocking methods of ``c10d.ProcessGroup`` and ``c10d.Work``; a second call changes nothing."""
    if getattr(c10d.ProcessGroup, "course_pp_calls", None) is not None:
        return
    calls = c10d.ProcessGroup.course_pp_calls = Calls()
    for operation, names in {**_COLLECTIVES, **_POINT_TO_POINT}.items():
        for name in names:
            method = getattr(c10d.ProcessGroup, name, None)
            if method is not None:
                setattr(c10d.ProcessGroup, name, _starting(method, name, operation, c10d, calls))

    wait = c10d.Work.wait

    @functools.wraps(wait)
    def watched_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        with calls.blocked_in(calls.of(work)):
            return wait(work, *args, **kwargs)

    c10d.Work.wait = watched_wait


def _starting(
    method: Callable[..., Any], name: str, operation: str, c10d: ModuleType, calls: Calls
) -> Callable[..., Any]:
    @functools.wraps(method)
    def start(group: Any, *args: Any, **kwargs: Any) -> Any:
        call = _call(c10d, calls, group, name, operation, args)
        with calls.blocked_in(call):
            work = method(group, *args, **kwargs)
        if work is not None:
            calls.begin(work, call)
        return work

    return start


def _call(
    c10d: ModuleType, calls: Calls, group: Any, name: str, operation: str, args: Sequence[Any]
) -> WatchedCall:
    ranks = calls.ranks_of(group, c10d)
    peer = None
    if name in ("send", "recv") and len(args) > 1:
        # Left to the library, a number that is too large ends the process and a negative one waits
        # for ever.
        if not 0 <= args[1] < len(ranks):
            to_or_from = "sends to" if name == "send" else "receives from"
            end = (
                "first rank has nobody before it"
                if args[1] < 0
                else "last rank has nobody after it"
            )
            raise NoSuchRank(
                f"rank {group.rank()} {to_or_from} rank {args[1]}, but the group's ranks are 0 to"
                f" {len(ranks) - 1}: in a ring, take it modulo {len(ranks)}; in a line, the {end}",
                args[1],
            )
        if args[1] == group.rank() and "gloo" in str(group.name()):
            to_or_from = "send to" if name == "send" else "receive from"
            raise ValueError(
                f"rank {args[1]} cannot {to_or_from} itself: messages go to another rank"
            )
        peer = ranks[args[1]]
    return WatchedCall(operation, ranks, peer, collective=operation not in _POINT_TO_POINT)


class NoSuchRank(ValueError):
    """A message was to go to, or to come from, ``peer``, which is no rank of the group."""

    def __init__(self, text: str, peer: int) -> None:
        super().__init__(text)
        self.peer = peer

    def __reduce__(self) -> tuple[type[NoSuchRank], tuple[str, int]]:
        return type(self), (str(self), self.peer)


def report(rank: int) -> RankReport:
    main = threading.main_thread().ident
    frame = sys._current_frames().get(cast(int, main))
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    calls = getattr(getattr(c10d, "ProcessGroup", None), "course_pp_calls", None)
    call = calls.current(main) if calls else None
    if call is None and c10d is not None and frame is not None:
        call = _unwrapped_call(frame, c10d)
    written = [f for f in _outwards(frame) if not _is_library(f.f_code.co_filename)]
    # The course's own helpers wait for what the user's line asked of them.
    user = next(
        (f for f in written if not f.f_code.co_filename.startswith(_PACKAGE)),
        next(iter(written), None),
    )
    if user is None:
        return RankReport(rank, call, "", 0, "")
    # Between two lines a frame has none.
    file, line = user.f_code.co_filename, user.f_lineno or user.f_code.co_firstlineno
    return RankReport(rank, call, file, line, linecache.getline(file, line).strip())


def _unwrapped_call(frame: FrameType, c10d: ModuleType) -> WatchedCall | None:
    """Find a call such as ``new_group``, which blocks before any Work exists; all ranks have to join it."""
    found = None
    for f in _outwards(frame):
        name = f.f_code.co_name
        if (
            f.f_code.co_filename == c10d.__file__
            and not name.startswith("_")
            and name.isidentifier()
        ):
            found = name
    if found is None or found == "wrapper" or not c10d.is_initialized():
        return None
    return WatchedCall(found, tuple(range(c10d.get_world_size())))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(file: str) -> bool:
    here = os.path.dirname(os.path.abspath(__file__))
    if file.startswith("<") and not has_name_of_cell(file) and file not in ("<stdin>", "<string>"):
        return True
    if re.search(r"[\\/](site|dist)-packages[\\/](torch|cloudpickle|tqdm)[\\/]", file):
        return True
    in_stdlib = file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file
    return file.startswith(here) or in_stdlib


def has_name_of_cell(file: str) -> bool:
    """Return whether ``file`` is named as IPython names cells."""
    return "ipykernel_" in file or file.startswith("<ipython-input")


def attend(address: str, rank: int | None) -> None:
    """Connect a process under torchrun to whoever started it, and answer there until it ends.

    The ``address`` is a Unix socket, or a TCP port of the machine from which srun was called. One
    JSON object a line goes out: who this is, then an answer to each line that comes in, then, if
    the script raises, the exception. When the connection ends, a rank ends its process group at
    once; the launcher (``rank`` None) is asked to terminate.
    """
    connection = _connected(address)
    lock = threading.Lock()

    def tell(fields: dict[str, Any]) -> None:
        with lock, contextlib.suppress(OSError):
            connection.sendall(json.dumps(fields).encode() + b"\n")

    def answer() -> None:
        with contextlib.suppress(OSError):
            while connection.recv(1):
                if rank is not None:
                    tell({"report": asdict(report(rank))})
        if rank is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            end_this_process()

    tell({"rank": rank, "pid": os.getpid(), "mark": os.environ.get("COURSE_PP_TORCHRUN")})
    threading.Thread(target=answer, name="course_pp-watch", daemon=True).start()
    if rank is not None:
        show = sys.excepthook

        def tell_and_show(
            kind: type[BaseException], value: BaseException, tb: TracebackType | None
        ) -> None:
            summary = "".join(traceback.format_exception_only(kind, value)).strip()
            elsewhere = bool(getattr(value, "began_elsewhere", False))
            tell({"raised": summary, "at": time.monotonic(), "elsewhere": elsewhere})
            show(kind, value, tb)

        sys.excepthook = tell_and_show


def end_this_process() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _connected(address: str) -> socket.socket:
    if address.isdigit():
        # A firewall between the nodes and where the notebook runs drops the call, and the run goes
        # on unwatched.
        connection = socket.create_connection(
            (os.environ["SLURM_LAUNCH_NODE_IPADDR"], int(address)), _CONNECT_S
        )
        connection.settimeout(None)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    return connection


class InstrumentOnImport(importlib.abc.MetaPathFinder):
    """On ``sys.meta_path``: instruments torch.distributed as soon as the script has imported it."""

    _target = "torch.distributed.distributed_c10d"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_instrument(module: ModuleType) -> None:
                run(module)
                instrument(module)

            loader.exec_module = run_and_instrument
        return spec


def _attend_from_the_start() -> None:
    rank = os.environ.get("RANK")
    if rank is None:
        attend(os.environ["COURSE_PP_WATCH"], None)
        return
    # What the rank starts in turn is no rank.
    attend(os.environ.pop("COURSE_PP_WATCH"), int(rank))
    sys.meta_path.insert(0, InstrumentOnImport())


def _run_shadowed_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.machinery.PathFinder.find_spec(
        "sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != here]
    )
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize" and "COURSE_PP_WATCH" in os.environ:
    # Where the address cannot be reached the run goes on without a watchdog.
    with contextlib.suppress(OSError, KeyError):
        _attend_from_the_start()
    _run_shadowed_sitecustomize()
