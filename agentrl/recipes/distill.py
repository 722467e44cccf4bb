"""On-policy distillation: the policy plays, and learns from a teacher's engine what that would have
sampled.

    rollouts ──▶ batch ──▶ teacher's engine: logprobs of the sampled tokens
                                                    │
               trainer ◀── advantages log q - log p ◀┘

The loss and the advantages are those of `algorithm: distill` (`agentrl/algorithms/distill.py`),
whose teacher is computed by a trainer. Here it is an engine, so it may be as large as an engine can
serve; and with `teacher.refresh` it is an earlier version of the policy itself.
"""

import asyncio

from agentrl.algorithms.distill import Distill, DistillLoss
from agentrl.config.compatibility import check_stage
from agentrl.estimation.teacher import TeacherConfig
from agentrl.models.tokenizer import check_same_tokens
from agentrl.protocols import RecipeOffers
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.policy_gradient import train
from agentrl.recipes.starting_model import base_model, starting_model
from agentrl.runs.run import Run


class DistillSettings(DistillLoss):
    """Settings of `recipe: distill`: the teacher, and those of `algorithm: distill`. The section
    `algorithm` is not used.
    """

    teacher: TeacherConfig = TeacherConfig()
    """The teacher and its engine."""
    demonstrations: DemonstrationsConfig | None = None
    """The episodes that the model imitates first."""

    @property
    def algorithm(self) -> Distill:
        """The algorithm of the recipe."""
        return Distill(Distill.Config(**self.model_dump(include=set(DistillLoss.model_fields))))

    @property
    def offers(self) -> RecipeOffers:
        """The recipe has its own algorithm."""
        return RecipeOffers(own_algorithm=True, learns_by=self.algorithm)


async def distill(run: Run, settings: DistillSettings) -> None:
    """Train `run.config.steps` steps towards the teacher.

    Raises:
        ConfigError: the teacher has other tokens, or its engine cannot score them as they are
        sampled.
    """
    check_stage(run.config, "training")
    base, teacher = await base_model(run), settings.teacher
    if teacher.model is not None:
        await asyncio.to_thread(check_same_tokens, base, teacher.model, "recipe.teacher.model")
    model = await starting_model(run, settings.demonstrations)
    await train(run, settings.algorithm, model, teacher=teacher)
