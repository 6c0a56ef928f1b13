"""One table of the runs that layouts.sbatch started: python source_code/slurm/table.py FOLDER LAYOUT…"""

import json
import sys
from pathlib import Path


def row(folder: Path) -> str:
    """Last validation loss (nats a token) and speed (tokens a second), from the run's metrics.jsonl."""
    metrics = folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    last = {record["event"]: record for record in records}
    if "validation" not in last:
        return f"| {folder.name} | did not finish | |"
    return f"| {folder.name} | {last['validation']['loss']:.3f} | {last['train']['tokens_per_s']:,.0f} |"


def main() -> None:
    results, *layouts = sys.argv[1:]
    print("| layout | validation loss | tokens a second |\n|---|---|---|")
    for layout in layouts:
        print(row(Path(results) / layout))


if __name__ == "__main__":
    main()
