"""A program that logs a run and its resumption with one of the real trackers, offline, and prints
what its package has kept, as JSON: `tracker_program.py NAME FOLDER`.
"""

import json
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.observe.trackers import Comet, MLflow, Trackio, Wandb
from agentrl.protocols import EpisodeSample

SAMPLE = EpisodeSample("t/0/0", "t", "terminated", 1.0, True, "user: P . O\n\nassistant: left")
TRACKERS: dict[str, Any] = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio, "comet": Comet}
_BLOCK_BYTES = 32768


def log(name: str, run: Path) -> None:
    """Log three steps, a late evaluation and an episode, in each of two processes of a run."""
    settings = TRACKERS[name].Config(project="lakes", group="four", tags=("a", "b=c"))
    for launch, how in enumerate(("stopped", "completed")):
        tracker = TRACKERS[name](run, {"seed": launch, "trainer.lr": 1e-3}, settings)
        for step in range(10 * launch, 10 * launch + 3):
            tracker.log(step, {"reward": step, "reward/environment": 0.5, "eval/hard/pass@4": 1.0})
        tracker.log(10 * launch, {"eval/success": 0.5})
        tracker.log_samples("held_out", 10 * launch, [SAMPLE])
        tracker.end(how, "why")


def wandb(run: Path) -> dict[str, Any]:
    """The rows of its offline files, which hold records of a log of LevelDB's kind."""
    from wandb import teardown
    from wandb.proto.wandb_internal_pb2 import Record

    teardown()  # until then, its own process may hold back the end of a file
    found: dict[str, Any] = {"reward": [], "eval/success": [], "runs": [], "exits": []}
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = Record.FromString(data)
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for metric in ("reward", "eval/success"):
                if metric in row:
                    found[metric].append([row["step"], row[metric]])
            if record.WhichOneof("record_type") == "run":
                found["runs"].append([record.run.run_id, record.run.project, *record.run.tags])
            if record.WhichOneof("record_type") == "exit":
                found["exits"].append(record.exit.exit_code)
    found["tables"] = len(list(run.glob("wandb/offline-run-*/files/media/table/samples/*.json")))
    return found


def _log_records(data: bytes) -> Iterator[bytes]:
    at, part = 7, b""  # after the header
    while at + 7 <= len(data):
        if (left := _BLOCK_BYTES - at % _BLOCK_BYTES) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield part
            part = b""


def mlflow(run: Path) -> dict[str, Any]:
    """What its store has."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("lakes")
    (kept,) = client.search_runs([experiment.experiment_id])
    history = {
        name: [[one.step, one.value] for one in client.get_metric_history(kept.info.run_id, name)]
        for name in kept.data.metrics
    }
    return {
        **{name.replace("/", "."): sorted(values) for name, values in history.items()},
        "status": kept.info.status,
        "tags": {name: kept.data.tags.get(name) for name in ("a", "b", "ended", "changed.seed")},
        "files": [one.path for one in client.list_artifacts(kept.info.run_id, "samples")],
    }


def trackio(run: Path) -> dict[str, Any]:
    """What its database has."""
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("lakes")
    rows = SQLiteStorage.get_logs("lakes", name)
    return {
        metric: [[row["step"], row[metric]] for row in rows if metric in row]
        for metric in ("reward", "eval/success", "eval/hard/pass@4")
    } | {"tables": sum("samples/held_out" in row for row in rows)}


def comet(run: Path) -> dict[str, Any]:
    """What its archives have, which `comet upload` takes."""
    found: dict[str, Any] = {"reward": [], "eval/success": [], "files": [], "keys": []}
    for path in run.glob("comet/*.zip"):
        found["keys"].append(path.name.partition("-")[0])
        with zipfile.ZipFile(path) as archive:
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        for payload in (message["payload"] for message in messages):
            metric = payload.get("metric") or {}
            if metric.get("metricName") in found:
                found[metric["metricName"]].append([metric["step"], metric["metricValue"]])
            name = (payload.get("additional_params") or {}).get("fileName") or ""
            if name.startswith("samples_"):
                found["files"].append(name)
    return {name: sorted(values) for name, values in found.items()}


if __name__ == "__main__":
    log(sys.argv[1], Path(sys.argv[2]))
    kept = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio, "comet": comet}[sys.argv[1]]
    print("KEPT " + json.dumps(kept(Path(sys.argv[2]))))
