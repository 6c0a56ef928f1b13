"""Statements stay plain: python -m tests.test_statements prints the figures of each room.

The figures count four things in a thousand lines: comprehensions, conditional expressions, packed
assignments (``a, b = x, y``) and hard statements. A hard statement has more than one comprehension,
or a conditional expression inside another. If a room gets fewer, lower its limit in ``MOST``.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTH = 100
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
KINDS = (
    "comprehensions",
    "conditional expressions",
    "packed assignments",
    "hard statements",
    "long lines",
)

# Most of each kind in a thousand lines.
MOST = {
    "course_pp/base": (31, 24, 8, 1, 1),
    "course_pp/doctor": (21, 11, 1, 1, 1),
    "course_pp/exercises": (48, 12, 5, 3, 3),
    "course_pp/launch": (17, 18, 2, 1, 1),
    "course_pp/model": (16, 26, 8, 1, 1),
    "course_pp/notebook": (27, 20, 2, 1, 1),
    "course_pp/parallel": (47, 24, 8, 3, 1),
    "course_pp/plan": (37, 15, 5, 1, 1),
    "course_pp/runtime": (26, 19, 4, 1, 1),
    "course_pp/schedule": (43, 19, 8, 3, 1),
    "course_pp/show": (38, 27, 3, 3, 1),
    "course_pp/step": (31, 15, 4, 2, 1),
    "course_pp/training": (23, 15, 3, 1, 1),
    "source_code": (16, 14, 3, 1, 1),
    "docs": (28, 14, 2, 1, 5),
}


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield statements that hold no other statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node


def is_packed(statement: ast.stmt) -> bool:
    """Return whether a tuple of values is assigned to a tuple of names, unless it is a swap."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Tuple):
        return False
    targets = statement.targets[0]
    if not isinstance(targets, ast.Tuple):
        return False
    names = sorted(ast.dump(target).replace("Store", "Load") for target in targets.elts)
    return names != sorted(ast.dump(value) for value in statement.value.elts)


def is_hard(statement: ast.stmt) -> bool:
    """Return whether a statement has two comprehensions, or nested conditional expressions."""
    nodes = list(ast.walk(statement))
    conditionals = [node for node in nodes if isinstance(node, ast.IfExp)]
    inner = [node for outer in conditionals for node in ast.walk(outer) if node is not outer]
    return sum(isinstance(node, COMPREHENSIONS) for node in nodes) > 1 or any(
        isinstance(node, ast.IfExp) for node in inner
    )


def figures(room: str) -> tuple[float, ...]:
    """Return the number of each kind in a thousand lines of a room."""
    counts: Counter[str] = Counter()
    lines = 0
    for path in (ROOT / room).rglob("*.py"):
        text = path.read_text()
        lines += text.count("\n")
        counts["long lines"] += sum(len(line) > WIDTH for line in text.splitlines())
        for node in ast.walk(ast.parse(text)):
            counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
            counts["conditional expressions"] += isinstance(node, ast.IfExp)
        for statement in statements(ast.parse(text)):
            counts["packed assignments"] += is_packed(statement)
            counts["hard statements"] += is_hard(statement)
    return tuple(1000 * counts[kind] / lines for kind in KINDS)


def rooms() -> list[str]:
    parts = [path for path in (ROOT / "course_pp").iterdir() if (path / "__init__.py").exists()]
    return [*sorted(f"course_pp/{path.name}" for path in parts), "source_code", "docs"]


@pytest.mark.parametrize("room", MOST)
def test_a_room_keeps_its_statements_plain(room: str) -> None:
    for kind, found, most in zip(KINDS, figures(room), MOST[room], strict=True):
        assert found <= most, f"{room}: {found:.1f} {kind} in a thousand lines, at most {most}"


def test_every_room_has_its_figures() -> None:
    assert sorted(MOST) == sorted(rooms())


if __name__ == "__main__":
    for name in rooms():
        print(f"{name:<22}", *(f"{number:6.1f}" for number in figures(name)))
