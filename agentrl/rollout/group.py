"""`GroupRunner`: plays the members of one group, with retries, until the group is complete.

The layer at fault decides how many retries there are (`rollout.retries`). A failed reward is
retried on the same trajectory (`agentrl/scoring/pipeline.py`); after any other failure the member's
episode is played again, with the same environment seed and new sampling.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from agentrl.errors import AgentRLError, DeadlineError, Layer
from agentrl.flow import EventLog, Flow, elapsed, now
from agentrl.ledger.ledger import Ledger
from agentrl.rollout.bias import Bias
from agentrl.rollout.concurrency import EpisodeSlots
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import Episode, EpisodeRunner
from agentrl.rollout.outage import LONGEST_PAUSE, Outages, jittered
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.staleness import Ticket
from agentrl.rollout.underway import OpenGroup
from agentrl.rollout.untrained import UntrainedEpisodes
from agentrl.rollout.waste import Reason, Waste
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.trajectory import Failed, Group, Score, Task, Trajectory

_Scored = tuple[tuple[Trajectory, Score], ...]
"""One episode: the trajectory of each trained agent, with its score."""


class MembersLostError(AgentRLError):
    """More members of a group have spent their retries than it can spare. The scheduler fails the
    group's task.
    """


@dataclass(eq=False, slots=True)
class _GroupState:
    """One running group. `reserved_slots` counts its reserved slots that no member uses yet."""

    ticket: Ticket
    number: int
    task: Task
    flow: Flow
    reserved_slots: int
    clock: asyncio.Timeout
    began: float
    outage_seconds: float  # of the run, when the group began
    loop: asyncio.AbstractEventLoop
    attempts: dict[int, int] = field(default_factory=dict)  # the last attempt of each member
    live: dict[int, Episode] = field(default_factory=dict)  # the open attempt of each member
    played: dict[int, _Scored] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    # what those that play are cut off for: unless the group ends itself, it was given up
    why: Reason = "stale"

    @property
    def thrown_away_as(self) -> Reason:
        """Why what is cut off now is thrown away."""
        return "failed" if self.clock.expired() else self.why


@dataclass(frozen=True, slots=True)
class GroupRunner:
    """Plays the groups of a run. `episode_ended` is called whenever an episode has released its
    slot.

    `group_size_of`: how many members the group of a task has.
    """

    config: RolloutConfig
    runner: EpisodeRunner
    reward: RewardPipeline
    ledger: Ledger
    events: EventLog
    slots: EpisodeSlots
    bias: Bias
    waste: Waste
    seed: int
    episode_ended: Callable[[], None]
    outages: Outages
    group_size_of: Callable[[Task], int]
    playing: dict[int, _GroupState] = field(default_factory=dict)
    """The groups of which parts can be trained on, by the numbers of their tasks."""
    untrained: UntrainedEpisodes = field(default_factory=lambda: UntrainedEpisodes(0))
    failures: Counter[Layer] = field(default_factory=Counter)
    """Attempts that failed, by layer."""

    def longest(self, count: int = 3) -> list[OpenGroup]:
        """The groups that have been played for the longest. Any thread may ask."""
        playing = list(self.playing.values())
        found = [
            OpenGroup(one.task.id, one.task.env, one.loop.time() - one.began) for one in playing
        ]
        return sorted(found, key=lambda one: -one.seconds)[:count]

    def take_segments(self, number: int, step: int) -> Group | None:
        """What the members of a running group have played since the last call, to be trained on at
        `step`.

        None if nothing of it can be trained on yet.
        """
        state = self.playing.get(number)
        if state is None:
            return None
        taken: list[tuple[Trajectory, Score]] = []
        for member in sorted({*state.live, *state.played}):
            if member in state.played:
                segments = [pair for pair in state.played[member] if pair[0].new_turns]
                state.played[member] = tuple(
                    (replace(whole, trained_turns=len(whole.turns)), score)
                    for whole, score in state.played[member]
                )
            else:
                progress = state.live[member].progress
                segments = [
                    (part, self.reward.score_turns(part)) for part in progress.next_segments()
                ]
            for part, _ in segments:
                first, attempt = part.trained_turns, state.attempts[member]
                self.ledger.segment(
                    step,
                    number,
                    member,
                    attempt,
                    agent=part.agent,
                    first=first,
                    turns=len(part.new_turns),
                )
            taken += segments
        parts, scores = tuple(part for part, _ in taken), tuple(score for _, score in taken)
        return (
            Group(state.task, parts, scores, state.ticket.admitted_version, partial=True)
            if taken
            else None
        )

    async def play(self, ticket: Ticket, number: int, task: Task, reserved_slots: int) -> Group:
        """The group of `task`: the first `group_size` members to finish, in order of member.

        Raises:
            MembersLostError: too many members have spent their retries, or scoring the group has.
            DeadlineError: it took longer than `rollout.deadlines.group`, outages not counted.
        """
        seconds = self.config.deadlines.group
        try:
            async with asyncio.timeout(seconds) as clock:
                state = _GroupState(
                    ticket,
                    number,
                    task,
                    Flow(task.id),
                    reserved_slots,
                    clock,
                    now(),
                    self.outages.seconds,
                    asyncio.get_running_loop(),
                )
                try:
                    return await self._play(state)
                except BaseException as error:
                    why = "failed" if isinstance(error, MembersLostError) else state.thrown_away_as
                    self.waste.episodes(
                        why, (one for played in state.played.values() for one, _ in played)
                    )
                    raise
        except TimeoutError:
            if not clock.expired():
                raise
            raise DeadlineError("environment", "group", seconds) from None

    async def _play(self, state: _GroupState) -> Group:
        ticket, number, task = state.ticket, state.number, state.task
        size = self.group_size_of(task)
        self.playing[number] = state
        try:
            async with state.flow as members:
                for member in range(size + self.config.extra_members):
                    members.start(self._play_member(state, member), name=str(member))
        finally:
            del self.playing[number]
            for _ in range(state.reserved_slots):
                self.slots.release()
        if len(state.played) < size:
            raise MembersLostError("; ".join(state.lost))
        for member in state.live:
            attempt = state.attempts[member]
            self.ledger.end(
                number, member, attempt, "cancelled", "its group was complete without it"
            )
        first = [pair for member in sorted(state.played) for pair in state.played[member]]
        group = Group(
            task, tuple(t for t, _ in first), tuple(s for _, s in first), ticket.admitted_version
        )
        compared = [await self._compared(of_agent) for of_agent in group.by_agent()]
        trajectories = tuple(
            trajectory for of_agent in compared for trajectory in of_agent.trajectories
        )
        scores = tuple(score for of_agent in compared for score in of_agent.scores)
        return Group(task, trajectories, scores, ticket.admitted_version)

    async def _compared(self, group: Group) -> Group:
        """The group, with the scores of the reward parts that compare its members added."""
        began = elapsed()
        scores = await self.reward.score_group(
            group.trajectories, group.scores, self._reward_failed
        )
        comparing = ((began, elapsed()),) if elapsed() > began else ()
        if failed := next(
            (score.status for score in scores if isinstance(score.status, Failed)), None
        ):
            raise MembersLostError(f"the group could not be scored: {failed.error}")
        timed = [
            replace(s, worked=b.worked + comparing)
            for s, b in zip(scores, group.scores, strict=True)
        ]
        return replace(group, scores=tuple(timed))

    def _reward_failed(self, trajectory_id: str) -> None:
        self.events.record("reward failed", trajectory_id)

    async def _play_member(self, state: _GroupState, member: int) -> None:
        """Repeat attempts until one is played and scored or the retries are spent; then end the
        group if decided.
        """
        failures: Counter[Layer] = Counter()
        in_outages = 0
        rng = Random(derive_seed(self.seed, "pause", state.task.id, member))
        for attempt in count():
            started = now()
            outcome = await self._attempt(state, member, attempt)
            if not isinstance(outcome, Failed):
                self.outages.episode_ended()
                state.played[member] = outcome
                break
            if not outcome.final and self.outages.caused(outcome, started):
                in_outages += 1
                self._stop_the_clock(state)
                await self.outages.pause(in_outages, rng)
                continue
            failures[outcome.layer] += 1
            # A failed reward has already spent its retries on this trajectory: see
            # `RewardPipeline`.
            spent = failures[outcome.layer] > self.config.retries.of(outcome.layer)
            if spent or outcome.final or outcome.layer == "reward":
                state.lost.append(
                    f"member {member} failed {failures.total()} times, finally by {outcome.layer}:"
                    f" {outcome.error}"
                )
                break
            if outcome.layer in ("engine", "environment"):
                await asyncio.sleep(jittered(failures[outcome.layer], rng))
        complete = len(state.played) == self.group_size_of(state.task)
        if complete or len(state.lost) > self.config.extra_members:
            state.why = "surplus" if complete else "failed"
            state.flow.cancel()

    def _stop_the_clock(self, state: _GroupState) -> None:
        """Give the group the time of the outages since it began."""
        outages = self.outages.seconds - state.outage_seconds + LONGEST_PAUSE
        state.clock.reschedule(state.began + self.config.deadlines.group + outages)

    async def _attempt(self, state: _GroupState, member: int, attempt: int) -> _Scored | Failed:
        if state.reserved_slots:
            state.reserved_slots -= 1
        else:
            await self.slots.acquire(state.ticket)
        task, number, started = state.task, state.number, elapsed()
        episode = Episode(
            id=f"{task.id}/{member}/{attempt}",
            task=task,
            seed=derive_seed(self.seed, "sampling", task.id, member, attempt),
            priority=state.ticket.deadline,
            member=member,
        )
        played: list[Trajectory] = []
        try:
            self.ledger.begin(number, member, attempt)
            state.attempts[member], state.live[member] = attempt, episode
            played = [episode.progress.mark(t) for t in await self._played(episode)]
            outcome = await self._scored(played)
        except asyncio.CancelledError:
            if played:  # it had ended, and was being scored
                self._count_played(played)
            else:
                self.bias.cut(elapsed() - started, episode.progress.sampled_tokens)
            self.waste.episode(state.thrown_away_as, episode.progress)
            raise
        del state.live[member]
        if isinstance(outcome, Failed):
            self.waste.episode("failed", episode.progress)
            self.failures[outcome.layer] += 1
            self.ledger.end(number, member, attempt, "failed", f"{outcome.layer}: {outcome.error}")
            self.events.record("episode failed", episode.id)
            failed = Score.failed(outcome.error, outcome.layer)
            self.untrained.keep(outcome.layer, [(trajectory, failed) for trajectory in played])
            return outcome
        for trajectory, _ in outcome:
            self.bias.sampled(trajectory)
            self.ledger.unused(number, member, attempt, trajectory.dropped)
        return outcome

    def _count_played(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the length of an episode that came to its end, if it did not fail."""
        for trajectory in trajectories:
            if not isinstance(trajectory.status, Failed):
                self.bias.sampled(trajectory)

    async def _played(self, episode: Episode) -> Sequence[Trajectory]:
        """The episode's trajectories. Releases its slot, so that a slow reward holds none."""
        try:
            return await self.runner.play(episode)
        finally:
            self.slots.release()
            self.episode_ended()

    async def _scored(self, trajectories: Sequence[Trajectory]) -> _Scored | Failed:
        """An episode's trajectories with their scores, or the failure that keeps it from training."""
        scored = []
        for trajectory in trajectories:
            if isinstance(trajectory.status, Failed):
                return trajectory.status
            began = elapsed()
            score = await self.reward.score(trajectory, self._reward_failed)
            if isinstance(score.status, Failed):
                return score.status
            scored.append((trajectory, replace(score, worked=((began, elapsed()),))))
        return tuple(scored)
