"""The parts of vLLM that agentrl uses although vLLM promises none of them: `PRIVATE_NAMES`.

A test looks for each in the source of the installed vLLM (`tests/engines/test_vllm_names.py`), so
that an upgrade tells at once what has gone.
"""

from collections.abc import Mapping

TESTED_MINOR = "0.32"
"""The minor version of vLLM that agentrl is tested with; pyproject.toml asks for it."""

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    # What starts an engine, and its arguments.
    "vllm.engine.arg_utils:AsyncEngineArgs": (),
    "vllm.engine.arg_utils:EngineArgs": (
        "create_engine_config(usage_context)",
        "get_batch_defaults",
        "hf_overrides",
        "logging_config",
        "logprobs_mode",
        "max_logprobs",
        "speculative_config",
        "weight_transfer_config",
        "worker_extension_cls",
    ),
    "vllm.config.vllm:VllmConfig": (),
    "vllm.config.logging:LoggingConfig": ("pylogging_config_file",),
    "vllm.logger:DEFAULT_LOGGING_CONFIG": (),
    "vllm.config.weight_transfer:WeightTransferConfig": ("backend",),
    "vllm.usage.usage_lib:UsageContext": ("OPENAI_API_SERVER",),
    "vllm.platforms.interface:Platform": ("is_cpu", "supported_dtypes"),
    # The engine's client in the driver.
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "_run_output_handler",
        "abort(internal)",
        "collective_rpc(args)",
        "dead_error",
        "engine_core",
        "errored",
        "finish_weight_update(weight_version)",
        "from_vllm_config(stat_loggers, disable_log_stats)",
        "generate(priority)",
        "get_supported_tasks",
        "model_config",
        "output_handler",
        "output_processor",
        "pause_generation(mode, clear_cache)",
        "renderer",
        "resume_generation",
        "shutdown",
        "sleep(level, mode)",
        "start_weight_update",
        "update_weight_version",
        "update_weights",
        "wake_up(tags)",
    ),
    "vllm.v1.engine.core_client:MPClient": ("resources",),
    "vllm.v1.engine.core_client:BackgroundResources": ("ctx",),
    "vllm.v1.engine.output_processor:OutputProcessor": ("request_states",),
    "vllm.v1.engine.output_processor:RequestState": (
        "external_req_id",
        "is_prefilling",
        "request_id",
    ),
    # Requests and their outputs.
    "vllm.exceptions:VLLMClientError": (),
    "vllm.inputs.engine:tokens_input": ("cache_salt",),
    "vllm.logprobs:FlatLogprobs": ("end_indices", "logprobs", "start_indices", "token_ids"),
    "vllm.outputs:CompletionOutput": ("weight_versions",),
    "vllm.outputs:RequestOutput": ("num_cached_tokens",),
    "vllm.outputs:WeightVersionSpan": ("end", "start", "version"),
    "vllm.sampling_params:RequestOutputKind": ("CUMULATIVE", "FINAL_ONLY"),
    "vllm.sampling_params:SamplingParams": (
        "detokenize",
        "flat_logprobs",
        "output_kind",
        "prompt_logprobs",
        "structured_outputs",
    ),
    "vllm.sampling_params:StructuredOutputsParams": ("json", "json_object"),
    # Pictures.
    "vllm.config.scheduler:SchedulerConfig": (
        "encoder_cache_size",
        "max_num_encoder_input_tokens",
    ),
    "vllm.inputs.engine:MultiModalInput": (),
    "vllm.inputs.engine:mm_input": ("cache_salt",),
    "vllm.multimodal.inputs:MultiModalKwargsItem": ("get_data",),
    "vllm.multimodal.inputs:MultiModalKwargsItems": ("from_hf_inputs",),
    "vllm.multimodal.inputs:PlaceholderRange": (),
    "vllm.multimodal.processing.processor:BaseMultiModalProcessor": ("_get_mm_fields_config",),
    "vllm.renderers.base:BaseRenderer": ("get_mm_processor", "get_tokenizer"),
    # The statistics of a step.
    "vllm.v1.metrics.loggers:StatLoggerBase": ("log_engine_initialized", "record"),
    "vllm.v1.metrics.stats:IterationStats": (
        "num_generation_tokens",
        "num_preempted_reqs",
        "prompt_token_stats",
    ),
    "vllm.v1.metrics.stats:PromptTokenStats": ("cached_tokens", "computed"),
    "vllm.v1.metrics.stats:SchedulerStats": (
        "kv_cache_usage",
        "num_running_reqs",
        "spec_decoding_stats",
    ),
    "vllm.v1.spec_decode.metrics:SpecDecodingStats": ("num_accepted_tokens", "num_draft_tokens"),
    # Signs of life: a worker in the core's process, or one whose answers the core unpickles.
    "vllm.config.parallel:ParallelConfig": ("distributed_executor_backend",),
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue": ("dequeue",),
    "vllm.v1.worker.worker_base:WorkerBase": ("parallel_config",),
    # The memory that sleeping frees.
    "vllm.device_allocator:AllocationData": ("handle", "tag"),
    "vllm.device_allocator.cumem:CuMemAllocator": ("get_instance", "pointer_to_data"),
    # New weights in the workers.
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": (
        "finish_weight_update",
        "init_info_cls",
        "init_transfer_engine",
        "parse_update_info",
        "receive_weights",
        "start_weight_update",
        "update_info_cls",
        "update_weights",
    ),
    "vllm.distributed.weight_transfer.base:WeightTransferInitInfo": (),
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo": (),
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateRequest": (),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": ("register_engine",),
    # vLLM's reload of a model, layer by layer.
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": (),
    "vllm.model_executor.layers.attention:is_deferred_attention_layer": (),
    "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead": (),
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload": (),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": (),
    "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload": (),
    "vllm.model_executor.model_loader.reload.layerwise:record_metadata_for_reloading": (),
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": ("can_load", "load_numel"),
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": ("cpu_linear",),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase": (
        "moe_kernel",
    ),
    "vllm.model_executor.models.gpt_oss:GptOssForCausalLM": ("hf_to_vllm_mapper",),
    # Adapters beside a model's weights.
    "vllm.config.model:ModelConfig": (),
    "vllm.model_executor.models.interfaces:supports_lora": (),
    "vllm.lora.lora_model:LoRAModel": (),
    "vllm.lora.lora_weights:LoRALayerWeights": (),
    "vllm.lora.model_manager:LoRAModelManager": (
        "_get_punica_wrapper",
        "activate_adapter",
        "add_adapter",
        "remove_adapter",
    ),
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU": ("add_lora_linear",),
    "vllm.lora.request:LoRARequest": (),
    "vllm.lora.utils:parse_fine_tuned_lora_name": (),
    "vllm.lora.worker_manager:WorkerLoRAManager": ("add_dummy_lora",),
}
"""By module and object: the attributes of the object, methods with the parameters that are passed
by name.
"""
