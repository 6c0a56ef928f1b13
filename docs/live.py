"""The board and the explorer on pages of the site: they need a script, and no kernel."""

import ast
import json
from base64 import b64encode
from functools import cache
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import count
from pathlib import Path

from course_pp.schedule import build, names, simulate
from course_pp.show import timeline
from course_pp.show.board_levels import LEVELS, references
from course_pp.show.board_widget import Board, board
from course_pp.show.chart import ChartFigure
from course_pp.show.timelines import LOOKS

RANKS = (2, 3, 4, 6, 8)
MICROBATCHES = (2, 4, 6, 8, 12, 16)
_numbers = count(1)


def script() -> str:
    """Return rules, board, player and explorer as one script.

    A browser loads no modules for a page that is opened from a folder, so exports go.
    """
    show = files("course_pp.show")
    modules = _read(show / "board_rules.js") + "\n" + _read(show / "board.js")
    lines = []
    for line in modules.splitlines():
        if not line.startswith("export default"):
            lines.append(line.removeprefix("export "))
    plain = "\n".join(lines)
    own = _read(Path(__file__).with_name("live.js"))
    player = _read(show / "player.js")
    player = player[player.index("(function") :].strip()
    style = _read(show / "board.css") + _read(show / "player.css")
    levels = _told([_data(board(level.number)) for level in LEVELS])
    before = f"{plain}\nconst PLAYER = {player};\nconst LEVELS = {levels};"
    return f"<style>{style}</style><script>(() => {{\n{before}\n{own}\n}})();</script>"


def _read(path: Traversable) -> str:
    return path.read_text(encoding="utf-8")


def board_html(of: Board, *, addressed: bool = False) -> str:
    """Return one board, with its still picture for readers without scripts.

    If ``addressed``, the page's address follows the moves on the board.
    """
    data = {"level": 0, **_data(of)}
    if of.level:
        data = {"level": of.level.number, "addressed": addressed}
    return _live("board", data, of.figure)


def _data(of: Board) -> dict:
    name = of.words["title"] if of.level else json.dumps(of.game, sort_keys=True)
    return {"name": name, "game": of.game, "words": {**of.words, "said": ""}}


def explorer_html() -> str:
    """Return the explorer for the sizes above."""
    looks = {kind: {"colour": look.colour, "hatch": look.hatch[:1]} for kind, look in LOOKS.items()}
    data = {"ranks": RANKS, "microbatches": MICROBATCHES, "orders": orders(), "looks": looks}
    return _live("explorer", data, timeline(simulate(build("1f1b", 4, 8))))


@cache
def orders() -> dict[str, dict[str, object]]:
    """Return placement and order of each schedule and size, or the reason why there is none.

    Schedules with replicated stages, overlapped pairs or updates are left out, because the
    browser's rules have none of them.
    """
    found: dict[str, dict[str, object]] = {}
    for name in names():
        for p in RANKS:
            for m in MICROBATCHES:
                try:
                    schedule = build(name, p, m)
                except ValueError as refused:
                    found.setdefault(name, {})[f"{p} {m}"] = str(refused)
                    continue
                placement = tuple(ranks[0] for ranks in schedule.placement)
                if name not in references(placement, m, split=True):
                    break
                rows = [" ".join(map(str, row)) for row in schedule.actions]
                found.setdefault(name, {})[f"{p} {m}"] = {"placement": placement, "order": rows}
    complete = {}
    for name, sizes in found.items():
        has_an_order = any(isinstance(value, dict) for value in sizes.values())
        if has_an_order and len(sizes) == len(RANKS) * len(MICROBATCHES):
            complete[name] = sizes
    return complete


def _live(kind: str, data: dict, figure: ChartFigure) -> str:
    number = f"cpp-{kind}-{next(_numbers)}"
    picture = b64encode(figure.png()).decode("ascii")
    still = (
        f'<img src="data:image/png;base64,{picture}" alt="{escape(figure.alt_text)}"'
        ' style="max-width:100%">'
    )
    return (
        f'<div id="{number}" class="cpp-live">{still}</div><script>coursePp.{kind}("{number}",'
        f" {_told(data)});</script>"
    )


def _told(data: object) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")


def with_boards(notebook: dict) -> dict:
    """Put a live board in place of each still one in a notebook's outputs. Changes ``notebook``."""
    first = True
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            if "application/vnd.jupyter.widget-view+json" in shown and (
                found := board_of("".join(cell["source"]))
            ):
                shown["text/html"] = (script() if first else "") + board_html(found)
                first = False
    return notebook


def board_of(source: str) -> Board | None:
    """Return the board of ``show.board(…)`` with plain values in a cell; None for other cells."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "show.board":
            try:
                values = [ast.literal_eval(each) for each in node.args]
                words = [each for each in node.keywords if each.arg]
                named = {each.arg: ast.literal_eval(each.value) for each in words}
            except ValueError:
                return None
            return board(*values, **named)
    return None


def board_page() -> str:
    """Return the page with all levels on one board."""
    parts = [
        "# The board",
        "",
        (
            "Draw a schedule by hand: choose a rank, place its next action, and be told why a move"
            " is not legal. Each level teaches one schedule; par is its makespan. The page needs a"
            " script, and no kernel; what you place stays in this browser. The address follows the"
            " board: send it, and it opens at your position. To run what you drew on real ranks,"
            " open [notebook 11](../notebooks/11_your_own_schedule.ipynb) with `make lab`."
        ),
        "",
        *_raw(script() + board_html(board(1), addressed=True)),
    ]
    return "\n".join(parts)


def explorer_page() -> str:
    """Return the page of the explorer."""
    left_out = ", ".join(f"`{name}`" for name in names() if name not in orders())
    parts = [
        "# The explorer",
        "",
        (
            "Choose a schedule, sizes and times, and see the timeline, the bubble, what each rank"
            f" holds, and why it waits. The browser simulates; no kernel is needed. {left_out} need"
            " more than its rules know: they move on the page of [schedules](schedules.md)."
            " `show.explore()` in a notebook has them all, every size, and the closed forms beside"
            " what is simulated."
        ),
        "",
        *_raw(script() + explorer_html()),
    ]
    return "\n".join(parts)


def _raw(text: str) -> tuple[str, ...]:
    return ("````{raw} html", text, "````", "")
