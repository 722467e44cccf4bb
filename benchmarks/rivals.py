"""Small models of other schedulers: discrete events on a heap, with the same random episodes for
every rule.

    python benchmarks/rivals.py [--settings gauss lognormal-1.0] [--seeds 5]

A model keeps only what decides throughput and staleness: which part waits for which. Each favours
its rival: no overhead, and weights and cancellations arrive at once. K is the bound on staleness, G
the groups of a step. Versions count from 0; a group's version is that of the oldest first token
among its members.
"""

import argparse
import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random

from rich.console import Console
from rich.table import Table

from agentrl.rollout.seeds import derive_seed
from agentrl.simulate.latency import NO_TIME, Latency, Lognormal, Normal

Turns = tuple[tuple[int, float], ...]
"""An episode: for each turn, the number of sampled tokens and the seconds of the environment after
them.
"""


@dataclass(frozen=True)
class Workload:
    """The episodes to play. They depend only on (seed, task, member), so every rule plays the same
    population.
    """

    name: str
    seed: int = 0
    steps: int = 50
    groups_per_step: int = 32
    group_size: int = 8
    num_turns: int = 1
    tokens: Latency = NO_TIME
    """Tokens of a turn; always 0 means an instant engine."""
    env_seconds: Latency = NO_TIME
    """Seconds of the environment in a turn."""
    fail_slow: float = 0.0
    """Share of episodes whose environment takes 600 s longer in one turn."""
    hung: float = 0.0
    """Share of episodes whose environment never answers in one turn."""
    train_seconds: float = 30.0
    slots: int = 1_000_000
    """Requests that the engine decodes at once."""
    seconds_per_token: float = 0.02
    slowdown: float = 0.0
    """As in `SimulatedEngine`: beyond `knee` requests at once, each further `knee` slows all of
    them by this much.
    """
    knee: int = 64

    def turns(self, task: int, member: int) -> Turns:
        """The episode of (task index, member), without trouble."""
        return _turns(self, task, member)

    def with_trouble(self, task: int, member: int) -> Turns:
        """The same with its trouble: 600 s more in one turn, or a turn that never ends."""
        turns = self.turns(task, member)
        if not (self.fail_slow or self.hung):
            return turns
        rng = Random(derive_seed(self.seed, "trouble", task, member))
        drawn, unlucky = rng.random(), rng.randrange(len(turns))
        late = (
            math.inf if drawn < self.hung else 600.0 if drawn < self.hung + self.fail_slow else 0.0
        )
        return tuple(
            (tokens, env + (late if i == unlucky else 0.0)) for i, (tokens, env) in enumerate(turns)
        )

    def seconds(self, turns: Turns) -> float:
        """How long an episode takes without competition for the engine."""
        return sum(tokens * self.seconds_per_token + env for tokens, env in turns)

    def rate(self, running: int) -> float:
        """The speed of each of `running` requests."""
        return 1.0 / (1.0 + self.slowdown * max(0, running - self.knee) / self.knee)

    def mean_seconds(self) -> float:
        """Mean `seconds` of the population, estimated from a separate sample."""
        return _mean_seconds(self)


@lru_cache(maxsize=1 << 18)
def _turns(w: Workload, task: int, member: int) -> Turns:
    return _drawn(w, Random(derive_seed(w.seed, w.name, task, member)))


def _drawn(w: Workload, rng: Random) -> Turns:
    return tuple(
        (round(w.tokens.sample(rng)), w.env_seconds.sample(rng)) for _ in range(w.num_turns)
    )


@lru_cache(maxsize=64)
def _mean_seconds(w: Workload) -> float:
    rng = Random(derive_seed(w.seed, w.name, "mean"))
    return statistics.fmean(w.seconds(_drawn(w, rng)) for _ in range(40_000 // w.num_turns))


@dataclass(frozen=True)
class Result:
    """A rule's result on a workload. `stalled_after`: steps done before it stalled, or None."""

    rule: str
    seconds_per_step: float
    episodes_per_second: float
    """Only trained episodes count."""
    slot_utilisation: float
    """Share of the slots' time in which they decoded; NaN where the engine is instant."""
    largest_staleness: int
    """Versions between a trained group's oldest first token and the weights it trained."""
    discarded: float
    """Share of the played seconds that belong to episodes not trained on, among episodes that ended
    or were dropped.
    """
    duration_ratio: float
    """Mean duration of trained episodes / that of the population: below 1, short episodes are
    favoured.
    """
    stalled_after: int | None = None


# The floor: the running episodes, the slots of the engine with its slowdown, and a clock.


@dataclass(eq=False, slots=True)
class Episode:
    """A running episode. `turn`: the number of finished turns. `version`: the version of its first
    token.
    """

    turns: Turns
    turn: int = 0
    version: int | None = None
    live: bool = True


class Floor:
    """Plays episodes. `next` advances the clock to the next end of an episode or `alarm`, and
    returns it.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.now = 0.0
        self.version = 0
        self.slot_seconds = 0.0
        self._clock = 0.0  # seconds that a request would have advanced without slowdown
        self._count = 0
        self._running: dict[Episode, None] = {}
        self._decoding: list[tuple[float, int, Episode]] = []
        self._waiting: deque[Episode] = deque()
        self._timers: list[tuple[float, int, object]] = []
        self._ended: deque[Episode] = deque()

    def play(self, episode: Episode) -> None:
        """Begin the episode's next turn."""
        if episode.turn == len(episode.turns):
            self._ended.append(episode)
        elif episode.turns[episode.turn][0] > 0:
            self._waiting.append(episode)
            self._fill()
        else:
            self._decoded(episode)

    def cancel(self, episode: Episode) -> None:
        """End an episode, and free its slot."""
        episode.live = False
        if self._running.pop(episode, episode) is None:
            self._fill()

    def alarm(self, seconds: float, what: object) -> None:
        """Let `next` return `what` after `seconds`."""
        if seconds < math.inf:
            self._count += 1
            heapq.heappush(self._timers, (self.now + seconds, self._count, what))

    def next(self) -> object | None:
        """The next ended episode or due alarm; None if nothing will happen any more."""
        while True:
            if self._ended:
                return self._ended.popleft()
            while self._decoding and self._decoding[0][2] not in self._running:
                heapq.heappop(self._decoding)  # cancelled
            rate = self.workload.rate(len(self._running))
            decoded = (
                self.now + (self._decoding[0][0] - self._clock) / rate
                if self._decoding
                else math.inf
            )
            due = self._timers[0][0] if self._timers else math.inf
            if decoded == due == math.inf:
                return None
            passed = min(decoded, due) - self.now
            self.now += passed
            self._clock += passed * rate
            self.slot_seconds += passed * len(self._running)
            if decoded <= due:
                episode = heapq.heappop(self._decoding)[2]
                del self._running[episode]
                self._decoded(episode)
                self._fill()
                continue
            what = heapq.heappop(self._timers)[2]
            if not isinstance(what, Episode):
                return what
            if what.live:
                what.turn += 1
                self.play(what)

    def _decoded(self, episode: Episode) -> None:
        if episode.version is None:
            episode.version = self.version
        self.alarm(episode.turns[episode.turn][1], episode)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.workload.slots:
            episode = self._waiting.popleft()
            if episode.live:
                if episode.version is None:
                    episode.version = self.version
                self._running[episode] = None
                self._count += 1
                tokens = episode.turns[episode.turn][0]
                finish = self._clock + tokens * self.workload.seconds_per_token
                heapq.heappush(self._decoding, (finish, self._count, episode))


@dataclass(eq=False, slots=True)
class Group:
    """The episodes of one task. It is ready when `needed` of them have ended."""

    task: int
    needed: int
    begun: int = 0
    playing: dict[Episode, None] = field(default_factory=dict)
    ended: list[Episode] = field(default_factory=list)

    def begin(self, workload: Workload) -> Episode:
        """Begin the next member."""
        episode = Episode(workload.with_trouble(self.task, self.begun))
        self.begun += 1
        self.playing[episode] = None
        return episode

    def end(self, episode: Episode) -> None:
        """Record that a member ended."""
        del self.playing[episode]
        self.ended.append(episode)

    @property
    def version(self) -> int | None:
        """The version of the oldest first token."""
        members = (*self.ended, *self.playing)
        return min((e.version for e in members if e.version is not None), default=None)


class Books:
    """Counts what one run trained on, and what it discarded."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.steps = self.episodes = self.staleness = 0
        self.trained_seconds = self.lost_seconds = self.finished_at = 0.0

    def trained(self, groups: Sequence[Group], floor: Floor) -> None:
        """Count a finished step on these groups; `floor.version` is the version that it trained."""
        self.steps += 1
        self.finished_at = floor.now
        for group in groups:
            version = group.version
            self.staleness = max(
                self.staleness, floor.version - (floor.version if version is None else version)
            )
            self.episodes += len(group.ended)
            self.trained_seconds += sum(self.workload.seconds(e.turns) for e in group.ended)

    def lost(self, episodes: Sequence[Episode]) -> None:
        """Count episodes that are not trained on, by their finished turns."""
        self.lost_seconds += sum(self.workload.seconds(e.turns[: e.turn]) for e in episodes)

    def result(self, rule: str, floor: Floor) -> Result:
        """The summary."""
        w = self.workload
        trained = self.trained_seconds / self.episodes if self.episodes else math.nan
        return Result(
            rule,
            self.finished_at / self.steps if self.steps else math.inf,
            self.episodes / self.finished_at if self.finished_at else 0.0,
            floor.slot_seconds / (floor.now * w.slots) if floor.slot_seconds else math.nan,
            self.staleness,
            self.lost_seconds / (self.lost_seconds + self.trained_seconds)
            if self.episodes
            else 0.0,
            trained / w.mean_seconds(),
            self.steps if self.steps < w.steps else None,
        )


# Asynchronous rules share one loop. A rule decides which groups start, which are trained on, and
# which are dropped.


class Synchronous:
    """K = 0: a batch is played, then trained on, without overlap. At K = 0 all rules do this."""

    name = "synchronous"

    def __init__(self, bound: int = 0) -> None:
        self.bound = bound

    def room(self, run: "Run") -> bool:
        """Whether one more group may start: at most (K + 1) G exist."""
        return len(run.playing) + len(run.ready) + len(run.training) < (self.bound + 1) * run.G

    def choose(self, run: "Run") -> list[Group] | None:
        """The next batch: first come, first served."""
        return run.ready[: run.G] if len(run.ready) >= run.G else None

    def may_publish(self, run: "Run") -> bool:
        """Whether new weights may go live."""
        return True

    def stale(self, run: "Run") -> list[Group]:
        """The groups to drop now that a new version is live."""
        return []


class Gate(Synchronous):
    """AReaL (arXiv 2505.24298, eq. 3), SkyRL: at most (version + K + 1) G groups are admitted in
    all.

    So at most (K + 1) G exist at once, since each version uses up G. Finished groups are trained on
    first come, first served. A straggler does not delay others, and may be older than K.
    """

    name = "gate"


class Drop(Synchronous):
    """prime-rl, verl: groups that are older than K at the next step are cancelled and replaced by
    new tasks.
    """

    name = "drop"

    def stale(self, run: "Run") -> list[Group]:
        """The groups that began more than K versions ago."""
        oldest = run.floor.version - self.bound
        known = ((group, group.version) for group in (*run.playing, *run.ready))
        return [group for group, version in known if version is not None and version < oldest]


class Wait(Synchronous):
    """Strictly in order of admission: training waits for late groups."""

    name = "wait"

    def choose(self, run: "Run") -> list[Group] | None:
        """The G oldest groups, as soon as all of them have ended."""
        batch = sorted(run.ready, key=lambda group: group.task)[: run.G]
        late = len(batch) < run.G or any(group.task < batch[-1].task for group in run.playing)
        return None if late else batch


class Drain(Synchronous):
    """New weights wait until nothing is in flight, and nothing starts while they wait."""

    name = "drain"

    def room(self, run: "Run") -> bool:
        """Not while weights wait."""
        return not run.weights_wait and super().room(run)

    def may_publish(self, run: "Run") -> bool:
        """When nothing plays."""
        return not run.playing


class Run:
    """A training run under a rule: the loop that all rules share."""

    def __init__(self, workload: Workload, rule: Synchronous) -> None:
        self.workload, self.rule, self.G = workload, rule, workload.groups_per_step
        self.floor = Floor(workload)
        self.books = Books(workload)
        self.playing: dict[Group, None] = {}
        self.ready: list[Group] = []
        self.training: list[Group] = []
        self.weights_wait = False
        self.admitted = 0
        self._of: dict[Episode, Group] = {}

    def result(self) -> Result:
        """Run all steps, or until the run stalls."""
        self._decide()
        while self.books.steps < self.workload.steps and (event := self.floor.next()) is not None:
            if isinstance(event, Episode):
                self._ended(event)
            else:
                self.weights_wait = True
            self._decide()
        return self.books.result(self.rule.name, self.floor)

    def _ended(self, episode: Episode) -> None:
        group = self._of.pop(episode)
        group.end(episode)
        if not group.playing:
            del self.playing[group]
            self.ready.append(group)

    def _decide(self) -> None:
        if self.weights_wait and self.rule.may_publish(self):
            self.weights_wait = False
            self.books.trained(self.training, self.floor)
            self.training = []
            self.floor.version += 1
            for group in self.rule.stale(self):
                self._give_up(group)
        while self.rule.room(self):
            self._admit()
        if not self.training and (batch := self.rule.choose(self)) is not None:
            self.ready = [group for group in self.ready if group not in batch]
            self.training = batch
            self.floor.alarm(self.workload.train_seconds, "trained")

    def _admit(self) -> None:
        group = Group(self.admitted, self.workload.group_size)
        self.admitted += 1
        self.playing[group] = None
        for _ in range(group.needed):
            episode = group.begin(self.workload)
            self._of[episode] = group
            self.floor.play(episode)

    def _give_up(self, group: Group) -> None:
        if self.playing.pop(group, group) is group:
            self.ready.remove(group)
        for episode in group.playing:
            del self._of[episode]
            self.floor.cancel(episode)
        self.books.lost((*group.playing, *group.ended))


def asynchronous(rule: Callable[[int], Synchronous], bound: int) -> Callable[[Workload], Result]:
    """`rule` with K = `bound`, as a function of the workload."""
    return lambda workload: Run(workload, rule(bound)).result()


def synchronous(workload: Workload) -> Result:
    """A batch is played, then trained on."""
    return Run(workload, Synchronous(0)).result()


# Synchronous rules that differ in how a batch is played.


def _batches(
    name: str, workload: Workload, play_all: Callable[[Floor, list[Episode]], bool]
) -> Result:
    """Play a batch with `play_all` (which returns whether it ended), train on it, and repeat."""
    floor, books = Floor(workload), Books(workload)
    for step in range(workload.steps):
        first = step * workload.groups_per_step
        groups = [Group(first + i, workload.group_size) for i in range(workload.groups_per_step)]
        if not play_all(
            floor, [group.begin(workload) for group in groups for _ in range(group.needed)]
        ):
            break
        floor.alarm(workload.train_seconds, "trained")
        while floor.next() != "trained":
            pass
        for group in groups:
            for episode in list(group.playing):
                group.end(episode)
        books.trained(groups, floor)
        floor.version += 1
    return books.result(name, floor)


def lockstep(workload: Workload) -> Result:
    """Vectorised stepping: every turn, all environments wait for the longest answer and the slowest
    step.
    """

    def play_all(floor: Floor, episodes: list[Episode]) -> bool:
        for turn in range(workload.num_turns):
            asked = [Episode(((episode.turns[turn][0], 0.0),)) for episode in episodes]
            for request in asked:
                floor.play(request)
            for _ in asked:
                floor.next()
            floor.alarm(max(episode.turns[turn][1] for episode in episodes), "stepped")
            if floor.next() is None:
                return False
        return True

    return _batches("lockstep", workload, play_all)


def workers(workload: Workload, count: int = 64) -> Result:
    """`count` workers, each of which plays one episode at a time, from start to end."""

    def play_all(floor: Floor, episodes: list[Episode]) -> bool:
        waiting = deque(episodes)
        for _ in range(min(count, len(waiting))):
            floor.play(waiting.popleft())
        for _ in episodes:
            if floor.next() is None:
                return False
            if waiting:
                floor.play(waiting.popleft())
        return True

    return _batches(f"{count} workers", workload, play_all)


@dataclass(eq=False, slots=True)
class _Core:
    """A worker with its ring: each seat is an episode and its pending request."""

    seats: deque[tuple[Episode, Episode]] = field(default_factory=deque)
    stepping: Episode | None = None


def ring(workload: Workload, size: int = 4, *, strict: bool = True) -> Result:
    """SRL: a worker visits its `size` environments in a fixed order.

    At each it waits for the environment's answer, steps it (and does nothing else meanwhile),
    requests the next answer, and goes on. If not `strict`, it takes any environment that has its
    answer.
    """

    def play_all(floor: Floor, episodes: list[Episode]) -> bool:
        waiting, answered, at = deque(episodes), set[Episode](), dict[Episode, _Core]()

        def ask(core: _Core, episode: Episode) -> None:
            request = Episode(((episode.turns[episode.turn][0], 0.0),))
            at[request] = core
            core.seats.append((episode, request))
            floor.play(request)

        def visit(core: _Core) -> None:
            places = range(1 if strict else len(core.seats))
            found = next((i for i in places if core.seats and core.seats[i][1] in answered), None)
            if core.stepping is None and found is not None:
                episode, request = core.seats[found]
                del core.seats[found]
                answered.discard(request)
                core.stepping = episode
                floor.alarm(episode.turns[episode.turn][1], core)

        cores = [_Core() for _ in range(math.ceil(len(episodes) / size))]
        for core in cores:
            for _ in range(min(size, len(waiting))):
                ask(core, waiting.popleft())
        left = len(episodes)
        while left:
            event = floor.next()
            if isinstance(event, Episode):
                answered.add(event)
                visit(at.pop(event))
            elif isinstance(event, _Core) and event.stepping is not None:
                episode, event.stepping = event.stepping, None
                episode.turn += 1
                left -= episode.turn == len(episode.turns)
                if episode.turn < len(episode.turns):
                    ask(event, episode)
                visit(event)
            else:
                return False
        return True

    return _batches(f"{'ring' if strict else 'ready queue'} of {size}", workload, play_all)


# ROLL's group queue.


class GroupQueue:
    """ROLL (roll/distributed/scheduler/rollout_scheduler.py): teams of environments, each with a
    queue of groups.

    There are G + `extra_groups` teams of size + `extra_members` environments. Each step opens one
    group for every team; the start opens `ahead` more. An environment plays once for each group of
    its team, in order (we tried two readings of this; this one is nearer to the known figures). The
    first `size` episodes to end make the group; the others play on for nothing, unless
    `cancel_losers`. A group opened more than `ahead` steps ago expires. The trainer takes one group
    from each team, then the next from each.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        ahead: int = 0,
        extra_members: int = 0,
        extra_groups: int = 0,
        cancel_losers: bool = False,
    ) -> None:
        self.workload, self.ahead, self.cancel_losers = workload, ahead, cancel_losers
        self.team_size = workload.group_size + extra_members
        self.floor, self.books = Floor(workload), Books(workload)
        teams = workload.groups_per_step + extra_groups
        # (step it was opened at, group).
        self.open: list[list[tuple[int, Group]]] = [[] for _ in range(teams)]
        # The task that each idle environment played last.
        self.idle = [[-1] * self.team_size for _ in range(teams)]
        self.owing: set[int] = set()  # teams that the trainer waits for in this round
        self.of: dict[Episode, tuple[int, Group]] = {}
        self.next_task = 0
        cancelled = ", losers cancelled" if cancel_losers else ""
        self.name = (
            f"group queue {teams}x({workload.group_size}+{extra_members}) K={ahead}{cancelled}"
        )

    def result(self) -> Result:
        """Run all steps, or until the run stalls."""
        for _ in range(self.ahead):
            self._open_one_for_each()
        training: list[Group] = []
        batch = self._advance()
        while self.books.steps < self.workload.steps and (event := self.floor.next()) is not None:
            if isinstance(event, Episode):
                self._ended(event)
            else:
                self.books.trained(training, self.floor)
                self.floor.version += 1
                training, batch = [], self._advance()
            if not training:
                self._collect(batch)
                if len(batch) == self.workload.groups_per_step:
                    training = batch
                    self.floor.alarm(self.workload.train_seconds, "trained")
        return self.books.result(self.name, self.floor)

    def _advance(self) -> list[Group]:
        """Begin the next step: expire old groups, open a group for each team, and return an empty
        batch.
        """
        for groups in self.open:
            for opened, group in list(groups):
                if self.floor.version - opened > self.ahead:
                    groups.remove((opened, group))
                    self.books.lost(group.ended)
                    self._release(group)
        self._open_one_for_each()
        if not self.ahead:
            self.owing.clear()
        return []

    def _open_one_for_each(self) -> None:
        for team in range(len(self.open)):
            self.open[team].append(
                (self.floor.version, Group(self.next_task, self.workload.group_size))
            )
            self.next_task += 1
            self._assign(team)

    def _assign(self, team: int) -> None:
        for _, group in self.open[team]:
            for last in [last for last in self.idle[team] if last < group.task]:
                if group.begun < self.team_size:
                    self.idle[team].remove(last)
                    episode = group.begin(self.workload)
                    self.of[episode] = (team, group)
                    self.floor.play(episode)

    def _ended(self, episode: Episode) -> None:
        team, group = self.of.pop(episode)
        self.idle[team].append(group.task)
        if len(group.ended) < group.needed and any(each is group for _, each in self.open[team]):
            group.end(episode)
        else:
            group.playing.pop(episode, None)
            self.books.lost([episode])
        if len(group.ended) == group.needed:
            self._release(group)
        self._assign(team)

    def _release(self, group: Group) -> None:
        """Cancel the group's remaining episodes, if `cancel_losers`."""
        if not self.cancel_losers:
            return
        for episode in list(group.playing):
            team, _ = self.of.pop(episode)
            self.floor.cancel(episode)
            self.books.lost([episode])
            del group.playing[episode]
            self.idle[team].append(group.task)
            self._assign(team)

    def _collect(self, batch: list[Group]) -> None:
        while len(batch) < self.workload.groups_per_step:
            self.owing = self.owing or set(range(len(self.open)))
            found = False
            for team in sorted(self.owing):
                done = next(
                    (each for each in self.open[team] if len(each[1].ended) == each[1].needed), None
                )
                if done is not None and len(batch) < self.workload.groups_per_step:
                    self.open[team].remove(done)
                    self.owing.discard(team)
                    batch.append(done[1])
                    found = True
            if not found:
                return


def group_queue(
    *, ahead: int = 0, extra_members: int = 0, extra_groups: int = 0, cancel_losers: bool = False
) -> Callable[[Workload], Result]:
    """`GroupQueue` as a function of the workload."""
    return lambda workload: GroupQueue(
        workload,
        ahead=ahead,
        extra_members=extra_members,
        extra_groups=extra_groups,
        cancel_losers=cancel_losers,
    ).result()


def lower_bound(workload: Workload, max_staleness: int | None = None) -> float:
    """Fewest seconds of any schedule that trains on the first `steps * G` tasks, in any order,
    dropping none.

    Trouble is left out: a schedule that plays a slow or hung episode again may avoid it.

    - Work: all tokens are sampled, by an engine whose best speed is the max over n <= slots of n *
      rate(n); then one step must still be trained.
    - Chain: the longest episode alone, then the training of one step.
    - Trainer: its steps follow each other. The first waits for G groups, so at least for the G-th
      quickest group.
    - Staleness, if `max_staleness` = K is given: of the groups of the steps up to K + v, at least G
      begin when version v is live, since at most (K + 1) G exist at once. So with L(v) the time
      when version v goes live, and q the duration of the G-th quickest group: L(v + K + 1) >= L(v)
      + q + train.
    """
    w, G = workload, workload.groups_per_step
    members = range(w.group_size)
    groups = [[w.turns(task, member) for member in members] for task in range(w.steps * G)]
    fastest = max(n * w.rate(n) for n in range(1, min(w.slots, 100_000) + 1))
    work = (
        sum(tokens for group in groups for turns in group for tokens, _ in turns)
        * w.seconds_per_token
        / fastest
    )
    chains = sorted(max(w.seconds(turns) for turns in group) for group in groups)
    live = [0.0]
    for step in range(w.steps):
        start = max(live[step], chains[G - 1])
        if max_staleness is not None and step >= max_staleness:
            start = max(start, live[step - max_staleness] + chains[G - 1])
        live.append(start + w.train_seconds)
    return max(work + w.train_seconds, chains[-1] + w.train_seconds, live[-1])


# The settings.


def _balanced(workload: Workload, share: float = 1.0) -> Workload:
    """The workload with a trainer that takes `share` of the engine's best time for a batch."""
    fastest = max(n * workload.rate(n) for n in range(1, workload.slots + 1))
    batch = workload.groups_per_step * workload.group_size * workload.mean_seconds()
    return replace(workload, train_seconds=share * batch / fastest)


def _gauss(name: str, sd: float = 5.0, **changes: float) -> Callable[[int], Workload]:
    env = Normal(mean=10, sd=sd, floor=0.1)
    return lambda seed: replace(Workload(name, seed, num_turns=10, env_seconds=env), **changes)  # type: ignore[arg-type]


def _lognormal(
    name: str, tokens: Latency, *, groups: int, size: int, share: float = 1.0
) -> Callable[[int], Workload]:
    return lambda seed: _balanced(
        Workload(name, seed, groups_per_step=groups, group_size=size, tokens=tokens, slots=64),
        share,
    )


def _long_decode(seed: int) -> Workload:
    tokens = Lognormal(median=158, sigma=0.6, cap=500)
    w = Workload("long-decode", seed, num_turns=16, tokens=tokens, slots=64, slowdown=0.5, knee=32)
    return _balanced(w, 0.5)


def _lognormals() -> dict[str, Callable[[int], Workload]]:
    made = {}
    for sigma in (1.0, 1.4):
        for cap_name, cap in (("", 5000.0), (" uncapped", None)):
            for shape, groups, size in (("", 32, 8), (" singles", 256, 1)):
                name = f"lognormal-{sigma}{cap_name}{shape}"
                made[name] = _lognormal(
                    name, Lognormal(median=500, sigma=sigma, cap=cap), groups=groups, size=size
                )
    return made


SETTINGS: dict[str, Callable[[int], Workload]] = {
    "gauss": _gauss("gauss"),
    "fail-slow": _gauss("gauss", fail_slow=0.01),
    "hung": _gauss("gauss", hung=0.001),
    **{f"env-var-{sd}": _gauss(f"env-var-{sd}", sd=sd, train_seconds=0.0) for sd in (1, 3, 5, 10)},
    **_lognormals(),
    # A batch that just fills the slots, so that every straggler empties the engine. Its shape and
    # the 1.45 were fitted so that the models give the known figures of the same rules, whose exact
    # setting is not known.
    "lognormal-1.0 tight": _lognormal(
        "lognormal-1.0 tight",
        Lognormal(median=500, sigma=1.0, cap=5000),
        groups=8,
        size=8,
        share=1.45,
    ),
    "long-decode": _long_decode,
}
"""By name: the workload for a seed."""


def rivals(bound: int) -> dict[str, Callable[[Workload], Result]]:
    """Every rule, with K = `bound` where it has one."""
    found: dict[str, Callable[[Workload], Result]] = {
        "synchronous": synchronous,
        "lockstep": lockstep,
        "workers": workers,
        "ring": ring,
        "group queue": group_queue(ahead=bound),
        # Groups of one get no spare member: half of all work would be wasted.
        "group queue, redundant": lambda w: group_queue(
            ahead=bound, extra_members=min(1, w.group_size - 1), extra_groups=w.groups_per_step // 8
        )(w),
    }
    for rule in (Gate, Drop, Wait, Drain):
        found[rule.name] = asynchronous(rule, bound)
    return found


def mean(results: Sequence[Result]) -> Result:
    """The mean over seeds, with the largest staleness and the earliest stall of all."""

    def over(name: str) -> float:
        return statistics.fmean(getattr(result, name) for result in results)

    return Result(
        results[0].rule,
        over("seconds_per_step"),
        over("episodes_per_second"),
        over("slot_utilisation"),
        max(result.largest_staleness for result in results),
        over("discarded"),
        over("duration_ratio"),
        min((r.stalled_after for r in results if r.stalled_after is not None), default=None),
    )


def main() -> None:
    """Print a table per setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME"
    )
    parser.add_argument("--bounds", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    columns = (
        "rule",
        "K",
        "s/step",
        "speed-up",
        "episodes/s",
        "slots",
        "staleness",
        "discarded",
        "duration",
        "stalled",
    )
    for name in args.settings:
        workloads = [SETTINGS[name](seed) for seed in range(args.seeds)]
        floor = statistics.fmean(lower_bound(w) / w.steps for w in workloads)
        table = Table(
            *columns,
            title=f"{name}: at least {floor:.1f} s/step unless work is dropped or left over",
        )
        base = mean([synchronous(w) for w in workloads]).seconds_per_step
        for bound in args.bounds:
            for rule, run in rivals(bound).items():
                if bound != args.bounds[0] and rule in (
                    "synchronous",
                    "lockstep",
                    "workers",
                    "ring",
                ):
                    continue  # they have no K
                r = mean([run(w) for w in workloads])
                figures = (
                    r.seconds_per_step,
                    base / r.seconds_per_step,
                    r.episodes_per_second,
                    r.slot_utilisation,
                )
                shares = (
                    f"{r.discarded:.2f}",
                    f"{r.duration_ratio:.2f}",
                    str(r.stalled_after or ""),
                )
                table.add_row(
                    rule,
                    str(bound),
                    *(f"{x:.2f}" for x in figures),
                    str(r.largest_staleness),
                    *shares,
                )
        Console(width=130).print(table)


if __name__ == "__main__":
    main()
