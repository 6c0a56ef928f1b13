"""``python -m course_pp checkpoint``: inspect, verify, compare, export and import."""

import argparse
import json
from pathlib import Path

HELP = "inspect, verify, compare, export and import checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``checkpoint`` understands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    whole_or_run = "a checkpoint, or a directory of several, of which the newest whole one is taken"
    inspect = actions.add_parser("inspect", help="list the tensors, and what else is inside")
    inspect.add_argument("path", type=Path, help=whole_or_run)
    inspect.add_argument(
        "--json", action="store_true", help="print it as JSON, with every piece of every tensor"
    )
    verify = actions.add_parser("verify", help="read every byte and compare it with the manifest")
    verify.add_argument(
        "path", type=Path, help="a checkpoint, or a directory of several, which are all verified"
    )
    compare = actions.add_parser(
        "diff", help="what differs between two; exit code 1 if something does"
    )
    compare.add_argument("first", type=Path, help=whole_or_run)
    compare.add_argument("second", type=Path, help=whole_or_run)
    export = actions.add_parser("export", help="write safetensors and config.json for transformers")
    export.add_argument("path", type=Path, help=whole_or_run)
    export.add_argument("directory", type=Path, help="a new directory")
    export.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="convert (the checkpoint's own)"
    )
    take = actions.add_parser("import", help="make a checkpoint of a Hugging Face model directory")
    take.add_argument("source", type=Path, help="a directory with config.json and .safetensors")
    take.add_argument("root", type=Path, help="where step_00000000 is to be")


def run(arguments: argparse.Namespace) -> int | None:
    """Do one of them; return 1 if two checkpoints differ."""
    from course_pp.training.checkpoint import export_hf, import_hf

    if arguments.action == "inspect":
        _inspect(arguments.path, arguments.json)
    elif arguments.action == "verify":
        _verify(arguments.path)
    elif arguments.action == "diff":
        return _diff(arguments.first, arguments.second)
    elif arguments.action == "export":
        import torch

        dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
        print(export_hf(arguments.path, arguments.directory, dtype))
    else:
        print(import_hf(arguments.source, arguments.root).path)
    return None


def _inspect(path: Path, as_json: bool) -> None:
    from course_pp.training.checkpoint.opening import contents, open_checkpoint

    opened = open_checkpoint(path)
    entries = contents(opened.path)
    if as_json:
        tensors = {}
        for entry in entries:
            tensors[entry.key] = {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": entry.shape,
                "pieces": [vars(piece) for piece in entry.pieces],
            }
        found = {"path": str(opened.path), "state": opened.state, "tensors": tensors}
        print(json.dumps(found, indent=1))
        return

    rows: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "bytes", "files")]
    n_bytes = 0
    for entry in entries:
        n_bytes += entry.n_bytes
        shape = " × ".join(map(str, entry.shape)) or "scalar"
        dtype = str(entry.dtype).removeprefix("torch.")
        files = sorted({piece.file for piece in entry.pieces})
        rows.append((entry.key, shape, dtype, f"{entry.n_bytes:,}", ", ".join(files)))
    sizes = [f"{name}={size}" for name, size in opened.state["layout"].items() if size > 1]
    layout = " ".join(sizes) or "one process"
    print(f"{opened.path}: step {opened.state['step']}, written at {layout}")
    for name in ("config", "extra"):
        if opened.state[name]:
            print(f"{name}: {json.dumps(opened.state[name])}")
    print(f"\n{_table(rows)}\n\n{len(entries):,} tensors, {n_bytes:,} bytes")


def _verify(path: Path) -> None:
    from course_pp.training.checkpoint.directory import is_checkpoint, step_directories
    from course_pp.training.checkpoint.manifest import CheckpointError, spelled, verify

    paths = [path] if is_checkpoint(path) else step_directories(path)
    if not paths:
        raise CheckpointError(f"{path} holds no checkpoint")
    damaged = []
    for path in paths:
        problems = verify(path)
        if problems:
            damaged.append(spelled(path, problems))
        else:
            print(f"{path}: whole")
    if damaged:
        raise CheckpointError("; ".join(damaged))


def _diff(first: Path, second: Path) -> int:
    from course_pp.training.checkpoint import diff

    differences = diff(first, second)
    if not differences:
        print("no difference")
        return 0
    rows: list[tuple[str, ...]] = [("what", "how", "largest difference")]
    for found in differences:
        largest = "" if found.max_abs is None else f"{found.max_abs:.3e}"
        rows.append((found.key, found.what, largest))
    print(_table(rows))
    return 1


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
