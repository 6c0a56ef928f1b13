"""The bug clinic of notebook 10: four cuts that go wrong on batches unlike the one they were tried on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import close, expect_tensor
from course_pp.model import ModelConfig, Transformer, build_stage_module
from course_pp.parallel import auto_split

__all__ = ["PATIENTS", "examine", "grade_masked_loss", "masked_loss", "patient_a"]

CONFIG = ModelConfig(dim=16, n_layers=3, n_heads=2, vocab_size=24, max_seq_len=8)
_N_STAGES, _TOLERANCE = 3, 1e-9


def masked_loss(stages: list[nn.Module], tokens: Tensor, mask: Tensor, m: int) -> Tensor:
    """Loss of the next token through all stages, in m microbatches; padding, where mask is 0, does not count."""
    total, counted = torch.zeros((), dtype=torch.float64), mask[:, 1:].sum()
    for rows, real in zip(tokens.chunk(m), mask.chunk(m), strict=True):
        x = rows
        for stage in stages:
            x = stage(x, attention_mask=real)
        targets = rows[:, 1:].masked_fill(real[:, 1:] == 0, -100).flatten()
        total = total + cross_entropy(x[:, :-1].flatten(0, 1), targets, reduction="sum")
    return total / counted


def patient_a(stages: list[nn.Module], tokens: Tensor, mask: Tensor, m: int) -> Tensor:
    """The mask goes where the tokens go: to the first stage."""
    total, counted = torch.zeros((), dtype=torch.float64), mask[:, 1:].sum()
    for rows, real in zip(tokens.chunk(m), mask.chunk(m), strict=True):
        x = stages[0](rows, attention_mask=real)
        for stage in stages[1:]:
            x = stage(x)
        targets = rows[:, 1:].masked_fill(real[:, 1:] == 0, -100).flatten()
        total = total + cross_entropy(x[:, :-1].flatten(0, 1), targets, reduction="sum")
    return total / counted


class _Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(24, 8), nn.Linear(8, 8)
        self.ends = nn.ModuleList([self.embed, self.embed])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.ends[0](ids)) + self.ends[1](ids)


class _Branching(nn.Module):
    """Long batches take another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.short, self.long, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.long(x) if x.abs().mean() > 1 else self.short(x))


class _Fixed(nn.Module):
    """Positions for the batch it was tried on."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("positions", torch.randn(length, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + self.positions)


def _lost_mask() -> str:
    tokens, masks = _batch(), {"none": torch.ones(4, 6, dtype=torch.int64), "two in front": _left_padded()}
    lines = []
    for name, mask in masks.items():
        ours, one = (step(_stages(), tokens, mask, 2).item() for step in (patient_a, _in_one_piece))
        lines.append(f"padding {name}: loss {ours:.4f}, in one piece {one:.4f}")
    return "; ".join(lines)


def _inside_a_tie() -> str:
    return _said(lambda: auto_split(_Tied(), _batch(), at=["ends.1"]))


def _another_way() -> str:
    first, second = auto_split(_Branching(), 0.1 * torch.ones(2, 8), 2)
    second(**first(0.2 * torch.ones(2, 8)))
    return "a batch like the example: right; the next: " + _said(lambda: first(9 * torch.ones(2, 8)))


def _fixed_shape() -> str:
    first, second = auto_split(_Fixed(6), torch.ones(2, 6, 8), 2)
    second(**first(torch.ones(3, 6, 8)))
    return "3 rows of 6: right; 2 rows of 5: " + _said(lambda: first(torch.ones(2, 5, 8)))


PATIENTS: dict[str, Callable[[], str]] = {"A": _lost_mask, "B": _inside_a_tie, "C": _another_way, "D": _fixed_shape}


def examine(name: str) -> str:
    """What patient ``name`` complains of."""
    return PATIENTS[name]()


def _said(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
    return "nothing"


def _batch() -> Tensor:
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(3))


def _left_padded() -> Tensor:
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[1:, :2] = 0
    return mask


def _stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [build_stage_module(CONFIG, stage, _N_STAGES).double() for stage in range(_N_STAGES)]


def _in_one_piece(stages: list[nn.Module], tokens: Tensor, mask: Tensor, m: int) -> Tensor:
    torch.manual_seed(0)
    logits = Transformer(CONFIG).double()(tokens, attention_mask=mask)
    targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())


def _masks() -> dict[str, Tensor]:
    right = torch.ones(4, 6, dtype=torch.int64)
    right[0, 4:] = right[3, 2:] = 0
    ragged = torch.ones(4, 6, dtype=torch.int64)
    ragged[0, :3] = ragged[2, :1] = ragged[3, 5:] = 0
    none = torch.ones(4, 6, dtype=torch.int64)
    return {"no padding": none, "padding behind": right, "padding in front": _left_padded(), "both": ragged}


def grade_masked_loss(answer: Answer) -> None:
    """Ask for one process's loss, and gradient, whatever is padding."""
    cases = [(mask, m) for mask in _masks() for m in (1, 2, 4)]
    found = answer.on_ranks(1, _losses, cases)[0]
    for (name, m), (loss, gradient) in zip(cases, found, strict=True):
        tokens, mask, whole = _batch(), _masks()[name], _stages()
        right = _in_one_piece(whole, tokens, mask, m)
        expected = torch.autograd.grad(masked_loss(whole, tokens, mask, m), next(iter(whole[0].parameters())))[0]
        example = f"{name}, {m} microbatch{'es' * (m > 1)}: {loss:.6f}, in one piece {right.item():.6f}."
        if not close(loss, right.item(), _TOLERANCE):
            _refuse_loss(name, m, loss, example)
        if gradient is None or not torch.allclose(gradient, expected, rtol=1e-7, atol=1e-10):
            cause = "Return the loss itself: no `.item()` and no `detach` on the way."
            raise Mistake("The loss is right, and its gradient is not.", cause, example)


def _refuse_loss(name: str, m: int, loss: float, example: str) -> None:
    if name == "no padding":
        cause = "Add up the losses of all counted tokens, and divide by their number once, at the end."
        raise Mistake(f"Without padding, with m={m}, the loss is wrong.", cause, example)
    if m > 1:
        cause = (
            "With one microbatch it is right. Does each microbatch go with its own rows of the mask, and is the sum "
            "divided by the tokens counted in the whole batch?"
        )
        raise Mistake(f"With {name} and m={m} the loss is wrong.", cause, example)
    cause = "Every stage attends, so each has to know what is padding. What does `stage(x)` know?"
    if _counts_padding(loss, _batch(), _masks()[name]):
        cause = "Padding is guessed like everything else: as a target it has to be left out, with -100."
    raise Mistake(f"With {name} the loss is wrong.", cause, example)


def _counts_padding(loss: float, tokens: Tensor, mask: Tensor) -> bool:
    """Whether the loss is that of all targets, over the number of all or of those that count."""
    torch.manual_seed(0)
    logits = Transformer(CONFIG).double()(tokens, attention_mask=mask)
    everything = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
    counted = mask[:, 1:]
    return any(close(loss, everything / n, _TOLERANCE) for n in (counted.numel(), int(counted.sum())))


def _losses(rank: int, fn: Callable[..., Any], cases: list[tuple[str, int]]) -> list[tuple[float, Tensor | None]]:
    found: list[tuple[float, Tensor | None]] = []
    for name, m in cases:
        stages = _stages()
        loss = expect_tensor(fn(stages, _batch(), _masks()[name], m), "masked_loss(…)", ())
        if loss.requires_grad:
            loss.backward()
        found.append((loss.item(), next(stages[0].parameters()).grad))
    return found
