"""How long a large schedule takes to build, check, simulate and explain: 1F1B on 64 ranks with
1,024 microbatches.

python benchmarks/schedule_speed.py [schedule] [ranks] [microbatches]
"""

import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

from course_pp.schedule import Costs, build, check, simulate

REPEATS = 3


def main(name: str = "1f1b", n_ranks: int = 64, n_microbatches: int = 1024) -> None:
    schedule = build(name, n_ranks, n_microbatches)
    costs = Costs(latency=0.1)
    n_actions = sum(map(len, schedule.actions))
    print(
        f"{name}, {n_ranks} ranks, {n_microbatches} microbatches: {n_actions:,} actions; best of"
        f" {REPEATS}"
    )
    report(
        "import course_pp.schedule",
        seconds_to_import("course_pp.schedule") - seconds_to_import("sys"),
    )
    report("build", best(lambda: build(name, n_ranks, n_microbatches)))
    report("check", best(lambda: check(schedule)))
    report("simulate", best(lambda: simulate(schedule)))
    report("simulate with latency", best(lambda: simulate(schedule, costs)))
    report(
        "explain every gap",
        best(lambda: simulate(schedule).idle_gaps) - best(lambda: simulate(schedule)),
    )
    report(
        "find the critical path",
        best(lambda: simulate(schedule).critical_path) - best(lambda: simulate(schedule)),
    )


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs: whatever else the machine does only adds."""
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return min(seconds)


def seconds_to_import(module: str) -> float:
    return best(lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True))


def report(what: str, seconds: float) -> None:
    print(f"{what:<28}{max(0, seconds):8.3f} s")


if __name__ == "__main__":
    main(*(int(word) if word.isdigit() else word for word in sys.argv[1:]))
