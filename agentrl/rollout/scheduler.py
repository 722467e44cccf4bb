"""`Rollouts`: runs groups of episodes under the staleness rule, and loses none.

    rule.admit ─▶ group ─▶ members: slot ─▶ play ─▶ score ─▶ (failed? again) ─▶ finished (channel)
        ▲           ▲                  │                                           ▼
        │           └── a free slot ◀──┘   concurrency ◀── engine's load      rule.finish
        │                                                                          ▼
        └── slots are free when new weights are live ◀─ trainer ◀─ next_batch ◀─ rule.select

A group is admitted when the rule has a slot for it *and* an episode slot is free, so no ticket ages
in a queue. Each group is a task of the flow, each member a task of its group
(`agentrl/rollout/group.py`). A group that loses too many members fails, and the next task replaces
its task. If more tasks fail than the run allows, the run ends with an error that says why.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from agentrl.errors import DeadlineError, FilterBudgetError, RetriesExhaustedError, StalenessError
from agentrl.flow import Channel, EventLog, Flow
from agentrl.ledger.ledger import Ledger, Outcome
from agentrl.protocols import (
    Curriculum,
    Engine,
    GroupReward,
    Reward,
    TaskSource,
    TaskSourceOffers,
    clock_of,
)
from agentrl.protocols.metrics import Metrics, merge_metrics
from agentrl.rollout.accounts import DiscardedSamples, RolloutAccounts, SchedulerStatus
from agentrl.rollout.attempts import Attempts
from agentrl.rollout.concurrency import ConcurrencyController, EngineLoad, EpisodeSlots
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.disagreement import Disagreement
from agentrl.rollout.engine_shares import EngineShares
from agentrl.rollout.group import GroupRunner, MembersLostError
from agentrl.rollout.member import Member
from agentrl.rollout.mixture import Mixture
from agentrl.rollout.next_task import next_task
from agentrl.rollout.outage import Outages
from agentrl.rollout.runner import EpisodeRunner, RunnerOffers
from agentrl.rollout.staleness import Ticket
from agentrl.rollout.token_budget import TokenBudget
from agentrl.rollout.watchdog import watch
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.tokens.arrays import constant
from agentrl.trajectory import Group, Score, Task, Trajectory, staleness

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Playing:
    """A running group."""

    ticket: Ticket
    """Its ticket, which the rule may replace."""
    number: int
    """The number of its task."""
    task: Task


class _Ended(NamedTuple):
    """A group that has ended. `group` is None if it was given up; the entry then only signals the
    change.
    """

    playing: _Playing
    group: Group | None


class Rollouts:
    """Plays the groups of a run. An async context manager; leaving it cancels all running groups.

    `pending` are tasks to play first, with their numbers (the open tasks of a resumed run);
    `next_number` is the first new number. `groups` is how many groups the run still trains on: no
    more are started, so none is left over at the end. Of `engine`, only the statistics are used.
    `rescue` is called when nothing progresses any more, before the run is ended; it returns whether
    it could help. `gives_up`: an environment of a mixture that has spent its budget of failures
    gets no more tasks, instead of ending the run. `keep_untrained`: see `take_untrained`.
    `teaches` tells whether anything can be learned from a group; with
    `rollout.filter_zero_variance`, others are replaced. `places` returns the number of requests
    that all engines can serve concurrently now, and 0 if it is not known. `tokens`: the budget of
    the engines' KV caches, if other schedulers use these engines too. `disagreement`: the
    statistics of earlier launches for `rollout.branches.at=disagreement`. `filtered`: by step, the
    groups that an earlier launch has filtered for batches that it has not trained on, of which a
    curriculum learns with those batches.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        tasks: TaskSource,
        runner: EpisodeRunner,
        reward: Reward | GroupReward | RewardPipeline,
        engine: Engine,
        ledger: Ledger,
        seed: int,
        groups: int,
        version: int = 0,
        pending: Iterable[tuple[int, Task]] = (),
        next_number: int = 0,
        events: EventLog | None = None,
        rescue: Callable[[], bool] = lambda: False,
        gives_up: bool = False,
        keep_untrained: int = 0,
        teaches: Callable[[Group], bool] = lambda group: group.has_signal,
        places: Callable[[], int] = lambda: 0,
        tokens: TokenBudget | None = None,
        disagreement: Disagreement | None = None,
        filtered: Mapping[int, Sequence[Outcome]] | None = None,
    ) -> None:
        self._config = config
        self._places = places
        self._tokens = tokens or TokenBudget(engine, config.budget.turns)
        self._share = self._tokens.join(self._follow_tokens)
        self._tasks = tasks
        self._engine = engine
        self._ledger = ledger
        self._rescue = rescue
        self._rule = config.rule(
            max_staleness=config.max_staleness,
            groups_per_step=config.groups_per_step,
            version=version,
        )
        self._groups_left = groups
        self._pending = deque(pending)
        self._next_number = next_number
        self._events = events or EventLog()
        self._controller = ConcurrencyController.between(*config.live_episodes(places()))
        self._slots = EpisodeSlots(self._limit())
        self._preemptions = 0
        self._preempted_episodes = 0
        self._engine_shares = EngineShares()
        self._episodes_ended = 0
        self._observe_at = 0
        self._failed_tasks: Counter[str] = Counter()  # by environment, of a mixture
        self._last_failures: deque[str] = deque(maxlen=5)
        self._filtered: list[Outcome] = []  # for the next batch
        self._filtered_before = filtered or {}
        self.blocked = False
        """`next_batch` is waiting."""
        self._mixture = tasks if isinstance(tasks, Mixture) else None
        self._gives_up = gives_up
        self._teaches = teaches
        self._curriculum = tasks if isinstance(tasks, Curriculum) else None
        self._task_offers = TaskSourceOffers.of(tasks)
        self._runner_offers = RunnerOffers.of(runner)
        self._closing = False
        self._flow = Flow("rollouts")
        self._finished: Channel[_Ended] = self._flow.channel("groups", self._rule.capacity)
        self._playing: dict[Ticket, tuple[_Playing, asyncio.Task[None]]] = {}
        self._ready: dict[Ticket, tuple[int, Group]] = {}
        self._batch: list[Group] = []  # that nothing has been recorded of yet
        self._accounts = RolloutAccounts(DiscardedSamples(keep_untrained))
        self._generated = 0  # tokens, when the metrics were last asked for
        self._over_older_kv = 0
        self._disagreement = disagreement or Disagreement()
        pipeline = RewardPipeline.of(reward, config.deadlines.reward, config.retries)
        self._groups = GroupRunner(
            config,
            Member(runner, pipeline),
            pipeline,
            ledger,
            self._events,
            self._slots,
            self._share,
            self._accounts,
            seed,
            self._episode_ended,
            Attempts(config.retries, Outages(config.deadlines.outage)),
            self._group_size,
            clock_of(engine),
            reports_turns=self._rule.trains_on_segments,
            disagreement=self._disagreement,
        )

    async def __aenter__(self) -> Self:
        await self._flow.__aenter__()
        self._flow.start(
            watch(
                self._config.deadlines.stall_at(self._engine.max_context),
                self._progress,
                self._busy,
                self._rescue,
            ),
            name="watchdog",
        )
        self._admit()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._closing = True
        self._flow.cancel()
        try:
            await self._flow.__aexit__(*exc)
        finally:
            self._share.leave()

    async def next_batch(self) -> list[Group]:
        """The groups of the next training step, in order of admission; waits for them.

        Under a rule that trains on segments, partial groups follow: what the stragglers have played
        so far.

        Raises:
            RetriesExhaustedError: too many tasks failed.
            FilterBudgetError: too many groups taught nothing.
            StallError: nothing has progressed for too long.
            StalenessError: a token is older than the bound, under a rule that keeps it (a defect).
        """
        tickets = await self._select()
        in_order_of_admission = sorted(tickets, key=lambda ticket: ticket.number)
        chosen = [self._ready.pop(ticket) for ticket in in_order_of_admission]
        step = self._rule.version
        # In the order in which the ledger replays them.
        filtered = [*self._filtered_before.get(step, ()), *self._filtered]
        self._report_outcomes(sorted(filtered, key=lambda outcome: outcome[0]))
        self._report_outcomes((number, group.task, group.rewards_G) for number, group in chosen)
        self._filtered = []
        for _, group in chosen:
            self._check_bound(group, step)
            self._events.record("trained", group.task.id)
            self._accounts.lengths.add_trained(group)
            if self._config.branches is not None:
                self._disagreement.observe(group)
        self._ledger.trained(step, {number: group.rewards_G for number, group in chosen})
        groups = self._batch = [group for _, group in chosen]
        if self._mixture is not None:
            self._mixture.trained(groups)
        if self._runner_offers.observe is not None:
            self._runner_offers.observe(groups)
        # Groups that missed this batch may be too old for the next one. They end now, so that
        # nothing more is sampled for them while this one is trained on.
        for ticket in self._rule.give_up():
            self._cancel_stale(ticket)
        self._admit()
        # Last, as the stragglers of this batch are those whose tickets the choice has renewed.
        batch = [*groups, *self._take_segments(step)]
        self._accounts.tokens.add_trained(batch)
        return batch

    async def _select(self) -> list[Ticket]:
        """The tickets of the next batch; waits until the rule has chosen."""
        self.blocked = True
        self._absorb(self._finished.drain())
        while (tickets := self._rule.select()) is None:
            self._absorb([await self._finished.get(), *self._finished.drain()])
        self.blocked = False
        return tickets

    def _check_bound(self, group: Group, step: int) -> None:
        """The theorem of `agentrl/rollout/staleness.py`, checked on the tokens themselves.

        Raises:
            StalenessError: it does not hold.
        """
        age = staleness(group, step)
        if self._rule.bounded and age > self._config.max_staleness:
            raise StalenessError(f"{group.task.id} has tokens {age} versions old at step {step}")

    @asynccontextmanager
    async def new_weights(self, version: int) -> AsyncIterator[None]:
        """Publish the weights of the last batch inside; afterwards, the engine samples under
        `version`.

        Entering waits if the staleness rule requires it (none of ours does); leaving frees the
        batch's slots.
        """
        self._absorb(self._finished.drain())
        while not self._rule.may_publish():
            self._absorb([await self._finished.get(), *self._finished.drain()])
        yield
        self._absorb(self._finished.drain())
        for ticket in self._rule.publish(version):
            self._cancel_stale(ticket)
        self._admit()

    def status(self) -> SchedulerStatus:
        """The present state, for displays. Any thread may ask."""
        return SchedulerStatus(
            self._slots.taken,
            self._slots.limit,
            len(self._ready) + self._finished.snapshot().depth,
            self._config.groups_per_step,
            dict(self._accounts.failures),
            self._groups.longest(),
            self._slots.queued,
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of the scheduler so far: slots, total time the trainer was blocked, bias, failed
        tasks; of scoring since the last call, as the rewards report them; and of the last batch, as
        the runner reports them.

        Raises:
            MetricNameError: two parts have a metric of the same name.
        """
        token_metrics = self._tokens.metrics()
        if token_metrics:  # the size of the KV caches is known
            before, self._preempted_episodes = self._preempted_episodes, self._share.preempted
            token_metrics["live_episodes/preempted"] = float(self._share.preempted - before)
        parts: dict[str, Metrics] = {
            "the scheduler": self._own_metrics(),
            "the budget of tokens": token_metrics,
            "the accounts of episodes": self._accounts.metrics(),
            "the rewards": self._groups.reward.metrics(),
        }
        if self._runner_offers.metrics is not None:
            parts["the runner"] = self._runner_offers.metrics()
        if self._curriculum is not None and self._task_offers.metrics is not None:
            parts["the curriculum"] = self._task_offers.metrics()
        return merge_metrics(parts)

    def _own_metrics(self) -> dict[str, float]:
        """Slots, channels, failed tasks and sampled tokens."""
        blocked = self._finished.snapshot().get_wait
        stats = self._engine.stats()
        generated_before, self._generated = self._generated, stats.generated_tokens
        older_before, self._over_older_kv = self._over_older_kv, stats.older_kv_tokens
        metrics = {
            "live_episodes": float(self._slots.taken),
            "live_episodes/limit": float(self._slots.limit),
            "groups/playing": float(len(self._playing)),
            "groups/ready": float(len(self._ready)),
            "blocked_seconds": blocked,
            "failed_tasks": float(self._failed_tasks.total()),
            # Since the last call. Those of an engine that died since then are lost with its counts.
            "generated_tokens": float(max(0, self._generated - generated_before)),
        }
        metrics |= self._engine_shares.metrics(stats)
        if older_before or self._over_older_kv:
            metrics["older_kv_tokens"] = float(max(0, self._over_older_kv - older_before))
        for channel in self._flow.snapshot():
            name = f"channels/{channel.name.rpartition('/')[2]}"
            metrics[f"{name}/depth"] = float(channel.depth)
            metrics[f"{name}/capacity"] = float(channel.capacity)
            metrics[f"{name}/put_wait"] = channel.put_wait
            metrics[f"{name}/get_wait"] = channel.get_wait
        if self._mixture is not None:
            for env, failed in self._failed_tasks.items():
                metrics[f"envs/{env}/failed_tasks"] = float(failed)
        return metrics

    def take_untrained(self) -> list[tuple[Trajectory, Score]]:
        """Trajectories that ended since the last call and are not trained on: at most
        `keep_untrained` of each kind.
        """
        self._batch = []
        return self._accounts.samples.take()

    def take_all(self) -> list[tuple[Trajectory, Score]]:
        """The episodes that a run which ends in the middle of a step has played and not recorded:
        `take_untrained`, the batch, the groups of later ones, and members of groups that are not
        complete.
        """
        self._absorb(self._finished.drain())
        episodes: list[tuple[Trajectory, Score]] = []
        for group in [*self._batch, *(group for _, group in self._ready.values())]:
            episodes += zip(group.trajectories, group.scores, strict=True)
        for state in self._groups.playing.values():
            for scored in state.played.values():
                episodes += scored
        return [*episodes, *self.take_untrained()]

    def _take_segments(self, step: int) -> list[Group]:
        """The turns played so far of the groups whose tickets the rule has renewed."""
        segments = []
        for old, new in self._rule.renewed.items():
            playing, work = self._playing.pop(old)
            playing.ticket = new
            self._playing[new] = (playing, work)
            if group := self._groups.take_segments(playing.number, step):
                self._events.record("segment", group.task.id)
                segments.append(group)
        return segments

    def _admit(self) -> None:
        """Start groups while the rule has a slot and an episode slot is free."""
        while (
            not self._closing
            and self._groups_left
            and self._slots.free
            and (ticket := self._rule.admit())
        ):
            self._groups_left -= 1
            if self._pending:  # open tasks of a resumed run
                number, task = self._pending.popleft()
            else:
                number, self._next_number = self._next_number, self._next_number + 1
                task = next_task(self._tasks, number)
            self._ledger.admit(number, task, ticket.admitted_version)
            self._events.record("admitted", task.id)
            playing = _Playing(ticket, number, task)
            work = self._play_group(
                playing, self._slots.reserve(self._group_size(task) + self._config.extra_members)
            )
            self._playing[ticket] = (playing, self._flow.start(work, name=task.id))

    def _group_size(self, task: Task) -> int:
        return (
            self._config.group_size if self._mixture is None else self._mixture[task.env].group_size
        )

    async def _play_group(self, playing: _Playing, slots: int) -> None:
        task = playing.task
        try:
            group = await self._groups.play(playing.ticket, playing.number, task, slots)
        except (MembersLostError, DeadlineError) as error:
            self._fail_task(playing, str(error))
            group = None
        except Exception:
            # A defect, or wrong options: it ends the flow, and nothing may start meanwhile.
            self._closing = True
            raise
        if group is not None and self._config.filter_zero_variance and not self._teaches(group):
            self._filter(playing, group)
            group = None
        if group is not None:
            self._events.record("finished", task.id)
        await self._finished.put(_Ended(playing, group))

    def _absorb(self, ended: Sequence[_Ended]) -> None:
        """Mark finished groups as ready."""
        for playing, group in ended:
            if group is not None and self._playing.pop(playing.ticket, None) is not None:
                self._rule.finish(playing.ticket)
                self._ready[playing.ticket] = (playing.number, group)

    def _fail_task(self, playing: _Playing, why: str) -> None:
        task = playing.task
        del self._playing[playing.ticket]
        self._ledger.end_task(playing.number, "failed", why)
        self._events.record("failed", task.id)
        self._lose(task)
        self._last_failures.append(f"{task.id}: {why}")
        if not self._closing:  # else an earlier failure is already ending the run
            self._spend(task.env)
            self._replace(playing.ticket)

    def _spend(self, env: str) -> None:
        """Count a failed task in the budget of its environment, or of the run.

        Raises:
            RetriesExhaustedError: the budget is spent, and no other environment takes its place.
        """
        before = 0
        if self._mixture is None:
            env, allowed, setting = "", self._config.max_failed_tasks, "rollout.max_failed_tasks"
        else:
            share, setting = self._mixture[env], f"max_failed_tasks of {env}"
            allowed, before = share.max_failed_tasks, share.failed_before
        self._failed_tasks[env] += 1
        failed = before + self._failed_tasks[env]
        if failed <= allowed:
            return
        if self._mixture is not None and self._gives_up and self._mixture.give_up(env):
            if failed == allowed + 1:
                logger.warning(
                    "%d tasks of %s failed; the others get its tasks (env.exhausted=others)",
                    failed,
                    env,
                )
            return
        self._closing = True
        raise RetriesExhaustedError(
            f"{failed} tasks failed permanently, but {setting} allows only {allowed}. The last"
            " ones:\n  " + "\n  ".join(self._last_failures)
        )

    def _lose(self, task: Task) -> None:
        if self._mixture is not None:
            self._mixture.lost(task)

    def _filter(self, playing: _Playing, group: Group) -> None:
        number = playing.number
        del self._playing[playing.ticket]
        same = constant(group.rewards_G)
        why = f"all members earned {group.rewards_G[0]:g}" if same else "all advantages are 0"
        self._ledger.filtered(self._rule.next_step, number, why, group.rewards_G)
        self._events.record("filtered", group.task.id)
        self._filtered.append((number, group.task, tuple(group.rewards_G)))
        self._accounts.add_discarded("filtered", group)
        self._lose(group.task)
        if len(self._filtered) > self._config.max_filtered_per_step:
            self._closing = True
            raise FilterBudgetError(
                f"{len(self._filtered)} groups were filtered for one batch, but"
                f" rollout.max_filtered_per_step allows only {self._config.max_filtered_per_step}:"
                f" all advantages of a group are 0, the last time because {why}. The tasks are too"
                " hard or too easy for this policy, or the reward is constant: look at the run's"
                " untrained/, choose other tasks, or leave rollout.filter_zero_variance off"
            )
        self._replace(playing.ticket)

    def _replace(self, ticket: Ticket) -> None:
        """Start the next task in place of a group that will not be trained on."""
        self._rule.forfeit(ticket)
        self._groups_left += 1
        self._admit()

    def _cancel_stale(self, ticket: Ticket) -> None:
        """Cancel the group of a ticket that the rule gave up, or drop it if finished."""
        if ticket in self._ready:
            number, group = self._ready.pop(ticket)
            self._accounts.add_discarded("stale", group)
            self._lose(group.task)
        else:
            playing, work = self._playing.pop(ticket)
            number = playing.number
            self._lose(playing.task)
            work.cancel("its weights are too old")
            # Its slots are free only when its members have ended.
            work.add_done_callback(lambda task: self._admit())
        self._ledger.end_task(
            number,
            "stale",
            f"its weights would be older than {self._config.max_staleness} versions",
        )
        self._events.record("stale", str(number))
        self._groups_left += 1

    def _report_outcomes(self, outcomes: Iterable[tuple[int, Task, Sequence[float]]]) -> None:
        if self._curriculum is not None:
            for number, task, rewards_G in outcomes:
                self._curriculum.observe(number, replace(task), rewards_G)

    def _progress(self) -> tuple[int, int]:
        return self._episodes_ended, self._engine.stats().generated_tokens

    def _busy(self) -> bool:
        clock = clock_of(self._engine)
        if clock is not None and clock.is_held:
            return False  # what waits for the engine may well make no progress
        # Otherwise the trainer works, and the rule admits nothing meanwhile.
        return self.blocked or self._slots.taken > 0

    def _episode_ended(self) -> None:
        """After the release of a slot: follow the number of engines, now and then observe their
        load, and admit new groups.
        """
        self._episodes_ended += 1
        places = self._places()
        bounds = self._config.live_episodes(places)
        self._set_controller(self._controller.between_others(*bounds))
        if self._episodes_ended >= self._observe_at:
            # Rare enough that a change of the limit shows in the load before the next look.
            self._observe_at = self._episodes_ended + max(8, self._controller.limit // 4)
            stats = self._engine.stats()
            load = EngineLoad(
                stats.running,
                stats.waiting,
                stats.kv_use,
                stats.preemptions - self._preemptions,
                places,
            )
            self._preemptions = stats.preemptions
            self._set_controller(self._controller.observe(load, self._slots.taken + 1))
        self._admit()

    def _set_controller(self, controller: ConcurrencyController) -> None:
        if controller is not self._controller:
            self._controller = controller
            self._set_limit()

    def _follow_tokens(self) -> None:
        """The budget of tokens allows more episodes, or fewer."""
        self._set_limit()
        self._admit()

    def _set_limit(self) -> None:
        self._slots.limit = self._limit()
        self._slots.grant()

    def _limit(self) -> int:
        """Episodes that may be live, by the load of the engines and by what their caches hold."""
        limit, allowed = self._controller.limit, self._share.limit
        return limit if allowed is None else min(limit, max(1, allowed))
