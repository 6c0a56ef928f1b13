"""The learner's copy: without outputs, complete, and never overwritten."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_pp.notebook.command import update


def write(folder: Path, name: str, source: str, output: str = "") -> None:
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Title"]},
        {
            "cell_type": "code",
            "id": "b",
            "metadata": {},
            "execution_count": 1,
            "source": [source],
            "outputs": (
                [{"output_type": "stream", "name": "stdout", "text": [output]}] if output else []
            ),
        },
    ]
    (folder / name).write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )


@pytest.fixture
def course(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    write(folder, "00_first.ipynb", "guess = ...", output="42")
    write(folder, "01_second.ipynb", "1 + 1", output="2")
    return folder


def test_the_copy_has_every_notebook_and_no_output(course: Path, tmp_path: Path) -> None:
    copied = update(course, tmp_path / "mine")
    assert copied.added == ("00_first.ipynb", "01_second.ipynb")
    assert str(copied) == "2 notebooks copied to mine/, without outputs"
    code = json.loads((tmp_path / "mine" / "00_first.ipynb").read_text())["cells"][1]
    assert (code["outputs"], code["execution_count"], code["source"]) == ([], None, ["guess = ..."])


def test_an_edited_notebook_stays_as_it_is_and_a_newer_version_is_put_beside_it_once(
    course: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    update(course, mine)
    write(mine, "00_first.ipynb", "guess = 7", output="42")
    edited = (mine / "00_first.ipynb").read_bytes()
    assert str(update(course, mine)) == ""

    write(course, "00_first.ipynb", "better_guess = ...")
    copied = update(course, mine)
    assert copied.beside == (("00_first.ipynb", "00_first.new.ipynb"),)
    assert (
        "00_first.ipynb has a newer version, which is now beside yours: 00_first.new.ipynb"
        in str(copied)
    )
    assert (mine / "00_first.ipynb").read_bytes() == edited
    assert str(update(course, mine)) == ""

    write(course, "00_first.ipynb", "best_guess = ...")
    assert update(course, mine).beside == (("00_first.ipynb", "00_first.new2.ipynb"),)


@pytest.mark.parametrize("record", [None, "[", '{"00_first.ipynb": 1}'])
def test_a_copy_whose_record_is_lost_or_damaged_keeps_every_edit(
    record: str | None, course: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    update(course, mine)
    write(mine, "00_first.ipynb", "guess = 7")
    if record is None:
        (mine / ".course_pp.json").unlink()
    else:
        (mine / ".course_pp.json").write_text(record)
    assert update(course, mine).beside == (("00_first.ipynb", "00_first.new.ipynb"),)
    assert "guess = 7" in (mine / "00_first.ipynb").read_text()


def test_a_deleted_notebook_comes_back_and_new_outputs_are_no_newer_version(
    course: Path, tmp_path: Path
) -> None:
    update(course, tmp_path / "mine")
    (tmp_path / "mine" / "01_second.ipynb").unlink()
    write(course, "00_first.ipynb", "guess = ...", output="43")
    copied = update(course, tmp_path / "mine")
    assert (copied.added, copied.beside) == (("01_second.ipynb",), ())


def test_what_cannot_be_copied_is_said_in_one_sentence(course: Path, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(ValueError, match=r"cannot write the working copy .*a_file"):
        update(course, tmp_path / "a_file")
    with pytest.raises(ValueError, match="no notebooks in"):
        update(tmp_path / "elsewhere", tmp_path / "mine")
    (course / "02_third.ipynb").write_text("{}")
    with pytest.raises(ValueError, match=r"02_third\.ipynb is no notebook"):
        update(course, tmp_path / "mine")


def test_the_command_makes_the_copy_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "course_pp", "lab", "--copy-only", "--folder", "mine"]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    names = sorted(path.name for path in (root / "notebooks").glob("*.ipynb"))
    assert sorted(path.name for path in (tmp_path / "mine").glob("*.ipynb")) == names
    assert done.stdout == f"{len(names)} notebooks copied to mine/, without outputs\n"
    # Outside the clone %torchrun finds scripts only here.
    assert (tmp_path / "mine" / "source_code" / "train.py").is_file()
