"""The command of the battery: `benchmarks/gpu.py`."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.battery.machine import (
    machine_facts,
    source_version,
    torch_facts,
    versions,
    without_names,
)
from benchmarks.battery.piece import SECONDS, Findings, Place, answer, missing_modules
from benchmarks.battery.pieces import PIECES
from benchmarks.battery.report import counts, report_of, write_report
from benchmarks.battery.runner import COMMAND, ROOT, environment, run_all

_FACTS_SECONDS = 120.0


def gpus_here() -> dict[str, Any]:
    """`torch_facts`, from a process of its own, or why there are none."""
    if missing_modules(["torch"]):
        return {"gpus": [], "cuda": "torch is not installed"}
    command = [sys.executable, str(COMMAND), "--facts"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_FACTS_SECONDS,
            check=True,
            env=environment("cuda"),
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        return {"gpus": [], "cuda": f"torch cannot say: {lines[-1]}"}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def run_battery(given: argparse.Namespace) -> int:
    """Run the chosen pieces, and write the report; returns the exit status."""
    pieces = [piece for piece in PIECES if not given.only or piece.name in given.only]
    given.into.mkdir(parents=True, exist_ok=True)
    seen = gpus_here()
    names = [gpu["name"] for gpu in seen["gpus"]]
    print(f"{len(pieces)} pieces on {given.device}; GPUs: {', '.join(names) or 'none'}", flush=True)
    place = Place(given.device, given.into.absolute())
    results = run_all(pieces, place, len(names), given.seconds)
    facts = {
        "source": source_version(ROOT),
        "device": given.device,
        "machine": {**seen, **machine_facts()},
        "versions": versions(),
    }
    report = report_of(facts, pieces, results)
    page = write_report(given.into, json.loads(without_names(json.dumps(report), ROOT)))
    print(f"{counts(results)}. The report is {page}, the same as JSON {page.with_suffix('.json')}")
    return int(any(result.verdict == "failed" for result in results))


def main(description: str) -> int:
    """Run the battery, or a part of it in this process."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [piece.name for piece in PIECES]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PIECE", help="by default all")
    parser.add_argument("--into", type=Path, default=Path("build/gpu"), help="folder of the report")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of a piece")
    parser.add_argument("--list", action="store_true", help="say what the pieces are about")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answer", nargs=2, metavar=("PIECE", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.list:
        for piece in PIECES:
            print(f"{piece.name:>14}  {piece.purpose}")
        return 0
    if given.facts:
        print(json.dumps(torch_facts()))
        return 0
    if given.answer:
        name, folder = given.answer[0], Path(given.answer[1])
        code = next(piece.code for piece in PIECES if piece.name == name)
        findings = Findings(folder / "result.json")
        answer(code, Place(given.device, folder), findings)
        return 0
    return run_battery(given)
