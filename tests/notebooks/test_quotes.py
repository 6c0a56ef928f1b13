"""Every number that the prose quotes has a source, and a wrong one is noticed."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks import quotes

PROSE = """# 03 · A title with 0.5

**40 minutes**, and 20 more.

The bubble is 0.27, or 27 %; it took × 1.33, with 1,024 bytes. `x = 0.1` and $0.2$ are code
and maths, 4 ranks and 8 microbatches are sizes. Others saw 52 % [1].

**References**

1. A paper of 2.5 pages.
"""
OUTPUT = new_output("stream", name="stdout", text="sent 1,024 bytes")
NOTEBOOK = new_notebook(cells=[new_markdown_cell(PROSE), new_code_cell("1", outputs=[OUTPUT])])
SOURCES = {
    "0.27": "bubble('gpipe', 4, 8)",
    "27": "100 * bubble('gpipe', 4, 8)",
    "1.33": "Fraction(4, 3)",
    "1,024": "printed",
    "52": "[1] table 2",
}


def test_numbers_with_a_source_pass() -> None:
    assert {number for number, _ in quotes.quoted(NOTEBOOK)} == set(SOURCES)
    assert list(quotes.problems(NOTEBOOK, SOURCES)) == []


def test_each_kind_of_wrong_source_is_noticed() -> None:
    wrong = {
        **SOURCES,
        "0.27": "bubble('gpipe', 4, 4)",
        "27": "printed",
        "52": "[2] table 2",
        "99": "chosen",
    }
    del wrong["1.33"]
    said = list(quotes.problems(NOTEBOOK, wrong))
    assert len(said) == 5
    for part in (
        "0.27, but bubble('gpipe', 4, 4) is 0.42",
        "1.33, and nothing says",
        "27, and no output shows it",
        "52 from [2] table 2",
        "no longer quotes 99",
    ):
        assert any(part in line for line in said), part


@pytest.mark.parametrize(
    ("sentence", "source", "output", "said"),
    [
        ("It measured 26.5 units.", "printed", "step: measured 26.5", ""),
        (
            "It measured 26.5 units.",
            "printed",
            "step: simulated 26.5",
            "calls 26.5 measured, but nothing ran for it",
        ),
        ("Measured: 26.5 units.", "53 / 2", "", "calls 26.5 measured, but nothing ran for it"),
        ("They measured 26.5 [1].", "[1] table 2", "", ""),
        ("The predicted step is 26.5.", "53 / 2", "", ""),
        (
            "The simulated step is 26.5.",
            "printed",
            "step: measured 26.5",
            "26.5 simulated or computed, but it was measured",
        ),
        ("The simulated step is 26.5.", "printed", "simulated 26.5, measured 27", ""),
        ("Measured is 26.5, as predicted.", "printed", "step: measured 26.5", ""),
    ],
)
def test_measured_is_said_of_what_ran_and_simulated_of_what_did_not(
    sentence: str, source: str, output: str, said: str
) -> None:
    shown = new_code_cell("1", outputs=[new_output("stream", name="stdout", text=output)])
    notebook = new_notebook(
        cells=[shown, new_markdown_cell(f"{sentence}\n\n**References**\n\n1. A paper.")]
    )
    found = list(quotes.problems(notebook, {"26.5": source}))
    assert len(found) == bool(said)
    assert said in "".join(found)
