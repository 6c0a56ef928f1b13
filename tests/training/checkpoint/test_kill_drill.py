"""Ranks killed at random moments lose nothing that was complete."""

import runpy
import sys
import warnings
from pathlib import Path

import pytest

DRILL = Path(__file__).parents[3] / "source_code" / "kill_drill.py"


@pytest.mark.ranks
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.long
def test_nothing_is_lost(
    kills: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(DRILL), "--kills", str(kills)])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DRILL), run_name="__main__")
    out, err = capsys.readouterr()
    assert not ended.value.code, out + err
    tally = {}
    for line in out.splitlines():
        what, number = line.rsplit(maxsplit=1)
        tally[what] = int(number)
    assert tally["kills"] == kills
    assert tally["during a save"] >= kills / 3
    assert tally["losses compared"] > 0
    for what in ("checkpoints lost", "damaged under a final name", "wrong losses", "orphans"):
        assert tally[what] == 0
    assert tally["leftovers after the next save"] == 0
