"""Products of a model's layers in floats of eight bits (Micikevicius et al. 2022,
arXiv:2209.05433), by torchao.

Each token, and each output of a matrix, has a scale of its own. With one scale for a whole tensor,
what a sample computes would depend on what it is packed with. Gradients of weights, which are sums
over all tokens, are computed in the model's own format. Weights stay as they are, for the
optimizer, checkpoints and engines.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.models.vision import language_model
from agentrl.trainers.compute.recomputation import blocks_of

_SIZE_MULTIPLE = 16
"""The kernels take matrices whose sizes are multiples of this."""
_MIN_CAPABILITY = (8, 9)
"""The first GPUs that have such products: compute capability."""


def use_fp8(model: Any, device: torch.device) -> None:
    """Let the linear layers in the decoder of a Hugging Face model multiply in fp8. On CPUs, the
    results are rounded as a GPU's are, which takes longer than without.

    Raises:
        ConfigError: the GPU has no such products, or the model no such layers.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            "trainer.fp8 needs GPUs of compute capability"
            f" {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]} or more, and this one is {name}: leave the"
            " setting out"
        )
    language = set(language_model(model).modules())
    chosen = {
        id(module)
        for block in blocks_of(model)
        if block in language
        for module in block.modules()
        if isinstance(module, torch.nn.Linear)
        and module.in_features % _SIZE_MULTIPLE == module.out_features % _SIZE_MULTIPLE == 0
    }
    if not chosen:
        raise ConfigError(
            f"trainer.fp8 is for linear layers whose sizes are multiples of {_SIZE_MULTIPLE}, and"
            f" {type(model).__name__} has none: leave the setting out"
        )
    with _quiet_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        convert_to_float8_training(
            model,
            config=replace(config, emulate=device.type != "cuda"),
            module_filter_fn=lambda module, name: id(module) in chosen,
        )


@contextmanager
def _quiet_torchao() -> Iterator[None]:
    """Silence torchao's import, which warns of kernels that are not used here."""
    logger = logging.getLogger("torchao")
    before, logger.level = logger.level, logging.ERROR
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.level = before


__all__ = ["use_fp8"]
