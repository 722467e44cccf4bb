"""The seam between a member of a group and what plays its episodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.flow import PausableClock
from agentrl.protocols.offers import Offers
from agentrl.rollout.assignment import (
    Assignment,
    Report,
    TokensSampled,
)
from agentrl.rollout.budget import Budget, BudgetUsage
from agentrl.trajectory import (
    Group,
    Task,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that is being played, as policies see it."""

    id: str
    """Of its session with the engine: that of the assignment. Each agent of several has one of its
    own, `ID/AGENT`."""
    task: Task
    """The problem. Its seed is the environment's."""
    seed: int
    """For sampling."""
    priority: int = 0
    """Of its requests to the engine; those with a lower number are served first."""
    usage: BudgetUsage = field(default_factory=BudgetUsage, compare=False)
    """The used part of its budget, by all of its agents together."""
    clock: PausableClock = field(default_factory=PausableClock, compare=False)
    """Its time, which stands still while one of its agents waits for an engine that does."""

    @staticmethod
    def of(assignment: Assignment, budget: Budget, report: Report) -> "Episode":
        """The episode of an assignment, which reports each answer."""

        def report_answer(tokens: int, context: int) -> None:
            report(TokensSampled(tokens, 1, context))

        usage = BudgetUsage(budget, on_answer=report_answer)
        return Episode(assignment.id, assignment.task, assignment.seed, assignment.priority, usage)


class EpisodeRunner(Protocol):
    """Plays episodes of any kind. It may also have the methods of `RunnerOffers`."""

    async def play(self, assignment: Assignment, report: Report) -> Sequence[Trajectory]:
        """Play an episode to its end, however it ends: a trajectory for each trained agent, at
        least one.

        All have the same status. Only cancellation and defects are raised. Each answer is reported,
        and the turns so far if the assignment asks for them and the runner can tell.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunnerOffers(Offers):
    """The optional methods of an `EpisodeRunner`, which are found by their names."""

    observe: Callable[[Sequence[Group]], None] | None = None
    """Gets the groups of the next batch, before they are trained on, for a runner that depends on
    how earlier episodes went."""
    metrics: Callable[[], Mapping[str, float]] | None = None
    """Returns metrics of the last batch."""
