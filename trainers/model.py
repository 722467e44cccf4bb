"""A Hugging Face model as a function of packed samples, with one output for each loss token.

The output is a policy's logprob of the token, or the reward that a critic expects before it.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.model_source import here
from agentrl.trainers.attention import ATTENTION
from agentrl.trainers.checkpoint import quiet
from agentrl.trainers.forward import (
    DeviceMicroBatch,
    check_attention,
    compute_logprobs_in,
    scaling_of,
    token_logprobs,
    token_values,
)
from agentrl.trainers.lora import Adapters
from agentrl.trainers.recomputation import recompute_blocks
from agentrl.trainers.settings import TrainerSettings
from agentrl.trainers.spec import TrainerSpec
from agentrl.trainers.trainable import AllWeights, TrainableParameters


class Predictor(nn.Module):
    """The model and the computation of its outputs as one module, which is called and sharded as a whole.

    `autocast`: compute matrix products in bfloat16, with float32 weights.
    """

    def __init__(self, model: Any, *, autocast: bool) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(self, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
        """One output for each loss token, float32, shape N; with `entropy` a policy's entropy too, shape 2N."""
        with torch.autocast(samples.tokens_S.device.type, torch.bfloat16) if self.autocast else nullcontext():
            return self.compute(samples, entropy=entropy)

    def compute(self, samples: DeviceMicroBatch, *, entropy: bool) -> Tensor:
        """See `forward`."""
        raise NotImplementedError


class LogprobPredictor(Predictor):
    """log softmax(logits / temperature) of each token, at the sampling temperature."""

    def __init__(self, model: Any, temperature: float, *, autocast: bool) -> None:
        super().__init__(model, autocast=autocast)
        compute_logprobs_in(model.get_output_embeddings(), scaling_of(model, temperature))

    def compute(self, samples: DeviceMicroBatch, *, entropy: bool) -> Tensor:
        """See `Predictor`."""
        return token_logprobs(self.model, samples, entropy=entropy)


class ValuePredictor(Predictor):
    """The value of each token: a linear head over the hidden state of the tokens before it."""

    def compute(self, samples: DeviceMicroBatch, *, entropy: bool) -> Tensor:
        """See `Predictor`. A value has no entropy."""
        return token_values(self.model, samples)


def in_bfloat16(settings: TrainerSettings, device: torch.device) -> bool:
    """Whether a trainer computes in bfloat16 on this device: by its settings, else wherever a GPU has it."""
    if settings.dtype is not None:
        return settings.dtype == "bfloat16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def load_model(
    spec: TrainerSpec, device: torch.device, *, autocast: bool = False
) -> tuple[Predictor, TrainableParameters]:
    """Load the spec's model in float32 and without dropout, like the policy that sampled; and its trainable parameters.

    A critic is the same model with a head of zeros in place of the output head, so its first values are all zero.

    Raises:
        ConfigError: the folder has no model, or one that cannot be trained exactly.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    folder, valued = here(spec.origin), spec.head == "value"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no Hugging Face model folder: there is no config.json in it")
    kind: Any = AutoModelForTokenClassification if valued else AutoModelForCausalLM
    options: dict[str, Any] = {"num_labels": 1} if valued else {}
    with quiet(warnings=not valued):  # about the missing head, which is made here
        model = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=spec.config.trust_remote_code,
            **options,
        )
    model.to(device).eval()
    check_attention(model)
    if valued:
        _zero_head(model)
    how = spec.config.recomputed(sum(parameter.numel() for parameter in model.parameters()))
    recompute_blocks(model, how, offload=spec.config.activation_offload)
    lora = spec.config.lora
    trainable = AllWeights.of(model, folder) if lora is None else Adapters.add(model, folder, lora)
    predictor = (
        ValuePredictor(model, autocast=autocast)
        if valued
        else LogprobPredictor(model, spec.temperature, autocast=autocast)
    )
    return predictor, trainable


def _zero_head(model: Any) -> None:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear head named `score`, as transformers' Llama, Qwen and their "
            "relatives have, so it cannot be a critic: take an algorithm without one, such as grpo"
        )
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
