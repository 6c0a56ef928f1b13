"""One table of the runs that layouts.sbatch started: python source_code/slurm/table.py FOLDER LAYOUT…"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any


def row(folder: Path) -> str:
    """Last validation loss (nats a token) and speed, from the run's metrics.jsonl."""
    metrics = folder / "metrics.jsonl"
    records = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )
    last = {record["event"]: record for record in records}
    if "validation" not in last:
        return f"| {folder.name} | did not finish | |"
    return f"| {folder.name} | {last['validation']['loss']:.3f} | {speed(records):,.0f} |"


def speed(records: list[dict[str, Any]]) -> float:
    """Tokens a second of the whole run, from the records of its parts, each with its own speed."""
    parts = [record for record in records if record["event"] == "train"]
    tokens = pairwise([0, *(part["tokens"] for part in parts)])
    seconds = sum(
        (e - b) / part["tokens_per_s"] for (b, e), part in zip(tokens, parts, strict=True)
    )
    return parts[-1]["tokens"] / seconds


def main() -> None:
    results, *layouts = sys.argv[1:]
    print("| layout | validation loss | tokens a second |\n|---|---|---|")
    for layout in layouts:
        print(row(Path(results) / layout))


if __name__ == "__main__":
    main()
