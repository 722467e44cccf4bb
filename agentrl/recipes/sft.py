"""Supervised fine-tuning on the episodes of a scripted player, and nothing else."""

from agentrl.protocols import Settings
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.starting_model import starting_model
from agentrl.run import Run


class SftSettings(Settings):
    """Settings of `recipe: sft`."""

    demonstrations: DemonstrationsConfig
    """The episodes to imitate."""


async def sft(run: Run, settings: SftSettings) -> None:
    """Imitate the demonstrations, without reinforcement learning after them."""
    folder = await starting_model(run, settings.demonstrations)
    run.display.say(f"the model is in {folder}")
