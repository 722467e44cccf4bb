"""`agentrl profile`: the use of a run's time, as a table and as a trace for Perfetto.

By default, it is computed from times that every run records (`timeline.jsonl`, and those of turns
in `trajectories/`). A run with `observe.profile` also records a trace, which has more: evaluations,
failed episodes, the ranks of the trainer, the controller itself, and the load of workers and GPUs.
"""

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.errors import ConfigError
from agentrl.files.durable import write_whole
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.timing import Window, advice, window_of
from agentrl.viewer.traced import TracedTime, advice_on, newest_trace

_ALL_EPISODES = 1 << 30
_MAX_TABLE_ROWS = 14
"""Most rows of a table of busy sets."""
_LEAST_SHARE = 0.0005
"""Sets with a smaller share of the time are shown together."""
_LOOP, _EPISODES = 1, 2  # the trace's "processes"


def profile(
    folder: Path, console: Console, steps: tuple[int, int] | None, trace: Path | None
) -> None:
    """Print where the time of some steps went, by default of all, and write what episodes did in
    Chrome's JSON format, which https://ui.perfetto.dev opens.

    Raises:
        ConfigError: none of these steps was timed.
    """
    run = RunFolder(folder.name, folder)
    ended = [
        (one["step"], one["begin"], one["end"]) for one in run.phases() if one["end"] is not None
    ]
    during = [
        (begin, end) for step, begin, end in ended if steps is None or steps[0] <= step <= steps[1]
    ]
    if (
        trace is None
        and during
        and (traced := newest_trace(folder, None if steps is None else during)) is not None
    ):
        show_traced(traced, console, run)
        return
    index = EpisodeIndex(run)
    reader = EpisodeReader(run, index)
    window = window_of(run, index, reader, steps, _ALL_EPISODES)
    if window is None:
        known = sorted({one["step"] for one in run.phases()})
        there = f"steps {known[0]} to {known[-1]} were" if known else "no step was"
        raise ConfigError(
            f"there is nothing to profile in {folder}: {there} timed (timeline.jsonl)"
        )
    console.print(busy_table(window.busy, window.end - window.begin))
    console.print(_describe_shares(window), highlight=False)
    failed = index.failed_layers(window.phases[0]["step"], window.phases[-1]["step"])
    for text in advice(window.busy, run.settings(), failed):
        console.print(f"[yellow]•[/yellow] {text}", highlight=False, soft_wrap=True)
    if trace is not None:
        episodes = _read_episodes(reader, index, window)
        write_whole(trace, json.dumps(trace_of(window, episodes)))
        console.print(
            f"wrote {trace}: open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True
        )


def show_traced(traced: TracedTime, console: Console, run: RunFolder) -> None:
    """Print what a trace of a run says."""
    busy = traced.busy
    console.print(busy_table(busy, traced.seconds))
    console.print(
        f"\ntokens are sampled in {traced.sampling:.1%} of the time ({traced.answers:,.1f} answers"
        f" at once on average); the controller's own work takes {traced.controller:.1%}; recording"
        f" took {traced.tracing:,.2f} s"
        f" ({traced.tracing / max(traced.end - traced.begin, 1e-9):.2%}), which is subtracted\n",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("worker")
    table.add_column("")
    table.add_column("share", justify="right")
    for name, kind, percent in traced.workers():
        table.add_row(escape(name), kind, f"{percent:.1f}%")
    console.print(table)
    console.print()
    for text in (*advice_on(busy), *advice(busy, run.settings())):
        console.print(f"[yellow]•[/yellow] {text}", highlight=False, soft_wrap=True)
    console.print(
        f"from {traced.path}: open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True
    )


def busy_table(busy: Mapping[frozenset[str], float], total: float) -> Table:
    """The time by set of busy resources; the shares add up to the whole."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("busy at the same time")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    rows = [
        (" + ".join(sorted(names)) or "none of these", seconds) for names, seconds in busy.items()
    ]
    kept = sum(seconds >= _LEAST_SHARE * total for _, seconds in rows[:_MAX_TABLE_ROWS])
    if len(rows) > kept + 1:
        rows = [
            *rows[:kept],
            (f"{len(rows) - kept} other sets", sum(seconds for _, seconds in rows[kept:])),
        ]
    for name, seconds in rows:
        table.add_row(name, f"{seconds:,.2f}", f"{seconds / max(total, 1e-9):.1%}")
    table.add_row("[bold]all[/bold]", f"[bold]{total:,.2f}[/bold]", "[bold]100.0%[/bold]")
    return table


def trace_of(window: Window, episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The trace: the loop's phases on one track, and episodes with their turns on as many as ran at
    once.
    """
    events = [
        _track_name("process_name", _LOOP, 0, "agentrl loop"),
        _track_name("process_name", _EPISODES, 0, "episodes"),
        _track_name("thread_name", _LOOP, 1, "phases of a step"),
    ]
    for one in window.phases:
        begin, seconds = one["begin"] - window.begin, (one["end"] or one["begin"]) - one["begin"]
        events.append(_span((_LOOP, 1), one["phase"], begin, seconds, {"step": one["step"]}))
    for episode, track in _assign_tracks(episodes):
        place, about = (
            (_EPISODES, track),
            {name: episode[name] for name in ("score", "success", "agent")},
        )
        begin = episode["started"] - window.begin
        events.append(_span(place, episode["id"], begin, episode["seconds"], about))
        for number, (asked, generated, waited) in enumerate(episode["turns"]):
            begin = asked - window.begin
            events.append(_span(place, "model", begin, generated, {"turn": number}))
            events.append(_span(place, "environment", begin + generated, waited, {"turn": number}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _read_episodes(
    reader: EpisodeReader, index: EpisodeIndex, window: Window
) -> list[dict[str, Any]]:
    files = sorted({(row["step"], row["kind"]) for row in index.in_play(window.begin, window.end)})
    found = [episode for step, kind in files for episode in reader.turns_of_step(step, kind)]
    return [
        one
        for one in found
        if one["started"] < window.end and one["started"] + one["seconds"] > window.begin
    ]


def _assign_tracks(episodes: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Each episode with the first track that is free when it begins."""
    free: list[int] = []
    playing: list[tuple[float, int]] = []
    tracks = 0
    for episode in sorted(episodes, key=lambda one: one["started"]):
        while playing and playing[0][0] <= episode["started"]:
            heapq.heappush(free, heapq.heappop(playing)[1])
        if free:
            track = heapq.heappop(free)
        else:
            tracks += 1
            track = tracks
        heapq.heappush(playing, (episode["started"] + episode["seconds"], track))
        yield episode, track


def _span(
    place: tuple[int, int], name: str, begin: float, seconds: float, about: dict[str, Any]
) -> dict[str, Any]:
    micros = {"ts": round(1e6 * begin, 1), "dur": round(1e6 * seconds, 1)}
    return {
        "name": name,
        "cat": "agentrl",
        "ph": "X",
        "pid": place[0],
        "tid": place[1],
        **micros,
        "args": about,
    }


def _track_name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}


def _describe_shares(window: Window) -> str:
    total = max(window.end - window.begin, 1e-9)

    def share(name: str) -> float:
        return sum(seconds for names, seconds in window.busy.items() if name in names) / total

    answers = sum(end - begin for begin, end in window.model) / total
    other_intervals = window.lanes.get("rest of the loop", ())
    other = sum(end - begin for begin, end in other_intervals) / total
    return (
        f"\ntokens are sampled in {share('engine'):.1%} of the time ({answers:,.1f} answers at once"
        f" on average), and trained on in {share('trainer'):.1%}; the loop itself (records,"
        f" checkpoints) takes {other:.1%}\n"
    )
