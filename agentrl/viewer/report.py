"""`agentrl report`: a run as one HTML file to send to a colleague.

The file holds no program and names no other file: curves are drawings, and conversations unfold by
themselves. Whatever comes from a run is text (Jinja escapes it), and the file's own content
security policy forbids the rest. What environments draw is in frames without scripts, links and
requests.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from agentrl.errors import ConfigError
from agentrl.files.durable import write_whole
from agentrl.ledger.ledger import read_ledger
from agentrl.package.distribution import installed_version
from agentrl.settings.yaml_values import in_yaml
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex
from agentrl.viewer.evaluation_table import evaluation_table
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.report_curves import HEIGHT, WIDTH, curves_of
from agentrl.viewer.report_episodes import MAX_TEXT_CHARACTERS, episodes_to_read, shorten
from agentrl.viewer.timing import advice, window_of

_MAX_REASONS = 12
_HOW = {
    "completed": "is complete",
    "stopped": "was stopped",
    "failed": "failed",
    "killed": "was killed",
}
_MAX_TIMED_STEPS = 16
"""Steps, the newest, whose time is divided among resources."""


def write_report(folder: Path, into: Path) -> None:
    """Write the report of a run, which may still be running, into a file.

    Raises:
        ConfigError: the file's folder does not exist.
    """
    if not into.parent.is_dir():
        raise ConfigError(
            f"there is no folder {str(into.parent)!r} for the report: make it, or write -o"
            " ELSEWHERE"
        )
    page = files("agentrl.viewer")
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        page.joinpath("report.html").read_text()
    )
    style = Markup(page.joinpath("page", "style.css").read_text())
    text = made.render(
        style=style, longest=MAX_TEXT_CHARACTERS, width=WIDTH, height=HEIGHT, **_contents(folder)
    )
    write_whole(into, text.encode("utf-8", "replace").decode())


def _contents(folder: Path) -> dict[str, Any]:
    run = RunFolder(folder.resolve().name, folder)
    index = EpisodeIndex(run)
    reader = EpisodeReader(run, index)
    rows, status = run.metrics(), run.status()
    return {
        "name": run.name,
        "version": installed_version(),
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "state": _state(status, rows),
        "facts": _facts(rows, status, run),
        "warnings": [one["text"] for one in status["warnings"]],
        "curves": curves_of(rows),
        "evaluations": evaluation_table(rows),
        **_use_of_time(run, index, reader),
        **_fate_counts(run, index),
        "examples": list(episodes_to_read(index, reader)),
        **_config(run),
    }


def _state(status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    if status["live"]:
        return (
            f"The run goes on: step {status['step']}, {status['phase']}"
            if status["phase"]
            else "The run is starting"
        )
    if (ended := status["ended"]) is not None:
        goes_on = f" To go on: {ended['resume']}" if ended["resume"] else ""
        return f"The run {_HOW.get(ended['how'], 'ended')}: {ended['why'].rstrip('.')}.{goes_on}"
    if status["summary"]:
        return "The run has ended"
    if status["phase"]:
        return f"The run stopped in step {status['step']}, {status['phase']}"
    return "The run is not running" if rows else "The run is not running, and nothing was recorded"


def _facts(
    rows: Sequence[Mapping[str, Any]], status: Mapping[str, Any], run: RunFolder
) -> list[tuple[str, Any]]:
    trained = [row for row in rows if "reward" in row]
    # Recipes that learn from files make as many steps as they need.
    updates = [] if trained else [row for row in rows if "loss" in row]
    last: Mapping[str, Any] = trained[-1] if trained else {}
    success = last.get("success")
    settings = run.settings()
    return [
        (
            "steps",
            (
                f"{len(trained)} of {status['steps']}"
                if status["steps"] and not updates
                else len(updates or trained)
            ),
        ),
        ("reward", last.get("reward")),
        (
            "success in training",
            None if success is None or math.isnan(success) else f"{success:.1%}",
        ),
        ("environment", settings.get("env.name")),
        ("model", settings.get("model.name")),
        ("algorithm", settings.get("algorithm.name")),
        (
            "time of its steps",
            str(timedelta(seconds=round(sum(row.get("seconds", 0.0) for row in trained)))),
        ),
    ]


def _use_of_time(run: RunFolder, index: EpisodeIndex, reader: EpisodeReader) -> dict[str, Any]:
    steps = sorted({one["step"] for one in run.phases() if one["end"] is not None})[
        -_MAX_TIMED_STEPS:
    ]
    window = (
        window_of(run, index, reader, (steps[0], steps[-1]), _MAX_TIMED_STEPS) if steps else None
    )
    if window is None:
        return {"busy": [], "advice": [], "timed": None}
    total = max(window.end - window.begin, 1e-9)
    rows = [
        {
            "names": " + ".join(sorted(names)) or "none of these",
            "seconds": seconds,
            "share": seconds / total,
        }
        for names, seconds in window.busy.items()
    ]
    said = advice(window.busy, run.settings(), index.failed_layers(steps[0], steps[-1]))
    return {"busy": rows, "advice": said, "timed": (steps[0], steps[-1])}


def _fate_counts(run: RunFolder, index: EpisodeIndex) -> dict[str, Any]:
    choices = index.choices()
    ledger = run.path / "ledger.sqlite"
    if not ledger.exists():
        return {"fates": choices["fate"], "layers": choices["layer"], "reasons": []}
    with read_ledger(ledger) as reader:
        reasons = reader.reasons("episodes", _MAX_REASONS)
    return {"fates": choices["fate"], "layers": choices["layer"], "reasons": reasons}


def _config(run: RunFolder) -> dict[str, Any]:
    origins = run.origins()
    every = [
        (name, shorten(in_yaml(value)), origins.get(name, ""))
        for name, value in sorted(run.settings().items())
    ]
    changes = [
        (
            row["step"],
            row["config"],
            [f"{key}: {_describe_change(pair)}" for key, pair in row["changed"].items()],
        )
        for row in run.changes()
        if row["changed"]
    ]
    return {
        "changes": changes,
        "every": every,
        "chosen": [row for row in every if row[2] not in ("", "default")],
    }


def _describe_change(pair: Any) -> str:
    """`OLD → NEW`, of the two values of a setting."""
    values = pair if isinstance(pair, list) else [pair]  # the file may have been edited
    return " → ".join(shorten(str(value)) for value in values)
