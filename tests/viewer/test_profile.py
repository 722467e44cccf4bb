"""`agentrl profile`: known times are attributed exactly, and the trace has every span."""

import json
from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer.profile import profile


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


def test_the_trace_has_every_phase_episode_and_turn_and_no_two_episodes_on_one_track_at_once(made, tmp_path):
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
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in episodes if event["tid"] == track)
        assert all(later[0] >= earlier[1] - 1 for earlier, later in pairwise(own))
    model = next(event for event in spans if event["name"] == "model")
    around = next(event for event in episodes if event["tid"] == model["tid"] and event["ts"] <= model["ts"] + 1)
    assert model["dur"] == pytest.approx(0.8 * 5 / 3 * 1e6, rel=1e-3)
    assert around["dur"] == pytest.approx(5e6, rel=1e-3)


def test_a_range_of_steps_that_is_none_is_refused(made, agentrl):
    done = agentrl("profile", str(made.folder), "--steps", "first")
    assert (done.returncode, "no range of steps" in done.stderr) == (2, True)
    assert agentrl("profile", str(made.folder), "--steps", "0:1").returncode == 0
