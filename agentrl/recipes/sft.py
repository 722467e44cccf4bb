"""Supervised fine-tuning: on the episodes of a scripted player, on recordings, on the model's own
best episodes.
"""

import asyncio
from pathlib import Path
from typing import Self

from pydantic import model_validator

from agentrl.algorithms.sft import RejectionSampling
from agentrl.config.compatibility import check_stage
from agentrl.config.run_config import PLAYED
from agentrl.conversation.renderer import renderer_of
from agentrl.files.durable import finish_folder, new_unfinished
from agentrl.protocols import RecipeOffers
from agentrl.recipes.demonstrations import DemonstrationsConfig, learn
from agentrl.recipes.policy_gradient import train
from agentrl.recipes.recordings import RecordingsConfig, recorded
from agentrl.recipes.starting_model import starting_model
from agentrl.runs.run import Run
from agentrl.settings.base import Settings


class SftSettings(Settings):
    """Settings of `recipe: sft`. The section `algorithm` is not used; without `rejection` nothing
    is played, so `engine`, `reward`, `evaluation`, `batch_processing` and `weights` are not used
    either."""

    demonstrations: DemonstrationsConfig | None = None
    """The episodes of a scripted player to imitate first."""
    recordings: RecordingsConfig | None = None
    """Conversations that were recorded, by the gateway, a run or another library, to imitate next:
    their exact tokens, where they have some.
    """
    rejection: RejectionSampling.Config | None = None
    """The episodes of its own that the model then imitates, for `steps` steps of
    `rollout.groups_per_step` groups.
    """

    @property
    def algorithm(self) -> RejectionSampling | None:
        """The algorithm that learns from what the model plays."""
        return None if self.rejection is None else RejectionSampling(self.rejection)

    @property
    def offers(self) -> RecipeOffers:
        """The recipe has its own algorithm. Without `rejection`, nothing is played."""
        return RecipeOffers(
            own_algorithm=True,
            learns_by=self.algorithm,
            unused=PLAYED if self.rejection is None else (),
        )

    @model_validator(mode="after")
    def _something_is_imitated(self) -> Self:
        if self.demonstrations is None and self.recordings is None and self.rejection is None:
            raise ValueError(
                "there is nothing to imitate: name a player in recipe.demonstrations.player or a"
                " folder in recipe.recordings.path, or write recipe.rejection={} to imitate the"
                " model's own best episodes"
            )
        return self


async def sft(run: Run, settings: SftSettings) -> None:
    """Imitate the demonstrations, the recordings, and the model's own best episodes, as far as the
    settings say so.
    """
    algorithm = settings.algorithm
    if algorithm is not None:
        check_stage(run.config, "training")
    folder = await starting_model(run, settings.demonstrations)
    if settings.recordings is not None:
        folder = await _imitate_recordings(run, settings.recordings, folder)
    if algorithm is None:
        run.display.say(f"the model is in {folder}")
    else:
        await train(run, algorithm, folder)


async def _imitate_recordings(run: Run, config: RecordingsConfig, base: Path) -> Path:
    """The folder of the model that imitates the recordings, maybe from an earlier launch."""
    final = run.folder / "sft"
    if not final.exists():
        renderer = await asyncio.to_thread(renderer_of, base, run.config.model)
        conversations = await recorded(config, renderer)
        run.display.say(f"imitating {len(conversations)} conversations of {config.path}")
        loss = await learn(run, conversations, base, new_unfinished(final), config)
        run.recorder.write(0, {"recordings/loss": loss})
        finish_folder(final)
    return final
