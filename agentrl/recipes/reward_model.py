"""Train a reward model: a sequence classifier with one output, on pairs of conversations, by
Bradley and Terry.

    preferences ─▶ pairs ─▶ tokens ─▶ model(chosen), model(rejected) ─▶ -log sigmoid(difference)

It starts from the configured causal model (its body and its chat template; the output layer is
new), and is saved in the run's folder `reward_model`, which the reward `reward_model` loads.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, ClassVar

from agentrl.config.run_config import PLAYED
from agentrl.conversation.renderer import renderer_of
from agentrl.errors import ConfigError
from agentrl.files.durable import finish_folder, new_unfinished
from agentrl.protocols import RecipeOffers
from agentrl.recipes.preferences import (
    Preference,
    PreferencesConfig,
    in_batches,
    read_preferences,
    split,
)
from agentrl.recipes.starting_model import base_model
from agentrl.rollout.seeds import derive_seed
from agentrl.runs.run import Run
from agentrl.settings.base import Settings

if TYPE_CHECKING:
    from agentrl.recipes.preference_core import Pair


class RewardModelSettings(Settings):
    """Settings of `recipe: reward_model`. Nothing is played, and it trains by itself: the sections
    `algorithm`, `engine`, `trainer`, `reward`, `evaluation`, `batch_processing`, `weights` and
    `rollout` are not used."""

    offers: ClassVar[RecipeOffers] = RecipeOffers(
        own_algorithm=True, unused=(*PLAYED, "trainer", "rollout")
    )

    preferences: PreferencesConfig
    """The pairs to learn from."""


async def reward_model(run: Run, settings: RewardModelSettings) -> None:
    """The recipe. The run's metrics have each step's loss and accuracy, and the accuracy on
    held-out pairs.

    Raises:
        ConfigError: there is nothing to train on.
        TrainingError: the loss is not finite.
    """
    config = settings.preferences
    final = run.folder / "reward_model"
    if final.exists():
        run.display.say(f"the reward model is in {final} already")
        return
    rng = Random(derive_seed(run.config.seed, "preferences"))
    pairs = read_preferences(config, rng)
    base = await base_model(run)
    training, held_out = [
        await asyncio.to_thread(_tokenize_pairs, run, base, part, config)
        for part in split(pairs, config.held_out, rng)
    ]
    if not training:
        raise ConfigError(
            f"no pair of {config.path} is left to train on: raise max_tokens, or lower held_out"
        )
    batches = list(in_batches(training, rng, epochs=config.epochs, size=config.pairs_per_step))
    await _train(run, config, base, batches=batches, held_out=held_out, into=new_unfinished(final))
    finish_folder(final)
    run.display.say(f"the reward model is in {final}")


async def _train(
    run: Run,
    config: PreferencesConfig,
    base: Path,
    *,
    batches: Sequence[Sequence["Pair"]],
    held_out: Sequence["Pair"],
    into: Path,
) -> None:
    from agentrl.recipes.preference_core import PreferenceCore

    core = await asyncio.to_thread(PreferenceCore, base, config, run.config.seed)
    run.metrics.rewind(0)  # drop the metrics of a stopped run: its training starts over
    warm_up = max(1, len(batches) // 10)
    for step, batch in enumerate(batches):
        metrics = await asyncio.to_thread(core.step, batch, min(1.0, (step + 1) / warm_up))
        run.recorder.write(step, metrics)
        if (step + 1) % max(1, len(batches) // 8) == 0:
            run.display.say(
                f"{step + 1} of {len(batches)} steps: loss {metrics['loss']:.3f} nats a pair, "
                f"{metrics['accuracy']:.0%} in the right order"
            )
    if held_out:
        accuracy = await asyncio.to_thread(core.accuracy, held_out)
        run.recorder.write(len(batches), {"eval/preference_accuracy": accuracy})
        run.display.say(
            f"of {len(held_out)} held-out pairs, [bold]{accuracy:.1%}[/bold] are in the right order"
        )
    await asyncio.to_thread(core.save, into)


def _tokenize_pairs(
    run: Run, base: Path, pairs: Sequence[Preference], config: PreferencesConfig
) -> list["Pair"]:
    """The tokens of each pair, by the model's chat template, as `RewardModel` will read them."""
    renderer = renderer_of(base, run.config.model)
    encoded = [
        (renderer.encode_conversation(pair.chosen), renderer.encode_conversation(pair.rejected))
        for pair in pairs
    ]
    short = [pair for pair in encoded if max(map(len, pair)) <= config.max_tokens]
    if len(short) < len(encoded):
        run.display.say(
            f"{len(encoded) - len(short)} of {len(encoded)} pairs are longer than"
            f" {config.max_tokens} tokens: left out"
        )
    return short
