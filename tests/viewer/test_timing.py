"""Where the time went: sets of busy resources, loads, and what follows from them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe.machine import MachineState
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.stage_graph import stage_graph
from agentrl.viewer.timing import (
    advice,
    bound_by,
    busy_sets,
    load,
    machine_lanes,
    timing,
    window_of,
)

spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: tuple(sorted(pair))),
    max_size=8,
)


def test_the_load_of_the_machine_is_its_mean_in_each_bin_or_else_what_was_sampled_last():
    states = [
        MachineState(at, cpu, 10, 40, 0.0, 8.0 * at, 5, {"GPU 0": cpu}, {"GPU 0": 0.5})
        for at, cpu in ((2.0, 0.2), (2.5, 0.4), (7.0, 1.0))
    ]
    lanes = {
        lane["name"]: lane for lane in machine_lanes(states, np.array([0.0, 2.0, 4.0, 6.0, 8.0]))
    }
    assert lanes["CPU"] == {
        "name": "CPU",
        "unit": "share",
        "most": 1.0,
        "load": [None, 0.3, 0.4, 1.0],
    }
    assert lanes["memory"] == {
        "name": "memory",
        "unit": "bytes",
        "most": 40.0,
        "load": [None, 10.0, 10.0, 10.0],
    }
    assert (lanes["GPU 0"]["load"], lanes["GPU 0 memory"]["load"][1]) == (lanes["CPU"]["load"], 0.5)
    assert (lanes["disk writes"]["unit"], lanes["disk writes"]["most"]) == ("bytes/s", None)
    assert lanes["disk writes"]["load"] == [None, 18.0, 20.0, 56.0]
    assert machine_lanes([], np.array([0.0, 1.0])) == []


def test_every_moment_belongs_to_the_set_of_resources_that_were_busy_in_it():
    found = busy_sets({"engine": [(0, 4), (2, 5)], "trainer": [(4, 8)], "idle": []}, 0, 10)
    assert found == {
        frozenset({"engine"}): 4,
        frozenset({"trainer"}): 3,
        frozenset(): 2,
        frozenset({"engine", "trainer"}): 1,
    }
    assert busy_sets({}, 0, 3) == {frozenset(): 3}
    assert busy_sets({"engine": [(-5, 20)]}, 0, 3) == {frozenset({"engine"}): 3}


@given(engine=spans, trainer=spans, env=spans)
def test_the_sets_add_up_to_the_whole_time_and_each_resource_to_its_own(engine, trainer, env):
    found = busy_sets({"engine": engine, "trainer": trainer, "env": env}, 0, 50)
    assert sum(found.values()) == pytest.approx(50)
    moments = np.arange(50) + 0.5
    for name, intervals in (("engine", engine), ("trainer", trainer), ("env", env)):
        busy = sum(any(a < at < b for a, b in intervals) for at in moments)
        assert sum(seconds for names, seconds in found.items() if name in names) == pytest.approx(
            busy
        )


@given(intervals=spans)
def test_the_load_is_the_mean_number_of_open_intervals(intervals):
    bins = np.linspace(0, 50, 11)
    found = load([(float(a), float(b)) for a, b in intervals], bins)
    moments = np.arange(0, 50, 0.5) + 0.25
    open_ones = (
        np.array([sum(a < at < b for a, b in intervals) for at in moments]).reshape(10, 10).mean(1)
    )
    assert found == pytest.approx(open_ones, abs=1e-9)


def test_advice_names_the_setting_that_changes_what_bound_the_run():
    waits = {frozenset({"engine"}): 60.0, frozenset({"trainer"}): 40.0}
    assert "rollout.max_staleness to 1" in advice(waits, {"rollout.max_staleness": 0})[0]
    assert "add engines" in advice(waits, {"rollout.max_staleness": 2})[0]
    assert "trainer.world_size" in advice({frozenset({"trainer"}): 9.0, frozenset(): 1.0}, {})[0]
    assert (
        "only environments work"
        in advice({frozenset({"environments"}): 5.0, frozenset({"engine"}): 5.0}, {})[1]
    )
    assert "Publishing weights takes 30%" in " ".join(
        advice({frozenset({"weights"}): 3.0, frozenset({"trainer"}): 7.0}, {})
    )
    assert advice({}, {}) == []


def test_the_lanes_of_a_run_are_its_phases_and_its_episodes_turns(tmp_path):
    made = MadeUpRun(tmp_path / "run")
    made.begin()
    for _ in range(3):
        made.step()
    folder = RunFolder("run", made.folder)
    index = EpisodeIndex(folder)
    found = timing(folder, index, EpisodeReader(folder, index), (1, 1))
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    assert found["seconds"] == pytest.approx(10)
    assert lanes["trainer"]["intervals"] == [[pytest.approx(6), pytest.approx(9)]]
    assert lanes["weights"]["intervals"] == [[pytest.approx(9), pytest.approx(10)]]
    assert lanes["waits for episodes"]["intervals"] == [[pytest.approx(0), pytest.approx(6)]]
    assert max(lanes["episodes in play"]["load"]) == 16
    by_set = {tuple(one["set"]): one["seconds"] for one in found["busy"]}
    assert by_set["trainer",] == pytest.approx(3)
    assert sum(by_set.values()) == pytest.approx(10)
    assert found["all"] == found["played"] == [0, 1, 2]


def test_what_works_while_the_trainer_does_not_binds_the_run():
    both, trains = frozenset({"engine", "environments"}), frozenset({"trainer", "engine"})
    assert bound_by({both: 4.0, frozenset({"environments"}): 3.0, trains: 3.0}) == "environments"
    assert bound_by({both: 4.0, frozenset({"engine"}): 3.0, trains: 3.0}) == "engine"
    assert bound_by({both: 4.0, trains: 6.0}) == "trainer"
    assert bound_by({frozenset(): 4.0}) is None
    assert bound_by({}) is None
    assert "only rewards work" in " ".join(advice({frozenset({"rewards"}): 3.0, trains: 5.0}, {}))


def test_the_graph_has_what_ran_with_depths_and_waits_of_these_steps_alone(tmp_path):
    made = MadeUpRun(
        tmp_path / "run", settings={"rollout": {"groups_per_step": 4, "max_staleness": 1}}
    )
    made.begin()
    for _ in range(4):
        made.step()
    folder = RunFolder("run", made.folder)
    index = EpisodeIndex(folder)
    window = window_of(folder, index, EpisodeReader(folder, index), (1, 2), 16)
    assert window is not None
    nodes = {
        node["name"]: node for node in stage_graph(window, folder.metrics(), folder.settings())
    }
    assert list(nodes) == [
        "episodes in play",
        "engine",
        "environments",
        "rewards",
        "channel groups",
        "ready groups",
        "trainer",
        "weights",
    ]
    assert nodes["trainer"]["share"] == pytest.approx(0.3)
    assert nodes["trainer"]["facts"] == [["waited for groups", "12.0 s"]]
    assert nodes["channel groups"]["facts"] == [
        ["depth", "1.0 of 4"],
        ["episodes waited", "0.0 s"],
        ["trainer waited", "12.0 s"],
    ]
    assert nodes["episodes in play"]["full"] == pytest.approx(16 * 5 / 10 / 32)
    assert ["groups", "4.0 of 8"] in nodes["episodes in play"]["facts"]
    rewards = sum(end - begin for begin, end in window.rewards)
    assert nodes["rewards"]["facts"] == [["at once", round(rewards / 20, 2)]]


def test_waits_that_begin_again_in_a_resumed_run_are_not_negative(tmp_path):
    made = MadeUpRun(tmp_path / "run")
    made.begin()
    made.step()
    folder = RunFolder("run", made.folder)
    index = EpisodeIndex(folder)
    window = window_of(folder, index, EpisodeReader(folder, index), None, 16)
    assert window is not None
    later = [{"step": 0, "reward": 0.0, "blocked_seconds": 2.0}]
    trainer = next(node for node in stage_graph(window, later, {}) if node["name"] == "trainer")
    assert trainer["facts"] == [["waited for groups", "2.0 s"]]
    assert not any(node["name"].startswith("channel") for node in stage_graph(window, later, {}))


def test_a_phase_that_its_process_did_not_live_to_end_has_no_length(tmp_path):
    lines = (
        '{"pid": 1, "step": 0, "phase": "train", "since": "2030-01-01T00:00:00+00:00"}',
        '{"pid": 2, "step": 0, "phase": "rollout", "since": "2030-01-01T05:00:00+00:00"}',
        '{"pid": 2, "step": 0, "phase": "train", "since": "2030-01-01T05:00:10+00:00"}',
        '{"pid": 2, "step": 0, "pha',
    )
    (tmp_path / "timeline.jsonl").write_text("\n".join(lines))
    phases = RunFolder("run", tmp_path).phases()
    assert [(one["phase"], one["end"] - one["begin"]) for one in phases] == [
        ("train", 0),
        ("rollout", 10),
        ("train", 0),
    ]


def test_a_phase_ends_with_its_launch_also_if_the_next_one_has_the_same_process(tmp_path):
    begun = [(0, "rollout", "00:00:00"), (0, "train", "00:00:10"), (0, "rollout", "05:00:01")]
    rows = [
        {"pid": 1, "step": step, "phase": phase, "since": f"2030-01-01T{at}+00:00"}
        for step, phase, at in begun
    ]
    (tmp_path / "timeline.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    launches = [{"at": f"2030-01-01T{at}+00:00"} for at in ("00:00:00", "05:00:00")]
    (tmp_path / "launches.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in launches))
    phases = RunFolder("run", tmp_path).phases()
    assert [one["end"] - one["begin"] for one in phases] == [10, 0, 0]


def test_a_run_that_was_never_timed_has_no_lanes(tmp_path):
    folder = RunFolder("run", tmp_path)
    index = EpisodeIndex(folder)
    assert timing(folder, index, EpisodeReader(folder, index), None)["begin"] is None
