"""How long the panel of ``show.explore`` takes to follow a slider, on the Python side, for every
schedule.

python benchmarks/explore_redraw.py [ranks] [microbatches]
"""

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time

from course_pp.schedule import names
from course_pp.show import explore

REPEATS = 9


def main(n_ranks: int = 8, n_microbatches: int = 32) -> None:
    panel = explore(n_ranks=n_ranks, n_microbatches=n_microbatches)
    print(
        f"{n_ranks} ranks, {n_microbatches} microbatches: from settings to picture and numbers,"
        f" {REPEATS} times each"
    )
    print(f"{'':<20}{'fastest':>10}{'median':>10}{'processor':>11}{'picture':>11}")
    for name in names():
        panel.controls["schedule"].value = name
        runs = [timed(panel.update) for _ in range(REPEATS)]
        wall, cpu = ([1e3 * run[i] for run in runs] for i in (0, 1))
        size = len(panel.picture.value) / 1024
        print(
            f"{name:<20}{min(wall):7.0f} ms{median(wall):7.0f} ms{median(cpu):8.0f}"
            f" ms{size:7.0f} KiB"
        )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds by the clock, and seconds of this process, to which others do not add."""
    start, cpu = perf_counter(), process_time()
    work()
    return perf_counter() - start, process_time() - cpu


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
