"""The site, built once for all tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make_site(out, **environment):
    command = [sys.executable, str(ROOT / "docs" / "make_site.py"), "--out", str(out)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built pages. No proxy leads out, so a build that loads anything fails."""
    out = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    done = make_site(out, **nowhere)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return out / "html"
