"""What a model does with an example, as calls of its units and what each of them reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Call", "Input", "Output", "Parameter", "Problem", "Recording", "Source"]


class Output(NamedTuple):
    """Tensor number ``leaf`` of what call number ``call`` returned."""

    call: int
    leaf: int


class Input(NamedTuple):
    """Tensor number ``leaf`` of what the model is called with."""

    leaf: int


class Parameter(NamedTuple):
    """A parameter or buffer, by its first name, that the model uses outside of its units."""

    name: str


@dataclass(frozen=True)
class Problem:
    """Something that a stage could not do as the whole model does.

    Attributes:
        kind: a word or two, such as ``hidden state``.
        line: ``file:line`` of the model's code.
        what: what happens there.
        remedy: what to do.
    """

    kind: str
    line: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.line}: {self.kind}: {self.what}; {self.remedy}"


Source = Output | Input | Parameter | Problem
"""What a value was computed from; a problem, which no stage could reproduce, counts if the value is read."""


@dataclass(frozen=True)
class Call:
    """One call of a unit.

    Attributes:
        unit: its name.
        reads: what its arguments were computed from.
        arguments: shape and dtype of each tensor among its arguments.
        leaves: what it returned, flattened; a tensor is a meta tensor.
        tree: how the leaves go together.
    """

    unit: str
    reads: frozenset[Source]
    arguments: tuple[Any, ...]
    leaves: tuple[Any, ...]
    tree: Any


@dataclass
class Recording:
    """A model's run on an example.

    Attributes:
        units: by name.
        calls: in order.
        result_reads: what the model's result was computed from, besides the last calls.
        changed: calls whose outputs the model then changes in place.
        draws: whether the model draws random numbers outside of its units.
        problems: what stops a cut.
        in_training: what would stop it if the model were in training mode, which it is not.
        example: the positional and keyword arguments.
    """

    units: Mapping[str, nn.Module]
    calls: list[Call] = field(default_factory=list)
    result_reads: frozenset[Source] = frozenset()
    changed: set[int] = field(default_factory=set)
    draws: bool = False
    problems: list[Problem] = field(default_factory=list)
    in_training: list[Problem] = field(default_factory=list)
    example: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def reads_from(self, first: int) -> frozenset[Source]:
        """Return what calls from ``first`` on, and the result, read."""
        return self.result_reads.union(*(call.reads for call in self.calls[first:]))

    def crossing(self, cut: int) -> tuple[Output, ...]:
        """Return what a cut before call number ``cut`` has to carry, in order."""
        return tuple(sorted(s for s in self.reads_from(cut) if isinstance(s, Output) and s.call < cut))

    def inputs_read(self, first: int) -> set[int]:
        """Return which tensors of the model's arguments calls from ``first`` on look into."""
        return {source.leaf for source in self.reads_from(first) if isinstance(source, Input)}

    def parameters_read(self, first: int, end: int) -> set[str]:
        """Return the names of parameters that the model itself uses for calls ``first`` to ``end``, end excluded."""
        reads = frozenset[Source]().union(*(call.reads for call in self.calls[first:end]))
        reads |= self.result_reads if end == len(self.calls) else frozenset()
        return {source.name for source in reads if isinstance(source, Parameter)}

    def names(self, first: int, end: int) -> list[str]:
        """Return the units that are called there, each once, in order."""
        return list(dict.fromkeys(call.unit for call in self.calls[first:end]))
