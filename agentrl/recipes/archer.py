"""ArCHer: a critic of turns that learns from earlier episodes too, beside the loop of
`policy_gradient`.
"""

from typing import Annotated

from pydantic import Field

from agentrl.config.compatibility import check_stage
from agentrl.estimation.advisors import CriticTraining
from agentrl.estimation.episode_buffer import EpisodeBuffer
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.policy_gradient import train
from agentrl.recipes.starting_model import starting_model
from agentrl.rollout.seeds import derive_seed
from agentrl.runs.run import Run
from agentrl.settings.base import Settings


class ArcherSettings(Settings):
    """Settings of `recipe: archer`, which needs `algorithm: archer`."""

    replay: Annotated[int, Field(gt=0)] = 8
    """Of how many earlier steps the episodes are kept. Each checkpoint has them too."""
    replayed: Annotated[float, Field(ge=0)] = 1.0
    """Earlier episodes that each update of the critic draws, for each new one."""
    critic_updates: Annotated[int, Field(gt=0)] = 4
    """Updates of the critic in a step: on the new episodes and those that are drawn, with new
    targets.
    """
    critic_warmup: Annotated[int, Field(ge=0)] = 10
    """Steps before the policy starts to learn. Until then the critic learns alone."""
    demonstrations: DemonstrationsConfig | None = None
    """The episodes that the model imitates first, if it cannot do the task at all yet."""


async def archer(run: Run, settings: ArcherSettings) -> None:
    """Train as `policy_gradient` does, with a critic that learns off-policy.

    The ledger keeps the step that trained on a task first, and counts the later uses.
    """
    check_stage(run.config, "training")
    seed = derive_seed(run.config.seed, "replay")
    buffer = EpisodeBuffer(settings.replay, settings.replayed, seed=seed, reused=run.ledger.reused)
    training = CriticTraining(settings.critic_updates, settings.critic_warmup, buffer)
    await train(
        run,
        run.config.algorithm.make(),
        await starting_model(run, settings.demonstrations),
        training=training,
    )
