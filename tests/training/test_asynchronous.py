"""The trainer of an asynchronous pipeline: gradients are delayed only within a step."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, Transformer
from course_pp.parallel import DistributedConfig
from course_pp.runtime import StepFailed
from course_pp.training import TrainConfig
from course_pp.training.checkpoint import diff
from course_pp.training.checkpointer import Checkpointer
from course_pp.training.data import Batches
from course_pp.training.optim import build_optimizer, lr_factor
from tests.processes import no_process_left
from tests.training.small import MODEL, RUN, TIED, rows, trainer

STASH = replace(
    RUN,
    engine="runtime",
    schedule="pipedream",
    versions="stash",
    clip_norm=math.inf,
    microbatches=4,
)
GROUPED = replace(STASH, versions="2bw")
MIXED = replace(STASH, versions="none")

Found = tuple[list[float], dict[str, Tensor], float]


def run(n_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    with no_process_left():
        return on_ranks(n_ranks, fn, *args, timeout_s=60)


def trained(rank: int, config: TrainConfig, padded: bool) -> Found:
    """Losses, the last parameters of this rank, and the validation loss."""
    run = trainer(config, padded=padded)
    losses = [run.train_step().loss for _ in range(config.steps)]
    return (
        losses,
        {n: p.detach().clone() for m in run.modules for n, p in m.named_parameters()},
        run.evaluate(),
    )


def delayed(config: TrainConfig, padded: bool) -> Found:
    """The same with two stages in one process.

    Each computes with the weights after a given number of this step's updates.
    """
    torch.manual_seed(0)
    model = Transformer(MODEL).double()
    loss_fn = CrossEntropy()
    losses = []
    optimizer = build_optimizer([model], config)
    own = dict(model.named_parameters())
    late = {name for name in own if name.startswith(("embed", "layers.0."))}  # the first stage's
    for step in range(config.steps):
        versions = [copied(own)]
        kept = []
        for group in optimizer.param_groups:
            group["lr"] = config.lr * lr_factor(step, config)
        total = tokens = 0.0
        batch = Batches(rows(24, padded), config.batch, config.seed)[step]
        for i in range(config.microbatches):
            part = batch[i * 2 : (i + 1) * 2]
            used = {
                name: versions[version_of(config, name in late, i)][name].requires_grad_()
                for name in own
            }
            output = functional_call(
                model, used, (part.inputs,), {"attention_mask": part.attention_mask}
            )
            loss, count = loss_fn(output, part.targets), int(loss_fn.count(part.targets))
            total, tokens = total + loss.item() * count, tokens + count
            kept.append(torch.autograd.grad(loss, list(used.values())))
            if len(kept) == (2 if config.versions == "2bw" else 1):
                for parameter, *each in zip(own.values(), *kept, strict=True):
                    parameter.grad = sum(each) / len(each)
                optimizer.step()
                versions.append(copied(own))
                kept = []
        losses.append(total / tokens)
    held_out = rows(17, padded, seed=1)[torch.arange(16) * 17 // 16]
    with torch.no_grad():
        validation = loss_fn(
            model(held_out.inputs, attention_mask=held_out.attention_mask), held_out.targets
        ).item()
    return losses, copied(own), validation


def version_of(config: TrainConfig, is_first_stage: bool, i: int) -> int:
    return max(0, i // 2 - 1) if config.versions == "2bw" else max(0, i - is_first_stage)


def copied(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("config", "padded"), [(STASH, True), (GROUPED, False)], ids=["stash, padded", "2bw"]
)
def test_steps_of_two_stages_equal_delayed_gradients_in_one_process(
    config: TrainConfig, padded: bool
) -> None:
    losses, parameters, validation = delayed(config, padded)
    for found, mine, evaluated in run(2, trained, config, padded):
        assert found == pytest.approx(losses, abs=1e-12)
        assert evaluated == pytest.approx(validation, abs=1e-12)
        for name, value in mine.items():
            torch.testing.assert_close(
                value, parameters[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


def fitted(rank: int, root: Path, source: Path | str) -> list[tuple[int, float, float]]:
    """Step, loss and learning rate of each step to the last, with a checkpoint after each."""
    run = trainer(STASH)
    seen = []
    with Checkpointer(
        run, root, device_mesh=run._mesh, save_every=1, asynchronous=True
    ) as checkpointer:
        checkpointer.resume(source)

        def after_step(trainer: Any, result: Any) -> None:
            seen.append((result.step, result.loss, result.lr))
            checkpointer.after_step(trainer, result)

        run.fit(after_step)
    return seen


def test_a_checkpoint_resumes_to_the_same_losses_and_weights(tmp_path: Path) -> None:
    whole = run(2, fitted, tmp_path / "whole", "never")
    for step in (1, 2):
        folder = tmp_path / f"after {step}"
        rest = run(2, fitted, folder, tmp_path / "whole" / f"step_{step:08d}")
        assert rest == [each[step:] for each in whole]
        assert not diff(tmp_path / "whole" / "step_00000003", folder / "step_00000003")


def refused(rank: int, folder: Path) -> dict[str, str]:
    """What each attempt is refused with."""
    run = trainer(STASH)
    state = run.state()
    attempts: dict[str, Callable[[], object]] = {
        "tied weights": lambda: trainer(replace(STASH, log_folder=str(folder)), TIED),
        "groups unfilled": lambda: trainer(
            replace(GROUPED, microbatches=1, log_folder=str(folder))
        ),
        "padded groups": lambda: trainer(replace(GROUPED, log_folder=str(folder)), padded=True),
        "other versions here": lambda: trainer(
            replace(STASH, versions=("stash", "vertical")[rank])
        ),
        "data-parallel ranks": lambda: trainer(STASH, layout=DistributedConfig(dp_shard=2)),
        "other microbatches": lambda: trainer(replace(STASH, microbatches=2)).load_state(state),
        "other stages": lambda: run.load_state({**state, "n_stages": 4}),
        "other versions": lambda: trainer(MIXED).load_state(state),
        "a run that flushed": lambda: run.load_state(trainer(RUN).state()),
    }
    return {name: words(attempt) for name, attempt in attempts.items()}


def words(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_what_stages_that_update_cannot_do_is_refused_on_every_rank_before_anything_is_written(
    tmp_path: Path,
) -> None:
    first, second = run(2, refused, tmp_path / "logs")
    assert first == second
    assert not (tmp_path / "logs").exists()
    expected = {
        "tied weights": "versions='stash': each end would update by itself; untie them",
        "groups unfilled": "group is 2: it must divide 1 microbatches",
        "padded groups": "versions='2bw' with padded sequences: an update takes the mean",
        "other versions here": "rank 1 was given config=",
        "data-parallel ranks": "it runs pipeline ranks alone",
        "other microbatches": "microbatches is 2 here and 4 in the state",
        "other stages": "the number of stages is 2 here and 4 in the state",
        "other versions": "versions is 'none' here and 'stash' in the state",
        "a run that flushed": "clip_norm is 'inf' here and 0.5 in the state",
    }
    for name, said in expected.items():
        assert said in first[name], name


def diverging(rank: int) -> tuple[str, list[str]]:
    run = trainer(replace(STASH, lr=1e300, optimizer="SGD", warmup_steps=0))
    try:
        run.train_step()
    except StepFailed as error:
        return str(error), error.__notes__
    return "nothing", []


def test_a_learning_rate_that_diverges_ends_the_run_with_its_step_update_and_stage() -> None:
    for said, notes in run(2, diverging):
        assert "of stage 1" in said
        assert "lower the learning rate" in said
        assert notes == [
            "It was in step 1, which counts its updates from 0: go on from a checkpoint."
        ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"versions": None},
            "schedule='pipedream' with versions=None: its stages update their own weights",
        ),
        (
            {"schedule": "1f1b"},
            "versions='stash' with schedule='1f1b': it flushes, so there is one version",
        ),
        (
            {"engine": "parallel"},
            "engine='parallel' with versions='stash': torch has no such schedule: take 'runtime'",
        ),
        (
            {"clip_norm": 1.0},
            "clip_norm=1.0 with versions='stash': no stage knows the norm of the whole model",
        ),
        (
            {"precision": "fp16"},
            "precision='fp16' with versions='stash': no stage sees that another's gradient",
        ),
        ({"accumulation": 2}, "accumulation=2 with versions='stash': each microbatch is an update"),
        (
            {"on_nan": "skip"},
            "on_nan='skip' with versions='stash': by then other updates of the step were done",
        ),
        ({"group": 2}, "group=2 belongs to versions '2bw', not to versions='stash'"),
        ({"versions": "2bw", "group": 3}, "group=3 must divide microbatches=4"),
    ],
)
def test_what_a_run_cannot_ask_of_stages_that_update_is_refused_by_name(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        replace(STASH, **changes)
    assert words in str(refusal.value)
