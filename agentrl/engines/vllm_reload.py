"""New weights for a model that vLLM serves, and what vLLM 0.32 would leave as it was.

vLLM reloads a model in three steps: its layers accept weights in checkpoint form again, the model's
loader fills them, and each layer is converted to the form that it computes in. Some layers would
keep old weights without a word: experts and heads on CPUs, the experts and sinks of gpt-oss
everywhere. `Reload` mends these, and refuses what is still old.

This module imports vLLM; imported only by `agentrl/engines/vllm_worker.py`.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from agentrl.models.vision import part_of

Weights = Iterable[tuple[str, torch.Tensor]]


class Reload:
    """Reloads one model, as often as it gets new weights: `begin`, `load_weights` with all of them,
    `finish`.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._config = model_config
        self._kernels = _ExpertKernels()
        self._direct = _DirectCopies()
        self._parameters = _Parameters()

    def begin(self) -> None:
        """Make the layers accept weights in checkpoint form again."""
        self._parameters = _Parameters.of(self._model)
        self._direct = _DirectCopies.of(self._model)
        initialize_layerwise_reload(self._model)
        self._kernels.remove(self._model)

    def load_weights(self, weights: Weights) -> None:
        """Load some of the weights. vLLM's transfer engines call it by this name, as if it were the
        model's.
        """
        self._model.load_weights(self._direct.replaced(weights))  # type: ignore[operator]

    def finish(self, kept: Collection[str] = ()) -> None:
        """Convert all layers to the form that they compute in. `kept`: the parts of a model that
        sees (`part_of`) that got no weights, and stay as they are.

        Raises:
            RuntimeError: a layer of another part got no weights.
        """
        stale = {
            name
            for name in self._parameters.not_loaded() - self._direct.copied
            if part_of(name) not in kept
        }
        finalize_layerwise_reload(self._model, self._config)
        self._kernels.put_back()
        _pack_tied_heads(self._model)
        if stale:
            raise RuntimeError(
                f"vLLM's loader for {type(self._model).__name__} has left these parameters as they"
                f" were: {', '.join(sorted(stale)[:5])}. Its logprobs would be of old weights: use"
                " engine=local"
            )


class _Parameters:
    """The parameters of a model that serves, and the layers that hold each: two layers, if a head
    is tied.
    """

    def __init__(self) -> None:
        self._layers: dict[str, list[torch.nn.Module]] = {}

    @staticmethod
    def of(model: torch.nn.Module) -> "_Parameters":
        """All that a checkpoint has. Attention layers have none: theirs are computed from other
        layers'.
        """
        found, names = _Parameters(), dict[int, str]()
        for path, layer in model.named_modules():
            if is_deferred_attention_layer(layer):
                continue
            for name, parameter in layer.named_parameters(recurse=False):
                first = names.setdefault(id(parameter), f"{path}.{name}")
                found._layers.setdefault(first, []).append(layer)
        return found

    def not_loaded(self) -> set[str]:
        """The names of those whose layers have got nothing so far."""
        return {name for name, layers in self._layers.items() if not any(map(_has_loaded, layers))}


def _has_loaded(layer: torch.nn.Module) -> bool:
    info = get_layerwise_info(layer)
    # A layer that has all its weights is converted at once.
    return not info.can_load() or info.load_numel > 0


class _DirectCopies:
    """The weights of gpt-oss that vLLM's loader would copy past the layers that wait for them,
    where they are lost.

    It copies stacks of experts and sinks straight into the parameters, which have no memory during
    a reload. Experts that come one by one take the usual way. Sinks are copied here into the
    parameters that are put back later.
    """

    def __init__(self) -> None:
        self.copied: set[str] = set()
        self._mapper: Any = None
        self._sinks: dict[str, torch.nn.Parameter] = {}

    @staticmethod
    def of(model: torch.nn.Module) -> "_DirectCopies":
        """None of a model of another family."""
        from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

        found = _DirectCopies()
        if isinstance(model, GptOssForCausalLM):
            found._mapper = model.hf_to_vllm_mapper
            found._sinks = {
                name: one for name, one in model.named_parameters() if name.endswith(".sinks")
            }
        return found

    def replaced(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in the form that reaches their layers, without the copied sinks."""
        for name, weight in weights:
            own = self._mapper and self._mapper.map_name(name)
            if own in self._sinks:
                sinks = self._sinks[own].data
                sinks.copy_(
                    weight.narrow(0, get_tensor_model_parallel_rank() * len(sinks), len(sinks))
                )
                self.copied.add(own)
            elif self._mapper and ".mlp.experts." in name:
                before, after = name.split(".mlp.experts.")
                yield from (
                    (f"{before}.mlp.experts.{i}.{after}", expert) for i, expert in enumerate(weight)
                )
            else:
                yield name, weight


class _ExpertKernels:
    """The kernels of layers with experts, removed while weights are loaded.

    On a CPU, vLLM 0.32 packs the weights of experts when it makes a layer's kernel. Where there is
    a kernel already, it leaves reloaded weights unpacked, and computes with them as if they were
    packed. Without one it makes another.
    """

    def __init__(self) -> None:
        self._removed: list[tuple[Any, Any]] = []

    def remove(self, model: torch.nn.Module) -> None:
        """Remove them all."""
        if not current_platform.is_cpu():
            return
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                self._removed.append((method, method.moe_kernel))
                method.moe_kernel = None

    def put_back(self) -> None:
        """Put back those of layers that were not reloaded, whose weights are still packed."""
        for method, kernel in self._removed:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._removed.clear()


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Repack heads that are tied to the embedding.

    On a CPU, each linear layer keeps a packed copy of its weights. vLLM 0.32 repacks the layers
    that it reloads, but does not reload a tied head, which would keep using its old copy.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


__all__ = ["Reload"]
