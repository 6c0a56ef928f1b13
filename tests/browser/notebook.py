"""Opening a notebook in a real JupyterLab, running it, and what went wrong in it."""

from typing import Any

import nbformat

from tests.browser.conftest import Lab

SOON = 60_000  # milliseconds


def open_and_run(page: Any, lab: Lab, *cells: str, until: str) -> None:
    """Run a notebook of these cells in JupyterLab, until the page has an element ``until``."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    # or JupyterLab asks for one
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, lab.folder / "cells.ipynb")
    open_notebook(page, lab, "cells.ipynb")
    run_all(page)
    page.wait_for_selector(until, timeout=2 * SOON)


def open_notebook(page: Any, lab: Lab, path: str) -> None:
    """Open a notebook and wait for its kernel."""
    page.goto(lab.address(f"doc/tree/{path}"))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=2 * SOON)
    # The toolbar says idle before there is a kernel; the status bar does not.
    page.wait_for_selector(
        "#jp-main-statusbar .jp-StatusBar-TextItem:text-matches('\\\\| Idle$')", timeout=2 * SOON
    )


def run_all(page: Any) -> None:
    page.click("li.lm-MenuBar-item:has-text('Run')")
    page.click("li.lm-Menu-item[data-command='runmenu:run-all']")


def errors(page: Any) -> list[str]:
    """Tracebacks in outputs, those inside of widgets included, and what the page itself threw."""
    kinds = ("stderr", "error")
    shown = [
        text
        for kind in kinds
        for text in page.locator(
            f"[data-mime-type='application/vnd.jupyter.{kind}']"
        ).all_inner_texts()
    ]
    return [*shown, *page.thrown]
