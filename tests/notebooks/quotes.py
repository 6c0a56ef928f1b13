"""Where the numbers in the notebooks' prose come from: each is computed here, printed by the
notebook, or cited.

A sentence that quotes a measurement must be true on every machine, a busy one too. So it quotes a
formula, a number that the notebook prints however long anything takes (bytes, counts, emulated
units), or somebody's paper. A sentence that calls its number measured quotes what was printed or
published, and one that calls it simulated what was not.

``python -m tests.notebooks.quotes FILE…`` says what is wrong in executed copies, such as those of a
busy machine.
"""

import math
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import nbformat

from course_pp import schedule
from course_pp.schedule import Costs, build, simulate, theory

# One file a notebook, 03.toml: the quoted number as it stands, and an expression that gives it;
# "printed" if the notebook's own outputs show it; "[3] table 1" for reference 3 at the end of the
# notebook; "chosen" for a value that the text itself sets.
SOURCES = Path(__file__).parent / "quoted"

_UNITS = r"(?:%|×|ms|µs|s|seconds|minutes|hours|days|bytes|[KMGT]i?B|TFLOP/s)"
_NUMBER = r"\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?"
_QUOTED = re.compile(
    rf"×\s*(?P<factor>{_NUMBER})|(?P<united>{_NUMBER})\s?{_UNITS}(?!\w)|(?P<decimal>\d+\.\d+)"
)
_NOT_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)|<[^>]*>|^#[^\n]*$",
    re.DOTALL | re.MULTILINE,
)
_MEASURED, _ON_PAPER = (
    re.compile(rf"\b({words})\b", re.I) for words in ("measured", "simulated|predicted|computed")
)
_MINUTES = re.compile(r"^\*\*\d+ minutes\*\*.*$", re.MULTILINE)


def quoted(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """Return the numbers in the prose that claim something, with their sentences.

    These are decimals, shares, factors, and numbers with a unit.
    """
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        prose = _MINUTES.sub("", _NOT_PROSE.sub(" ", cell.source.partition("**References**")[0]))
        for sentence in re.split(r"(?<=[.;?])\s|\n\n", prose):
            for match in _QUOTED.finditer(sentence):
                yield next(group for group in match.groups() if group is not None), sentence


def sources_of(path: Path) -> Mapping[str, str]:
    """Where the numbers of a notebook come from, as far as anybody has said."""
    file = SOURCES / f"{path.name[:2]}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def problems(notebook: nbformat.NotebookNode, sources: Mapping[str, str]) -> Iterator[str]:
    """Return the faults of the numbers in a notebook's prose, given their stated sources."""
    found = {number for number, _ in quoted(notebook)}
    outputs = _outputs(notebook)
    shown = set(re.findall(_NUMBER, outputs))
    references = {
        match
        for cell in notebook.cells
        for match in re.findall(r"^(\d+)\. ", _references(cell), re.MULTILINE)
    }
    for number in sorted(found):
        source = sources.get(number)
        if source is None:
            yield f"the prose quotes {number}, and nothing says where it comes from"
        elif source == "printed" and number not in shown:
            yield f"the prose quotes {number}, and no output shows it"
        elif (cited := re.fullmatch(r"\[(\d+)\].*", source)) and cited[1] not in references:
            yield f"the prose quotes {number} from {source}, which is no reference of this notebook"
        elif source not in ("printed", "chosen") and not cited and not _gives(source, number):
            yield f"the prose quotes {number}, but {source} is {_value(source)}"
    for number, sentence in quoted(notebook):
        yield from _miscalled(number, sentence, sources.get(number, ""), outputs)
    for number in sorted(set(sources) - found):
        yield f"the prose no longer quotes {number}"


def _miscalled(number: str, sentence: str, source: str, outputs: str) -> Iterator[str]:
    """Say where a sentence calls a number measured that nothing ran for, or simulated what ran."""
    said = _word(sentence)
    if not said or source.startswith("["):
        return
    words = {_word(line) for line in outputs.splitlines() if number in re.findall(_NUMBER, line)}
    if said == "measured" and (source != "printed" or words == {"on paper"}):
        yield f"the prose calls {number} measured, but nothing ran for it"
    if said == "on paper" and source == "printed" and words == {"measured"}:
        yield f"the prose calls {number} simulated or computed, but it was measured"


def _word(line: str) -> str:
    """Return whether a line speaks of a measurement or of paper; of both or neither, nothing."""
    measured, on_paper = _MEASURED.search(line), _ON_PAPER.search(line)
    return "" if bool(measured) == bool(on_paper) else "measured" if measured else "on paper"


def _gives(expression: str, number: str) -> bool:
    digits = len(number.partition(".")[2])
    return f"{float(_value(expression)):.{digits}f}" == number.replace(",", "")


def _value(expression: str) -> Any:
    names = {
        "math": math,
        "schedule": schedule,
        "theory": theory,
        "build": build,
        "simulate": simulate,
    }
    return eval(
        expression,
        {**names, "Costs": Costs, "Fraction": Fraction, "bubble": _bubble, "error": _error},
    )


def _bubble(name: str, n_ranks: int, n_microbatches: int, **costs: Any) -> float:
    return float(simulate(build(name, n_ranks, n_microbatches), Costs(**costs)).bubble_fraction)


def _error(number: int) -> float:
    """How far off the planner is, in percent, for a run that its fit never saw."""
    calibration, fit = _calibrated()
    run = calibration["OTHERS"][number]
    return 100 * abs(float(run.predicted(fit).step_s) / float(run.seconds) - 1)


@cache
def _calibrated() -> tuple[dict[str, Any], Any]:
    calibration = runpy.run_path(str(SOURCES.parents[2] / "benchmarks" / "plan_calibration.py"))
    return calibration, calibration["fitted"](calibration["TABLE"], calibration["Constants"]())[0]


def _references(cell: nbformat.NotebookNode) -> str:
    return str(cell.source.partition("**References**")[2]) if cell.cell_type == "markdown" else ""


def _outputs(notebook: nbformat.NotebookNode) -> str:
    """The text of the outputs, and what stands for pictures."""
    texts: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts.append(output.get("text", ""))
            texts += [
                value for kind, value in output.get("data", {}).items() if kind.startswith("text/")
            ]
            texts += [
                str(data.get("alt", ""))
                for data in output.get("metadata", {}).values()
                if isinstance(data, dict)
            ]
    return "\n".join(map(str, texts))


if __name__ == "__main__":
    said = [
        f"{path}: {each}"
        for path in map(Path, sys.argv[1:])
        for each in problems(nbformat.read(path, 4), sources_of(path))
    ]
    sys.exit("\n".join(said) or None)
