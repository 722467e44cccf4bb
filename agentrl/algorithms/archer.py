"""ArCHer: a critic of turns that learns by temporal differences, and a policy that learns token by
token.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from agentrl.algorithms.advantages import Steps, generalized
from agentrl.algorithms.critic_based import CriticBased
from agentrl.algorithms.turns import after_trajectories, turns_of
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import AlgorithmOffers, Estimate, LossOutput, LossTokens
from agentrl.tokens.arrays import FloatArray, floats

if TYPE_CHECKING:
    from torch import Tensor


class Archer(CriticBased):
    """ArCHer (arXiv:2402.19446): all tokens of a turn have the advantage Q(s, a) - V(s), equation
    3.

    One critic says both: V before the turn's first token, and Q after its last one, before the
    environment replies. It learns Q(s, a) <- r + gamma V(s'), equation 1, and V(s) <- Q(s, a) for
    the answers of the policy, equation 2. The first holds for any policy that answered, so episodes
    of earlier steps can teach it (`recipe: archer`). For the second the paper samples more answers;
    here they are those of the newest episodes.
    """

    class Config(CriticBased.Config):
        """The credit of turns, and the loss."""

        gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
        """Discount from one turn to the next. Below 1 it also bounds how far the critic's errors
        spread.
        """

        truncated: Literal["bootstrap", "terminal"] = "bootstrap"
        """The expected return after the end of a truncated episode: the critic's value there, or
        nothing. If nothing would have come next, as where a context policy replaced the
        conversation, `bootstrap` leaves the answer out of the critic's lesson."""

        kl_reward: Literal[0] = 0
        """Always 0: a cost that depends on the policy cannot be replayed. `kl` is a term of the
        loss.
        """

    config: Config

    @property
    def offers(self) -> AlgorithmOffers:
        """See `PolicyAlgorithm`."""
        return replace(super().offers, values_answers=True)

    def estimate(self, batch: TrainBatch, values_N: FloatArray, ends_M: FloatArray) -> Estimate:
        """See `ActorCritic`. Each turn of the batch ends with the token before which the critic
        values its answer.
        """
        turns = turns_of(batch)
        values_K, answers_K = values_N[turns.begins_N], values_N[turns.ends_N]
        discounts_K = floats(np.full(len(values_K), self.config.gamma))
        ends_J = after_trajectories(ends_M, batch)
        steps = Steps(turns.rewards_K, values_K, discounts_K, turns.lengths_J, ends_J)
        returns_N, weights_N = np.zeros_like(values_N), np.zeros_like(values_N)
        returns_N[turns.begins_N] = answers_K
        # r + gamma V(s'): with lambda 0, the advantage is r + gamma V(s') - V(s).
        returns_N[turns.ends_N] = values_K + generalized(steps, floats(np.zeros(len(ends_J))))
        weights_N[turns.begins_N] = batch.weights_N[turns.begins_N] > 0  # 0: an earlier policy's
        weights_N[turns.ends_N] = 1.0
        if self.bootstraps:
            # Nothing tells what would have come after these truncated trajectories, so the answer
            # before the end has no target. A sample without an answer has none to leave out.
            unknown_M = batch.truncated_M & (batch.tails_M.lengths == 0) & (batch.loss_tokens_M > 0)
            weights_N[np.cumsum(batch.loss_tokens_M)[unknown_M] - 1] = 0.0
        # The critic's loss is divided by all loss tokens; its weights make up for those that it
        # does not learn from.
        weights_N *= len(weights_N) / weights_N.sum()
        return Estimate(
            floats((answers_K - values_K)[turns.turns_N]), floats(returns_N), floats(weights_N)
        )

    def value_loss(self, values_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """See `agentrl.algorithms.losses.value_loss`."""
        from agentrl.algorithms.losses import value_loss

        return value_loss(values_N, tokens, None)
