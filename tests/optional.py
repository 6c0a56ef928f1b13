"""Tests that need more than Python packages are skipped without it, except where they must run."""

import os
from typing import NoReturn

import pytest


def lacking(suite: str, reason: str) -> NoReturn:
    """Skip for ``reason``, or fail if the suite must run.

    COURSE_PP_REQUIRE names the suites that must, such as ``"browser slurm"``. CI sets it.
    """
    if suite in os.environ.get("COURSE_PP_REQUIRE", "").split():
        pytest.fail(f"COURSE_PP_REQUIRE names the {suite} tests, but {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
