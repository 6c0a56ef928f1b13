"""Checks of the installation: packages, torch and its build, GPUs, the widgets of JupyterLab.

A process of its own imports torch, because a build for another machine ends the process that
imports it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from course_pp.doctor.finding import Check, Finding, right, wrong

OLDEST_TORCH = (2, 11)
NEWEST_TRIED_TORCH = (2, 15)
INSTALL_TORCH = "pip install 'torch>=2.11'"
_IMPORT_LIMIT_S = 16.0
_ALL = "all notebooks"
_FIGURES = "the figures of all notebooks"
# Name of the module, name of the package, and the parts of the course that fail without it.
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
seconds = time.monotonic() - begun
said = {"version": torch.__version__, "seconds": seconds, "cuda": torch.version.cuda}
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
    said["nccl_version"] = None
    if n and said["nccl"]:
        said["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    said["gpu_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def packages() -> list[Finding]:
    missing = []
    for module, name, breaks in PACKAGES:
        if find_spec(module) is None:
            remedy = f"{sys.executable} -m pip install {name}"
            missing.append(wrong(f"package {name}", "not installed", breaks=breaks, remedy=remedy))
    return missing or [right("packages", f"{len(PACKAGES)} found")]


def widgets() -> Finding:
    """Say whether sliders appear in JupyterLab.

    They need ipywidgets in the kernel, and its extension in the page.
    """
    name = "widgets"
    remedy = (
        f"{sys.executable} -m pip install ipywidgets jupyterlab_widgets, then restart JupyterLab"
    )
    try:
        kernel = version("ipywidgets")
    except PackageNotFoundError:
        return wrong(name, "ipywidgets is not installed", breaks=_WIDGETS_BREAK, remedy=remedy)
    from jupyter_core.paths import jupyter_config_path, jupyter_path

    pages = [Path(folder) / _MANAGER / "package.json" for folder in jupyter_path("labextensions")]
    page = next((page for page in pages if page.is_file()), None)
    if page is None:
        says = f"ipywidgets {kernel} is here, its JupyterLab extension is not"
        return wrong(name, says, breaks=_WIDGETS_BREAK, remedy=remedy)
    for folder in jupyter_config_path():
        config = Path(folder) / "labconfig" / "page_config.json"
        if not config.is_file():
            continue
        # JupyterLab writes a dict {extension: disabled}; people also write a list of names.
        disabled = json.loads(config.read_text(encoding="utf-8")).get("disabledExtensions", {})
        if not isinstance(disabled, dict):
            disabled = dict.fromkeys(disabled, True)
        if disabled.get(_MANAGER):
            says = f"the extension {_MANAGER} is disabled"
            remedy = f"jupyter labextension enable {_MANAGER}"
            return wrong(name, says, breaks=_WIDGETS_BREAK, remedy=remedy)
    extension = json.loads(page.read_text(encoding="utf-8"))["version"]
    # ipywidgets 8 speaks to version 5 of the extension or newer, ipywidgets 7 to older ones.
    if (int(kernel.split(".")[0]) >= 8) != (int(extension.split(".")[0]) >= 5):
        says = (
            f"ipywidgets {kernel} in the kernel, its extension {extension} in the page do not fit"
        )
        return wrong(name, says, breaks=_WIDGETS_BREAK, remedy=remedy)
    return right(name, f"ipywidgets {kernel}, JupyterLab extension {extension}")


def torch() -> list[Finding]:
    """Say which torch is here, for which machine it was built, and which GPUs it sees."""
    said = ask_torch()
    if isinstance(said, Finding):
        return [said]
    return [_build(said), _gloo(said), *_gpus(said)]


def ask_torch() -> dict[str, Any] | Finding:
    """Return the answers of torch in a process of its own; a finding if it cannot be imported."""
    if find_spec("torch") is None:
        return wrong("torch", "not installed", breaks=_ALL, remedy=INSTALL_TORCH)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_IMPORT_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        says = f"its import takes more than {_IMPORT_LIMIT_S:.0f} s"
        remedy = (
            "close what else runs here and try again; if it stays slow, put .venv on a local disk"
        )
        return wrong("torch", says, breaks=f"the first cell of {_ALL}", remedy=remedy)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        remedy = f"make clean lab, or {INSTALL_TORCH}"
        return wrong("torch", f"cannot be imported ({last})", breaks=_ALL, remedy=remedy)
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
        return wrong("torch", says, breaks=breaks, remedy=f"make clean lab, or {INSTALL_TORCH}")
    if numbers > NEWEST_TRIED_TORCH:
        newest = ".".join(map(str, NEWEST_TRIED_TORCH))
        says += f"; the course was never tried with one newer than {newest}"
    return right("torch", says)


def _gloo(said: dict[str, Any]) -> Finding:
    if not said["gloo"]:
        says = "torch has no torch.distributed"
        if said["distributed"]:
            says = "torch.distributed has no gloo"
        return wrong("backends", says, breaks=f"every rank, so {_ALL}", remedy=INSTALL_TORCH)
    return right("backends", "gloo" + (", NCCL" if said["nccl"] else ""))


def _gpus(said: dict[str, Any]) -> list[Finding]:
    breaks = "runs on GPUs (make test-gpu, source_code/train.py); the notebooks run on the CPU"
    if "gpu_error" in said:
        says = f"cannot be used ({said['gpu_error']})"
        return [wrong("GPUs", says, breaks=breaks, remedy="look at nvidia-smi")]
    gpus = said["gpus"]
    other_build = "make clean lab without CPU=1"
    if not gpus:
        if not list(Path("/dev").glob("nvidia[0-9]*")):
            return [right("GPUs", "none; the whole course runs on the CPU")]
        if not said["cuda"]:
            says = "this machine has some, but torch is built for the CPU"
            return [wrong("GPUs", says, breaks=breaks, remedy=other_build)]
        says = f"this machine has some, but torch for CUDA {said['cuda']} sees none: driver too old"
        remedy = "a newer driver, or an older CUDA build"
        return [wrong("GPUs", says, breaks=breaks, remedy=remedy)]

    names = ", ".join(
        f"{name} ({free / 2**30:.0f} of {whole / 2**30:.0f} GiB free)" for name, free, whole in gpus
    )
    findings = [right("GPUs", f"{len(gpus)}: {names}")]
    if said["nccl"]:
        findings.append(right("NCCL", str(said["nccl_version"])))
    else:
        findings.append(wrong("NCCL", "torch has none", breaks=breaks, remedy=other_build))
    if said["apart"]:
        pairs = ", ".join(f"{i} to {j}" for i, j in said["apart"][:4])
        says = (
            f"no direct access from GPU {pairs}: messages between them go through the host, which"
            " is slower"
        )
        findings.append(right("peer access", says))
    elif len(gpus) > 1:
        findings.append(right("peer access", "every GPU reaches every other"))
    return findings


CHECKS = (
    Check("packages", packages, _ALL),
    Check("widgets", widgets, _WIDGETS_BREAK),
    Check("torch", torch, _ALL),
)
