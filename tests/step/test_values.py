"""Values between stages: a module is called with one, and outputs are merged into one."""

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from course_pp.step.values import ValueMeta, call, map_tensors, merge, tensors_of

Pair = namedtuple("Pair", ["first", "second"])
A = torch.arange(6.0).view(3, 2)
B = torch.arange(4.0).view(2, 2)
AB = torch.cat([A, B])
ONE = torch.tensor(1.0)
ARRAY = np.zeros(2)


def assert_same(found: Any, expected: Any) -> None:
    """Equal leaves of equal types, in containers of the same classes."""
    found_leaves, found_containers = tree_flatten(found)
    leaves, containers = tree_flatten(expected)
    assert found_containers == containers
    for one, other in zip(found_leaves, leaves, strict=True):
        assert type(one) is type(other)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one is other or one == other


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([A, B], AB),
        ([A], A),
        ([ONE, ONE], torch.ones(2)),
        ([(A, ONE), (B, ONE)], (AB, torch.ones(2))),
        ([Pair(A, [B]), Pair(B, [B])], Pair(AB, [torch.cat([B, B])])),
        ([OrderedDict(a=A), OrderedDict(a=B)], OrderedDict(a=AB)),
        ([(A, None, "x"), (B, None, "x")], (AB, None, "x")),
        ([{"a": A, "n": 1}, {"a": B, "n": 2}], {"a": AB, "n": [1, 2]}),
        ([(A, 1), (B, True)], (AB, [1, True])),
        ([(A, 1), (B, None)], (AB, [1, None])),
        ([(A, ARRAY), (B, ARRAY)], (AB, ARRAY)),
    ],
)
def test_outputs_that_fit_together_become_one(outputs: list[Any], expected: Any) -> None:
    assert_same(merge(outputs), expected)


def test_arrays_with_equal_numbers_have_no_single_answer_and_stay_apart() -> None:
    _, arrays = merge([(A, np.zeros(2)), (B, np.zeros(2))])
    assert [array.tolist() for array in arrays] == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    "outputs",
    [
        [A, A.double()],
        [A, A[:, :1]],
        [ONE, ONE.view(1)],
        [ONE.view(1), ONE],
        [(A, B), [A, B]],
        [(A, B), (A,)],
        [{"a": A}, {"b": A}],
        [(A, None), (A, B)],
    ],
    ids=[
        "dtype",
        "width",
        "scalar and row",
        "row and scalar",
        "class",
        "length",
        "key",
        "None and tensor",
    ],
)
def test_outputs_that_do_not_fit_together_stay_a_list(outputs: list[Any]) -> None:
    assert_same(merge(outputs), outputs)


def taken(*arguments: Any, **keywords: Any) -> Any:
    return arguments, keywords


@pytest.mark.parametrize(
    ("value", "arguments", "keywords"),
    [
        (A, (A,), {}),
        (None, (None,), {}),
        ((), (), {}),
        ((A, B), (A, B), {}),
        ([A, B], (A, B), {}),
        ((A,), (A,), {}),
        (([A, B],), ([A, B],), {}),
        (({"a": A},), (), {"a": A}),
        (OrderedDict(a=A, b=B), (), {"a": A, "b": B}),
        (Pair(A, B), (Pair(A, B),), {}),
    ],
)
def test_a_module_is_called_with_a_value_and_with_keywords(
    value: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    assert_same(call(taken, value, {"scale": 2}), (arguments, {**keywords, "scale": 2}))


def test_a_keyword_that_the_value_has_too_is_refused() -> None:
    with pytest.raises(TypeError, match="a"):
        call(taken, {"a": A}, {"a": B})


def test_a_callers_containers_keep_their_classes_and_its_objects_stay_untouched() -> None:
    stranger = object()
    value = Pair({"a": [A, 1]}, (B, stranger))
    assert_same(map_tensors(torch.neg, value), Pair({"a": [-A, 1]}, (-B, stranger)))
    assert_same(tensors_of(value), [A, B])


def test_a_described_value_is_taken_apart_and_put_together_again() -> None:
    value = Pair({"a": A, "none": None}, [B])
    meta = ValueMeta.of(value)
    assert_same(meta.unflatten(meta.flatten(value)), value)
    with pytest.raises(ValueError, match="declared"):
        meta.flatten(Pair({"a": A, "none": None}, [A]))
    with pytest.raises(TypeError, match="int"):
        ValueMeta.of((A, 1))
