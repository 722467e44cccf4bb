"""The models that an algorithm may need beside the trained one: a reference, and a critic that is trained with it.

    batch ──▶ reference: logprobs ──▶ critic: values ──▶ advantages, returns ──▶ critic: step ──▶ the trainer's batch

Each is a trainer with its own model, configured by the section `reference` or `critic`. The reference is never
trained. Every checkpoint holds the critic in the folder `critic`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.protocols import ActorCritic, Algorithm, PreparesBatch, SupportsPredict

CRITIC_FOLDER = "critic"
"""The critic's folder in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Advisors:
    """What a batch goes through before it is trained on: the reference and the critic of a run, where it has them."""

    algorithm: Algorithm
    reference: SupportsPredict | None = None
    critic: SupportsPredict | None = None

    @property
    def all(self) -> list[SupportsPredict]:
        """The reference and the critic, where the run has them."""
        return [advisor for advisor in (self.reference, self.critic) if advisor is not None]

    async def advise(self, batch: TrainBatch) -> tuple[TrainBatch, Mapping[str, float]]:
        """Add the reference's logprobs and the critic's advantages to a batch, and train the critic on it.

        Returns the new batch and the critic's metrics. Among these, `critic/explained_variance` is 1 if the values
        equal the returns, and 0 if every value is the mean return.
        """
        if self.reference is not None:
            batch = replace(batch, reference_logprobs_N=await self.reference.predict(batch))
        if isinstance(self.algorithm, PreparesBatch):
            batch = self.algorithm.prepared(batch)
        if self.critic is None or not isinstance(self.algorithm, ActorCritic):
            return batch, {}
        values_N, ends_M = await self._values(self.critic, batch, ends=self.algorithm.bootstraps)
        estimate = self.algorithm.estimate(batch, values_N, ends_M)
        lesson = replace(
            batch, advantages_N=estimate.returns_N, rollout_logprobs_N=values_N, weights_N=estimate.weights_N
        )
        metrics = await self.critic.step(lesson, self.algorithm.value_loss, float(batch.num_loss_tokens))
        reported = {f"critic/{name}": value for name, value in metrics.items() if not name.startswith("logprob_gap")}
        reported["critic/explained_variance"] = explained_variance(values_N, estimate.returns_N)
        return replace(batch, advantages_N=estimate.advantages_N), reported

    @staticmethod
    async def _values(critic: SupportsPredict, batch: TrainBatch, *, ends: bool) -> tuple[FloatArray, FloatArray]:
        """The critic's values before the loss tokens, and those after truncated trajectories (0 for other samples)."""
        ends_M = np.zeros(batch.num_samples, np.float32)
        if not ends or not batch.truncated_M.any():
            return await critic.predict(batch), ends_M
        extended, at_end_N = batch.with_ends()
        values_N = await critic.predict(extended)
        ends_M[batch.truncated_M] = values_N[at_end_N]
        return values_N[~at_end_N], ends_M

    async def save(self, folder: Path) -> None:
        """Save the critic into a checkpoint."""
        if self.critic is not None:
            await self.critic.save(folder / CRITIC_FOLDER)

    async def load(self, folder: Path) -> None:
        """Load the critic from a checkpoint."""
        if self.critic is not None:
            await self.critic.load(folder / CRITIC_FOLDER)


def explained_variance(values_N: FloatArray, returns_N: FloatArray) -> float:
    """1 - Var(return - value) / Var(return); 0 if all returns are equal."""
    spread = float(returns_N.astype(np.float64).var())
    return 1 - float((returns_N.astype(np.float64) - values_N).var()) / spread if spread else 0.0
