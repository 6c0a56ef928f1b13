"""What hosts, indexes and containers read agrees with the package."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_changelog_and_citation_name_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version()
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", version()]
    assert f"version = {{{version()}}}" in (ROOT / "README.md").read_text()


def test_pre_commit_runs_the_linters_of_make():
    entries = [
        hook["entry"]
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
    ]
    makefile = (ROOT / "Makefile").read_text()
    for entry in entries:
        program = entry.removeprefix(".venv/bin/").removesuffix(" --force-exclude")
        assert f"$(BIN)/{program}" in makefile


@pytest.mark.parametrize("name", [".github/workflows/course.yml", ".gitlab-ci.yml"])
def test_workflows_run_everything_and_publish_what_make_site_builds(name):
    text = (ROOT / name).read_text()
    assert yaml.safe_load(text)
    assert ".ci/run" in text
    assert "make site" in text
    assert "runs/site/html" in text


def test_ci_runs_the_test_command_of_the_readme_and_then_only_what_it_leaves_out():
    [command] = re.findall(r"^make (test\S*) ", (ROOT / "README.md").read_text(), re.M)
    [parts] = re.findall(r"parts\.py (.*)", (ROOT / ".ci" / "run").read_text())
    first, then, *others = parts.split()
    assert (first, then) == (command, "then")
    [within] = re.findall(rf"^{command}: .*\n\t@\$\(PARTS\) (.*)", (ROOT / "Makefile").read_text(), re.M)
    targets, environment = [*within.split(), *others], {**os.environ, "MAKEFLAGS": ""}
    assert len({*targets}) == len(targets)
    commands = subprocess.check_output(["make", "-n", *targets], cwd=ROOT, text=True, env=environment)
    found = re.findall(r"notebooks/\w+\.ipynb", commands)
    assert sorted(found) == sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_containers_install_what_is_pinned_from_files_that_exist():
    docker = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY --chown=learner (.*) \S+$", docker, re.M) for name in line.split()]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    for recipe in (docker, (ROOT / "apptainer.def").read_text()):
        assert "--constraint constraints.txt" in recipe
        assert "python:3.11-slim" in recipe


@pytest.mark.parametrize(
    "path",
    re.findall(
        r"`((?:course_pp|tests|docs|source_code)/[\w/]+\.\w+)`",
        "".join((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "ARCHITECTURE.md", "INSTRUCTOR.md")),
    ),
)
def test_files_that_the_guides_name_exist(path):
    assert "TOPIC" in path or (ROOT / path).is_file()


@pytest.mark.slow
def test_the_lives_go_through_modules_that_exist(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import lives

    for steps in lives.LIVES.values():
        assert all((ROOT / "course_pp" / module).is_file() for module, _ in steps)
    assert lives.imports()["schedule"] == lives.imports()["model"] == set()
    assert not any("exercises" in found for found in lives.imports().values())
