"""The wheel holds all files of the course, and opens the course where there is no clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def tracked(folder: str) -> set[str]:
    """Return the existing files in ``folder`` that are committed or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no clone")
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def test_every_file_of_the_package_that_is_no_module_is_package_data() -> None:
    named = {str(path.relative_to(ROOT)) for glob in SETUPTOOLS["package-data"]["course_pp"]
             for path in (ROOT / "course_pp").glob(glob)}  # fmt: skip
    assert {name for name in tracked("course_pp") if not name.endswith(".py")} == named


def test_every_notebook_and_every_script_is_shipped_in_the_folder_it_has_here() -> None:
    shipped = set()
    for place, globs in SETUPTOOLS["data-files"].items():
        for path in (path for glob in globs for path in ROOT.glob(glob) if path.is_file()):
            name = str(path.relative_to(ROOT))
            assert place == f"share/course_pp/{path.parent.relative_to(ROOT)}"
            shipped.add(name)
    wanted = {name for name in tracked("notebooks") if name.endswith(".ipynb")} | tracked(
        "source_code"
    )
    assert shipped >= wanted


@pytest.mark.slow
def test_lab_says_what_is_missing_where_there_is_neither_clone_nor_wheel(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "course_pp", tmp_path / "course_pp", ignore=shutil.ignore_patterns("__pycache__")
    )
    command = [sys.executable, "-S", "-m", "course_pp", "lab", "--copy-only"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "course_pp[course]" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_wheel_that_is_built_from_the_source_archive_opens_the_course(tmp_path: Path) -> None:
    """It is built and installed without the network, because all that it needs is here already."""
    tree, built, prefix = tmp_path / "tree", tmp_path / "built", tmp_path / "prefix"
    ignored = shutil.ignore_patterns(
        "__pycache__", ".*", "*.egg-info", "build", "runs", "my_course"
    )
    shutil.copytree(ROOT, tree, ignore=ignored)

    def run(*command: str, cwd: Path, **environ: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environ
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    built.mkdir()
    run(
        sys.executable,
        "-c",
        f"from setuptools import build_meta as b; b.build_sdist({str(built)!r})",
        cwd=tree,
    )
    [archive] = built.glob("*.tar.gz")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    )
    run(*pip, "--ignore-installed", f"--prefix={prefix}", str(archive), cwd=tmp_path)
    libraries = sysconfig.get_path("purelib", vars={"base": str(prefix)})
    here = tmp_path / "here"
    here.mkdir()
    said = run(
        sys.executable, "-m", "course_pp", "lab", "--copy-only", cwd=here, PYTHONPATH=libraries
    )
    n = len(list((ROOT / "notebooks").glob("*.ipynb")))
    assert said == f"{n} notebooks copied to notebooks/, without outputs\n"
    assert len(list((here / "my_course" / "notebooks").glob("*.ipynb"))) == n
    copied = {
        str(path.relative_to(here / "my_course"))
        for path in (here / "my_course" / "source_code").rglob("*.*")
    }
    assert copied == tracked("source_code")
    drawn = run(
        sys.executable, "-m", "course_pp", "schedule", "1f1b", cwd=here, PYTHONPATH=libraries
    )
    assert drawn.startswith("1f1b: ")
