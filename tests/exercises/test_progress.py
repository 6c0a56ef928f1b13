"""The table of progress, and what an instructor gets of it."""

import fcntl
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from course_pp.exercises import progress
from course_pp.exercises.progress import STORE, NotExported, Progress, Record, Row, Store, parse
from tests.exercises.toy import only_the_toy


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch):
    with only_the_toy(monkeypatch):
        yield


@pytest.mark.parametrize(
    ("export", "target", "says"),
    [
        (
            "to_csv",
            "class/mine.csv",
            "{} cannot be written: No such file or directory. Create the folder",
        ),
        (
            "to_json",
            "class/mine.json",
            "{} cannot be written: No such file or directory. Create the folder",
        ),
        ("to_json", "class/", "{} is no folder that you can reach: create it, or give a file"),
        ("to_json", "mine", "{} is no folder that you can reach: create it, or give a file"),
        ("to_json", "/proc", "/proc/"),
    ],
)
def test_an_export_that_cannot_be_names_the_target_and_the_remedy(
    export: str, target: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(NotExported) as caught:
        getattr(progress(), export)(f"{tmp_path}/{target}" if target[0] != "/" else target)
    assert str(caught.value).startswith(says.format(tmp_path / target))
    assert len(caught.value._render_traceback_()) == 1


def test_in_a_folder_each_learner_has_one_file_whose_name_names_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    files = []
    for learner in ("a", "b", "a"):
        monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / learner / "progress.json"))
        # a kernel of their own
        monkeypatch.setattr(sys.modules["course_pp.exercises.progress"], "STORE", Store())
        files.append(progress().to_json(folder))
    assert files[0] == files[2] != files[1]
    assert sorted(folder.iterdir()) == sorted(files[:2])
    assert re.fullmatch(r"[0-9a-f]{8}\.json", files[0].name)


def test_a_clock_that_is_set_back_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.0, 40.0, 40.0])
    monkeypatch.setattr("time.time", lambda: next(now))
    STORE.record_attempt("double", correct=False)
    STORE.record_attempt("double", correct=True)
    assert Store().read()[1] == ""


def test_an_export_does_not_say_when_somebody_worked(tmp_path: Path) -> None:
    STORE.record_hint("double", 2)
    assert STORE.read()[0].exercises["double"].begun > 0
    assert parse(progress().to_json(tmp_path).read_bytes()).exercises["double"].begun == 0


def test_an_export_lies_where_it_was_asked_for_and_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    assert progress().to_csv(folder / "mine.csv").read_text().startswith("notebook,exercise,")
    assert [path.name for path in folder.iterdir()] == ["mine.csv"]


def test_only_the_wide_cells_of_the_table_break_over_two_lines() -> None:
    html = progress()._repr_html_()
    cells = re.findall(r'<td style="text-align:left;white-space:(\w+)"', html)
    assert html.count("<td") == len(cells) > 0
    # Exercise and solution: unbroken, they would push the last column off a page of 980 pixels.
    assert cells[:8] == ["nowrap", "normal", *["nowrap"] * 5, "normal"]


def row(notebook: str, exercise: str, status: str) -> Row:
    return Row(
        notebook,
        exercise,
        title="",
        difficulty=1,
        minutes=5,
        status=status,
        attempts=2,
        hints=1,
        solution_seen=False,
        took_minutes=0.0,
    )


def test_exercises_of_the_own_notebook_come_first_and_another_notebook_has_one_line() -> None:
    rows = (row("01", "a", "correct"), row("01", "b", "open"), row("02", "c", "not yet"))
    _, *lines, summary = repr(Progress(rows, here="02")).splitlines()
    assert [line.split()[:2] for line in lines] == [["02", "c:"], ["01", "1"]]
    assert lines[1].split()[-4:] == ["yet", "4", "2", "0"]
    assert summary.startswith("1 of 3 correct")


def test_a_notebook_is_known_by_the_functions_of_its_exercises() -> None:
    names = {"progress": progress}
    exec("before = progress()\ndouble = abs\nafter = progress()", names)
    assert (names["before"].here, names["after"].here) == ("", "98")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, the file is locked as another process would lock it."""
    with open(f"{path}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_pp.base.files._LOCK_LIMIT_S", 0.02)


def test_what_could_not_be_kept_is_kept_with_the_next_change(progress_file: Path) -> None:
    store = Store()
    store.record_attempt("solved", correct=True)
    store.record_attempt("double", correct=False)
    with locked(progress_file):
        assert "another process holds its lock" in store.record_attempt("double", correct=True)
        assert store.record_attempt("solved", correct=False) != ""
        assert store.record_hint("double", 2) == 1
        assert store.record_hint("double", 2) == 2
        assert store.read()[0].exercises["double"] == Record(correct=True, attempts=2, hints=2)
    other = Store()
    other.record_hint("meanwhile", 2)
    assert store.record_attempt("double", correct=False) == ""
    assert Store().read()[0].exercises == {
        "solved": Record(correct=True, attempts=1),
        "double": Record(correct=True, attempts=2, hints=2),
        "meanwhile": Record(hints=1),
    }


def test_what_could_not_be_kept_is_kept_by_a_look_at_the_table(progress_file: Path) -> None:
    store = Store()
    with locked(progress_file):
        store.record_solution("double")
    store.read()
    assert Store().read()[0].exercises == {"double": Record(solution_seen=True)}


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b"\xff",
        b"",
        b"[]",
        b'{"exercises": {"double": {"hints": -1}}}',
        b'{"exercises": {}, "quiz": {"before": [1]}}',
        b'{"exercises": {}, "learner": "../ann"}',
        b'{"exercises": {}, "course_pp_progress": 4}',
    ],
)
def test_a_file_that_cannot_be_read_is_put_aside(content: bytes, progress_file: Path) -> None:
    progress_file.write_bytes(content)
    assert "was not readable" in Store().record_attempt("double", correct=True)
    assert progress_file.with_name("progress.json.broken").read_bytes() == content
    kept, note = Store().read()
    assert (kept.exercises, note) == ({"double": Record(correct=True, attempts=1)}, "")


def test_a_whole_number_may_have_lost_its_point(progress_file: Path) -> None:
    progress_file.write_text(
        '{"exercises": {"double": {"took_minutes": 8, "begun": 5}}, "written": 5}'
    )
    kept, note = Store().read()
    assert (kept.exercises["double"].took_minutes, note) == (8, "")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/", "it is a directory"),
        (".", "it is a directory"),
        ("/dev/null", "it is no file"),
        ("~nouser/x", "nobody has that home"),
        ("/dev/null/x", "File exists"),
    ],
)
def test_a_place_that_can_be_no_file_is_noted(
    place: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_PP_PROGRESS", place)
    store = Store()
    note = store.record_attempt("double", correct=True)
    assert f"could not be kept in {place}: {why}" in note
    kept, note = store.read()
    assert kept.exercises == {"double": Record(correct=True, attempts=1)}
    assert why in note
    assert why in progress().note


def test_a_link_to_the_file_stays_a_link(progress_file: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / "mine.json"
    real.parent.mkdir()
    progress_file.symlink_to(real)
    Store().record_attempt("double", correct=True)
    Store().record_attempt("other", correct=True)
    assert progress_file.is_symlink()
    assert set(Store().read()[0].exercises) == {"double", "other"}
    assert sorted(path.name for path in real.parent.iterdir()) == ["mine.json", "mine.json.lock"]


@pytest.fixture(params=[0o022, 0o027])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("export", ["to_csv", "to_json"])
def test_an_export_may_be_read_by_whom_the_umask_lets(
    export: str, umask: int, tmp_path: Path
) -> None:
    target = getattr(progress(), export)(tmp_path / "mine.json")
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask
    target.chmod(0o640)
    getattr(progress(), export)(target)
    assert target.stat().st_mode & 0o777 == 0o640
