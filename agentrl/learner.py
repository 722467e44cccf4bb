"""What learns from a batch: the trainer, and beside it what its algorithm asks for, a reference and a critic.

    batch ──▶ reference: logprobs ──▶ critic: values ──▶ advantages, returns ──▶ critic: step ──▶ trainer: step

Both are groups of workers, made as the trainer is (settings: the sections `reference` and `critic`). The
reference is never trained. The critic is saved in the folder `critic` of every checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.cluster.recovery import RecoveringTrainer
from agentrl.protocols import ActorCritic, Algorithm

CRITIC_FOLDER = "critic"
"""The critic's folder in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Learner:
    """The trainer and who helps it; with neither reference nor critic it is the trainer alone."""

    algorithm: Algorithm
    trainer: RecoveringTrainer
    reference: RecoveringTrainer | None = None
    critic: RecoveringTrainer | None = None

    @property
    def all(self) -> list[RecoveringTrainer]:
        """The trainer first, then its helpers."""
        return [role for role in (self.trainer, self.reference, self.critic) if role is not None]

    async def step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Train on a batch. The critic's metrics have the prefix `critic/`; see `Trainer.step` for the others.

        `critic/explained_variance`: 1 for values that are the returns, 0 for values that are all their mean.
        """
        if self.reference is not None:
            batch = replace(batch, reference_logprobs_BT=await self.reference.predict(batch))
        critic_metrics: dict[str, float] = {}
        if self.critic is not None and isinstance(self.algorithm, ActorCritic):
            batch, critic_metrics = await self._criticise(batch, self.algorithm, self.critic)
        metrics = await self.trainer.step(batch, self.algorithm.loss, self.algorithm.normalizer(batch))
        return {**metrics, **critic_metrics}

    async def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        await self.trainer.save(folder)
        if self.critic is not None:
            await self.critic.save(folder / CRITIC_FOLDER)

    async def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        await self.trainer.load(folder)
        if self.critic is not None:
            await self.critic.load(folder / CRITIC_FOLDER)

    async def _criticise(
        self, batch: TrainBatch, algorithm: ActorCritic, critic: RecoveringTrainer
    ) -> tuple[TrainBatch, dict[str, float]]:
        """The batch with the advantages that the critic's values mean, and what the critic has learned of it."""
        values_BT = await critic.predict(batch)
        estimate = algorithm.estimate(batch, values_BT)
        lesson = replace(batch, advantages_BT=estimate.returns_BT, rollout_logprobs_BT=values_BT)
        metrics = await critic.step(lesson, algorithm.value_loss, float(batch.num_loss_tokens))
        reported = {f"critic/{name}": value for name, value in metrics.items() if not name.startswith("logprob_gap")}
        reported["critic/explained_variance"] = explained_variance(values_BT, estimate.returns_BT, batch)
        return replace(batch, advantages_BT=estimate.advantages_BT), reported


def explained_variance(values_BT: FloatArray, returns_BT: FloatArray, batch: TrainBatch) -> float:
    """1 - Var(return - value) / Var(return) over the loss tokens; 0 where all returns are the same."""
    loss_BT = batch.loss_mask_BT == 1
    returns_N = returns_BT[loss_BT].astype(np.float64)
    spread = float(returns_N.var())
    return 1 - float((returns_N - values_BT[loss_BT]).var()) / spread if spread else 0.0
