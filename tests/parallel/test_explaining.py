"""A refusal of a model that cannot be cut names the line, the kind of problem, and the remedy."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from course_pp.parallel import auto_split, explain
from course_pp.parallel.split import OtherWay
from tests.parallel import uncuttable
from tests.parallel.uncuttable import UNCUTTABLE, WIDTH, linear

SOURCE = Path(uncuttable.__file__)
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


def marked(model: type[nn.Module]) -> tuple[str, str]:
    """Return the marked line of a model, and the kind of problem in the mark."""
    lines = list(enumerate(SOURCE.read_text().splitlines(), 1))
    start = next(number for number, line in lines if line.startswith(f"class {model.__name__}("))
    number, line = next((n, line) for n, line in lines if n > start and "# here: " in line)
    return f"{SOURCE}:{number}", line.rpartition("# here: ")[2]


@pytest.mark.parametrize("model", UNCUTTABLE)
def test_the_line_that_stops_a_model_is_named(model: type[nn.Module]) -> None:
    found = explain(model(), X)
    assert [(problem.line, problem.kind) for problem in found] == [marked(model)]
    with pytest.raises(ValueError, match=re.escape(f"{found[0].line}: {found[0].kind}: ")):
        auto_split(model(), X, 2)


class Branching(nn.Module):
    """A model in which the values of a batch decide which modules are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x) if x.sum() > 0 else x
        return self.third(x)


class DropsBetween(nn.Module):
    """Dropout outside of any module, which draws nothing in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x), 0.5, self.training)
        return self.second(x) + x


def test_what_was_cut_in_eval_mode_does_not_train_if_it_could_not_be_cut_in_training() -> None:
    model = DropsBetween()
    assert [problem.kind for problem in explain(model, X)] == ["random numbers"]
    model.eval()
    model.second.train()
    assert explain(model, X) == []
    first, second = auto_split(model, X, 2)
    assert [part.training for part in model.modules()] == [False, False, True]
    assert torch.equal(second(**first(X)), model(X))
    with pytest.raises(
        ValueError,
        match=r"this stage trains, and was cut in eval mode; in training .*random numbers",
    ):
        first.train()(X)


def test_a_batch_that_goes_another_way_than_the_example_is_refused() -> None:
    model = Branching()
    batches = [X, -X] if model.first(X).sum() > 0 else [-X, X]
    one, other = (batch * 10 for batch in batches)
    assert model.first(other).sum() < 0 < model.first(one).sum()
    first, second = auto_split(model, one, 2)
    torch.testing.assert_close(second(**first(one)), model(one))
    with pytest.raises(
        OtherWay, match="'second' was not called: which units the model calls depends on its batch"
    ):
        first(other)
    first, _ = auto_split(model, other, 2)
    with pytest.raises(OtherWay, match="'second' is called more than 0 times: which units"):
        first(one)


class InTheMiddle(nn.Module):
    """Where all modules are called, a branch on data may go either way on any stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        sign = 1.0 if x.sum() > 0 else -1.0
        return self.second(x) * sign


def test_a_branch_between_modules_goes_the_way_of_the_batch() -> None:
    model = InTheMiddle()
    first, second = auto_split(model, X, 2)
    for batch in (10 * X, -10 * X):
        torch.testing.assert_close(second(**first(batch)), model(batch))


OTHERS = [
    ((X, X), "called with"),
    ({"x": X}, "called with"),
    (X.long(), "of int64 and 2 dimensions where the example had a tensor of float32"),
]


@pytest.mark.parametrize(("given", "said"), OTHERS)
def test_a_batch_of_another_type_than_the_example_is_refused(given: object, said: str) -> None:
    first, _ = auto_split(InTheMiddle(), X, 2)
    with pytest.raises(ValueError, match=said):
        (
            first(**given)
            if isinstance(given, dict)
            else first(*given)
            if isinstance(given, tuple)
            else first(given)
        )
