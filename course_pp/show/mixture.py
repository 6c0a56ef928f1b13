"""Pictures of a mixture of experts: who is chosen by which token, how full experts are, and what ranks exchange."""

from collections.abc import Mapping, Sequence

from course_pp.base.arguments import checked
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import MARGIN, SERIES, SMALL, WORDS, Sketch, width_of
from course_pp.show.wording import amount, counted, listed, listed_ranks

_WIDE = WIDTH - 2 * MARGIN
_HIGH, _BETWEEN = 0.36, 1.25  # of a box, and between tokens and experts
_ROW = 0.4


@checked
def routing(
    choices: Sequence[Sequence[int]],
    n_experts: int,
    words: Sequence[str] = (),
    title: str | None = None,
) -> ChartFigure:
    """Draw which experts each token goes to: a line from each token to every expert that it chose.

    Args:
        choices: the experts of each of up to 16 tokens, best first.
        n_experts: up to 12, also those that nobody chose.
        words: what to write for each token; its number unless given.
    """
    refuse_outside(1, 16, tokens_of_choices=len(choices))
    refuse_outside(1, 12, n_experts=n_experts)
    strange = [expert for row in choices for expert in row if not 0 <= expert < n_experts]
    if strange:
        raise ValueError(
            f"choices has expert {strange[0]}, but n_experts={n_experts}: number them from 0"
        )
    loads = [sum(expert in row for row in choices) for expert in range(n_experts)]
    finding = _finding_of_loads(
        loads, f"{counted(len(choices), 'token')}, {len(choices[0])} choices each"
    )
    note = "solid line: first choice; dashed: further ones"
    sketch = Sketch(_WIDE, 2 * _HIGH + _BETWEEN + 0.3, title or finding, note)
    names = [str(word) for word in words] or [str(token) for token in range(len(choices))]
    tokens, experts = _WIDE / len(choices), _WIDE / n_experts
    for token, row in enumerate(choices):
        middle = (token + 0.5) * tokens
        sketch.box(
            (token * tokens + 0.04, 0), (tokens - 0.08, _HIGH), names[token], fill=chart.IDLE_GREY
        )
        for rank, expert in enumerate(row):
            colour = SERIES[expert % len(SERIES)][0]
            # The lines of an expert end side by side.
            end = (expert + (1 + token) / (len(choices) + 1)) * experts
            sketch.line(
                (middle, _HIGH), (end, _HIGH + _BETWEEN), ink=colour, line=1.8, dashed=rank > 0
            )
    for expert, load in enumerate(loads):
        fill, ink = SERIES[expert % len(SERIES)] if load else ("white", "black")
        place = ((expert * experts + 0.05, _HIGH + _BETWEEN), (experts - 0.1, _HIGH))
        name = f"expert {expert}" if experts > 0.8 else str(expert)
        sketch.box(*place, name, fill=fill, ink=ink, dashed=not load)
        below = (_HIGH + _BETWEEN + _HIGH) + 0.16
        sketch.text(
            ((expert + 0.5) * experts, below),
            counted(load, "token"),
            SMALL,
            align="center",
            bold=load == 0,
        )
    told = [f"{name} to {listed(row)}" for name, row in zip(names, choices, strict=True)]
    return sketch.finish(
        f"Tokens above, experts below, a line for each choice. {finding}. {'; '.join(told)}."
    )


@checked
def loads(tokens: Mapping[str, Sequence[int]], title: str | None = None) -> ChartFigure:
    """Draw how many tokens each expert got, a row for each name, with the largest over the mean
    behind it.

    Args:
        tokens: by name, of up to 12 rows, the number of tokens of each of up to 16 experts.
    """
    refuse_outside(1, 12, rows_of_tokens=len(tokens))
    rows = [list(row) for row in tokens.values()]
    refuse_outside(1, 16, experts_of_tokens=max(map(len, rows)))
    ratios = [max(row) * len(row) / max(1, sum(row)) for row in rows]
    worst = max(range(len(rows)), key=lambda row: ratios[row])
    names = list(tokens)
    finding = f"{names[worst]}: the fullest expert has {ratios[worst]:.3g} times the mean"
    sketch = _grid(
        rows,
        [f"expert {i}" if len(rows[0]) <= 8 else str(i) for i in range(len(rows[0]))],
        names,
        ["largest / mean", *(f"{ratio:.2f}" for ratio in ratios)],
        title or finding,
        "darker: more tokens",
    )
    told = [
        f"{name}: {listed([f'{count:,}' for count in row])}, largest over mean {ratio:.2f}"
        for name, row, ratio in zip(names, rows, ratios, strict=True)
    ]
    return sketch.finish(f"Tokens of each expert, a row each. {finding}. {'; '.join(told)}.")


@checked
def exchange(sends: Sequence[Sequence[int]], title: str | None = None) -> ChartFigure:
    """Draw an all-to-all as a matrix: ``sends[i][j]`` is how many rows rank i sends to rank j, of
    up to 8 ranks.

    Sums of rows are what ranks send, sums of columns what they get and have to work on.
    """
    n = len(sends)
    refuse_outside(1, 8, ranks_of_sends=n)
    rows = [list(row) for row in sends]
    if any(len(row) != n for row in rows):
        raise ValueError(
            f"sends has rows of {listed([str(len(row)) for row in rows])} numbers: give {n}, one a"
            " rank"
        )
    gets = [sum(row[j] for row in rows) for j in range(n)]
    mean = sum(gets) / n
    fullest = [j for j in range(n) if gets[j] == max(gets)]
    finding = f"Every rank gets {gets[0]:,} rows"
    if len(fullest) < n:
        most = f"{max(gets):,} rows, {max(gets) / mean:.3g} times the mean"
        finding = (
            f"{listed_ranks(fullest).capitalize()} get{'s' * (len(fullest) == 1)} {most}: all"
            " others wait for it"
        )
    sketch = _grid(
        [*rows, gets],
        [f"to rank {j}" for j in range(n)],
        [*(f"rank {i} sends" for i in range(n)), "gets"],
        ["in all", *(f"{sum(row):,}" for row in rows), f"{sum(gets):,}"],
        title or finding,
        "rows of the diagonal stay where they are; darker: more rows",
        shaded=n,
    )
    told = [f"rank {i} sends {listed([f'{each:,}' for each in row])}" for i, row in enumerate(rows)]
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
    """Return numbers as boxes, shaded by size; ``behind`` is a last column with its head. The first rows are shaded."""
    shaded = len(rows) if shaded is None else shaded
    left = max(width_of(name, WORDS) for name in names) + 0.15
    right = max(width_of(text, WORDS) for text in behind) + 0.2
    wide = min(1.1, (_WIDE - left - right) / len(columns))
    most = max(1, max(max(row) for row in rows[:shaded]))
    sketch = Sketch(left + wide * len(columns) + right, 0.3 + _ROW * len(rows), title, note)
    for column, name in enumerate(columns):
        sketch.text(
            (left + (column + 0.5) * wide, 0.13), name, SMALL, align="center", ink=chart.TEXT_GREY
        )
    end = left + wide * len(columns) + right
    sketch.text((end, 0.13), behind[0], SMALL, align="right", ink=chart.TEXT_GREY)
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        top = 0.3 + number * _ROW
        sketch.text((left - 0.1, top + _ROW / 2), name, align="right")
        sketch.text((end, top + _ROW / 2), behind[number + 1], align="right", bold=True)
        for column, value in enumerate(row):
            share = value / most if number < shaded else 0.0
            fill, ink = (
                (_shade(share), "white" if share > 0.7 else "black")
                if number < shaded
                else ("white", "black")
            )
            place = ((left + column * wide + 0.02, top + 0.02), (wide - 0.04, _ROW - 0.04))
            sketch.box(
                *place,
                f"{value:,}",
                fill=fill,
                ink=ink,
                edge="none" if number < shaded else chart.TEXT_GREY,
            )
    return sketch


def _shade(share: float) -> str:
    """Return a colour between white and blue."""
    blue = [int(chart.BLUE[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + (part - 255) * share):02X}" for part in blue)


def _finding_of_loads(loads: Sequence[int], of: str) -> str:
    mean, most = sum(loads) / len(loads), max(loads)
    idle = [str(expert) for expert, load in enumerate(loads) if not load]
    nobody = (
        f", and nobody chose {'expert' if len(idle) == 1 else 'experts'} {listed(idle)}"
        if idle
        else ""
    )
    if most == mean:
        return f"{of}: every expert gets {counted(most, 'token')}"
    return f"{of}: expert {loads.index(most)} gets {most}, the mean is {amount(mean)}{nobody}"
