"""What an algorithm may ask for beside the trainer: a reference, and a critic that learns with it.

    batch ──▶ reference: logprobs ──▶ critic: values ──▶ advantages, returns ──▶ critic: step ──▶ the trainer's batch

Both are trainers of a model of their own (settings: the sections `reference` and `critic`). The reference is never
trained. The critic is saved in the folder `critic` of every checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.protocols import ActorCritic, Algorithm, SupportsPredict

CRITIC_FOLDER = "critic"
"""The critic's folder in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Advisors:
    """The reference and the critic of a run that has one of them or both."""

    algorithm: Algorithm
    reference: SupportsPredict | None = None
    critic: SupportsPredict | None = None

    @property
    def all(self) -> list[SupportsPredict]:
        """Those that are there."""
        return [advisor for advisor in (self.reference, self.critic) if advisor is not None]

    async def advise(self, batch: TrainBatch) -> tuple[TrainBatch, Mapping[str, float]]:
        """The batch with the reference's logprobs and the advantages that the critic's values mean; the critic learns
        of it. Beside the batch the critic's metrics, with `critic/explained_variance`: 1 for values that are the
        returns, 0 for values that are all their mean.
        """
        if self.reference is not None:
            batch = replace(batch, reference_logprobs_N=await self.reference.predict(batch))
        if self.critic is None or not isinstance(self.algorithm, ActorCritic):
            return batch, {}
        values_N = await self.critic.predict(batch)
        estimate = self.algorithm.estimate(batch, values_N)
        lesson = replace(batch, advantages_N=estimate.returns_N, rollout_logprobs_N=values_N)
        metrics = await self.critic.step(lesson, self.algorithm.value_loss, float(batch.num_loss_tokens))
        reported = {f"critic/{name}": value for name, value in metrics.items() if not name.startswith("logprob_gap")}
        reported["critic/explained_variance"] = explained_variance(values_N, estimate.returns_N)
        return replace(batch, advantages_N=estimate.advantages_N), reported

    async def save(self, folder: Path) -> None:
        """Write what they have learned into a checkpoint."""
        if self.critic is not None:
            await self.critic.save(folder / CRITIC_FOLDER)

    async def load(self, folder: Path) -> None:
        """Take it up from there."""
        if self.critic is not None:
            await self.critic.load(folder / CRITIC_FOLDER)


def explained_variance(values_N: FloatArray, returns_N: FloatArray) -> float:
    """1 - Var(return - value) / Var(return); 0 where all returns are the same."""
    spread = float(returns_N.astype(np.float64).var())
    return 1 - float((returns_N.astype(np.float64) - values_N).var()) / spread if spread else 0.0
