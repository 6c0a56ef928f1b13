"""Additions to Sphinx and MyST-NB: alt text, formulas without scripts, links at first use."""

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline_formula, None), (_displayed_formula, None))
    app.add_transform(AltText)
    app.add_transform(Terms)
    app.connect("env-check-consistency", _forget_builtins)
    app.connect("autodoc-process-docstring", _keep_names_together, priority=600)  # after napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _forget_builtins(app: Sphinx, env: Any) -> None:
    # viewcode lists the module of a built-in value, for which it writes no page.
    getattr(env, "_viewcode_modules", {}).pop("builtins", None)


def _keep_names_together(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Mend fields such as ``:ivar schedule, n_chunks:``.

    Sphinx takes all words but the last for a type, and looks for a class of that name.
    """
    for i, line in enumerate(lines):
        if found := re.match(r":(?:ivar|param) ((?:\w+, )+\w+):", line):
            lines[i] = line.replace(found[1], found[1].replace(" ", ""), 1)


class AltText(SphinxTransform):
    """Give each figure of a notebook the alt text of its output's metadata, and an anchor."""

    default_priority = 400

    def apply(self, **options: Any) -> None:
        path = Path(self.env.doc2path(self.env.docname))
        if path.suffix != ".ipynb":
            return
        images = [each for each in self.document.findall(nodes.image) if _output_of(each)]
        told = alt_texts(json.loads(path.read_text(encoding="utf-8")))
        if len(images) != len(told):
            _log.warning(
                "%d figures are shown, and the notebook has %d",
                len(images),
                len(told),
                location=str(path),
            )
        for i, (image, alt) in enumerate(zip(images, told, strict=False), start=1):
            image["alt"] = alt
            name = figure_id(path.stem, i)
            # Not on the picture itself: a timeline that moves takes its place.
            _output_of(image)["ids"].append(name)
            self.env.domains.standard_domain.note_hyperlink_target(
                name, self.env.docname, name, alt.split(". ")[0]
            )


def figure_id(notebook: str, number: int) -> str:
    """Return the anchor of a figure, numbered from 1 in its notebook."""
    return f"figure-{notebook[:2]}-{number}"


def alt_texts(notebook: dict) -> list[str]:
    """Return the alt text of each picture in the outputs, in order."""
    texts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                texts.append(output["metadata"].get("image/png", {}).get("alt", ""))
    return texts


def _output_of(node: nodes.Node) -> nodes.container | None:
    while (node := node.parent) is not None:
        if isinstance(node, nodes.container) and "cell_output" in node.get("classes", ()):
            return node
    return None


class Terms(SphinxTransform):
    """Link the first use of each term of the glossary on a page to its meaning."""

    default_priority = 8  # before references are resolved

    def apply(self, **options: Any) -> None:
        if self.env.docname.startswith(("api", "generated/api", "docs/glossary")):
            return
        waiting = dict(glossary_terms(Path(self.env.srcdir) / "docs" / "glossary.md"))
        for text in list(self.document.findall(nodes.Text)):
            if isinstance(text.parent, nodes.paragraph) and not _is_linked_or_heading(text):
                _link_terms(text, waiting)


def glossary_terms(path: Path) -> dict[str, str]:
    """Return {spelling in lower case: term of the glossary}, plurals included."""
    terms = re.findall(r"^(\w.*)\n  \w", path.read_text(encoding="utf-8"), re.M)
    found = {}
    for term in terms:
        if term.endswith("y"):
            plural = term[:-1] + "ies"
        elif term.endswith(("s", "ch")):
            plural = term + "es"
        else:
            plural = term + "s"
        found |= {term.lower(): term, plural.lower(): term}
    return found


def _is_linked_or_heading(node: nodes.Node) -> bool:
    barred = (
        nodes.reference,
        nodes.title,
        nodes.literal,
        nodes.definition_list,
        addnodes.pending_xref,
        addnodes.desc,
    )
    while (node := node.parent) is not None:
        if isinstance(node, barred):
            return True
    return False


def _link_terms(text: nodes.Text, waiting: dict[str, str]) -> None:
    if not waiting:
        return
    # The longest first, or "pipeline" would be linked within "pipeline stage".
    spellings = sorted(map(re.escape, waiting), key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(spellings)})\b", re.I)
    parts: list[nodes.Node] = []
    rest = str(text)
    while match := pattern.search(rest):
        term = waiting.get(match[0].lower())
        if term is None:  # linked a moment ago
            parts.append(nodes.Text(rest[: match.end()]))
        else:
            link = addnodes.pending_xref(
                "",
                nodes.inline("", match[0]),
                refdomain="std",
                reftype="term",
                reftarget=term,
                refexplicit=True,
            )
            link["classes"] = ["term"]
            parts += [nodes.Text(rest[: match.start()]), link]
            for spelling in [each for each, meant in waiting.items() if meant == term]:
                del waiting[spelling]
        rest = rest[match.end() :]
    if len(parts) > 0:
        text.parent.replace(text, [*parts, nodes.Text(rest)])


# Commands that the converter of docutils does not know, in commands that it knows.
_SPELLINGS = {r"\bmod": r"\;\operatorname{mod}\;", r"\Big(": r"\left(", r"\Big)": r"\right)"}


def _inline_formula(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _displayed_formula(writer: Any, node: nodes.math_block) -> None:
    # A wide formula scrolls by itself on a phone; so it must take the keyboard's focus.
    box = '<div class="formula" tabindex="0" role="group" aria-label="formula">'
    writer.body.append(f"{box}{mathml(node.astext(), displayed=True)}</div>\n")
    raise nodes.SkipNode


def mathml(tex: str, displayed: bool = False) -> str:
    """Return a formula as MathML. One that cannot be converted stays, with a warning."""
    known = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", tex.strip())
    for unknown, other in _SPELLINGS.items():
        known = known.replace(unknown, other)
    try:
        return latex2mathml.tex2mathml(known, as_block=displayed)
    except Exception as e:  # docutils raises its own MathError, and what its parser stumbles over
        _log.warning("cannot convert the formula %r: %s", tex, e)
        return f"<code>{tex}</code>"
