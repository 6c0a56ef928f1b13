"""What it costs to start ranks: ``python benchmarks/launch_latency.py``.

Seconds from the call to its results, process group included, for a function that does nothing.
torchrun runs a script that joins the process group and leaves.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from course_pp.launch import on_ranks

REPEATS = 10
SCRIPT = (
    "import torch.distributed as"
    " dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()\n"
)


def do_nothing(rank: int) -> None:
    pass


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def torchrun(n: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "join.py"
        script.write_text(SCRIPT)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [*launcher, f"--nproc-per-node={n}", script], check=True, capture_output=True
        )


def main() -> None:
    print("| start | ranks | seconds |\n|---|---|---|")
    print(f"| on_ranks, first call | 4 | {seconds(lambda: on_ranks(4, do_nothing)):.2f} |")
    for n in (1, 2, 4, 8):
        median = statistics.median(
            seconds(lambda n=n: on_ranks(n, do_nothing)) for _ in range(REPEATS)
        )  # type: ignore[misc]
        print(f"| on_ranks, median of {REPEATS} later calls | {n} | {median:.3f} |")
    print(f"| torchrun --standalone | 4 | {seconds(lambda: torchrun(4)):.2f} |")


if __name__ == "__main__":
    main()
