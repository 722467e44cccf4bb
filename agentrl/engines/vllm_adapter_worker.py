"""The adapter that a worker of vLLM serves: low-rank factors beside the model's own weights.

The worker holds one adapter, under one number, from the start of the engine to its end. New weights
replace its factors, so requests in flight go on under them, and memory stays as it is. Without
factors it changes nothing.

This module imports vLLM; imported only by `agentrl/engines/vllm_worker.py`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.platforms import current_platform

from agentrl.engines.vllm_adapters import ADAPTER_NUMBER, adapter_request
from agentrl.engines.vllm_reload import Reload
from agentrl.weights.low_rank import Factors, LowRank


class WorkerAdapter:
    """The adapter of one worker, given its model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._manager = runner.lora_manager._adapter_manager
        if current_platform.is_cpu():
            _use_products_of(OneAdapter, self._manager, runner)

    def unserved(self, names: Iterable[str]) -> list[str]:
        """Those of the weights `names` whose layers have no room for factors in vLLM."""
        served = set(self._manager.modules)
        for layer, parts in self._manager.packed_modules.items():
            served.discard(layer)
            served.update(parts)
        return [name for name in names if self._layer(name) not in served]

    def replace(self, factors: Mapping[str, Factors]) -> None:
        """Serve these factors instead of those before."""
        dtype = self._manager.lora_config.lora_dtype
        layers = {}
        for name, (A, B, scale) in factors.items():
            # Copies: vLLM keeps them, and those given lie in files that are removed.
            a, b = A.to(dtype, copy=True), (scale * B).to(dtype)
            layer = self._layer(name)
            layers[layer] = LoRALayerWeights(layer, len(A), len(A), a, b, scaling=1.0)
        self._manager.remove_adapter(ADAPTER_NUMBER)
        if layers:
            rank = max(layer.rank for layer in layers.values())
            self._manager.add_adapter(LoRAModel(ADAPTER_NUMBER, rank, layers))
        else:
            self._runner.lora_manager.add_dummy_lora(adapter_request(), rank=1)  # of zeros
        self._manager.activate_adapter(ADAPTER_NUMBER)

    def load_base(self, folder: Path, names: Iterable[str]) -> None:
        """Load the model's own weights again, from a folder. All factors are gone afterwards."""
        base = LowRank(folder, {})
        reload = Reload(self._runner.get_model(), self._runner.model_config)
        reload.begin()
        reload.load_weights((name, base[name]) for name in names)
        reload.finish()
        self._runner.reset_lora_state()

    def _layer(self, name: str) -> str:
        """vLLM's name of the layer that has a weight of a Hugging Face folder."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        layer, _ = parse_fine_tuned_lora_name(
            f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight",
            None if mapper is None else mapper.get_rename_mapper(),
        )
        return str(layer)


class OneAdapter(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's products with factors, on CPUs, where all tokens have the same adapter.

    vLLM's own copy the factors for each token: gigabytes for a long prompt.
    """

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *layer: Any, **_: Any) -> None:
        """Add the update of a layer's outputs, which are those of several weights side by side."""
        a_stacked, b_stacked, scale, widths = layer
        begin = 0
        for a, b, width in zip(a_stacked, b_stacked, widths, strict=True):
            update = linear(linear(x, a[0, 0]), b[0, 0])
            y[:, begin : begin + width].add_(update, alpha=scale)
            begin += width


def _use_products_of(kind: type[PunicaWrapperCPU], manager: Any, runner: Any) -> None:
    """Let all layers with room for factors compute their products in another way."""
    made = {
        key: kind(
            manager.max_num_batched_tokens,
            max_batches=manager.max_num_seqs,
            device=manager.device,
            lora_config=manager.lora_config,
        )
        for key in manager.punica_wrapper_mapping
    }
    manager.punica_wrapper_mapping = made
    for name, layer in manager.modules.items():
        layer.set_mapping(manager._get_punica_wrapper(name))


__all__ = ["WorkerAdapter"]
