"""`Mixture`: tasks of several environments, in shares that are kept however slow or broken an
environment is.

The next task belongs to the environment that is furthest behind its weight: the one with the
smallest (n + 1) / weight, where n are its groups that have been trained on or are being played (the
method of D'Hondt). A group that fails, is filtered or is too old no longer counts, so its place
goes to the same environment. The order depends on these counts alone, which a resumed run restores
from its ledger (and the tokens from its checkpoint).

Example: the weights 2 (`a`) and 1 (`b`). At first, `a` has 1/2 and `b` 1/1, so `a` is next; then
`a` has 2/2 and `b` 1/1, and the first of equals is taken: a, a, b, a, a, b, ...
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.ledger.ledger import Fate
from agentrl.protocols import Curriculum, TaskSource, TaskSourceOffers
from agentrl.rollout.next_task import next_task
from agentrl.trajectory import Group, Task


@dataclass(slots=True)
class Share:
    """An environment of a mixture, and the counts of its tasks."""

    name: str
    """Its name in the run."""
    env: str
    """The environment's own name."""
    weight: float
    """Its share of the mixture, relative to the other weights."""
    tasks: TaskSource
    """The source of its tasks."""
    group_size: int
    """Episodes of each group."""
    max_failed_tasks: int
    """Tasks that may fail before the environment is given up, or the run ends."""
    issued: int = 0
    """Tasks so far."""
    live: int = 0
    """Groups that are being played."""
    groups: int = 0
    """Groups trained on."""
    tokens: float = 0.0
    """Sampled tokens of the groups trained on."""
    failed_before: int = 0
    """Tasks that failed in earlier launches and count in its budget."""
    given_up: bool = False
    """The environment gets no more tasks."""
    numbers: dict[int, int] = field(default_factory=dict)
    """The index of a task among its own, by its number in the run, for a curriculum."""


class Mixture:
    """`TaskSource` of several environments. `count`: what the weights are shares of.

    A task keeps the id that its own source gave it, after the environment's name. Each source is
    asked for its tasks in order, and a curriculum observes the outcomes of its own tasks only.
    """

    def __init__(
        self, shares: Sequence[Share], count: Literal["groups", "tokens"] = "groups"
    ) -> None:
        self._shares = {share.name: share for share in shares}
        self._offers = {share.name: TaskSourceOffers.of(share.tasks) for share in shares}
        self._count = count

    def __getitem__(self, env: str) -> Share:
        """An environment's share, by its name in the run."""
        return self._shares[env]

    def task(self, index: int) -> Task:
        """The task with this number. Called once for each, in order."""
        share = min(
            (share for share in self._shares.values() if not share.given_up), key=self._next
        )
        task = next_task(share.tasks, share.issued)
        self._issue(share, index)
        share.live += 1
        return replace(task, env=share.name, id=f"{share.name}-{task.id}")

    def trained(self, groups: Iterable[Group]) -> None:
        """These groups are trained on."""
        for group in groups:
            share = self._shares[group.task.env]
            share.live -= 1
            share.groups += 1
            share.tokens += sum(one.num_played_tokens for one in group.trajectories)

    def lost(self, task: Task) -> None:
        """The group of this task will not be trained on."""
        self._shares[task.env].live -= 1

    def give_up(self, env: str) -> bool:
        """Give an environment no more tasks; returns whether another is left."""
        self._shares[env].given_up = True
        return not all(share.given_up for share in self._shares.values())

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """Pass an outcome on to the curriculum of its environment, if it has one."""
        share = self._shares[task.env]
        own = share.numbers.pop(index, None)
        if isinstance(share.tasks, Curriculum) and own is not None:
            share.tasks.observe(
                own,
                replace(task, env=share.env, id=task.id.removeprefix(f"{task.env}-")),
                rewards_G,
            )

    def metrics(self) -> dict[str, float]:
        """The metrics of the environments' curricula, by the environment's name."""
        metrics: dict[str, float] = {}
        for name, offers in self._offers.items():
            if offers.metrics is not None:
                own = offers.metrics()
                metrics |= {f"envs/{name}/{key}": value for key, value in own.items()}
        return metrics

    def state(self) -> Mapping[str, Any]:
        """The tokens that were trained on, by environment. See `Stateful`; all else is in the
        ledger.
        """
        return {"tokens": {name: share.tokens for name, share in self._shares.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the tokens of an earlier launch. See `Stateful`."""
        for name, share in self._shares.items():
            share.tokens = state["tokens"].get(name, 0.0)

    def replay(self, fates: Iterable[tuple[int, str, Fate | None]], *, gives_up: bool) -> None:
        """Continue an earlier launch, from (number, environment, fate) of its tasks in order.

        `gives_up`: an environment that had spent its budget of failures gets no more tasks, and
        what the others had spent counts. If all had spent theirs, which ended the run, each has a
        whole budget again.

        Raises:
            ConfigError: the earlier launch had tasks of an environment that is not there any more.
        """
        failed = dict.fromkeys(self._shares, 0)
        unknown = set[str]()
        for number, env, fate in fates:
            if env not in self._shares:
                unknown.add(env)
                continue
            share = self._shares[env]
            self._issue(share, number)
            share.live += fate is None
            share.groups += fate in ("trained", "masked")
            failed[env] += fate == "failed"
        if unknown:
            raise ConfigError(
                f"env.mixture has no entry called {min(unknown)!r} any more, and the run has had"
                " tasks of it: put it back (with a small weight it gets few tasks more); there is"
                f" {', '.join(self._shares)}"
            )
        if gives_up and any(
            failed[name] <= share.max_failed_tasks for name, share in self._shares.items()
        ):
            for name, share in self._shares.items():
                share.failed_before = failed[name]
                share.given_up = failed[name] > share.max_failed_tasks

    def _issue(self, share: Share, number: int) -> None:
        if isinstance(share.tasks, Curriculum):
            share.numbers[number] = share.issued
        share.issued += 1

    def _next(self, share: Share) -> float:
        """The lead of an environment with one more group; the smallest lead is the next."""
        if self._count == "groups":
            return (share.groups + share.live + 1) / share.weight
        # A group that is being played counts as much as those of its environment did so far, or
        # else those of all.
        trained = [share] if share.groups else list(self._shares.values())
        groups = sum(share.groups for share in trained)
        mean = sum(share.tokens for share in trained) / groups if groups else 1.0
        return (share.tokens + (share.live + 1) * max(mean, 1.0)) / share.weight
