"""ArCHer: a critic of turns that learns from earlier episodes too, beside the loop of
`policy_gradient`.
"""

from typing import Annotated

from pydantic import Field

from agentrl.assembly.engines import check_trains
from agentrl.config.run_config import RunConfig
from agentrl.estimation.advisors import CriticTraining
from agentrl.estimation.episode_buffer import Replay
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
    """How many earlier episodes each update of the critic draws, for each new one."""
    critic_updates: Annotated[int, Field(gt=0)] = 4
    """How often the critic is updated in a step: on the new episodes and those that are drawn, with
    new targets.
    """
    critic_warmup: Annotated[int, Field(ge=0)] = 10
    """Steps before the policy starts to learn. Until then the critic learns alone."""
    demonstrations: DemonstrationsConfig | None = None
    """What the model imitates first, if it cannot do the task at all yet."""

    def check_run(self, config: RunConfig) -> None:
        """Refuse what does not fit the other settings of a run.

        Raises:
            ValueError: the algorithm has no critic of answers, the policy would never learn, or
                parts of episodes would be replayed.
        """
        if not getattr(config.algorithm.factory, "values_answers", False):
            raise ValueError(
                "recipe=archer teaches a critic what answers are worth, and"
                f" algorithm={config.algorithm.name} has none: set algorithm=archer, or"
                " recipe=policy_gradient"
            )
        if config.rollout.staleness_rule == "segment":
            raise ValueError(
                "rollout.staleness_rule=segment trains on parts of episodes, and recipe=archer uses"
                " tasks again only when they have been trained on whole: choose another"
                " staleness_rule, or recipe=policy_gradient"
            )
        if self.critic_warmup >= config.steps:
            raise ValueError(
                f"recipe.critic_warmup is {self.critic_warmup}, and the run has {config.steps}"
                " steps, so the policy would never learn: lower it, or raise steps"
            )


async def archer(run: Run, settings: ArcherSettings) -> None:
    """Train as `policy_gradient` does, with a critic that learns off-policy.

    The ledger keeps the step that trained on a task first, and counts the later uses.
    """
    check_trains(run.config)
    seed = derive_seed(run.config.seed, "replay")
    replay = Replay(settings.replay, settings.replayed, seed=seed, reused=run.ledger.reused)
    training = CriticTraining(settings.critic_updates, settings.critic_warmup, replay)
    await train(
        run,
        run.config.algorithm.make(),
        await starting_model(run, settings.demonstrations),
        training=training,
    )
