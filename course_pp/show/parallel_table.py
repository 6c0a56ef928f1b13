"""Four ways to spread training over ranks: what each cuts, what it sends, and when it is the better choice."""

from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from course_pp.base.arguments import checked, refuse_below
from course_pp.show.wording import format_bytes

# bytes a parameter: weights, gradients and AdamW's two moments in float32, or their mixed-precision
# kin
_STATE = 16


class Parallelism(NamedTuple):
    """One row of the table: what is cut over the ranks, what one sends and keeps, and when to choose it."""

    name: str
    cuts: str
    formula: str  # of what a rank sends in a step
    sent: float  # the same in bytes
    state: float  # bytes of weights, gradients and optimizer that a rank keeps
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

    Shows itself as a table in a notebook; prints as Markdown.
    """

    rows: tuple[Parallelism, ...]
    break_even_tokens: float  # in a step; below it a pipeline sends less than data parallelism
    note: str

    def __getitem__(self, name: str) -> Parallelism:
        return {row.name: row for row in self.rows}[name]

    @property
    def finding(self) -> str:
        data, pipeline = self["data"].sent, self["pipeline"].sent
        ratio = max(data, pipeline) / min(data, pipeline)
        more, less = (
            ("Data parallelism", "a pipeline")
            if pipeline < data
            else ("A pipeline", "data parallelism")
        )
        meet = f"they meet at {self.break_even_tokens:,.0f} tokens a step"
        return f"{more} sends {ratio:.2g} times as much as {less}; {meet}"

    def _cells(self) -> list[tuple[str, ...]]:
        def on_one_line(n_bytes: float) -> str:
            return format_bytes(n_bytes).replace(" ", "\N{NO-BREAK SPACE}")

        return [
            (
                row.name,
                row.cuts,
                row.formula,
                on_one_line(row.sent),
                on_one_line(row.state),
                row.better,
            )
            for row in self.rows
        ]

    def __str__(self) -> str:
        lines = [_HEADINGS, ("---",) * len(_HEADINGS), *self._cells()]
        return (
            "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
            + f"\n\n{self.finding}. {self.note}"
        )

    _repr_markdown_ = __str__

    def _repr_html_(self) -> str:
        style = 'style="text-align:left;vertical-align:top;padding:3px 10px 3px 0"'
        head = "".join(f'<th scope="col" {style}>{escape(cell)}</th>' for cell in _HEADINGS)
        body = "".join(
            f'<tr><th scope="row" {style}>{escape(first)}</th>'
            + "".join(f"<td {style}>{escape(cell)}</td>" for cell in rest)
            + "</tr>"
            for first, *rest in self._cells()
        )
        caption = escape(self.finding) + "."
        table = f'<table><caption style="text-align:left;font-weight:bold">{caption}</caption>'
        return f"{table}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(self.note)}</p>"


@checked
def parallelisms(config: Any, n_ranks: int, tokens: int, itemsize: int = 2) -> ParallelismTable:
    """Compare data, FSDP, tensor and pipeline parallelism for one model: what each cuts, sends and
    keeps.

    With N parameters, L layers of width d, and A = tokens · d numbers in a step's activations, n ranks send, each::

        data       2 (n - 1)/n N      an all-reduce of the gradients: Patarasuk and Yuan 2009,
                                      doi:10.1016/j.jpdc.2008.09.002
        FSDP       3 (n - 1)/n N      two gathers and a reduction: Rajbhandari et al. 2020, arXiv:1910.02054, section 7
        tensor     8 (n - 1)/n L A    four all-reduces a layer: Shoeybi et al. 2019, arXiv:1909.08053, section 3
        pipeline   2 A                an activation down, a gradient up: Narayanan et al. 2021, arXiv:2104.04473,
                                      section 3.2

    The first two do not depend on the tokens, the last two not on N (but through L and d).
    Embedding and head of the tensor-parallel model are left out, and a pipeline's rank is one in
    the middle.

    Args:
        config: :class:`course_pp.model.ModelConfig`, or anything with its ``dim``, ``n_layers`` and
            ``n_parameters``.
        n_ranks: in the one dimension that each way uses.
        tokens: of the whole batch of a step.
        itemsize: bytes of a weight, a gradient, an activation.
    """
    refuse_below(2, "parallelisms", n_ranks=n_ranks)
    refuse_below(1, "parallelisms", tokens=tokens, itemsize=itemsize)
    ring = (n_ranks - 1) / n_ranks
    weights, activation = itemsize * config.n_parameters, itemsize * tokens * config.dim
    state = _STATE * config.n_parameters
    sent = {
        "data": 2 * ring * weights,
        "FSDP": 3 * ring * weights,
        "tensor": 8 * ring * config.n_layers * activation,
        "pipeline": 2 * activation,
    }
    kept = {name: state if name == "data" else state / n_ranks for name in sent}
    rows = tuple(
        Parallelism(name, cuts, formula, sent[name], kept[name], better)
        for name, (cuts, formula, better) in _WORDS.items()
    )
    note = (
        f"n = {n_ranks} ranks; N = {config.n_parameters:,} parameters; L = {config.n_layers}"
        f" layers; A = {tokens:,} tokens × {config.dim:,} wide; {itemsize} bytes a number. A rank"
        " keeps 16 bytes for each parameter it stores."
    )
    return ParallelismTable(rows, ring * config.n_parameters / config.dim, note)
