"""``check``, ``hint``, ``solution`` and ``progress`` in a kernel, anywhere in a cell."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.timeout(120)

BEGINNING = """
from course_pp.exercises import check, hint, progress, quiz, solution

def bubble(p, m):
    return (p - 1) / (m + p - 1)

def peak_bytes(m, boundary, inside, recompute):
    raise NotImplementedError
"""
Run = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    progress_file: Path = tmp_path_factory.mktemp("kernel") / "progress.json"
    manager, client = start_new_kernel(env={**os.environ, "COURSE_PP_PROGRESS": str(progress_file)})
    yield manager, client, progress_file
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(started: Any) -> Any:
    """Return one kernel for all tests; each test defines its functions anew and has no progress."""
    manager, client, progress_file = started
    progress_file.unlink(missing_ok=True)
    client.execute_interactive(BEGINNING, timeout=60)
    return manager, client


@pytest.fixture
def run(kernel: Any) -> Run:
    """Runs a cell; returns the contents of the messages that show something."""

    def run(cell: str) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = []

        def note(message: dict[str, Any]) -> None:
            if message["msg_type"] in ("display_data", "execute_result", "stream", "error"):
                outputs.append(message["content"])

        kernel[1].execute_interactive(cell, timeout=60, output_hook=note)
        return outputs

    return run


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    return [output["data"]["text/plain"].splitlines()[0] for output in outputs]


CORRECT = "✓ correct · Exercise 1, the bubble of GPipe"
PENDING = "○ pending · Exercise 4, bytes at the peak"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("check(bubble)", [CORRECT]),
        ("check(bubble)\n1 + 1", [CORRECT, "2"]),
        ("for fn in (bubble, peak_bytes):\n    check(fn)", [CORRECT, PENDING]),
        ("if True:\n    check(peak_bytes)", [PENDING]),
        ("verdict = check(bubble)", [CORRECT]),
        ("verdict = check(bubble)\nverdict", [CORRECT]),
        ("verdict", [CORRECT]),
        ("check(bubble)\ncheck(peak_bytes)", [CORRECT, PENDING]),
        ("progress()\nNone", ["notebook  exercise"]),
        (
            "hint('bubble')\nsolution('bubble')",
            ["Hint 1 of 3: Count in slots", "def bubble(p, m):"],
        ),
    ],
)
def test_each_call_shows_its_result_once_wherever_it_stands(
    run: Run, cell: str, shown: list[str]
) -> None:
    run("verdict = check(bubble)")
    got = texts(run(cell))
    assert [text[: len(want)] for text, want in zip(got, shown, strict=True)] == shown


def test_what_is_shown_is_as_rich_as_the_last_expression_of_a_cell(run: Run) -> None:
    [verdict] = run("check(bubble);")
    [note] = run("if True: hint('bubble')")
    assert verdict["data"]["text/html"].startswith("<div")
    assert "text/markdown" in note["data"]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("hint('buble')", "there is no exercise called 'buble'. The nearest is 'bubble'."),
        ("solution('buble')", "there is no exercise called 'buble'. The nearest is 'bubble'."),
        ("check(len)", "there is no exercise called 'len'. They are shift, "),
        ("check('bubble')", "check takes the function itself"),
        ("quiz()", "quiz: when is None: pass one of 'before', 'after'"),
        ("quiz('before', about='day')", "about is 'day'; there are 45_minutes, "),
    ],
)
def test_a_call_that_names_nothing_known_is_told_without_a_traceback(
    run: Run, cell: str, message: str
) -> None:
    [output] = run(cell)
    [line] = output["traceback"]
    assert line.startswith(message)


def test_an_interrupted_check_shows_one_line_and_stops_the_cell(
    kernel: Any, tmp_path: Path
) -> None:
    manager, client = kernel
    called = tmp_path / "called"
    answer = f"def bubble(p, m):\n    open({str(called)!r}, 'w').close()\n    time.sleep(60)"
    client.execute(f"import time\n\n{answer}\n\ncheck(bubble)\nprint('goes on')")
    limit = time.monotonic() + 60
    while not called.exists():
        assert time.monotonic() < limit, "the answer was never called"
        time.sleep(0.05)
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=30)["content"]
    assert reply["status"] == "error"
    assert reply["traceback"] == ["○ interrupted · run the cell again."]
