"""Group-relative policy optimisation and its relatives: GRPO, Dr. GRPO, RLOO, DAPO are settings of one class."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from agentrl.algorithms.advantages import Advantage, group_mean, group_std, leave_one_out
from agentrl.algorithms.policy_loss import PolicyLoss, scored
from agentrl.batch import TrainBatch
from agentrl.protocols import LossOutput, LossTokens
from agentrl.trajectory import Group

if TYPE_CHECKING:
    from torch import Tensor

_ADVANTAGES: Mapping[str, Advantage] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}


class Grpo:
    """An advantage over the group, and the clipped policy gradient with truncated importance weights.

    GRPO (arXiv:2402.03300) with DAPO's clip and token mean (arXiv:2503.14476) is the default. Dr. GRPO
    (arXiv:2503.20783) is `advantage: group_mean` and a number for `normalizer`. RLOO (arXiv:2402.14740) is
    `advantage: leave_one_out`.
    """

    class Config(PolicyLoss):
        """The baseline of the advantages, and the loss."""

        advantage: Literal["group_std", "group_mean", "leave_one_out"] = "group_std"
        """What a reward is compared with; see `agentrl.algorithms.advantages`. `group_std` is biased, whatever the
        batch size: tasks count by 1 / spread of their rewards (0.07 to 0.17 of the gradient). The others are not
        biased."""

    compares_members = True
    """See `Algorithm`."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Grpo.Config()

    @property
    def uses_reference(self) -> bool:
        """See `Algorithm`."""
        return self.config.kl > 0

    def advantages(self, group: Group) -> Sequence[float]:
        """One advantage per member.

        Raises:
            ValueError: a member has no score, or one that is not a finite number.
        """
        return _ADVANTAGES[self.config.advantage](scored(group))

    def loss(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """See `PolicyLoss.losses`."""
        return self.config.losses(logprobs_N, tokens)

    def normalizer(self, batch: TrainBatch) -> float:
        """See `PolicyLoss.divisor`."""
        return self.config.divisor(batch)
