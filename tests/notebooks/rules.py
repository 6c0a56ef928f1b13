"""The rules of all notebooks. Each rule is a function that yields the places that break it."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

from course_pp.exercises.exercise import exercises_of
from tests.notebooks import origins, quotes

MIN_CELLS, MAX_CELLS = 15, 20
MAX_MEDIAN_LINES = 6
MAX_LINES = 20
MAX_WORDS = 2600
MIN_CONCEPTS = 3
MIN_EXERCISES, MAX_EXERCISES = 3, 5
# A cell with this tag may be longer: the text above asks the reader to read it.
READ_TAG = "read"
# Where a kernel lacks the package, its traceback shows this line, and so what to do.
FIRST_LINE = (
    "from course_pp import show  # not found? Start with `make lab`, or choose the kernel of"
    " .venv\n"
)
# Their scripts are launched, as the owner of the course asked.
LAUNCHING = ("01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12", "13")
# Whoever comes from PyTorch's tutorial finds each step of its script, by these names in code.
TORCHS_OWN = {
    "03": (
        "PipelineStage(",
        "SplitPoint",
        "ScheduleGPipe",
        "Schedule1F1B",
        ".step(x)",
        ".step(target=y, losses=losses)",
    ),
    "10": ("pipeline(", "SplitPoint.BEGINNING", ".build_stage(", "ScheduleGPipe("),
}
# What draws a concept, and not a timeline, a curve or bars.
CONCEPTS = {
    *(
        "autograd",
        "carried",
        "course_map",
        "cut",
        "dependencies",
        "exchange",
        "fsdp_step",
        "mesh",
        "message",
    ),
    *(
        "microbatches",
        "parallelisms",
        "pieces",
        "placement",
        "play",
        "ring",
        "routing",
        "tensor_cut",
        "versions",
        "waits",
    ),
}

Notebook = nbformat.NotebookNode
Rule = Callable[[Notebook, Path], Iterator[str]]

_NAME = re.compile(r"\d\d_[a-z0-9]+(_[a-z0-9]+)*\.ipynb")
_SHELL = re.compile(
    r"^\s*(!|%%(bash|sh|script|system)\b|%(system|sx)\b)|^\s*\w+\s*=\s*!", re.MULTILINE
)
# A path below one of these belongs to whoever ran the notebook. A URL has a letter before such a
# part.
_MACHINE_PATH = re.compile(
    r"(?<![\w./])/(home|root|tmp|work|Users|var/folders|mnt|workspace)/\S*|\b[A-Z]:\\\\?Users\b"
)
_LINK = re.compile(r"\]\(([^)\s]+)\)|\bhref=[\"']([^\"']+)")


def name_says_order_and_topic(notebook: Notebook, path: Path) -> Iterator[str]:
    if not _NAME.fullmatch(path.name):
        yield f"{path.name} is not named NN_topic.ipynb"


def runs_on_the_kernel_everyone_has(notebook: Notebook, path: Path) -> Iterator[str]:
    kernel = notebook.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        yield f"the kernel is {kernel!r}, not 'python3'"


def begins_with_title_minutes_and_ranks(notebook: Notebook, path: Path) -> Iterator[str]:
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not first.source.startswith(f"# {path.name[:2]} · "):
        yield f"the first cell does not begin with the title '# {path.name[:2]} · …'"
    if not re.search(r"\d+ minutes", first.source):
        yield "the first cell does not say how many minutes it takes"
    if not re.search(r"\d ranks?\b", first.source):
        yield "the first cell does not say how many ranks it uses"


def names_the_right_kernel_where_another_stops(notebook: Notebook, path: Path) -> Iterator[str]:
    if not code_cells(notebook)[0].source.startswith(FIRST_LINE):
        yield f"the first code cell does not begin with {FIRST_LINE!r}"


def calls_no_shell(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell in code_cells(notebook):
        if match := _SHELL.search(cell.source):
            yield (
                f"cell {cell.id} calls a shell ({match[0].strip()}), whose failure passes silently"
            )


def is_executed_in_order(notebook: Notebook, path: Path) -> Iterator[str]:
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts {counts}: run all cells once, from the top"
    if not any(cell.outputs for cell in code_cells(notebook)):
        yield "no cell has an output"


def shows_no_error(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell, output in _outputs(notebook):
        if output.output_type == "error" or "Traceback" in _text_of(output):
            yield f"cell {cell.id} shows an error"


def names_nobodys_machine(notebook: Notebook, path: Path) -> Iterator[str]:
    texts = [(cell, cell.source) for cell in notebook.cells]
    texts += [(cell, _text_of(output)) for cell, output in _outputs(notebook)]
    for cell, text in texts:
        if match := _MACHINE_PATH.search(text):
            yield f"cell {cell.id} names a path of one machine: {match[0]}"


def describes_every_picture(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell, output in _outputs(notebook):
        for kind in output.get("data", {}):
            if (
                kind.startswith("image/")
                and not output.metadata.get(kind, {}).get("alt", "").strip()
            ):
                yield f"cell {cell.id} shows an {kind} without alt text"
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and re.search(
            r"!\[\s*\]\(|<img(?![^>]*\balt=[\"'][^\"'])", cell.source
        ):
            yield f"cell {cell.id} shows a picture without alt text"


def links_to_what_exists(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for target in (markdown or html for markdown, html in _LINK.findall(cell.source)):
            file = target.partition("#")[0]
            if file and not re.match(r"[a-z]+:", file) and not (path.parent / file).exists():
                yield f"cell {cell.id} links to {target}, which does not exist"


def holds_the_exercises_of_its_module(notebook: Notebook, path: Path) -> Iterator[str]:
    wanted = [exercise.name for exercise in exercises_of(path.name[:2])]
    asked = [name for cell in code_cells(notebook) for name in checked(cell)]
    if asked != wanted:
        yield f"checks {asked}, while the exercises of its module are {wanted}, in this order"
    if wanted and not MIN_EXERCISES <= len(wanted) <= MAX_EXERCISES:
        yield f"{len(wanted)} exercises, not {MIN_EXERCISES} to {MAX_EXERCISES}"


def leaves_each_exercise_to_the_learner(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell in code_cells(notebook):
        for name in checked(cell):
            tree = parsed(cell)
            stubs = [
                node
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and node.name == name
            ]
            if len(stubs) != 1:
                yield f"cell {cell.id} has {len(stubs)} functions {name} at its top level, not one"
            elif not _only_raises(stubs[0]):
                yield f"cell {cell.id}: the stub of {name} does more than raise NotImplementedError"
            if ast.unparse(tree.body[-1]) != f"check({name})":
                yield f"cell {cell.id} does not end in check({name}), so its verdict is not shown"


def uses_an_answer_only_where_it_is_asked_for(notebook: Notebook, path: Path) -> Iterator[str]:
    """An unsolved exercise must stop nobody, and `solved` may solve each in its own place."""
    answers = {exercise.name for exercise in exercises_of(path.name[:2])}
    for cell in code_cells(notebook):
        used = {node.id for node in ast.walk(parsed(cell)) if isinstance(node, ast.Name)}
        for name in sorted(used & answers - set(checked(cell))):
            yield (
                f"cell {cell.id} uses {name}, which is an exercise: take what it needs from the"
                " package"
            )


def is_light(notebook: Notebook, path: Path) -> Iterator[str]:
    """Cells tagged for reading may be long."""
    code = code_cells(notebook)
    lines = [len(cell.source.splitlines()) for cell in code]
    longest = max(
        n
        for n, cell in zip(lines, code, strict=True)
        if READ_TAG not in cell.metadata.get("tags", ())
    )
    words = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    concepts = sum(bool(_shown_by(cell) & CONCEPTS) for cell in code)
    if not MIN_CELLS <= len(code) <= MAX_CELLS:
        yield f"{len(code)} code cells, not {MIN_CELLS} to {MAX_CELLS}"
    if median(lines) > MAX_MEDIAN_LINES:
        yield f"a median of {median(lines)} lines a code cell, more than {MAX_MEDIAN_LINES}"
    if longest > MAX_LINES:
        yield f"a code cell of {longest} lines, more than {MAX_LINES}, and not tagged {READ_TAG!r}"
    if words > MAX_WORDS:
        yield f"{words} words, more than {MAX_WORDS}"
    if concepts < MIN_CONCEPTS:
        yield f"{concepts} figures of concepts, fewer than {MIN_CONCEPTS}"


def launches_its_script(notebook: Notebook, path: Path) -> Iterator[str]:
    if path.name[:2] in LAUNCHING and not any(
        "%torchrun" in cell.source for cell in code_cells(notebook)
    ):
        yield "no %torchrun cell launches a script"
    if path.name[:2] in LAUNCHING and not any(
        "On the cluster" in cell.source for cell in notebook.cells
    ):
        yield "no section 'On the cluster'"


def shows_torchs_own_pipeline(notebook: Notebook, path: Path) -> Iterator[str]:
    code = "\n".join(cell.source for cell in code_cells(notebook))
    for name in TORCHS_OWN.get(path.name[:2], ()):
        if name not in code:
            yield f"no code cell has {name}, which PyTorch's own script has"


def cites_each_reference(notebook: Notebook, path: Path) -> Iterator[str]:
    prose, _, references = "\n\n".join(
        c.source for c in notebook.cells if c.cell_type == "markdown"
    ).partition("**References**")
    cited = {
        number
        for group in re.findall(r"\[([\d, ]+)\](?!\()", prose)
        for number in re.findall(r"\d+", group)
    }
    for number in re.findall(r"^(\d+)\. ", references, re.MULTILINE):
        if number not in cited:
            yield f"nothing cites reference {number}"


def leaves_each_guess_to_the_learner(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell in code_cells(notebook):
        for node in ast.walk(parsed(cell)):
            if not isinstance(node, ast.Assign) or not ast.unparse(node.targets[0]).startswith(
                "guess_"
            ):
                continue
            if ast.unparse(node.value) != "...":
                yield f"cell {cell.id} makes the guess {ast.unparse(node)}: ship it as ..."


def knows_where_its_numbers_come_from(notebook: Notebook, path: Path) -> Iterator[str]:
    yield from quotes.problems(notebook, quotes.sources_of(path))


def says_how_each_value_was_found(notebook: Notebook, path: Path) -> Iterator[str]:
    """A simulated value, also of `emulate` on a busy machine, is not called measured."""
    cells = [parsed(cell) for cell in code_cells(notebook)]
    yield from origins.wrongly_called(cells)
    for call in (node for cell in cells for node in ast.walk(cell) if isinstance(node, ast.Call)):
        words = ast.unparse(call)
        if ast.unparse(call.func).endswith("compare") and "'measured'" in words:
            yield f"{words} names a timeline 'measured': name it by its .how"


def announces_each_exercise(notebook: Notebook, path: Path) -> Iterator[str]:
    headings = [
        line
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
    ]
    for i, exercise in enumerate(exercises_of(path.name[:2]), 1):
        heading = (
            f"### Exercise {i} · {exercise.title} · {exercise.stars} · {exercise.minutes} minutes"
        )
        if heading not in headings:
            yield f"no heading '{heading}'"


RULES: tuple[Rule, ...] = (
    name_says_order_and_topic,
    runs_on_the_kernel_everyone_has,
    begins_with_title_minutes_and_ranks,
    is_light,
    launches_its_script,
    shows_torchs_own_pipeline,
    cites_each_reference,
    names_the_right_kernel_where_another_stops,
    calls_no_shell,
    is_executed_in_order,
    shows_no_error,
    names_nobodys_machine,
    describes_every_picture,
    links_to_what_exists,
    holds_the_exercises_of_its_module,
    leaves_each_exercise_to_the_learner,
    uses_an_answer_only_where_it_is_asked_for,
    announces_each_exercise,
    leaves_each_guess_to_the_learner,
    knows_where_its_numbers_come_from,
    says_how_each_value_was_found,
)


def _shown_by(cell: Notebook) -> set[str]:
    """The names in ``show.name(...)``."""
    return {
        node.func.attr
        for node in ast.walk(parsed(cell))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "show"
    }


def parsed(cell: Notebook) -> ast.Module:
    """A code cell with its magics as the calls that IPython makes of them."""
    return ast.parse(TransformerManager().transform_cell(cell.source))


def checked(cell: Notebook) -> list[str]:
    """The names in ``check(name)`` at the top level of a cell."""
    if cell.cell_type != "code" or "check(" not in cell.source:
        return []
    calls = [node.value for node in parsed(cell).body if isinstance(node, ast.Expr)]
    return [
        call.args[0].id
        for call in calls
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "check"
        and len(call.args) == 1
        and isinstance(call.args[0], ast.Name)
    ]


def _only_raises(stub: ast.FunctionDef) -> bool:
    body = [
        node
        for node in stub.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    return [ast.unparse(node) for node in body] == ["raise NotImplementedError"]


def code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _outputs(notebook: Notebook) -> Iterator[tuple[Notebook, Notebook]]:
    for cell in code_cells(notebook):
        for output in cell.outputs:
            yield cell, output


def _text_of(output: Notebook) -> str:
    """Everything in an output that a reader sees as text."""
    parts: list[Any] = [output.get("text", ""), *output.get("traceback", [])]
    parts += [
        value for kind, value in output.get("data", {}).items() if not kind.startswith("image/png")
    ]
    return "\n".join(map(str, parts))
