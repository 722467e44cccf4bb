"""Adapters of a LoRA trainer on vLLM: served beside the model's own weights where vLLM can, else
merged into them.

A served adapter is small (for 8 billion weights 44 million numbers instead of all), and keeps its
precision: added to weights in bfloat16, most of a small update is rounded away. vLLM computes with
the one adapter that each worker holds (`agentrl/engines/vllm_adapter_worker.py`), whatever version
its factors have, so all requests name it from the start on.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.engines.vllm_settings import VllmSettings
from agentrl.errors import ConfigError, EngineError
from agentrl.models.optional_fields import optional_field
from agentrl.settings.precision import resolve_dtype
from agentrl.weights.bundle import weight_shapes
from agentrl.weights.low_rank import LowRank
from agentrl.weights.shipment import Shipment

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

ADAPTER_NUMBER = 1
"""vLLM's number of the adapter that is served."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for."""


def adapter_request() -> "LoRARequest":
    """The name of the adapter in a request. Its path is no folder: the workers hold the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_NUMBER, "in the memory of the workers")


def room_for(rank: int) -> int | None:
    """The smallest rank that vLLM makes room for and that holds `rank`; None if there is none."""
    return next((room for room in _RANKS if room >= rank), None)


def why_merged(settings: VllmSettings, model: Any, *, on_cpu: bool, has_bfloat16: bool) -> str:
    """The reason why an engine with these settings merges adapters; "" if it may serve them.

    `model`: the transformers config of its text model.
    """
    rank = settings.adapter_rank or 0
    on_gpu_in = "" if on_cpu else resolve_dtype(settings.dtype, None, gpu=has_bfloat16)
    reasons = {
        "engine.adapters=merge": settings.adapters == "merge",
        f"their rank is {rank}, and vLLM has room for {_RANKS[-1]} at most": (
            room_for(rank) is None
        ),
        "engine.speculative is on, whose proposals vLLM makes without adapters": (
            settings.speculative is not None
        ),
        "engine.dtype=float32, and vLLM multiplies with adapters in bfloat16 on GPUs": (
            on_gpu_in == "float32"
        ),
        "it is a mixture of experts, and vLLM for CPUs cannot compute experts beside adapters": (
            on_cpu and bool(optional_field(model, "num_experts_per_tok"))
        ),
        "its attention is latent (MLA), whose weights vLLM multiplies beforehand": (
            bool(optional_field(model, "kv_lora_rank"))
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def adapter_arguments(settings: VllmSettings, folder: Path, model: Any) -> dict[str, Any]:
    """vLLM's arguments that make room for one adapter."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room_for(settings.adapter_rank or 1),
        "lora_target_modules": list(settings.adapter_targets or _linear_layers(folder, model)),
    }


def _linear_layers(folder: Path, model: Any) -> list[str]:
    """The ends of the names of the layers that a trainer adapts by default: all linear ones but the
    head; of a mixture of experts, those of attention.
    """
    experts = optional_field(model, "num_experts_per_tok")
    layers = {
        name.split(".")[-2]
        for name, shape in weight_shapes(folder).items()
        if len(shape) == 2 and name.endswith(".weight") and not (experts and "att" not in name)
    }
    return sorted(name for name in layers - {"lm_head", "wte", "wpe"} if "emb" not in name)


def supports_adapters(model_config: "ModelConfig") -> bool:
    """True if vLLM's class of the model has room for adapters. Imports the class."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    cls, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
    return bool(supports_lora(cls))


@dataclass(slots=True)
class ServedAdapters:
    """The adapter of one engine, as its driver sees it. `base`: the folder of the engine's model;
    `names`: of its weights.
    """

    settings: VllmSettings
    base: Path
    names: Sequence[str]
    _loaded: Path | None = field(init=False, default=None)
    """The folder whose weights the workers have beside the factors; None for none's."""
    _unserved: dict[frozenset[str], list[str]] = field(init=False, default_factory=dict)
    _warned: set[str] = field(init=False, default_factory=set)

    async def begin(self, llm: "AsyncLLM") -> None:
        """Hold an adapter that changes nothing. The workers have the weights of `base`."""
        await llm.collective_rpc("begin_adapter")
        self._loaded = self.base.resolve()

    async def serves(self, llm: "AsyncLLM", update: LowRank) -> bool:
        """True if these factors are served, False if they must be merged, of which a warning is
        logged once.

        Raises:
            EngineError: they would be merged, and `engine.adapters` is `serve`.
        """
        reason = await self._why_merged(llm, update)
        if reason and self.settings.adapters == "serve":
            raise EngineError(
                f"engine.adapters=serve, but {reason}: write engine.adapters=auto to merge them"
            )
        if reason and reason not in self._warned:
            self._warned.add(reason)
            logger.warning(merged_message(reason))
        return not reason

    async def load(self, llm: "AsyncLLM", shipment: Shipment, update: LowRank) -> None:
        """Serve new factors. Generation must be paused. Other weights than those of the update's
        folder are loaded again from there.
        """
        base = update.base.resolve()
        again = None if base == self._loaded else str(base)
        self._loaded = None
        work = (str(shipment.folder), again, list(self.names))
        await llm.collective_rpc("load_adapter", args=work)
        self._loaded = base

    async def clear(self, llm: "AsyncLLM") -> None:
        """Hold an adapter that changes nothing again: the workers have got other weights, with
        which vLLM forgets all adapters.
        """
        self._loaded = None
        await llm.collective_rpc("begin_adapter")

    async def _why_merged(self, llm: "AsyncLLM", update: LowRank) -> str:
        room = room_for(self.settings.adapter_rank or 1) or 0
        rank = max((len(factors.A) for factors in update.factors.values()), default=0)
        if rank > room:
            return f"an adapter has rank {rank}, and the engine has room for {room}"
        names = frozenset(update.factors)
        if names not in self._unserved:
            found = await llm.collective_rpc("unserved_adapters", args=(sorted(names),))
            self._unserved = {names: found[0]}
        if unserved := self._unserved[names]:
            return f"vLLM has no room for adapters of {len(unserved)} weights such as {unserved[0]}"
        return ""


def merged_message(reason: str) -> str:
    """The log message of an engine that merges adapters."""
    return (
        f"the engine merges adapters into its weights, since {reason}: each update reads the whole"
        " model, and in bfloat16 the smallest changes of weights are rounded away"
        " (docs/trainers.md)"
    )


def refuse_merging(settings: VllmSettings, reason: str) -> None:
    """Raise if adapters would be merged that are to be served.

    Raises:
        ConfigError: `engine.adapters` is `serve`.
    """
    if settings.adapters == "serve":
        raise ConfigError(
            f"engine.adapters=serve, but vLLM cannot serve the adapters of trainer.lora: {reason}."
            " Write engine.adapters=auto to merge them into the engine's weights"
        )


__all__ = [
    "ADAPTER_NUMBER",
    "ServedAdapters",
    "adapter_arguments",
    "adapter_request",
    "merged_message",
    "refuse_merging",
    "room_for",
    "supports_adapters",
    "why_merged",
]
