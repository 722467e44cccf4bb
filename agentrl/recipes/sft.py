"""Supervised fine-tuning: on the episodes of a scripted player, on the model's own best ones, or on both in turn."""

from typing import ClassVar, Self

from pydantic import model_validator

from agentrl.algorithms.sft import RejectionSampling
from agentrl.protocols import Settings
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.policy_gradient import train
from agentrl.recipes.starting_model import starting_model
from agentrl.run import Run


class SftSettings(Settings):
    """Settings of `recipe: sft`. The section `algorithm` is not used."""

    own_algorithm: ClassVar[bool] = True

    demonstrations: DemonstrationsConfig | None = None
    """The episodes of a scripted player to imitate first."""
    rejection: RejectionSampling.Config | None = None
    """Which of its own episodes the model then imitates, for `steps` steps of `rollout.groups_per_step` groups."""

    @model_validator(mode="after")
    def _something_is_imitated(self) -> Self:
        if self.demonstrations is None and self.rejection is None:
            raise ValueError(
                "there is nothing to imitate: name a player in recipe.demonstrations.player, or write "
                "recipe.rejection={} to imitate the model's own best episodes"
            )
        return self


async def sft(run: Run, settings: SftSettings) -> None:
    """Imitate the demonstrations, and then the model's own best episodes, as far as the settings say so."""
    folder = await starting_model(run, settings.demonstrations)
    if settings.rejection is None:
        run.display.say(f"the model is in {folder}")
    else:
        await train(run, RejectionSampling(settings.rejection), folder)
