"""No test touches the progress of whoever runs it."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def progress_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(path))
    return path
