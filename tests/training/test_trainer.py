"""The trainer equals one process, whichever engine runs the pipeline and however a batch is cut."""

import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig
from course_pp.parallel import DistributedConfig
from course_pp.training import TrainConfig, Trainer
from course_pp.training.logs import METRICS
from course_pp.training.optim import lr_factor
from tests.processes import no_process_left
from tests.training.small import (
    MODEL,
    RUN,
    TIED,
    assert_equals,
    in_one_process,
    rows,
    train,
    trainer,
)

RUNTIME = replace(RUN, engine="runtime")
ALONE = DistributedConfig()


def run(n_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    with no_process_left():
        return on_ranks(n_ranks, fn, *args, timeout_s=60)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "padded", "accumulation"),
    [(MODEL, False, 1), (TIED, True, 2)],
    ids=["packed", "tied, padded and accumulated"],
)
@pytest.mark.parametrize("config", [RUN, RUNTIME], ids=["parallel", "runtime"])
def test_two_stages_equal_one_process(
    config: TrainConfig, model: ModelConfig, padded: bool, accumulation: int
) -> None:
    config = replace(config, accumulation=accumulation)
    ranks = run(2, train, config, model, None, padded)
    assert_equals(ranks, in_one_process(config, model, padded))


def test_data_parallel_ranks_with_unequal_token_counts_equal_one_process() -> None:
    config = replace(RUN, accumulation=2)
    ranks = run(2, train, config, MODEL, DistributedConfig(dp_shard=2), True)
    assert_equals(ranks, in_one_process(config, MODEL, padded=True))


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v"])
def test_both_engines_run_schedules_of_several_stages_a_rank(name: str) -> None:
    reference = in_one_process(RUN, TIED)
    for config in (RUN, RUNTIME):
        assert_equals(run(2, train, replace(config, schedule=name), TIED), reference)


def test_two_copies_of_every_stage_clip_and_train_as_one() -> None:
    config = replace(RUNTIME, schedule="chimera")
    assert_equals(run(2, train, config, TIED), in_one_process(RUN, TIED))


def resumed(rank: int, change: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Number, loss, norm and rate of three steps, in one run and resumed after the first."""
    whole, first = trainer(RUN, layout=ALONE), trainer(RUN, layout=ALONE)
    expected = [whole.train_step() for _ in range(3)]
    found = [first.train_step()]
    second = trainer(replace(RUN, **change), layout=ALONE)
    second.modules[0].load_state_dict(first.modules[0].state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state(json.loads(json.dumps(first.state())))
    found += [second.train_step() for _ in range(2)]
    return [(r.step, r.loss, r.grad_norm, r.lr) for r in expected], [
        (r.step, r.loss, r.grad_norm, r.lr) for r in found
    ]


def test_a_run_taken_up_from_its_state_goes_on_exactly() -> None:
    expected, found = run(1, resumed, {})[0]
    assert found == expected


def test_a_run_may_be_taken_up_with_another_cut_of_the_batch_and_another_engine() -> None:
    expected, found = run(1, resumed, {"accumulation": 4, "microbatches": 1, "engine": "runtime"})[
        0
    ]
    for before, after in zip(expected, found, strict=True):
        assert after == pytest.approx(before, rel=1e-12)


def test_a_run_may_be_taken_up_for_more_steps_and_follows_the_longer_cosine() -> None:
    _, found = run(1, resumed, {"steps": 30})[0]
    longer = replace(RUN, steps=30)
    assert [lr for *_, lr in found[1:]] == [RUN.lr * lr_factor(step, longer) for step in (1, 2)]


def refusals_of_others(rank: int) -> dict[str, str]:
    """What is said of a state when one hyperparameter is another."""
    state = trainer(RUN, layout=ALONE).state()
    said = {}
    for name, value in OTHERS.items():
        with pytest.raises(ValueError, match=name) as refusal:
            trainer(replace(RUN, **{name: value}), layout=ALONE).load_state(state)
        said[name] = str(refusal.value)
    return said


def of_earlier_days(rank: int) -> int:
    """Take up a state without what earlier versions did not know."""
    run = trainer(RUN, layout=ALONE)
    state = json.loads(json.dumps(run.state()))
    known = ("batch", "seed", "lr", "min_lr", "warmup_steps", "weight_decay", "clip_norm")
    old = {name: value for name, value in state.items() if name != "loss_scale"}
    run.load_state({**old, "step": 2, "config": {name: state["config"][name] for name in known}})
    with pytest.raises(ValueError, match=r"optimizer is 'SGD' .* 'AdamW'"):
        trainer(replace(RUN, optimizer="SGD"), layout=ALONE).load_state(old)
    return run.step


def test_a_state_of_earlier_days_is_taken_up() -> None:
    assert run(1, of_earlier_days) == [2]


OTHERS: dict[str, Any] = {
    "batch": 16,
    "seed": 7,
    "lr": 0.1,
    "min_lr": 0.5,
    "warmup_steps": 0,
    "weight_decay": 0.5,
    "clip_norm": 9.0,
}


def test_a_run_goes_on_only_with_the_hyperparameters_it_began_with() -> None:
    (said,) = run(1, refusals_of_others)
    for name, value in OTHERS.items():
        assert (
            f"{name} is {value} here and {getattr(RUN, name)} in the state: resume with what"
            in said[name]
        )


def refusals(rank: int) -> dict[str, str]:
    """What each attempt is refused with on this rank."""
    layout = DistributedConfig(dp_shard=2)
    run = trainer(RUN, layout=layout)
    state = run.state()

    def other(**change: Any) -> Callable[[], object]:
        return lambda: run.load_state({**state, **change})

    attempts: dict[str, Callable[[], object]] = {
        "other data": other(data={"next_batch": 0, "digest": "another"}),
        "other tokenizer": other(tokenizer="another"),
        "other seed": other(config={**state["config"], "seed": 7}),
        "later step": other(step=4),
        "no state": lambda: run.load_state({"step": 1}),
        "state of one rank": lambda: run.load_state(state if rank else {**state, "step": 9}),
        "runtime on data ranks": lambda: trainer(RUNTIME, layout=layout),
        "ranks disagree": lambda: trainer(replace(RUN, lr=0.1 * (1 + rank)), layout=layout),
        "data of one rank": lambda: Trainer(
            RUN, run.modules, rows(8 + 8 * rank), device_mesh=run._mesh
        ),
        "no stages on one rank": lambda: Trainer(
            RUN, run.modules[:rank], rows(), device_mesh=run._mesh
        ),
        "too few rows": lambda: Trainer(RUN, run.modules, rows(4), device_mesh=run._mesh),
        "no validation": (
            lambda: Trainer(RUN, run.modules, rows(), device_mesh=run._mesh).evaluate()
        ),
        "folder": lambda: trainer(replace(RUN, log_folder="/dev/null/logs"), layout=layout).fit(),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    said["step"] = str(run.step)
    return said


def test_every_rank_refuses_what_cannot_be_with_the_same_sentence() -> None:
    first, second = run(2, refusals)
    assert first == second
    expected = {
        "other data": "the digest of the training data is",
        "other tokenizer": "the tokenizer is None here and 'another' in the state",
        "other seed": "seed is 42 here and 7 in the state",
        "later step": "step 4, past steps=3: raise steps",
        "no state": "has no config, data, scheduler, tokenizer",
        "state of one rank": "step 9, past steps=3",
        "runtime on data ranks": "take engine='parallel'",
        "ranks disagree": "rank 1 was given config=",
        "data of one rank": "rank 1 was given data=",
        "no stages on one rank": "pass the list of this rank's stages",
        "too few rows": "global_batch=8 and 4 sequences",
        "no validation": "give Trainer validation data",
        "folder": "log_folder='/dev/null/logs' cannot be written",
        "step": "0",
    }
    for name, words in expected.items():
        assert words in first[name], name


def fitted(rank: int, config: TrainConfig) -> tuple[Any, list[int]]:
    seen: list[int] = []
    return trainer(config).fit(after_step=lambda _, result: seen.append(result.step)), seen


def test_fit_logs_on_one_rank_evaluates_and_traces_every_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = replace(RUN, log_folder=str(tmp_path), log_every=1, eval_every=2, profile=1)
    (first, seen), (second, _) = run(2, fitted, config)
    assert seen == [1, 2, 3]
    assert (first.steps, first.loss, first.validation_loss) == (
        3,
        second.loss,
        second.validation_loss,
    )

    records = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [(r["event"], r["step"]) for r in records] == [
        ("start", 0), ("train", 1), ("train", 2), ("validation", 2), ("train", 3), ("validation", 3)
    ]  # fmt: skip
    assert (records[0]["peak_flops"], records[0]["peak_source"]) == (2e9, "given")
    assert records[0]["config"] == config.as_dict()
    assert records[-2]["loss"] == first.loss
    assert records[-2]["tokens"] == 3 * 8 * 8
    assert records[-1]["loss"] == first.validation_loss
    for rank in range(2):
        assert json.loads((tmp_path / f"trace_rank{rank}.json").read_text())["traceEvents"]
    shown = capsys.readouterr().out.splitlines()
    assert sum("step 3/3  loss" in line for line in shown) == 1


def hooked(rank: int, config: TrainConfig) -> list[int]:
    """How often hooks are called in a step of several parts, and in one that is skipped."""
    run = trainer(config, TIED)
    parameters = [p for module in run.modules for p in module.parameters()]
    heard: dict[Any, Any] = {}
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda p: heard.setdefault(p, []).append((p.clone(), p.grad.clone()))
        )
    before = [p.detach().clone() for p in parameters]
    run.train_step()
    calls = [len(heard[p]) for p in parameters]
    for parameter, old in zip(parameters, before, strict=True):
        value, gradient = heard[parameter][0]
        assert value.equal(old), "called after the optimizer"
        assert gradient.equal(parameter.grad), "called with something else than the optimizer gets"
    heard.clear()
    parameters[0].data.view(-1)[0] = math.nan
    run.train_step()
    return [min(calls), max(calls), len(heard)]


@pytest.mark.parametrize("config", [RUN, RUNTIME], ids=["parallel", "runtime"])
def test_hooks_hear_the_clipped_gradient_of_the_whole_batch_once_and_nothing_of_a_skipped_step(
    config: TrainConfig,
) -> None:
    config = replace(config, accumulation=2, on_nan="skip")
    assert run(2, hooked, config) == [[1, 1, 0]] * 2


def collections(rank: int) -> tuple[list[int], list[bool], bool]:
    """Steps after which garbage was collected, and Python's own setting during and after."""
    made = trainer(replace(RUN, steps=5, gc_every=2), layout=ALONE)
    seen = []
    enabled = []

    def heard(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            seen.append(made.step)

    gc.callbacks.append(heard)
    made.fit(lambda *_: enabled.append(gc.isenabled()))
    gc.callbacks.remove(heard)
    return [step for step in seen if 0 < step <= 4], enabled, gc.isenabled()


def test_garbage_is_collected_at_fixed_steps() -> None:
    [(seen, enabled, after)] = run(1, collections)
    assert seen == [2, 4]
    assert enabled == [False] * 5
    assert after


def late(rank: int) -> tuple[list[int], str]:
    """Steps that were done, and the error, if rank 1 is late before or after the first step."""
    made = trainer(replace(RUN, step_timeout=0.3))
    done = []

    def after_step(*_: Any) -> None:
        done.append(made.step)
        if rank == 1:
            time.sleep(2)

    if rank == 1:
        time.sleep(1)
    try:
        made.fit(after_step)
    except RuntimeError as error:
        return done, type(error).__name__
    return done, "nothing"


def test_the_first_step_may_take_longer_than_the_others() -> None:
    first, _ = run(2, late)
    assert first[0] == [1]
    assert first[1] != "nothing"
