"""Pages and pictures that the package makes are those that are committed."""

import html
import json
import re
import sys
from pathlib import Path

import pytest

from course_pp.exercises import Verdict
from course_pp.schedule import names, theory

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def docs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield
    for name in (
        "comparison",
        "cheat_sheet",
        "routes",
        "slides",
        "as_html",
        "handouts",
        "guesses",
        "pages",
        "chapters",
    ):
        sys.modules.pop(name, None)


def test_the_comparison_of_schedules_is_what_simulation_says():
    import comparison

    assert comparison.PAGE.read_text(encoding="utf-8") == comparison.page(), "make images"
    assert set(comparison.REMARKS) <= set(names())


def test_a_schedule_without_a_remark_is_told_by_its_own_first_sentence(monkeypatch):
    import comparison

    for name in ("gpipe", "zb_h2", "1f1b"):
        monkeypatch.delitem(comparison.REMARKS, name)
    assert comparison.remark("gpipe") == 'all forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.3)'
    assert all(comparison.remark(name) for name in names())


def test_its_steps_are_those_of_the_closed_forms():
    import comparison

    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"):
        schedule = comparison.build(name, comparison.RANKS, comparison.MICROBATCHES)
        share = comparison.Fraction(comparison.RANKS, schedule.n_stages)
        costs = comparison.Costs(forward=share, input_grad=share, weight_grad=share)
        predicted = theory.predict(name, comparison.RANKS, comparison.MICROBATCHES, costs)
        assert comparison.row(name).step == predicted.makespan


@pytest.mark.slow
def test_the_cheat_sheet_says_what_is_drawn():
    import cheat_sheet

    drawn = (ROOT / "images" / "cheat_sheet.svg").read_text(encoding="utf-8")
    assert re.search(r"<desc>(.*?)</desc>", drawn)[1] == cheat_sheet.draw().alt_text, "make images"
    assert (ROOT / "images" / "cheat_sheet.pdf").read_bytes().startswith(b"%PDF")


def test_the_picture_of_the_readme_moves_thrice_at_most_and_rests_for_who_asks():
    picture = (ROOT / "images" / "1f1b_on_two_ranks.svg").read_text(encoding="utf-8")
    assert re.findall(r"animation: \w+ 8s linear (\w+)", picture) == ["3", "3"]
    assert "prefers-reduced-motion: reduce" in picture


def test_every_route_fits_its_time_and_leaves_some_for_questions():
    import routes

    for route in routes.ROUTES[:-1]:
        used = sum(sum(routes.minutes_of(part)) for part in route.parts)
        assert 0.6 * route.minutes <= used <= 0.85 * route.minutes, route.title
    listed = (ROOT / "INSTRUCTOR.md").read_text(encoding="utf-8")
    for route in routes.ROUTES:
        [row] = re.findall(rf"^\| {route.title.split(',')[0].split(' (')[0].lower()} \|.*", listed, re.M)
        assert row.endswith(f"| {routes.ranks_of(route)} |")
        if route.minutes:
            numbers = {part.notebook for part in route.parts}
            assert set(re.findall(r"\b\d\d\b", row.split("|")[3])) - {"10"} == numbers
            assert f"{sum(len(part.exercises) for part in route.parts)} exercises" in row


def test_an_unknown_route_is_told_the_names():
    import routes

    assert [routes.route(each.name) for each in routes.ROUTES] == [*routes.ROUTES]
    with pytest.raises(ValueError, match=r"no route 'a_week'; choose one of 45_minutes, .*, a_semester$"):
        routes.route("a_week")


@pytest.mark.slow
def test_slides_have_every_figure_described_and_need_nothing_else(tmp_path, monkeypatch, capsys):
    import slides

    monkeypatch.setattr(sys, "argv", ["slides.py", "--out", str(tmp_path)])
    assert slides.main() == 0
    decks = sorted(tmp_path.glob("*.html"))
    assert len(decks) == len(slides.ROUTES)
    for path in decks:
        text = path.read_text(encoding="utf-8")
        assert text.count("<img ") == len(re.findall(r'<img alt="[^"]+"', text)) > 2
        assert not re.findall(r'(?:src|href)="http', text)
        assert "$" not in re.sub(r"<pre>.*?</pre>|<script>.*?</script>", "", text, flags=re.S)


def test_a_handout_has_each_exercise_once_and_no_solution_but_for_teachers(monkeypatch):
    import handouts
    import routes

    monkeypatch.setattr(handouts, "judge", lambda exercise, wrong: Verdict("not yet", "", cause="the cause"))
    cells = [cell for path in (ROOT / "notebooks").glob("*.ipynb") for cell in json.loads(path.read_bytes())["cells"]]
    shipped = re.sub(r"  # noqa.*", "", "\n".join("".join(cell["source"]) for cell in cells))
    for each in routes.ROUTES:
        exercises = [exercise for part in each.parts for exercise in routes.exercises_in(part)]
        people = handouts.sheet(each, "exercises", handouts.for_people)
        teacher = handouts.sheet(each, "teacher", handouts.for_teachers)
        for sheet in (people, teacher):
            assert sheet.count("<article>") == sheet.count("<h2>") == len(exercises)
        # What stands in the notebooks holds no solution: tests of these see to it.
        assert [code for code in codes(people) if code not in shipped] == []
        for exercise, for_person, for_teacher in zip(
            exercises, people.split("<article>")[1:], teacher.split("<article>")[1:], strict=True
        ):
            about = html.escape(f": {exercise.title} {exercise.stars} {exercise.minutes} minutes")
            assert about in for_person
            assert about in for_teacher
            assert f"def {exercise.name}(" in for_person
            assert "NotImplementedError" not in for_person
            assert exercise.source in codes(for_teacher)
            assert "the cause" in for_teacher, exercise.name
            assert for_teacher.count("<li>") >= len(exercise.hints)
            assert "<details>" not in for_person


def codes(sheet: str) -> list[str]:
    return [html.unescape(code) for code in re.findall(r"<pre><code>(.*?)</code></pre>", sheet, re.S)]


@pytest.mark.slow
def test_a_teacher_reads_what_checks_say_of_common_mistakes(tmp_path, monkeypatch, capsys):
    import handouts

    monkeypatch.setattr(sys, "argv", ["handouts.py", "45_minutes", "--out", str(tmp_path)])
    assert handouts.main() == 0
    text = (tmp_path / "45_minutes_teacher.html").read_text(encoding="utf-8")
    assert "return (p - 1) / m</code>" in text
    assert "That is idle time over useful time." in text
    assert "- warm_up = min(m, p - 1 - rank)\n+ warm_up = m</code>" in text
    assert "That is what GPipe holds" in text
    assert not re.findall(r'(?:src|href)="http', text)


def test_an_unknown_route_has_no_handout(tmp_path, monkeypatch, capsys):
    import handouts

    monkeypatch.setattr(sys, "argv", ["handouts.py", "a_week", "--out", str(tmp_path / "none")])
    assert handouts.main() == 2
    assert "'a_week'; choose one of 45_minutes, 90_minutes" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_each_guess_has_its_question_and_its_result():
    import guesses

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        found = guesses.guesses_of(notebook)
        written = set(re.findall(r"\bguess_\w+(?=(?:, guess_\w+)* = )", json.dumps(notebook)))
        assert {each.name for each in found} <= written
        assert len(found) >= 0.8 * len(written), (path.name, written - {each.name for each in found})
        assert all(each.question and each.shown for each in found)
