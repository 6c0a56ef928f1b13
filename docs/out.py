"""The folder that a script of this folder writes to."""

import sys
import tempfile
from pathlib import Path


def folder_for(out: Path) -> None:
    """Make the folder of ``--out``, or end with a sentence if nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as e:
        sys.exit(
            f"--out is {out}, and nothing can be written there ({e.strerror}): name another folder."
        )
