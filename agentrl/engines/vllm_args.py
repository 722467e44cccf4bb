"""The arguments of vLLM's own that a user may pass it by `engine.args`, and why not the others.

Every field of vLLM 0.32's `AsyncEngineArgs` is in `PASSED`, `OWN_SETTINGS` or `REASONS`, so that a
field that comes with an upgrade must be decided upon (`tests/engines/test_vllm_args.py`). Names are
checked wherever a config is read, and types where vLLM is installed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, get_args

from agentrl.engines.vllm_environment import quiet_imports
from agentrl.plugins import nearest

OWN_SETTINGS: Mapping[str, str] = {
    "data_parallel_size": "engine.data_parallel",
    "dtype": "engine.dtype",
    "enable_expert_parallel": "engine.expert_parallel",
    "enable_prefix_caching": "engine.prefix_cache",
    "enable_sleep_mode": "engine.sleep_mode",
    "enable_return_routed_experts": "trainer.routing",
    "enforce_eager": "engine.enforce_eager",
    "gpu_memory_utilization": "engine.memory_fraction",
    "hf_overrides": "model.hf_overrides",
    "kv_cache_dtype": "engine.kv_cache_dtype",
    "kv_cache_memory_bytes": "engine.kv_cache_gib",
    "max_model_len": "engine.max_context",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "max_num_seqs": "engine.max_batch",
    "model": "model.name",
    "performance_mode": "engine.max_num_batched_tokens and engine.max_batch",
    "quantization": "engine.quantization",
    "revision": "model.revision",
    "skip_tokenizer_init": "engine.structured_outputs",
    "spec_method": "engine.speculative",
    "spec_model": "engine.speculative",
    "spec_tokens": "engine.speculative",
    "speculative_config": "engine.speculative",
    "tensor_parallel_size": "engine.tensor_parallel",
    "trust_remote_code": "model.trust_remote_code",
}
"""The setting of agentrl's that stands for each of these arguments."""

_REFUSED: Mapping[str, tuple[str, ...]] = {
    "the trainer could not reproduce the probabilities that tokens are sampled with": (
        "diffusion_config",
        "disable_sliding_window",
        "enable_mamba_cache_stochastic_rounding",
        "enable_trace_replay",
        "generation_config",
        "kv_sharing_fast_prefill",
        "logits_processors",
        "logprobs_mode",
        "mamba_cache_philox_rounds",
        "max_logprobs",
        "override_generation_config",
        "watermark_config",
    ),
    "the engine must serve the very model that is trained, from the folder of model.name": (
        "allow_deprecated_quantization",
        "code_revision",
        "config_format",
        "convert",
        "download_dir",
        "hf_config_path",
        "ignore_patterns",
        "model_class_overrides",
        "model_weights",
        "pooler_config",
        "runner",
    ),
    "agentrl turns messages into tokens and back, with the model's own tokenizer": (
        "enable_prompt_embeds",
        "io_processor_plugin",
        "reasoning_config",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "renderer_num_workers",
        "served_model_name",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "tokens_only",
    ),
    "a config holds no credentials: set HF_TOKEN in the environment": ("hf_token",),
    "each request has its own seed, which follows from the run's (seed)": ("seed",),
    "new weights come by agentrl's own path (the section weights)": (
        "weight_transfer_config",
        "worker_cls",
        "worker_extension_cls",
    ),
    "vLLM cannot load new weights into layers that it keeps in the host's memory": (
        "cpu_offload_gb",
        "cpu_offload_params",
        "offload_backend",
        "offload_group_size",
        "offload_num_in_group",
        "offload_params",
        "offload_prefetch_step",
    ),
    "experts that vLLM has moved would get the new weights of others": (
        "enable_elastic_ep",
        "enable_eplb",
        "elastic_ep_max_dp_size",
        "eplb_config",
    ),
    "room for adapters follows from trainer.lora and engine.adapters": (
        "default_mm_loras",
        "enable_lora",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",
        "fully_sharded_loras",
        "lora_dtype",
        "lora_target_modules",
        "max_cpu_loras",
        "max_lora_cls_labels",
        "max_lora_rank",
        "max_loras",
        "specialize_active_lora",
    ),
    "KV that is kept outside of the engine's cache would outlive the weights that computed it": (
        "ec_manager_config",
        "ec_transfer_config",
        "kv_events_config",
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_transfer_config",
    ),
    "agentrl starts the engine's processes and places them (cluster, placement)": (
        "_api_process_count",
        "_api_process_rank",
        "additional_config",
        "data_parallel_address",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_multi_port_external_lb",
        "data_parallel_rank",
        "data_parallel_rpc_port",
        "data_parallel_size_local",
        "data_parallel_start_rank",
        "device_ids",
        "distributed_executor_backend",
        "master_addr",
        "master_port",
        "nnodes",
        "node_rank",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "ray_workers_use_nsight",
    ),
    "agentrl watches the engine and restarts it (cluster.lease, cluster.restarts)": (
        "enable_fault_tolerance",
        "fault_tolerance_config",
    ),
    "agentrl orders the requests, and none may be refused for others": (
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "scheduler_cls",
        "scheduling_policy",
    ),
    "agentrl reads vLLM's statistics, and its log is a file of the run": (
        "aggregate_engine_logging",
        "disable_log_stats",
        "log_config_file",
        "log_level",
        "logging_config",
        "use_tqdm_on_load",
    ),
    "agentrl does not read what vLLM would send with it": (
        "aux_output_config",
        "per_request_spec_decode_metrics",
        "return_sampling_mask",
    ),
    "agentrl makes the pixel values of pictures, as its trainers do, and shows nothing else": (
        "allowed_local_media_path",
        "allowed_media_domains",
        "disable_chunked_mm_input",
        "enable_mm_embeds",
        "enable_mm_processor_stats",
        "interleave_mm_strings",
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_hasher_algorithm",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_processor_device",
        "mm_processor_kwargs",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "video_pruning_method",
        "video_pruning_rate",
    ),
}
REASONS: Mapping[str, str] = {
    argument: reason for reason, arguments in _REFUSED.items() for argument in arguments
}
"""The reason why each of these arguments may not be passed."""

PASSED = frozenset(
    {
        # Kernels and compilation.
        "all2all_backend",
        "attention_backend",
        "attention_config",
        "compilation_config",
        "cudagraph_capture_sizes",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "enable_batch_sharded_sampling",
        "enable_dbo",
        "enable_flashinfer_autotune",
        "enable_hc_sp",
        "engram_config",
        "gdn_prefill_backend",
        "ir_op_priority",
        "jit_monitor_mode",
        "jit_monitor_verbose",
        "kda_decode_backend",
        "kda_prefill_backend",
        "kernel_config",
        "linear_backend",
        "max_cudagraph_capture_size",
        "model_impl",
        "moe_backend",
        "optimization_level",
        "sparse_indexer_topk_backend",
        "ubatch_size",
        "use_fp64_gumbel",
        # The weights of the start, and their number format.
        "enable_ep_weight_filter",
        "load_format",
        "max_parallel_loading_workers",
        "model_loader_extra_config",
        "pt_load_map_location",
        "quantization_config",
        "safetensors_load_strategy",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        # The KV cache, and the states of recurrent layers.
        "block_size",
        "disable_hybrid_kv_cache_manager",
        "enable_mamba_shared_prefix_checkpoint",
        "kv_cache_dtype_skip_layers",
        "mamba_backend",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_cache_mode",
        "mamba_config",
        "mamba_ssm_cache_dtype",
        "mamba_ssu_algorithm",
        "num_gpu_blocks_override",
        "prefix_cache_retention_interval",
        "prefix_caching_hash_algo",
        "prefix_match_unit",
        "replayssm_buffer_len",
        "swa_bounded_replay",
        "use_replayssm",
        "watermark",
        # The steps.
        "async_scheduling",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "max_num_active_seqs",
        "max_num_scheduled_tokens",
        "prefill_schedule_interval",
        "scheduler_reserve_full_isl",
        "stream_interval",
        "structured_outputs_config",
        # The processes of an engine.
        "cp_kv_cache_interleave_size",
        "cpu_distributed_timeout_seconds",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size",
        "dcp_q_replicate",
        "decode_context_parallel_size",
        "disable_nccl_for_dp_synchronization",
        "distributed_timeout_seconds",
        "dp_sync_interval",
        "enable_shm_tensor_arena",
        "expert_placement_strategy",
        "fail_on_environ_validation",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "shutdown_timeout",
        # Sleeping.
        "enable_cumem_allocator",
        "enable_nccl_comm_suspend",
        "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
        # Models that also see images, of which the text is trained.
        "language_model_only",
        "limit_mm_per_prompt",
        "skip_mm_profiling",
        # Its log and its profiles.
        "collect_detailed_traces",
        "cudagraph_metrics",
        "custom_histogram_buckets",
        "enable_layerwise_nvtx_tracing",
        "enable_log_requests",
        "enable_logging_iteration_details",
        "enable_mfu_metrics",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "otlp_traces_endpoint",
        "profiler_config",
        "show_hidden_metrics_for_version",
    }
)
"""The arguments that are passed as they are written."""
_RANDOM_WEIGHTS = "dummy"


def argument_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The problems with the names of vLLM's arguments, each with what to write instead."""
    for name, value in arguments.items():
        if setting := OWN_SETTINGS.get(name):
            yield f"{name} is agentrl's to pass: write {setting}"
        elif reason := REASONS.get(name):
            yield f"{name} may not be set: {reason}"
        elif name not in PASSED:
            known = PASSED | OWN_SETTINGS.keys()
            yield f"vLLM has no argument {name!r}.{nearest(name, sorted(known))}"
        elif name == "load_format" and value == _RANDOM_WEIGHTS:
            yield "load_format=dummy would sample from random weights: leave it out"


def typed_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as vLLM's own types, which are looked up in the installed vLLM.

    Raises:
        ValueError: vLLM has no such argument, or takes no such value; names every problem.
    """
    if not arguments:
        return {}
    with quiet_imports():
        from vllm.engine.arg_utils import AsyncEngineArgs

    types = {field.name: field.type for field in fields(AsyncEngineArgs)}
    typed: dict[str, Any] = {}
    problems = []
    for name, value in arguments.items():
        if name not in types:
            problems.append(f"{name}: the installed vLLM has no such argument")
            continue
        try:
            typed[name] = _typed(types[name], value)
        except ValueError as error:
            problems.append(f"{name}={value!r:.80}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    return typed


def _typed(kind: Any, value: Any) -> Any:
    """A value as this type. Of an enumeration, it may also be the name of a member.

    Raises:
        ValueError: it is none.
    """
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    for option in (kind, *get_args(kind)):
        members = option.__members__ if isinstance(option, type(Enum)) else {}
        if isinstance(value, str) and value.upper() in members:
            return members[value.upper()]
    try:
        adapter = TypeAdapter[Any](kind)
    except PydanticUserError:
        adapter = TypeAdapter[Any](kind, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        found = [
            ".".join(str(part) for part in (*problem["loc"], "")) + f" {problem['msg']}"
            for problem in error.errors(include_url=False)
        ]
        raise ValueError(", ".join(message.strip() for message in found[:3])) from error


__all__ = ["OWN_SETTINGS", "PASSED", "REASONS", "argument_problems", "typed_arguments"]
