"""A trial of a config's own parts: they play, the trainer agrees with the engine, one step changes
the weights, and the engine serves the new ones.

Nothing of the trial is kept: its folder is a temporary one, and its step is far larger than those
of the run, so that weights which did not arrive are told from those that did.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms.grpo import Grpo
from agentrl.assembly.training import TrainingAssembly, assemble_training
from agentrl.batch import TrainBatch, collate, to_samples
from agentrl.config.run_config import RunConfig, brings_algorithm
from agentrl.doctor.diagnosis import Diagnosis
from agentrl.flow import now
from agentrl.protocols.component_settings import EngineSettingsOffers, TrainerSettingsOffers
from agentrl.recipes.evaluate import play_members
from agentrl.recipes.starting_model import base_model
from agentrl.rollout.member import Member, MemberResult
from agentrl.runs.run import Run
from agentrl.runs.task_sources import held_out_tasks
from agentrl.trajectory import Failed, Trajectory

_EPISODES = 4
_TOLERANCES = {"float32": 5e-3, "bfloat16": 0.05}
"""Nats of the mean gap between engine and trainer that precision may explain."""
_ARRIVED = 0.5
"""If the engine serves the old weights, the gap after the step is what the step changed; else it is
what it was before. This part of the change lies between."""
_LEAST_CHANGE = 4.0
"""A step that changes logprobs by fewer times the gap before it tells nothing."""


async def trial_diagnoses(run: Run) -> AsyncGenerator[Diagnosis, None]:
    """Try the parts of a run that has not begun.

    Raises:
        AgentRLError: a part does not start, or ends.
    """
    config = run.config
    if brings_algorithm(config.recipe):
        words = f"recipe={config.recipe.name} samples nothing while it trains"
        yield Diagnosis("trial", words, skipped=True)
        return
    began = now()
    model = await base_model(run)
    async with assemble_training(config, config.algorithm.make(), model) as parts:
        words = f"{config.engine.name} and {config.trainer.name} started in {now() - began:.1f} s"
        yield Diagnosis("engine, trainer", words)
        trial = _Trial(parts)
        played = await trial.play()
        yield _environment(config, played)
        yield _reward(played)
        trajectories = [one for result in played for one in result.trajectories if one.turns]
        if not any(one.num_tokens for one in trajectories):
            yield Diagnosis("logprobs", "no episode has a sampled token", skipped=True)
            return
        async with aclosing(trial.agreement(trajectories)) as diagnoses:
            async for one in diagnoses:
                yield one


@dataclass(frozen=True, slots=True)
class _Trial:
    parts: TrainingAssembly

    async def play(self) -> list[MemberResult]:
        """Some episodes, sampled as in training."""
        config = self.parts.config
        member = Member(self.parts.runner, self.parts.reward)
        return await play_members(member, held_out_tasks(config, _EPISODES), config)

    async def agreement(self, before: Sequence[Trajectory]) -> AsyncGenerator[Diagnosis, None]:
        """Compare engine and trainer on the same tokens, before and after a step."""
        trainer, dtype = self.parts.trainer, self._dtype()
        batch = _batch_of(before)
        old_N = await trainer.predict(batch)
        gap = _gap(old_N, batch.rollout_logprobs_N)
        yield _logprobs(gap, _TOLERANCES[dtype], batch)
        began = now()
        await trainer.step(batch, Grpo(Grpo.Config()).loss, float(batch.num_loss_tokens))
        step_seconds, began = now() - began, now()
        async with self.parts.sharing.updating():
            await self.parts.weights.publish(trainer, version=1)
        sent_seconds = now() - began
        # The change of the step, in logprobs of tokens that were sampled before it.
        change = _gap(await trainer.predict(batch), old_N)
        after = [one for result in await self.play() for one in result.trajectories if one.turns]
        words = f"{batch.num_samples} samples in {step_seconds:.1f} s"
        yield Diagnosis("training step", words)
        yield await self._arrival(after, gap, change, sent_seconds)

    async def _arrival(
        self, after: Sequence[Trajectory], gap: float, change: float, seconds: float
    ) -> Diagnosis:
        versions = {
            int(version)
            for one in after
            for turn in one.turns
            for version in turn.completion.policy_versions
        }
        if not versions:
            return Diagnosis("weights", "no token was sampled after the update", skipped=True)
        if change < _LEAST_CHANGE * gap:
            words = f"a step changed logprobs by {change:.2g} nats only, which tells nothing"
            return Diagnosis("weights", words, skipped=True)
        batch = _batch_of(after)
        left = _gap(await self.parts.trainer.predict(batch), batch.rollout_logprobs_N)
        words = (
            f"served in {seconds:.1f} s; a step changed logprobs by {change:.2g} nats, and engine"
            f" and trainer differ by {left:.2g} after it"
        )
        if versions != {1}:
            words = f"after the update, tokens have the versions {sorted(versions)}, not 1"
        remedy = (
            "the engine did not get the new weights: try weights.transport=disk, and report this"
            " with the versions above"
        )
        arrived = versions == {1} and left < max(_ARRIVED * change, 2 * gap)
        return Diagnosis("weights", words, "" if arrived else remedy)

    def _dtype(self) -> str:
        config = self.parts.config
        written = {
            EngineSettingsOffers.of(config.engine.settings).dtype,
            TrainerSettingsOffers.of(config.trainer.settings).dtype,
        }
        import torch

        if "bfloat16" in written:
            return "bfloat16"
        return "float32" if "float32" in written or not torch.cuda.is_available() else "bfloat16"


def _batch_of(trajectories: Sequence[Trajectory]) -> TrainBatch:
    return collate(
        sample for one in trajectories if one.num_tokens for sample in to_samples(one, 1.0)
    )


def _gap(one_N: np.ndarray, other_N: np.ndarray) -> float:
    return float(np.abs(one_N - other_N).mean())


def _logprobs(gap: float, tolerance: float, batch: TrainBatch) -> Diagnosis:
    words = (
        f"engine and trainer differ by {gap:.2g} nats, the mean of {batch.num_loss_tokens} tokens"
    )
    remedy = (
        "compare versions and precisions: engine.dtype=float32 trainer.dtype=float32 must agree;"
        " then `agentrl check-model`, and docs/model-families.md"
    )
    return Diagnosis("logprobs", words, remedy if gap > tolerance else "")


def _environment(config: RunConfig, played: Sequence[MemberResult]) -> Diagnosis:
    """Report failures of the episodes, and the speed of the environment."""
    names = ", ".join(config.envs)
    failures = [str(one.failure) for one in played if isinstance(one.failure, Failed)]
    turns = [turn for result in played for one in result.trajectories for turn in one.turns]
    seconds = [turn.env_seconds for turn in turns]
    words = f"{names}: {len(played)} episodes of {len(turns) / max(1, len(played)):.1f} turns"
    if seconds:
        words += (
            f", {1e3 * float(np.mean(seconds)):.1f} ms a turn, at most {1e3 * max(seconds):.0f}"
        )
    if failures:
        words = f"{names}: {len(failures)} of {len(played)} episodes failed: {failures[0]}"
        remedy = "`agentrl check-env` and `agentrl play` show it alone; docs/environments.md"
        return Diagnosis("environment", words, remedy)
    return Diagnosis("environment", words)


def _reward(played: Sequence[MemberResult]) -> Diagnosis:
    scores = [score for result in played for _, score in result.scored]
    if not scores:
        return Diagnosis("scores", "no episode was scored", skipped=True)
    values = [score.value for score in scores]
    return Diagnosis("scores", f"{min(values):g} to {max(values):g} for {len(values)} episodes")
