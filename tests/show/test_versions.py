"""Which version of the weights each action used, as a reader of the figure finds it."""

from collections import Counter
from typing import get_args

import pytest

from course_pp import show
from course_pp.schedule import Costs, Schedule, Versions, build, ledger, simulate
from course_pp.show.chart import ChartFigure
from tests.show.layout import flaws
from tests.show.reading import labels, title


def drawn(schedule: Schedule, versions: Versions) -> ChartFigure:
    return show.versions(simulate(schedule, Costs(update=0.25)), ledger(schedule, versions))


@pytest.mark.parametrize("versions", get_args(Versions))
def test_each_action_is_labelled_with_the_version_in_the_ledger(versions: Versions) -> None:
    schedule = build("pipedream", 3, 6, group=3 if versions == "2bw" else None)
    figure = drawn(schedule, versions)
    planned = ledger(schedule, versions)
    expected = Counter[str]()
    for use in planned.uses:
        differs = "≠" * (use.forward != use.backward)
        expected.update((f"F{use.microbatch}", f"v{use.forward}"))
        expected.update((f"B{use.microbatch}", f"{differs}v{use.backward}"))
    for stage in range(3):
        expected.update(f"v{update + 1}" for update in range(len(planned.updates(stage))))
    assert Counter(text for text, *_ in labels(figure)) == expected
    assert flaws(figure) == []


def test_the_finding_says_how_late_gradients_are_and_whether_forward_and_backward_agree() -> None:
    schedule = build("pipedream", 4, 8)
    late = title(drawn(schedule, "stash"))
    assert "up to 3, 2, 1 and 0 updates late" in late
    every = title(drawn(schedule, "vertical"))
    assert "up to 3 updates late on every stage" in every
    assert "agree" in late
    assert "agree" in every
    mixed = drawn(schedule, "none")
    assert "21 of 32 backwards" in title(mixed)
    assert "Stage 0: F0 v0, B0 v0, F1 v0, B1 v1" in mixed.alt_text
    named = show.versions(simulate(schedule), ledger(schedule, "none"), title="Mixed")
    assert title(named) == "Mixed"


def test_replicas_share_the_versions_of_their_stage() -> None:
    figure = drawn(build("pipedream", 3, 8, replicas=(2, 1)), "stash")
    assert "Stage 0: F0 v0, B0 v0, F1 v0, B1 v0, F2 v0" in figure.alt_text
    assert flaws(figure) == []


def test_long_runs_show_versions_only_and_stay_legible() -> None:
    figure = drawn(build("pipedream", 4, 12), "stash")
    assert not any(text.startswith("F") for text, *_ in labels(figure))
    assert any(text == "v11" for text, *_ in labels(figure))
