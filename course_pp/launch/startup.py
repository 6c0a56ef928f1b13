"""Copied as ``sitecustomize.py`` to a folder on PYTHONPATH: runs first in every Python process under torchrun.

``COURSE_PP_WATCH`` holds the watchdog's address, ``COURSE_PP_WATCH_FILE`` the file of `watch`, which is loaded by
path so that a script needs nothing of this package.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys


def _watch() -> None:
    address, file = os.environ["COURSE_PP_WATCH"], os.environ["COURSE_PP_WATCH_FILE"]
    spec = importlib.util.spec_from_file_location("_course_pp_watch", file)
    if spec is None or spec.loader is None:
        return
    watch = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(watch)
    rank = os.environ.get("RANK")
    if rank is None:
        watch.attend(address, None)
        return
    # What the rank starts in turn is no rank.
    del os.environ["COURSE_PP_WATCH"]
    watch.attend(address, int(rank))
    sys.meta_path.insert(0, watch.InstrumentOnImport())


def _run_shadowed_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.machinery.PathFinder.find_spec(
        "sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != here]
    )
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "COURSE_PP_WATCH" in os.environ:
    # Where the address cannot be reached, or the package is not seen, the run goes on without a watchdog.
    with contextlib.suppress(OSError, KeyError):
        _watch()
    _run_shadowed_sitecustomize()
