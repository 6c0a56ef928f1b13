"""Exercises of notebook 01: which layers go where, a step across the cut, and the check that would have caught it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise, Mistake
from course_pp.exercises.expect import close, expect_list, expect_number
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.layer_cuts import assign_layers, balanced_cut, grade_assign_layers, grade_balanced_cut
from course_pp.model import CrossEntropy, ModelConfig, Transformer, build_stage_module

_CONFIG = ModelConfig(dim=32, n_layers=3, n_heads=2, vocab_size=29, max_seq_len=16)


def send_activation(output: Tensor, to: int) -> None:
    """Send an activation. This and the four below are the notebook's: an answer is made of them."""
    dist.send(output.detach(), to)


def empty_activation(stage: Any, tokens: Tensor) -> Tensor:
    weight = next(stage.parameters())
    return torch.empty(*tokens.shape, stage.config.dim, dtype=weight.dtype)


def recv_activation(activation: Tensor, source: int) -> Tensor:
    dist.recv(activation, source)
    return activation.requires_grad_()


def send_gradient(activation: Any, to: int) -> None:
    dist.send(activation.grad, to)


def recv_gradient(output: Tensor, source: int) -> Tensor:
    gradient = torch.empty_like(output)
    dist.recv(gradient, source)
    return gradient


loss_fn = CrossEntropy()


def two_rank_step(rank: int, stage: Any, tokens: Tensor, targets: Tensor) -> float | None:
    """Forward and backward of one batch over ranks 0 and 1; returns the loss on rank 1."""
    if rank == 0:
        output = stage(tokens)
        send_activation(output, 1)
        output.backward(recv_gradient(output, 1))
        return None
    x = recv_activation(empty_activation(stage, tokens), 0)
    loss = loss_fn(stage(x), targets)
    loss.backward()
    send_gradient(x, 0)
    return loss.item()


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    ids = torch.randint(_CONFIG.vocab_size, (rows, 9), generator=seeded)
    return ids[:, :-1], ids[:, 1:]


def _step_beside_one_process(
    rank: int, answer: Callable[..., Any], rows: int, n_steps: int
) -> tuple[Any, float, dict[str, tuple[Tensor | None, Tensor]]]:
    """What it returned, the loss of one process, and (mine, one process's) gradient of each parameter of the stage."""
    tokens, targets = _batch(rows)
    torch.manual_seed(0)
    stage = build_stage_module(_CONFIG, rank, 2).double()
    before = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
    for _ in range(n_steps):
        with unchanged(tokens=tokens, targets=targets):
            returned = answer(rank, stage, tokens, targets)
    if isinstance(returned, Tensor):
        returned = returned.detach()
    for name, parameter in stage.named_parameters():
        if not torch.equal(parameter, before[name]):
            raise Mistake(
                f"On rank {rank}, the step changed the weights ({name}).", "The optimizer is the caller's business."
            )

    torch.manual_seed(0)
    whole = Transformer(_CONFIG).double()
    loss = CrossEntropy()(whole(tokens), targets)
    loss.backward()
    right = _gradients(whole)
    return returned, loss.item(), {name: (mine, n_steps * right[name]) for name, mine in _gradients(stage).items()}


def _gradients(model: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def grade_two_rank_step(answer: Answer) -> None:
    for rows in (2, 3):
        results = answer.on_ranks(2, _step_beside_one_process, rows, 1)
        for rank in (1, 0):
            _judge_gradients(rank, results[rank][2])
        returned, loss, _ = results[1]
        got = expect_number(returned, "two_rank_step(1, stage, tokens, targets)")
        if not close(got, loss):
            raise Mistake(
                f"All gradients are right, but on rank 1 the step returned {got:.8g}; the loss is {loss:.8g}.",
                "Return the loss itself, `loss.item()`.",
            )
    for rank, (_, _, gradients) in enumerate(answer.on_ranks(2, _step_beside_one_process, 2, 2)):
        if not all(_near(*pair) for pair in gradients.values()):
            raise Mistake(
                f"On rank {rank}, the gradients of a second step are not added to those of the first.",
                "`backward` adds to `.grad` by itself; to clear it is up to whoever calls the step.",
            )


def _judge_gradients(rank: int, gradients: dict[str, tuple[Tensor | None, Tensor]]) -> None:
    without = [name for name, (mine, _) in gradients.items() if mine is None]
    if without:
        n = "No parameter" if len(without) == len(gradients) else f"Not every parameter ({without[0]}, …)"
        cause = (
            "Its backward must start from the `output` that has its graph: was that output detached?"
            if rank == 0
            else "Rank 1 computes the loss from `stage(x)`, and calls `loss.backward()`."
        )
        raise Mistake(f"{n} of rank {rank} has a gradient.", cause)
    wrong = {name: (mine, right) for name, (mine, right) in gradients.items() if not _near(mine, right)}
    if not wrong:
        return
    name, (mine, right) = max(wrong.items(), key=lambda item: _furthest(*item[1]))
    assert mine is not None
    ratio = float((mine * right).sum() / (right * right).sum())
    cause = "Its `backward` takes what came from rank 1, and that is the activation's gradient: `send_gradient`."
    if len(wrong) == len(gradients) and all(_near(mine, right * ratio) for mine, right in wrong.values()):
        cause = f"All are {ratio:.6g} times what they should be: once too often added up, or scaled?"
    elif rank == 1:
        cause = "Rank 0 computes on these tokens and sends what comes out; rank 1 computes on that, with these targets."
    places = (mine - right).abs().flatten().topk(min(4, right.numel())).indices
    raise Mistake(
        f"On rank {rank}, {len(wrong)} of {len(gradients)} gradients differ from those of one process.",
        cause,
        f"{name}, where they differ most\n  split        {_at(mine, places)}\n  one process  {_at(right, places)}",
    )


def _near(mine: Tensor | None, right: Tensor) -> bool:
    return mine is not None and mine.shape == right.shape and torch.allclose(mine, right, rtol=1e-12, atol=1e-14)


def _furthest(mine: Tensor | None, right: Tensor) -> float:
    return 0.0 if mine is None or mine.shape != right.shape else float((mine - right).abs().max())


def _at(tensor: Tensor, places: Tensor) -> str:
    return ", ".join(f"{value:.6e}" for value in tensor.flatten()[places].tolist()) + ", …"


def untrained(stage: nn.Module) -> list[str]:
    """Names of parameters that want a gradient and have none, or one of zeros only."""
    return [
        name
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    ]


def _patients(rank: int, answer: Callable[..., Any]) -> list[Any]:
    found = []
    for make in (_healthy, _detached, _left_last, _zeroed, _frozen, _sparse, _cancelling, _tiny):
        stage = make()
        before = _gradients(stage)
        names = answer(stage)
        found.append(
            (names, [name for name, after in _gradients(stage).items() if not _unchanged(before[name], after)])
        )
    return found


def _unchanged(before: Tensor | None, after: Tensor | None) -> bool:
    return before is after if before is None or after is None else torch.equal(before, after)


def _trained() -> nn.Sequential:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    stage(torch.ones(1, 3)).sum().backward()
    return stage


def _healthy() -> nn.Module:
    return _trained()


def _detached() -> nn.Module:
    stage = _trained()
    stage[0].weight.grad = stage[0].bias.grad = None
    return stage


def _left_last() -> nn.Module:
    stage = _trained()
    stage[2].bias.grad = None
    return stage


def _zeroed() -> nn.Module:
    stage = _trained()
    for parameter in stage[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    return stage


def _frozen() -> nn.Module:
    stage = _trained()
    stage[2].requires_grad_(False)
    stage[2].weight.grad = stage[2].bias.grad = None
    return stage


def _sparse() -> nn.Module:
    stage = _trained()
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[-1] = -1.0
    return stage


def _cancelling() -> nn.Module:
    stage = _trained()
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.grad.view(-1)[::2] = -1.0
    return stage


def _tiny() -> nn.Module:
    stage = _trained()
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)
    return stage


def grade_untrained(answer: Answer) -> None:
    (results,) = answer.on_ranks(1, _patients)
    first = ["0.weight", "0.bias"]
    cases: tuple[tuple[str, list[str], str], ...] = (
        ("every gradient is there", [], "Name only what has no gradient."),
        ("layer 0 has `grad` None", first, "A parameter that backward never reached has `grad is None`."),
        ("the last bias has `grad` None", ["2.bias"], "Look at every parameter, the last as well."),
        (
            "the gradients of layer 0 are all zeros",
            first,
            "`zero_grad(set_to_none=False)` leaves zeros: a gradient of zeros only trains nothing either.",
        ),
        ("layer 2 is frozen", [], "With `requires_grad=False` no gradient is wanted."),
        ("one number of each gradient is not zero", [], "A gradient in which only some numbers are zero is healthy."),
        (
            "the numbers of each gradient add up to zero",
            [],
            "1 and -1 cancel, and both train: ask of each number whether it is zero.",
        ),
        ("each number of a gradient is 1e-6", [], "Small is not zero: ask whether any number differs from 0."),
    )
    for (what, want, cause), (value, changed) in zip(cases, results, strict=True):
        if changed:
            raise Mistake(
                f"Where {what}, `untrained` changed the gradient of {changed[0]}.",
                "Look at the gradients only: the optimizer still needs them.",
            )
        names = expect_list(sorted(value) if isinstance(value, set) else value, f"untrained(stage) where {what}")
        if not all(isinstance(name, str) for name in names):
            raise Mistake(
                f"Where {what}, `untrained` gave {names!r:.80}, not names.", "Take them from `named_parameters()`."
            )
        if sorted(names) != sorted(want):
            raise Mistake(f"Where {what}, `untrained` gave {names}, not {want}.", cause)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        name="assign_layers",
        notebook="01",
        title="which layers go where",
        difficulty=1,
        minutes=5,
        hints=(
            "`divmod(n_layers, n_stages)` gives the share of every stage and how many layers are left over.",
            "The first `extras` stages have `share + 1` layers, the others `share`; each starts where the last ended.",
        ),
        solution=assign_layers,
        grade=grade_assign_layers,
    ),
    Exercise(
        name="two_rank_step",
        notebook="01",
        title="forward and backward across the cut",
        difficulty=2,
        minutes=15,
        hints=(
            "Write down the two messages: rank 0 sends the activation, and waits; rank 1 sends the gradient last.",
            "Rank 1 receives into `empty_activation(stage, tokens)`. After `loss.backward()`, the tensor it received "
            "has in `.grad` what rank 0 waits for.",
            "Rank 0 has no loss: it continues with `output.backward(recv_gradient(output, 1))`, from the output that "
            "still has its graph.",
        ),
        solution=two_rank_step,
        grade=grade_two_rank_step,
    ),
    Exercise(
        name="balanced_cut",
        notebook="01",
        title="the costliest stage as cheap as can be",
        difficulty=3,
        minutes=20,
        hints=(
            "Solve smaller questions first: what is the best cut of the first `end` layers only, on fewer stages?",
            "The last stage of such a cut goes from some `start` to `end`. Then the stages before it are the best cut "
            "of the first `start` layers on one stage less, which you know already: this is dynamic programming.",
            "Keep a dictionary: `best[end]` is the cost of the costliest stage, and the ranges. Begin with "
            "`best = {0: (0.0, [])}`, no layer on no stage.",
            "For each further stage make a new one: `longer[end]` is the smallest, over all `start < end` in `best`, "
            "of `(max(worst, sum(costs[start:end])), [*ranges, (start, end)])`. The stages to come need a layer each.",
        ),
        solution=balanced_cut,
        grade=grade_balanced_cut,
    ),
    Exercise(
        name="untrained",
        notebook="01",
        title="the check that would have caught it",
        difficulty=1,
        minutes=5,
        hints=(
            "`stage.named_parameters()` gives names and parameters; look at `parameter.grad`.",
            "Three cases: no gradient wanted (`requires_grad` is False), none there (`grad is None`), or zeros only "
            "(`not grad.any()`).",
        ),
        solution=untrained,
        grade=grade_untrained,
    ),
)
