"""Runs pieces one after another, each in a process of its own with a time limit: running out of
memory, a crash or a hang of one is that piece's failure, and the next one begins.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.battery.piece import Device, Piece, Place, Result, read_result, with_files

ROOT = Path(__file__).resolve().parents[2]
"""The source tree."""
COMMAND = Path(__file__).resolve().parents[1] / "gpu.py"
_LOG_CHARACTERS = 6000
"""How much of a failed piece's log is in the report, from its end."""


def run_piece(piece: Piece, place: Place, gpus: int, seconds: float) -> Result:
    """Answer a piece, on a machine with so many GPUs."""
    obstacle = piece.obstacle(place.device, gpus)
    if obstacle is not None:
        return Result(piece.name, "skipped", obstacle)
    folder = place.folder / piece.name
    folder.mkdir(parents=True, exist_ok=True)
    answered, log = folder / "result.json", folder / "log.txt"
    answered.unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, str(COMMAND), "--answer", piece.name, str(folder)]
    ended = _run([*command, "--device", place.device], log, seconds)
    result = read_result(piece, answered, ended)
    if result.verdict == "failed":
        result = replace(result, log=log.read_text(errors="replace")[-_LOG_CHARACTERS:])
    answered.unlink(missing_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)  # of a piece that was killed
    result = replace(result, seconds=round(time.monotonic() - began, 1))
    return with_files(result, folder, place.folder)


def run_all(pieces: Sequence[Piece], place: Place, gpus: int, seconds: float) -> list[Result]:
    """Answer all of them, and print each result as it comes."""
    results = []
    for piece in pieces:
        results.append(run_piece(piece, place, gpus, seconds))
        print(line_of(piece, results[-1]), flush=True)
    return results


def line_of(piece: Piece, result: Result) -> str:
    """A result for the terminal. Of a skipped piece, it says what the piece would show."""
    if result.verdict == "skipped":
        return f" skipped  {piece.name}: {result.reason}. It would show: {piece.purpose}"
    reason = f": {result.reason}" if result.reason else ""
    return f"{result.verdict:>8}  {piece.name}, {result.seconds:.0f} s{reason}"


def environment(device: Device) -> dict[str, str]:
    """Of a piece's process: it can import the source tree, and sees no GPU if it uses a CPU."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
    added |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **added}


def _run(command: Sequence[str], log: Path, seconds: float) -> str:
    """Run a command to its end; returns how it ended, in words."""
    device: Device = "cpu" if command[-1] == "cpu" else "cuda"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(device),
            cwd=ROOT,  # processes that are spawned would import modules that lie in another
            start_new_session=True,  # ranks and engines are killed with it
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"it did not end within {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"its process ended with {code}: {lines[-1] if lines else 'it printed nothing'}"
