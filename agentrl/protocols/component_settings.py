"""The settings of a run's engine, trainer and cluster that other parts read, where they have them.
`Callable` fields are methods of the settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.protocols.offers import Offers


@dataclass(frozen=True, slots=True)
class EngineSettingsOffers(Offers):
    """The settings of an engine that other parts of a run ask for."""

    max_context: int | None = None
    """Largest prompt plus completion, in tokens; None is the model's limit."""
    max_batch: int = 0
    """Requests that a replica serves at once; 0 if that is not known."""
    log: str | None = None
    """The file of the engine's own log, in which `{role}` and `{number}` stand for those of the
    engine."""
    speculative: object = None
    """The settings of speculative decoding, if it is on."""
    structured_outputs: bool = False
    """The engine can constrain completions to a format (`GenerateRequest.format`)."""
    dtype: str | None = None
    """Data type of the engine's weights; `auto` is the trainer's."""
    device: str | None = None
    """`cpu`, `cuda` or `auto`, if it can be chosen."""
    why_blind: Callable[[Any], str] | None = None
    """Returns why an engine that reads pictures (`EngineOffers.reads_images`) reads none on this
    machine with a model that sees, given its config; empty if it does. Without it, it does."""
    layout: Callable[[], Any] | None = None
    """Returns an `EngineLayout`, to plan the engine's devices."""
    chosen: Callable[..., Any] | None = None
    """Returns the settings with what follows from the trainer and the devices."""
    for_adapters: Callable[[Any], Any] | None = None
    """Returns the settings with room for the adapters of a trainer, given its `lora`."""
    for_routing: Callable[[], Any] | None = None
    """Returns the settings that let the engine say which experts it chose
    (`GenerateRequest.keep_experts`), if it does not always."""


@dataclass(frozen=True, slots=True)
class TrainerSettingsOffers(Offers):
    """The settings of a trainer that other parts of a run ask for."""

    minibatches: int = 1
    """Updates in a step."""
    dtype: str | None = None
    """Precision of its computation; None if that follows from its devices."""
    device: str | None = None
    """`cpu`, `cuda` or `auto`, if it can be chosen."""
    world_size: int | None = None
    """Ranks, if there may be several."""
    sees: bool = False
    """It trains on the pictures of a batch, if its model can see."""
    train_tower: bool = True
    """The tower of a model that sees is trained; else it is not sent to engines."""
    train_projector: bool = True
    """The projector of such a model is trained; else it is not sent to engines."""
    lora: object = None
    """The settings of adapters, if only these are trained."""
    routing: str = "off"
    """What is done with the experts that the engine chose: `off`, `compare` or `replay`."""
    layout: Callable[[], Any] | None = None
    """Returns a `TrainerLayout`, to plan the trainer's devices."""
    within: Callable[[int], Any] | None = None
    """Returns the settings for samples of up to so many tokens."""
    lr: float = 0.0
    """The highest learning rate, of one that follows a schedule."""
    warmup_steps: int = 0
    """Calls of `Trainer.step` in which the rate rises to `lr`."""
    schedule: str = "constant"
    """The course of the rate after them: `constant` or `cosine`."""
    learning_rate: Callable[[int, int], float] | None = None
    """Returns the rate of a call of `Trainer.step`, from its number, counted from 0, and the number
    of all calls; None without a schedule."""
    chosen: Callable[..., Any] | None = None
    """Returns the settings with what follows from the model and the devices."""


@dataclass(frozen=True, slots=True)
class ServerOffers(Offers):
    """The settings of a component that asks a server of the user's."""

    url: str | None = None
    """The address of the server."""


@dataclass(frozen=True, slots=True)
class ClusterOffers(Offers):
    """The facts of a cluster, of its class or its settings, that other parts of a run ask for."""

    one_device: bool = False
    """Everything runs on the first device of this machine."""
    engines: int = 1
    """Replicas of the engine."""
    env_workers: int = 0
    """Workers that run environments."""
    has_others: bool = False
    """Workers may be on other machines."""
