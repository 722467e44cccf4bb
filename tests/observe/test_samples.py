"""What a step was trained on is recorded: every sample's origin, and the numbers of some groups'
tokens.
"""

import numpy as np
import pyarrow.parquet as pq

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import traced_batch_of
from agentrl.observe.samples import TrainedBatch, drawn_groups, write_samples
from agentrl.tokens.arrays import floats
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn


def turn(prompt: int, sampled: int, forked: bool = False) -> Turn:
    completion = Completion([7] * sampled, [-0.5] * sampled, [0] * sampled, "stop")
    return Turn([1] * prompt, completion, 0.0, {}, forked)


def group(name: str) -> Group:
    """Two members; the first one's second turn forks."""
    task = Task("lake", 0, id=name)
    turns = ((turn(3, 2), turn(4, 1, forked=True)), (turn(3, 2), turn(2, 3)))
    members = tuple(
        Trajectory(f"{name}/{i}/0", task, own, Terminated()) for i, own in enumerate(turns)
    )
    return Group(task, members, (Score(1.0), Score(0.0)))


def traced(*groups: Group) -> TrainedBatch:
    processing = BatchProcessing(BatchProcessingConfig())
    made = traced_batch_of(list(groups), Grpo(), processing, 0)
    batch, origins = made.batch, made.origins
    told = np.stack([np.arange(batch.num_loss_tokens) + shift for shift in (0, 0.5, 0.25)])
    return TrainedBatch(batch, origins, floats(told))


def test_each_sample_names_the_turns_of_the_episode_that_it_is_made_of(tmp_path):
    write_samples(tmp_path / "samples.parquet", 4, traced(group("a")), frozenset())
    rows = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    assert [(row["step"], row["sample"], row["episode"]) for row in rows] == [
        (4, 0, "a/0/0"),
        (4, 1, "a/0/0"),
        (4, 2, "a/1/0"),
    ]
    assert [(row["first_turn"], row["last_turn"]) for row in rows] == [(0, 0), (1, 1), (0, 1)]
    assert [(row["tokens"], row["loss_tokens"]) for row in rows] == [(5, 2), (5, 1), (10, 5)]
    assert all(row["logprobs"] is None for row in rows)
    assert rows[0]["advantage"] > 0 > rows[2]["advantage"]


def test_the_tokens_of_a_drawn_group_have_the_trainers_numbers_at_their_positions(tmp_path):
    trained = traced(group("a"), group("b"))
    write_samples(tmp_path / "samples.parquet", 0, trained, frozenset({1}))
    rows = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    assert [row["positions"] is not None for row in rows] == [False] * 3 + [True] * 3
    last = rows[5]
    assert last["positions"] == [3, 4, 7, 8, 9]
    assert last["turns"] == [0, 0, 1, 1, 1]
    assert last["old_logprobs"] == [11, 12, 13, 14, 15]
    assert last["logprobs"] == [11.5, 12.5, 13.5, 14.5, 15.5]
    assert last["entropies"] == [11.25, 12.25, 13.25, 14.25, 15.25]


def test_entropies_that_the_loss_does_not_use_are_left_out(tmp_path):
    trained = traced(group("a"))
    told = trained.told_3N.copy()
    told[2] = np.nan
    unknown = TrainedBatch(trained.batch, trained.origins, told)
    write_samples(tmp_path / "samples.parquet", 0, unknown, frozenset({0}))
    first = pq.read_table(tmp_path / "samples.parquet").to_pylist()[0]
    assert first["entropies"] is None
    assert len(first["logprobs"]) == 2


def test_a_trainer_that_tells_nothing_leaves_the_logprobs_empty(tmp_path):
    trained = traced(group("a"))
    silent = TrainedBatch(trained.batch, trained.origins, None)
    write_samples(tmp_path / "samples.parquet", 0, silent, frozenset({0}))
    first = pq.read_table(tmp_path / "samples.parquet").to_pylist()[0]
    assert first["old_logprobs"] is None
    assert len(first["advantages"]) == 2


def test_groups_are_drawn_by_the_seed_and_never_more_than_there_are():
    batch = traced(group("a"), group("b"), group("c")).batch
    assert drawn_groups(batch, 8, 0) == {0, 1, 2}
    assert drawn_groups(batch, 0, 0) == frozenset()
    assert drawn_groups(batch, 1, 5) == drawn_groups(batch, 1, 5)
    assert len(set().union(*(drawn_groups(batch, 1, seed) for seed in range(30)))) == 3
