"""Stage graphs that are not chains, with random edges, for any schedule."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.schedule import Schedule, build, names
from tests.runtime.random_schedules import random_schedule

WIDTH = 4
ASYNCHRONOUS = ("pipedream",)


@dataclass(frozen=True)
class Graph:
    """The values that each stage reads and writes; ``kinds`` has each value's containers."""

    reads: tuple[tuple[str, ...], ...]
    writes: tuple[tuple[str, ...], ...]
    kinds: dict[str, str]


def random_graph(seed: int, n_stages: int) -> Graph:
    """Return up to four values, each with a writer and any later stages as readers."""
    rng = random.Random(seed)
    reads: list[list[str]] = [[] for _ in range(n_stages)]
    writes: list[list[str]] = [[] for _ in range(n_stages)]
    kinds = {}
    for number in range(rng.randint(1, 4)):
        name = f"value{number}"
        writer = rng.randrange(n_stages)
        kinds[name] = rng.choice(("tensor", "pair", "mask", "input"))
        writes[writer].append(name)
        for reader in range(writer + 1, n_stages):
            if rng.random() < 0.5:
                reads[reader].append(name)
    return Graph(tuple(map(tuple, reads)), tuple(map(tuple, writes)), kinds)


class Linked(nn.Module):
    """A layer that reads and writes values beyond its neighbours."""

    def __init__(self, graph: Graph, stage: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.reads = graph.reads[stage]
        self.writes = graph.writes[stage]
        self._kinds = graph.kinds

    def forward(self, x: Tensor, **read: Any) -> Any:
        hidden = torch.tanh(self.layer(x))
        for scale, name in enumerate(self.reads, 1):
            hidden = hidden + torch.sin(scale * self._as_tensor(name, read[name]))
        values = {name: self._made(name, x, hidden) for name in self.writes}
        return (hidden, values) if self.writes else hidden

    def _made(self, name: str, x: Tensor, hidden: Tensor) -> Any:
        kind = self._kinds[name]
        if kind == "pair":
            return {"both": (hidden * 2, hidden.detach() > 0), "scale": 0.5}
        return {"tensor": hidden * 3, "mask": hidden.detach() > 0, "input": x}[kind]

    def _as_tensor(self, name: str, value: Any) -> Tensor:
        if self._kinds[name] == "pair":
            return value["both"][0] * value["both"][1] * value["scale"]
        return value.double()


def linked_stages(graph: Graph) -> list[Linked]:
    """One for each stage, in float64, with the same weights on every rank."""
    torch.manual_seed(0)
    return [Linked(graph, stage).double() for stage in range(len(graph.reads))]


def through(stages: list[Linked], x: Tensor) -> Tensor:
    """The whole model in one process."""
    values: dict[str, Any] = {}
    for stage in stages:
        out = stage(x, **{name: values[name] for name in stage.reads})
        x, made = out if stage.writes else (out, {})
        values |= made
    return x


def schedule_for(seed: int) -> Schedule:
    """A random legal schedule for even seeds, a synchronous one of the catalogue for odd ones."""
    if seed % 2 == 0:
        return random_schedule(seed)
    rng = random.Random(seed)
    usable = [name for name in names() if name not in ASYNCHRONOUS]
    while True:
        name = rng.choice(usable)
        n_ranks = rng.randint(2, 4)
        n_microbatches = rng.randint(2, 8)
        try:
            return build(name, n_ranks, n_microbatches)
        except ValueError:  # sizes that it does not take
            continue
