"""Role-conditioned advantages: each role has its own baseline, which a resumed run goes on with."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.rae import RoleAdvantage
from agentrl.algorithms.samples import samples_of
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Group, Score, Task


def group(env: str = "poker", **rewards: Sequence[float]) -> Group:
    """A group of agents with these rewards."""
    task = Task(env, 0, {}, "t")
    played = [
        replace(trajectory("x", rewards=[r]), task=task, agent=agent)
        for agent in rewards
        for r in rewards[agent]
    ]
    return Group(task, tuple(played), tuple(Score(t.env_return) for t in played))


def advantages(algorithm: RoleAdvantage, played: Group) -> list[float]:
    return [float(sample.advantages[-1]) for sample in samples_of([played], algorithm)]


def trained(algorithm: RoleAdvantage, *batches: list[Group]) -> list[dict[str, float]]:
    processing = BatchProcessing(BatchProcessingConfig(), algorithm)
    return [processing.update(batch) for batch in batches]


def test_a_role_is_compared_with_itself_in_earlier_steps():
    algorithm = RoleAdvantage(RoleAdvantage.Config(decay=0.5))
    played = group(north=[1.0, 3.0], south=[-2.0, -2.0])
    assert advantages(algorithm, played) == [1.0, 3.0, -2.0, -2.0], "nothing is known yet"
    (metrics,) = trained(algorithm, [played])
    assert metrics == {"baseline/poker/north": 0.75 * 2.0, "baseline/poker/south": 0.75 * -2.0}
    assert advantages(algorithm, played) == [-0.5, 1.5, -0.5, -0.5]


def test_a_baseline_moves_as_far_as_there_are_episodes_and_is_one_for_each_environment():
    one, many = (RoleAdvantage(RoleAdvantage.Config(decay=0.9)) for _ in range(2))
    trained(one, [group(north=[1.0])], [group(north=[1.0])])
    trained(many, [group(north=[1.0, 1.0])])
    assert one.baselines["poker/north"] == pytest.approx(many.baselines["poker/north"])
    assert many.baselines["poker/north"] == pytest.approx(1 - 0.9**2)
    trained(many, [group("chess", north=[-1.0])])
    assert many.baselines == {
        "poker/north": pytest.approx(0.19),
        "chess/north": pytest.approx(-0.1),
    }


def test_without_roles_the_seats_of_a_zero_sum_game_share_a_baseline_that_says_nothing():
    algorithm = RoleAdvantage(RoleAdvantage.Config(roles=False, decay=0.5))
    played = group(north=[1.0, 3.0], south=[-1.0, -3.0])
    (metrics,) = trained(algorithm, [played])
    assert metrics == {"baseline/poker": 0.0}
    assert advantages(algorithm, played) == [1.0, 3.0, -1.0, -3.0]


def test_a_resumed_run_goes_on_with_the_same_baselines_to_the_last_bit():
    batches = [[group(north=[0.1 * n, 0.7], south=[-0.3, 1 / (n + 3)])] for n in range(5)]
    whole, first, second = (RoleAdvantage() for _ in range(3))
    rows = trained(whole, *batches)
    trained(first, *batches[:3])
    processing = BatchProcessing(BatchProcessingConfig(), second)
    state = BatchProcessing(BatchProcessingConfig(), first).state()
    processing.restore(json.loads(json.dumps(state)))
    assert [processing.update(batch) for batch in batches[3:]] == rows[3:]


def test_the_baseline_is_of_what_is_trained_on_penalties_included():
    algorithm = RoleAdvantage(RoleAdvantage.Config(decay=0.0))
    task = Task("poker", 0, {}, "t")
    played = [
        replace(trajectory(text, rewards=[1.0]), task=task, agent="north")
        for text in ("ab", "abcd")
    ]
    processing = BatchProcessing(BatchProcessingConfig(length_penalty=1.0), algorithm)
    processing.update([Group(task, tuple(played), (Score(1.0), Score(2.0)))])
    # +0.5 for the short one, -0.5 for the long one.
    assert algorithm.baselines == {"poker/north": 1.5}
