"""Packed sequences: rows of several documents, and a language model that attends within each.

The reference computes the documents one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_pp.model import CrossEntropy
from tests.equality import Trained, train

N_MICROBATCHES, VOCAB, DIM, N_DOCUMENTS = 4, 13, 8, 3


class Offsets(NamedTuple):
    """The bounds of each row's documents, (rows, documents + 1), and the longest one's length."""

    starts: Tensor
    longest: int


class Mask:
    """The mask of attention, (rows, length, length), in an object that only the model can read."""

    def __init__(self, offsets: Offsets, length: int) -> None:
        document = (offsets.starts[:, None] <= torch.arange(length)[:, None]).sum(-1)
        same = document[:, :, None] == document[:, None]
        self._visible = same & torch.ones(length, length, dtype=torch.bool).tril()

    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self._visible, -torch.inf)


class Block(nn.Module):
    """Attention within a document: one by one by offsets, or over the whole row with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 3 * DIM, bias=False),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x: Tensor, offsets: Offsets, mask: Mask | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if mask is not None:
            return x + self.out(mask.hide(q @ k.mT).softmax(-1) @ v)
        rows = []
        for row, starts in enumerate(offsets.starts.tolist()):
            documents = [slice(*ends) for ends in pairwise(starts)]
            if max(document.stop - document.start for document in documents) > offsets.longest:
                raise ValueError(f"a document is longer than {offsets.longest}")
            rows.append(
                torch.cat([_attend(q[row, each], k[row, each], v[row, each]) for each in documents])
            )
        return x + self.out(torch.stack(rows))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v


class Packed(nn.Module):
    """Some of a language model's parts.

    Each stage is called with the offsets, or the mask, of its microbatch.
    """

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Tensor, offsets: Offsets, mask: Mask | None = None) -> Tensor:
        for part in self.parts.values():
            x = part(x, offsets, mask) if isinstance(part, Block) else part(x)
        return x

    def cut(self, n_stages: int) -> list["Packed"]:
        names = list(self.parts)
        bounds = [round(stage * len(names) / n_stages) for stage in range(n_stages + 1)]
        return [
            Packed({name: self.parts[name] for name in names[start:end]})
            for start, end in pairwise(bounds)
        ]


def model(tied: bool = True) -> Packed:
    """Return a whole model. Its embedding and its head are one weight if ``tied``."""
    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {"embed": nn.Embedding(VOCAB, DIM)}
    parts |= {f"block{i}": Block() for i in range(6)} | {"head": nn.Linear(DIM, VOCAB, bias=False)}
    if tied:
        parts["head"].weight = parts["embed"].weight
    return Packed(parts).double()


@dataclass(frozen=True)
class Rows:
    """A microbatch: rows of three documents each, whose last tokens have no target."""

    tokens: Tensor
    targets: Tensor
    offsets: Offsets

    def documents(self) -> list[tuple[Tensor, Tensor, Offsets]]:
        found = []
        for tokens, targets, starts in zip(
            self.tokens, self.targets, self.offsets.starts.tolist(), strict=True
        ):
            for start, end in pairwise(starts):
                whole = Offsets(torch.tensor([[0, end - start]]), end - start)
                found.append((tokens[None, start:end], targets[None, start:end], whole))
        return found


def packed(rows: int, length: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, length), generator=generator)
    cuts = torch.stack(
        [
            torch.randperm(length - 1, generator=generator)[: N_DOCUMENTS - 1] + 1
            for _ in range(rows)
        ]
    )
    starts = torch.cat(
        [torch.zeros(rows, 1), cuts.sort(1).values, torch.full((rows, 1), length)], 1
    ).long()
    targets = tokens.roll(-1, 1).scatter(1, starts[:, 1:] - 1, -100)
    return Rows(tokens, targets, Offsets(starts, int(starts.diff(dim=1).max())))


SIZES = [
    [(1, 9), (2, 7), (1, 12), (1, 9), (2, 5), (1, 9), (3, 4), (1, 9)],
    [(2, 6), (1, 5), (1, 14), (2, 7), (1, 9), (2, 7), (1, 12), (1, 3)],
]
"""Rows and length of each microbatch of two data ranks, in two steps."""

STEPS = [
    [packed(*size, seed=10 * step + i) for i, size in enumerate(sizes)]
    for step, sizes in enumerate(SIZES)
]
STEPS[0][1].targets.fill_(-100)  # a microbatch that counts no token


def one_process(data: Sequence[Sequence[Rows]], tied: bool = True) -> Trained:
    """Train on the documents one by one, and divide each loss by the tokens of its step."""
    whole, loss_fn = model(tied), CrossEntropy()

    def step(i: int) -> Tensor:
        documents = [document for rows in data[i] for document in rows.documents()]
        n_tokens = sum(loss_fn.count(targets) for _, targets, _ in documents)
        loss = sum(
            loss_fn.total(whole(tokens, offsets), targets) / n_tokens
            for tokens, targets, offsets in documents
        )
        loss.backward()
        return loss.detach()

    return train([whole], len(data), step)


def of_ranks(dp: int) -> list[list[Rows]]:
    """Return the microbatches of ``dp`` data ranks for each step, rank by rank.

    The ranks take the microbatches by turns.
    """
    return [
        [rows for rank in range(dp) for rows in step[rank::dp][:N_MICROBATCHES]] for step in STEPS
    ]


def given(
    data: Sequence[Rows], is_first: bool, is_last: bool, masked: bool = False
) -> dict[str, Any]:
    """Return a rank's arguments: inputs and targets at the ends, objects for every stage."""
    keywords = [{"offsets": rows.offsets} for rows in data]
    for each, rows in zip(keywords, data, strict=True):
        if masked:
            each["mask"] = Mask(rows.offsets, rows.tokens.shape[1])
    lists: dict[str, Any] = {"kwarg_mbs": keywords}
    if is_first:
        lists["arg_mbs"] = [(rows.tokens,) for rows in data]
    if is_last:
        lists["target_mbs"] = [rows.targets for rows in data]
    return lists
