"""Several agents in one environment: whose turn it is, who earned what, who is trained, and over
which transport.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import plugins
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import samples_of
from agentrl.batch import to_samples
from agentrl.conversation.context import Full, LastK, Scratchpad, Summary
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.kuhn_poker import KuhnPoker, strong_player
from agentrl.errors import ConfigError, ConformanceError
from agentrl.flow import run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.plugins import NoSettings
from agentrl.remote.server import EnvServer
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner, Role, ScriptedPolicy
from agentrl.rollout.scheduler import Rollouts
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.testing import ScriptedEngine, check_env
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Completion, Failed, Group, Score, Task, Terminated, Trajectory, Turn
from tests.properties import examples
from tests.remote.served import served

RENDERER = TemplateRenderer(ByteTokenizer())
WORDS = [b"check", b"bet", b"call", b"fold", b"<scratchpad>a king</scratchpad>bet", b"hm"]


class Table:
    """Agents in any order, who earn at any time: drawn from the seed. `paid` is what each should
    have in the end.
    """

    isolation = "inline"
    system_prompt = "All hear this."

    def reset(self, *, seed, options):
        self.rng = random.Random(seed)
        self.agents = [f"a{number}" for number in range(options["agents"])]
        self.left = options["steps"]
        self.paid = dict.fromkeys(self.agents, 0.0)
        self.actor = self.rng.choice(self.agents)
        prompts = {agent: f"You are {agent}." for agent in self.agents[1:]}
        return f"begin, {self.actor}", {
            "agents": self.agents,
            "agent": self.actor,
            "system_prompts": prompts,
        }

    def step(self, action):
        rewards = {
            agent: self.rng.randint(-4, 4) / 4 for agent in self.agents if self.rng.random() < 0.4
        }
        for agent, paid in rewards.items():
            self.paid[agent] += paid
        reward = rewards.get(self.actor, 0.0)
        self.left -= 1
        self.actor = self.rng.choice(self.agents)
        info = {"rewards": rewards, "agent": self.actor}
        if self.left == 0:
            info["success"] = {agent: self.rng.random() < 0.5 for agent in self.agents}
            self.won = info["success"]
        return (
            f"now {self.actor} " + self.rng.choice(["x", "yy" * 9]),
            reward,
            self.left == 0,
            False,
            info,
        )

    def close(self):
        pass


def player(engine, make_env, *, context=None, others=None, max_turns=50) -> EnvEpisodeRunner:
    host = EnvPool({"env": make_env}, EnvDeadlines())
    policy = EnginePolicy(
        engine,
        SamplingParams(max_tokens=40, temperature=1.0, stop_token_ids=RENDERER.stop_token_ids),
        60,
    )
    return EnvEpisodeRunner(
        policy, RENDERER, host, Budget(turns=max_turns), 600, context or Full(), others or {}
    )


def talking() -> ScriptedEngine:
    """An engine that says one of the words, by the request's seed."""
    return ScriptedEngine.replying(
        lambda request: random.Random(request.seed).choice(WORDS), max_context=100_000
    )


def reconstructed(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """The prompts of a trajectory's turns, as its training samples have them."""
    prompts = []
    for sample in to_samples(trajectory, 1.0):
        starts = [
            i for i, loss in enumerate(sample.loss_mask) if loss and not sample.loss_mask[i - 1]
        ]
        prompts += [tuple(sample.token_ids[:start].tolist()) for start in starts]
    return prompts


contexts = st.one_of(
    st.just(Full()),
    st.builds(LastK, turns=st.integers(1, 3)),
    st.builds(Scratchpad, prompt=st.sampled_from(["", "Use the pad."])),
    st.builds(Summary, max_prompt_tokens=st.integers(1, 300), prompt=st.just("Sum up.")),
)


@given(
    seed=st.integers(0, 10**6), agents=st.integers(1, 4), steps=st.integers(1, 14), context=contexts
)
@examples(60)
def test_what_each_agent_saw_said_and_earned_is_in_its_own_trajectory(seed, agents, steps, context):
    async def main() -> None:
        table = Table()
        async with talking() as engine:
            task = Task("env", seed, {"agents": agents, "steps": steps})
            played = await player(engine, lambda: table, context=context).play(
                Assignment("e", task, seed)
            )
            assert [trajectory.agent for trajectory in played] == [
                f"a{number}" for number in range(agents)
            ]
            for trajectory in played:
                assert (trajectory.id, trajectory.status) == ("e", Terminated())
                assert trajectory.env_return == pytest.approx(table.paid[trajectory.agent])
                if trajectory.turns:
                    assert trajectory.success == table.won[trajectory.agent]
                asked = [r for r in engine.requests if r.id.startswith(f"e/{trajectory.agent}/")]
                assert reconstructed(trajectory) == [
                    tuple(request.prompt_ids.tolist()) for request in asked
                ]
                said = [token for turn in trajectory.turns for token in turn.completion.token_ids]
                samples = to_samples(trajectory, 1.0)
                learnt = [
                    t
                    for s in samples
                    for t, loss in zip(s.token_ids, s.loss_mask, strict=True)
                    if loss
                ]
                assert learnt == said
                stranger = {f"You are a{number}." for number in range(1, agents)} - {
                    f"You are {trajectory.agent}."
                }
                assert not any(
                    secret in message.content
                    for message in trajectory.messages
                    for secret in stranger
                )
            assert sum(len(t.turns) for t in played) == len(engine.requests)
            assert len({request.seed for request in engine.requests}) == len(engine.requests)

    run_virtual(main)


class Told:
    """Two agents, and infos as they are told."""

    isolation = "inline"
    infos: Sequence[dict] = ()
    reset_info: dict = {"agents": ["a", "b"], "agent": "a"}  # noqa: RUF012

    def reset(self, *, seed, options):
        self.at = 0
        return "begin", self.reset_info

    def step(self, action):
        reward, info = self.infos[self.at]
        self.at += 1
        return "on", reward, self.at == len(self.infos), False, info

    def close(self):
        pass


def telling(*infos, reset=None) -> type[Told]:
    return type("Telling", (Told,), {"infos": infos, **({"reset_info": reset} if reset else {})})


def play_once(engine, make_env, **settings):
    async def main():
        async with engine:
            return await player(engine, make_env, **settings).play(
                Assignment("e", Task("env", 0), 0)
            )

    return run_virtual(main)


def test_an_agent_earns_for_a_turn_what_comes_until_its_next_and_before_its_first_as_a_head_start():
    env = telling(
        (1.0, {"agent": "a", "rewards": {"a": 1.0, "b": 0.5}}),
        (0.0, {"agent": "b", "rewards": {"b": 0.25}}),
        (2.0, {"agent": "a", "rewards": {"a": 8.0}}),  # b, who acts, earns the step's reward
        (0.0, {"rewards": {"b": 4.0}}),
    )
    a, b = play_once(talking(), env)
    assert [turn.reward for turn in a.turns] == [1.0, 8.0, 0.0]
    assert (b.head_start, [turn.reward for turn in b.turns]) == (0.75, [6.0])
    assert (a.env_return, b.env_return) == (9.0, 6.75)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (telling((0.0, {"agent": "c"}), (0.0, {})), "it must say who acts next, one of a, b"),
        (telling((0.0, {}), (0.0, {})), 'info["agent"] = None'),
        (
            telling((1.0, {"agent": "b", "rewards": {"a": 2.0}}), (0.0, {})),
            "is that of the agent who acted, a",
        ),
        (
            telling((0.0, {"agent": "b", "rewards": {"c": 2.0}}), (0.0, {})),
            "write a number for each of a, b",
        ),
        (
            telling((0.0, {}), reset={"agents": ["a", "a"], "agent": "a"}),
            "write a list of different names",
        ),
        (
            telling((0.0, {}), reset={"agents": ["a"], "agent": "a", "system_prompts": 3}),
            "write a text for each",
        ),
    ],
)
def test_an_environment_that_says_wrongly_who_plays_fails_and_check_env_says_the_same(env, said):
    status = play_once(talking(), env)[0].status
    assert isinstance(status, Failed)
    assert status.layer == "environment"
    assert said in status.error
    with pytest.raises(ConformanceError) as found:
        check_env(env, seeds=[0])
    assert f"[agents] {said}" in str(found.value) or said in str(found.value)


def test_an_agent_that_another_plays_is_not_trained_and_a_wrong_name_ends_the_run():
    async def main():
        async with talking() as engine, talking() as other:
            frozen = Role(
                EnginePolicy(
                    other, SamplingParams(max_tokens=40, temperature=1.0, stop_token_ids=(3,)), 60
                ),
                RENDERER,
                trained=False,
            )
            scripted = Role(ScriptedPolicy(strong_player, RENDERER), RENDERER, trained=False)
            for role in (frozen, scripted):
                task = Task("env", 1, {"hands": 4})
                (north,) = await player(engine, KuhnPoker, others={"south": role}).play(
                    Assignment("e", task, 0)
                )
                assert north.agent == "north"
                assert {request.id.split("/")[1] for request in engine.requests} == {"north"}
            assert {request.id.split("/")[1] for request in other.requests} == {"south"}
            with pytest.raises(
                ConfigError, match="names east, which the environment does not have"
            ):
                await player(engine, KuhnPoker, others={"east": frozen}).play(
                    Assignment("e", task, 0)
                )
            everybody = {"north": frozen, "south": frozen}
            with pytest.raises(ConfigError, match="leaves no agent to the policy"):
                await player(engine, KuhnPoker, others=everybody).play(Assignment("e", task, 0))
            alone = telling((0.0, {}), reset={"agent": "somebody"})
            with pytest.raises(ConfigError, match="it has no agents with names"):
                await player(engine, alone, others={"east": frozen}).play(Assignment("e", task, 0))

    run_virtual(main)


def test_infos_of_an_environment_without_agents_mean_nothing():
    (alone,) = play_once(
        talking(), telling((1.0, {"agent": 5, "rewards": 7}), reset={"agent": "somebody"})
    )
    assert (alone.agent, alone.status, alone.env_return) == ("", Terminated(), 1.0)


def two_sided(rewards: dict[str, list[float]]) -> Group:
    task = Task("env", 0)
    turn = Turn((1,), Completion((2,), (0.0,), (0,), "stop"), 0.0, {})
    pairs = [
        (Trajectory("e", task, (turn,), Terminated(), agent=agent), Score(reward))
        for agent in rewards
        for reward in rewards[agent]
    ]
    return Group(task, tuple(t for t, _ in pairs), tuple(s for _, s in pairs))


def test_an_agent_is_compared_with_itself_in_the_other_episodes():
    group = two_sided({"strong seat": [3.0, 5.0], "weak seat": [-5.0, -3.0]})
    assert [part.rewards_G for part in group.by_agent()] == [[3.0, 5.0], [-5.0, -3.0]]
    algorithm = Grpo(Grpo.Config(advantage="group_mean"))
    assert [sample.advantages[-1] for sample in samples_of([group], algorithm, 0)] == [-1, 1, -1, 1]
    assert group.has_signal
    assert not two_sided({"strong seat": [3.0, 3.0], "weak seat": [-3.0, -3.0]}).has_signal


def test_groups_of_a_game_hold_every_agent_and_the_ledger_counts_episodes():
    async def main():
        config = RolloutConfig(
            groups_per_step=3, group_size=4, budget=Budget(turns=20), filter_zero_variance=True
        )
        ledger = Ledger(":memory:")
        async with talking() as engine:
            rollouts = Rollouts(
                config,
                tasks=SeededTasks(NoSettings(), "env", 0, options={"hands": 3}),
                runner=player(engine, KuhnPoker),
                reward=Returns(),
                engine=engine,
                ledger=ledger,
                seed=0,
                groups=3,
            )
            async with rollouts:
                groups = await rollouts.next_batch()
        return groups, ledger

    groups, ledger = run_virtual(main)
    for group in groups:
        assert [t.agent for t in group.trajectories] == ["north"] * 4 + ["south"] * 4
        by_episode = defaultdict(float)
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            by_episode[trajectory.id] += score.value
        assert list(by_episode.values()) == [0.0] * 4, (
            "the game is zero-sum, and the rewards stay with their episode"
        )
    assert ledger.episode_fates().trained == 12
    assert ledger.task_fates().settled
    assert ledger.episode_fates().settled


class Returns:
    async def score(self, trajectory):
        return Score(trajectory.env_return)


class Ranks:
    """A reward that compares the members of a group."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    async def score_group(self, trajectories):
        self.asked.append({trajectory.agent for trajectory in trajectories})
        return [Score(float(rank)) for rank, _ in enumerate(trajectories)]


def test_a_reward_that_compares_is_asked_about_one_agent_at_a_time():
    ranks = Ranks()

    async def main() -> Group:
        config = RolloutConfig(groups_per_step=1, group_size=3, budget=Budget(turns=20))
        async with talking() as engine:
            rollouts = Rollouts(
                config,
                tasks=SeededTasks(NoSettings(), "env", 0),
                runner=player(engine, KuhnPoker),
                reward=ranks,
                engine=engine,
                ledger=Ledger(":memory:"),
                seed=0,
                groups=1,
            )
            async with rollouts:
                (group,) = await rollouts.next_batch()
        return group

    assert [part.rewards_G for part in run_virtual(main).by_agent()] == [[0, 1, 2], [0, 1, 2]]
    assert ranks.asked == [{"north"}, {"south"}]


@pytest.mark.parametrize("transport", ["inline", "thread", "process", "http"])
def test_every_transport_carries_the_agents(transport):
    async def play(make_env, isolation=None) -> list[tuple]:
        host = EnvPool({"env": make_env}, EnvDeadlines(), isolation)
        async with talking() as engine:
            policy = EnginePolicy(
                engine, SamplingParams(max_tokens=40, temperature=1.0, stop_token_ids=(3,)), 60
            )
            task = Task("env", 3, {"hands": 5})
            played = await EnvEpisodeRunner(policy, RENDERER, host, Budget(turns=50), 60).play(
                Assignment("e", task, 1)
            )
        await host.close()
        return [
            (t.agent, t.status, t.messages, [turn.reward for turn in t.turns], t.head_start)
            for t in played
        ]

    expected = asyncio.run(play(KuhnPoker))
    assert [agent for agent, *_ in expected] == ["north", "south"]
    if transport == "http":
        server: EnvServer
        with served(KuhnPoker) as server:
            assert asyncio.run(play(env_factory(server.url))) == expected
    else:
        assert asyncio.run(play(env_factory("kuhn_poker", transport), transport)) == expected


def test_the_players_of_a_textarena_game_are_agents():
    pytest.importorskip("textarena")
    env = plugins.load("envs", "textarena:TicTacToe-v0")()
    seen, info = env.reset(seed=0, options={"opponent": "agent"})
    assert info == {"agents": ["player_0", "player_1"], "agent": "player_0"}
    assert "Available Moves" in seen
    for cell, following in zip(
        (0, 3, 1, 4), ("player_1", "player_0", "player_1", "player_0"), strict=True
    ):
        seen, reward, over, _, info = env.step(f"[{cell}]")
        assert (reward, over, info) == (0.0, False, {"agent": following})
        assert f"'[{cell}]'" not in seen.rpartition("Available Moves")[2]
    _, reward, over, truncated, info = env.step("[2]")
    assert (reward, over, truncated) == (1.0, True, False)
    assert info == {
        "rewards": {"player_0": 1, "player_1": -1},
        "success": {"player_0": True, "player_1": False},
    }


@pytest.mark.parametrize("name", ["TicTacToe-v0", "IteratedPrisonersDilemma-v0", "Nim-v0"])
def test_textarena_games_of_agents_keep_the_contract(name):
    pytest.importorskip("textarena")
    check_env(
        plugins.load("envs", f"textarena:{name}"),
        seeds=(0,),
        max_turns=4,
        options={"opponent": "agent"},
    )
