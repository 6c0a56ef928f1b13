"""Notebook cells, as code that is called from one finds them."""

from __future__ import annotations

import linecache
import sys
from typing import Any


def shell() -> Any:
    """Return the IPython shell in which this runs; None in a script or a test."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def is_cell(filename: str) -> bool:
    """Return whether the source text of this name is in no file."""
    entry = linecache.cache.get(filename, ())
    # The others have a modification time, or are not read yet.
    return len(entry) == 4 and entry[1] is None


def sources() -> dict[str, Any]:
    """Return the cells' entries in ``linecache``."""
    return {name: entry for name, entry in linecache.cache.items() if is_cell(name)}
