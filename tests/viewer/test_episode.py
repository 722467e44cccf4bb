"""One episode in full: each number at its token, each fate in a sentence."""

import pytest

from agentrl.errors import ConfigError
from agentrl.observe.trajectories import write_trajectories
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import (
    BranchPoint,
    Completion,
    Score,
    Task,
    Terminated,
    Trajectory,
    Turn,
)
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex, EpisodeQuery
from agentrl.viewer.folders import RunFolder


@pytest.fixture
def made(tmp_path):
    run = MadeUpRun(tmp_path / "run")
    run.begin()
    run.step()
    return run


@pytest.fixture
def reader(made):
    folder = RunFolder("run", made.folder)
    return EpisodeReader(folder, EpisodeIndex(folder))


def detailed(reader: EpisodeReader, index: EpisodeIndex, member: int) -> dict:
    """An episode of the group whose tokens were kept."""
    rows = index.page(EpisodeQuery(fate="trained", limit=100))["rows"]
    found = [reader.episode(row["id"]) for row in rows if row["id"].endswith(f"/{member}/0")]
    return next(
        one
        for one in found
        if one["trajectory"]["turns"][0]["trainer"]["old_logprobs"][0] is not None
    )


def test_the_trainers_numbers_stand_at_the_tokens_that_they_are_of_also_after_a_fork(reader):
    for member in (0, 1):
        for turn in detailed(reader, reader._index, member)["trajectory"]["turns"]:
            trainer = turn["trainer"]
            assert trainer["old_logprobs"] == pytest.approx(
                [each + 0.01 for each in turn["logprobs"]], abs=1e-6
            )
            assert len(set(trainer["advantages"])) == 1
            assert len(turn["tokens"]) == len(turn["token_ids"]) == 6


def test_a_fork_begins_another_sample(reader):
    forked, straight = (detailed(reader, reader._index, member) for member in (0, 1))
    assert [turn["sample"] for turn in straight["trajectory"]["turns"]] == [
        straight["samples"][0]["sample"]
    ] * 3
    first, second = (sample["sample"] for sample in forked["samples"])
    assert [turn["sample"] for turn in forked["trajectory"]["turns"]] == [first, second, second]


def test_the_fate_names_the_step_the_samples_and_the_advantage(reader):
    found = reader.episode("train-000001/0/0")
    numbers = [sample["sample"] for sample in found["samples"]]
    assert found["fate"].startswith(
        f"train-000001/0/0 was trained at step 0 as samples {numbers[0]} and {numbers[1]} of 20,"
        " with the advantage "
    )
    assert f"It scored {found['row']['score']:g}; the mean of its group of 4 is" in found["fate"]


def test_the_fate_of_an_episode_that_was_not_trained_says_why(reader):
    found = reader.episode("train-000004/0/0")
    assert found["fate"].startswith(
        "train-000004/0/0 was not trained: it failed: environment: What is next?"
    )
    assert found["trajectory"] is None
    with pytest.raises(ConfigError, match="no episode 'train-9'"):
        reader.episode("train-9")


def test_without_samples_the_ledger_says_what_became_of_it(made, reader):
    (made.folder / "samples" / "step_000000.parquet").unlink()
    found = reader.episode("train-000001/2/0")
    assert found["fate"] == "train-000001/2/0 was trained at step 0"
    assert found["trajectory"]["turns"][0]["trainer"]["advantages"] == [None] * 6


def test_an_episode_in_the_batch_without_a_sample_is_told_apart(made, reader):
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = made.folder / "samples" / "step_000000.parquet"
    pq.write_table(pq.read_table(path, filters=pc.field("episode") != "train-000001/2/0"), path)
    assert (
        "was in the batch of step 0, and none of its tokens"
        in reader.episode("train-000001/2/0")["fate"]
    )


def test_a_group_shows_its_members_and_a_steps_turns_their_times(reader):
    members = reader.group("train-000002")["members"]
    assert [member["row"]["id"] for member in members] == [f"train-000002/{i}/0" for i in range(4)]
    assert all(len(member["messages"]) == 7 for member in members)
    episodes = reader.turns_of_step(0)
    assert len(episodes) == 16
    assert [one["started"] for one in episodes] == sorted(one["started"] for one in episodes)
    assert all(len(one["turns"]) == 3 for one in episodes)


def test_tokens_are_shown_by_the_tokenizer_of_the_runs_model(made, reader, tiny_model_dir):
    from transformers import AutoTokenizer

    (made.folder / "config.yaml").write_text(f"model: {{name: {tiny_model_dir}}}")
    turn = reader.episode("train-000001/1/0")["trajectory"]["turns"][0]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert turn["tokens"] == [tokenizer.decode([token]) for token in turn["token_ids"]]


def test_a_group_with_branches_shows_whom_each_has_left_and_what_the_states_are_worth(made, reader):
    said = Completion(ints([5]), floats([-1]), ints([0]), "stop")

    def played(member: int, score: float, turns: int, left: BranchPoint | None = None):
        turn = Turn(ints([1]), said, 0.0, {})
        task = Task("made_up", 1, {}, "train-000090")
        name = f"{task.id}/{member}/0"
        return Trajectory(name, task, (turn,) * turns, Terminated(), branch=left), Score(score)

    first, second = BranchPoint("train-000090/0/0", 1, 0.25), BranchPoint("train-000090/0/0", 3, 0)
    pairs = [
        played(0, 0.0, 5),
        played(1, 1.0, 2),
        played(2, 1.0, 4, second),
        played(3, 0.5, 6, first),
    ]
    write_trajectories(made.folder / "trajectories" / "step_000090.parquet", pairs)
    trees = reader.group("train-000090")["trees"]
    drawn = [(node["id"][-3], node["left"], node["turn"], node["turns"]) for node in trees]
    parent = "train-000090/0/0"
    assert drawn == [
        ("0", None, None, 5),
        ("2", parent, 3, 4),
        ("3", parent, 1, 6),
        ("1", None, None, 2),
    ]
    assert trees[0]["states"] == [
        {"turn": 1, "value": 0.5, "leaves": 3},
        {"turn": 3, "value": 0.5, "leaves": 2},
    ]
    assert reader.group("train-000001")["trees"] == []
    command = reader.episode("train-000090/3/0")["replay"]
    assert command == f"agentrl replay {made.folder} train-000090/3/0"
