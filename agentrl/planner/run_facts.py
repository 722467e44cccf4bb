"""What a run's config says of the things that a plan is made of: the model, the stages, what is wished for."""

from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.placement.device_map import PlacementRequest
from agentrl.placement.footprint import EngineLayout, ModelFacts, TrainerLayout, facts_of, model_facts
from agentrl.plugins import Component
from agentrl.rollout.agents import FrozenRoute
from agentrl.simulate.stages import Stages
from agentrl.tiny_model import SIZES, model_config


def model_of(config: RunConfig) -> ModelFacts:
    """The shape of a run's model; of one that is randomly initialised, with the largest vocabulary that it can have.

    Raises:
        ConfigError: there is no such model.
    """
    name = config.model.name
    return facts_of(model_config(SIZES[name]), name) if name in SIZES else model_facts(Path(name))


def stages_of(config: RunConfig, facts: ModelFacts) -> Stages:
    """The stages of a run.

    Raises:
        ConfigError: its engine or trainer does not say how it lies on devices.
    """
    frozen = {route for route in config.env.agents.values() if isinstance(route, FrozenRoute)}
    engine, trainer = layouts(config)
    reference, critic = _layout_of("reference", config.reference), _layout_of("critic", config.critic)
    return Stages(facts, engine, trainer, config.placement.assume, reference, critic, len(frozen))


def layouts(config: RunConfig) -> tuple[EngineLayout, TrainerLayout]:
    """How engine and trainer lie on devices, as they say themselves."""
    return _layout_of("engine", config.engine), _layout_of("trainer", config.trainer)


def _layout_of(section: str, chosen: Component | None) -> Any:
    """What a component says of itself; None where there is none."""
    if chosen is None:
        return None
    layout = getattr(chosen.settings, "layout", None)
    if layout is None:
        raise ConfigError(
            f"{section} {chosen.name!r} does not say how it lies on devices, so nothing can be planned: give its "
            "Config a method `layout`, as agentrl/placement/footprint.py says, or write placement=local"
        )
    return layout()


def placement_request_of(config: RunConfig) -> PlacementRequest:
    """What the settings of cluster, engine and trainer ask of a placement."""
    engine, trainer = layouts(config)
    return PlacementRequest(
        engines=getattr(config.cluster.settings, "engines", 1),
        tensor_parallel=engine.tensor_parallel,
        ranks=trainer.ranks,
        has_engine=engine.here,
        trainer_grows=trainer.grows,
        splits=engine.splits,
    )
