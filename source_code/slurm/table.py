"""Print one table of the runs that layouts.sbatch has started.

python source_code/slurm/table.py FOLDER LAYOUT…
"""

import json
import sys
from pathlib import Path
from typing import Any


def row(folder: Path) -> str:
    """Return last validation loss (nats a token) and speed, from the run's metrics.jsonl."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    last = {record["event"]: record for record in records}
    if "validation" not in last:
        return f"| {folder.name} | did not finish | |"
    return f"| {folder.name} | {last['validation']['loss']:.3f} | {speed(records):,.0f} |"


def speed(records: list[dict[str, Any]]) -> float:
    """Return tokens a second of the whole run, from the records of its parts."""
    seconds = 0.0
    tokens = 0
    for record in records:
        if record["event"] == "train":
            # A record has the tokens so far, and the speed since the record before.
            seconds += (record["tokens"] - tokens) / record["tokens_per_s"]
            tokens = record["tokens"]
    return tokens / seconds


def main() -> None:
    results, *layouts = sys.argv[1:]
    print("| layout | validation loss | tokens a second |\n|---|---|---|")
    for layout in layouts:
        print(row(Path(results) / layout))


if __name__ == "__main__":
    main()
