"""Self-play against snapshots: who plays whom, that it does not change in mid-episode, and that a
resume repeats it.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from agentrl.errors import WeightsError
from agentrl.flow import Flow
from agentrl.rollout.assignment import Assignment, Report, ignore_reports
from agentrl.rollout.config import OpponentsConfig
from agentrl.rollout.episode import EnvEpisodeRunner, Role
from agentrl.rollout.opponents import Matches, Opponent, SelfPlay
from agentrl.rollout.results import Games, Results
from agentrl.testing import ScriptedEngine
from agentrl.trajectory import Group, Score, Task, Terminated, Trajectory
from agentrl.weights.snapshots import Snapshots
from tests.rollout.test_agents import RENDERER, player, talking

AGENTS = ("north", "south")


@dataclass(frozen=True, slots=True)
class Recorded(EnvEpisodeRunner):
    """Plays nothing, and says who would have played each agent. An episode ends when `may_end` is
    set.
    """

    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def play(
        self, assignment: Assignment, report: Report = ignore_reports
    ) -> tuple[Trajectory, ...]:
        await self.may_end.wait()
        agents = [agent for agent in AGENTS if agent not in self.others]
        return tuple(
            Trajectory(assignment.id, assignment.task, (), Terminated(), agent=agent)
            for agent in agents
        )


class Served(ScriptedEngine):
    """An engine that remembers the number in the weights that it serves."""

    def __init__(self) -> None:
        super().__init__(lambda ids: (0.0,) * 300)
        self.number = 0.0

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        await super().update_weights(weights, version)
        self.number = float(weights["w"][0])


@dataclass
class Table:
    """Self-play with opponents that serve numbers for weights: version v is the number v."""

    folder: Path
    settings: OpponentsConfig
    seed: int = 0
    engines: list[Served] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> "Table":
        snapshots = Snapshots(self.folder / "opponents", self.settings.every, self.settings.pool)
        self.engines = [Served() for _ in range(self.settings.num_engines)]
        for engine in self.engines:
            await engine.__aenter__()
        base = player(talking(), lambda: None)
        opponents = [
            Opponent(Role(base.policy, RENDERER, trained=False), one, snapshots, 60)
            for one in self.engines
        ]
        runner = Recorded(base.policy, RENDERER, base.envs, 9, 600, may_end=self.may_end)
        matches = Matches(self.settings, AGENTS)
        self.play = SelfPlay(
            matches, self.seed, runner, opponents, snapshots, self.folder / "model"
        )
        self.may_end.set()
        if opponents:
            snapshots.write(0, {"w": torch.zeros(1)})
        return self

    async def __aexit__(self, *exc: object) -> None:
        for engine in self.engines:
            await engine.__aexit__(None, None, None)

    async def publish(self, version: int) -> None:
        await self.play.take_version({"w": torch.full((1,), float(version))}, version)

    async def games(self, count: int, members: int = 4) -> list[Trajectory]:
        async with Flow("games") as flow:
            tasks = [
                flow.start(
                    self.play.play(
                        Assignment(f"{n}/{m}/0", Task("e", n, {}, f"train-{n}"), 0, member=m)
                    ),
                    name=f"{n}",
                )
                for n in range(count)
                for m in range(members)
            ]
        return [trajectory for task in tasks for trajectory in task.result()]


def test_the_policy_plays_each_seat_equally_often_and_itself_as_often_as_configured(tmp_path):
    async def main() -> None:
        async with Table(tmp_path, OpponentsConfig(latest=0.25, every=1, pool=3)) as table:
            alone = await table.games(20)
            assert {one.opponent for one in alone} == {None}, "there is no snapshot yet"
            await table.publish(1)
            played = await table.games(400)
        against = [one for one in played if one.opponent is not None]
        assert Counter(one.agent for one in against) == {
            "north": len(against) / 2,
            "south": len(against) / 2,
        }
        by_group = Counter(one.task.id for one in against)
        assert set(by_group.values()) == {4}, "a group meets one opponent"
        assert len(by_group) / 400 == pytest.approx(0.75, abs=0.06)

    asyncio.run(main())


def test_seats_may_be_chosen(tmp_path):
    async def main() -> None:
        async with Table(tmp_path, OpponentsConfig(latest=0, every=1, seats=("south",))) as table:
            await table.publish(1)
            assert {one.agent for one in await table.games(20)} == {"south"}

    asyncio.run(main())


def test_without_a_pool_there_is_no_engine_and_no_snapshot(tmp_path):
    async def main() -> None:
        async with Table(tmp_path, OpponentsConfig(latest=1)) as table:
            await table.publish(10)
            assert {one.opponent for one in await table.games(5)} == {None}
            assert table.engines == []
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())


def test_each_engine_serves_another_snapshot_and_every_one_of_the_pool_is_met(tmp_path):
    async def main() -> None:
        met: set[int | None] = set()
        async with Table(tmp_path, OpponentsConfig(latest=0, every=2, pool=3, engines=2)) as table:
            for version in range(1, 30):
                await table.publish(version)
                now = {one.opponent for one in await table.games(12)}
                assert now <= set(table.play.snapshots.needed(version))
                assert len(now) == min(2, len(table.play.snapshots.needed(version)))
                assert now <= {engine.number for engine in table.engines}
                met |= now
        assert met == set(range(0, 30, 2))
        assert len(list((tmp_path / "opponents").iterdir())) <= 5

    asyncio.run(main())


def test_an_opponent_does_not_change_in_mid_episode_and_new_episodes_wait_for_the_new_one(tmp_path):
    async def main() -> None:
        async with Table(tmp_path, OpponentsConfig(latest=0, every=1, pool=1)) as table:
            (engine,) = table.engines
            await table.publish(1)
            table.may_end.clear()
            async with Flow("games") as flow:
                first = flow.start(table.games(3), name="first")
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                await table.publish(2)
                assert engine.number == 0
                second = flow.start(table.games(3), name="second")
                await table.publish(3)
                assert engine.number == 0
                table.may_end.set()
            assert {one.opponent for one in first.result()} == {0}
            assert {one.opponent for one in second.result()} == {2}, (
                "the newest, version 1 was never met"
            )
            assert engine.number == 2

    asyncio.run(main())


@pytest.mark.parametrize("draw", ["uniform", "prioritised"])
def test_a_resumed_run_draws_the_same(tmp_path, draw):
    settings = OpponentsConfig(latest=0.3, every=1, pool=4, engines=2, draw=draw)

    async def main() -> None:
        states, whole = [], []
        async with Table(tmp_path / "whole", settings) as table:
            for version in range(1, 9):
                await table.publish(version)
                played = await table.games(30)
                whole.append([(one.id, one.agent, one.opponent) for one in played])
                table.play.observe([group(played)])
                states.append(json.dumps(table.play.state()))
        (tmp_path / "again").mkdir()
        (tmp_path / "whole" / "opponents").rename(tmp_path / "again" / "opponents")
        async with Table(tmp_path / "again", settings) as table:
            table.play.restore(json.loads(states[6]))  # after 7 steps: that of 8 is lost
            await table.play.begin(8)
            await table.publish(8)
            again = [(one.id, one.agent, one.opponent) for one in await table.games(30)]
        assert again == whole[-1]

    asyncio.run(main())


def test_a_damaged_snapshot_says_which_and_what_to_do(tmp_path):
    async def main() -> None:
        async with Table(tmp_path, OpponentsConfig(latest=0, every=1, pool=1)) as table:
            await table.publish(1)
            (tmp_path / "opponents" / "version_000001" / "manifest.json").write_text("{}")
            with pytest.raises(
                WeightsError, match=r"(?s)version 1 of the policy cannot play.*recipe\.latest=1"
            ):
                await table.publish(2)

    asyncio.run(main())


def group(played: list[Trajectory]) -> Group:
    """A group in which the policy wins as north and loses as south."""
    paid = [replace(one, head_start=1.0 if one.agent == "north" else -1.0) for one in played]
    return Group(Task("e", 0), tuple(paid), tuple(Score(one.env_return) for one in paid))


def test_results_are_by_version_and_seat_and_the_hard_ones_are_drawn_more_often():
    def game(agent: str, opponent: int | None, won: bool) -> Trajectory:
        return Trajectory(
            "e",
            Task("e", 0),
            (),
            Terminated(),
            agent=agent,
            head_start=1.0 if won else -1.0,
            opponent=opponent,
        )

    played = [
        game("north", 0, True),
        game("north", 0, False),
        game("south", 0, True),
        game("south", 5, False),
    ]
    played += [game("north", None, True), game("south", None, False)] * 2
    games = Games.of_groups(
        [Group(Task("e", 0), tuple(played), tuple(Score(one.env_return) for one in played))]
    )
    assert games.metrics() == {
        "opponents/share": 0.5,
        "opponents/0/north/episodes": 2.0,
        "opponents/0/north/success": 0.5,
        "opponents/0/south/episodes": 1.0,
        "opponents/0/south/success": 1.0,
        "opponents/5/south/episodes": 1.0,
        "opponents/5/south/success": 0.0,
        "opponents/success": 0.5,
    }
    results = Results()
    results.add(games.tallies())
    assert [results.success(version) for version in (0, 5, 9)] == [3 / 5, 1 / 3, 1 / 2]
    assert results.weight(5) > results.weight(9) > results.weight(0)
    results.add({0: (0.0, 2.0)})
    assert results.success(0) == (0.5 * 2 + 1) / (0.5 * 3 + 2 + 2)
