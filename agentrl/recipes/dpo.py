"""Direct preference optimisation on pairs of a file or of a run's episodes.

    preferences ─▶ pairs ─▶ tokens ─▶ the first model's logprobs, once ─┐
                                └───▶ the model's logprobs ─▶ weights of the pairs ─▶ trainer

Nothing is sampled and no engine is started. The reference is the model that training begins with.
Online DPO, on pairs that the policy plays itself, is `algorithm: dpo`. The trained model is saved
in the run's folder `dpo`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from agentrl.algorithms.dpo import OnlineDpo
from agentrl.assembly.devices import open_cluster
from agentrl.assembly.trainers import make_trainer
from agentrl.batch import TrainBatch, TrainingSample, collate, to_samples
from agentrl.config.learning_rates import notes_of_warm_up
from agentrl.config.run_config import PLAYED
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.errors import ConfigError
from agentrl.files.durable import finish_folder, new_unfinished
from agentrl.protocols import RecipeOffers, Trainer
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.preferences import (
    Preference,
    PreferencesConfig,
    in_batches,
    read_preferences,
    split,
)
from agentrl.recipes.recordings import same_tokens
from agentrl.recipes.starting_model import starting_model
from agentrl.recipes.written_conversation import trajectory_from_messages
from agentrl.rollout.seeds import derive_seed
from agentrl.runs.run import Run
from agentrl.settings.base import COLDEST, Settings
from agentrl.tokens.arrays import FloatArray, floats

Pair = tuple[Sequence[TrainingSample], Sequence[TrainingSample]]
"""The samples of the chosen and of the rejected conversation."""


class DpoSettings(Settings):
    """Settings of `recipe: dpo`. Nothing is played, so the sections `algorithm`, `engine`,
    `reward`, `evaluation`, `batch_processing` and `weights` are not used."""

    offers: ClassVar[RecipeOffers] = RecipeOffers(own_algorithm=True, unused=PLAYED)

    preferences: PreferencesConfig
    """The pairs to learn from. `device` and `micro_batch_pairs` are not used: the section `trainer`
    has its own.
    """
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength with which the policy is held to the model that training begins with: the smaller,
    the further it may move.
    """
    temperature: Annotated[float, Field(ge=COLDEST)] = 1.0
    """The temperature that divides logits, of the model and of the one that training begins with,
    whatever `rollout.sampling.temperature` is."""
    demonstrations: DemonstrationsConfig | None = None
    """The episodes that the model imitates first."""


async def dpo(run: Run, settings: DpoSettings) -> None:
    """The recipe. The run's metrics have each step's loss and accuracy, and the accuracy on
    held-out pairs.

    Raises:
        ConfigError: there is nothing to train on.
        TrainingError: the loss is not finite.
    """
    config, final = settings.preferences, run.folder / "dpo"
    if final.exists():
        run.display.say(f"the model is in {final} already")
        return
    rng = Random(derive_seed(run.config.seed, "preferences"))
    preferences = read_preferences(config, rng)
    base = await starting_model(run, settings.demonstrations)
    renderer = await asyncio.to_thread(renderer_of, base, run.config.model)
    training, held_out = (
        _sample_pairs(run, part, renderer, config)
        for part in split(preferences, config.held_out, rng)
    )
    if not training:
        raise ConfigError(
            f"no pair of {config.path} is left to train on: raise max_tokens, or lower held_out"
        )
    mixed = in_batches(training, rng, epochs=config.epochs, size=config.pairs_per_step)
    await _learn(run, settings, base, batches=[_batch(pairs) for pairs in mixed], held_out=held_out)
    run.display.say(f"the model is in {final}")


async def _learn(
    run: Run,
    settings: DpoSettings,
    base: Path,
    *,
    batches: Sequence[TrainBatch],
    held_out: Sequence[Pair],
) -> None:
    algorithm = OnlineDpo(OnlineDpo.Config(beta=settings.beta))
    run.metrics.rewind(0)  # drop the metrics of a stopped run: its training starts over
    into = new_unfinished(run.folder / "dpo")
    measured = [_batch([pair]) for pair in held_out]
    temperature, lr = settings.temperature, settings.preferences.lr
    scheduled = run.config.trainer.settings.model_copy(update={"lr": lr})
    for text in notes_of_warm_up("trainer.warmup_steps", scheduled, len(batches), "recipe=dpo"):
        run.recorder.note(0, text)
    async with (
        open_cluster(run.config, run.folder / "logs") as placed,
        make_trainer(placed, base, steps=len(batches), temperature=temperature, lr=lr) as trainer,
    ):
        # Before the first update, the trainer still holds the reference model.
        references = [await trainer.predict(batch) for batch in batches]
        held_references = [await trainer.predict(batch) for batch in measured]
        for step, (pairs, reference_N) in enumerate(zip(batches, references, strict=True)):
            metrics = await update(
                trainer, algorithm, replace(pairs, reference_logprobs_N=reference_N)
            )
            run.recorder.write(step, metrics)
            if (step + 1) % max(1, len(batches) // 8) == 0:
                run.display.say(
                    f"{step + 1} of {len(batches)} steps: {metrics['accuracy']:.0%} in the right"
                    " order"
                )
        if measured:
            held = [
                margins(
                    replace(
                        pair,
                        rollout_logprobs_N=await trainer.predict(pair),
                        reference_logprobs_N=first,
                    ),
                    1.0,
                )
                for pair, first in zip(measured, held_references, strict=True)
            ]
            accuracy = float(np.mean(np.concatenate(held) > 0))
            run.recorder.write(len(batches), {"eval/preference_accuracy": accuracy})
            run.display.say(
                f"of {len(measured)} held-out pairs, [bold]{accuracy:.1%}[/bold] are in the right"
                " order"
            )
        await trainer.save(into)
    finish_folder(run.folder / "dpo")


async def update(trainer: Trainer, algorithm: OnlineDpo, pairs: TrainBatch) -> Mapping[str, float]:
    """Make an update on pairs with the reference's logprobs. Its metrics include the pairs' own,
    before the update.

    The model's logprobs are computed first, because the weight of each pair depends on them.
    """
    batch = replace(pairs, rollout_logprobs_N=await trainer.predict(pairs))
    metrics = await trainer.step(
        algorithm.prepared(batch), algorithm.loss, algorithm.normalizer(batch)
    )
    margins_P = margins(batch, algorithm.config.beta)
    return {
        **metrics,
        "preference_loss": float(np.mean(np.logaddexp(0, -margins_P.astype(np.float64)))),
        "accuracy": float(np.mean(margins_P > 0)),
        "margin": float(np.mean(margins_P)),
    }


def margins(batch: TrainBatch, beta: float) -> FloatArray:
    """m of each pair, shape P: beta times how much likelier the chosen half became than the
    rejected one, against the reference.

    The samples of a pair have the same group number, and the sign of their advantages tells its
    halves apart.

    Example: with beta 0.1, if the chosen half gained 3 nats and the rejected one lost 2, m is 0.5,
    and the pair's loss is -log sigmoid(0.5).
    """
    # Chosen tokens count with +1 and rejected ones with -1, so one sum by pair is the difference.
    moved_N = (batch.rollout_logprobs_N - batch.reference_logprobs_N) * np.sign(batch.advantages_N)
    groups_N = np.repeat(batch.groups_M, batch.loss_tokens_M)
    return floats(beta * np.bincount(groups_N, weights=moved_N))


def _batch(pairs: Sequence[Pair]) -> TrainBatch:
    numbered = [(number, half) for number, pair in enumerate(pairs) for half in pair]
    return collate(replace(sample, group=number) for number, half in numbered for sample in half)


def _sample_pairs(
    run: Run, pairs: Sequence[Preference], renderer: TemplateRenderer, config: PreferencesConfig
) -> list[Pair]:
    """The samples of the pairs that are short enough: with the tokens that were played, if they
    mean the same to this model, else with the texts rendered anew.
    """
    exact = same_tokens(
        [trajectory for pair in pairs for trajectory in pair.played or ()], renderer
    )
    short: list[Pair] = []
    for pair in pairs:
        played = pair.played if exact else None
        better, worse = played or (
            trajectory_from_messages(pair.chosen, renderer),
            trajectory_from_messages(pair.rejected, renderer),
        )
        halves = to_samples(better, 1.0), to_samples(worse, -1.0)
        lengths = [sum(len(sample.token_ids) for sample in half) for half in halves]
        if max(lengths) <= config.max_tokens:
            short.append(halves)
    if len(short) < len(pairs):
        run.display.say(
            f"{len(pairs) - len(short)} of {len(pairs)} pairs are longer than {config.max_tokens}"
            " tokens: left out"
        )
    return short
