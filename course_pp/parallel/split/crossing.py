"""What crosses each cut of a model, for people to look at."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from course_pp.arguments import checked, refuse_unless
from course_pp.parallel.split.calls import Output
from course_pp.parallel.split.stage import SplitStage

__all__ = ["Crossing", "CrossingTensor", "crossing"]


@dataclass(frozen=True)
class CrossingTensor:
    """A tensor that crosses a cut.

    Attributes:
        made: the number of the call that returns it.
        read: the numbers of the calls that read it, in order; the number of calls stands for the model's result.
        n_bytes: for the example.
    """

    made: int
    read: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class Crossing:
    """The calls of a model's modules in order, where it is cut, and what crosses.

    Attributes:
        calls: the name of the module that each calls.
        begins: the number of the call that each stage begins with, from the second on.
        values: each tensor that crosses a cut, once.
    """

    calls: tuple[str, ...]
    begins: tuple[int, ...]
    values: tuple[CrossingTensor, ...]

    def over(self, cut: int) -> tuple[CrossingTensor, ...]:
        """Return what the cut before stage ``cut + 1`` carries."""
        begin = self.begins[cut]
        return tuple(value for value in self.values if value.made < begin <= value.read[-1])


@checked
def crossing(stages: Sequence[nn.Module]) -> Crossing:
    """Return what crosses the cuts between the stages of :func:`auto_split`.

    Raises:
        ValueError: for stages that :func:`auto_split` has not made.
    """
    others = [stage for stage in stages if not isinstance(stage, SplitStage)]
    refuse_unless(bool(stages) and not others, "crossing", "stages", stages, "give the list that auto_split returns")
    boards = [stage._board for stage in stages if isinstance(stage, SplitStage)]
    calls = boards[0].recording.calls
    found: set[Output] = set().union(*(board.given for board in boards))
    values = []
    for output in sorted(found):
        read = [number for number, call in enumerate(calls) if output in call.reads]
        read += [len(calls)] if output in boards[0].recording.result_reads else []
        values.append(CrossingTensor(output.call, tuple(read), calls[output.call].leaves[output.leaf].nbytes))
    return Crossing(tuple(call.unit for call in calls), tuple(board.first for board in boards[1:]), tuple(values))
