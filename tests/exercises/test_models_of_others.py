"""The graders of notebook 10, by what learners hand in, and what its cells rely on."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from course_pp.exercises.models_of_others import lab
from course_pp.exercises.models_of_others.exercises import (
    PATIENTS,
    carries,
    examine,
    masked_loss,
    patient_a,
    skip_bytes,
    tied_across,
)
from course_pp.exercises.models_of_others.lab import ARTICLE, ends_apart, generate_text, skip_step
from course_pp.model import layer_costs, partition_by_cost
from course_pp.schedule import Action, Span, Timeline
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]
RANKS_IMPORT = ["transformers.models.gpt2.modeling_gpt2"]


def only_the_neighbour(reads: list[set[int]], begins: list[int]) -> list[list[int]]:
    return [[begin - 1] for begin in begins]


def read_by_the_first(reads: list[set[int]], begins: list[int]) -> list[list[int]]:
    return [sorted(reads[begin]) for begin in begins]


def all_before(reads: list[set[int]], begins: list[int]) -> list[list[int]]:
    return [list(range(begin)) for begin in begins]


def behind_too(reads: list[set[int]], begins: list[int]) -> list[list[int]]:
    return [sorted(set().union(*reads[begin:])) for begin in begins]


def in_any_order(reads: list[set[int]], begins: list[int]) -> list[list[int]]:
    return [each[::-1] for each in carries(reads, begins)]


def all_weights(stages: list[dict[str, int]]) -> list[dict[int, str]]:
    places: dict[int, dict[int, str]] = {}
    for stage, weights in enumerate(stages):
        for name, weight in weights.items():
            places.setdefault(weight, {})[stage] = name
    return list(places.values())


def by_name(stages: list[dict[str, int]]) -> list[dict[int, str]]:
    names = {name for weights in stages for name in weights}
    where = [
        {stage: name for stage, weights in enumerate(stages) if name in weights}
        for name in sorted(names)
    ]
    return [each for each in where if len(each) > 1]


def last_name(stages: list[dict[str, int]]) -> list[dict[int, str]]:
    return [each for each in all_weights(stages) if len(each) > 1]


def every_pair(stages: list[dict[str, int]]) -> list[dict[int, str]]:
    held = [
        (stage, name, weight)
        for stage, weights in enumerate(stages)
        for name, weight in weights.items()
    ]
    return [{a[0]: a[1], b[0]: b[1]} for a in held for b in held if a[0] < b[0] and a[2] == b[2]]


def names_nothing(stages: list[dict[str, int]]) -> list[dict[Any, Any]]:
    return [{"0": [1], 99: "x"}, {0: ["embed"], None: 3}, {0: "embed", 2: "head"}]


def neighbours(stages: list[dict[str, int]]) -> list[dict[int, str]]:
    return [each for each in tied_across(stages) if 1 in {b - a for a, b in pairwise(each)}]


def loss_with(divide: str, chunk: bool, left_out: int = -100, counts: int = 1) -> Answer:
    def answer(stages: Any, tokens: Any, mask: Any, m: int) -> Any:
        losses = []
        for i, rows in enumerate(tokens.chunk(m)):
            real = mask.chunk(m)[i] if chunk else mask[: len(rows)]
            x = rows
            for stage in stages:
                x = stage(x, attention_mask=real)
            padding = mask.chunk(m)[i][:, 1:] != counts
            targets = (
                rows[:, 1:].masked_fill(padding, left_out) if left_out else rows[:, 1:]
            ).flatten()
            losses.append(cross_entropy(x[:, :-1].flatten(0, 1), targets, reduction=divide))
        return sum(losses) / (m if divide == "mean" else mask[:, 1:].sum())

    return answer


def detached(stages: Any, tokens: Any, mask: Any, m: int) -> Any:
    return loss_with("sum", True)(stages, tokens, mask, m).detach()


def inverted(stages: Any, tokens: Any, mask: Any, m: int) -> Any:
    return loss_with("sum", True, counts=0)(stages, tokens, mask, m)


WRONG = {
    "carries": [
        (only_the_neighbour, "is lost"),
        (read_by_the_first, "is lost: call 5 reads it, which may be much later"),
        (all_before, "nobody reads the result of call 0: it stays where it is"),
        (behind_too, "the result of call 1 is made behind it"),
        (in_any_order, "Each result once, in the order of the calls"),
        (lambda reads, begins: carries(reads, begins)[:1], "one list for each of the 2 cuts"),
    ],
    "tied_across": [
        (every_pair, "One entry for each weight"),
        (names_nothing, "if their number is the same"),
        (all_weights, "nothing has to be added up"),
        (by_name, "Weight 7 is missing, which stages 0, 2 hold"),
        (neighbours, "Weight 7 is missing, which stages 0, 2 hold"),
        (last_name, "of two names on a stage the first"),
        (lambda stages: tied_across(stages)[:1], "Weight 2 is missing"),
    ],
    "skip_bytes": [
        (lambda values, rank_of: sum(skip_bytes(values, rank_of)), "skip_bytes("),
    ],
    "masked_loss": [
        (patient_a, "Every stage attends"),
        (loss_with("mean", True), "divided by the tokens counted in the whole batch"),
        (loss_with("sum", False), "its own rows of the mask"),
        (loss_with("sum", True, left_out=0), "as a target it has to be left out"),
        (loss_with("mean", True, left_out=0), "as a target it has to be left out"),
        (inverted, "Only padding counts"),
        (detached, "its gradient is not"),
        (
            lambda stages, tokens, mask, m: masked_loss(stages, tokens, mask, 1),
            "a stage is given 4 rows at once, not 2",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [(name, *each) for name, answers in WRONG.items() for each in answers],
)
def test_a_wrong_answer_is_told_why(name: str, answer: Answer, words: str) -> None:
    refuses(name, answer, words)


def test_ties_may_come_in_any_order() -> None:
    accepts(
        "tied_across",
        lambda stages: [dict(reversed(each.items())) for each in tied_across(stages)[::-1]],
    )


def test_a_loss_may_be_computed_otherwise() -> None:
    accepts("masked_loss", loss_with("sum", True))


def test_each_patient_complains_of_what_its_diagnosis_says() -> None:
    said = {name: examine(name) for name in PATIENTS}
    assert "padding none: loss 3.1984, in one piece 3.1984" in said["A"]
    assert "called 2 times, as 'embed' is the same module" in said["B"]
    assert "right; the next: OtherWay: 'long' is called" in said["C"]
    assert "3 rows of 6: right; 2 rows of 5: RuntimeError" in said["D"]


def test_the_articles_model_is_cut_as_the_text_says() -> None:
    assert round(ARTICLE.n_parameters / 1e6, 1) == 179.4
    parts = layer_costs(ARTICLE, 512)
    cut = partition_by_cost(parts.layers, 3, parts.embed, parts.head)
    assert [end - start for start, end in cut] == [6, 5, 1]
    last = sum(parts.layers[8:]) + parts.head
    assert round(3 * last / parts.total, 2) == 1.53


@pytest.mark.ranks
def test_ends_drift_apart_unless_they_are_tied() -> None:
    apart = ends_apart()
    assert apart[True] == 0.0
    assert apart[False] > 0.01


@pytest.mark.ranks
def test_skips_stay_on_their_rank_in_a_v() -> None:
    line, v = skip_step("1f1b", 4), skip_step("zb_v", 2)
    assert max(line[0], v[0]) < 1e-12
    assert line[1] / v[1] == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize(
    ("late", "tried"),
    [((), [0.02]), ((0.02,), [0.02, 0.04]), ((0.02, 0.04, 0.08), [0.02, 0.04, 0.08])],
)
def test_prompts_are_written_at_a_slower_pace_where_the_machine_is_too_busy(
    late: tuple[float, ...], tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    paces = []

    def on_ranks(
        n: int, fn: object, n_prompts: tuple[int, ...], n_tokens: int, forward_s: float
    ) -> list[Any]:
        paces.append(forward_s)
        length = {1: 24, 4: 27, 8: 51}
        slow = 1.2 if forward_s in late else 1.0
        return [{m: ([], measured_in(slow * length[m] * forward_s)) for m in n_prompts}]

    def measured_in(seconds: float) -> Timeline:
        return Timeline(1, (Span(0, Action(0, "F", 0), 0.0, seconds),), unit="s")

    monkeypatch.setattr(lab, "on_ranks", on_ranks)
    written = generate_text((1, 4, 8), n_tokens=6)
    assert paces == tried
    assert written[4][1].makespan == pytest.approx(
        (1.2 if tried[-1] in late else 1) * 27 * tried[-1]
    )


@pytest.mark.ranks
def test_prompts_in_turn_write_what_one_process_writes() -> None:
    assert all(equal for equal, _ in generate_text((1, 5), n_tokens=2).values())
