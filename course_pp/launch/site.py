"""What one cluster calls its things: partition, account, GPUs, modules. Kept in one file, never in a notebook."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = "site.toml"
_ROOT_MARKS = (".git", "pyproject.toml")
# Minutes, minutes:seconds, hours:minutes:seconds, and days before a dash.
_TIME_LIMIT = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}|UNLIMITED")


@dataclass(frozen=True)
class Site:
    """How jobs are submitted here. Every field has a default with which most clusters answer.

    Attributes:
        partition, account: of the jobs; empty takes the cluster's own default.
        cpu_partition: of jobs without GPUs, such as those of ``on_ranks`` over gloo; empty takes ``partition``.
        time_limit: of a job, as Slurm writes it (``"00:10:00"``); empty asks for little more than the run's own limit,
            and for ten minutes of further calls of ``on_ranks``.
        gres: how GPUs are asked for. ``"gpu:{n}"`` becomes ``--gres=gpu:2``; what begins with a dash, such as
            ``"--gpus-per-node={n}"``, is taken as it is; empty asks for none.
        gpus_per_node: at most so many are asked for on a node; None asks the cluster.
        cpus_per_rank: cores asked for, a rank.
        setup: lines of bash that a task runs first, for example ``module load cuda``; one that fails ends it.
        container: goes before the command, for example ``apptainer exec --nv course.sif``.
        python: the interpreter on the nodes; empty is the one that runs here.
        options: more options of srun.
        folder: a folder that all nodes see.
        keep_s: seconds for which the job of ``on_ranks`` waits for the next call; 0 takes a new job for each.
    """

    partition: str = ""
    cpu_partition: str = ""
    account: str = ""
    time_limit: str = ""
    gres: str = "gpu:{n}"
    gpus_per_node: int | None = None
    cpus_per_rank: int = 1
    setup: tuple[str, ...] = ()
    container: str = ""
    python: str = ""
    options: tuple[str, ...] = ()
    folder: str = "~/.cache/course_pp"
    keep_s: int = 300


def load_site(environ: Mapping[str, str] | None = None) -> Site:
    """Read the settings of this cluster; return the defaults if there is no file.

    The first of these is read: ``$COURSE_PP_SITE``; site.toml here or in a folder above, up to the root of the
    repository; ``~/.config/course_pp/site.toml``.

    Raises:
        FileNotFoundError: ``$COURSE_PP_SITE`` names no file.
        ValueError: the file is no TOML, or a key or the type of a value is wrong.
    """
    environ = os.environ if environ is None else environ
    if named := environ.get("COURSE_PP_SITE"):
        if not Path(named).is_file():
            raise FileNotFoundError(f"COURSE_PP_SITE is {named!r}, which is no file. Correct it, or unset it.")
        return _read(Path(named))
    for file in _places():
        if file.is_file():
            return _read(file)
    return Site()


def _places() -> list[Path]:
    found, here = [], Path.cwd()
    for folder in (here, *here.parents):
        found.append(folder / _FILE)
        if any((folder / mark).exists() for mark in _ROOT_MARKS):
            break
    else:
        # Outside any repository, a file of the same name further up is somebody else's.
        found = found[:1]
    with contextlib.suppress(RuntimeError):  # a user without a home
        found.append(Path.home() / ".config" / "course_pp" / _FILE)
    return found


def _read(file: Path) -> Site:
    try:
        values = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}.") from None
    fields = {field.name: field for field in dataclasses.fields(Site)}
    return Site(**{key: _checked(file, key, value, fields) for key, value in values.items()})


def _checked(file: Path, key: str, value: Any, fields: Mapping[str, dataclasses.Field[Any]]) -> Any:
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}."
        raise ValueError(f"{file} sets {key!r}, which is no setting; {remedy}")
    kind = str(fields[key].type)
    if kind.startswith("int"):
        least = 1 if key == "cpus_per_rank" else 0
        if type(value) is not int or value < least:
            raise ValueError(f"{file}: {key} is {value!r}; it must be a whole number, at least {least}.")
        return value
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f'{file}: {key} is {value!r}; it must be a list of strings, for example ["…"].')
        return tuple(value)
    if not isinstance(value, str):
        raise ValueError(f'{file}: {key} is {value!r}; it must be a string: {key} = "{value}".')
    if key == "python":
        return os.path.expanduser(value)
    if key == "gres":
        _refuse_bad_gres(file, value)
    if key == "time_limit" and value and not _TIME_LIMIT.fullmatch(value):
        raise ValueError(
            f'{file}: time_limit is {value!r}; it must be a time as Slurm writes it, such as "00:10:00" or '
            '"1-12:00:00", or empty.'
        )
    return value


def _refuse_bad_gres(file: Path, gres: str) -> None:
    try:
        has_place = gres.format(n=1) != gres.format(n=2)
    except (KeyError, IndexError, ValueError):
        has_place = False
    if gres and not has_place:
        raise ValueError(
            f'{file}: gres is {gres!r}; the number of GPUs goes where {{n}} stands: "gpu:{{n}}" or '
            '"--gpus-per-node={n}". To ask for none, leave it empty.'
        )
