"""The sample of a grid holds every value."""

from inspect import signature
from itertools import product

import pytest

from tests.grids import crossed, folded


@pytest.mark.parametrize("sizes", [(3, 3), (6, 2, 2), (2, 7), (2, 3, 2), (1, 4), (3,)], ids=str)
def test_every_combination_is_there_once_and_every_value_is_in_the_sample(
    sizes: tuple[int, ...],
) -> None:
    axes = [[f"{axis}{i}" for i in range(size)] for axis, size in zip("abc", sizes, strict=False)]
    grid = crossed(*axes)
    assert sorted(each.values for each in grid) == sorted(product(*axes))
    sample = [each.values for each in grid if not each.marks]
    assert len(sample) < len(grid) or len(sizes) == 1 or 1 in sizes
    for axis, values in enumerate(axes):
        assert {each[axis] for each in sample} == set(values)


def test_tuples_are_values_of_several_parameters_and_names_are_kept() -> None:
    first, *_ = crossed(
        [("1f1b", 2), ("zb_v", 3)], [pytest.param(len, id="length"), pytest.param(abs, id="size")]
    )
    assert first.values == ("1f1b", 2, len)
    assert first.id == "1f1b-2-length"


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(7))
def test_a_sample_is_the_first_case_and_every_nth_after_it(
    number: int, request: pytest.FixtureRequest
) -> None:
    assert (request.node.get_closest_marker("long") is None) == (number in (0, 3, 6))


def test_a_folded_grid_meets_every_case_and_names_the_one_that_fails() -> None:
    met: list[tuple[int, int]] = []

    @folded("p, m", [(1, 2), (2, 2), (2, 4)])
    def a_test(p: int, name: str, m: int) -> None:
        met.append((p, m))
        assert (name, m) != ("1f1b", 4)

    assert str(signature(a_test)) == "(name: str) -> None"
    a_test(name="gpipe")
    with pytest.raises(AssertionError) as failure:
        a_test(name="1f1b")
    assert met == 2 * [(1, 2), (2, 2), (2, 4)]
    assert failure.value.__notes__ == ["in the case p=2, m=4"]
