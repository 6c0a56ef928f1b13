"""The question of each `guess_…` in the notebooks, its measurement, and the notebook's comment."""

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

from routes import title_of


@dataclass(frozen=True)
class Guess:
    """A number that the learner commits to.

    Attributes:
        name: name of the variable: ``"guess_bubble"``.
        question: paragraph that asks for the number.
        shown: line that the cell prints.
        told: first paragraph after the cell: the common guess, and why it is wrong or right.
    """

    name: str
    question: str
    shown: str
    told: str


def guesses_of(notebook: dict) -> list[Guess]:
    """Return the guesses of a notebook in the order in which they are revealed."""
    cells = notebook["cells"]
    found = []
    questions: dict[str, str] = {}
    prose = ""
    for i, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            prose = source
            continue
        for name in re.findall(r"\bguess_\w+(?=(?:, guess_\w+)* = )", source):
            asked = re.findall(r"\*\*Predict\.\*\*.*?(?=\n\n|\Z)", prose, re.S)
            questions[name] = asked[-1] if asked else prose.rstrip().rpartition("\n\n")[2]
        lines = "".join("".join(o.get("text", "")) for o in cell.get("outputs", ())).splitlines()
        lines = [line for line in lines if line.endswith("you have not guessed")]
        for name, line in zip(_revealed(source), lines, strict=False):
            told = _first_paragraph(cells[i + 1 :])
            # The next section, or the next question, says nothing about this guess.
            if told.startswith(("#", "**Predict")):
                told = ""
            question = questions.get(name, "")
            shown = line.partition("; you have")[0]
            found.append(Guess(name, question, shown=shown, told=told))
    return found


def _first_paragraph(cells: list[dict]) -> str:
    for cell in cells:
        if cell["cell_type"] == "markdown":
            return "".join(cell["source"]).partition("\n\n")[0]
    return ""


def _revealed(source: str) -> list[str]:
    try:
        tree = ast.parse(re.sub(r"(?m)^%.*", "", source))
    except SyntaxError:
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: call.lineno)
    revealed = []
    for call in calls:
        is_reveal = getattr(call.func, "id", "") == "reveal" and len(call.args) > 1
        if is_reveal and isinstance(call.args[1], ast.Name):
            revealed.append(call.args[1].id)
    return revealed


def page(notebooks: list[Path]) -> str:
    """Return all guesses in Markdown, for the instructor."""
    lines = [
        "# What each guess is there to expose",
        "",
        "For the instructor: it tells all results. Ask for a show of hands before the cell runs.",
        "",
    ]
    for path in notebooks:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        lines += [f"## {title_of(notebook)}", ""]
        for guess in guesses_of(notebook):
            question = " ".join(guess.question.removeprefix("**Predict.**").split())
            lines += [f"`{guess.name}`", f": {question}", "", f": **{guess.shown}**", ""]
            if guess.told:
                told = " ".join(guess.told.split())
                told = re.sub(r"\]\((?!http)", "](../notebooks/", told)
                lines += [f": {told}", ""]
    return "\n".join(lines)
