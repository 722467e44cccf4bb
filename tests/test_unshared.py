"""What an environment, a reward or a program does to what it gets is seen nowhere else."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.flow import Retries
from agentrl.hosting.client_options import ClientOptions
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.plugins import NoSettings
from agentrl.recipes.demonstrations import DemonstrationsConfig, _player
from agentrl.rollout.mixture import Mixture, Share
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.scoring.rule_pool import RulePool
from agentrl.tasks.dataset import DatasetTasks
from agentrl.tasks.env_config import OneEnv
from agentrl.tasks.levels import Levels
from agentrl.tasks.pools import DifficultyPools
from agentrl.tasks.seeded import SeededTasks
from agentrl.tasks.suite_tasks import suite_episodes
from agentrl.tasks.suites import SuiteConfig
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Message, Score, Task, ToolCall, unshared

trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=20,
)
HERE = "tests.test_unshared"


def parts_of(tree):
    """All lists and dicts of a tree."""
    inner = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    )
    own = [tree] if isinstance(tree, dict | list) else []
    return own + [part for one in inner for part in parts_of(one)]


@given(trees)
def test_a_copy_is_equal_and_shares_nothing_that_can_be_changed(tree):
    copied = unshared(tree, "it")
    assert copied == tree
    assert type(copied) is type(tree)
    assert not {id(part) for part in parts_of(tree)} & {id(part) for part in parts_of(copied)}


def test_what_cannot_be_copied_is_refused_by_name_before_anything_is_played():
    with pytest.raises(
        ConfigError, match=r"the options of task 't1' hold <unlocked .*cannot be copied"
    ):
        Task("x", 0, {"deep": [{"lock": threading.Lock()}]}, "t1")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="hold themselves"):
        Task("x", 0, {"loop": loop})
    assert Task("x", 0, MappingProxyType({"a": MappingProxyType({"b": 1})})).options == {
        "a": {"b": 1}
    }


def sources(folder: Path):
    """(two tasks of one source, or of two that share options) for each kind of source."""
    shared = {"seen": []}
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{number}", "answer": [number]}) + "\n" for number in range(4)
        )
    )
    seeded = [SeededTasks(NoSettings(), "e", 0, split, shared) for split in ("train", "held-out")]
    yield seeded[0].task(0), seeded[1].task(0)
    yield seeded[0].task(0), seeded[0].task(0)
    levels = Levels(Levels.Config(levels=({"a": 1}, {"a": 2})), "e", 0, "held-out", shared)
    yield levels.task(0), levels.task(2)
    for kind in (DatasetTasks, DifficultyPools):
        data = kind(kind.Config(data=str(rows), held_out=0), "e", 0, "train", shared)
        yield data.task(0), data.task(1)
    suite = SuiteConfig(name="s", tasks=2, samples=2)
    first, second, *_ = suite_episodes(suite, OneEnv(name="frozen_lake", options=shared))
    yield first, second
    mixed = Mixture([Share("a", "e", 1.0, seeded[0], 2, 1)])
    yield mixed.task(0), mixed.task(1)
    assert shared == {"seen": []}


def test_no_task_of_any_source_shares_its_options_with_another(tmp_path):
    for number, (one, other) in enumerate(sources(tmp_path)):
        one.options["seen"].append("changed")
        one.options["more"] = 1
        assert other.options["seen"] == [], number
        assert "more" not in other.options, number


class Spoils:
    """An environment that says which options it was given, and changes them at all depths."""

    isolation = "inline"

    def reset(self, *, seed, options):
        said = json.dumps(options, sort_keys=True)
        options["list"].append(seed)
        options["more"] = options.pop("plain")
        self.options = options
        return said, {"list": options["list"]}

    def step(self, action):
        self.options["list"].append(action)
        return action, 0.0, True, False, {"list": self.options["list"]}

    def close(self):
        pass


class SpoilsLater(Spoils):
    async def reset(self, *, seed, options):
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        return super().step(action)


@pytest.mark.parametrize(
    ("make", "isolation"),
    [
        (Spoils, "inline"),
        (Spoils, "thread"),
        (SpoilsLater, None),
        (lambda: ProcessEnv(f"{HERE}:Spoils"), None),
        (lambda: ClientOptions(ClientOptions.Config(fixed={"list": [[0]]}), Spoils()), "inline"),
    ],
    ids=["inline", "thread", "async", "process", "served"],
)
def test_every_episode_begins_with_the_options_of_its_task(make, isolation):
    task = Task("e", 3, {"list": [[0]], "plain": {"a": 1}})
    begun = json.dumps(dict(task.options), sort_keys=True)

    async def main():
        envs = EnvPool({"e": make}, EnvDeadlines(), isolation)
        for _ in range(3):
            env = envs.acquire("e")
            said, info = await env.reset(task.seed, task.options)
            *_, later = await env.step("go")
            assert said == begun
            assert (info, later) == ({"list": [[0], 3]}, {"list": [[0], 3, "go"]})
            await envs.release("e", env)
        await envs.close()

    asyncio.run(main())
    assert json.dumps(dict(task.options), sort_keys=True) == begun


class Pops:
    """A reward of all that it gets, which takes it away."""

    def __init__(self, fails: int = 0) -> None:
        self.parts: dict[str, float] = {}
        self.fails = fails

    def score(self, played):
        call = played.messages[-1].tool_calls[0]
        value = (
            played.task.options.pop("gold", 0)
            + len(played.task.options["deep"])
            + played.turns[0].info.pop("n", 0)
        )
        value += call.arguments.pop("x", 0)
        played.task.options["deep"].append(1)
        call.arguments["deep"].clear()
        self.fails -= 1
        if self.fails >= 0:
            raise ValueError("again")
        self.parts["seen"] = value
        return Score(value, self.parts)


class PopsOfGroup(Pops):
    async def score_group(self, trajectories):
        return [self.score(one) for one in trajectories]


def member():
    call = ToolCall("look", {"x": 4, "deep": [1]})
    played = trajectory("yes", options={"gold": 1, "deep": []})
    turns = tuple(replace(turn, info={"n": 2}) for turn in played.turns)
    return replace(
        played, turns=turns, messages=(Message("assistant", call.render(), tool_calls=(call,)),)
    )


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
def test_a_reward_that_takes_what_it_gets_scores_equal_members_equally_wherever_it_runs(isolation):
    one = member()
    group = [one, one, member()]
    # In a process each call has a reward of its own, so one that fails once would fail for ever.
    fails = 0 if isolation == "process" else 1
    parts = [
        RewardPart(Pops(fails), "pops", 1.0, isolation),
        RewardPart(Pops(), "too", 10.0, isolation),
    ]

    async def main():
        async with RewardPipeline(
            parts, RulePool(), deadline=60.0, retries=Retries(reward=3)
        ) as reward:
            return [await reward.score(played) for played in group]

    scores = asyncio.run(main())
    assert [score.value for score in scores] == [77.0] * 3
    assert [dict(score.parts) for score in scores] == [
        {"pops": 7, "pops/seen": 7, "too": 7, "too/seen": 7}
    ] * 3
    assert one == member()


def test_a_reward_that_compares_members_changes_none_of_them():
    one = member()

    async def main():
        parts = [RewardPart(PopsOfGroup(), "first"), RewardPart(PopsOfGroup(), "second")]
        async with RewardPipeline(parts, deadline=10.0) as reward:
            return await reward.score_group([one, one], [Score(0.0), Score(0.0)])

    assert [score.value for score in asyncio.run(main())] == [14.0, 14.0]
    assert one == member()


def test_a_reward_that_uses_one_mapping_for_all_its_scores_changes_no_earlier_one():
    reward = Pops()
    part = RewardPart(reward, "pops", isolation="inline")

    async def main():
        asked = part.bind(RulePool())
        (first,) = await asked([member()])
        reward.parts["seen"] = -1.0
        return first

    assert asyncio.run(main()).parts == {"seen": 7}


def spoils_options(env, rng, *, words):
    return words.pop()


def test_each_call_of_a_scripted_player_gets_its_options_anew():
    chosen = DemonstrationsConfig(
        player=f"{HERE}:spoils_options", options={"words": ["left", "right"]}
    )
    player = _player(chosen)
    assert [player(None, None) for _ in range(3)] == ["right"] * 3
    assert chosen.options == {"words": ["left", "right"]}
