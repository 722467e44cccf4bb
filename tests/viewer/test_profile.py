"""`agentrl profile`: known times are attributed exactly, and the trace has every span."""

import asyncio
import json
from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.files.durable import unfinished
from agentrl.observe.profiler import Profiler
from agentrl.observe.trace_file import Slice, TraceFile, read_trace
from agentrl.testing.made_up_run import BEGIN, MadeUpRun
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.live_profile import record_live
from agentrl.viewer.profile import busy_table, profile


@pytest.fixture
def made(tmp_path):
    run = MadeUpRun(tmp_path / "run", groups=2, members=3)
    run.begin()
    for _ in range(3):
        run.step()
    return run


def printed(made, steps=None, trace=None) -> str:
    console = Console(file=StringIO(), width=120)
    profile(made.folder, console, steps, trace)
    return console.file.getvalue()


def test_the_table_divides_the_time_among_the_sets_of_busy_resources(made):
    table = printed(made).split("\n\n")[0].splitlines()[1:]
    seconds = {" ".join(row[:-2]): float(row[-2]) for row in map(str.split, table)}
    assert seconds["all"] == pytest.approx(30, abs=0.01)
    assert seconds["trainer"] == pytest.approx(9, abs=0.01)
    assert seconds["weights"] == pytest.approx(3, abs=0.01)
    assert sum(seconds.values()) == pytest.approx(2 * seconds["all"], abs=0.06)


def test_single_steps_can_be_chosen_and_unknown_ones_are_named(made):
    assert "10.00" in printed(made, (1, 1))
    with pytest.raises(ConfigError, match="steps 0 to 2 were timed"):
        printed(made, (7, 9))
    (made.folder / "timeline.jsonl").unlink()
    with pytest.raises(ConfigError, match="no step was timed"):
        printed(made)


def test_the_trace_has_every_phase_episode_and_turn_and_no_two_episodes_on_one_track_at_once(
    made, tmp_path
):
    printed(made, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and isinstance(event["pid"], int) for event in spans)
    trained = [event for event in spans if event["name"] == "train"]
    assert [(event["ts"], event["dur"]) for event in trained] == [
        (pytest.approx((10 * step + 6) * 1e6), pytest.approx(3e6)) for step in range(3)
    ]
    episodes = [event for event in spans if event["name"].startswith("train-")]
    assert len(episodes) == 3 * 2 * 3
    assert sum(event["name"] == "model" for event in spans) == 3 * len(episodes)
    for track in {event["tid"] for event in episodes}:
        own = sorted(
            (event["ts"], event["ts"] + event["dur"]) for event in episodes if event["tid"] == track
        )
        assert all(later[0] >= earlier[1] - 1 for earlier, later in pairwise(own))
    model = next(event for event in spans if event["name"] == "model")
    around = next(
        event
        for event in episodes
        if event["tid"] == model["tid"] and event["ts"] <= model["ts"] + 1
    )
    assert model["dur"] == pytest.approx(0.8 * 5 / 3 * 1e6, rel=1e-3)
    assert around["dur"] == pytest.approx(5e6, rel=1e-3)


def test_a_range_of_steps_that_is_none_is_refused(made, agentrl):
    done = agentrl("profile", str(made.folder), "--steps", "first")
    assert (done.returncode, "no range of steps" in done.stderr) == (2, True)
    assert agentrl("profile", str(made.folder), "--steps", "0:1").returncode == 0


def test_of_a_run_that_has_ended_nothing_live_can_be_recorded(made, agentrl):
    done = agentrl("profile", str(made.folder), "--live", "5")
    assert (done.returncode, "does not run on this machine" in done.stderr) == (2, True)
    done = agentrl("profile", str(made.folder), "--live", "5", "--steps", "1")
    assert (done.returncode, "leave out --steps" in done.stderr) == (2, True)


def test_a_live_run_is_asked_by_a_file_and_its_refusal_is_shown(made, monkeypatch):
    monkeypatch.setattr("agentrl.observe.profiler._TICK_SECONDS", 0.01)
    monkeypatch.setattr(RunFolder, "status", lambda self: {"live": True})
    with Profiler(made.folder, always=False):
        trace = asyncio.run(record_live(made.folder, 0.05))
        assert read_trace(trace).end > 0
    with Profiler(made.folder, always=True):
        with pytest.raises(ConfigError, match="another trace is recorded"):
            asyncio.run(record_live(made.folder, 0.05))
        assert not list((made.folder / "profile").glob("*.request"))


def test_a_request_that_is_still_written_is_not_answered(made, monkeypatch):
    monkeypatch.setattr("agentrl.observe.profiler._TICK_SECONDS", 0.01)
    monkeypatch.setattr(RunFolder, "status", lambda self: {"live": True})
    (made.folder / "profile").mkdir()
    part = unfinished(made.folder / "profile" / "late.request")
    part.write_text("60\n")
    with Profiler(made.folder, always=False):
        trace = asyncio.run(record_live(made.folder, 0.05))
    assert read_trace(trace).end > 0
    assert sorted((made.folder / "profile").iterdir()) == [part, trace]


def test_a_request_that_no_one_waits_for_any_more_is_taken_back(made, monkeypatch):
    monkeypatch.setattr(RunFolder, "status", lambda self: {"live": next(answers)})
    answers = iter([True, True, False])
    with pytest.raises(ConfigError, match="ended before it had recorded"):
        asyncio.run(record_live(made.folder, 60))
    assert not list((made.folder / "profile").iterdir())


def test_sets_with_next_to_no_time_are_shown_together():
    console = Console(file=StringIO(), width=100)
    busy = {frozenset({"engine"}): 90.0, frozenset[str](): 9.97} | {
        frozenset({f"role {n}"}): 0.01 for n in range(3)
    }
    console.print(busy_table(busy, 100.0))
    rows = [line.split() for line in console.file.getvalue().splitlines()[1:]]
    assert rows == [
        ["engine", "90.00", "90.0%"],
        ["none", "of", "these", "9.97", "10.0%"],
        ["3", "other", "sets", "0.03", "0.0%"],
        ["all", "100.00", "100.0%"],
    ]


def traced(made):
    """A trace of what happened in the run's second step, in which rewards took two seconds."""
    begin = BEGIN + 10
    with TraceFile(made.folder / "profile" / "known.pftrace") as file:
        file.slice(Slice("phases", "loop", "rollout 1", begin, begin + 6))
        file.slice(Slice("engine 0", "0", "generate", begin, begin + 4))
        file.slice(Slice("rewards", "0", "judge", begin + 4, begin + 6))
        file.slice(Slice("trainer 0", "0", "step", begin + 6, begin + 9))
        file.slice(Slice("controller", "0", "callbacks", begin + 9, begin + 10))
        for group, name, percent in (
            ("CPU", "[red]env[/red] 4711", 80.0),
            ("controller", "event loop busy", 10.0),
            ("profiler", "tracing", 2.0),
        ):
            file.level(group, name, "%", begin, percent)
            file.level(group, name, "%", begin + 10, 0.0)


def test_a_trace_shows_rewards_the_controller_workers_and_what_recording_took(made):
    traced(made)
    shown = printed(made)
    seconds = {
        " ".join(row[:-2]): row[-2]
        for row in map(str.split, shown.split("\n\n")[0].splitlines()[1:])
    }
    assert seconds == {
        "engine": "4.00",
        "trainer": "3.00",
        "rewards": "2.00",
        "controller": "0.80",
        "all": "9.80",
    }
    assert "sampled in 40.0% of the time" in shown
    assert "recording took 0.20 s (2.00%)" in shown
    assert ["[red]env[/red]", "4711", "CPU", "80.0%"] in [
        line.split() for line in shown.splitlines()
    ]
    assert "only rewards are computed" in shown
    assert "9.80" in printed(made, (1, 1))
    assert "known.pftrace" not in printed(made, (0, 0))
