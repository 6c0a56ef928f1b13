"""Private names of torch stand in one file of the package, ``course_pp/base/torch_private.py``."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import course_pp

ROOT = Path(course_pp.__file__).parent
THE_ONE_FILE = Path("base/torch_private.py")

# Private names that are not torch's.
OF_PYTHON = {"_current_frames", "_exit", "_fields", "_getframe", "_is_protocol", "_replace"}
OF_OTHERS = {"_fingerprint", "_from_model_config", "_pytest"}  # datasets, transformers, pytest
OURS = {"_course_pp_experts", "_segment"}
PARTS_OF_WORDS = {"_of_", "_token", "_token_id"}
EXEMPT = OF_PYTHON | OF_OTHERS | OURS | PARTS_OF_WORDS

EXEMPT_IN = {
    # It wraps these methods of process groups, and must not import torch to name them.
    Path("launch/watch.py"): {"_allgather_base", "_reduce_scatter_base"},
    # torch's documentation of ParallelStyle has no other name for the method that a style must
    # define.
    Path("parallel/tensor.py"): {"_apply"},
}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


# A module of ours may have an attribute of such a name too, but only as its own: `self._modules`.
OF_MODULES_AND_TENSORS = set(filter(is_private, (*dir(nn.Module()), *dir(torch.empty(0)))))


def defined_in(tree: ast.AST) -> set[str]:
    """Return the private names of a file's own functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=None):
                found.add(name)
    return set(filter(is_private, found))


def private_names(tree: ast.AST, of_package: set[str]) -> Iterator[str]:
    """Yield each private name that a file takes from elsewhere.

    ``of_package`` holds the package's names, which a class may inherit.
    """
    own = defined_in(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                is_of_self = isinstance(value, ast.Name) and value.id in ("self", "cls")
                known = own | of_package if is_of_self else own - OF_MODULES_AND_TENSORS
                if name not in known:
                    yield name
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
                yield from (
                    part for part in text.split(".") if is_private(part) and part not in own
                )
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith(
                "course_pp"
            ):
                parts = [*module.split("."), *(alias.name for alias in names)]
                yield from filter(is_private, parts)
            case ast.Import(names=names):
                parts = [part for alias in names for part in alias.name.split(".")]
                yield from filter(is_private, parts)


def test_one_file_names_something_private_of_torch() -> None:
    trees = {
        path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
        for path in ROOT.rglob("*.py")
    }
    assert set(private_names(trees.pop(THE_ONE_FILE), set()))
    of_package = set().union(*map(defined_in, trees.values()))
    found = {}
    for path, tree in trees.items():
        names = set(private_names(tree, of_package)) - EXEMPT - EXEMPT_IN.get(path, set())
        if names:
            found[str(path)] = sorted(names)
    assert not found


def modules_with_torch() -> list[str]:
    """Return the modules whose classes may be torch's in part."""
    rooms = ("step", "model", "runtime", "parallel", "training")
    paths = [path.relative_to(ROOT) for room in rooms for path in ROOT.glob(f"{room}/**/*.py")]
    return sorted(".".join(("course_pp", *path.with_suffix("").parts)) for path in paths)


def test_no_other_class_overrides_a_private_method_of_torch() -> None:
    found = set()
    for name in modules_with_torch():
        module = importlib.import_module(name.removesuffix(".__init__"))
        classes = [each for each in vars(module).values() if isinstance(each, type)]
        for each in classes:
            bases = [base for base in each.__mro__ if base.__module__.split(".")[0] == "torch"]
            of_torch = set().union(*map(vars, bases))
            for attribute, value in vars(each).items():
                is_ours = getattr(value, "__module__", None) == name
                exempt = EXEMPT_IN.get(Path(module.__file__ or "").relative_to(ROOT), set())
                if is_ours and is_private(attribute) and attribute in of_torch - exempt:
                    found.add(f"{name}.{each.__name__}.{attribute}")
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._C import x", {"_C"}),
        ("from torch.utils import _pytree", {"_pytree"}),
        ("import torch._dynamo.config", {"_dynamo"}),
        ("torch._foreach_add(xs, 1)", {"_foreach_add"}),
        ("module._modules", {"_modules"}),
        (
            "class A:\n    def __init__(self):\n        self._modules = module._modules",
            {"_modules"},
        ),
        ("getattr(tensor, '_version')", {"_version"}),
        ("sys.modules.get('torch._inductor')", {"_inductor"}),
        ("self._inherited_from_us + self._of_torch", {"_of_torch"}),
        ("class A:\n    def __init__(self):\n        self._modules = {}", set()),
        ("other._mine\ndef _mine(): ...", set()),
        ("tensor.__class__, '__init__', 'a._b c'", set()),
    ],
)
def test_the_check_sees_every_form_of_a_private_name(source: str, found: set[str]) -> None:
    assert set(private_names(ast.parse(source), {"_inherited_from_us"})) == found
