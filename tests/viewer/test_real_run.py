"""The files of a real run have what the page shows."""

import json
from pathlib import Path

import pytest

from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex, EpisodeQuery
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.timing import timing
from agentrl.viewer.traced import newest_trace

ROOT = Path(__file__).parents[2]


REWARD = """
def alike(trajectory):
    return 1.0 if trajectory.task.id.endswith(("1", "4")) else float(trajectory.id.split("/")[1])
"""
"""In each step of three groups, the members of the second one earn the same."""


@pytest.mark.slow
def test_every_trained_episode_of_a_run_has_its_sample_and_some_groups_each_tokens_numbers(
    agentrl, tmp_path
):
    (tmp_path / "constant_group.py").write_text(REWARD)
    done = agentrl(
        "train",
        str(ROOT / "examples" / "frozen_lake.yaml"),
        "recipe.demonstrations=null",
        "steps=2",
        "trackers=[]",
        "rollout.groups_per_step=3",
        "rollout.group_size=3",
        "rollout.budget.turns=3",
        "trainer.minibatches=2",
        "evaluation.tasks=0",
        f"run_dir={tmp_path / 'run'}",
        "observe.token_groups=2",
        "observe.profile=true",
        "reward=constant_group:alike",
        "batch_processing.keep_variance=0.999",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    folder = RunFolder("run", tmp_path / "run")
    index = EpisodeIndex(folder)
    reader = EpisodeReader(folder, index)
    rows = index.page(EpisodeQuery(limit=1000))["rows"]
    assert len(rows) == 18
    detailed, masked = [], [row for row in rows if row["task"] in ("train-000001", "train-000004")]
    assert {row["fate"] for row in masked} == {"masked"}
    summary = json.loads((folder.path / "summary.json").read_text())
    assert (summary["episodes"]["trained"], summary["episodes"]["masked"]) == (12, 6)
    assert (summary["tasks"]["trained"], summary["tasks"]["masked"]) == (4, 2)
    assert [row["masked"] for row in folder.metrics() if "reward" in row] == pytest.approx(
        [1 / 3, 1 / 3]
    )
    for row in masked:
        assert (
            reader.episode(row["id"])["fate"]
            == f"{row['id']} was not trained: it carried no loss in the batch of step"
            f" {row['step']}: its group's scores vary too little"
            " (batch_processing.keep_variance=0.999)"
        )
    for row in rows:
        if row in masked:
            continue
        episode = reader.episode(row["id"])
        assert f"was trained at step {row['step']} as sample" in episode["fate"]
        turns = episode["trajectory"]["turns"]
        assert [len(turn["token_ids"]) > 0 for turn in turns] == [True] * row["num_turns"]
        if turns[0]["trainer"]["old_logprobs"][0] is not None:
            detailed.append(row)
            for (
                turn
            ) in turns:  # one process with one model: the trainer's logprobs are the engine's
                assert turn["trainer"]["old_logprobs"] == pytest.approx(turn["logprobs"], abs=1e-4)
    assert len(detailed) == 2 * 2 * 3
    trains = {one["step"]: one["begin"] for one in folder.phases() if one["phase"] == "train"}
    for row in rows:  # each was played before it was trained on, by the clock of the phases
        assert folder.phases()[0]["begin"] - 1 <= row["started"]
        assert row["started"] + row["seconds"] <= trains[row["step"]] + 1
    assert folder.status()["now"] is None
    assert not (folder.path / "live.json").exists()
    found = timing(folder, index, reader, (0, 1))
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    assert len(lanes["trainer"]["intervals"]) == 2
    assert max(lanes["engine"]["load"]) > 1
    busy = {tuple(one["set"]): one["seconds"] for one in found["busy"]}
    assert sum(busy.values()) == pytest.approx(found["seconds"])
    assert busy.get(("trainer",), 0) > 0
    assert "health/effective_sample_size" in folder.metrics()[0]
    traced = newest_trace(folder.path, None)
    assert traced is not None
    assert {"engine", "environments", "rewards", "trainer", "weights", "controller"} <= set(
        traced.resources
    )
    assert sum(traced.busy.values()) == pytest.approx(traced.seconds)
    phases = [one.name for one in traced.trace.slices if one.group == "phases"]
    assert [name for name in phases if name.startswith("train")] == ["train 0", "train 1"]
    answers = [one for one in traced.trace.slices if one.name == "generate"]
    assert len(answers) == sum(row["num_turns"] for row in rows)
