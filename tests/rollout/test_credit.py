"""What an episode keeps for credit by turn: who earned what, from which state, and what came after
a limit.
"""

import asyncio

import pytest

from agentrl.algorithms.gigpo import Gigpo
from agentrl.algorithms.grpo import Grpo
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.flow import run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.rewards.environment import EnvironmentReward
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import (
    Completion,
    Group,
    Score,
    Task,
    Terminated,
    Trajectory,
    Truncated,
    Turn,
)

RENDERER = TemplateRenderer(ByteTokenizer())
DEADLINES = EnvDeadlines()


class Rooms:
    """Rooms in a row; each step pays its number. Option `keys`: it names its states. Option
    `limit`: it cuts itself.
    """

    isolation = "inline"

    def reset(self, *, seed, options):
        self.options, self.room = options, 0
        return "room 0", self.named()

    def step(self, action):
        self.room += 1
        over, cut = self.room == 3, self.room == self.options.get("limit")
        return f"room {self.room}", float(self.room), over and not cut, cut, self.named()

    def named(self):
        return {"state_key": ("room", self.room)} if self.options.get("keys") else {}

    def close(self):
        pass


def played(max_turns: int = 8, max_context: int = 2048, **options: object) -> Trajectory:
    async def main() -> Trajectory:
        async with ScriptedEngine.replying(
            lambda request: list(b"on"), max_context=max_context
        ) as engine:
            policy = EnginePolicy(
                engine, SamplingParams(stop_token_ids=RENDERER.stop_token_ids), 60.0
            )
            host = EnvPool({"rooms": Rooms}, DEADLINES)
            runner = EnvEpisodeRunner(policy, RENDERER, host, Budget(turns=max_turns), 600.0)
            try:
                (trajectory,) = await runner.play(Assignment("e", Task("rooms", 0, options), 0))
            finally:
                await host.close()
        return trajectory

    return run_virtual(main)


def test_turns_know_the_state_that_they_answer() -> None:
    first, again, keyed = played(), played(), played(keys=True)
    states = [turn.state for turn in first.turns]
    assert len(set(states)) == 3
    assert states == [turn.state for turn in again.turns]
    assert [turn.state for turn in keyed.turns] == ["['room', 0]", "['room', 1]", "['room', 2]"]


@pytest.mark.parametrize(("limits", "limit"), [({"max_turns": 2}, "turns"), ({"limit": 2}, "env")])
def test_a_truncated_episode_keeps_what_would_have_been_answered_next(
    limits: dict[str, int], limit: str
) -> None:
    cut, whole = played(**limits), played()
    assert cut.status == Truncated(limit)
    assert cut.tail_ids.tolist() == whole.turns[2].prompt_ids.tolist()
    assert [m.content for m in cut.messages] == [m.content for m in whole.messages][
        : len(cut.messages)
    ]
    assert cut.messages[-1].content == "room 2"
    assert len(whole.tail_ids) == 0


def test_an_episode_whose_context_is_full_keeps_the_prompt_that_did_not_fit() -> None:
    whole = played()
    room = (
        sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in whole.turns[:2]) + 1
    )
    cut = played(max_context=room)
    assert cut.status == Truncated("context")
    assert cut.tail_ids.tolist() == whole.turns[2].prompt_ids.tolist()


def test_a_score_says_what_each_turn_earned_and_the_last_one_gets_the_rest() -> None:
    trajectory = played()
    parts = [
        RewardPart(EnvironmentReward(EnvironmentReward.Config(scale=2.0)), "environment", 0.5),
        RewardPart(lambda trajectory: 10.0, "verdict", 0.1),
    ]
    score = asyncio.run(RewardPipeline(parts, deadline=60.0).score(trajectory))
    assert score.value == 0.5 * 2 * 6 + 1
    assert score.turns == (1.0, 2.0, 3.0)
    group = Group(trajectory.task, (trajectory, trajectory), (score, Score(1.0)))
    assert [list(rewards) for rewards in group.turn_rewards_G] == [[1.0, 2.0, 4.0], [0.0, 0.0, 1.0]]


def turns(*played: tuple[str, float]) -> Trajectory:
    completion = Completion((5,), (-1.0,), (0,), "stop")
    listed = tuple(Turn((1,), completion, reward, {}, state=state) for state, reward in played)
    return Trajectory("t", Task("e", 0), listed, Terminated())


def scored(*trajectories: Trajectory) -> Group:
    scores = [
        Score(t.env_return, turns=tuple(turn.reward for turn in t.turns)) for t in trajectories
    ]
    return Group(Task("e", 0), trajectories, tuple(scores))


def test_turns_from_the_same_state_are_compared_by_hand() -> None:
    # Both come to b: the first earns 4 there, and the second nothing. Only the second comes to c.
    group = scored(turns(("a", 0.0), ("b", 4.0)), turns(("a", 0.0), ("c", 1.0), ("b", 0.0)))
    settings = {"advantage": "group_mean", "step_gamma": 0.5, "step_weight": 2.0}
    first, second = Gigpo(Gigpo.Config(**settings)).advantages(group)
    episodes = (1.5, -1.5)  # 4 and 1 against their mean
    at_a = (0.5 * 4 - 0.5 * 1, 0.5)  # returns to go of 2 and 0.5
    assert first == pytest.approx([episodes[0] + 2 * (at_a[0] - 0.75), episodes[0] + 2 * 2.0])
    assert second == pytest.approx(
        [episodes[1] - 2 * (at_a[0] - 0.75), episodes[1], episodes[1] - 2 * 2.0]
    )


def test_with_rewards_to_go_a_turn_does_not_answer_for_what_came_before() -> None:
    group = scored(turns(("a", 1.0), ("b", 2.0)), turns(("a", 0.0), ("b", 1.0)))
    settings = {"advantage": "group_mean", "reward_to_go": True}
    assert Grpo(Grpo.Config(**settings)).advantages(group) == [[1.0, 0.0], [-1.0, -1.0]]
    assert Grpo(Grpo.Config(**settings, baseline="turn")).advantages(group) == [
        [1.0, 0.5],
        [-1.0, -0.5],
    ]
    assert Grpo(Grpo.Config(advantage="group_mean", gamma=0.5)).advantages(group) == [0.75, -0.75]
