"""The instructor's report over a folder of exports, some of them damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from course_pp.__main__ import main
from course_pp.exercises.inventory import questions
from course_pp.exercises.progress import TIMES, Kept, Progress, Record, Store
from course_pp.exercises.report import class_report

EXERCISE = "shift"
ASKED = ("shared_tensor", "bubble_of_1f1b", "held_under_1f1b", "killed_save")


def answers(before: str, after: str) -> dict[str, dict[str, str]]:
    """For each of `ASKED` a sign: + is right, x wrong, - I do not know, a space not asked."""
    named = {question.name: question for question in questions()}
    says = {
        name: {"+": named[name].correct, "x": named[name].wrong[0].says, "-": "-"} for name in ASKED
    }
    return {
        when: {
            name: says[name][sign] for name, sign in zip(ASKED, signs, strict=False) if sign != " "
        }
        for when, signs in (("before", before), ("after", after))
    }


def export(
    folder: Path, name: str, before: str = "", after: str = "", learner: str = "", **tried: Any
) -> None:
    exercises = {EXERCISE: Record(**tried)} if tried else {}
    Progress((), kept=Kept(exercises, answers(before, after), learner or name)).to_json(
        folder / f"{name}.json"
    )


@pytest.fixture
def twelve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve files of a class, as they come."""
    folder = tmp_path / "class"
    folder.mkdir()
    export(folder, "a", "x-x+", "+++x", correct=True, attempts=2, hints=1, took_minutes=8.0)
    export(folder, "b", "+xx", "+x+", attempts=3, solution_seen=True)
    export(folder, "before", "++xx")
    export(folder, "after", "", "x+x")
    export(folder, "other", "+", " +x")
    export(folder, "nothing")
    export(folder, "twice", "xxxx", "", attempts=1)
    export(
        folder,
        "again",
        "xxxx",
        "++xx",
        learner="twice",
        correct=True,
        attempts=4,
        took_minutes=20.0,
    )
    raw = Store()
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(folder / "progress.json"))
    raw.record_attempt(EXERCISE, correct=True)
    for when in TIMES:
        raw.record_answers(when, answers(" x+", " ++x")[when])
    (folder / "empty.json").touch()
    (folder / "broken.json").write_text((folder / "a.json").read_text()[:300])
    (folder / "old.json").write_text('{"course_pp_export": 2, "exercises": [], "quiz": {}}')
    assert len(list(folder.glob("*.json"))) == 12
    return folder


def test_a_class_of_twelve_files_is_counted_as_by_hand(twelve: Path) -> None:
    report = class_report(twelve)
    # Asked both times, right before and after: a 4, 1, 3; b 3, 1, 2; twice 4, 0, 2; raw 2, 1, 2.
    assert str(report).startswith(
        "8 learners, 4 answered before and after: 23% right before, 69% after, gain 60%\n"
        "answered only after: after.json\n"
        "answered only before: before.json\n"
        "answered no question: nothing.json\n"
        "answered other questions after than before: other.json\n"
        "broken.json is left out: "
    )
    assert report.left_out == (
        "broken.json is left out: it is no JSON, or only a part of it",
        "empty.json is left out: it is empty",
        "old.json is left out: version 2, this course reads 3",
        "twice.json is left out: again.json is by the same learner, and no older",
    )
    assert [(line.concept, line.people, line.before, line.after) for line in report.concepts] == [
        ("messages", 3, 1 / 3, 1),
        ("bubble", 4, 0, 3 / 4),
        ("memory", 4, 1 / 4, 3 / 4),
        ("checkpoints", 2, 1 / 2, 0),
    ]
    assert {
        line.name: (line.answered, line.right) for line in report.questions if line.answered
    } == {
        "shared_tensor": (4, 3),
        "bubble_of_1f1b": (6, 5),
        "held_under_1f1b": (6, 3),
        "killed_save": (3, 0),
    }
    [line] = [line for line in report.exercises if line.tried]
    assert (line.exercise, line.tried, line.correct, line.attempts, line.hints) == (
        EXERCISE,
        4,
        3,
        2.5,
        0.25,
    )
    assert (line.solution_seen, line.minutes, line.hard) == (1, 14, False)


def test_only_what_was_taught_is_scored(twelve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(twelve), "--about", "45_minutes", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    # Both questions of the route: a 0 to 2, b 0 to 1, twice 0 to 1, raw 1 to 2.
    assert data["whole"] == {
        "concept": "everything",
        "people": 4,
        "before": 1 / 8,
        "after": 6 / 8,
        "gain": 5 / 7,
    }
    assert data["not_twice"] == {
        "only after": ["after.json", "other.json"],
        "only before": ["before.json"],
        "no question": ["nothing.json"],
    }
    assert [line["name"] for line in data["questions"]] == ["bubble_of_1f1b", "held_under_1f1b"]
    assert class_report(twelve, ["a_semester"]) == class_report(twelve)
    assert main(["report", str(twelve), "--about", "a_year"]) == 2
    assert capsys.readouterr().err.startswith(
        "python -m course_pp report: about is 'a_year'; there are 45_minutes, "
    )


def test_an_exercise_that_half_of_those_who_try_fail_is_marked(tmp_path: Path) -> None:
    export(tmp_path, "a", correct=True, attempts=1)
    export(tmp_path, "b", attempts=1)
    assert "many fail" in str(class_report(tmp_path))
    export(tmp_path, "c", correct=True, attempts=1)
    assert "many fail" not in str(class_report(tmp_path))


DAMAGED: dict[str, bytes] = {
    "foreign.json": b'{"name": "package", "version": "1.0"}',
    "new.json": b'{"course_pp_progress": 4, "exercises": {}}',
    "bytes.json": b"\xff\xfe\x00",
    "text.json": b'{"course_pp_progress": 3, "exercises": {"shift": {"attempts": "1"}}}',
    "negative.json": b'{"course_pp_progress": 3, "exercises": {"shift": {"attempts": -1}}}',
    "nan.json": b'{"course_pp_progress": 3, "exercises": {"shift": {"took_minutes": NaN}}}',
    "list.json": b'{"course_pp_progress": 3, "exercises": []}',
    "quiz.json": b'{"course_pp_progress": 3, "exercises": {}, "quiz": {"after": {"x": 1}}}',
    "learner.json": b'{"course_pp_progress": 3, "exercises": {}, "learner": []}',
    "deep.json": b"[" * 100_000,
    "marks.csv": b"name,mark\nA,1\n",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_foreign_file_is_one_line_and_the_others_count(
    name: str, tmp_path: Path
) -> None:
    export(tmp_path, "good", "+", "+")
    (tmp_path / name).write_bytes(DAMAGED[name])
    report = class_report(tmp_path)
    assert report.people == 1
    [said] = report.left_out
    assert said.startswith(f"{name} is left out: ")
    assert "\n" not in said
    assert name != "bytes.json" or said.endswith("it is no JSON, or only a part of it")


@pytest.mark.parametrize(("make", "says"), [(False, "is no folder"), (True, "has no export")])
def test_a_folder_without_exports_is_refused_in_one_line(
    make: bool, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "class"
    if make:
        folder.mkdir()
    assert main(["report", str(folder)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
