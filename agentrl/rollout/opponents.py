"""Opponents for self-play: earlier versions of the policy, drawn from a pool of snapshots.

    weights, version v ──▶ snapshot, if `every` divides v ──▶ pool on disk
                                                                ▲      └──▶ drawn for each version
                   wins and losses of the trained episodes ─────┘                      │
    episodes: one seat is the policy's ◀── engines ◀───────────────────────────────────┘

The policy plays a share of the games against itself, in all seats. In the others it has one seat,
and a snapshot plays the rest. A snapshot is a folder of the run, so the pool's size costs disk
space only; each engine for opponents serves one snapshot at a time, and takes another one only
while no episode is played against it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from agentrl.errors import WeightsError
from agentrl.flow import deadline, run_to_completion
from agentrl.protocols import Engine, EngineOffers
from agentrl.rollout.assignment import Assignment, Report, ignore_reports
from agentrl.rollout.branches import draw_distinct
from agentrl.rollout.config import OpponentsConfig
from agentrl.rollout.episode import EnvEpisodeRunner, Role
from agentrl.rollout.results import Games, Results
from agentrl.rollout.runner import RunnerOffers
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.workers.pool import WorkerRunner
from agentrl.trajectory import Group, Trajectory
from agentrl.weights.low_rank import LowRank
from agentrl.weights.snapshots import Snapshots

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Matches:
    """The opponents, and the agents of the environment that the policy or they play."""

    config: OpponentsConfig
    agents: Sequence[str]

    @property
    def own(self) -> Sequence[str]:
        """The agents that the policy plays in turn against opponents."""
        return self.config.seats or self.agents


@dataclass(eq=False, slots=True)
class Opponent:
    """An engine for opponents, as the role that it plays. It begins with version 0 of the policy.

    `deadline`: seconds that loading a snapshot may take.
    """

    role: Role
    engine: Engine
    snapshots: Snapshots
    deadline: float
    version: int = 0
    """The version of the policy that it plays as."""
    wanted: int = 0
    """The version that it will play as in the next episodes."""
    _playing: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _gate: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def game(self) -> AsyncIterator[int]:
        """An episode against it; yields its version, which does not change meanwhile.

        If another version is wanted, the episode waits for those that are being played, and begins
        with the new one.

        Raises:
            WeightsError: there is no such snapshot, or it is damaged.
            DeadlineError: the engine did not take it in time.
        """
        async with self._gate:
            while self.version != self.wanted:
                if self._playing:
                    self._idle.clear()
                    await self._idle.wait()
                else:
                    await run_to_completion(self._load(self.wanted))
            self._playing += 1
        try:
            yield self.version
        finally:
            self._playing -= 1
            self._idle.set()

    async def change_if_idle(self) -> None:
        """Load the wanted version now if nothing is played against it; else the next episode does
        so.

        Raises:
            WeightsError: see `game`.
            DeadlineError: see `game`.
        """
        if not self._playing and not self._gate.locked() and self.version != self.wanted:
            async with self._gate:
                await run_to_completion(self._load(self.wanted))

    async def _load(self, version: int) -> None:
        # An engine takes only what is newer than what it has.
        number = self.engine.policy_version + 1
        try:
            with deadline("engine", "update_weights", self.deadline):
                weights = self.snapshots.open(version)
                if EngineOffers.of(self.engine).stages_weights:
                    await self.engine.stage_weights(weights, number)
                await self.engine.update_weights(weights, number)
        except WeightsError as error:
            raise WeightsError(
                f"version {version} of the policy cannot play as an opponent: {error}. Restore its"
                " snapshot from a copy, or resume with recipe.latest=1, which needs none"
            ) from error
        self.version = version


@dataclass(eq=False, slots=True)
class SelfPlay:
    """`EpisodeRunner` of self-play: draws who plays each episode, and follows the policy's
    versions.

    `model` is the one that the run began with. `resumable` returns the steps that the run may
    resume from. The opponent of an episode is a function of the run's seed, the task and the
    version under which the episode begins.
    """

    matches: Matches
    seed: int
    runner: EnvEpisodeRunner | WorkerRunner
    opponents: Sequence[Opponent]
    snapshots: Snapshots
    model: Path
    resumable: Callable[[], Iterable[int]] = tuple
    results: Results = field(default_factory=Results)
    _met: Sequence[Opponent] = ()
    _metrics: Mapping[str, float] = field(default_factory=dict)

    async def play(
        self, assignment: Assignment, report: Report = ignore_reports
    ) -> Sequence[Trajectory]:
        """See `EpisodeRunner`. Only the policy's agents have trajectories, which name their
        opponent.
        """
        rng = Random(derive_seed(self.seed, "opponent", assignment.task.id))
        if rng.random() < self.matches.config.latest or not self._met:
            return await self.runner.play(assignment, report)
        # The generator is that of the task: all members of its group meet the same opponent, and
        # take the seats in turn, so that each seat has members to be compared with.
        opponent, seats = rng.choice(self._met), self.matches.own
        own = seats[(rng.randrange(len(seats)) + assignment.member) % len(seats)]
        runner = _with_opponent(opponent, self.runner, set(self.matches.agents) - {own})
        async with opponent.game() as version:
            played = await runner.play(assignment, report)
        return [replace(trajectory, opponent=version) for trajectory in played]

    def observe(self, groups: Sequence[Group]) -> None:
        """Count who won in the next batch, for the metrics and for later draws."""
        games = Games.of_groups(groups)
        self._metrics = games.metrics()
        self.results.add(games.tallies())

    def metrics(self) -> Mapping[str, float]:
        """The policy's success against each opponent in the last batch, by version and by seat; and
        the metrics of the runner, if it has some.
        """
        measure = RunnerOffers.of(self.runner).metrics
        return {**self._metrics, **(measure() if measure is not None else {})}

    def state(self) -> Mapping[str, Any]:
        """The results against each version. See `Stateful`."""
        return self.results.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the results of an earlier launch. See `Stateful`."""
        self.results.restore(state)

    async def begin(self, version: int) -> None:
        """Begin with this version of the policy, or continue with it.

        Raises:
            OSError: the first snapshot cannot be written.
        """
        if self.opponents:
            await run_to_completion(asyncio.to_thread(self._prepare_snapshots, version))

    def _prepare_snapshots(self, version: int) -> None:
        self.snapshots.go_back_to(version)
        if 0 in self.snapshots.needed(version + 1):
            self.snapshots.write(0, LowRank(self.model.absolute(), {}))

    async def take_version(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Follow the policy to a new version: keep a snapshot, if it is time, and draw opponents
        for its episodes.

        Raises:
            OSError: the snapshot cannot be written.
            WeightsError: that of an opponent cannot be read.
            DeadlineError: an engine did not take it in time.
        """
        if not self.opponents:
            return
        if version % self.snapshots.every == 0:
            await run_to_completion(asyncio.to_thread(self.snapshots.write, version, weights))
        self._assign(self._draw(version))
        for opponent in self._met:
            await opponent.change_if_idle()
        used = {v for opponent in self.opponents for v in (opponent.version, opponent.wanted)}
        await run_to_completion(
            asyncio.to_thread(self.snapshots.thin_out, version, [*self.resumable()], used)
        )

    def _draw(self, version: int) -> list[int]:
        """The snapshots to meet at this version, all different, at most one for each engine."""
        rng = Random(derive_seed(self.seed, "opponents", version))
        prioritised = self.matches.config.draw == "prioritised"
        weights = {
            snapshot: self.results.weight(snapshot) if prioritised else 1.0
            for snapshot in self.snapshots.needed(version)
        }
        return draw_distinct(weights, len(self.opponents), rng)

    def _assign(self, drawn: Sequence[int]) -> None:
        """Give each drawn version to an opponent. An opponent that already plays as one of them
        keeps it, as loading a snapshot takes time.
        """
        staying = {
            opponent.wanted: opponent for opponent in self.opponents if opponent.wanted in drawn
        }
        free = iter([opponent for opponent in self.opponents if opponent not in staying.values()])
        self._met = [staying.get(version) or next(free) for version in drawn]
        for version, opponent in zip(drawn, self._met, strict=True):
            opponent.wanted = version


def _with_opponent(
    opponent: Opponent, runner: EnvEpisodeRunner | WorkerRunner, agents: Collection[str]
) -> EnvEpisodeRunner | WorkerRunner:
    """The runner of episodes in which an opponent plays these agents."""
    if isinstance(runner, WorkerRunner):
        return runner.against(opponent.engine, agents)
    return replace(runner, others={**runner.others, **dict.fromkeys(agents, opponent.role)})
