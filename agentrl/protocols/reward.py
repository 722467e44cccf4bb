"""Rewards: scores of trajectories, of groups of them, and rules that are pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agentrl.protocols.env import Isolation
from agentrl.protocols.offers import Offers
from agentrl.trajectory import Score, Trajectory


@runtime_checkable
class Reward(Protocol):
    """Scores a trajectory. If it cannot, it raises `RewardError` or returns `Score.failed(...)`.

    A reward of any shape may be an async context manager, which the run enters and leaves. A
    function of a trajectory, sync or async, that returns a `Score` or a number is a reward too; its
    keyword-only parameters are its settings. Several rewards are combined by a weighted sum
    (`agentrl/scoring/pipeline.py`). Two methods are optional, beside those of `RewardOffers`:

    - `check_task(task) -> None`: raises `ConfigError` for a task that cannot be scored, such as one
      without a right answer. Called for each row of data before the run begins, on an instance that
      has not been entered;
    - `check_first_task(task) -> None`: the same for what takes long to see. Called for the first
      rows alone.
    """

    async def score(self, trajectory: Trajectory) -> Score:
        """The verdict on one trajectory."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """Scores the trajectories of a group by comparing them. It is called once, when the group is
    complete.
    """

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """One verdict per trajectory, in their order. A failure, as in `Reward`, is one of the
        whole group.
        """
        ...


@runtime_checkable
class Rule(Protocol):
    """A reward that is a pure function of a part of the trajectory.

    `evaluate` runs in a process with limits (`rollout.rules`), and verdicts are cached by content.
    Content that uses up the CPU time or the memory gets the optional attribute `wrong` as its
    verdict, by default 0. A rule that always answers in microseconds may set `isolation = "inline"`
    to run on the event loop. The modules in its optional attribute `imports` are imported before
    the limits apply.
    """

    def content(self, trajectory: Trajectory) -> Any:
        """The whole input of `evaluate`, in a form that pickles. Runs on the event loop.

        Raises:
            RewardError: the input is missing (a task without a right answer).
        """
        ...

    def evaluate(self, content: Any) -> Score | float:
        """The verdict. The same content always gets the same verdict."""
        ...


@dataclass(frozen=True, slots=True)
class RewardOffers(Offers):
    """The facts and optional methods of a reward or a rule: attributes with these names."""

    isolation: Isolation | None = None
    """The place where it runs, if it states one."""
    imports: tuple[str, ...] = ()
    """Modules that a rule needs, which are imported before its limits apply."""
    wrong: float = 0.0
    """The verdict of a rule on content that uses up the CPU time or the memory."""
    pays_what_the_environment_pays: bool = False
    """Its score is the sum of the environment's rewards."""
    score_turns: Callable[[Trajectory], Sequence[float]] | None = None
    """Returns the contribution of each turn so far of an episode that still goes on, as
    `Score.turns` will have it at the end (`staleness_rule: segment`)."""
    metrics: Callable[[], Mapping[str, float]] | None = None
    """Returns the cost of the work since the last call; called after each step."""
