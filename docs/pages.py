"""Pages made from package and notebooks: exercises, figures, references, schedules, the API."""

import importlib
import inspect
import json
import pkgutil
import re
from base64 import b64decode
from fractions import Fraction
from functools import cache
from io import BytesIO
from pathlib import Path
from types import ModuleType

from chapters import anchor
from PIL import Image
from routes import title_of
from sphinx_additions import alt_texts, figure_id

import course_pp
from course_pp.exercises.exercise import exercises, number_of
from course_pp.schedule import Costs, build, names, simulate
from course_pp.show import play

THUMBNAIL = 440


def write(folder: Path, notebooks: list[Path]) -> None:
    """Write all generated pages into ``folder``."""
    folder.mkdir(parents=True)
    (folder / "exercises.md").write_text(exercise_page(notebooks), encoding="utf-8")
    (folder / "figures.md").write_text(
        figure_page(notebooks, folder / "thumbnails"), encoding="utf-8"
    )
    (folder / "references.md").write_text(reference_page(notebooks), encoding="utf-8")
    import guesses
    import live
    import routes

    (folder / "board.md").write_text(live.board_page(), encoding="utf-8")
    (folder / "explorer.md").write_text(live.explorer_page(), encoding="utf-8")
    (folder / "guesses.md").write_text(guesses.page(notebooks), encoding="utf-8")
    (folder / "routes.md").write_text(routes.page(), encoding="utf-8")
    (folder / "schedules.md").write_text(schedule_page(), encoding="utf-8")
    write_api(folder / "api")


def exercise_page(notebooks: list[Path]) -> str:
    """Return a table of all exercises: place, difficulty, minutes, number of hints."""
    paths = {path.stem[:2]: path for path in notebooks}
    rows = []
    minutes = 0
    for exercise in exercises():
        if (path := paths.get(exercise.notebook)) is None:
            continue
        minutes += exercise.minutes
        where = f"{exercise.notebook} · {number_of(exercise)}"
        link = f"[{exercise.title}](../notebooks/{path.name}#{anchor(exercise)})"
        rows.append(
            f"| {where} | {link} | `{exercise.name}` | {exercise.stars} | {exercise.minutes} |"
            f" {len(exercise.hints)} |"
        )
    return "\n".join(
        (
            "# Exercises",
            "",
            (
                f"{len(rows)} functions to complete, {minutes / 60:.0f} hours in all. Each has a"
                " check that runs your answer, hints one step at a time, and a tested solution"
                " (`solution(…)` in the notebook)."
            ),
            "",
            "| | exercise | function | difficulty | minutes | hints |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        )
    )


def figure_page(notebooks: list[Path], thumbnails: Path) -> str:
    """Return all figures of the chapters, small, each a link to its place."""
    thumbnails.mkdir()
    parts = [
        "# Figures",
        "",
        (
            "Every figure of the chapters, in order. Each is drawn by `course_pp.show` and leads to"
            " its place."
        ),
        "",
    ]
    for path in notebooks:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        figures = list(zip(_pictures(notebook), alt_texts(notebook), strict=True))
        if figures:
            parts += [f"## {title_of(notebook)}", ""]
        for i, (data, alt) in enumerate(figures, start=1):
            name = f"{figure_id(path.stem, i)}.png"
            picture = Image.open(BytesIO(b64decode(data))).convert("RGB")
            picture.thumbnail((THUMBNAIL, THUMBNAIL * 3))
            picture.save(thumbnails / name, optimize=True)
            short = alt.split(". ")[0].replace("[", "(").replace("]", ")").replace("\n", " ")
            link = f"../notebooks/{path.name}#{figure_id(path.stem, i)}"
            parts += [
                "```{figure} " + f"thumbnails/{name}",
                f":alt: {short}",
                ":figclass: thumbnail",
                "",
                f"[{short}.]({link})",
                "```",
                "",
            ]
    return "\n".join(parts)


def _pictures(notebook: dict) -> list[str]:
    pictures = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                pictures.append("".join(picture))
    return pictures


def schedule_page() -> str:
    """Return the page of all schedules as timelines that move."""
    parts = [
        "# Schedules that move",
        "",
        (
            "4 ranks, 8 microbatches, a backward twice as long as a forward. Give a timeline the"
            " focus: the space bar plays, the arrow keys step. Each needs a script, and no kernel."
            " [Which schedule?](../docs/which_schedule.md) compares them."
        ),
        "",
    ]
    for name in names():
        schedule = build(name, 4, 8)
        share = Fraction(4, schedule.n_stages)
        timeline = simulate(schedule, Costs(forward=share, input_grad=share, weight_grad=share))
        parts += [f"## {name}", "", "```{raw} html", play(timeline).html(), "```", ""]
    return "\n".join(parts)


def reference_page(notebooks: list[Path]) -> str:
    """Return the lists of references of all chapters."""
    parts = ["# References", ""]
    for path in notebooks:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        prose = [
            "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
        ]
        end = r"(?=\n\*\*|\nPrevious|\n#|\Z)"
        found = re.search(rf"\*\*References\*\*\n(.*?){end}", "\n\n".join(prose), re.S)
        if found:
            # A link from one notebook to another starts from this page's folder here.
            listed = re.sub(r"\]\((?!http)", "](../notebooks/", found[1].strip())
            parts += [f"## [{title_of(notebook)}](../notebooks/{path.name})", "", listed, ""]
    return "\n".join(parts)


@cache
def public_modules() -> list[ModuleType]:
    """Return the packages and modules directly below `course_pp` that list their public names."""
    modules = []
    for name in sorted(info.name for info in pkgutil.iter_modules(course_pp.__path__)):
        if not name.startswith("_"):
            module = importlib.import_module(f"course_pp.{name}")
            if getattr(module, "__all__", None):
                modules.append(module)
    return modules


def write_api(folder: Path) -> None:
    """Write one page a package with every public name, and their list."""
    folder.mkdir()
    modules = public_modules()
    listed = "\n".join(f"   {module.__name__}" for module in modules)
    lines = [
        "API",
        "===",
        "",
        "Every public name, with its types and a link to its source.",
        "",
        ".. toctree::",
        "   :maxdepth: 1",
        "",
        listed,
        "",
    ]
    (folder / "index.rst").write_text("\n".join(lines), encoding="utf-8")
    for module in modules:
        (folder / f"{module.__name__}.rst").write_text(api_page(module), encoding="utf-8")


def api_page(module: ModuleType) -> str:
    """Return a module's page in reStructuredText: its docstring, and each of its public names."""
    name = module.__name__
    lines = [name, "=" * len(name), "", f".. automodule:: {name}", f".. currentmodule:: {name}", ""]
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.ismodule(value):
            heading = f"{name}.{public}"
            lines += [
                heading,
                "-" * len(heading),
                "",
                f".. automodule:: {heading}",
                "   :members:",
                "",
                f".. currentmodule:: {name}",
                "",
            ]
            continue
        lines += [public, "-" * len(public), "", *_directive(module, public), ""]
    return "\n".join(lines)


def _directive(module: ModuleType, public: str) -> list[str]:
    value = getattr(module, public)
    if (owner := _owner(value, public)) != module.__name__:
        kind = "class" if inspect.isclass(value) else "func"
        return [f"Passed on from :{kind}:`{owner}.{public}`."]
    if inspect.isclass(value):
        # matplotlib writes a method of its own into every figure's class, in markup of its own.
        return [f".. autoclass:: {public}", "   :members:", "   :exclude-members: set"]
    if inspect.isroutine(value):
        return [f".. autofunction:: {public}"]
    return [f".. py:data:: {public}", f"   :value: {value!r}".replace("typing.", "")]


def _owner(value: object, public: str) -> str | None:
    """Return the package whose page describes a class or function.

    That is its own package, or the first one that passes it on.
    """
    home = ""
    if inspect.isclass(value) or inspect.isroutine(value):
        home = ".".join(getattr(value, "__module__", "").split(".")[:2])
    listing = []
    for module in public_modules():
        if getattr(module, public, None) is value and public in module.__all__:
            listing.append(module.__name__)
    return home if home in listing or not listing else listing[0]
