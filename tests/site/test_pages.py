"""Pages and pictures that the package makes are those that are committed."""

import html
import json
import re
import subprocess
import sys
from itertools import pairwise
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
        "out",
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
    assert (
        comparison.remark("gpipe")
        == 'all forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.3)'
    )
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


def test_every_route_fits_its_time_and_leaves_a_tenth_of_it_for_questions():
    import routes

    listed = (ROOT / "INSTRUCTOR.md").read_text(encoding="utf-8")
    for route in routes.ROUTES:
        rows = routes.timetable(route)
        meetings = len(route.parts) if route.weekly else 1
        used = sum(row.minutes - row.questions for row in rows)
        assert 0.7 * route.minutes * meetings <= used <= 0.9 * route.minutes * meetings, route.title
        assert all(row.questions >= 0 for row in rows)
        assert [row.minutes >= 2 for row in rows if row.what.startswith("hand in")] == [True], (
            route.title
        )
        if not route.weekly:
            bounds = [row for row in rows if row.what in ("break", "lunch")]
            begins = [rows[0].begins, *(row.begins + row.minutes for row in bounds)]
            ends = [*(row.begins for row in bounds), rows[0].begins + route.minutes]
            longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
            assert longest <= (75 if route.name == "a_day" else 95), (route.title, longest)
        for row, following in pairwise(rows):
            assert following.begins == (
                9 * 60 if following.week > row.week else row.begins + row.minutes
            )
        [row] = re.findall(
            rf"^\| {route.title.split(',')[0].split(' (')[0].lower()} \|.*", listed, re.M
        )
        assert row.endswith(f"| {routes.ranks_of(route)} |")
        assert routes.in_short(route) in " ".join(listed.split())
        if not route.weekly:
            numbers = {part.notebook for part in route.parts}
            assert set(re.findall(r"\b\d\d\b", row.split("|")[3])) - {"10"} == numbers
            assert f"{sum(len(part.exercises) for part in route.parts)} exercises" in row


@pytest.mark.parametrize("script", ["routes", "slides"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--route", "a_week"],
            r"there is no route 'a_week'; choose one of 45_minutes, .*, a_semester\.",
        ),
        (["--start", "9.30"], r"--start is '9\.30', and not a time such as 9:00 or 13:30\."),
    ],
)
def test_a_wrong_route_or_time_gets_one_sentence(script, arguments, sentence, tmp_path):
    command = [sys.executable, str(ROOT / "docs" / f"{script}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(sentence + "\n", done.stderr), done.stderr


@pytest.mark.parametrize("script", ["slides", "handouts", "make_site"])
def test_a_folder_that_cannot_be_written_gets_one_sentence(script, tmp_path):
    (tmp_path / "file").touch()
    route = ["45_minutes"] if script == "handouts" else []
    for out, why in (
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "in_it", "Not a directory"),
    ):
        command = [sys.executable, str(ROOT / "docs" / f"{script}.py"), *route, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            done.stderr
            == f"--out is {out}, and nothing can be written there ({why}): name another folder.\n"
        )


def test_minutes_exercises_and_sections_on_slides_are_those_of_the_route():
    import as_html
    import routes
    import slides

    for route in routes.ROUTES:
        deck = slides.deck(route, start=8 * 60)
        assert sum(map(int, re.findall(r'class="minutes">(\d+) min', deck))) == route.minutes * (
            len(route.parts) if route.weekly else 1
        )
        exercises = [exercise for part in route.parts for exercise in routes.exercises_in(part)]
        shown = re.findall(
            r"<h2>Exercise \d · (.*?) · [★☆]+</h2><span class=\"(\w+)\">(\d+) min", deck
        )
        where = "home" if route.weekly else "minutes"
        assert shown == [(html.escape(each.title), where, str(each.minutes)) for each in exercises]
        headings = re.findall(r"<h2>(.*?)</h2>", deck)
        for part in route.parts:
            assert html.escape(routes.title_of(routes.read(part.notebook))) in headings
            assert {html.escape(section.title) for section in routes.chosen(part)} <= {*headings}
            for cell in (cell for section in routes.chosen(part) for cell in section.cells):
                if "read" in cell["metadata"].get("tags", ()):
                    assert all(
                        html.escape(line) in deck
                        for line in as_html.bare(cell["source"]).splitlines()
                    )
        for row in routes.timetable(route, start=8 * 60):
            assert f"<td>{row.when}</td><td>{row.what}</td>" in deck


@pytest.mark.slow
def test_slides_have_every_figure_described_and_need_nothing_else(tmp_path, monkeypatch, capsys):
    import slides

    monkeypatch.setattr(sys, "argv", ["slides.py", "--out", str(tmp_path)])
    assert slides.main() == 0
    decks = sorted(tmp_path.glob("*.html"))
    assert [path.stem for path in decks] == sorted(route.name for route in slides.routes.ROUTES)
    for path in decks:
        text = path.read_text(encoding="utf-8")
        assert text.count("<img ") == len(re.findall(r'<img alt="[^"]+"', text)) > 2
        assert not re.findall(r'(?:src|href)="http', text)
        assert "play the picture" not in text
        assert not re.findall(
            r"[\w)*] \[\d[],]", re.sub(r"<(pre|code).*?</\1>|<[^>]+>", "", text, flags=re.S)
        )
        assert "$" not in re.sub(r"<pre.*?</pre>|<script>.*?</script>", "", text, flags=re.S)
        for slide in re.findall(r"<section>(.*?)</section>", text, re.S):
            asked = "<strong>Predict" in slide.partition("<details")[0]
            assert not (
                asked and re.search(r": (?:measured|computed|simulated) |<img|<pre", slide)
            ), slide


def test_what_a_guess_exposed_stands_below_its_result_and_nowhere_else():
    import guesses
    import slides

    deck = slides.deck(slides.routes.route("a_semester"))
    bodies = [re.sub("<details.*", "", each, flags=re.S) for each in deck.split("<section>")[1:]]
    for part in slides.routes.route("a_semester").parts:
        for guess in guesses.guesses_of(slides.routes.read(part.notebook)):
            told = slides.rendered(slides.spoken(guess.told)).strip()
            shown = [body for body in bodies if html.escape(guess.shown) in body]
            assert len(shown) >= 1, guess.name
            assert not told or any(told in body for body in shown), guess.name
            assert not told or all(
                html.escape(guess.shown) in body for body in bodies if told in body
            ), guess.name


def test_a_clinic_asks_on_the_wall_and_its_diagnosis_is_folded():
    import slides

    route = slides.routes.route("a_semester")
    deck = slides.deck(route)
    shown = re.sub(r'<details class="notes">.*?</details>', "", deck, flags=re.S)
    clinics = [
        each
        for part in route.parts
        for each in slides.routes.chosen(part)
        if each.title == "Bug clinic"
    ]
    assert len(clinics) == 13
    for cell in (
        cell for section in clinics for cell in section.cells if cell["cell_type"] == "markdown"
    ):
        for block in slides.blocks(slides.spoken(cell["source"])):
            if block.startswith("<details>"):
                told = slides.rendered(block.split("\n\n")[1]).strip()
                assert told in deck
                assert told not in shown
            elif "Decide before you read on." in block:
                assert f"</pre>{slides.rendered(block).strip()}" in shown
            elif not block.startswith(("#", "```")) and "```" not in cell["source"]:
                assert slides.rendered(block).strip() in shown


def test_a_deck_shows_how_a_run_starts_on_a_cluster():
    import slides

    said = slides.ON_A_CLUSTER.partition(": ")[0]
    assert said in (ROOT / "course_pp" / "launch" / "where.py").read_text(encoding="utf-8")
    shown = slides.deck(slides.routes.route("a_day"))
    assert shown.count(said) == 5
    assert shown.count("%torchrun --nproc-per-node=2") >= 4


def test_a_handout_has_each_exercise_once_and_no_solution_but_for_teachers(monkeypatch):
    import handouts
    import routes

    monkeypatch.setattr(
        handouts, "judge", lambda exercise, wrong: Verdict("not yet", "", cause="the cause")
    )
    cells = [
        cell
        for path in (ROOT / "notebooks").glob("*.ipynb")
        for cell in json.loads(path.read_bytes())["cells"]
    ]
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
        for said in (
            "Twos. Ones would be right",
            "Far from all.",
            "<em>last</em> two",
            "play the picture",
        ):
            assert said not in people


def codes(sheet: str) -> list[str]:
    return [
        html.unescape(code) for code in re.findall(r"<pre><code>(.*?)</code></pre>", sheet, re.S)
    ]


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
        assert len(found) >= 0.8 * len(written), (
            path.name,
            written - {each.name for each in found},
        )
        assert all(each.question and each.shown for each in found)
