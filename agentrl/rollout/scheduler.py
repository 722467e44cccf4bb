"""`Rollouts`: groups of episodes in flight, under the staleness rule, with nothing lost.

    rule.admit ──▶ group ──▶ members: play ─▶ score ─▶ (failed? again, under the budget) ──▶ finished ──▶ rule.select
        ▲                                                                                    (channel)         │
        └──────────────────────────── slots are free when the new weights are live ◀── trainer ◀── next_batch ◀┘

Each group is a task of the flow, each member a task of its group. A member that fails is played again, with the same
environment seed and new sampling; one that fails too often fails its group, whose task is replaced by the next one.
When more tasks fail than the run allows, the run ends and says why.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field

from agentrl.errors import RetriesExhaustedError, RewardError, StalenessError
from agentrl.flow import Channel, DeadlineFirst, EventLog, Flow, Ticket, deadline
from agentrl.protocols import Reward, Settings, TaskSource
from agentrl.rollout.env_host import Deadlines
from agentrl.rollout.episode import Episode, Player, Sampling
from agentrl.rollout.ledger import Ledger
from agentrl.rollout.seeds import derive_seed
from agentrl.trajectory import Failed, Group, Score, Task, Trajectory


class RolloutConfig(Settings):
    """How episodes are played and grouped."""

    groups_per_step: int = Field(16, gt=0)
    """Groups (tasks) in one training batch."""
    group_size: int = Field(8, gt=0)
    """Episodes of one task."""
    max_turns: int = Field(16, gt=0)
    """Turns after which an episode is truncated."""
    max_staleness: int = Field(0, ge=0)
    """How many versions older than the trained ones a token may be; 0 is synchronous training."""
    max_live_episodes: int = Field(1024, gt=0)
    """Episodes in play at once."""
    retries: int = Field(2, ge=0)
    """How often a failed episode is played again before its task fails."""
    max_failed_tasks: int = Field(16, ge=0)
    """Tasks that may fail for good before the run ends."""
    sampling: Sampling = Sampling()
    deadlines: Deadlines = Deadlines()


@dataclass(frozen=True, slots=True)
class _Member:
    trajectory: Trajectory
    score: Score


class _TaskFailedError(Exception):
    """A member has spent its retries."""


class Rollouts:
    """Plays the groups of a run. An async context manager; leaving it cancels what still plays.

    `pending` are task numbers to play first (a resumed run's open ones), `next_number` the first new one, and
    `groups` how many groups the run still trains on: no more are ever admitted, so none is left over at its end.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        tasks: TaskSource,
        player: Player,
        reward: Reward,
        ledger: Ledger,
        seed: int,
        groups: int,
        version: int = 0,
        pending: Iterable[int] = (),
        next_number: int = 0,
        events: EventLog | None = None,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._player = player
        self._reward = reward
        self._ledger = ledger
        self._seed = seed
        self._rule = DeadlineFirst(
            max_staleness=config.max_staleness, groups_per_step=config.groups_per_step, version=version
        )
        self._groups_left = groups
        self._pending = deque(pending)
        self._next_number = next_number
        self._events = events or EventLog()
        self._failed_tasks: list[str] = []
        self._flow = Flow("rollouts")
        self._finished: Channel[tuple[Ticket, int, Group]] = self._flow.channel("groups", self._rule.capacity)
        self._ready: dict[Ticket, tuple[int, Group]] = {}
        self._places = asyncio.Semaphore(config.max_live_episodes)

    async def __aenter__(self) -> Self:
        await self._flow.__aenter__()
        self._admit()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._flow.cancel()
        await self._flow.__aexit__(*exc)

    async def next_batch(self) -> list[Group]:
        """The groups of the next training step, in order of admission; waits for them.

        Raises:
            RetriesExhaustedError: too many tasks failed for good.
            StalenessError: a token is older than the bound (a defect).
        """
        while (tickets := self._rule.select(self._ready)) is None:
            for ticket, number, group in [await self._finished.get(), *self._finished.drain()]:
                self._ready[ticket] = (number, group)
        chosen = [self._ready.pop(ticket) for ticket in sorted(tickets, key=lambda ticket: ticket.number)]
        step = self._rule.version
        for _, group in chosen:
            if staleness(group, step) > self._config.max_staleness:
                raise StalenessError(f"{group.task.id} has tokens {staleness(group, step)} versions old at step {step}")
            self._events.record("trained", group.task.id)
        self._ledger.trained(step, [number for number, _ in chosen])
        return [group for _, group in chosen]

    def weights_live(self, version: int) -> None:
        """The engine samples under `version` from now on: the batch before gives back its slots."""
        self._rule.publish(version)
        self._admit()

    def _admit(self) -> None:
        while self._groups_left > 0 and (ticket := self._rule.admit()) is not None:
            self._groups_left -= 1
            if self._pending:
                number = self._pending.popleft()
            else:
                number, self._next_number = self._next_number, self._next_number + 1
            task = self._tasks.task(number)
            self._ledger.admit(number, task.id, ticket.admitted_version)
            self._events.record("admitted", task.id)
            self._flow.start(self._play_group(ticket, number, task), name=task.id)

    async def _play_group(self, ticket: Ticket, number: int, task: Task) -> None:
        failure: str | None = None
        try:
            async with Flow(task.id) as members:
                playing = [
                    members.start(self._play_member(ticket, number, task, member), name=str(member))
                    for member in range(self._config.group_size)
                ]
        except* _TaskFailedError as failures:
            failure = str(failures.exceptions[0])
        if failure is not None:
            self._give_up(ticket, number, task, failure)
            return
        played = [member.result() for member in playing]
        group = Group(
            task, tuple(m.trajectory for m in played), tuple(m.score for m in played), ticket.admitted_version
        )
        self._events.record("finished", task.id)
        await self._finished.put((ticket, number, group))

    def _give_up(self, ticket: Ticket, number: int, task: Task, why: str) -> None:
        self._ledger.end_task(number, "failed", why)
        self._events.record("failed", task.id)
        self._failed_tasks.append(f"{task.id}: {why}")
        too_many = len(self._failed_tasks) - self._config.max_failed_tasks
        if too_many > 1:
            return  # the run is ending of the one before
        if too_many == 1:
            raise RetriesExhaustedError(
                f"{len(self._failed_tasks)} tasks failed for good, and rollout.max_failed_tasks allows "
                f"{self._config.max_failed_tasks}. The last ones:\n  " + "\n  ".join(self._failed_tasks[-5:])
            )
        self._rule.forfeit(ticket)
        self._groups_left += 1
        self._admit()

    async def _play_member(self, ticket: Ticket, number: int, task: Task, member: int) -> _Member:
        why = ""
        for attempt in range(self._config.retries + 1):
            episode = Episode(
                id=f"{task.id}/{member}/{attempt}",
                task=task,
                seed=derive_seed(self._seed, "sampling", task.id, member, attempt),
                priority=ticket.deadline,
            )
            async with self._places:
                self._ledger.begin(number, episode.id)
                played = await self._play_once(episode)
            if isinstance(played, _Member):
                return played
            why = f"{played.layer}: {played.error}"
            self._ledger.end(episode.id, "failed", why)
            self._events.record("episode failed", episode.id)
        raise _TaskFailedError(f"member {member} failed {self._config.retries + 1} times, at last by {why}")

    async def _play_once(self, episode: Episode) -> _Member | Failed:
        trajectory = await self._player.play(episode)
        if isinstance(trajectory.status, Failed):
            return trajectory.status
        score = await score_trajectory(self._reward, trajectory, self._config.deadlines.reward)
        if isinstance(score.status, Failed):
            return score.status
        return _Member(trajectory, score)


async def score_trajectory(reward: Reward, trajectory: Trajectory, seconds: float) -> Score:
    """The reward's verdict within a deadline; what goes wrong is a failed score, never a number."""
    try:
        async with deadline("reward", "reward", seconds):
            score = await reward.score(trajectory)
    except RewardError as error:
        return Score.failed(str(error))
    except Exception as error:  # a reward is the user's code: whatever it raises is its failure
        return Score.failed(f"{type(error).__name__}: {error}")
    if not isinstance(score.status, Failed) and score.value != score.value:
        return Score.failed("the reward returned NaN")
    return score


def staleness(group: Group, step: int) -> int:
    """How many versions the oldest token of `group` is behind the weights that `step` trains."""
    versions = [t.oldest_version for t in group.trajectories if t.oldest_version is not None]
    return step - min(versions, default=step)
