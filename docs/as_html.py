"""Markdown and figures of notebooks as HTML that needs nothing else: for slides and handouts."""

import re
from html import escape

from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from sphinx_additions import mathml


def rendered(markdown: str) -> str:
    """Markdown as HTML, formulas as MathML, links as their text."""
    parser = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, double_inline=True)
    parser.add_render_rule("math_inline", lambda _, tokens, i, *__: mathml(tokens[i].content))
    parser.add_render_rule("math_inline_double", lambda _, tokens, i, *__: mathml(tokens[i].content, displayed=True))
    parser.add_render_rule("math_block", lambda _, tokens, i, *__: mathml(tokens[i].content, displayed=True))
    return re.sub(r'<a href="[^"]*">(.*?)</a>', r"\1", parser.render(markdown), flags=re.S)


def figures(cell: dict) -> list[str]:
    """The pictures that a cell has put out, each with its alt text."""
    shown = []
    for output in cell.get("outputs", ()):
        if picture := output.get("data", {}).get("image/png"):
            alt = escape(output["metadata"]["image/png"].get("alt", ""))
            data = "".join(picture).replace("\n", "")
            shown.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    return shown
