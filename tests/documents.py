"""The texts of the repository beside notebooks and code: the README and the pages in docs/."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        *sorted(ROOT.glob("[!R]*.md")),
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
TEXT = "\n".join(PAGES.values())
