"""The node's end of ``on_ranks`` under Slurm: ``python -m course_pp.launch.remote FOLDER KEEP``, one task of srun.

Standard input brings the numbers of calls, whose files lie in FOLDER. The ranks are started here as they are in a
notebook, and how each call ended is written beside it. After KEEP seconds without a call the job ends.
"""

from __future__ import annotations

import linecache
import os
import pickle
import select
import sys
from pathlib import Path

import cloudpickle

from course_pp.launch.client import SERVERS
from course_pp.launch.errors import LaunchError
from course_pp.launch.handover import ENDED, Call, End, call_file, end_file, write
from course_pp.launch.ranks import run_ranks

_FIRST_CALL_S = 60.0


def main(folder: Path, keep_s: float) -> None:
    """Answers calls until none has come for ``keep_s`` seconds, or the caller is gone."""
    SERVERS.get()  # begins to import torch
    patience = _FIRST_CALL_S
    while select.select([0], [], [], patience)[0] and (numbers := os.read(0, 4096).split()):
        for number in map(int, numbers):
            call: Call = pickle.loads(call_file(folder, number).read_bytes())
            write(end_file(folder, number), _end(call))
            print(f"{ENDED} {number}", flush=True)
        patience = keep_s


def _end(call: Call) -> End:
    if call.sys_path is not None:
        sys.path[:] = call.sys_path
    sys.argv[:] = call.argv
    os.chdir(call.cwd)
    for name, value in call.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    linecache.cache.update(call.sources)
    try:
        return End(tuple(run_ranks(call.n, call.payload, call.timeout_s, call.backend, call.threads)))
    except BaseException as error:
        return End(None, _dumped(error))


def _dumped(error: BaseException) -> bytes:
    """The exception, its cause and its notes: of these, only the first travels of itself."""
    parts = error.__cause__, tuple(getattr(error, "__notes__", ()))
    try:
        dumped: bytes = cloudpickle.dumps((error, *parts))
        pickle.loads(dumped)
    except Exception:
        dumped = cloudpickle.dumps((LaunchError(f"{type(error).__name__}: {error}"), *parts))
    return dumped


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
