"""Ranks killed at random moments lose nothing that was complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).parents[3] / "source_code" / "kill_drill.py"


def drill(kills: int) -> dict[str, int]:
    """The tally of a drill."""
    done = subprocess.run(
        [sys.executable, DRILL, "--kills", str(kills)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rsplit(maxsplit=1) for line in done.stdout.splitlines()]
    return {what: int(number) for what, number in lines}


@pytest.mark.ranks
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.full)])
def test_nothing_is_lost(kills: int) -> None:
    tally = drill(kills)
    assert tally["kills"] == kills
    assert tally["during a save"] >= kills / 3
    assert tally["losses compared"] > 0
    for what in ("checkpoints lost", "damaged under a final name", "wrong losses", "orphans"):
        assert tally[what] == 0
    assert tally["leftovers after the next save"] == 0
