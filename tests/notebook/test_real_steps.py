"""Emulated runs look the same on a slow machine; gradients of schedules equal one process's."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from course_pp.notebook import compare_gradients, emulate, real_steps
from course_pp.runtime import EmulatedCluster, EmulatedLink
from course_pp.runtime.emulation import EmulatedTimeline, Overrun
from course_pp.schedule import Costs, Timeline, build, ledger, simulate


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for a machine on which other tests run."""
    monkeypatch.setattr(real_steps, "_FIRST_UNIT_S", 0.04)
    monkeypatch.setattr(real_steps, "_LONGEST_RUN_S", 60)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_run_has_the_times_of_its_costs_whatever_the_unit_lasts(name: str) -> None:
    schedule, costs = (
        build(name, 2, 4),
        Costs(forward=1, input_grad=Fraction(3, 2), weight_grad=1, latency=0.5),
    )
    run = emulate(schedule, costs)
    predicted = simulate(schedule, costs)
    assert run.measured
    assert run.unit == ""
    assert float(run.makespan) == pytest.approx(float(predicted.makespan), rel=0.006)
    assert [span.action for span in run.spans] == [span.action for span in predicted.spans]
    assert run.peak_activations == predicted.peak_activations
    assert len(run.losses) == 4
    for kept in run.memory:
        times = [when for when, _ in kept.curves["activation"]]
        assert 1 < max(times) <= run.makespan, "the times of what is kept are in units, too"


@pytest.mark.usefixtures("patient")
def test_links_and_stragglers_are_in_units_too() -> None:
    cluster = EmulatedCluster(
        Costs(), links=[EmulatedLink(latency=2.0, bandwidth=2048.0)], stragglers={1: 2.0}
    )
    run = emulate(build("gpipe", 2, 2), cluster)  # 16 rows of 32 floats: 2,048 bytes, one unit
    assert run.measured
    # Two forwards of 1 on rank 0; 3 on the way; 2 + 2 and 4 + 4 on rank 1; 3 on the way back; 2.
    assert float(run.makespan) == pytest.approx(1 + 3 + 4 + 8 + 3 + 2, rel=0.006)


def test_a_machine_too_busy_to_emulate_shows_the_simulated_times_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_steps, "_FIRST_UNIT_S", 1e-6)
    monkeypatch.setattr(real_steps, "_LONGEST_RUN_S", 1e-3)
    schedule = build("1f1b", 2, 4)
    run = emulate(schedule)
    assert not run.measured
    assert run.name == "1f1b, simulated"
    assert run.spans == simulate(schedule).spans
    assert len(run.losses) == 4
    assert "too busy" in capsys.readouterr().out


def test_the_unit_grows_until_the_work_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ranks: work of 20 ms an action, whatever unit is tried."""
    schedule, tried = build("naive", 2, 1), []

    def fake(n: int, step: object, cluster: EmulatedCluster, *given: object) -> list[Any]:
        chosen = cluster.predict(schedule)
        spans = tuple(replace(span, end=span.start + 0.02) for span in chosen.spans)
        late = tuple(
            Overrun(span.rank, span.action, 0.02) for span in chosen.spans if span.duration < 0.02
        )
        tried.append(float(cluster.costs.forward))  # type: ignore[arg-type]
        apart = tuple(
            replace(span, start=100 * i, end=100 * i + 0.02) for i, span in enumerate(spans)
        )
        return [
            (
                EmulatedTimeline(2, chosen.spans, "s", wall=Timeline(2, apart, "s"), overruns=late),
                (),
                (1.0,),
                None,
            )
        ]

    monkeypatch.setattr(real_steps, "on_ranks", fake)
    run = emulate(schedule)
    assert tried == pytest.approx([0.008, 0.04])
    assert run.measured
    assert run.unit_s == pytest.approx(0.04)
    assert float(run.makespan) == pytest.approx(6)


def test_a_model_and_a_batch_of_ones_own_are_cut_over_the_ranks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
    inputs, targets = torch.randn(2, 6, 8, dtype=torch.float64)
    run = emulate(build("1f1b", 2, 3), model=model, inputs=inputs, targets=targets)
    assert sum(run.losses) == pytest.approx(
        nn.functional.mse_loss(model(inputs), targets).item(), rel=1e-12
    )


@pytest.mark.usefixtures("patient")
def test_stages_that_update_themselves_say_which_versions_they_used() -> None:
    schedule = build("pipedream", 2, 4)
    run = emulate(schedule, versions="stash")
    assert run.ledger == ledger(schedule, "stash")
    assert float(run.makespan) == pytest.approx(5 * 3 + 4 * 0.25, rel=0.006)
    assert [bool(kept.peaks["version"]) for kept in run.memory] == [True, False]


def test_the_optimizer_is_the_callers_and_has_no_place_without_versions() -> None:
    schedule = build("pipedream", 2, 4)
    slow, quick = (
        emulate(schedule, versions="stash", optimizer=sgd).losses for sgd in (still, hasty)
    )
    assert slow[0] == quick[0]
    assert slow[3] != quick[3]
    with pytest.raises(ValueError, match="versions is None: give a rule"):
        emulate(schedule, optimizer=still)


def test_schedules_of_several_sizes_have_the_gradients_of_one_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compare_gradients([build("zb_v", 2, 4), build("1f1b", 1, 2), build("zb_h1", 2, 3)])
    assert len(found) == 3
    assert max(found) < 1e-12
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "zb_v   2 ranks, 16 gradients",
        "1f1b   1 rank, 4 gradients",
        "zb_h1  2 ranks, 8 gradients",
    ]
    assert real_steps._difference(None, torch.ones(2)) == float("inf")
    assert real_steps._difference(torch.ones(2), torch.tensor([1.0, 1.5])) == 0.5


def test_too_many_ranks_and_no_schedule_are_refused() -> None:
    with pytest.raises(ValueError, match="schedules is empty"):
        compare_gradients([])
    with pytest.raises(ValueError, match="9 ranks"):
        compare_gradients([build("1f1b", 9, 9)])


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6)


def hasty(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
