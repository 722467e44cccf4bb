"""The start of vLLM: its arguments by the engine's settings, the model and the platform."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.engines.vllm_adapters import (
    adapter_arguments,
    merged_message,
    refuse_merging,
    supports_adapters,
    why_merged,
)
from agentrl.engines.vllm_args import typed_arguments
from agentrl.engines.vllm_pictures import (
    picture_arguments,
    picture_overrides,
    why_blind,
    why_not_started,
    widen_encoder_budget,
)
from agentrl.engines.vllm_settings import (
    BACKEND,
    CPU_PREFILL_TOKENS,
    WORKER_EXTENSION,
    VllmSettings,
)
from agentrl.errors import ConfigError
from agentrl.models.attention_check import check_context, context_limit, rotations
from agentrl.models.optional_fields import optional_field
from agentrl.models.source import model_folder
from agentrl.models.vision import sees
from agentrl.settings.precision import resolve_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_WIDER_BY_ONE = ("cohere2", "cohere2_moe")
"""Model types whose window vLLM makes one wider than their config says."""
_OTHERWISE = {"gemma3n_text": "Gemma 3n", "gpt_neox": "GPT-NeoX"}
"""Model types for which vLLM 0.32 computes other logprobs than transformers
(docs/model-families.md).
"""
_OTHERWISE_ON_CPU = {"ernie4_5_moe": "ERNIE 4.5 MoE"}


@dataclass(frozen=True, slots=True)
class VllmStart:
    """The start of one engine. Imports vLLM in its methods."""

    settings: VllmSettings
    """The engine's settings."""
    folder: Path
    """The folder of the model, on this machine."""

    def vllm_config(self, logging: Mapping[str, Any]) -> "VllmConfig":
        """vLLM's own config, with its defaults for this platform and its arguments for a log."""
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext

        given = {**self.arguments(on_cpu=current_platform.is_cpu()), **logging}
        # Its defaults, such as the tokens of a step, are then those of `vllm serve`.
        context = UsageContext.OPENAI_API_SERVER
        config = self._create_config(given, context)
        if current_platform.is_cpu() and self.is_shown_pictures(on_cpu=True):
            widen_encoder_budget(config)
        return config

    def _create_config(self, given: Mapping[str, Any], context: Any) -> "VllmConfig":
        """vLLM's config of these arguments, with room for adapters, if it serves some."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform

        if (room := self.room_for_adapters(on_cpu=current_platform.is_cpu())) is not None:
            config = AsyncEngineArgs(**given, **room).create_engine_config(context)
            if supports_adapters(config.model_config):
                return config
            self._warn_of_merging(f"vLLM serves none of {config.model_config.architectures[0]}")
        return AsyncEngineArgs(**given).create_engine_config(context)

    def arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        """vLLM's arguments.

        Raises:
            ConfigError: vLLM cannot serve the model as it is trained, or takes no such argument.
        """
        from vllm.config import WeightTransferConfig

        self.refuse_other_models(on_cpu)
        config, model = self.settings, self._model_config()
        kv_cache_gib = config.kv_cache_gib or (1.0 if on_cpu else None)
        shown = self.is_shown_pictures(on_cpu=on_cpu)
        return {
            "model": str(self.folder),
            "trust_remote_code": config.trust_remote_code,
            # vLLM reads no pictures without a tokenizer, although its own processor is not used.
            "skip_tokenizer_init": not (config.structured_outputs or shown),
            # the request sets the sampling parameters, not the model's folder
            "generation_config": "vllm",
            "hf_overrides": self.overrides(shown=shown),
            "max_model_len": self._longest(),
            **self._parallel_arguments(on_cpu),
            **self._number_formats(on_cpu),
            "speculative_config": self._speculation(on_cpu=on_cpu),
            "enable_return_routed_experts": self._routed(on_cpu=on_cpu),
            "max_num_seqs": config.max_batch,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "enable_prefix_caching": config.prefix_cache,
            "gpu_memory_utilization": config.memory_fraction,
            "enable_sleep_mode": config.sleep_mode,
            "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
            **(self._cpu_args() if on_cpu else {}),
            "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
            "scheduling_policy": "priority",
            "logprobs_mode": "processed_logprobs",  # of the sampling distribution
            "max_logprobs": -1,  # a request that keeps its support asks for as many as its top_k
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "worker_extension_cls": WORKER_EXTENSION,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **(picture_arguments(shown=shown, on_cpu=on_cpu) if sees(model) else {}),
            **self._written_arguments(on_cpu),
        }

    def is_shown_pictures(self, *, on_cpu: bool) -> bool:
        """True if the model reads pictures."""
        config = self._model_config()
        return sees(config) and not why_blind(config, self.settings.args, on_cpu=on_cpu)

    def _parallel_arguments(self, on_cpu: bool) -> dict[str, Any]:
        """The arguments that divide the model over GPUs."""
        config = self.settings
        text = self._model_config().get_text_config()
        experts = optional_field(text, "num_experts_per_tok")
        written = "data_parallel" if config.data_parallel > 1 else "expert_parallel"
        if (config.data_parallel > 1 or config.expert_parallel) and not experts:
            raise ConfigError(
                f"engine.{written} divides experts, and the model in {self.folder} has none: write"
                " engine.tensor_parallel or cluster.engines"
            )
        if on_cpu and config.data_parallel > 1:
            raise ConfigError(
                "engine.data_parallel is for GPUs, and the installed vLLM is built for CPUs: write"
                " cluster.engines"
            )
        several = config.tensor_parallel > 1 or config.data_parallel > 1
        return {
            "tensor_parallel_size": config.tensor_parallel,
            "data_parallel_size": config.data_parallel,
            "enable_expert_parallel": config.expert_parallel,
            # In an actor of Ray, vLLM would start actors of its own, which cannot have the actor's
            # GPUs.
            "distributed_executor_backend": "mp" if several else None,
        }

    def _routed(self, *, on_cpu: bool) -> bool:
        """True if vLLM is to say which experts it chooses."""
        if not self.settings.routed_experts:
            return False
        if on_cpu:
            raise ConfigError(
                "trainer.routing: vLLM says which experts it chose only with its second model"
                " runner, which needs Triton and so a GPU, and the installed vLLM is built for"
                " CPUs: use engine=local, or write trainer.routing=off"
            )
        if not optional_field(self._model_config().get_text_config(), "num_experts_per_tok"):
            raise ConfigError(
                f"trainer.routing is of mixtures of experts, and the model in {self.folder} is"
                " none: leave it out"
            )
        if not self.settings.prefix_cache:
            raise ConfigError(
                "trainer.routing: vLLM keeps the experts that it chose beside its prefix cache,"
                " which engine.prefix_cache=false turns off: leave one of both out"
            )
        return True

    def room_for_adapters(self, *, on_cpu: bool) -> dict[str, Any] | None:
        """The arguments that make room for adapters; None if none are trained, or none served."""
        if self.settings.adapter_rank is None:
            return None
        model = self._model_config().get_text_config()
        has_bfloat16 = not on_cpu and _has_bfloat16_gpu()
        reason = why_merged(self.settings, model, on_cpu=on_cpu, has_bfloat16=has_bfloat16)
        if reason:
            self._warn_of_merging(reason)
            return None
        return adapter_arguments(self.settings, self.folder, model)

    def _warn_of_merging(self, reason: str) -> None:
        refuse_merging(self.settings, reason)
        logger.warning(merged_message(reason))

    def _number_formats(self, on_cpu: bool) -> dict[str, Any]:
        """The arguments for the number formats of weights, products and KV cache."""
        config = self.settings
        formats = {"quantization": config.quantization, "kv_cache_dtype": config.kv_cache_dtype}
        for name, number_format in formats.items():
            if on_cpu and number_format not in (None, "auto"):
                raise ConfigError(
                    f"engine.{name}={number_format} is for GPUs, and the installed vLLM is built"
                    " for CPUs: leave it out"
                )
        dtype = resolve_dtype(config.dtype, None, gpu=_has_bfloat16_gpu())
        if config.quantization == "fp8":
            formats["quantization"] = "fp8_per_channel"
        return {"dtype": dtype, **formats}

    def _speculation(self, *, on_cpu: bool) -> dict[str, Any] | None:
        """vLLM's `speculative_config`."""
        speculative = self.settings.speculative
        if speculative is None:
            return None
        if on_cpu:
            # `_expand_kernel_impl` fills a copy of the temperatures, top_k and top_p of proposed
            # tokens, and leaves the originals uninitialised.
            raise ConfigError(
                "engine.speculative is for GPUs: vLLM for CPUs draws some of the proposed tokens at"
                " another temperature than the request's, and says so in their logprobs, which are"
                " then not the model's: leave it out"
            )
        arguments = speculative.arguments()
        if speculative.model is not None:
            draft = model_folder(speculative.model, setting="engine.speculative.model")
            arguments["model"] = str(draft)
        return arguments

    def _written_arguments(self, on_cpu: bool) -> dict[str, Any]:
        """The arguments that the user has written."""
        written = self.settings.args
        on_cpus = self._cpu_args() if on_cpu else {}
        if both := sorted(written.keys() & on_cpus.keys()):
            raise ConfigError(
                f"engine.args.{both[0]}: vLLM for CPUs computes what is trained only with"
                f" {both[0]}={on_cpus[both[0]]!r}: leave it out"
            )
        try:
            return typed_arguments(written)
        except ValueError as error:
            raise ConfigError(f"engine.args: {error}") from error

    def _model_config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            self.folder, trust_remote_code=self.settings.trust_remote_code
        )

    def refuse_other_models(self, on_cpu: bool) -> None:
        """Refuse a model that vLLM cannot start here, or whose logprobs it computes otherwise than
        transformers.

        Raises:
            ConfigError: it is one.
        """
        config = self._model_config()
        if reason := why_not_started(config.model_type):
            raise ConfigError(f"engine=vllm cannot serve the model in {self.folder}: {reason}")
        kind = config.get_text_config().model_type
        known = {**_OTHERWISE, **(_OTHERWISE_ON_CPU if on_cpu else {})}
        if kind in known:
            raise ConfigError(
                f"vLLM{' for CPUs' if kind in _OTHERWISE_ON_CPU else ''} computes other logprobs"
                f" than transformers for {known[kind]}, by a tenth of a nat and more"
                " (docs/model-families.md): use engine=local"
            )

    def overrides(self, *, shown: bool = False) -> dict[str, Any]:
        """What vLLM is given instead of the model's own config, so that it computes what
        transformers does. `shown`: the model reads pictures.

        vLLM 0.32 adds one to the window of Command R7B and A ("to match the training convention"):
        its layers would attend to one more token than those that are trained. And it looks for the
        scale of Ministral 3's queries at positions beyond the original ones in another place than
        transformers does.
        """
        whole = self._model_config()
        text = whole.get_text_config()
        rope = optional_field(text, "rope_parameters") or {}
        changed: dict[str, Any] = {}
        if text.model_type in _WIDER_BY_ONE and text.sliding_window:
            changed = {"sliding_window": text.sliding_window - 1}
        elif rope.get("llama_4_scaling_beta") and optional_field(text, "llama_4_scaling") is None:
            original = rope["original_max_position_embeddings"]
            scaling = {
                "beta": rope["llama_4_scaling_beta"],
                "original_max_position_embeddings": original,
            }
            changed = {"llama_4_scaling": scaling}
        if shown and (pictured := picture_overrides(whole)):
            return pictured
        return changed if text is whole or not changed else {"text_config": changed}

    def _longest(self) -> int | None:
        """Most tokens of a request; None for the model's own limit."""
        config, asked = self._model_config(), self.settings.max_context
        if any(
            rope.get("rope_type") == "dynamic" and "factor" in rope for rope in rotations(config)
        ):
            raise ConfigError(
                "vLLM rotates the positions of short sequences with rope_type=dynamic"
                " (rope_parameters in the model's config.json) as if they were long, and"
                " transformers does not: use engine=local"
            )
        if asked is not None:
            check_context(config, asked, f"engine.max_context={asked}")
        return asked or context_limit(config)

    def _cpu_args(self) -> dict[str, Any]:
        """What avoids vLLM 0.32's faults on CPUs.

        It dies when it splits the prefill of a request with a seed ("CPU Generator does not use
        offset"). With latent attention (MLA), its kernel for rotary embeddings rotates the wrong
        numbers, as it knows queries only as contiguous rows; and the attention that it prefers on
        CPUs with AMX computes in bfloat16 alone, and frees weights that an update would have to
        load.
        """
        text = self._model_config().get_text_config()
        longest = self._longest() or int(text.max_position_embeddings)
        tokens = self.settings.max_num_batched_tokens or max(CPU_PREFILL_TOKENS, longest)
        if tokens < longest:
            raise ConfigError(
                f"engine.max_num_batched_tokens={tokens}, but vLLM for CPUs computes a prompt of up"
                f" to {longest} tokens (engine.max_context) in one step: write at least {longest},"
                " or leave it out"
            )
        args = {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        dimensions = [getattr(text, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim")]
        if dimensions[0] is None:
            return args
        if dimensions != [512, 64]:
            raise ConfigError(
                "vLLM for CPUs computes latent attention (MLA) only with kv_lora_rank=512 and"
                f" qk_rope_head_dim=64, but the model in {self.folder} has {dimensions[0]} and"
                f" {dimensions[1]}: use engine=local"
            )
        plain = {
            "attention_backend": "CPU_MLA",
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        }
        return {**args, **plain}


def _has_bfloat16_gpu() -> bool:
    import torch
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() and torch.bfloat16 in current_platform.supported_dtypes


__all__ = ["VllmStart"]
