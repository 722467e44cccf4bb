"""Which parts of a model that sees are trained, and what is refused for such models."""

from typing import Any

from agentrl.errors import ConfigError
from agentrl.models.vision import part_of, sees
from agentrl.trainers.spec import TrainerSpec

_PARTS = {"train_tower": "tower", "train_projector": "projector"}
"""The settings that say which parts beside the language model are trained."""


def check_seeing(spec: TrainerSpec, config: Any) -> None:
    """Refuse what is not computed for models that see, before anything is loaded. `config`: the
    model's.

    Raises:
        ConfigError: the settings ask for it, or for a tower of a model that has none.
    """
    settings = spec.config
    trained = [name for name in _PARTS if getattr(settings, name)]
    if not sees(config):
        if trained:
            raise ConfigError(
                f"trainer.{trained[0]}: the family {config.model_type} has no tower that sees:"
                " leave it out, or take a model that sees"
            )
        return
    mesh = settings.layout().mesh
    refused = {
        "a critic": (spec.head == "value", "take an algorithm without one, such as grpo"),
        "trainer: deepspeed": (not settings.sees, "write trainer: fsdp, or local"),
        "trainer.context_parallel": (mesh.context > 1, "write 1"),
        "trainer.tensor_parallel": (mesh.tensor > 1, "write 1; FSDP divides all matrices"),
        "trainer.expert_parallel": (mesh.expert > 1, "write 1"),
        "trainer.lora with " + " and ".join(f"trainer.{name}" for name in trained): (
            bool(settings.lora and trained),
            "adapters are of the language model only: train the tower without trainer.lora, or"
            " leave it frozen",
        ),
        f"trainer.routing={spec.routing}": (spec.routing != "off", "write off"),
        "trainer.router_aux_loss_coef": (settings.router_aux_loss_coef > 0, "leave it out"),
    }
    for what, (asked, way_out) in refused.items():
        if asked:
            raise ConfigError(
                f"{what} is not supported for a model that sees ({config.model_type}): {way_out}"
            )


def freeze_parts(model: Any, spec: TrainerSpec) -> frozenset[str]:
    """Freeze the tower and the projector of a model that sees, unless they are to be trained. A
    frozen part has no gradients and no moments, and is not sent to the engines. Returns the names
    of its parameters and buffers.
    """
    if not sees(model.config):
        return frozenset()
    frozen = {part for name, part in _PARTS.items() if not getattr(spec.config, name)}
    for name, parameter in model.named_parameters():
        if part_of(name) in frozen:
            parameter.requires_grad_(False)
    return frozenset(name for name in model.state_dict() if part_of(name) in frozen)
