"""Parts of notebooks for slides and handouts: prose and figures as HTML, results, and code."""

import re
from collections.abc import Sequence
from html import escape

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from sphinx_additions import mathml


def rendered(markdown: str) -> str:
    """Return Markdown as HTML, with formulas as MathML and links as their text."""

    def inline(_: object, tokens: Sequence[Token], i: int, *__: object) -> str:
        return mathml(tokens[i].content)

    def displayed(_: object, tokens: Sequence[Token], i: int, *__: object) -> str:
        return mathml(tokens[i].content, displayed=True)

    parser = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, double_inline=True)
    parser.add_render_rule("math_inline", inline)
    parser.add_render_rule("math_inline_double", displayed)
    parser.add_render_rule("math_block", displayed)
    return re.sub(r'<a href="[^"]*">(.*?)</a>', r"\1", parser.render(markdown), flags=re.S)


def page(title: str, style: str, body: str) -> str:
    """Return a page of its own, which needs nothing else."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def figures(cell: dict) -> list[str]:
    """Return the pictures in a cell's output, each with its alt text."""
    shown = []
    for output in cell.get("outputs", ()):
        if picture := output.get("data", {}).get("image/png"):
            alt = escape(output["metadata"]["image/png"].get("alt", ""))
            data = "".join(picture).replace("\n", "")
            shown.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    return shown


def spoken(markdown: str) -> str:
    """Return prose without pictures that play and without numbers of references."""
    return re.sub(
        r",? and play the picture\s+\([^)]*\)|\s\[\d(?:, (?:[a-z]+\s)?[\d.]+)*\]", "", markdown
    )


def printed(cell: dict) -> str:
    """Return the text that a cell has printed."""
    return "".join("".join(each.get("text", "")) for each in cell.get("outputs", ()))


def to_read(cell: dict) -> bool:
    """Return whether the text above a cell asks people to read its code."""
    return "read" in cell["metadata"].get("tags", ())


def guessed(cell: dict) -> bool:
    """Return whether a cell compares a guess with a measurement."""
    return "you have not guessed" in printed(cell)


def blocks(markdown: str, joined: bool = False) -> list[str]:
    """Return headings, exercises, folded text, and the paragraphs between, each alone or joined."""
    end = r"\n\n(?=#|<details>)" if joined else r"\n\n"
    whole = r"^### Exercise.*?(?=^#|\Z)|^<details>.*?</details>|^#[^\n]*"
    return re.findall(rf"{whole}|^[^\n].*?(?={end}|\Z)", markdown, re.S | re.M)


def to_see(block: str) -> bool:
    """Return whether a block is a command, a table or a formula of its own."""
    return block.startswith(("    ", "|", "$$"))


def after_a_guess(markdown: str) -> tuple[list[str], list[str]]:
    """Return the blocks that comment on the measurement above them, and the other blocks."""
    found = blocks(markdown)
    n = 0
    while n < len(found) and not found[n].startswith(("#", "**Predict", "<")):
        if n and not to_see(found[n]) and not found[n - 1].endswith(":"):
            break
        n += 1
    return found[:n], found[n:]


def bare(source: str) -> str:
    """Return the code that is worth reading: no imports, no guesses, and no stub of an exercise."""
    source = re.sub(r"\A(?:(?:guess_|from |import )[^\n]*\s+)*", "", source)
    return re.sub(
        r'\n+def [^\n]*\n    """[^"]*"""\n    raise NotImplementedError\n.*', "", source, flags=re.S
    )
