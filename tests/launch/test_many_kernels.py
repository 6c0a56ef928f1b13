"""A class on one login node: twenty kernels that start ranks at the same moment."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

from tests.processes import no_process_left

KERNELS = 20
LIMIT_S = 400
# The ranks of a kernel add its number to theirs: a message from another kernel's ranks would give
# another sum.
CELL = """
from course_pp.launch import on_ranks

def total(rank, number):
    import torch
    import torch.distributed as dist
    value = torch.tensor([number + rank])
    dist.all_reduce(value)
    return value.item()

print([on_ranks(2, total, {number}, timeout_s=300) for _ in range(2)])
"""


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.timeout(3 * LIMIT_S)
def test_twenty_kernels_start_ranks_at_once_and_none_meets_anothers(tmp_path: Path) -> None:
    started: list[tuple[KernelManager, Any]] = []
    with no_process_left(60):
        try:
            for number in range(KERNELS):
                env = {**os.environ, "COURSE_PP_PROGRESS": str(tmp_path / f"{number}.json")}
                started.append(start_new_kernel(startup_timeout=LIMIT_S, env=env))
            begun = time.monotonic()
            asked = [
                client.execute(CELL.replace("{number}", str(100 * number)))
                for number, (_, client) in enumerate(started)
            ]
            said = [
                printed(client, request, begun + LIMIT_S)
                for (_, client), request in zip(started, asked, strict=True)
            ]
            print(f"{KERNELS} kernels: {time.monotonic() - begun:.0f} s")
        finally:
            for manager, client in started:
                client.stop_channels()
                manager.shutdown_kernel(now=False)
    sums = [200 * number + 1 for number in range(KERNELS)]
    assert said == [f"[[{value}, {value}], [{value}, {value}]]\n" for value in sums]


def printed(client: Any, request: str, limit: float) -> str:
    """What the request printed, errors included, once its kernel is idle again."""
    text = ""
    while True:
        message = client.get_iopub_msg(timeout=max(0.1, limit - time.monotonic()))
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            text += content["text"]
        elif message["msg_type"] == "error":
            text += f"{content['ename']}: {content['evalue']}"
        elif content.get("execution_state") == "idle":
            return text
