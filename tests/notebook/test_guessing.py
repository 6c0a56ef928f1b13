"""A guess and its measurement, side by side; no guess ends a notebook."""

from dataclasses import replace
from fractions import Fraction

import pytest

from course_pp.notebook import reveal
from course_pp.schedule import build, simulate


@pytest.mark.parametrize(
    ("guess", "measured", "said"),
    [
        (..., 0.2727, "measured 0.273; you have not guessed"),
        (0.28, Fraction(3, 11), "measured 0.273, guessed 0.28: right"),
        (0.5, 0.25, "measured 0.25, guessed 0.5: off by a factor of 2"),
        (0, 0.25, "measured 0.25, guessed 0: not so"),
        (1e-12, 0.0, "measured 0, guessed 1e-12: not so"),
        (0, 1e-17, "measured 1e-17, guessed 0: right"),
        (120_000, 1_234_567, "measured 1,234,567, guessed 120,000: off by a factor of 10.3"),
        ((4, 4), [4, 4], "measured [4, 4], guessed [4, 4]: right"),
        ([4.0], (4, 3), "measured [4, 3], guessed [4]: not so"),
        ([4096, 1], [120_000, 2.5e6], "measured [120000, 2500000], guessed [4096, 1]: not so"),
        ({2, 3}, {3, 2}, "measured {2, 3}, guessed {2, 3}: right"),
        ({2: 1.0}, {3: 1}, "measured {3: 1}, guessed {2: 1}: not so"),
        (True, False, "measured False, guessed True: not so"),
        ("it hangs", "it hangs", "measured it hangs, guessed it hangs: right"),
        (
            "half",
            0.25,
            (
                "measured 0.25; your guess 'half' is text in quotes, so it cannot be compared: give"
                " a number"
            ),
        ),
        (
            None,
            True,
            "measured True; your guess is None, so it cannot be compared: give True or False",
        ),
        (True, 2, "measured 2; your guess is True, so it cannot be compared: give a number"),
        (
            object(),
            2,
            "measured 2; your guess is an object, so it cannot be compared: give a number",
        ),
        (
            1,
            [2],
            "measured [2]; your guess 1 is a number, so it cannot be compared: give a list, [a, …]",
        ),
        (
            1,
            True,
            "measured True; your guess 1 is a number, so it cannot be compared: give True or False",
        ),
    ],
)
def test_a_guess_is_compared_with_what_was_measured(
    guess: object, measured: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reveal("bubble", guess, measured)
    assert capsys.readouterr().out == f"bubble: {said}\n"


def test_a_unit_follows_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    reveal("step", 20, 33.2, "ms")
    assert (
        capsys.readouterr().out
        == "step: measured 33.2 ms, guessed 20 ms: off by a factor of 1.66\n"
    )


def test_a_simulated_value_is_not_called_measured(capsys: pytest.CaptureFixture[str]) -> None:
    reveal("step", ..., 2.5, how="simulated")
    assert capsys.readouterr().out == "step: simulated 2.5; you have not guessed\n"
    ran = replace(simulate(build("gpipe", 2, 2)), measured=True)
    for runs, how in (((ran, ran), "measured"), ((ran, replace(ran, measured=False)), "simulated")):
        reveal("step", ..., 2.5, how=runs)
        assert capsys.readouterr().out == f"step: {how} 2.5; you have not guessed\n"
