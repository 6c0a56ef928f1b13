"""Inside a rank: says what the rank is doing, and ends it when its caller is gone.

Every blocking call of ``torch.distributed`` ends in a method of ``ProcessGroup`` that returns a
``Work``, or in ``Work.wait``. `instrument` wraps these, so that the peer of a pending ``irecv`` is
known long after the call. The user's source line comes from the frames of the main thread.

This module imports the standard library only and nothing from its package. A copy of it named
``sitecustomize.py`` stands on the PYTHONPATH of torchrun's ranks, so Python runs it first in each
of their processes.
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

# Methods of ProcessGroup for each operation. torch 2.11 calls those with an underscore from its
# public functions.
_COLLECTIVES = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "all_gather": (
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "all_gather_single",
        "all_gather_single_coalesced",
        "_allgather_base",
    ),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "reduce_scatter": (
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "_reduce_scatter_base",
    ),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "barrier": ("barrier", "monitored_barrier"),
}
_POINT_TO_POINT = {"send": ("send",), "recv": ("recv", "recv_anysource")}
_CONNECT_S = 2.0
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True)
class WatchedCall:
    """A message or a collective that has begun.

    Attributes:
        operation: name of the function in ``torch.distributed``.
        group: global ranks of the process group.
        peer: global rank at the other end of a message; None for a collective and for a receive
            from any rank.
        collective: whether every rank of the group has to join.
    """

    operation: str
    group: tuple[int, ...]
    peer: int | None = None
    collective: bool = True


@dataclass(frozen=True)
class RankReport:
    """The state of a rank: the call it is in, and its source line.

    Attributes:
        call: the call; None outside ``torch.distributed``.
        file, line, text: the innermost source line outside this package, torch and the standard
            library.
    """

    rank: int
    call: WatchedCall | None
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
    """The call in which each thread is blocked, and the call to which each ``Work`` belongs."""

    def __init__(self) -> None:
        self._blocked: dict[int, WatchedCall] = {}
        self._pending: weakref.WeakKeyDictionary[Any, WatchedCall] = weakref.WeakKeyDictionary()
        # A cache, because asking torch takes longer than a small message does.
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
        """Return the call that ``thread`` is blocked in, else the call of any other thread.

        Backward runs in threads of its own.
        """
        # list(): other threads change the dict meanwhile.
        return self._blocked.get(thread) or next(iter(list(self._blocked.values())), None)


def instrument(c10d: ModuleType) -> None:
    """Wrap the blocking methods of ``c10d.ProcessGroup`` and ``c10d.Work``.

    No-op the second time, so it is safe to call repeatedly.
    """
    if getattr(c10d.ProcessGroup, "course_pp_calls", None) is not None:
        return
    calls = c10d.ProcessGroup.course_pp_calls = Calls()
    for operation, names in {**_COLLECTIVES, **_POINT_TO_POINT}.items():
        for name in names:
            # Not every version of torch has all of them.
            method = getattr(c10d.ProcessGroup, name, None)
            if method is not None:
                wrapped = _starting(method, name, operation=operation, c10d=c10d, calls=calls)
                setattr(c10d.ProcessGroup, name, wrapped)

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
        call = _call(c10d, calls, group=group, name=name, operation=operation, args=args)
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
        number = args[1]
        # Gloo ends the process for a number that is too large, and waits for ever for a negative
        # one.
        if not 0 <= number < len(ranks):
            to_or_from = "sends to" if name == "send" else "receives from"
            end = "last rank has nobody after it"
            if number < 0:
                end = "first rank has nobody before it"
            raise NoSuchRank(
                f"rank {group.rank()} {to_or_from} rank {number}, but the group's ranks are 0 to"
                f" {len(ranks) - 1}: in a ring, take it modulo {len(ranks)}; in a line, the {end}",
                number,
            )
        # NCCL can send a message to its own rank, gloo cannot.
        if number == group.rank() and "gloo" in str(group.name()):
            to_or_from = "send to" if name == "send" else "receive from"
            raise ValueError(
                f"rank {number} cannot {to_or_from} itself: messages go to another rank"
            )
        peer = ranks[number]
    return WatchedCall(operation, ranks, peer=peer, collective=operation not in _POINT_TO_POINT)


class NoSuchRank(ValueError):
    """A message to, or from, ``peer``, which is no rank of the group."""

    def __init__(self, text: str, peer: int) -> None:
        super().__init__(text)
        self.peer = peer

    def __reduce__(self) -> tuple[type[NoSuchRank], tuple[str, int]]:
        return type(self), (str(self), self.peer)


def report(rank: int) -> RankReport:
    """Return what this process, which is ``rank``, does now."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(cast(int, main))
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    calls = getattr(getattr(c10d, "ProcessGroup", None), "course_pp_calls", None)
    call = calls.current(main) if calls else None
    if call is None and c10d is not None and frame is not None:
        call = _unwrapped_call(frame, c10d)
    written = [f for f in _outwards(frame) if not _is_library(f.f_code.co_filename)]
    # The course's own frames only serve the user's line, so they come second.
    users = [f for f in written if not f.f_code.co_filename.startswith(_PACKAGE)]
    innermost = next(iter(users or written), None)
    if innermost is None:
        return RankReport(rank, call, file="", line=0, text="")
    file = innermost.f_code.co_filename
    # Between two lines a frame has no line number.
    line = innermost.f_lineno or innermost.f_code.co_firstlineno
    return RankReport(rank, call, file=file, line=line, text=linecache.getline(file, line).strip())


def _unwrapped_call(frame: FrameType, c10d: ModuleType) -> WatchedCall | None:
    """Find a call such as ``new_group``, which blocks before any Work exists.

    All ranks have to join such a call.
    """
    found = None
    for f in _outwards(frame):
        name = f.f_code.co_name
        # Not a name such as "<listcomp>".
        is_public = name.isidentifier() and not name.startswith("_")
        if is_public and f.f_code.co_filename == c10d.__file__:
            found = name  # the outermost one, which the user has called
    if found is None or found == "wrapper" or not c10d.is_initialized():
        return None
    return WatchedCall(found, tuple(range(c10d.get_world_size())))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(file: str) -> bool:
    here = os.path.dirname(os.path.abspath(__file__))
    # Generated code has a name such as "<frozen runpy>"; the user's own may have one of two.
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
    """Connect a process under torchrun to `run_torchrun`, and answer there until the process ends.

    The process sends JSON objects, one a line: its rank, process id and mark, then a report for
    each byte that comes in, then, if the script raises, the exception. When the connection ends, a
    rank ends its process group at once; the launcher gets SIGTERM.

    Args:
        address: a Unix socket, or a TCP port of the machine from which srun was called.
        rank: the rank of this process; None if it is the launcher.
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
        # torchrun ends its ranks when it is told to terminate.
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
    """End this process at once, and its process group if it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _connected(address: str) -> socket.socket:
    if address.isdigit():
        starter = (os.environ["SLURM_LAUNCH_NODE_IPADDR"], int(address))
        # A firewall between the nodes and the notebook's machine may drop the call. The run must
        # then go on unwatched, hence the limit.
        connection = socket.create_connection(starter, _CONNECT_S)
        connection.settimeout(None)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    return connection


class InstrumentOnImport(importlib.abc.MetaPathFinder):
    """A finder that instruments torch.distributed as soon as the script has imported it.

    To import torch here would cost a second in every process, also in those that need no torch.
    """

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
    # pop(): a process that the rank starts is no rank.
    attend(os.environ.pop("COURSE_PP_WATCH"), int(rank))
    sys.meta_path.insert(0, InstrumentOnImport())


def _run_shadowed_sitecustomize() -> None:
    # An environment may have a sitecustomize.py of its own, which ours hides.
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize" and "COURSE_PP_WATCH" in os.environ:
    # If nobody answers at the address, the run goes on without a watchdog.
    with contextlib.suppress(OSError, KeyError):
        _attend_from_the_start()
    _run_shadowed_sitecustomize()
