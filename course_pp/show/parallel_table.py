"""Four ways to spread training over ranks: what each cuts and sends, and when it is better."""

from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from course_pp.base.arguments import checked, refuse_below
from course_pp.show.wording import format_bytes

# Bytes a parameter: weights, gradients and AdamW's two moments in float32. Mixed precision has the
# same sum.
_STATE = 16


class Parallelism(NamedTuple):
    """One row of the table.

    Attributes:
        cuts: the parts that are cut over the ranks.
        formula: the numbers that a rank sends in a step, as a formula.
        sent: the bytes that a rank sends in a step.
        state: bytes of weights, gradients and optimizer that a rank keeps.
        better: the case in which to choose it.
    """

    name: str
    cuts: str
    formula: str
    sent: float
    state: float
    better: str


_WORDS = {
    "data": ("the batch", "2 (n − 1)/n · N: its gradients, summed", "the model fits on one rank"),
    "FSDP": (
        "the batch, and what is stored of weights, gradients and optimizer",
        "3 (n − 1)/n · N: two gathers of the weights, one reduction",
        "the model does not fit, and a rank has tokens enough to hide the gathers",
    ),
    "tensor": (
        "every matrix of a layer",
        "8 (n − 1)/n · L · A: four sums a layer, waited for",
        "the ranks share a node with fast links",
    ),
    "pipeline": (
        "the model, between layers",
        "2 · A: one activation down, one gradient up",
        "links are slow, and there are many microbatches to fill it",
    ),
}
_HEADINGS = (
    "",
    "cuts",
    "a rank sends in a step",
    "bytes",
    "a rank keeps",
    "the better choice when",
)


@dataclass(frozen=True)
class ParallelismTable:
    """Data, FSDP, tensor and pipeline parallelism beside each other, for one model on n ranks.

    It shows itself as a table in a notebook, and prints as Markdown.

    Attributes:
        break_even_tokens: tokens of a step below which a pipeline sends less than data
            parallelism.
    """

    rows: tuple[Parallelism, ...]
    break_even_tokens: float
    note: str

    def __getitem__(self, name: str) -> Parallelism:
        return {row.name: row for row in self.rows}[name]

    @property
    def finding(self) -> str:
        data = self["data"].sent
        pipeline = self["pipeline"].sent
        more, less = "A pipeline", "data parallelism"
        if pipeline < data:
            more, less = "Data parallelism", "a pipeline"
        ratio = max(data, pipeline) / min(data, pipeline)
        meet = f"they meet at {self.break_even_tokens:,.0f} tokens a step"
        return f"{more} sends {ratio:.2g} times as much as {less}; {meet}"

    def _cells(self) -> list[tuple[str, ...]]:
        def on_one_line(n_bytes: float) -> str:
            return format_bytes(n_bytes).replace(" ", "\N{NO-BREAK SPACE}")

        cells: list[tuple[str, ...]] = []
        for row in self.rows:
            sizes = (on_one_line(row.sent), on_one_line(row.state))
            cells.append((row.name, row.cuts, row.formula, *sizes, row.better))
        return cells

    def __str__(self) -> str:
        rows = [_HEADINGS, ("---",) * len(_HEADINGS), *self._cells()]
        lines = [f"| {' | '.join(cells)} |" for cells in rows]
        return "\n".join(lines) + f"\n\n{self.finding}. {self.note}"

    _repr_markdown_ = __str__

    def _repr_html_(self) -> str:
        style = 'style="text-align:left;vertical-align:top;padding:3px 10px 3px 0"'
        head = "".join(f'<th scope="col" {style}>{escape(cell)}</th>' for cell in _HEADINGS)
        body = ""
        for first, *rest in self._cells():
            cells = "".join(f"<td {style}>{escape(cell)}</td>" for cell in rest)
            body += f'<tr><th scope="row" {style}>{escape(first)}</th>{cells}</tr>'
        caption = f'<caption style="text-align:left;font-weight:bold">{escape(self.finding)}.'
        table = f"<table>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f"{table}</table><p>{escape(self.note)}</p>"


@checked
def parallelisms(config: Any, n_ranks: int, tokens: int, itemsize: int = 2) -> ParallelismTable:
    """Compare data, FSDP, tensor and pipeline parallelism for one model.

    With N parameters, L layers of width d, and A = tokens · d numbers in a step's activations, each
    of n ranks sends::

        data       2 (n - 1)/n N      an all-reduce of the gradients: Patarasuk and Yuan 2009,
                                      doi:10.1016/j.jpdc.2008.09.002
        FSDP       3 (n - 1)/n N      two gathers and a reduction: Rajbhandari et al. 2020,
                                      arXiv:1910.02054, section 7
        tensor     8 (n - 1)/n L A    four all-reduces a layer: Shoeybi et al. 2019,
                                      arXiv:1909.08053, section 3
        pipeline   2 A                an activation down, a gradient up: Narayanan et al. 2021,
                                      arXiv:2104.04473, section 3.2

    The first two do not depend on the tokens, the last two not on N (but through L and d).
    Embedding and head of the tensor-parallel model are left out, and a pipeline's rank is one in
    the middle.

    Args:
        config: :class:`course_pp.model.ModelConfig`, or anything with its ``dim``, ``n_layers`` and
            ``n_parameters``.
        n_ranks: ranks in the one dimension that each way uses.
        tokens: tokens in the whole batch of a step.
        itemsize: bytes of a weight, a gradient, an activation.
    """
    refuse_below(2, "parallelisms", n_ranks=n_ranks)
    refuse_below(1, "parallelisms", tokens=tokens, itemsize=itemsize)
    ring = (n_ranks - 1) / n_ranks
    weights = itemsize * config.n_parameters
    activation = itemsize * tokens * config.dim
    sent = {
        "data": 2 * ring * weights,
        "FSDP": 3 * ring * weights,
        "tensor": 8 * ring * config.n_layers * activation,
        "pipeline": 2 * activation,
    }
    state = _STATE * config.n_parameters
    rows = []
    for name, (cuts, formula, better) in _WORDS.items():
        kept = state if name == "data" else state / n_ranks
        rows.append(Parallelism(name, cuts, formula, sent=sent[name], state=kept, better=better))
    note = (
        f"n = {n_ranks} ranks; N = {config.n_parameters:,} parameters; L = {config.n_layers}"
        f" layers; A = {tokens:,} tokens × {config.dim:,} wide; {itemsize} bytes a number. A rank"
        " keeps 16 bytes for each parameter it stores."
    )
    return ParallelismTable(tuple(rows), ring * config.n_parameters / config.dim, note=note)
