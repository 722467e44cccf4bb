"""Runs of several agents: frozen opponents follow the policy at their distance, and only the policy
is trained.
"""

import asyncio
import io
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.algorithms.grpo import Grpo
from agentrl.assembly import assemble_training
from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError
from agentrl.flow import run_virtual
from agentrl.protocols import Trainer
from agentrl.rollout.agents import FrozenRoute, PolicyRoute, ScriptedRoute
from agentrl.rollout.assignment import Assignment
from agentrl.testing import ScriptedEngine
from agentrl.trajectory import Task
from agentrl.weights.config import WeightsConfig
from agentrl.weights.publisher import WeightPublisher

RUN = """
env:
  name: kuhn_poker
  options: {hands: 4}
  agents: {south: {name: frozen, refresh: 2}}
  wrappers: [{name: time_limit, turns: 9}]
rollout:
  {groups_per_step: 2, group_size: 4, sampling: {max_tokens: 4}, context: {name: last_k, turns: 1}}
trainer: {lr: 1e-3}
checkpoint: {every: 2}
evaluation: {tasks: 4}
trackers: []
steps: 2
"""


def loaded(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "kuhn.yaml"
    path.write_text(RUN)
    return load_config(path, overrides).config


def test_a_frozen_agent_takes_up_the_versions_that_its_number_divides():
    class Weights(Trainer):
        async def weights(self):
            return {}

    async def main() -> list[tuple[int, int]]:
        async with (
            ScriptedEngine(lambda ids: ()) as engine,
            ScriptedEngine(lambda ids: ()) as frozen,
        ):
            publisher = WeightPublisher(engine, ((frozen, 2),), WeightsConfig(transport="direct"))
            versions = []
            for version in range(1, 6):
                await publisher.publish(Weights(), version)
                versions.append((engine.policy_version, frozen.policy_version))
            return versions

    assert run_virtual(main) == [(1, 0), (2, 2), (3, 2), (4, 4), (5, 4)]


def test_who_plays_whom_is_read_from_the_config_and_what_cannot_be_is_said(tmp_path):
    config = loaded(
        tmp_path, "env.agents.north=policy", "env.agents.west={name: scripted, player: 'a:b'}"
    )
    assert config.env.agents == {
        "south": FrozenRoute(refresh=2),
        "north": PolicyRoute(),
        "west": ScriptedRoute(player="a:b"),
    }
    for override, said in {
        "env.agents.south.refresh=3": (
            "env.agents.south.refresh (3) must divide checkpoint.every (2)"
        ),
        "env.agents.south.model=runs/x": "leave out model",
        "env.agents.south.refreh=1": "Did you mean 'refresh'?",
        "env.agents.north=frosen": "write one of policy, frozen, scripted",
        "rollout.context.turn=2": "Did you mean 'turns'?",
        "rollout.context=last_j": "write one of full, last_k, scratchpad, summary",
    }.items():
        with pytest.raises(ConfigError) as caught:
            loaded(tmp_path, override)
        assert said in str(caught.value)


STRONG = ("play", "kuhn_poker", "--seed", "4", "--player", "agentrl.envs.kuhn_poker:strong_player")


def test_a_person_takes_one_seat_and_sees_only_what_is_told_there(agentrl, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("bet\ncheck\n"))
    said = agentrl(*STRONG, "--as", "north", "--options", "{hands: 2}").stdout
    assert "user (north) Hand 1 of 2. You hold the jack." in said
    assert "(south)" not in said
    assert "reward north -3, south 3" in said
    watched = agentrl(*STRONG).stdout
    assert "user (south) Hand 1 of 1. You hold the queen." in watched


def test_a_seat_that_is_not_there_is_said(agentrl):
    assert "there are north, south" in agentrl(*STRONG, "--as", "east").stderr
    assert "needs a --player" in agentrl("play", "kuhn_poker", "--as", "north").stderr


@pytest.mark.slow
def test_a_run_trains_its_own_agents_and_says_how_each_did(tmp_path, agentrl):
    loaded(tmp_path)
    done = agentrl(
        "train",
        "kuhn.yaml",
        f"env.agents.south.model={tmp_path}/no",
        "env.agents.south.refresh=0",
        cwd=tmp_path,
    )
    assert "env.agents.south.model" in done.stderr + done.stdout
    done = agentrl("train", "kuhn.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "kuhn"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(("agents/north/reward" in row) == ("reward" in row) for row in rows)
    assert {
        key for row in rows for key in row if key.startswith(("agents/south", "eval/agents/south"))
    } == set()
    assert [row["eval/agents/north/success"] for row in rows if "eval/success" in row]
    played = pq.read_table(folder / "trajectories" / "step_000000.parquet").to_pylist()
    assert [episode["agent"] for episode in played] == ["north"] * 8
    fates = json.loads((folder / "summary.json").read_text())["episodes"]
    assert (fates["trained"], fates["total"]) == (16, 16)


@pytest.mark.slow
def test_frozen_engines_are_shared_by_agents_of_one_kind_and_scripts_play_the_rest(
    tmp_path, tiny_model_dir
):
    config = loaded(tmp_path, "env.agents.north=policy")

    async def main() -> None:
        async with assemble_training(config, Grpo(), tiny_model_dir) as parts:
            frozen = parts.frozen[FrozenRoute(refresh=2)]
            await parts.weights.publish(parts.trainer, 1)
            assert (parts.engine.policy_version, frozen.policy_version) == (1, 0)
            await parts.weights.publish(parts.trainer, 2)
            assert (parts.engine.policy_version, frozen.policy_version) == (2, 2)
            (north,) = await parts.runner.play(
                Assignment("e", Task("kuhn_poker", 2, {"hands": 4}), 0)
            )
            assert north.agent == "north"
            assert frozen.stats().generated_tokens > 0
            assert {
                version for turn in north.turns for version in turn.completion.policy_versions
            } == {2}

    asyncio.run(main())
    strong = "env.agents.south={name: scripted, player: 'agentrl.envs.kuhn_poker:strong_player'}"
    scripted = load_config(tmp_path / "kuhn.yaml", ["env.agents={}", strong]).config

    async def against_a_script() -> None:
        async with assemble_training(scripted, Grpo(), tiny_model_dir) as parts:
            assert parts.frozen == {}
            (north,) = await parts.runner.play(
                Assignment("e", Task("kuhn_poker", 2, {"hands": 4}), 0)
            )
            assert north.trainable

    asyncio.run(against_a_script())
