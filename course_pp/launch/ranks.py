"""``on_ranks``: run one function on several real processes and get its results back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from course_pp.launch import cells, endings
from course_pp.launch.arguments import refuse_bad_arguments
from course_pp.launch.client import search_path
from course_pp.launch.crew import Crew
from course_pp.launch.handover import RemoteCall
from course_pp.launch.on_slurm import TASKS
from course_pp.launch.pickling import pickled
from course_pp.launch.surroundings import standard_descriptors_taken, start_refused_in_a_sentence, working_folder
from course_pp.launch.where import Needs, Place, decide, on_a_node


def on_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    threads: int = 1,
    where: str | None = None,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``n`` processes, with the process group ready, and return their results.

    What the ranks print appears here, each line labelled with its rank. ``fn`` may be defined in a notebook cell
    or in a script. No process is left behind, however the call ends.

    Args:
        n: number of ranks.
        fn: called with the rank first. It, ``args`` and its results must pickle (with cloudpickle).
        timeout_s: limit in seconds, counted from the moment all ranks are ready.
        backend: of the process group: ``"gloo"``, ``"nccl"`` (device = rank), or None for no process group, in
            which case ``init_process_group`` with ``env://`` works in ``fn``.
        threads: intra-operation threads of each rank.
        where: ``"local"``; ``"slurm"``, one node of a cluster; or None: the node of the Slurm job in which this runs,
            else a job of its own where a cluster answers, which is kept for the next calls and has GPUs unless
            ``backend`` is gloo; else this machine.

    Returns:
        ``[fn(0, *args), …, fn(n - 1, *args)]``.

    Raises:
        Whatever the first failing rank raised, with that rank's traceback as its cause.
        RankDied: a rank was killed or left the process.
        RanksHung: at the time limit; says which rank waits for whom.
        LaunchError: the ranks could not be started, an exception cannot be sent back, or Slurm refused or ended the
            job.
        ValueError, TypeError: an argument is of no use.
        RuntimeError: called from inside a rank.
    """
    __tracebackhide__ = True  # a reader looks for the line of the rank, not for ours
    refuse_bad_arguments(n, fn, args, timeout_s, backend, threads, where)
    folder = working_folder()
    payload = pickled(fn, args)
    needs = Needs.of_call(n, timeout_s, backend)
    place = _place(needs, where)
    if place.fallen_back:
        _say_once(place.said)
    if place.local:
        results = run_ranks(n, payload, timeout_s, backend, threads)
    else:
        own_interpreter = place.site.python or place.site.container
        call = RemoteCall(
            n=n,
            payload=payload,
            backend=backend,
            threads=threads,
            timeout_s=timeout_s,
            sys_path=None if own_interpreter else tuple(search_path()),
            environ={},
            cwd=folder,
            argv=tuple(getattr(sys, "argv", ())),
            sources=cells.sources(),
        )
        results = TASKS.results(place, needs, call)
    return [endings.result(rank, result) for rank, result in enumerate(results)]


def run_ranks(n: int, payload: bytes, timeout_s: float, backend: str | None, threads: int) -> list[bytes]:
    """Run a pickled function and its arguments on this machine; return what each rank returned, pickled."""
    __tracebackhide__ = True
    with contextlib.ExitStack() as opened:
        with start_refused_in_a_sentence(n):
            opened.enter_context(standard_descriptors_taken())
            crew = opened.enter_context(Crew(n, timeout_s))
            crew.start(payload, backend, threads)
        return crew.results()


@cache
def _say_once(sentence: str) -> None:
    """Print it, unless this process has: a script may call `on_ranks` a hundred times."""
    print(sentence, flush=True)


def _place(needs: Needs, where: str | None) -> Place:
    __tracebackhide__ = True
    if where is None and on_a_node():
        where = "local"
    return decide(needs, where, kept=TASKS.kept)
