"""Layers of a model that are compiled by `torch.compile`, for packed samples of any length.

All but attention is compiled: how samples lie in a sequence would be compiled into it, and its
kernels are fused already. The sizes of tensors are symbols, so new lengths compile nothing again.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from agentrl.errors import ConfigError
from agentrl.models.routing import expert_modules
from agentrl.models.vision import language_model
from agentrl.trainers.compute.attention import ATTENTION, attend
from agentrl.trainers.compute.recomputation import blocks_of


def compile_blocks(model: Any, backend: str = "inductor") -> None:
    """Let each layer of a Hugging Face model's decoder but the last compute by compiled code, which
    is made when it is first called. The last one stays as it is, since it computes only needed
    tokens.

    Raises:
        ConfigError: the model has experts, or does not say which of its modules are layers.
    """
    kind, language = type(model).__name__, set(language_model(model).modules())
    found = [block for block in blocks_of(model) if block in language]
    if expert_modules(model):
        raise ConfigError(
            f"trainer.compile compiles layers for any number of tokens, and those of {kind} compute"
            " each of their experts for another number: leave the setting out"
        )
    if not found:
        raise ConfigError(
            f"trainer.compile compiles layers, and {kind} does not say which of its modules are"
            " layers (_no_split_modules): leave the setting out"
        )
    apart = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, apart)
    for block in found[:-1]:
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
