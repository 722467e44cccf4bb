"""Activations that the backward pass computes again, so that the forward pass need not keep them,
block by block.

A block is a layer of the decoder. It is wrapped inside of its hooks: a sharding that gathers a
block's weights before its forward and its backward pass has them there when the block is computed
again.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from agentrl.errors import ConfigError
from agentrl.placement.footprint import Recompute

_KEPT_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
)
"""What is dear to compute, and is kept by selective recomputation: the products with weights, and
fused attention. The batched products of attention in pieces are not among them: they have the size
of tokens times tokens."""


def blocks_of(model: Any) -> list[nn.Module]:
    """The layers of a Hugging Face model that are sharded and computed again one by one."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def recompute_blocks(model: Any, how: Recompute, *, offload: bool = False) -> None:
    """Let each block of a model compute its activations again in the backward pass.

    With `full`, only the block's input is kept, and with `selective` also what is dear to compute
    (Chen et al. 2016, arXiv:1604.06174, section 3; Korthikanti et al. 2022, arXiv:2205.05198,
    section 5). With `offload`, the inputs are kept in CPU memory. The model has no dropout: what is
    computed again is equal to the bit.

    Raises:
        ConfigError: the model has no blocks, or nothing is computed again and so no inputs are
        kept.
    """
    if how == "none":
        if offload:
            raise ConfigError(
                "trainer.activation_offload keeps the inputs of layers that are computed again, and"
                " trainer.activation_checkpointing is none: write full or selective, or leave"
                " it out"
            )
        return
    found = blocks_of(model)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} does not say which of its modules are layers"
            " (_no_split_modules), so none can be computed again: write"
            " trainer.activation_checkpointing=none"
        )
    contexts = (
        partial(create_selective_checkpoint_contexts, _kept_operators())
        if how == "selective"
        else noop_context_fn
    )
    for block in found:
        block.forward = partial(_checkpoint_block, block.forward, contexts, offload)


def _checkpoint_block(
    forward: Callable[..., Any],
    contexts: Callable[[], Any],
    offload: bool,
    *inputs: Any,
    **options: Any,
) -> Any:
    """The outputs of a block. The hooks around are in force for its inputs; inside, nothing else is
    kept.
    """
    on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in inputs)
    with save_on_cpu(pin_memory=on_gpu) if offload else nullcontext():
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **options,
        )


def _kept_operators() -> list[Any]:
    """The operators of `_KEPT_OPERATORS` that this torch has."""
    found = []
    for name in _KEPT_OPERATORS:
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found.append(packet.default)
    return found
