"""The settings of every trainer: the optimizer, its schedule, and how a batch is cut up."""

from typing import Annotated, Literal

from pydantic import Field

from agentrl.placement.footprint import TrainerLayout
from agentrl.protocols import Settings


class LoraSettings(Settings):
    """Train small adapters instead of the model's weights. They have no dropout: the policy that trains is the one
    that samples.
    """

    rank: Annotated[int, Field(ge=1)] = 16
    """The rank of each update."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An update is scaled by alpha / rank."""

    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The layers that get adapters, by the ends of their names, as [q_proj, v_proj]; or all linear ones except the
    head."""


class TrainerSettings(Settings):
    """AdamW, a learning rate schedule, packing and accumulation."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's denominator floor."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, of matrices only: norms and biases are left alone."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients with a larger norm than this are scaled down to it; null: never."""

    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly; the first step already has 1/warmup_steps of it."""

    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate at the end of the cosine, as a share of `lr`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation. Weights, gradients and optimizer are float32 either way."""

    micro_batch_tokens: Annotated[int, Field(ge=2)] = 4096
    """Tokens that go through the model at once, as samples end to end; attention never crosses from one to another. A
    longer sample goes alone. Changes memory and speed, not the result."""

    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per batch, each on its own part of the samples."""

    activation_checkpointing: Literal["none", "full"] = "none"
    """Activations that are computed again in the backward pass instead of kept: `none`, or all of a layer (`full`)."""

    lora: LoraSettings | None = None
    """Train low-rank adapters, and freeze the model's own weights; `lora: {}` is rank 16 in all linear layers."""

    def layout(self) -> TrainerLayout:
        """How the trainer is divided over its ranks, to estimate memory and time before a run."""
        return TrainerLayout(
            precision="float32" if self.dtype == "float32" else "autocast",
            micro_batch_tokens=self.micro_batch_tokens,
            minibatches=self.minibatches,
            recompute=self.activation_checkpointing,
            lora_rank=self.lora.rank if self.lora else 0,
        )
