"""Build the site from the executed notebooks, the pages in Markdown, and the docstrings.

    python docs/make_site.py

The pages go to runs/site/html. Nothing is executed. Neither this script nor a reader's browser
loads anything from elsewhere.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from out import folder_for

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "runs" / "site"
NEEDED = {"sphinx": "sphinx", "myst_nb": "myst-nb", "pydata_sphinx_theme": "pydata-sphinx-theme"}
# Files lie on the site as they lie in the repository, so that a link holds in both places.
FOLDERS = ("docs", "notebooks", "images", "source_code")
# The parts of the site: title, summary, and pages.
PARTS = (
    ("Course", "The chapters, with all outputs, figures and hints.", "docs/start notebooks/*"),
    (
        "Practice",
        "What to try, what to choose, and what to have beside you.",
        (
            "generated/exercises generated/explorer generated/board generated/schedules"
            " docs/which_schedule docs/cheat_sheet generated/figures"
        ),
    ),
    (
        "Package",
        "Scripts and functions to use in your own training.",
        (
            "docs/package docs/schedules docs/models docs/scripts docs/cluster"
            " source_code/examples/README source_code/examples/index generated/api/index"
        ),
    ),
    ("Reference", "Words and papers.", "docs/glossary generated/references"),
    (
        "Taking part",
        "For who teaches the course, and who changes it.",
        (
            "INSTRUCTOR docs/trouble generated/routes generated/guesses ARCHITECTURE CONTRIBUTING"
            " docs/develop docs/release CHANGELOG"
        ),
    ),
)


def main() -> int:
    """Assemble and build the site. The exit status tells whether it is whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=SITE, help="folder for the sources put together and the pages"
    )
    out = parser.parse_args().out.resolve()
    lacking = []
    for module, package in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            lacking.append(package)
    if lacking:
        remedy = "make setup, or pip install -c constraints.txt '.[site]'"
        print(f"the site needs {', '.join(lacking)}: {remedy}")
        return 1
    folder_for(out)
    begun = time.monotonic()
    source = assemble(out / "source")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(ROOT / "docs")]
    done = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(source), str(out / "html")],
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode:
        print("the site is not whole: mend what is said above")
        return done.returncode
    name_switches(out / "html")
    (out / "html" / ".nojekyll").touch()
    n_pages = len(list((out / "html").rglob("*.html")))
    seconds = time.monotonic() - begun
    print(f"{out / 'html' / 'index.html'}: {n_pages} pages, {seconds:.0f} s")
    return 0


def name_switches(folder: Path) -> None:
    """Give the switches of the theme's sidebar a name that a screen reader can say."""
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        bare = '<summary><span class="toctree-toggle"'
        named = text.replace(bare, bare.replace("<summary>", '<summary aria-label="pages below">'))
        if named != text:
            page.write_text(named, encoding="utf-8")


def assemble(source: Path) -> Path:
    """Put the sources of all pages into a folder, those made from the package among them."""
    sys.path.insert(0, str(ROOT / "docs"))
    # The progress of the person who builds the site is not for readers.
    os.environ["COURSE_PP_PROGRESS"] = str(source / "nobody" / "progress.json")
    import pages
    from chapters import with_hints
    from live import with_boards

    shutil.rmtree(source, ignore_errors=True)
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "_static")
        )
    shutil.copytree(ROOT / "docs" / "_static", source / "_static")
    for page in ROOT.glob("*.md"):
        name = "index.md" if page.name == "README.md" else page.name
        shutil.copyfile(page, source / name)
    for page in source.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"\]\(((?:\.\./)*)README\.md\b", r"](\1index.md", text)
        page.write_text(text, encoding="utf-8")
    for extra in (
        "LICENSE",
        "LICENSE-CC-BY-4.0",
        "pyproject.toml",
        "constraints.txt",
        "environment.yml",
        "Makefile",
    ):
        shutil.copy(ROOT / extra, source)
    for path in sorted((source / "notebooks").glob("*.ipynb")):
        notebook = with_boards(with_hints(json.loads(path.read_text(encoding="utf-8")), path.stem))
        path.write_text(json.dumps(notebook), encoding="utf-8")
    pages.write(source / "generated", sorted((source / "notebooks").glob("*.ipynb")))
    _add_contents(source)
    return source


def _add_contents(source: Path) -> None:
    """Write a page for each part that lists its pages, and list the parts on the first page."""
    parts = []
    for title, sentence, patterns in PARTS:
        found = []
        for pattern in patterns.split():
            pages = []
            for path in source.glob(f"{pattern}.*"):
                if path.suffix in (".md", ".ipynb", ".rst"):
                    pages.append(f"/{path.relative_to(source).with_suffix('')}")
            found += sorted(pages)
        if found:
            parts.append(f"/parts/{title.lower().replace(' ', '_')}")
            page = source / f"{parts[-1][1:]}.md"
            page.parent.mkdir(exist_ok=True)
            tree = "\n".join(["```{toctree}", ":maxdepth: 1", "", *dict.fromkeys(found), "```", ""])
            page.write_text(f"# {title}\n\n{sentence}\n\n{tree}", encoding="utf-8")
    with (source / "index.md").open("a", encoding="utf-8") as index:
        index.write("\n".join(["", "```{toctree}", ":hidden:", "", *parts, "```", ""]))


if __name__ == "__main__":
    sys.exit(main())
