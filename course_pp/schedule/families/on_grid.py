"""Chimera and Hanayo: drawn on a grid in which a forward and a backward take one step each.

A microbatch goes down the stages and back, a stage a step; the next one enters two steps later. Where two stages of a
rank lie at mirrored places of the pipeline, what one leaves free the other uses: for half as many microbatches as there
are stages, no rank is ever wanted twice in one step. Then the grid repeats. A rank does its actions in the order of
their steps, however long they really take.
"""

from collections.abc import Sequence

from course_pp.schedule.action import Action
from course_pp.schedule.schedule import Schedule, both_ways, in_waves


def chimera(n_ranks: int, n_microbatches: int) -> Schedule:
    """Two pipelines in opposite directions: even microbatches enter at the first rank, odd ones at the last.

    Li and Hoefler 2021, "Chimera: efficiently training large-scale neural networks with bidirectional pipelines",
    section 3.1; more than ``n_ranks`` microbatches by direct concatenation, as in section 3.5.

    Raises:
        ValueError: for an odd number of ranks.
    """
    return _on_grid("chimera", both_ways("chimera", n_ranks), [i // 2 for i in range(n_microbatches)], n_ranks // 2)


def hanayo(n_ranks: int, n_microbatches: int, n_chunks: int) -> Schedule:
    """Chimera folded at the last rank, so that no stage is held twice; in ``n_chunks / 2`` waves down and up.

    Liu et al. 2023, "Hanayo: harnessing wave-like pipeline parallelism for enhanced large model training efficiency",
    section 3. The paper draws as many microbatches as ranks; more are concatenated as in Chimera.

    Raises:
        ValueError: for an odd number of chunks.
    """
    return _on_grid("hanayo", in_waves(n_ranks, n_chunks), range(n_microbatches), n_ranks)


def _on_grid(name: str, placement: Sequence[tuple[int, ...]], turns: Sequence[int], in_unit: int) -> Schedule:
    """``turns``: each microbatch's place among those that enter at the same end; ``in_unit`` fill the grid once."""
    n_stages = len(placement)
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(1 + max(map(max, placement)))]
    for microbatch, turn in enumerate(turns):
        unit, place = divmod(turn, in_unit)
        entered = 2 * n_stages * unit + 2 * place
        for stage, ranks in enumerate(placement):
            row = rows[ranks[microbatch % len(ranks)]]
            row.append((entered + stage, Action(stage, "F", microbatch)))
            row.append((entered + 2 * n_stages - 1 - stage, Action(stage, "B", microbatch)))
    ordered = (sorted(row, key=lambda step: step[0]) for row in rows)
    return Schedule(name, tuple(placement), tuple(tuple(action for _, action in row) for row in ordered))
