"""Renames every metric of a run, as a later version of agentrl might."""

import json
from pathlib import Path


def rename_metrics(run: Path) -> None:
    """Give every metric in the run's `metrics.jsonl` another name."""
    path = run / "metrics.jsonl"
    renamed: list[str] = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        metrics = {f"renamed/{name}": value for name, value in row.items() if name != "step"}
        renamed.append(json.dumps({"step": row["step"], **metrics}) + "\n")
    path.write_text("".join(renamed))
