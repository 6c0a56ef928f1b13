"""Runs make targets side by side: python .ci/parts.py TARGET... [then TARGET...]

The output of a part goes to runs/log/TARGET.log and is shown when the part ends. At the end, the
last lines of each part that failed are shown once more. The last line counts tests, wall time and
processor time. The exit status is 1 if any part failed, or left a process behind. ``then`` waits
until all targets before it have ended.
"""

import argparse
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LOGS = Path("runs/log")
_OUTCOME = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
_TAIL = 40
_PR_SET_CHILD_SUBREAPER = 36
_ORPHANS_LIMIT_S = 10.0


@dataclass
class Part:
    """A make target that runs, or has run."""

    name: str
    process: subprocess.Popen[bytes]
    began: float
    ended: float = 0.0

    @property
    def log(self) -> str:
        return (LOGS / f"{self.name}.log").read_text(errors="replace")

    @property
    def failed(self) -> bool:
        return self.process.returncode != 0

    def __str__(self) -> str:
        outcome = f"failed (exit status {self.process.returncode})" if self.failed else "passed"
        return f"{self.name}: {outcome} after {self.ended - self.began:.0f} s"

    def tests(self) -> dict[str, int]:
        """Return how many tests passed, failed and were skipped, by the last lines of pytest."""
        found = {"passed": 0, "failed": 0, "skipped": 0}
        # A part may run parts itself, and show the end of a log a second time.
        text, _, _ = self.log.partition(f": the end of {LOGS}")
        for line in text.splitlines():
            if re.search(r" in \d+\.\d+s\b", line):
                for count, outcome in _OUTCOME.findall(line):
                    if outcome.startswith("error"):
                        outcome = "failed"
                    found[outcome] += int(count)
        return found


def start(name: str) -> Part:
    """Start ``make NAME`` in a process group of its own, so that all of it can be ended."""
    make = os.environ.get("MAKE", "make")
    with (LOGS / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [make, "--no-print-directory", name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    return Part(name, process, time.monotonic())


def run(names: list[str], at_once: int) -> list[Part]:
    """Run the targets in this order, at most so many at once; show the output of each at its end."""
    waiting = list(names)
    running: list[Part] = []
    done: list[Part] = []
    try:
        while waiting or running:
            if waiting[:1] == ["then"] and not running:
                waiting.pop(0)
            while waiting and waiting[0] != "then" and len(running) < at_once:
                running.append(start(waiting.pop(0)))
                print(f"{running[-1].name} writes to {LOGS / running[-1].name}.log", flush=True)
            time.sleep(0.1)
            ended = [part for part in running if part.process.poll() is not None]
            for part in ended:
                part.ended = time.monotonic()
                running.remove(part)
                done.append(part)
                print(f"===== {part}\n{part.log.rstrip()}\n", flush=True)
    finally:
        for part in running:
            os.killpg(part.process.pid, signal.SIGTERM)
        for part in running:
            part.process.wait()
    return done


def left_behind() -> list[str]:
    """Return the commands of processes that the parts started and did not end.

    Waiting for the others also counts their processor time.
    """
    limit = time.monotonic() + _ORPHANS_LIMIT_S
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                if time.monotonic() > limit:
                    break
                time.sleep(0.1)
        except ChildProcessError:
            return []
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+")
    parser.add_argument(
        "--at-once", type=int, default=2, help="parts that run side by side (default 2)"
    )
    args = parser.parse_args()
    if sys.platform.startswith("linux"):
        # Orphans become our children, so that we can see them and count their time.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A shell that starts us in the background has us ignore SIGINT. Tests interrupt their children,
    # which would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    LOGS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    parts = run(args.targets, args.at_once)
    left = left_behind()
    failed = [part for part in parts if part.failed]
    for part in failed:
        title = f"===== {part}: the end of {LOGS / part.name}.log"
        print(title, *part.log.splitlines()[-_TAIL:], "", sep="\n")
    if left:
        print("left behind:", *left, sep="\n    ")
    print(*parts, sep="\n")
    tests: Counter[str] = Counter()
    for part in parts:
        tests.update(part.tests())
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.monotonic() - began
    processor = usage.ru_utime + usage.ru_stime
    print(
        f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped;"
        f" {len(parts) - len(failed)} of {len(parts)} parts passed in {wall:.0f} s wall,"
        f" {processor:.0f} s processor time"
    )
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
