"""Build the site from the executed notebooks, the pages in Markdown, and the docstrings: python docs/make_site.py

The pages go to runs/site/html. Nothing is executed, and nothing is loaded from elsewhere, neither here nor by a reader.
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

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "runs" / "site"
NEEDED = {"sphinx": "sphinx", "myst_nb": "myst-nb", "pydata_sphinx_theme": "pydata-sphinx-theme"}
# What the site shows lies where it lies in the repository, so a link holds on a host of the code and here.
FOLDERS = ("docs", "notebooks", "images", "source_code")
PARTS = (
    ("Course", "notebooks/*"),
    ("Practice", "generated/exercises generated/schedules docs/cheat_sheet generated/figures"),
    ("Package", "docs/package docs/models docs/scripts docs/cluster source_code/examples/README generated/api/index"),
    ("Reference", "docs/glossary generated/references generated/answers"),
    ("Taking part", "INSTRUCTOR ARCHITECTURE CONTRIBUTING docs/develop docs/release CHANGELOG"),
)


def main() -> int:
    """Assemble and build. The exit status tells whether it is whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SITE, help="folder for the sources put together and the pages")
    out = parser.parse_args().out.resolve()
    if lacking := [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]:
        print(f"the site needs {', '.join(lacking)}: make setup, or pip install -c constraints.txt '.[site]'")
        return 1
    begun = time.monotonic()
    source = assemble(out / "source")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(ROOT / "docs")]
    done = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(source), str(out / "html")], env=environment, check=False
    )
    if done.returncode:
        print("the site is not whole: mend what is said above")
        return done.returncode
    (out / "html" / ".nojekyll").touch()
    print(f"{out / 'html' / 'index.html'}: {len(list((out / 'html').rglob('*.html')))} pages, ", end="")
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


def assemble(source: Path) -> Path:
    """Put the sources of all pages into a folder, those made from the package among them."""
    sys.path.insert(0, str(ROOT / "docs"))
    import pages
    from chapters import with_hints

    shutil.rmtree(source, ignore_errors=True)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "_static"))
    shutil.copytree(ROOT / "docs" / "_static", source / "_static")
    for page in ROOT.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        (source / ("index.md" if page.name == "README.md" else page.name)).write_text(text, encoding="utf-8")
    for page in source.rglob("*.md"):
        text = re.sub(r"\]\(((?:\.\./)*)README\.md\b", r"](\1index.md", page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")
    for extra in ("LICENSE", "LICENSE-CC-BY-4.0", "pyproject.toml", "constraints.txt", "environment.yml", "Makefile"):
        shutil.copy(ROOT / extra, source)
    for path in sorted((source / "notebooks").glob("*.ipynb")):
        notebook = with_hints(json.loads(path.read_text(encoding="utf-8")), path.stem)
        path.write_text(json.dumps(notebook), encoding="utf-8")
    pages.write(source / "generated", sorted((source / "notebooks").glob("*.ipynb")))
    _add_contents(source)
    return source


def _add_contents(source: Path) -> None:
    """The tree of pages, at the end of the first one."""
    blocks = []
    for title, patterns in PARTS:
        found = []
        for pattern in patterns.split():
            pages = (path for path in source.glob(f"{pattern}.*") if path.suffix in (".md", ".ipynb", ".rst"))
            found += sorted(path.relative_to(source).with_suffix("") for path in pages)
        if found:
            listed = "\n".join(map(str, dict.fromkeys(found)))
            blocks.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{listed}\n```\n")
    with (source / "index.md").open("a", encoding="utf-8") as index:
        index.write("\n" + "\n".join(blocks))


if __name__ == "__main__":
    sys.exit(main())
