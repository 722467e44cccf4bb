"""Trajectories that arrive from rollout workers as arrays and unopened bytes."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import traced_batch_of
from agentrl.batch import columns, to_samples
from agentrl.rewards.environment import EnvironmentReward
from agentrl.tokens.arrays import Ragged, floats, ints
from agentrl.tokens.expert_choices import ExpertChoices
from agentrl.tokens.sealed_turns import SealedTurns
from agentrl.trajectory import (
    Completion,
    Group,
    MadeCall,
    Message,
    Score,
    Task,
    Terminated,
    ToolCall,
    Trajectory,
    Turn,
)
from tests.test_batch import trajectories

SAID = (Message("user", "go on"), Message("assistant", "", tool_calls=(ToolCall("look", {}, "1"),)))
FACTS = (
    *("num_tokens", "num_new_tokens", "turn_rewards", "env_return", "success", "oldest_version"),
    *("beginning", "trainable", "has_new_turns"),
)
PAY = EnvironmentReward(EnvironmentReward.Config(scale=0.5))


def arrived(trajectory: Trajectory) -> Trajectory:
    """The trajectory as the controller gets it from a rollout worker."""
    sealed: Trajectory = pickle.loads(pickle.dumps(trajectory.sealed()))
    return sealed


def is_open(trajectory: Trajectory) -> bool:
    assert isinstance(trajectory.turns, SealedTurns)
    return "opened" in vars(trajectory.turns.seal)


def detailed(trajectory: Trajectory, draw: Callable[[Any], Any]) -> Trajectory:
    """The trajectory with everything that a turn may have beside its tokens."""
    turns = []
    for number, turn in enumerate(trajectory.turns):
        answer, count = turn.completion, len(turn.completion.token_ids)
        if draw(st.booleans()):
            support = Ragged.of([[token, 1000] for token in answer.token_ids])
            answer = replace(answer, support=support)
        if draw(st.booleans()):
            chosen = np.zeros((count, 2, 2), np.uint8)
            answer = replace(answer, experts=ExpertChoices.of(number, chosen))
        info = {"success": draw(st.booleans())} if draw(st.booleans()) else {"at": [number]}
        turns.append(
            replace(
                turn,
                completion=answer,
                info=info,
                reward=draw(st.floats(-9, 9)),
                state=f"s{number}",
                picture="<p>",
                asked=0.1 * number,
                generate_seconds=0.3,
                env_seconds=0.2,
                calls=(MadeCall(None, refused=True),) if number else None,
                trained=draw(st.booleans()),
            )
        )
    trained = draw(st.integers(0, len(turns)))
    return replace(trajectory, turns=tuple(turns), messages=SAID, trained_turns=trained)


@given(trajectories(), st.data(), st.integers(0, 4))
def test_a_sealed_trajectory_is_the_same_trajectory(
    played: Trajectory, data: st.DataObject, oldest_version: int
) -> None:
    whole = detailed(played, data.draw)
    sealed = arrived(whole)
    for name in FACTS:
        assert getattr(sealed, name) == getattr(whole, name), name
    assert sealed.new_versions.tolist() == whole.new_versions.tolist()
    assert PAY.score_turns(sealed.unshared()) == PAY.score_turns(whole)
    assert not is_open(sealed)
    assert len(sealed.turns) == len(whole.turns)
    assert len(sealed.messages) == 2
    advantages = [float(number) for number in range(len(whole.turns))]
    laid = to_samples(sealed, advantages, turn_rewards=advantages, oldest_version=oldest_version)
    assert laid == to_samples(
        whole, advantages, turn_rewards=advantages, oldest_version=oldest_version
    )
    assert sealed == whole
    assert whole == sealed
    assert sealed.turns[-1] == whole.turns[-1]
    assert sealed.turns[1:] == whole.turns[1:]
    assert sealed.unshared() == whole.unshared()
    assert pickle.loads(pickle.dumps(sealed)) == whole
    assert sealed.sealed() == whole


@given(st.lists(trajectories(), min_size=2, max_size=4))
def test_a_batch_is_made_of_sealed_trajectories_without_opening_one(
    played: list[Trajectory],
) -> None:
    assume(any(one.num_tokens for one in played))
    named = [replace(one, id=f"e{number}") for number, one in enumerate(played)]
    sealed = list(map(arrived, named))
    grpo = Grpo(Grpo.Config())
    batches = []
    for members in (named, sealed):
        scores = [Score(float(n), turns=PAY.score_turns(one)) for n, one in enumerate(members)]
        group = Group(members[0].task, tuple(members), tuple(scores))
        processing = BatchProcessing(BatchProcessingConfig(), grpo, {})
        batches.append(traced_batch_of([group], grpo, processing, 0))
    for name in columns("S", "N", "M"):
        one, other = (getattr(made.batch, name) for made in batches)
        assert same(one, other), name
    assert batches[0].origins == batches[1].origins
    assert not any(map(is_open, sealed))


def same(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, Ragged) else np.array_equal(one, other)


def test_what_a_reward_changes_in_a_sealed_trajectory_changes_no_other() -> None:
    answer = Completion(ints((5,)), floats((-1.0,)), ints((0,)), "stop")
    turn = Turn(ints((1, 2)), answer, 1.0, {"seen": ["a key"]})
    sealed = arrived(Trajectory("e", Task("room", 0), (turn,), Terminated(), SAID))
    one, other = sealed.unshared(), sealed.unshared()
    one.turns[0].info["seen"].append("a lamp")
    assert other.turns[0].info == sealed.turns[0].info == {"seen": ["a key"]}
    with pytest.raises(ValueError, match="read-only"):
        one.turns[0].prompt_ids[0] = 7
