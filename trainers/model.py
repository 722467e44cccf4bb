"""A Hugging Face causal language model as a policy: packed rows in, the logprobs of the loss tokens out."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.trainers.checkpoint import no_progress_bars
from agentrl.trainers.forward import MicroBatch, check_model, token_logprobs


class Policy(nn.Module):
    """The model and the temperature that it is sampled at, as one module: what is called and sharded as a whole."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, rows: MicroBatch) -> Tensor:
        """log softmax(logits / temperature) of each loss token, float32, shape N."""
        return token_logprobs(self.model, rows, self.temperature)


def load_policy(folder: Path, temperature: float, device: torch.device, *, recompute: bool) -> Policy:
    """The model of a Hugging Face folder in float32, without dropout: as the policy that sampled.

    `recompute`: compute activations twice instead of keeping them.

    Raises:
        ConfigError: there is no model in the folder, or one that cannot be trained exactly.
    """
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no Hugging Face model folder: there is no config.json in it")
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    model.to(device).eval()
    check_model(model)
    if recompute:
        _without_dropout(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # checkpointing happens in training mode only
    return Policy(model, temperature)


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer: matrices decay, norms and biases do not."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
