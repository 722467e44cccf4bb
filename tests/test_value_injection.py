"""RL3's value injection: value iteration over observations, in trials of several episodes."""

import asyncio
import importlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.base import TextEnv
from agentrl.envs.oracle import OracleEnv
from agentrl.errors import ConfigError, EnvError
from agentrl.hosting.wrappers import wrapper
from agentrl.protocols import StepResult
from agentrl.testing import check_env

EXAMPLE = Path(__file__).parents[1] / "examples" / "value_injection"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is used by its module's name, as from `PYTHONPATH`."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(EXAMPLE))
    module = importlib.import_module("value_injection")
TabularModel, ValueInjection = module.TabularModel, module.ValueInjection

SEEN = [
    ("A", "go", 0.0, "B"),
    ("B", "win", 1.0, None),
    ("B", "win", 0.0, "A"),
    ("B", "leave", 0.3, None),
]


def model_of(seen: list[tuple[str, str, float, str | None]]) -> Any:
    model = TabularModel()
    for one in seen:
        model.see(*one)
    return model


def test_the_values_are_those_of_value_iteration_by_hand() -> None:
    """V(A) = 0.9 V(B), and V(B) = 0.5 * 1 + 0.5 * 0.9 V(A): so V(B) = 0.5 / (1 - 0.405)."""
    at_b = 0.5 / (1 - 0.5 * 0.9**2)
    found = model_of(SEEN).q_values(0.9, 1000, 1e-12)
    assert found["A"] == pytest.approx({"go": 0.9 * at_b})
    assert found["B"] == pytest.approx({"win": at_b, "leave": 0.3})
    once = model_of(SEEN).q_values(0.9, 1, 0.0)
    assert once["A"] == {"go": 0.0}
    assert once["B"] == {"leave": 0.3, "win": 0.5}
    assert TabularModel().q_values(0.9, 10, 0.0) == {}


def test_the_order_in_which_things_were_seen_changes_no_bit() -> None:
    rng = random.Random(0)
    wanted = model_of(SEEN).q_values(0.9, 50, 0.0)
    for _ in range(10):
        found = model_of(rng.sample(SEEN, len(SEEN))).q_values(0.9, 50, 0.0)
        assert found == wanted
        assert [*found] == [*wanted]
        assert [*found["B"]] == [*wanted["B"]]


def test_a_state_where_nothing_was_tried_is_worth_nothing_and_a_loop_is_bounded() -> None:
    assert model_of([("A", "go", 0.5, "unknown")]).q_values(0.9, 100, 0.0) == {"A": {"go": 0.5}}
    assert model_of([("A", "stay", 1.0, "A")]).q_values(1.0, 7, 0.0) == {"A": {"stay": 7.0}}


class Door(TextEnv):
    """Two doors in two rooms. `resets` counts the episodes. Right leads on, left ends it without a
    prize.
    """

    isolation = "inline"
    system_prompt = "Choose a door."
    resets = 0

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.resets += 1
        self.room = 1
        return f"room 1 of house {seed}"

    def step(self, action: str) -> StepResult:
        if action == "wait":
            return "room 1 of house 7", 0.0, False, True, {}
        if action == "left" or self.room == 2:
            return "out", float(action == "right"), True, False, {"success": action == "right"}
        self.room = 2
        return "room 2", 0.0, False, False, {}


class SlowDoor(Door):
    """The same, with methods that are coroutines."""

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().start(seed, options)

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)


def played(inner: Door, actions: list[str], **settings: Any) -> list[Any]:
    async def main() -> list[Any]:
        env = ValueInjection(
            ValueInjection.Config(**{"episodes": 2, "gamma": 0.5} | settings), inner
        )
        results: list[Any] = []
        begun = env.reset(seed=7, options={})
        results.append(begun if isinstance(begun, tuple) else await begun)
        for action in actions:
            stepped = env.step(action)
            results.append(stepped if isinstance(stepped, tuple) else await stepped)
        return results

    return asyncio.run(main())


@pytest.mark.parametrize("kind", [Door, SlowDoor])
def test_a_trial_has_several_episodes_and_shows_what_the_earlier_ones_taught(
    kind: type[Door],
) -> None:
    inner = kind()
    first, on, again, stay, end = played(inner, ["right", "right", "right", "left"])
    assert first[0] == "Episode 1 of 2.\nroom 1 of house 7"
    assert on == ("room 2", 0.0, False, False, {})
    assert again == (
        "out\nEpisode 2 of 2.\nroom 1 of house 7\nTried: right 0.50 (1).",
        1.0,
        False,
        False,
        {},
    )
    assert stay[0] == "room 2\nTried: right 1.00 (1)."
    assert end == ("out", 0.0, True, False, {"success": False})
    assert inner.resets == 2


def test_a_new_trial_knows_nothing_of_the_last_one() -> None:
    inner = Door()
    played(inner, ["right", "right", "right", "right"])
    assert played(inner, [])[0][0] == "Episode 1 of 2.\nroom 1 of house 7"


def test_an_episode_that_a_limit_cut_is_not_at_its_end_for_the_estimate() -> None:
    """Waiting leads to room 1 itself, which is worth a half: the prize is one turn after it."""
    *_, third, last = played(Door(), ["wait", "right", "right", "wait"], episodes=3)
    assert third[0].endswith("\nTried: right 0.50 (1), wait 0.25 (1).")
    assert last[2:4] == (False, True)


def test_the_wrapped_environment_keeps_the_contract() -> None:
    injected = wrapper({"name": "value_injection:ValueInjection", "episodes": 3})
    check_env(
        lambda: injected.make(OracleEnv()), options={"problem": "corridor"}, actions=("on", "take")
    )


def test_a_game_of_several_agents_is_refused() -> None:
    from agentrl.envs.kuhn_poker import KuhnPoker

    with pytest.raises(EnvError, match="estimates the task of one agent"):
        ValueInjection(ValueInjection.Config(episodes=2), KuhnPoker()).reset(seed=0, options={})
    with pytest.raises(ConfigError, match="episodes"):
        wrapper({"name": "value_injection:ValueInjection"})


def test_in_a_played_problem_the_values_tend_to_the_exact_ones() -> None:
    """The chain is deterministic: when all was tried, the estimate is the problem itself."""
    env = ValueInjection(ValueInjection.Config(episodes=200, gamma=1.0), OracleEnv())
    env.reset(seed=0, options={"problem": "chain", "settings": {"length": 2}})
    rng = random.Random(0)
    over = False
    while not over:
        _, _, over, _, _ = env.step(rng.choice(["same", "other"]))  # type: ignore[misc]
    values = env._model.q_values(1.0, 100, 0.0)
    assert values["2 start"] == pytest.approx({"same": 0.2 + 1.0, "other": -0.1 + 0.5})


class Spoils(Door):
    """Changes the options that it gets."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        said = repr(dict(options))
        options["list"].append(1)
        return said

    def step(self, action: str) -> StepResult:
        return "out", 0.0, True, False, {}


def test_each_episode_of_a_trial_begins_with_the_same_options() -> None:
    trial = ValueInjection(ValueInjection.Config(episodes=3), Spoils())
    first, _ = trial.reset(seed=3, options={"list": []})
    texts = [first, *(trial.step("go")[0] for _ in range(2))]
    assert all("{'list': []}" in text for text in texts)
