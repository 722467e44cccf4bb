"""Pictures that environments draw of their states: they reach the trajectory over every transport,
and no further.
"""

import asyncio
import json

import pytest

from agentrl import plugins
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.frozen_lake import FrozenLake, careful_player
from agentrl.errors import EnvError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pictures import PICTURE, taken
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Task, Trajectory

RENDERER = TemplateRenderer(ByteTokenizer())


def played(
    factory, *, isolation=None, pictures=True, picture_bytes=1 << 16, player=careful_player
) -> Trajectory:
    async def main() -> Trajectory:
        host = EnvPool({"env": factory}, EnvDeadlines(), isolation, pictures=pictures)
        policy = ScriptedPolicy(player, RENDERER)
        runner = EnvEpisodeRunner(
            policy, RENDERER, host, Budget(turns=4), 60.0, picture_bytes=picture_bytes
        )
        (trajectory,) = await runner.play(Assignment("e", Task("env", 3), 1))
        await host.close()
        return trajectory

    return asyncio.run(main())


def pictures_of(trajectory: Trajectory) -> list[str]:
    return [*(turn.picture for turn in trajectory.turns), trajectory.picture]


class Drawing:
    """Counts its steps, and draws what its options say."""

    drawn: object = "<b>{}</b>"

    def reset(self, *, seed, options):
        self.steps = 0
        return "begin", {}

    def step(self, action):
        self.steps += 1
        return str(self.steps), 0.0, False, False, {"of": "mine"}

    def render_html(self):
        if isinstance(self.drawn, Exception):
            raise self.drawn
        return self.drawn.format(self.steps) if isinstance(self.drawn, str) else self.drawn

    def close(self):
        pass


class AsyncDrawing(Drawing):
    async def reset(self, *, seed, options):
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        return super().step(action)


@pytest.mark.parametrize("make", [Drawing, AsyncDrawing])
def test_each_turn_has_the_picture_of_the_state_it_answers_and_the_episode_that_of_its_end(make):
    trajectory = played(make, player=lambda env, rng: "go")
    assert pictures_of(trajectory) == [f"<b>{number}</b>" for number in range(5)]
    assert [turn.info for turn in trajectory.turns] == [{"of": "mine"}] * 4


def test_the_pictures_are_the_same_inline_in_a_thread_and_in_a_process():
    inline = pictures_of(played(FrozenLake))
    assert len(set(inline)) > 1
    assert all(picture.startswith("<svg") for picture in inline)
    assert pictures_of(played(FrozenLake, isolation="thread")) == inline
    address = f"{FrozenLake.__module__}:{FrozenLake.__qualname__}"
    assert pictures_of(played(lambda: ProcessEnv(address))) == inline


def test_none_is_drawn_or_kept_where_it_is_not_wanted():
    assert set(pictures_of(played(FrozenLake, pictures=False))) == {""}
    assert set(pictures_of(played(FrozenLake, picture_bytes=0))) == {""}


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (
            ZeroDivisionError("<mine>"),
            "render_html raised ZeroDivisionError(&#x27;&lt;mine&gt;&#x27;)",
        ),
        (None, "render_html returned NoneType, and no text"),
        ("x" * 2000, "a picture of 2,000 bytes was not kept"),
        ("half \ud800 a pair", "half ? a pair"),
    ],
)
def test_a_picture_that_cannot_be_kept_fails_no_episode_and_says_why(drawn, said, monkeypatch):
    monkeypatch.setattr(Drawing, "drawn", drawn)
    trajectory = played(Drawing, picture_bytes=1000, player=lambda env, rng: "go")
    assert trajectory.status.name == "truncated"
    assert all(said in picture for picture in pictures_of(trajectory))


def test_a_malformed_reply_is_refused_as_it_is_without_pictures():
    class Malformed(Drawing):
        def step(self, action):
            return "only an observation", {}

    async def main() -> None:
        live = EnvPool({"env": Malformed}, EnvDeadlines(), pictures=True).acquire("env")
        await live.reset(0, {})
        with pytest.raises(
            EnvError, match=r"Malformed\.step must return \(observation: str, reward"
        ):
            await live.step("go")
        await live.close()

    asyncio.run(main())


def test_what_a_server_sends_is_bounded_too_and_must_be_text():
    assert taken({PICTURE: "ok", "a": 1}, 2) == ("ok", {"a": 1})
    assert taken({PICTURE: ["no"], "a": 1}, 9) == ("", {"a": 1})
    assert taken({"a": 1}, 9) == ("", {"a": 1})
    assert "3 bytes" in taken({PICTURE: "éa"}, 2)[0]


@pytest.mark.parametrize(
    "name", ["frozen_lake", "sokoban", "text_maze", "kuhn_poker", "gymnasium:Taxi-v4"]
)
def test_the_built_in_boards_draw_themselves_from_beginning_to_end(name):
    env = plugins.load("envs", name)()
    env.reset(seed=1, options={})
    drawn = [env.render_html()]
    for word in ("right", "down", "up", "left", "north", "bet", "call"):
        *_, terminated, truncated, info = env.step(word)
        drawn.append(env.render_html())
        json.dumps(info)
        if terminated or truncated:
            break
    assert len(set(drawn)) > 1
    assert all(len(picture) < 32 * 1024 for picture in drawn)
    assert not any("<script" in picture for picture in drawn)
