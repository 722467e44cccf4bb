"""The trainers of a run: that of the policy, and the reference and the critic that some algorithms
need.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from agentrl.assembly.placed import PlacedCluster
from agentrl.errors import ConfigError
from agentrl.estimation.advisors import CRITIC_FOLDER, ON_NEWEST, Advisors, CriticTraining
from agentrl.models.tokenizer import check_same_tokens
from agentrl.plugins import Component
from agentrl.protocols import (
    Algorithm,
    AlgorithmOffers,
    EngineSettingsOffers,
    LatestCheckpoint,
    Recovery,
    Trainer,
    TrainerSettingsOffers,
    check_trainer,
)

TrainerRole = Literal["trainer", "reference", "critic"]
_ROLE_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "reference": {"role": "reference"},
    "critic": {"role": "critic", "head": "value"},
}
"""Extra arguments for making a reference or a critic."""


def make_trainer(
    placed: PlacedCluster,
    model: Path,
    latest: LatestCheckpoint = lambda: None,
    *,
    role: TrainerRole = "trainer",
    steps: int | None = None,
    temperature: float | None = None,
    **settings: Any,
) -> Trainer:
    """Make the configured trainer on its devices, for `steps` steps, with `settings` replaced. It
    survives the death of its ranks. `role` may also name an advisor, which is a trainer of another
    model with its own settings.

    `temperature`: that of its logprobs, by default the one that the run samples at, as policy
    gradients are of the distribution that was sampled from. What somebody else has said is learned
    at temperature 1.

    Raises:
        ConfigError: the trainer has no such setting.
    """
    config = placed.config
    chosen: Component = getattr(config, role)
    if unknown := settings.keys() - type(chosen.settings).model_fields.keys():
        raise ConfigError(f"the {role} {chosen.name!r} has no setting {', '.join(sorted(unknown))}")
    own = chosen.settings.model_copy(update=settings)
    context = EngineSettingsOffers.of(config.engine.settings).max_context
    fit = TrainerSettingsOffers.of(own).within
    if context is not None and fit is not None:
        own = fit(context)
    made: Trainer = replace(chosen, settings=own).make(
        model,
        total_steps=config.steps if steps is None else steps,
        temperature=config.rollout.sampling.temperature if temperature is None else temperature,
        start=placed.cluster.start,
        recovery=Recovery(
            latest,
            placed.cluster.config.restarts,
            config.rollout.deadlines.train,
            placed.cluster.config.start_seconds,
        ),
        **_ROLE_SETTINGS.get(role, {}),
    )
    check_trainer(role, chosen.name, made)
    return made


def make_advisors(
    placed: PlacedCluster,
    algorithm: Algorithm,
    model: Path,
    latest: LatestCheckpoint,
    training: CriticTraining = ON_NEWEST,
) -> Advisors:
    """Make the configured reference and critic. They start from the same model as the trainer,
    unless the algorithm names another reference. The critic has as many steps as `training` has
    updates.

    Raises:
        ConfigError: the other reference has other tokens.
    """

    def latest_critic() -> tuple[int, Path] | None:
        newest = latest()
        return None if newest is None else (newest[0] * training.updates, newest[1] / CRITIC_FOLDER)

    config = placed.config
    teacher = AlgorithmOffers.of(algorithm).reference_model
    if teacher is not None:
        check_same_tokens(model, teacher)
    reference = (
        make_trainer(placed, teacher or model, role="reference") if config.reference else None
    )
    steps = config.steps * training.updates
    critic = (
        make_trainer(placed, model, latest_critic, role="critic", steps=steps)
        if config.critic
        else None
    )
    return Advisors(algorithm, reference, critic, training)
