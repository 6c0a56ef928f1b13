"""The arrows of the design hold, and heavy packages stay out of the importing process."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import course_pp

ROOT = Path(course_pp.__file__).parent

# The siblings that each package may import, beside `base`, which imports none. `exercises` and
# `notebook` are for cells: nothing imports `exercises`.
ARROWS: dict[str, set[str]] = {
    "base": set(),
    "schedule": set(),
    "plan": {"schedule"},
    "show": {"plan", "schedule"},
    "step": set(),
    "model": {"step"},
    "runtime": {"schedule", "step"},
    "parallel": {"model", "schedule", "step"},
    "training": {"model", "parallel", "runtime", "schedule", "step"},
    "launch": set(),
    "doctor": {"launch"},
    "notebook": {"launch", "runtime", "schedule"},
}

# The one exception, inside a function: a board that is told to run what was drawn starts ranks.
LATE = {"show/board_widget.py": {"notebook"}}

HEAVY = {"torch", "transformers", "datasets"}


@pytest.mark.parametrize(
    ("module", "kept_out"),
    [
        ("course_pp", HEAVY | {"numpy", "matplotlib"}),
        ("course_pp.plan", HEAVY | {"numpy", "matplotlib"}),
        ("course_pp.schedule", HEAVY | {"numpy", "matplotlib"}),
        ("course_pp.show", HEAVY | {"matplotlib.pyplot"}),
        ("course_pp.launch", HEAVY),
        ("course_pp.doctor", HEAVY | {"numpy", "matplotlib", "IPython"}),
        ("course_pp.notebook", HEAVY | {"matplotlib"}),
    ],
)
def test_importing_a_light_package_keeps_the_heavy_ones_out(
    module: str, kept_out: set[str]
) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert kept_out.isdisjoint(done.stdout.split())


def siblings_imported(path: Path) -> set[str]:
    """Return the rooms that a file imports, in functions too."""
    package = ["course_pp", *path.relative_to(ROOT).with_suffix("").parts][:-1]
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*base, *filter(None, [node.module])])
            names += [f"{start}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "course_pp" and len(part) > 1} - {"__version__"}


@pytest.mark.parametrize("package", ARROWS)
def test_packages_import_only_along_the_arrows(package: str) -> None:
    allowed = ARROWS[package] | {"base", package}
    wrong = {
        str(path.relative_to(ROOT)): sorted(extra)
        for path in (ROOT / package).rglob("*.py")
        if (
            extra := siblings_imported(path)
            - allowed
            - LATE.get(str(path.relative_to(ROOT)), set())
        )
    }
    assert not wrong


def test_the_arrows_name_every_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"exercises"} <= set(ARROWS)


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import course_pp.model.stages", {"model"}),
        ("from course_pp import launch, show", {"launch", "show"}),
        ("def f():\n    from ..training import data", {"training"}),
        ("from .timeline import Span", {"schedule"}),
        ("import torch", set()),
    ],
)
def test_the_check_sees_every_form_of_import(
    source: str, imported: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "schedule").mkdir()
    path = tmp_path / "schedule" / "module.py"
    path.write_text(source)
    assert siblings_imported(path) == imported
