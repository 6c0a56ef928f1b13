"""The table in docs/models.md says rightly which families of models are cut automatically."""

import re
from pathlib import Path

import pytest
import torch

from course_pp.parallel import auto_split, explain
from source_code.hf_pp.families import FAMILIES, build, called, example, tensor_of

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEADER = (
    "| family | model | tensors sent at 2 / 4 stages | tied weights | outputs at 2 / 4 stages |",
    "|---|---|---|---|---|",
)


def row(name: str) -> str:
    model, given = build(name), example(name)
    if problems := explain(model, given):
        return (
            f"| {name} | `{type(model).__name__}` | | | no: {problems[0].kind}:"
            f" {problems[0].what} |"
        )
    sent, said, ties = [], [], 0
    for n_stages in (2, 4):
        stages = auto_split(model, given, n_stages)
        ties = max(ties, len(stages[0].ties))
        sent.append(max(len(stage.sent_for_example()[1]["values"]) for stage in stages))
        torch.manual_seed(7)
        whole = tensor_of(called(model, given))
        torch.manual_seed(7)
        value = called(stages[0], given)
        for stage in stages[1:]:
            value = stage(**value)
        said.append("equal" if torch.equal(whole, tensor_of(value)) else "DIFFERENT")
    tied = str(ties) if ties else "none"
    return (
        f"| {name} | `{type(model).__name__}` | {sent[0]} / {sent[1]} | {tied} | {said[0]} /"
        f" {said[1]} |"
    )


@pytest.mark.slow
def test_the_table_says_which_families_are_cut_automatically() -> None:
    expected = "\n".join((*HEADER, *map(row, FAMILIES)))
    found = re.search(rf"{re.escape(HEADER[0])}\n(\|[^\n]*\n)+", PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"put this into docs/models.md:\n{expected}"
    assert found[0].strip() == expected
