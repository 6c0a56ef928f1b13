"""The files that hosts, indexes and containers read agree with the package."""

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
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
    [within] = re.findall(
        rf"^{command}: .*\n\t@\$\(PARTS\) (.*)", (ROOT / "Makefile").read_text(), re.M
    )
    targets, environment = [*within.split(), *others], {**os.environ, "MAKEFLAGS": ""}
    assert len({*targets}) == len(targets)
    commands = subprocess.check_output(
        ["make", "-n", *targets], cwd=ROOT, text=True, env=environment
    )
    found = re.findall(r"notebooks/\w+\.ipynb", commands)
    assert sorted(found) == sorted(
        f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")
    )


def test_containers_install_what_is_pinned_from_files_that_exist():
    docker = (ROOT / "Dockerfile").read_text()
    copied = [
        name
        for line in re.findall(r"^COPY --chown=learner (.*) \S+$", docker, re.M)
        for name in line.split()
    ]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    for recipe in (docker, (ROOT / "apptainer.def").read_text()):
        assert "--constraint constraints.txt" in recipe
        assert "python:3.11-slim" in recipe


@pytest.mark.parametrize(
    "path",
    re.findall(
        r"`((?:course_pp|tests|docs|source_code)/[\w/]+\.\w+)`",
        "".join(
            (ROOT / name).read_text()
            for name in ("CONTRIBUTING.md", "ARCHITECTURE.md", "INSTRUCTOR.md")
        ),
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
    assert lives.imports()["schedule"] == lives.imports()["step"] == set()
    assert not any("exercises" in found for found in lives.imports().values())


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *said):
        pass


# A stand-in for Python in set-up: it makes a .venv of itself, and writes down pip's arguments.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp /bin/true .venv/bin/jupyter ;;
"-m pip") echo "$@" >> pip.log ;;
*) exec {} "$@" ;;
esac
"""


@pytest.mark.parametrize("reachable", [True, False])
def test_an_index_of_wheels_that_cannot_be_reached_is_left_out_with_a_sentence(tmp_path, reachable):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON.format(sys.executable))
    python.chmod(0o755)
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        index = f"http://127.0.0.1:{server.server_port}/whl/cpu"
        threading.Thread(target=server.handle_request, daemon=True).start()
        if not reachable:
            server.server_close()
        command = ["make", "setup", "CPU=1", f"PYTHON={python}", f"INDEX={index}"]
        environment = {**os.environ, "MAKEFLAGS": "", "no_proxy": "127.0.0.1"}
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
    assert ran.returncode == 0, ran.stderr
    installs = [
        line for line in (tmp_path / "pip.log").read_text().splitlines() if "--editable" in line
    ]
    assert [f"--extra-index-url {index}" in line for line in installs] == [reachable]
    assert (
        f"cannot reach {index}: going on with what pip is set up for" in ran.stderr
    ) != reachable
