"""The table in docs/schedules.md says rightly which engine runs which schedule."""

import sys
from pathlib import Path

import pytest


def test_the_table_says_which_schedule_runs_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "docs"))
    import schedule_table

    assert schedule_table.written() == schedule_table.table(), "make images"
    sys.modules.pop("schedule_table")
