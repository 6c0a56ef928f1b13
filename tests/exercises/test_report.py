"""The instructor's report over a folder of exports, some of them damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from course_pp.__main__ import main
from course_pp.exercises import progress
from course_pp.exercises.inventory import keep_answers, questions
from course_pp.exercises.progress import STORE
from course_pp.exercises.report import class_report

BUBBLE = [question for question in questions() if question.concept == "bubble"]
EXERCISE = "shift"


def person(path: Path, before: int | None, after: int | None, solved: bool = True, hints: int = 0) -> dict[str, Any]:
    """The export of a person with so many right answers about the bubble before and after the course."""
    quiz = {
        when: {q.name: q.correct if i < right else q.wrong[0].says for i, q in enumerate(BUBBLE)}
        for when, right in (("before", before), ("after", after))
        if right is not None
    }
    row = {"exercise": EXERCISE, "status": "correct" if solved else "not yet", "attempts": 3, "hints": hints}
    exercises = [{**row, "solution_seen": not solved, "took_minutes": 8.0 if solved else 0.0}]
    data = {"course_pp_export": 2, "exercises": exercises, "quiz": quiz}
    path.write_text(json.dumps(data))
    return data


def test_gain_is_what_was_learned_of_what_could_be_among_those_who_answered_twice(tmp_path: Path) -> None:
    n = len(BUBBLE)
    person(tmp_path / "a.json", before=0, after=n)
    person(tmp_path / "b.json", before=0, after=0)
    person(tmp_path / "c.json", before=n, after=None)  # has not answered after: counts for nothing
    report = class_report(tmp_path)
    [line] = report.concepts
    assert (report.people, line.concept, line.people, line.before, line.after, line.gain) == (
        3,
        "bubble",
        2,
        0,
        0.5,
        0.5,
    )
    first = next(line for line in report.questions if line.name == BUBBLE[0].name)
    assert (first.answered, first.right, first.common_mistake) == (2, 1, BUBBLE[0].wrong[0].says)


def test_an_exercise_that_half_of_those_who_try_fail_is_marked_with_help_and_minutes(tmp_path: Path) -> None:
    person(tmp_path / "a.json", None, None, solved=True, hints=0)
    person(tmp_path / "b.json", None, None, solved=False, hints=2)
    report = class_report(tmp_path)
    line = next(line for line in report.exercises if line.exercise == EXERCISE)
    assert (line.tried, line.correct, line.attempts, line.hints) == (2, 1, 3, 1)
    assert (line.solution_seen, line.minutes, line.hard) == (1, 8, True)
    assert "many fail" in str(report)
    person(tmp_path / "c.json", None, None)
    assert "many fail" not in str(class_report(tmp_path))


def exported(line: str) -> str:
    return f'{{"course_pp_export": 2, "exercises": [{line}]}}'


DAMAGED: dict[str, Any] = {
    "cut.json": '{"course_pp_export": 2, "exerc',
    "foreign.json": '{"name": "package", "version": "1.0"}',
    "new.json": '{"course_pp_export": 3, "exercises": []}',
    "bytes.json": b"\xff\xfe\x00",
    "status.json": exported(
        '{"exercise": "shift", "status": "perfect", "attempts": 1, "hints": 0, "solution_seen": false}'
    ),
    "negative.json": exported(
        '{"exercise": "shift", "status": "open", "attempts": -1, "hints": 0, "solution_seen": false}'
    ),
    "quiz.json": '{"course_pp_export": 2, "exercises": [], "quiz": {"after": {"x": 1}}}',
    "deep.json": "[" * 100_000,
    "nan.json": exported(
        '{"exercise": "a", "status": "open", "attempts": 1, "hints": 0, "solution_seen": true, "took_minutes": NaN}'
    ),
    "marks.csv": "name,mark\nA,1\n",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_foreign_file_is_one_line_and_the_others_count(name: str, tmp_path: Path) -> None:
    person(tmp_path / "good.json", 0, 1)
    content = DAMAGED[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    report = class_report(tmp_path)
    assert report.people == 1
    [said] = report.left_out
    assert said.startswith(f"{name} ")
    assert said.endswith("; left out")
    assert "\n" not in said


def test_what_progress_exports_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    STORE.record_hint(EXERCISE, 3)
    STORE.record_attempt(EXERCISE, correct=False)
    STORE.record_attempt(EXERCISE, correct=True)
    for when in ("before", "after"):
        keep_answers(when, {BUBBLE[0].name: BUBBLE[0].correct})  # type: ignore[arg-type]
    folder = tmp_path / "class"
    folder.mkdir()
    progress().to_json(folder / "mine.json")
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 export read\n")
    assert f"{EXERCISE} " in out
    assert "bubble   1       100%    100%   all known before" in out
    assert main(["report", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    [line] = [line for line in data["exercises"] if line["tried"]]
    assert (line["exercise"], line["correct"], line["hints"], line["hard"]) == (EXERCISE, 1, 1, False)


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
