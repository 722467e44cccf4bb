"""Role-conditioned advantage estimation: the return less what the role has earned of late, a
baseline for self-play.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from agentrl.algorithms.grpo import discounted
from agentrl.algorithms.policy_loss import scored
from agentrl.algorithms.reinforce import Reinforce
from agentrl.protocols.algorithm import MemberAdvantage
from agentrl.trajectory import Group


class RoleAdvantage(Reinforce):
    """A = R - b of the environment and the role, with b <- decay b + (1 - decay) R after each
    episode.

    SPIRAL (arXiv:2506.24119), section 3: in a game of several seats, what an episode earns depends
    on the seat. The baseline is that of earlier steps, so it does not depend on the episode's own
    actions, and the gradient is unbiased. Works with any `group_size`.
    """

    class Config(Reinforce.Config):
        """The baselines, and the loss."""

        reward_to_go: bool = False
        """Credit each turn only with what is earned from it on."""

        decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
        """The share of a baseline that an episode leaves as it was."""

        roles: bool = True
        """A baseline for each role of an environment; else one for all of its roles together."""

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.baselines: dict[str, float] = {}
        """By environment, or by `environment/role`; 0 where there is none yet."""

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """The return of each member, or of each of its turns, less the baseline.

        Raises:
            ValueError: a member has no score, or one that is not a finite number.
        """
        baseline = self.baselines.get(self._key(group), 0.0)
        found = super().advantages(group)
        return [
            a - baseline if isinstance(a, float | int) else [one - baseline for one in a]
            for a in found
        ]

    def learn(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Update each baseline, weighted by the number of episodes."""
        returns: dict[str, list[float]] = defaultdict(list)
        for group in groups:
            returns[self._key(group)] += (
                discounted(group, self.config.gamma) if self.config.gamma < 1 else scored(group)
            )
        for key, earned in returns.items():
            kept = self.config.decay ** len(earned)
            self.baselines[key] = kept * self.baselines.get(key, 0.0) + (1 - kept) * sum(
                earned
            ) / len(earned)
        return {f"baseline/{key}": value for key, value in sorted(self.baselines.items())}

    def state(self) -> Mapping[str, Any]:
        """The baselines. See `Stateful`."""
        return {"baselines": self.baselines}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the baselines of an earlier launch. See `Stateful`."""
        self.baselines = dict(state["baselines"])

    def _key(self, group: Group) -> str:
        role = group.trajectories[0].agent if self.config.roles else ""
        return "/".join(filter(None, (group.task.env, role)))
