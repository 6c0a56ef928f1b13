"""The three places that name versions agree: pyproject.toml, constraints.txt, environment.yml."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.grids import folded

ROOT = Path(__file__).parents[1]


def pinned():
    """Name → exact version, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    malformed = [entry for entry in entries if not re.fullmatch(r"[\w.-]+==[\w.!]+", entry)]
    assert not malformed, f"constraints.txt pins exact public versions only: {malformed}"
    return {
        canonicalize_name(name): version
        for name, version in (entry.split("==") for entry in entries)
    }


def conda_pip_section():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return next(entry["pip"] for entry in dependencies if isinstance(entry, dict))


def declared():
    """Every requirement of pyproject.toml, the extras' included, but not the package's own name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    return [r for r in map(Requirement, texts) if r.name != project["name"]]


@folded("requirement", declared())
def test_constraints_pin_every_declared_requirement_within_its_range(requirement):
    version = pinned().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} is not in constraints.txt"
    assert requirement.specifier.contains(version), (
        f"{requirement.name}=={version} is outside {requirement.specifier}"
    )


def test_environment_names_the_versions_of_constraints():
    requirements = [Requirement(line) for line in conda_pip_section() if not line.startswith("-")]
    assert {canonicalize_name(r.name): str(r.specifier) for r in requirements} == {
        canonicalize_name(r.name): f"=={pinned()[canonicalize_name(r.name)]}" for r in requirements
    }


def test_environment_lists_the_packages_of_the_course_and_installs_it_under_the_constraints():
    section = conda_pip_section()
    named = {Requirement(line).name for line in section if not line.startswith("-")}
    assert {"torch", "jupyterlab", "nbmake", "ipywidgets", "matplotlib", "pytest"} <= named
    assert "--constraint constraints.txt" in section
    assert "--editable .[test]" in section


def test_python_of_the_environment_is_one_the_package_allows():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python = next(d for d in dependencies if isinstance(d, str) and d.startswith("python="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert Requirement(f"python{project['requires-python']}").specifier.contains(
        python.removeprefix("python=")
    )
