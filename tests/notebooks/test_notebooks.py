"""Every committed notebook keeps the rules, and every rule notices when it is broken."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_pp.exercises import Exercise
from tests.notebooks import rules
from tests.notebooks.rules import code_cells

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert {
        rule.__name__: broken for rule in rules.RULES if (broken := list(rule(notebook, path)))
    } == {}


@pytest.fixture(autouse=True)
def _launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook of these tests is one that launches a script, and names what PyTorch's has."""
    monkeypatch.setattr(rules, "LAUNCHING", (*rules.LAUNCHING, "97"))
    monkeypatch.setitem(rules.TORCHS_OWN, "97", ("show.mesh(",))


def picture(alt: str) -> nbformat.NotebookNode:
    return new_output(
        "display_data", data={"image/png": "iVBORw0KGgo="}, metadata={"image/png": {"alt": alt}}
    )


def printed(text: str) -> nbformat.NotebookNode:
    return new_output("stream", name="stdout", text=text)


def good_notebook(*exercises: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Keeps every rule, some of them only just. Exercises come after the first five cells."""
    cells = [
        new_markdown_cell("# 97 · Rings\n\n**30 minutes** · **1 to 4 ranks**"),
        new_code_cell(
            f"{rules.FIRST_LINE}1 + 1",
            outputs=[printed("https://example.org/home/page and 3/tmp/4")],
        ),
        new_code_cell("a = 1\n" * 20, outputs=[picture("One bar, 2 bytes")]),
        new_code_cell("b != a  # 100 %"),
        new_markdown_cell(
            "[itself](97_rings.ipynb#top) and [elsewhere](https://example.org/x.ipynb)"
        ),
        *exercises,
        new_code_cell("a = 1\n" * 21, metadata={"tags": [rules.READ_TAG]}),
        *(new_code_cell(f"show.{name}(4)") for name in ("ring", "mesh", "play")),
        new_markdown_cell("## On the cluster"),
        new_code_cell("%torchrun train.py"),
        *(new_code_cell("guess_size = ...") for _ in range(7 - len(exercises) // 2)),
    ]
    return numbered(
        new_notebook(
            cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        )
    )


def numbered(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    for i, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = i
    return notebook


def broken_rules(notebook: nbformat.NotebookNode, path: Path) -> set[str]:
    return {rule.__name__ for rule in rules.RULES if list(rule(notebook, path))}


def test_a_good_notebook_breaks_no_rule(tmp_path: Path) -> None:
    path = tmp_path / "97_rings.ipynb"
    path.touch()
    assert broken_rules(good_notebook(), path) == set()


def _set_source(cell: int, source: str) -> Callable[[nbformat.NotebookNode], None]:
    return lambda notebook: notebook.cells[cell].update(source=source)


def _add_output(output: nbformat.NotebookNode) -> Callable[[nbformat.NotebookNode], None]:
    return lambda notebook: notebook.cells[1].outputs.append(output)


def _add_code_cells(n: int) -> Callable[[nbformat.NotebookNode], None]:
    def add(notebook: nbformat.NotebookNode) -> None:
        notebook.cells += [new_code_cell("1") for _ in range(n)]
        numbered(notebook)

    return add


def _lengthen(n_lines: int) -> Callable[[nbformat.NotebookNode], None]:
    def lengthen(notebook: nbformat.NotebookNode) -> None:
        for cell in code_cells(notebook)[-8:]:
            cell.source = (
                "1\n" * n_lines if "%" not in cell.source else cell.source + "\n1" * n_lines
            )

    return lengthen


def _replace(cell: int, old: str, new: str) -> Callable[[nbformat.NotebookNode], None]:
    def change(notebook: nbformat.NotebookNode) -> None:
        assert old in notebook.cells[cell].source
        notebook.cells[cell].source = notebook.cells[cell].source.replace(old, new)

    return change


def _drop_outputs(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells[1:4]:
        cell.outputs = []


FOUND = "says_how_each_value_was_found"
TITLE = "begins_with_title_minutes_and_ranks"
ERROR = new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])
UNDESCRIBED = new_output("display_data", data={"image/png": "iVBORw0KGgo="})

BREAKAGES: list[tuple[str, Callable[[nbformat.NotebookNode], None]]] = [
    (
        "runs_on_the_kernel_everyone_has",
        lambda notebook: notebook.metadata.kernelspec.update(name="mine"),
    ),
    ("runs_on_the_kernel_everyone_has", lambda notebook: notebook.metadata.clear()),
    (TITLE, _set_source(0, "# Rings\n\n**30 minutes** · **1 to 4 ranks**")),
    (TITLE, _set_source(0, "# 97 · Rings\n\n**1 to 4 ranks**")),
    (TITLE, _set_source(0, "# 97 · Rings\n\n**30 minutes**")),
    ("is_light", lambda notebook: numbered(notebook).cells.pop()),
    ("is_light", _add_code_cells(6)),
    ("is_light", _lengthen(7)),
    ("is_light", _set_source(2, "1\n" * 21)),
    ("is_light", lambda notebook: notebook.cells[5].metadata.clear()),
    ("is_light", _set_source(4, "word " * 2601)),
    ("is_light", _replace(6, "ring", "timeline")),
    ("launches_its_script", _set_source(10, "1")),
    ("shows_torchs_own_pipeline", _replace(7, "mesh", "placement")),
    ("cites_each_reference", _set_source(4, "So [1, 3].\n\n**References**\n\n1. A.\n2. B.\n3. C.")),
    ("launches_its_script", _set_source(9, "## Elsewhere")),
    ("leaves_each_guess_to_the_learner", _set_source(3, "guess_size = 3")),
    ("knows_where_its_numbers_come_from", _set_source(4, "It took 3.5 s.")),
    (FOUND, _set_source(3, "run = emulate(order)\nreveal('b', guess_b, run.makespan)")),
    (
        FOUND,
        _set_source(
            3,
            "a, b = {m: emulate(m) for m in c}, emulate(d)\nreveal('b', e, a[1].spans, how=b.how)",
        ),
    ),
    (
        FOUND,
        _set_source(
            3,
            "a = emulate(c)\nb = emulate(d)\ne = b.makespan / a.makespan\nreveal('b', ..., e,"
            " how=[b])",
        ),
    ),
    (
        FOUND,
        _set_source(
            3, "a = [emulate(c)]\nb = [run.makespan for run in a]\nreveal('b', ..., max(b))"
        ),
    ),
    (FOUND, _set_source(3, "a: float = emulate(c).makespan\nreveal('b', ..., measured=a)")),
    (FOUND, _set_source(3, "a = 0\na += emulate(c).makespan\nreveal('b', ..., a)")),
    (
        FOUND,
        _set_source(
            3,
            "best = max(simulate(order).makespan for order in orders)\nreveal('b', guess_b, best)",
        ),
    ),
    (
        FOUND,
        _set_source(
            3, "loss = on_ranks(2, step)[0]\nreveal('loss', guess_loss, loss, how='simulated')"
        ),
    ),
    (FOUND, _set_source(3, "show.compare(a, b, names=('drawn', 'measured'))")),
    ("names_the_right_kernel_where_another_stops", _set_source(1, "%load_ext course_pp.launch")),
    ("calls_no_shell", _set_source(3, "a = 1\n!ls")),
    ("calls_no_shell", _set_source(3, "  !ls")),
    ("calls_no_shell", _set_source(3, "files = !ls")),
    ("calls_no_shell", _set_source(3, "%%bash\nls")),
    ("calls_no_shell", _set_source(3, "%%sh\nls")),
    ("is_executed_in_order", lambda notebook: notebook.cells[3].update(execution_count=None)),
    ("is_executed_in_order", lambda notebook: notebook.cells[3].update(execution_count=5)),
    ("is_executed_in_order", _drop_outputs),
    ("shows_no_error", _add_output(ERROR)),
    ("shows_no_error", _add_output(printed("Traceback (most recent call last):"))),
    ("names_nobodys_machine", _add_output(printed("saved /home/ada/course/a.png"))),
    ("names_nobodys_machine", _add_output(printed("in '/home/x'"))),
    ("names_nobodys_machine", _add_output(printed("C:\\Users\\ada"))),
    (
        "names_nobodys_machine",
        _add_output(new_output("execute_result", data={"text/plain": "/Users/ada/a"})),
    ),
    ("names_nobodys_machine", _set_source(3, "open('/tmp/a')")),
    ("names_nobodys_machine", _set_source(4, "see `/Users/a`")),
    ("describes_every_picture", _add_output(UNDESCRIBED)),
    ("describes_every_picture", _add_output(picture(" "))),
    ("describes_every_picture", _set_source(4, "![](97_rings.ipynb)")),
    ("describes_every_picture", _set_source(4, "<img src='97_rings.ipynb' alt=''>")),
    ("links_to_what_exists", _set_source(4, "[next](08_rings.ipynb)")),
    ("links_to_what_exists", _set_source(4, "<a href='../missing.md'>more</a>")),
]


@pytest.mark.parametrize(
    ("rule", "break_it"), BREAKAGES, ids=[f"{rule}-{i}" for i, (rule, _) in enumerate(BREAKAGES)]
)
def test_a_broken_rule_is_noticed_and_no_other(
    tmp_path: Path, rule: str, break_it: Callable[[nbformat.NotebookNode], None]
) -> None:
    path, notebook = tmp_path / "97_rings.ipynb", good_notebook()
    path.touch()
    break_it(notebook)
    assert broken_rules(notebook, path) == {rule}


STUB = 'def {name}(x):\n    """Half of x."""\n    raise NotImplementedError\n\n\ncheck({name})'


def notebook_with_exercises() -> nbformat.NotebookNode:
    """A good notebook whose cells 5 to 10 are three exercises, each a heading and a stub."""
    cells = []
    for i, name in enumerate(("halve", "thirds", "quarters"), 1):
        heading = f"Well then.\n\n### Exercise {i} · {name} · ★★☆ · 5 minutes\n\nComplete it."
        cells += [new_markdown_cell(heading), new_code_cell(STUB.format(name=name))]
    return good_notebook(*cells)


@pytest.fixture
def three_exercises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rules, "exercises_of", lambda notebook: [toy(n) for n in ("halve", "thirds", "quarters")]
    )


def toy(name: str) -> Exercise:
    def solution(x: float) -> float:
        return x / 2

    solution.__name__ = name
    return Exercise(solution, lambda answer: None, "97", name, 2, 5, ("Divide.",))


@pytest.mark.usefixtures("three_exercises")
def test_a_notebook_with_its_exercises_breaks_no_rule(tmp_path: Path) -> None:
    path = tmp_path / "97_rings.ipynb"
    path.touch()
    assert broken_rules(notebook_with_exercises(), path) == set()


HELD, STUBBED, ANNOUNCED = (
    "holds_the_exercises_of_its_module",
    "leaves_each_exercise_to_the_learner",
    "announces_each_exercise",
)
EXERCISE_BREAKAGES: list[tuple[str, Callable[[nbformat.NotebookNode], None]]] = [
    (HELD, _replace(6, "halve", "half")),
    (HELD, _replace(10, "check(quarters)", "None")),
    (HELD, lambda notebook: notebook.cells[6].update(source="1")),
    (STUBBED, _replace(6, "raise NotImplementedError", "return x / 2")),
    (STUBBED, _replace(6, "raise NotImplementedError", "y = x\n    raise NotImplementedError")),
    (STUBBED, _replace(6, "def halve", "def help_halve")),
    (STUBBED, _replace(6, "check(halve)", "check(halve)\nx = 3")),
    ("uses_an_answer_only_where_it_is_asked_for", _set_source(8 + 3, "a = halve(3)")),
    (ANNOUNCED, _replace(5, "★★☆", "★☆☆")),
    (ANNOUNCED, _replace(5, "5 minutes", "15 minutes")),
    (ANNOUNCED, _replace(7, "### Exercise 2", "### Exercise 3")),
    (ANNOUNCED, _replace(7, "· thirds ·", "· a third ·")),
]


@pytest.mark.usefixtures("three_exercises")
@pytest.mark.parametrize(
    ("rule", "break_it"),
    EXERCISE_BREAKAGES,
    ids=[f"{rule}-{i}" for i, (rule, _) in enumerate(EXERCISE_BREAKAGES)],
)
def test_a_broken_rule_of_exercises_is_noticed_and_no_other(
    tmp_path: Path, rule: str, break_it: Callable[[nbformat.NotebookNode], None]
) -> None:
    path, notebook = tmp_path / "97_rings.ipynb", notebook_with_exercises()
    path.touch()
    break_it(notebook)
    assert broken_rules(notebook, path) == {rule}


@pytest.mark.parametrize(
    "name", ["rings.ipynb", "7_rings.ipynb", "97_Rings.ipynb", "97-rings.ipynb", "97_.ipynb"]
)
def test_a_name_without_order_or_topic_is_noticed(tmp_path: Path, name: str) -> None:
    assert "name_says_order_and_topic" in broken_rules(good_notebook(), tmp_path / name)


def test_a_kernel_without_the_package_says_what_to_do() -> None:
    script = f"""
import sys
from IPython.core.interactiveshell import InteractiveShell

sys.modules["course_pp"] = None
InteractiveShell(colors="NoColor").run_cell({rules.FIRST_LINE!r} + "1 / 0")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "----> 1 from course_pp import show  # not found? Start with `make lab`" in done.stdout
    assert (done.stdout.count("---->"), "ZeroDivisionError" in done.stdout) == (1, False)
