"""The ``%torchrun`` line magic."""

from __future__ import annotations

import shlex
from typing import Any

from course_pp.launch.command import script_index
from course_pp.launch.torchrun import run_torchrun


def torchrun(line: str) -> None:
    """``%torchrun [--timeout SECONDS] [--local] ARGS...``: run ``torchrun ARGS...``; fail if a rank fails.

    ``--timeout`` is the limit for the run, once it has left a queue (300 s unless given); ``--local`` keeps off
    Slurm. Both come before the script.
    """
    __tracebackhide__ = True
    args, timeout_s, local = split(line)
    run_torchrun(args, timeout_s=timeout_s, local=local)


def split(line: str) -> tuple[list[str], float, bool]:
    """Take the magic's own two options out of the line; return (torchrun's arguments, seconds, local)."""
    args, timeout_s, local = shlex.split(line), 300.0, False
    at = 0
    # --local takes no value, unlike the options of torchrun: it is taken out before the script is looked for.
    while at < len(args) and args[at].startswith("-"):
        option, _, value = args[at].partition("=")
        if option == "--local":
            local = True
            del args[at]
        elif option == "--timeout":
            value = value or "".join(args[at + 1 : at + 2])
            try:
                timeout_s = float(value)
            except ValueError:
                raise ValueError(f"--timeout {value!r} is not a number of seconds.") from None
            del args[at : at + 1 + ("=" not in args[at])]
        else:
            at += 1 if script_index([args[at], "x"]) == 1 else 2
    return args, timeout_s, local


def register(ipython: Any) -> None:
    """Make ``%torchrun`` known to an IPython shell."""
    ipython.register_magic_function(torchrun, "line", "torchrun")
