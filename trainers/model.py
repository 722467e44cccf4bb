"""A Hugging Face causal language model as a policy: packed rows in, the logprobs of the loss tokens out."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.trainers.checkpoint import quiet
from agentrl.trainers.forward import MicroBatch, check_model, token_logprobs
from agentrl.trainers.lora import Adapters
from agentrl.trainers.rank import Plan
from agentrl.trainers.trained import AllWeights, Trained


class Policy(nn.Module):
    """The model and the temperature that it is sampled at, as one module: what is called and sharded as a whole.

    `autocast`: compute matrix products in bfloat16, by weights that are float32.
    """

    def __init__(self, model: Any, temperature: float, *, autocast: bool) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.autocast = autocast

    def forward(self, rows: MicroBatch) -> Tensor:
        """log softmax(logits / temperature) of each loss token, float32, shape N."""
        with torch.autocast(rows.tokens_BT.device.type, torch.bfloat16) if self.autocast else nullcontext():
            return token_logprobs(self.model, rows, self.temperature)


def load_policy(plan: Plan, device: torch.device, *, autocast: bool = False) -> tuple[Policy, Trained]:
    """The plan's model in float32, without dropout: as the policy that sampled; and what of it trains.

    Raises:
        ConfigError: there is no model in the folder, or one that cannot be trained exactly.
    """
    from transformers import AutoModelForCausalLM

    folder = plan.origin
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no Hugging Face model folder: there is no config.json in it")
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    model.to(device).eval()
    check_model(model)
    if plan.config.gradient_checkpointing:
        _without_dropout(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # checkpointing happens in training mode only
    lora = plan.config.lora
    trained = AllWeights.of(model, folder) if lora is None else Adapters.add(model, folder, lora)
    return Policy(model, plan.temperature, autocast=autocast), trained


def _without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
