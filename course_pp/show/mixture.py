"""Pictures of a mixture of experts: choices of tokens, loads of experts, and their exchange."""

from collections.abc import Mapping, Sequence
from typing import Any

from course_pp.base.arguments import checked
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import MARGIN, SERIES, SMALL, WORDS, Sketch, width_of
from course_pp.show.wording import amount, counted, listed, listed_ranks

_WIDE = WIDTH - 2 * MARGIN
# Inches: a box, the space between tokens and experts, a row of a grid.
_HIGH = 0.36
_BETWEEN = 1.25
_ROW = 0.4


@checked
def routing(
    choices: Sequence[Sequence[int]],
    n_experts: int,
    words: Sequence[str] = (),
    title: str | None = None,
) -> ChartFigure:
    """Draw a line from each token to every expert that it chose.

    Args:
        choices: the experts of each of up to 16 tokens, best first.
        n_experts: up to 12 experts, also those that nobody chose.
        words: a word for each token; its number unless given.
    """
    refuse_outside(1, 16, tokens_of_choices=len(choices))
    refuse_outside(1, 12, n_experts=n_experts)
    loads = [0] * n_experts
    for row in choices:
        for expert in row:
            if not 0 <= expert < n_experts:
                given = f"choices has expert {expert}, but n_experts={n_experts}"
                raise ValueError(f"{given}: number them from 0")
        for expert in set(row):
            loads[expert] += 1
    of = f"{counted(len(choices), 'token')}, {len(choices[0])} choices each"
    finding = _finding_of_loads(loads, of)
    note = "solid line: first choice; dashed: further ones"
    sketch = Sketch(_WIDE, 2 * _HIGH + _BETWEEN + 0.3, title or finding, note=note)
    names = [str(word) for word in words or range(len(choices))]

    token_width = _WIDE / len(choices)
    expert_width = _WIDE / n_experts
    for token, row in enumerate(choices):
        middle = (token + 0.5) * token_width
        box = ((token * token_width + 0.04, 0.0), (token_width - 0.08, _HIGH))
        sketch.box(*box, names[token], fill=chart.IDLE_GREY)
        for rank, expert in enumerate(row):
            colour, _ = SERIES[expert % len(SERIES)]
            # The lines of an expert end side by side.
            end = (expert + (1 + token) / (len(choices) + 1)) * expert_width
            line = ((middle, _HIGH), (end, _HIGH + _BETWEEN))
            sketch.line(*line, ink=colour, line=1.8, dashed=rank > 0)
    for expert, load in enumerate(loads):
        fill, ink = SERIES[expert % len(SERIES)] if load else ("white", "black")
        box = ((expert * expert_width + 0.05, _HIGH + _BETWEEN), (expert_width - 0.1, _HIGH))
        name = f"expert {expert}" if expert_width > 0.8 else str(expert)
        sketch.box(*box, name, fill=fill, ink=ink, dashed=not load)
        below = ((expert + 0.5) * expert_width, (_HIGH + _BETWEEN + _HIGH) + 0.16)
        sketch.text(below, counted(load, "token"), SMALL, align="center", bold=load == 0)
    told = [f"{name} to {listed(row)}" for name, row in zip(names, choices, strict=True)]
    return sketch.finish(
        f"Tokens above, experts below, a line for each choice. {finding}. {'; '.join(told)}."
    )


@checked
def loads(tokens: Mapping[str, Sequence[int]], title: str | None = None) -> ChartFigure:
    """Draw the tokens of each expert, a row for each name, with the largest over the mean.

    Args:
        tokens: ``{name: tokens of each expert}``, up to 12 names and up to 16 experts.
    """
    refuse_outside(1, 12, rows_of_tokens=len(tokens))
    n_experts = max(map(len, tokens.values()))
    refuse_outside(1, 16, experts_of_tokens=n_experts)
    ratios = {}
    told = []
    for name, row in tokens.items():
        ratio = max(row) * len(row) / max(1, sum(row))
        ratios[name] = ratio
        counts = listed(f"{count:,}" for count in row)
        told.append(f"{name}: {counts}, largest over mean {ratio:.2f}")
    worst = max(ratios, key=ratios.__getitem__)
    finding = f"{worst}: the fullest expert has {ratios[worst]:.3g} times the mean"

    # All rows are as long as the first.
    n_columns = len(next(iter(tokens.values())))
    head = "expert " if n_columns <= 8 else ""
    sketch = _grid(
        list(tokens.values()),
        [f"{head}{i}" for i in range(n_columns)],
        names=list(tokens),
        behind=["largest / mean", *(f"{ratio:.2f}" for ratio in ratios.values())],
        title=title or finding,
        note="darker: more tokens",
    )
    return sketch.finish(f"Tokens of each expert, a row each. {finding}. {'; '.join(told)}.")


@checked
def exchange(sends: Sequence[Sequence[int]], title: str | None = None) -> ChartFigure:
    """Draw an all-to-all as a matrix: ``sends[i][j]`` rows go from rank i to rank j.

    Up to 8 ranks have room. Sums of rows are what ranks send, sums of columns what they get and
    have to work on.
    """
    n = len(sends)
    refuse_outside(1, 8, ranks_of_sends=n)
    rows = [list(row) for row in sends]
    lengths = list(map(len, rows))
    if set(lengths) != {n}:
        given = f"sends has rows of {listed(lengths)} numbers"
        raise ValueError(f"{given}: give {n}, one a rank")
    gets = list(map(sum, zip(*rows, strict=True)))
    most = max(gets)
    fullest = [rank for rank in range(n) if gets[rank] == most]
    finding = f"Every rank gets {most:,} rows"
    if len(fullest) < n:
        get = "gets" if len(fullest) == 1 else "get"
        share = most / (sum(gets) / n)
        subject = listed_ranks(fullest).capitalize()
        finding = f"{subject} {get} {most:,} rows, {share:.3g} times the mean"
        finding += ": all others wait for it"
    in_all = [f"{sum(row):,}" for row in [*rows, gets]]
    sketch = _grid(
        [*rows, gets],
        [f"to rank {rank}" for rank in range(n)],
        names=[*(f"rank {rank} sends" for rank in range(n)), "gets"],
        behind=["in all", *in_all],
        title=title or finding,
        note="rows of the diagonal stay where they are; darker: more rows",
        shaded=n,
    )
    told = []
    for rank, row in enumerate(rows):
        numbers = listed(f"{number:,}" for number in row)
        told.append(f"rank {rank} sends {numbers}")
    to = f"to ranks 0 to {n - 1}" if n > 1 else "to itself"
    return sketch.finish(f"What each rank sends {to}. {finding}. {'; '.join(told)}.")


def _grid(
    rows: Sequence[Sequence[int]],
    columns: Sequence[str],
    names: Sequence[str],
    behind: Sequence[str],
    title: str,
    note: str,
    shaded: int | None = None,
) -> Sketch:
    """Return numbers as boxes, shaded by size.

    Args:
        rows: the numbers.
        columns: the heads of the columns.
        names: the names of the rows.
        behind: a last column, with its head first.
        shaded: the number of rows to shade, from the first; all unless given.
    """
    shaded = len(rows) if shaded is None else shaded
    left = max(width_of(name, WORDS) for name in names) + 0.15
    right = max(width_of(text, WORDS) for text in behind) + 0.2
    wide = min(1.1, (_WIDE - left - right) / len(columns))
    end = left + wide * len(columns) + right
    most = max([1, *map(max, rows[:shaded])])
    head, *behind_rows = behind
    sketch = Sketch(end, 0.3 + _ROW * len(rows), title, note=note)
    for column, name in enumerate(columns):
        middle = left + (column + 0.5) * wide
        sketch.text((middle, 0.13), name, SMALL, align="center", ink=chart.TEXT_GREY)
    sketch.text((end, 0.13), head, SMALL, align="right", ink=chart.TEXT_GREY)
    for number, (name, row, last) in enumerate(zip(names, rows, behind_rows, strict=True)):
        top = 0.3 + number * _ROW
        sketch.text((left - 0.1, top + _ROW / 2), name, align="right")
        sketch.text((end, top + _ROW / 2), last, align="right", bold=True)
        for column, value in enumerate(row):
            look: dict[str, Any] = {"fill": "white", "ink": "black", "edge": chart.TEXT_GREY}
            if number < shaded:
                share = value / most
                # Black letters cannot be read on dark blue.
                ink = "white" if share > 0.7 else "black"
                look = {"fill": _shade(share), "ink": ink, "edge": "none"}
            place = ((left + column * wide + 0.02, top + 0.02), (wide - 0.04, _ROW - 0.04))
            sketch.box(*place, f"{value:,}", **look)
    return sketch


def _shade(share: float) -> str:
    """Return a colour between white and blue."""
    blue = [int(chart.BLUE[i : i + 2], 16) for i in (1, 3, 5)]
    parts = [round(255 + (part - 255) * share) for part in blue]
    return "#{:02X}{:02X}{:02X}".format(*parts)


def _finding_of_loads(loads: Sequence[int], of: str) -> str:
    mean = sum(loads) / len(loads)
    most = max(loads)
    if most == mean:
        return f"{of}: every expert gets {counted(most, 'token')}"
    finding = f"{of}: expert {loads.index(most)} gets {most}, the mean is {amount(mean)}"
    idle = [expert for expert, load in enumerate(loads) if not load]
    if idle:
        experts = "expert" if len(idle) == 1 else "experts"
        finding += f", and nobody chose {experts} {listed(idle)}"
    return finding
