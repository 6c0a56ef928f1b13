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
        name: ``"guess_bubble"``.
        question: the paragraph that asks for it.
        shown: the line that the cell prints.
        told: the first paragraph after it: the common guess, and why it is wrong or right.
    """

    name: str
    question: str
    shown: str
    told: str


def guesses_of(notebook: dict) -> list[Guess]:
    """The guesses of a notebook in the order in which they are revealed."""
    cells, found = notebook["cells"], []
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
            after = next(
                ("".join(c["source"]) for c in cells[i + 1 :] if c["cell_type"] == "markdown"), ""
            )
            told = after.partition("\n\n")[0]
            told = "" if told.startswith(("#", "**Predict")) else told
            found.append(
                Guess(name, questions.get(name, ""), line.partition("; you have")[0], told)
            )
    return found


def _revealed(source: str) -> list[str]:
    try:
        tree = ast.parse(re.sub(r"(?m)^%.*", "", source))
    except SyntaxError:
        return []
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reveal"
    ]
    calls.sort(key=lambda call: call.lineno)
    return [name.id for call in calls for name in call.args[1:2] if isinstance(name, ast.Name)]


def page(notebooks: list[Path]) -> str:
    """All guesses in Markdown, for the instructor."""
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
