"""Parts of the package need packages of an extra; without one, a sentence names the extra."""

import json
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from course_pp.base.imports import MissingExtra, imports_of_extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

ALONE = [
    "schedule",
    "plan",
    "step",
    "parallel",
    "runtime",
    "model",
    "launch",
    "training.checkpoint",
]

# {package: (its extra, code that needs it)}. A module is imported only once, so the order matters:
# flags import data and logs.
NEEDS = {
    "matplotlib": ("course", "from course_pp.show import timeline"),
    "tokenizers": ("train", "import course_pp.training.data"),
    "tqdm": ("train", "import course_pp.training.logs"),
    "cyclopts": ("train", "import course_pp.training.flags"),
    "transformers": ("hf", "from course_pp.model.hf import config_class; config_class('llama')"),
    "datasets": ("hf", "from course_pp.training.data import load_corpus; load_corpus(dataset='x')"),
    "ortools": ("ortools", "from course_pp.schedule import optimum; optimum(2, 2)"),
    "torchao": (
        "fp8",
        "from course_pp.parallel.float8 import _config_of; _config_of('rowwise', 'cpu')",
    ),
}

TRY_EACH = """
import json, sys
said = {}
for package, code in json.loads(sys.argv[1]).items():
    sys.modules[package] = None
    try:
        exec(code)
    except ImportError as error:
        said[package] = f"{type(error).__name__}: {error}"
    del sys.modules[package]
print(json.dumps(said))
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_missing_package_is_told_with_the_extra_that_brings_it() -> None:
    codes = {package: code for package, (_, code) in NEEDS.items()}
    said = json.loads(run(TRY_EACH, json.dumps(codes)))
    assert said.keys() == NEEDS.keys()
    for package, (extra, _) in NEEDS.items():
        assert said[package].startswith(f"MissingExtra: {package} ")
        assert f"course_pp[{extra}]" in said[package]
        assert package in {Requirement(text).name for text in EXTRAS[extra]}


@pytest.mark.slow
def test_the_stack_needs_the_core_alone() -> None:
    core = {Requirement(text).name for text in PROJECT["dependencies"]}
    named = {Requirement(text).name for extra in EXTRAS.values() for text in extra}
    modules = {name.replace("-", "_").lower() for name in named - core - {"course_pp"}}
    taken = sorted({*modules, "PIL", "IPython", "traitlets"})
    imports = ", ".join(f"course_pp.{room}" for room in ALONE)
    run(f"import sys; sys.modules |= dict.fromkeys({taken}); import {imports}")


def test_a_missing_module_of_ours_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, imports_of_extra("hf"):
        import course_pp.no_such_room  # noqa: F401
    assert not isinstance(caught.value, MissingExtra)


def test_the_innermost_extra_is_named() -> None:
    outer, inner = imports_of_extra("course"), imports_of_extra("train")
    with pytest.raises(MissingExtra, match="train"), outer, inner:
        import no_such_package  # noqa: F401


def test_an_editable_install_is_a_path_that_type_checkers_follow() -> None:
    installed = next(distributions(name="course_pp", path=[sysconfig.get_path("purelib")]))
    paths = [file.read_text() for file in installed.files or () if file.suffix == ".pth"]
    if not paths:
        pytest.skip("the package is installed from a wheel")
    assert all((Path(path.strip()) / "course_pp" / "py.typed").exists() for path in paths)
