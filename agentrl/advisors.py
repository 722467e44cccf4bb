"""The models that an algorithm may need beside the trained one: a reference, and a critic that is trained with it.

    batch ──▶ reference: logprobs ──▶ critic: values ──▶ advantages, returns ──▶ critic: step ──▶ the trainer's batch

Each is a trainer with its own model, configured by the section `reference` or `critic`. The reference is never
trained. Every checkpoint holds the critic in the folder `critic`.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.protocols import ActorCritic, Algorithm, Estimate, PreparesBatch, SupportsPredict
from agentrl.questions import questions

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
        answers = getattr(self.algorithm, "values_answers", False)
        asked = await asyncio.to_thread(questions, batch, answers=answers, ends=self.algorithm.bootstraps)
        answered, values_N, ends_M = asked.answered(await self.critic.predict(asked.asked))
        estimate = self.algorithm.estimate(answered, values_N, ends_M)
        lesson = _lesson(answered, values_N, estimate)
        metrics = await self.critic.step(lesson, self.algorithm.value_loss, float(answered.num_loss_tokens))
        reported = {f"critic/{name}": value for name, value in metrics.items() if not name.startswith("logprob_gap")}
        taught_N = estimate.weights_N != 0
        reported["critic/explained_variance"] = explained_variance(values_N[taught_N], estimate.returns_N[taught_N])
        return replace(batch, advantages_N=estimate.advantages_N[asked.own_N]), reported

    async def save(self, folder: Path) -> None:
        """Save the critic into a checkpoint."""
        if self.critic is not None:
            await self.critic.save(folder / CRITIC_FOLDER)

    async def load(self, folder: Path) -> None:
        """Load the critic from a checkpoint."""
        if self.critic is not None:
            await self.critic.load(folder / CRITIC_FOLDER)


def _lesson(batch: TrainBatch, values_N: FloatArray, estimate: Estimate) -> TrainBatch:
    """What a critic is trained on: the tokens before which it learns what to expect."""
    lesson = replace(batch, advantages_N=estimate.returns_N, rollout_logprobs_N=values_N, weights_N=estimate.weights_N)
    if estimate.weights_N.all():
        return lesson
    taught_S = batch.loss_mask_S.copy()
    taught_S[taught_S] = estimate.weights_N != 0
    return lesson.with_loss_on(taught_S)


def explained_variance(values_N: FloatArray, returns_N: FloatArray) -> float:
    """1 - Var(return - value) / Var(return); 0 if all returns are equal."""
    spread = float(returns_N.astype(np.float64).var())
    return 1 - float((returns_N.astype(np.float64) - values_N).var()) / spread if spread else 0.0
