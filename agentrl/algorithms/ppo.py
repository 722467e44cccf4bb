"""Proximal policy optimisation: advantages from a critic that is trained along with the policy."""

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from agentrl.algorithms.advantages import Steps, generalized, whitened
from agentrl.algorithms.critic_based import CriticBased
from agentrl.algorithms.turns import after_trajectories, turns_of
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import Estimate, LossOutput, LossTokens
from agentrl.tokens.arrays import FloatArray, floats

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(CriticBased):
    """PPO (arXiv:1707.06347) with generalized advantage estimation over the tokens of each
    trajectory.

    A critic estimates the expected return before each token; a token's advantage is the rise in
    expected return that it causes. So a group may be a single episode. The section `critic` has the
    critic's settings.
    """

    class Config(CriticBased.Config):
        """The estimate of advantages, and the losses."""

        gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Discount from one turn to the next; the tokens of a turn are not discounted."""

        lam: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Lambda: 1 uses the reward itself, which the critic cannot bias; 0 the critic's value one
        step later.
        """

        lam_length: Annotated[float, Field(gt=0)] | None = None
        """Length-adaptive lambda, VAPO (arXiv:2504.05118), equation 8: 1 - 1 / (lam_length * steps
        of the trajectory) instead of `lam`. The paper's is 0.05."""

        critic_lam: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Lambda of the returns that the critic learns."""

        whiten: bool = True
        """Give the advantages of a batch the mean 0 and the standard deviation 1. Biased by 0.26 of
        the gradient with 2 loss tokens in a batch, by 0.005 with 128."""

        value_clip: Annotated[float, Field(gt=0)] | None = None
        """Largest distance of a value from the old one at which the loss still pushes it; none: no
        limit.
        """

    config: Config

    def estimate(self, batch: TrainBatch, values_N: FloatArray, ends_M: FloatArray) -> Estimate:
        """See `ActorCritic`."""
        lengths_J = batch.tokens_of_trajectories
        turn_ends_N = np.append(batch.turns_N[1:] != batch.turns_N[:-1], True)
        turn_ends_N[np.cumsum(lengths_J)[lengths_J > 0] - 1] = True
        discounts_N = floats(np.where(turn_ends_N, self.config.gamma, 1.0))
        steps = Steps(
            batch.rewards_N, values_N, discounts_N, lengths_J, after_trajectories(ends_M, batch)
        )
        advantages_N, returns_N = self._generalize_advantages(steps)
        return Estimate(
            self._whiten_advantages(advantages_N, steps), returns_N, floats(np.ones(len(values_N)))
        )

    def value_loss(self, values_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """See `agentrl.algorithms.losses.value_loss`."""
        from agentrl.algorithms.losses import value_loss

        return value_loss(values_N, tokens, self.config.value_clip)

    def _generalize_advantages(self, steps: Steps) -> tuple[FloatArray, FloatArray]:
        """The advantages of steps, and the returns that the critic learns."""
        own, lengths_J = self.config, steps.lengths_J
        lam_J = np.full(len(lengths_J), own.lam)
        if own.lam_length is not None:
            lam_J = np.maximum(0.0, 1 - 1 / (own.lam_length * np.maximum(lengths_J, 1)))
        learned_K = generalized(steps, floats(np.full(len(lengths_J), own.critic_lam)))
        return generalized(steps, floats(lam_J)), floats(learned_K + steps.values_K)

    def _whiten_advantages(self, advantages_N: FloatArray, steps: Steps) -> FloatArray:
        if not self.config.whiten:
            return advantages_N
        scale = max(float(np.abs(steps.rewards_K).max()), float(np.abs(steps.values_K).max()))
        return whitened(advantages_N, scale)


class TurnPpo(Ppo):
    """PPO whose steps are turns: the critic is asked, and learns, only where a turn begins.

    All tokens of a turn have its advantage. Lambda then spans turns and not tokens, of which a turn
    may have many: "Turn-PPO" (arXiv:2512.17008); turn-level critics go back to ArCHer
    (arXiv:2402.19446).
    """

    class Config(Ppo.Config):
        """As `ppo`, by turns."""

        lam: Annotated[float, Field(ge=0, le=1)] = 0.95
        """Lambda: 1 uses the reward itself, which the critic cannot bias; 0 the critic's value one
        turn later.
        """

    def estimate(self, batch: TrainBatch, values_N: FloatArray, ends_M: FloatArray) -> Estimate:
        """See `ActorCritic`."""
        turns = turns_of(batch)
        discounts_K = floats(np.full(len(turns.rewards_K), self.config.gamma))
        ends_J = after_trajectories(ends_M, batch)
        steps = Steps(
            turns.rewards_K, values_N[turns.begins_N], discounts_K, turns.lengths_J, ends_J
        )
        advantages_K, returns_K = self._generalize_advantages(steps)
        # The critic's loss is divided by all loss tokens; its weights make up for the tokens that
        # do not count.
        weights_N = turns.begins_N * (len(turns.begins_N) / turns.begins_N.sum())
        advantages_N = self._whiten_advantages(advantages_K[turns.turns_N], steps)
        return Estimate(advantages_N, returns_K[turns.turns_N], floats(weights_N))
