"""`GroupRunner`: the controller's half of a group: slots, attempts, the ledger, the accounts.

Each member is played and scored by a `Member` (`agentrl/rollout/member.py`), which may be in
another process: it gets an `Assignment`, reports what happens meanwhile, and returns its result.
`agentrl/rollout/attempts.py` decides whether a failed episode is played again.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from agentrl.errors import AgentRLError
from agentrl.flow import EventLog, Flow, PausableClock, deadline, elapsed, now
from agentrl.ledger.ledger import Ledger
from agentrl.rollout.accounts import DiscardReason, OpenGroup, RolloutAccounts
from agentrl.rollout.assignment import (
    Assignment,
    EpisodeLength,
    EpisodeOver,
    MemberReport,
    RewardRetried,
    StateSaved,
    TokensSampled,
    TurnsPlayed,
)
from agentrl.rollout.attempts import Attempts
from agentrl.rollout.branches import BranchStart
from agentrl.rollout.concurrency import EpisodeSlots
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.disagreement import Disagreement
from agentrl.rollout.member import Member, MemberResult
from agentrl.rollout.outage import LONGEST_PAUSE
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.staleness import Ticket
from agentrl.rollout.token_budget import Holding, TokenShare
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.trajectory import BranchPoint, Failed, Group, Score, Task, Trajectory

_Scored = tuple[tuple[Trajectory, Score], ...]
"""One episode: the trajectory of each trained agent, with its score."""


class MembersLostError(AgentRLError):
    """More members of a group have spent their retries than it can spare. The scheduler fails the
    group's task.
    """


@dataclass(eq=False, slots=True)
class _LiveEpisode:
    """An episode that a member plays or scores, as far as it has reported."""

    attempt: int
    holding: Holding
    """What it holds of the engines' KV caches."""
    began: float = field(default_factory=elapsed)
    is_over: bool = False
    """Its slot is free again."""
    lengths: tuple[EpisodeLength, ...] = ()
    """Those of its trajectories that came to an end, once it is over."""
    sampled_tokens: int = 0
    segments: tuple[Trajectory, ...] = ()
    """Its turns so far, if it reports them."""
    trained_turns: dict[str, int] = field(default_factory=dict)
    """Turns of each agent that have been trained on."""
    trained_tokens: int = 0
    """Those of the sampled tokens that have been trained on."""

    @property
    def untrained_tokens(self) -> int:
        return self.sampled_tokens - self.trained_tokens

    def take_segments(self) -> list[Trajectory]:
        """The part of each agent's episode since the last call, if it has any turn."""
        segments = []
        for trajectory in map(self.mark_trained, self.segments):
            if trajectory.has_new_turns:
                segments.append(trajectory)
                self.trained_turns[trajectory.agent] = len(trajectory.turns)
                self.trained_tokens += trajectory.num_new_tokens
        return segments

    def mark_trained(self, trajectory: Trajectory) -> Trajectory:
        """The same trajectory, with the number of its turns that have been trained on."""
        trained = self.trained_turns.get(trajectory.agent, 0)
        return replace(trajectory, trained_turns=trained) if trained else trajectory


@dataclass(eq=False, slots=True)
class _GroupState:
    """One running group."""

    ticket: Ticket
    number: int
    task: Task
    flow: Flow
    reserved_slots: int
    """Slots that are reserved for the group, and that no member uses yet."""
    limit: deadline
    began: float
    outage_seconds: float
    """Those of the run when the group began."""
    loop: asyncio.AbstractEventLoop
    spreads: Mapping[int, float]
    """Those of earlier siblings when the group began, by the turn at which they parted."""
    live: dict[int, _LiveEpisode] = field(default_factory=dict)
    """The open attempt of each member."""
    attempts: dict[int, int] = field(default_factory=dict)
    """The number of each member's last attempt."""
    played: dict[int, _Scored] = field(default_factory=dict)
    wanted: int = 0
    """Members that make the group, with the branches that have begun."""
    saved: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """The environment's snapshots of each member from which branches start, by turn."""
    starts: dict[int, BranchStart] = field(default_factory=dict)
    """The start of each branch, by its number as a member."""
    lost: list[str] = field(default_factory=list)
    """The reason for each lost member."""
    reason: DiscardReason = "stale"
    """The reason for cancelling running members. Unless the group sets another one when it ends,
    the scheduler has given it up as stale."""

    @property
    def discard_reason(self) -> DiscardReason:
        """The reason recorded for members that are cancelled now."""
        return "failed" if self.limit.expired else self.reason


@dataclass(frozen=True, slots=True)
class GroupRunner:
    """Plays the groups of a run."""

    config: RolloutConfig
    member: Member
    reward: RewardPipeline
    """Scores what a member alone cannot: whole groups, and turns of episodes that go on."""
    ledger: Ledger
    events: EventLog
    slots: EpisodeSlots
    tokens: TokenShare
    """The episodes that hold tokens in the engines' KV caches."""
    accounts: RolloutAccounts
    seed: int
    """The run's."""
    episode_ended: Callable[[], None]
    """Called whenever an episode has released its slot."""
    attempts: Attempts
    group_size_of: Callable[[Task], int]
    """The number of members in the group of a task."""
    engine_clock: PausableClock | None
    """That of the policy's engine, on which the deadline of a group runs."""
    reports_turns: bool
    """Parts of episodes that go on are trained on."""
    disagreement: Disagreement = field(default_factory=Disagreement)
    """That of earlier trees, for `rollout.branches.at=disagreement`."""
    playing: dict[int, _GroupState] = field(default_factory=dict)
    """The groups of which parts can be trained on, by the numbers of their tasks."""

    def longest(self, count: int = 3) -> list[OpenGroup]:
        """The groups that have been played for the longest. Any thread may ask."""
        groups = [
            OpenGroup(state.task.id, state.task.env, state.loop.time() - state.began)
            for state in list(self.playing.values())
        ]
        return sorted(groups, key=lambda group: -group.seconds)[:count]

    def take_segments(self, number: int, step: int) -> Group | None:
        """The turns that a running group has played since the last call, to be trained on at
        `step`.

        None if nothing of it can be trained on yet.
        """
        state = self.playing.get(number)
        if state is None:
            return None
        taken: list[tuple[Trajectory, Score]] = []
        for member in sorted({*state.live, *state.played}):
            segments = self._take_member_segments(state, member)
            for part, _ in segments:
                self.ledger.segment(
                    step,
                    number,
                    member,
                    state.attempts[member],
                    agent=part.agent,
                    first=part.trained_turns,
                    turns=len(part.turns) - part.trained_turns,
                )
            taken += segments
        if not taken:
            return None
        parts, scores = zip(*taken, strict=True)
        return Group(state.task, parts, scores, state.ticket.admitted_version, partial=True)

    def _take_member_segments(
        self, state: _GroupState, member: int
    ) -> list[tuple[Trajectory, Score]]:
        if member in state.live:
            segments = state.live[member].take_segments()
            return [(part, self.reward.score_turns(part)) for part in segments]
        # A member that is done waits for the others: what is left of its episode is trained on now.
        scored = state.played[member]
        state.played[member] = tuple(
            (replace(whole, trained_turns=len(whole.turns)), score) for whole, score in scored
        )
        return [(whole, score) for whole, score in scored if whole.has_new_turns]

    async def play(self, ticket: Ticket, number: int, task: Task, reserved_slots: int) -> Group:
        """The group of `task`: the first `group_size` members to finish, in order of member.

        Raises:
            MembersLostError: too many members have spent their retries, or scoring the group has.
            DeadlineError: it took longer than `rollout.deadlines.group`, outages not counted.
        """
        seconds = self.config.deadlines.group
        with deadline("environment", "group", seconds, self.engine_clock) as limit:
            state = _GroupState(
                ticket,
                number,
                task,
                Flow(task.id),
                reserved_slots,
                limit,
                now(),
                self.attempts.outages.seconds,
                asyncio.get_running_loop(),
                self.disagreement.spreads(task.env),
            )
            try:
                return await self._play_members(state)
            except BaseException as error:
                lost = isinstance(error, MembersLostError)
                self.accounts.tokens.add_episodes(
                    "failed" if lost else state.discard_reason,
                    (whole for scored in state.played.values() for whole, _ in scored),
                )
                raise

    async def _play_members(self, state: _GroupState) -> Group:
        ticket, number, task = state.ticket, state.number, state.task
        size = state.wanted = self.group_size_of(task)
        self.playing[number] = state
        try:
            async with state.flow as members:
                for member in range(size + self.config.extra_members):
                    members.start(self._play_member(state, member), name=str(member))
        finally:
            del self.playing[number]
            # The slots of members that never began are still reserved.
            for _ in range(state.reserved_slots):
                self.slots.release()
        if len(state.played) < state.wanted:
            raise MembersLostError("; ".join(state.lost))
        # The flow has cancelled the members that were still playing: each needs its one fate.
        for member in state.live:
            attempt = state.attempts[member]
            self.ledger.end(
                number, member, attempt, "cancelled", "its group was complete without it"
            )
        first = [pair for member in sorted(state.played) for pair in state.played[member]]
        group = Group(
            task, tuple(t for t, _ in first), tuple(s for _, s in first), ticket.admitted_version
        )
        # Agents have goals of their own, so members are compared agent by agent.
        compared = [await self._add_group_scores(of_agent) for of_agent in group.by_agent()]
        trajectories = tuple(
            trajectory for of_agent in compared for trajectory in of_agent.trajectories
        )
        scores = tuple(score for of_agent in compared for score in of_agent.scores)
        return Group(task, trajectories, scores, ticket.admitted_version)

    async def _add_group_scores(self, group: Group) -> Group:
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
            replace(s, scoring_spans=b.scoring_spans + comparing)
            for s, b in zip(scores, group.scores, strict=True)
        ]
        return replace(group, scores=tuple(timed))

    def _reward_failed(self, trajectory_id: str) -> None:
        self.events.record("reward failed", trajectory_id)

    async def _play_member(self, state: _GroupState, member: int) -> None:
        """Play a member to its last attempt; then end the group if decided."""

        async def play(attempt: int) -> MemberResult | None:
            return await self._play_attempt(state, member, attempt)

        rng = Random(derive_seed(self.seed, "pause", state.task.id, member))
        last = await self.attempts.repeat(play, rng, lambda: self._extend_deadline(state))
        failure = last.result.failure
        if failure is None:
            state.played[member] = last.result.scored
            self._branch(state, member)
        else:
            state.lost.append(
                f"member {member} failed {last.failures} times, finally by {failure.layer}:"
                f" {failure.error}"
            )
        complete = len(state.played) == state.wanted
        if complete or len(state.lost) > self.config.extra_members:
            # Set first: members that are cancelled now record it.
            state.reason = "surplus" if complete else "failed"
            state.flow.cancel()

    def _branch(self, state: _GroupState, member: int) -> None:
        """Begin the branches of a member that has been played."""
        branches = self.config.branches
        if branches is None:
            return
        ((parent, _),) = state.played[member]
        # Each member has its own range of numbers for branches, after those of all members, so that
        # a branch has the same number in whatever order members end.
        number = self.group_size_of(state.task) + member * branches.budget
        for turn, saved in sorted(state.saved.pop(member, {}).items()):
            if turn >= len(parent.turns):
                continue  # its prompt was too long to be answered
            for _ in range(branches.width):
                branch = BranchPoint(parent.id, turn, branches.share)
                state.starts[number] = BranchStart(saved, parent, branch)
                state.wanted += 1
                state.flow.start(self._play_member(state, number), name=str(number))
                number += 1

    def _extend_deadline(self, state: _GroupState) -> None:
        """Add the time of the outages since the group began to its deadline."""
        outages = self.attempts.outages.seconds - state.outage_seconds
        # And the longest pause, so that the deadline does not pass before the outage is measured.
        state.limit.allowance = outages + LONGEST_PAUSE

    async def _play_attempt(
        self, state: _GroupState, member: int, attempt: int
    ) -> MemberResult | None:
        """Have an episode played in a slot, and record what becomes of it. None if it was
        preempted.
        """
        if state.reserved_slots:
            state.reserved_slots -= 1
        else:
            await self.slots.acquire(state.ticket)

        async def play(holding: Holding) -> MemberResult:
            self.ledger.begin(state.number, member, attempt)
            if start := state.starts.get(member):
                self.ledger.branched(
                    state.number, member, attempt, start.parent.id, start.branch.turn
                )
            states = state.saved[member] = {}
            state.attempts[member] = attempt
            episode = state.live[member] = _LiveEpisode(attempt, holding)
            assignment = self._assign(state, member, attempt)
            return await self._play_in_slot(assignment, episode, states)

        try:
            result = await self.tokens.play(state.task.env, play)
        except asyncio.CancelledError:
            # It stays in `live`, so that the group can record its fate.
            self._count_cancelled(state, state.live[member])
            raise
        episode = state.live.pop(member)
        if result is None:
            self._count_preempted(state, member, episode)
            return None
        trajectories = tuple(map(episode.mark_trained, result.trajectories))
        result = replace(result, trajectories=trajectories)
        if result.failure is not None:
            self._count_failed(state, member, episode, result, result.failure)
            return result
        for trajectory in trajectories:
            self.accounts.lengths.add_sampled(EpisodeLength.of(trajectory))
            self.ledger.unused(state.number, member, attempt, trajectory.dropped)
        return result

    def _assign(self, state: _GroupState, member: int, attempt: int) -> Assignment:
        task, ticket = state.task, state.ticket
        start, branches = state.starts.get(member), self.config.branches
        plan = None
        if branches is not None and start is None:
            rng = Random(derive_seed(self.seed, "branches", task.id, member))
            plan = branches.plan(self.config.budget.turns, rng, state.spreads)
        return Assignment(
            id=f"{task.id}/{member}/{attempt}",
            task=task,
            seed=derive_seed(self.seed, "sampling", task.id, member, attempt),
            priority=ticket.deadline,
            member=member,
            attempt=attempt,
            admitted_version=ticket.admitted_version,
            reports_turns=self.reports_turns,
            plan=plan,
            start=start,
        )

    async def _play_in_slot(
        self, assignment: Assignment, episode: _LiveEpisode, states: dict[int, bytes]
    ) -> MemberResult:
        """The member's result. The slot is free as soon as the episode is over, scored or not. The
        `states` that branches leave from are filled in.
        """

        def take_report(report: MemberReport) -> None:
            match report:
                case TokensSampled(tokens, answers, context):
                    episode.sampled_tokens += tokens
                    episode.holding.answered(answers, context)
                case TurnsPlayed(segments):
                    episode.segments = segments
                case StateSaved(turn, saved):
                    states[turn] = saved
                case RewardRetried(trajectory_id):
                    self._reward_failed(trajectory_id)
                case EpisodeOver(lengths):
                    episode.lengths = lengths
                    episode.holding.end(whole=bool(lengths))
                    self._release_slot(episode)

        try:
            return await self.member.play(assignment, take_report)
        finally:
            episode.holding.end(whole=False)  # the member may have died without a report
            self._release_slot(episode)

    def _release_slot(self, episode: _LiveEpisode) -> None:
        if not episode.is_over:
            episode.is_over = True
            self.slots.release()
            self.episode_ended()

    def _count_cancelled(self, state: _GroupState, episode: _LiveEpisode) -> None:
        length = EpisodeLength(elapsed() - episode.began, episode.sampled_tokens)
        self.accounts.add_cancelled(
            state.discard_reason, episode.lengths, length, episode.untrained_tokens
        )

    def _count_preempted(self, state: _GroupState, member: int, episode: _LiveEpisode) -> None:
        self.accounts.tokens.add("preempted", episode.untrained_tokens)
        why = "preempted: the engines' KV caches were full"
        self.ledger.end(state.number, member, episode.attempt, "cancelled", why)
        self.events.record("preempted", f"{state.task.id}/{member}/{episode.attempt}")

    def _count_failed(
        self,
        state: _GroupState,
        member: int,
        episode: _LiveEpisode,
        result: MemberResult,
        failure: Failed,
    ) -> None:
        self.accounts.add_failed(failure, result.trajectories, episode.untrained_tokens)
        self.ledger.end(
            state.number,
            member,
            episode.attempt,
            "failed",
            f"{failure.layer}: {failure.error}",
        )
        self.events.record("episode failed", f"{state.task.id}/{member}/{episode.attempt}")
