"""A real JupyterLab."""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab that serves ``folder``."""

    url: str
    token: str
    folder: Path

    def address(self, path: str) -> str:
        return f"{self.url}{path}?token={self.token}"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start JupyterLab with settings, workspaces and notebooks of its own, on a free port."""
    folder = tmp_path_factory.mktemp("lab")
    token = secrets.token_hex(16)
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    news = {"fetchNews": "false", "checkForUpdates": False}  # its pop-up would lie over the page
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(news))
    (folder / "notebooks").mkdir()
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
        "COURSE_PP_PROGRESS": str(folder / "progress.json"),
    }
    options = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        "--ServerApp.port=0",
        f"--IdentityProvider.token={token}",
    ]
    options += [
        f"--ServerApp.root_dir={folder / 'notebooks'}",
        "--LabApp.extension_manager=readonly",
    ]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        url = _wait_for_url(process, folder / "runtime", log)
        yield Lab(url, token, folder / "notebooks")
        # Asked politely it ends its kernels too.
        urllib.request.urlopen(
            urllib.request.Request(f"{url}api/shutdown?token={token}", method="POST"), timeout=10
        )
        process.wait(20)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(20)


def _wait_for_url(process: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for found in runtime.glob("jpserver-*.json"):
            try:
                return str(json.loads(found.read_text())["url"])
            except ValueError:
                pass  # it is being written
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
