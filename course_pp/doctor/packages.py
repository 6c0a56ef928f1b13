"""What is installed: the packages of the course, torch and its build, GPUs, the front end of the
widgets.

torch is asked in a process of its own: a build for another machine ends the process that imports
it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from course_pp.doctor.finding import Check, Finding

OLDEST_TORCH = (2, 11)
NEWEST_TRIED_TORCH = (2, 15)
INSTALL_TORCH = "pip install 'torch>=2.11'"
_IMPORT_LIMIT_S = 16.0
_ALL = "all notebooks"
_FIGURES = "the figures of all notebooks"
# What is imported, what it is installed as, and what fails without it.
PACKAGES = (
    ("anywidget", "anywidget", "the board of notebook 11"),
    ("cloudpickle", "cloudpickle", f"every on_ranks and check, so {_ALL}"),
    ("cyclopts", "cyclopts", "training: %torchrun source_code/train.py"),
    ("IPython", "ipython", _ALL),
    ("ipykernel", "ipykernel", _ALL),
    ("jupyterlab", "jupyterlab", "make lab"),
    ("matplotlib", "matplotlib", _FIGURES),
    ("numpy", "numpy", _FIGURES),
    ("PIL", "pillow", _FIGURES),
    (
        "tokenizers",
        "tokenizers",
        "training on text: %torchrun source_code/train.py in notebooks 07 to 09 and 12",
    ),
    ("tqdm", "tqdm", "training: %torchrun source_code/train.py"),
    ("transformers", "transformers", "notebooks 09, 10 and 12"),
    ("xxhash", "xxhash", "notebooks 09 and 12"),
)
_MANAGER = "@jupyter-widgets/jupyterlab-manager"
_WIDGETS_BREAK = (
    "explore(), the buttons of quiz(), the board of notebook 11; figures and play() still show"
)
_PROBE = """
import json, time
begun = time.monotonic()
import torch
import torch.distributed as dist
said = {"version": torch.__version__, "seconds": time.monotonic() - begun, "cuda": torch.version.cuda}
said["distributed"] = dist.is_available()
said["gloo"] = dist.is_available() and dist.is_gloo_available()
said["nccl"] = dist.is_available() and dist.is_nccl_available()
said["gpus"] = []
try:
    n = torch.cuda.device_count()
    for i in range(n):
        free, whole = torch.cuda.mem_get_info(i)
        said["gpus"].append([torch.cuda.get_device_name(i), free, whole])
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    said["apart"] = [[i, j] for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    said["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version())) if n and said["nccl"] else None
except Exception as error:
    said["gpu_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def packages() -> list[Finding]:
    missing = [(name, breaks) for module, name, breaks in PACKAGES if find_spec(module) is None]
    if missing:
        return [
            Finding(
                f"package {name}",
                False,
                "not installed",
                breaks,
                f"{sys.executable} -m pip install {name}",
            )
            for name, breaks in missing
        ]
    return [Finding("packages", True, f"{len(PACKAGES)} found")]


def widgets() -> Finding:
    """Say whether sliders appear in JupyterLab: ipywidgets in the kernel, and its extension in the page."""
    name = "widgets"
    remedy = (
        f"{sys.executable} -m pip install ipywidgets jupyterlab_widgets, then restart JupyterLab"
    )
    try:
        kernel = version("ipywidgets")
    except PackageNotFoundError:
        return Finding(name, False, "ipywidgets is not installed", _WIDGETS_BREAK, remedy)
    from jupyter_core.paths import jupyter_config_path, jupyter_path

    pages = [Path(folder) / _MANAGER / "package.json" for folder in jupyter_path("labextensions")]
    page = next((page for page in pages if page.is_file()), None)
    if page is None:
        says = f"ipywidgets {kernel} is here, its JupyterLab extension is not"
        return Finding(name, False, says, _WIDGETS_BREAK, remedy)
    for folder in jupyter_config_path():
        config = Path(folder) / "labconfig" / "page_config.json"
        if not config.is_file():
            continue
        disabled = json.loads(config.read_text(encoding="utf-8")).get("disabledExtensions", {})
        if disabled.get(_MANAGER) if isinstance(disabled, dict) else _MANAGER in disabled:
            remedy = f"jupyter labextension enable {_MANAGER}"
            return Finding(
                name, False, f"the extension {_MANAGER} is disabled", _WIDGETS_BREAK, remedy
            )
    extension = json.loads(page.read_text(encoding="utf-8"))["version"]
    # ipywidgets 8 speaks to version 5 of the extension or newer, ipywidgets 7 to older ones.
    if (int(kernel.split(".")[0]) >= 8) != (int(extension.split(".")[0]) >= 5):
        says = (
            f"ipywidgets {kernel} in the kernel, its extension {extension} in the page do not fit"
        )
        return Finding(name, False, says, _WIDGETS_BREAK, remedy)
    return Finding(name, True, f"ipywidgets {kernel}, JupyterLab extension {extension}")


def torch() -> list[Finding]:
    """Say which torch is here, what it was built with, and which GPUs it sees."""
    said = ask_torch()
    if isinstance(said, Finding):
        return [said]
    return [_build(said), _gloo(said), *_gpus(said)]


def ask_torch() -> dict[str, Any] | Finding:
    """Return what torch says of itself in a process of its own; a finding if it cannot be imported."""
    if find_spec("torch") is None:
        return Finding("torch", False, "not installed", _ALL, INSTALL_TORCH)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_IMPORT_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        says = f"its import takes more than {_IMPORT_LIMIT_S:.0f} s"
        remedy = (
            "close what else runs here and try again; if it stays slow, put .venv on a local disk"
        )
        return Finding("torch", False, says, f"the first cell of {_ALL}", remedy)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Finding(
            "torch",
            False,
            f"cannot be imported ({last})",
            _ALL,
            f"make clean lab, or {INSTALL_TORCH}",
        )
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _build(said: dict[str, Any]) -> Finding:
    build = f"CUDA {said['cuda']}" if said["cuda"] else "the CPU"
    says = f"{said['version']} for {build}, imported in {said['seconds']:.1f} s"
    numbers = tuple(int(part) for part in said["version"].split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        says = f"{said['version']} is too old: {oldest} or newer is needed"
        breaks = (
            "%torchrun of notebooks 02 to 10, torch's run in 11: they use"
            " torch.distributed.pipelining, FSDP2"
        )
        return Finding("torch", False, says, breaks, f"make clean lab, or {INSTALL_TORCH}")
    if numbers > NEWEST_TRIED_TORCH:
        newest = ".".join(map(str, NEWEST_TRIED_TORCH))
        says += f"; the course was never tried with one newer than {newest}"
    return Finding("torch", True, says)


def _gloo(said: dict[str, Any]) -> Finding:
    if not said["gloo"]:
        what = (
            "torch.distributed has no gloo"
            if said["distributed"]
            else "torch has no torch.distributed"
        )
        return Finding("backends", False, what, f"every rank, so {_ALL}", INSTALL_TORCH)
    return Finding("backends", True, "gloo" + (", NCCL" if said["nccl"] else ""))


def _gpus(said: dict[str, Any]) -> list[Finding]:
    breaks = "runs on GPUs (make test-gpu, source_code/train.py); the notebooks run on the CPU"
    if "gpu_error" in said:
        return [
            Finding(
                "GPUs", False, f"cannot be used ({said['gpu_error']})", breaks, "look at nvidia-smi"
            )
        ]
    gpus = said["gpus"]
    if not gpus:
        if list(Path("/dev").glob("nvidia[0-9]*")):
            built = (
                "is built for the CPU"
                if not said["cuda"]
                else f"for CUDA {said['cuda']} sees none: driver too old"
            )
            remedy = (
                "make clean lab without CPU=1"
                if not said["cuda"]
                else "a newer driver, or an older CUDA build"
            )
            return [
                Finding("GPUs", False, f"this machine has some, but torch {built}", breaks, remedy)
            ]
        return [Finding("GPUs", True, "none; the whole course runs on the CPU")]
    names = ", ".join(
        f"{name} ({free / 2**30:.0f} of {whole / 2**30:.0f} GiB free)" for name, free, whole in gpus
    )
    findings = [Finding("GPUs", True, f"{len(gpus)}: {names}")]
    if not said["nccl"]:
        findings.append(
            Finding("NCCL", False, "torch has none", breaks, "make clean lab without CPU=1")
        )
    else:
        findings.append(Finding("NCCL", True, str(said["nccl_version"])))
    if said["apart"]:
        pairs = ", ".join(f"{i} to {j}" for i, j in said["apart"][:4])
        says = (
            f"no direct access from GPU {pairs}: messages between them go through the host, which"
            " is slower"
        )
        findings.append(Finding("peer access", True, says))
    elif len(gpus) > 1:
        findings.append(Finding("peer access", True, "every GPU reaches every other"))
    return findings


CHECKS = (
    Check("packages", packages, _ALL),
    Check("widgets", widgets, _WIDGETS_BREAK),
    Check("torch", torch, _ALL),
)
