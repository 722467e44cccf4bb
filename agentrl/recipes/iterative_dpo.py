"""Online iterative DPO: play, rank, learn from the pairs, and play again (RLHF Workflow,
arXiv:2405.07863).

    Rollouts ─▶ groups ─▶ pairs ─▶ reference's logprobs, once ─▶ epochs of updates ─▶ new weights
       ▲                                                                  │               │
       │                 iterations/iteration_000001: model, pairs.jsonl, lineage.json    │
       └──────────────────────────────────────────────────────────────────────────────────┘

A step of the run is an iteration: `steps` of them, each of `rollout.groups_per_step` groups and
many updates. Each ends with a checkpoint, so a run that is killed repeats the iteration it was in,
and none before. Its folder is a copy of the checkpoint without the optimizer.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.dpo import (
    Labels,
    OnlineDpo,
    Pairing,
    RankedPair,
    batch_of_pairs,
    ranked_pairs,
)
from agentrl.algorithms.policy_loss import scored
from agentrl.assembly.training import TrainingAssembly, assemble_training
from agentrl.batch import collate, to_samples
from agentrl.config.compatibility import check_stage
from agentrl.config.run_config import RunConfig
from agentrl.flow import loop_metrics
from agentrl.observe.step_report import StepReport
from agentrl.observe.stopwatch import Stopwatch
from agentrl.protocols import RecipeOffers, Savable
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.dpo import update
from agentrl.recipes.evaluations import evaluations
from agentrl.recipes.iterations import Iterations
from agentrl.recipes.lineage import LINEAGE, PAIRS, Lineage, weights_sha256
from agentrl.recipes.preferences import Preference, in_batches, write_preferences
from agentrl.recipes.starting_model import starting_model
from agentrl.rollout.seeds import derive_seed
from agentrl.runs.run import Run
from agentrl.settings.base import Settings
from agentrl.trajectory import Group, Trajectory


class IterativeDpoSettings(Settings):
    """Settings of `recipe: iterative_dpo`. `steps` is the number of iterations. The section
    `algorithm` is not used.
    """

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength with which the policy is held to the reference: the smaller, the further it may
    move."""
    labels: Labels = "hard"
    """`hard`: the better episode of a pair is the chosen one. `soft`: it is with the probability
    sigmoid(difference of the rewards), as the model of Bradley and Terry says; for a reward on that
    scale, as `reward_model` is."""
    pairs: Pairing = "best_worst"
    """The pairs of a group: its best episode and its worst, or all whose rewards differ."""
    reference: Literal["last", "first"] = "last"
    """The model that the policy is held to: the one with which the iteration began, so that the
    policy moves on with every iteration; or the one with which the run began, which the section
    `reference` configures."""
    epochs: int = Field(1, gt=0)
    """Passes over the pairs of an iteration."""
    pairs_per_step: int = Field(32, gt=0)
    """Pairs in one update."""
    demonstrations: DemonstrationsConfig | None = None
    """The episodes that the model imitates first."""

    @property
    def algorithm(self) -> OnlineDpo:
        """The algorithm of the recipe."""
        return OnlineDpo(OnlineDpo.Config(beta=self.beta, labels=self.labels))

    @property
    def offers(self) -> RecipeOffers:
        """The recipe has its own algorithm, and a reference if that is the first model."""
        return RecipeOffers(
            own_algorithm=True, learns_by=self.algorithm, uses_reference=self.reference == "first"
        )

    def most_updates(self, config: RunConfig) -> int:
        """The updates of a run of which every group gives all its pairs."""
        size = config.rollout.group_size
        pairs = config.rollout.groups_per_step * (
            size * (size - 1) // 2 if self.pairs == "all" else 1
        )
        return config.steps * self.epochs * -(-pairs // self.pairs_per_step)


async def iterative_dpo(run: Run, settings: IterativeDpoSettings) -> None:
    """The recipe: `run.config.steps` iterations, evaluating on held-out tasks before and after."""
    config = run.config
    check_stage(config, "training")
    first = await starting_model(run, settings.demonstrations)
    algorithm = settings.algorithm
    iterations = await asyncio.to_thread(
        Iterations, run, first, by_first=settings.reference == "first"
    )
    most = settings.most_updates(config)
    async with assemble_training(
        config, algorithm, first, iterations.latest_by_updates, updates=most
    ) as parts:
        start = await parts.resume(run)
        await asyncio.to_thread(iterations.continue_after, start)
        async with parts.changing_engines(run), evaluations(run, parts, start) as evaluating:
            await evaluating.evaluate(start, due=start > 0)  # the others were at the beginning
            run.metrics.rewind(start)
            processing = parts.state.add(
                "batch_processing", BatchProcessing(config.batch_processing, algorithm)
            )
            scheduler = parts.rollouts(run, start, processing.teaches)
            async with scheduler as rollouts, run.recorder.keeping_episodes(rollouts.take_all):
                for iteration in range(start, config.steps):
                    clock = Stopwatch(partial(run.status.begin_phase, iteration))
                    with clock("rollout"):
                        groups = await rollouts.next_batch()
                    with clock("train"):
                        ranking = await asyncio.to_thread(rank, groups, settings, processing)
                        run.ledger.masked(iteration, unpaired(groups, ranking, settings))
                    async with parts.sharing.training():
                        with clock("train"):
                            learned = await _learn(parts, algorithm, ranking, settings, iteration)
                            for _ in range(1, settings.epochs):
                                run.ledger.reused(iteration, ranking.tasks)
                        with clock("weights"):
                            await evaluating.before_update()
                            async with (
                                rollouts.new_weights(iteration + 1),
                                parts.sharing.updating(),
                            ):
                                published = await parts.weights.publish(
                                    parts.trainer, version=iteration + 1
                                )
                    report = StepReport(
                        iteration,
                        groups,
                        seconds=clock.seconds,
                        untrained=rollouts.take_untrained(),
                        trainer=learned,
                        weights=published.metrics(),
                        rollouts=rollouts.metrics(),
                        batch_processing=processing.update(groups),
                        event_loop=loop_metrics(),
                    )
                    await run.recorder.record_step(report)
                    tasks, updates = [group.task.id for group in groups], int(learned["updates"])
                    lineage = iterations.lineage(
                        iteration + 1, tasks, pairs=len(ranking.pairs), updates=updates
                    )
                    await run.save_checkpoint(iteration + 1, _Trained(parts, ranking, lineage))
                    await asyncio.to_thread(iterations.add, iteration + 1)
                    await evaluating.evaluate(iteration + 1, due=True)
            await evaluating.evaluate(config.steps)
        await run.finish()


@dataclass(frozen=True, slots=True)
class Ranking:
    """The episodes of an iteration that are in a pair, and their rewards; and the pairs, which know
    them by number.

    `without_pairs`: the share of the groups that gave none (with several agents, of each agent's).
    """

    trajectories: Sequence[Trajectory]
    rewards: Sequence[float]
    pairs: Sequence[RankedPair]
    without_pairs: float

    @property
    def tasks(self) -> Sequence[str]:
        """The ids of the tasks that gave pairs."""
        return list(dict.fromkeys(trajectory.task.id for trajectory in self.trajectories))

    def preferences(self) -> Iterator[tuple[Preference, Mapping[str, float]]]:
        """The pairs as text, with their rewards and labels."""
        for pair in self.pairs:
            better, worse = self.trajectories[pair.better], self.trajectories[pair.worse]
            rewards = {
                "chosen_reward": self.rewards[pair.better],
                "rejected_reward": self.rewards[pair.worse],
            }
            yield (
                Preference(better.task.id, better.messages, worse.messages),
                {**rewards, "label": pair.label},
            )


def rank(
    groups: Sequence[Group], settings: IterativeDpoSettings, processing: BatchProcessing
) -> Ranking:
    """Rank the members of each group, and make its pairs. If several agents are trained, each is
    compared with itself.

    Raises:
        ValueError: a member has no score.
    """
    parts = [of_agent for group in processing.scores(groups) for of_agent in group.by_agent()]
    trajectories, rewards, pairs, without = list[Trajectory](), list[float](), list[RankedPair](), 0
    trained = iter(
        processing.trained([trajectory for part in parts for trajectory in part.trajectories])
    )
    for part, informative in zip(parts, processing.informative(parts), strict=True):
        members = [
            member for member in zip(part.trajectories, scored(part), strict=True) if next(trained)
        ]
        found = (
            ranked_pairs([reward for _, reward in members], settings.pairs, settings.labels)
            if informative
            else []
        )
        # Only members in a pair are kept, so pairs get new numbers: their places among these.
        paired = sorted({half for pair in found for half in (pair.better, pair.worse)})
        numbers = {member: len(trajectories) + place for place, member in enumerate(paired)}
        trajectories += [members[member][0] for member in paired]
        rewards += [members[member][1] for member in paired]
        pairs += [
            replace(pair, better=numbers[pair.better], worse=numbers[pair.worse]) for pair in found
        ]
        without += not found
    return Ranking(trajectories, rewards, pairs, without / len(parts))


def unpaired(
    groups: Sequence[Group], ranking: Ranking, settings: IterativeDpoSettings
) -> dict[str, str]:
    """The reason why each episode that is in no pair carries no loss, by its id."""
    paired = {trajectory.id for trajectory in ranking.trajectories}
    why = f"it is in no pair of its group (recipe.pairs={settings.pairs})"
    return {t.id: why for group in groups for t in group.trajectories if t.id not in paired}


async def _learn(
    parts: TrainingAssembly,
    algorithm: OnlineDpo,
    ranking: Ranking,
    settings: IterativeDpoSettings,
    iteration: int,
) -> Mapping[str, float]:
    """Train on an iteration's pairs. The metrics are means over its updates."""
    counts = {
        "pairs": float(len(ranking.pairs)),
        "groups_without_pairs": ranking.without_pairs,
        "updates": 0.0,
    }
    if not ranking.pairs:
        return counts
    trainer = parts.trainer
    played = await asyncio.to_thread(
        lambda: collate(
            sample for trajectory in ranking.trajectories for sample in to_samples(trajectory, 0.0)
        )
    )
    # Once, before the first update: the reference must not move while the policy learns. Without a
    # separate model, it is the policy as it is now.
    own_N = await trainer.predict(played)
    gap_N = np.abs(own_N - played.rollout_logprobs_N)
    model = parts.advisors.reference
    played = replace(
        played, reference_logprobs_N=own_N if model is None else await model.predict(played)
    )
    rng = Random(derive_seed(parts.config.seed, "pairs", iteration))
    updates = [
        await update(trainer, algorithm, batch_of_pairs(played, pairs))
        for pairs in in_batches(
            ranking.pairs, rng, epochs=settings.epochs, size=settings.pairs_per_step
        )
    ]
    gaps = {"logprob_gap_mean": float(gap_N.mean()), "logprob_gap_max": float(gap_N.max())}
    return {**_mean_over_updates(updates), **gaps, **counts, "updates": float(len(updates))}


def _mean_over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates, but the sum of tokens and seconds, and the largest
    norm of a gradient.
    """
    by_name = {name: [metrics[name] for metrics in updates] for name in updates[0]}
    totals = {
        name for name in by_name if name in ("tokens", "loss_tokens") or name.startswith("seconds_")
    }
    means = {name: (sum if name in totals else fmean)(values) for name, values in by_name.items()}
    return {**means, "grad_norm": max(by_name["grad_norm"])} if "grad_norm" in by_name else means


@dataclass(frozen=True, slots=True)
class _Trained(Savable):
    """The content of an iteration's checkpoint: the trainers' state, the pairs, and the lineage of
    the weights.
    """

    parts: TrainingAssembly
    ranking: Ranking
    lineage: Lineage

    async def save(self, folder: Path) -> None:
        await self.parts.save(folder)
        await asyncio.to_thread(self._describe, folder)

    def _describe(self, folder: Path) -> None:
        write_preferences(folder / PAIRS, self.ranking.preferences())
        lineage = self.lineage.model_copy(update={"sha256": weights_sha256(folder)})
        (folder / LINEAGE).write_text(lineage.model_dump_json(indent=2) + "\n")
