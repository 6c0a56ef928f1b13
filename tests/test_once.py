import pytest

from tests.once import once


def test_what_was_returned_or_raised_is_the_answer_to_later_calls():
    calls = []

    @once
    def half(n):
        calls.append(n)
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n // 2

    assert [half(4), half(4), half(6)] == [2, 2, 3]
    errors = []
    for _ in range(3):
        with pytest.raises(ValueError, match="3 is odd") as refusal:
            half(3)
        errors.append(refusal.value)
    assert calls == [4, 6, 3]
    assert errors[0] is errors[1] is errors[2]


def test_a_default_is_the_same_argument_whether_it_is_given_or_not():
    calls = []

    @once
    def double(n=2):
        calls.append(n)
        return 2 * n

    assert [double(), double(2), double(n=2)] == [4, 4, 4]
    assert calls == [2]
