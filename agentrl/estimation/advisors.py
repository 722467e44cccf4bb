"""The models that an algorithm may need beside the trained one: a reference, and a critic that is
trained with it.

    batch ──▶ reference: logprobs ──▶ critic: values ──▶ advantages, returns
                                                              │
                             the trainer's batch ◀── critic: step

Each is a trainer with its own model, configured by the section `reference` or `critic`. The
reference is never trained, and may be served by an engine instead
(`agentrl/estimation/teacher.py`). Every checkpoint holds the critic in the folder `critic`, and the
episodes that it may learn from again in the folder `replay`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl.batch import TrainBatch
from agentrl.estimation.episode_buffer import EpisodeBuffer
from agentrl.estimation.teacher import Teacher
from agentrl.estimation.value_points import questions
from agentrl.protocols import (
    ActorCritic,
    Algorithm,
    AlgorithmOffers,
    Estimate,
    Trainer,
)
from agentrl.tokens.arrays import ROUNDING_OF_SINGLES, FloatArray, constant
from agentrl.trajectory import Group

CRITIC_FOLDER = "critic"
"""The critic's folder in a checkpoint."""


@dataclass(frozen=True, slots=True)
class CriticTraining:
    """The training of a critic beside the policy: `updates` times in each step, each time with new
    targets.

    With a `buffer`, it learns from episodes of earlier steps too. In the first `warmup` steps it
    learns alone: the policy's batches have the weight 0.
    """

    updates: int = 1
    warmup: int = 0
    buffer: EpisodeBuffer | None = None


ON_NEWEST = CriticTraining()
"""Once in each step, on the step's own batch."""


@dataclass(frozen=True, slots=True)
class Advisors:
    """The models that see a batch before it is trained on: the reference and the critic of a run,
    where it has them.
    """

    algorithm: Algorithm
    reference: Trainer | None = None
    critic: Trainer | None = None
    training: CriticTraining = ON_NEWEST
    teacher: Teacher | None = None

    @property
    def all(self) -> list[Trainer]:
        """The reference and the critic, where the run has them."""
        return [advisor for advisor in (self.reference, self.critic) if advisor is not None]

    async def ask_teacher(self, batch: TrainBatch) -> TrainBatch:
        """Add the teacher's logprobs to a batch, if there is a teacher. Its engine must be awake.

        Samples that the teacher's engines died of carry no loss.
        """
        if self.teacher is None:
            return batch
        logprobs_N = await self.teacher.logprobs(batch)
        known_N = ~np.isnan(logprobs_N)
        taught = replace(batch, reference_logprobs_N=np.nan_to_num(logprobs_N))
        if known_N.all():
            return taught
        # The known tokens among the loss tokens, as a mask over all tokens.
        known_S = batch.loss_mask_S.copy()
        known_S[known_S] = known_N
        return taught.with_loss_on(known_S)

    async def advise(
        self, batch: TrainBatch, step: int = 0, groups: Sequence[Group] = ()
    ) -> tuple[TrainBatch, Mapping[str, float]]:
        """Add the reference's logprobs and the critic's advantages to a batch of `groups`, and
        train the critic on it.

        Returns the new batch and the metrics of the critic's first update. Among these,
        `critic/explained_variance` is 1 if the values equal the returns, and 0 if every value is
        the mean return.
        """
        if self.reference is not None:
            batch = replace(
                batch, reference_logprobs_N=await self.reference.predict(batch.uncredited())
            )
        prepare = AlgorithmOffers.of(self.algorithm).prepared
        if prepare is not None:
            batch = prepare(batch)
        if self.critic is None or not isinstance(self.algorithm, ActorCritic):
            return batch, {}
        advantages_N, metrics = await self._update(self.critic, self.algorithm, batch, step, 0)
        for update in range(1, self.training.updates):
            await self._update(self.critic, self.algorithm, batch, step, update)
        if self.training.buffer is not None:
            task_ids = [part.task.id for group in groups for part in group.by_agent()]
            self.training.buffer.keep(step, batch, task_ids)
        advised = replace(batch, advantages_N=advantages_N)
        if step < self.training.warmup:
            advised = replace(advised, weights_N=np.zeros_like(batch.weights_N))
        return advised, metrics

    async def _update(
        self,
        critic: Trainer,
        algorithm: ActorCritic,
        batch: TrainBatch,
        step: int,
        update: int,
    ) -> tuple[FloatArray, Mapping[str, float]]:
        """Ask the critic about a batch and train it. Returns the batch's advantages by its answers,
        and its metrics.
        """
        buffer = self.training.buffer
        seen = (
            batch
            if buffer is None
            else await asyncio.to_thread(buffer.with_earlier, step, batch, update)
        )
        # The critic is asked at more points than it learns from: `Questions`.
        asked = await asyncio.to_thread(
            questions,
            seen,
            answers=AlgorithmOffers.of(algorithm).values_answers,
            ends=algorithm.bootstraps,
        )
        answered, values_N, ends_M = asked.answered(await critic.predict(asked.asked))
        estimate = algorithm.estimate(answered, values_N, ends_M)
        critic_batch = _critic_batch(answered, values_N, estimate)
        if buffer is not None:
            critic_batch = await asyncio.to_thread(buffer.mix_in, step, critic_batch, update)
        metrics = await critic.step(
            critic_batch, algorithm.value_loss, float(answered.num_loss_tokens)
        )
        reported = {
            f"critic/{name}": value
            for name, value in metrics.items()
            if not name.startswith("logprob_gap")
        }
        taught_N = estimate.weights_N != 0
        reported["critic/explained_variance"] = explained_variance(
            values_N[taught_N], estimate.returns_N[taught_N]
        )
        if buffer is not None:
            reported["critic/earlier_episodes"] = float(
                seen.trajectories_M.max() - batch.trajectories_M.max()
            )
        return estimate.advantages_N[asked.own_N][: batch.num_loss_tokens], reported

    async def save(self, folder: Path) -> None:
        """Save the critic into a checkpoint, and its buffer of episodes."""
        await self.begin_save(folder)
        await self.saved()

    async def begin_save(self, folder: Path) -> None:
        """Begin to save the critic into a checkpoint, and save its buffer of episodes."""
        if self.critic is not None:
            await self.critic.begin_save(folder / CRITIC_FOLDER)
        if self.training.buffer is not None:
            await asyncio.to_thread(self.training.buffer.save, folder)

    async def saved(self) -> None:
        """Wait until what `begin_save` began is written."""
        if self.critic is not None:
            await self.critic.saved()

    async def load(self, folder: Path) -> None:
        """Load the critic from a checkpoint, and its buffer of episodes."""
        if self.critic is not None:
            await self.critic.load(folder / CRITIC_FOLDER)
        if self.training.buffer is not None:
            await asyncio.to_thread(self.training.buffer.load, folder)


def _critic_batch(batch: TrainBatch, values_N: FloatArray, estimate: Estimate) -> TrainBatch:
    """The batch that a critic is trained on: of the tokens before which it learns the return."""
    # A critic is a trainer like another, so its numbers are in the columns of a policy's: the
    # targets are the advantages, and the values before the update the old logprobs.
    critic_batch = replace(
        batch,
        advantages_N=estimate.returns_N,
        rollout_logprobs_N=values_N,
        weights_N=estimate.weights_N,
    )
    if estimate.weights_N.all():
        return critic_batch
    taught_S = batch.loss_mask_S.copy()
    taught_S[taught_S] = estimate.weights_N != 0
    return critic_batch.with_loss_on(taught_S)


def explained_variance(values_N: FloatArray, returns_N: FloatArray) -> float:
    """1 - Var(return - value) / Var(return); 0 if all returns are equal, but for rounding."""
    found_N = returns_N.astype(np.float64)
    extremes = (float(found_N.min()), float(found_N.max())) if len(found_N) else ()
    if constant(extremes, rounding=ROUNDING_OF_SINGLES):
        return 0.0
    return 1 - float((found_N - values_N).var()) / float(found_N.var())
