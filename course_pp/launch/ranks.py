"""``on_ranks``: run one function on several real processes and get its results back."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from course_pp.base.arguments import check_arguments, shown
from course_pp.launch import rank as in_rank
from course_pp.launch.channel import RankJob, pickled
from course_pp.launch.crew import Crew
from course_pp.launch.errors import keep_first_frame
from course_pp.launch.on_slurm import TASKS, RemoteCall
from course_pp.launch.surroundings import job_here, standard_descriptors_taken
from course_pp.launch.where import Needs, decide, on_a_node

_MOST_RANKS = 4096  # more would bring one machine to a standstill
# select() counts milliseconds in 32 bits, hence at most 24 days. Torch's store and gloo count on.
_MOST_S = 1_000_000


def on_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    threads: int = 1,
    where: str | None = None,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``n`` processes, and return their results in rank order.

    The process group is ready when ``fn`` begins. Lines that ranks print appear here, each labelled
    with its rank. However the call ends, no process is left behind.

    Args:
        fn: function whose first parameter is the rank; a cell may define it. The function, ``args``
            and its results must pickle.
        timeout_s: limit in seconds, counted from the moment when all ranks are ready.
        backend: backend of the process group: ``"gloo"``, ``"nccl"`` (device = rank), or None for
            no process group. With None, ``init_process_group`` with ``env://`` works in ``fn``.
        threads: intra-operation threads of each rank.
        where: ``"local"``, ``"slurm"`` (one node of a cluster), or None. None takes the node of the
            Slurm job that surrounds this process. Without such a job it takes a job of its own
            where a cluster answers, else this machine. That job is kept for the next calls, and has
            GPUs unless ``backend`` is gloo.

    Raises:
        Exception: the one that the first failing rank raised, with that rank's traceback as its
            cause.
        RankDied: a rank was killed or left the process.
        RanksHung: ranks still ran at the time limit; the message says which rank waits for which.
        LaunchError: the ranks could not be started, an exception cannot be sent back, or Slurm
            refused or ended the job.
    """
    __tracebackhide__ = True  # a reader looks for the line of the rank, not for ours
    check_arguments(on_ranks, locals())
    if in_rank.inside():
        raise RuntimeError(
            f"on_ranks was called on rank {os.environ['RANK']}, inside a rank of on_ranks. "
            "Call it once, outside, with as many ranks as you need."
        )
    if not 1 <= n <= _MOST_RANKS:
        raise ValueError(f"n is {n}; it must be at least 1, and at most {_MOST_RANKS:,}.")
    try:
        refuse_bad_limit(timeout_s)
        _refuse_bad_call(fn, args)
        payload = pickled(fn, args)

        needs = Needs.of_call(n, timeout_s, backend)
        if where is None and on_a_node():
            where = "local"
        place = decide(needs, where, kept=TASKS.kept)
        if place.fallen_back:
            _say_once(place.said)

        job = job_here(n, backend, threads=threads, timeout_s=timeout_s)
        if place.local:
            results = run_ranks(job, payload)
        else:
            # The task sends changes of the environment by itself. A node that has an interpreter of
            # its own finds its packages elsewhere than this one.
            job = replace(job, environ={})
            if place.site.python or place.site.container:
                job = replace(job, sys_path=())
            results = TASKS.results(place, needs, RemoteCall(job, payload))
        return [_rebuilt(rank, result) for rank, result in enumerate(results)]
    except Exception as error:
        keep_first_frame(error)
        raise


def run_ranks(job: RankJob, payload: bytes) -> list[bytes]:
    """Run a pickled function with its arguments on this machine; return its pickled results."""
    __tracebackhide__ = True
    with contextlib.ExitStack() as opened:
        with standard_descriptors_taken():
            crew = opened.enter_context(Crew(job))
            crew.start(payload)
        return crew.results()


def refuse_bad_limit(timeout_s: float) -> None:
    __tracebackhide__ = True
    if not 0 < timeout_s <= _MOST_S:
        raise ValueError(
            f"timeout_s is {shown(timeout_s)}; it must be a positive number of seconds, at most"
            f" {_MOST_S} (11 days). For a run that may take long, pass for example timeout_s=3600."
        )


def _refuse_bad_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    __tracebackhide__ = True
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(0, *args)
    except TypeError as e:
        name = getattr(fn, "__name__", shown(fn))
        raise TypeError(
            f"on_ranks calls {name}(rank, *args) with {len(args)} args, but {name}{signature} has"
            f" {e}. Its first parameter is the rank; pass the others after it: on_ranks(n,"
            f" {name}, …)."
        ) from None


@cache
def _say_once(sentence: str) -> None:
    """Print the sentence, but once a process: a script may call `on_ranks` a hundred times."""
    print(sentence, flush=True)


def _rebuilt(rank: int, pickled: bytes) -> Any:
    """Return the unpickled result. Raises TypeError if only the rank can rebuild it."""
    __tracebackhide__ = True
    try:
        return pickle.loads(pickled)
    except (Exception, SystemExit) as error:
        raise TypeError(
            f"what rank {rank} returned cannot be rebuilt where on_ranks was called"
            f" ({type(error).__name__}: {error}). Return tensors, numbers, strings or containers of"
            " them."
        ) from error
