"""A value that crosses a stage boundary comes out as it went in."""

import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from course_pp.runtime.payload import describe, flatten, map_plain, pack, plain_tensors, unpack
from tests.grids import examples, folded

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
CPU = torch.device("cpu")
UNTOUCHED = 0xAB

Pair = namedtuple("Pair", ["first", "second"])


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool = False) -> Tensor:
    """Every dtype has a different value at each place."""
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) - 1
    tensor = (
        values.to(torch.complex128).mul(1 - 2j).to(dtype) if dtype.is_complex else values.to(dtype)
    )
    return tensor.requires_grad_(requires_grad and (dtype.is_floating_point or dtype.is_complex))


def sent(value: Any, beyond: int = 5) -> Any:
    """Return ``value`` after its journey; ``beyond`` bytes behind it stay as they are."""
    spec, tensors = describe(value)
    buffer = torch.full((spec.nbytes + beyond,), UNTOUCHED, dtype=torch.uint8)
    pack(spec, tensors, buffer)
    assert (buffer[spec.nbytes :] == UNTOUCHED).all()
    return unpack(pickle.loads(pickle.dumps(spec)), buffer, CPU)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().flatten().contiguous().view(torch.uint8).tolist())


def assert_same(arrived: Any, value: Any) -> None:
    """Like containers, dicts and tuples of any class being plain ones, with equal leaves."""
    if isinstance(value, Tensor):
        assert isinstance(arrived, Tensor)
        assert (arrived.dtype, arrived.shape) == (value.dtype, value.shape)
        assert bits(arrived) == bits(value)
        assert arrived.requires_grad == value.requires_grad
        assert arrived.is_leaf
    elif isinstance(value, dict):
        assert type(arrived) is dict
        assert list(arrived) == list(value)
        for key in value:
            assert_same(arrived[key], value[key])
    elif isinstance(value, list | tuple):
        assert type(arrived) is (list if isinstance(value, list) else tuple)
        assert len(arrived) == len(value)
        for one, other in zip(arrived, value, strict=True):
            assert_same(one, other)
    else:
        assert type(arrived) is type(value)
        assert arrived == value


tensors = st.builds(
    tensor_of,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.booleans(),
)
leaves = st.one_of(
    tensors,
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.lists(inner, max_size=2).map(lambda row: OrderedDict(enumerate(row))),
    ),
    max_leaves=8,
)


@examples(100)
@given(values)
def test_any_nesting_of_tensors_and_plain_values_arrives_as_it_was(value: Any) -> None:
    assert_same(sent(value), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@folded("shape", [(), (0,), (2, 0, 3), (1,), (3,), (2, 5)])
def test_a_tensor_of_any_dtype_and_shape_arrives_alone_and_behind_an_odd_one(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = tensor_of(dtype, shape)
    assert_same(sent(tensor), tensor)
    odd = torch.tensor([True, False, True])
    assert_same(sent((odd, tensor, odd)), (odd, tensor, odd))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12)[::3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1:],
        torch.arange(8.0).reshape(1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "permuted", "channels last", "conjugated", "negated"],
)
def test_a_tensor_that_is_not_contiguous_arrives_with_its_values(value: Tensor) -> None:
    arrived = sent(value)
    assert torch.equal(arrived, value)
    assert arrived.is_contiguous()


def test_one_tensor_at_two_places_arrives_as_two() -> None:
    x = torch.ones(2, requires_grad=True)
    first, second = sent((x, x))
    assert_same((first, second), (x, x))
    with torch.no_grad():
        first.add_(1)
    assert torch.equal(second, x)


def test_changing_one_part_in_place_leaves_the_graphs_of_the_others_in_order() -> None:
    x, position = sent((torch.ones(2, requires_grad=True), torch.zeros(2, dtype=torch.int64)))
    output = x.square()
    position.add_(1)
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("stranger", "name"),
    [
        (np.ones(1), "ndarray"),
        ((torch.ones(1), [iter([torch.ones(1)])]), "list_iterator"),
        ({"a": {"b": 1j}}, "complex"),
    ],
)
def test_anything_else_is_refused_by_name_wherever_it_is(stranger: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"a {name} cannot cross"):
        describe(stranger)


@examples(100)
@given(st.lists(tensors, max_size=6))
def test_tensors_lie_in_order_without_overlap_where_any_dtype_may_start(row: list[Tensor]) -> None:
    spec, _ = describe(row)
    end = 0
    for tensor, (start, stop) in zip(row, spec.places, strict=True):
        assert start % 64 == 0
        assert start >= end
        assert stop - start == tensor.nbytes
        end = stop
    assert spec.nbytes == end
    assert end <= sum(-(-tensor.nbytes // 64) * 64 for tensor in row)


A = torch.ones(2, 3)
SAME = [
    (A, torch.zeros(2, 3)),
    (A, A.t().contiguous().t()),
    ({"a": A}, OrderedDict(a=A)),
    ((A, 1, None), (A, 1, None)),
    (Pair(A, A), (A, A)),
]
DIFFERENT = [
    (A, A.double()),
    (A, A.t()),
    (A, A.clone().requires_grad_()),
    (A, (A,)),
    ((A,), [A]),
    ((A, A), (A, None)),
    ({"a": A}, {"b": A}),
    ({"a": A, "b": A}, {"b": A, "a": A}),
    ((A, 1), (A, 2)),
    ((A, 1), (A, "1")),
    ((A, 1), (A, True)),
    ((A, 1), (A, 1.0)),
    ((A, 0), (A, False)),
]


def test_values_have_equal_specs_if_they_are_read_alike() -> None:
    for pairs, alike in ((SAME, True), (DIFFERENT, False)):
        for one, other in pairs:
            assert describe(one)[0].is_same(describe(other)[0]) is alike, (one, other)


def test_flattening_and_mapping_go_through_tensors_in_one_order() -> None:
    value = {"b": (torch.zeros(1), [torch.ones(1)]), "a": torch.full((1,), 2.0), "n": 3}
    seen: list[float] = []
    assert map_plain(lambda t: seen.append(t.item()), value) == {
        "b": (None, [None]),
        "a": None,
        "n": 3,
    }
    assert seen == [0, 1, 2]
    assert [t.item() for t in plain_tensors(value)] == seen
    assert [t.item() for t in flatten(value)[1]] == seen
