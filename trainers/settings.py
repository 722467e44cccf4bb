"""The settings of every trainer: the optimizer, its schedule, and how a batch is cut up."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from agentrl.package.distribution import install_command
from agentrl.placement.footprint import Recompute, TrainerLayout
from agentrl.settings.base import Settings

RECOMPUTE_FROM_PARAMETERS = 10**9
"""Parameters of a model whose activations are computed again by default."""
MOST_TOKENS = 16_384
"""Most tokens of a micro-batch by default."""
RoutingMode = Literal["off", "compare", "replay"]
MomentType = Literal["float32", "bfloat16", "int8"]
_MOMENT_BYTES: dict[MomentType, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}
"""Bytes of a moment of a parameter."""
_MAX_BFLOAT16_BETA = 0.99
"""The largest decay rate of bfloat16 moments. Neighbouring bfloat16 numbers differ by up to 1/128,
so a smaller relative change of a moment is rounded away.
"""


class LoraSettings(Settings):
    """Train small adapters instead of the model's weights. They have no dropout: the policy that
    trains is the one that samples.
    """

    rank: Annotated[int, Field(ge=1)] = 16
    """The rank of each update."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An update is scaled by alpha / rank."""

    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The layers that get adapters, by the ends of their names, as [q_proj, v_proj]; or all linear
    ones except the head; of a mixture of experts, those of attention."""

    @property
    def names(self) -> tuple[str, ...]:
        """The targets that are named; none for all."""
        return () if self.targets == "all-linear" else self.targets


class TrainerSettings(Settings):
    """AdamW, a learning rate schedule, packing and accumulation."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """AdamW's decay rates of the two moments."""

    eps: Annotated[float, Field(ge=1e-30)] = 1e-8
    """AdamW's denominator floor."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, of matrices only: norms and biases are left alone."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients with a larger norm than this are scaled down to it; null: never."""

    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly; the first step already has 1/warmup_steps
    of it.
    """

    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate at the end of the cosine, as a share of `lr`."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the computation. Weights, gradients and optimizer are float32 either way. By
    default bfloat16 on GPUs that have it, and float32 on CPUs."""

    micro_batch_tokens: Annotated[int, Field(ge=2)] | None = None
    """Tokens that go through the model at once, as samples end to end; attention never crosses from
    one to another. A prefix that samples share is computed once, and its repetitions count an
    eighth. A longer sample goes alone, and the ranks beside it compute as many tokens as it has.
    Changes memory and speed, not the result. By default as many as the longest context of the
    engine, at most 16,384 for each rank that computes them."""

    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per batch, each on its own part of the samples."""

    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """The old logprobs of the loss, where there are several minibatches: the trainer's own before
    its first update, which takes a forward pass over all minibatches but the first; or the
    engine's, which need none. These are the same numbers if the engine has the trainer's weights
    and precision; otherwise the ratio is to what was sampled from, and there is no importance
    weight between the two."""

    moments: MomentType = "float32"
    """What AdamW keeps its two moments in, while it computes updates in float32. `bfloat16` takes 4
    bytes less for each parameter, `int8` (codes with a scale for each block, arXiv:2110.02861) 6
    less. Not of `deepspeed`."""

    router_aux_loss_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Of a mixture of experts: the weight of a loss that lets the routers use all experts equally,
    added to the loss of each optimizer step. It is transformers' `load_balancing_loss_func`, over
    all tokens of the samples of a minibatch, however these are packed and divided over ranks; this
    takes one more forward pass, unless one rank computes a minibatch at once. 0: without it. Not of
    a critic."""

    routing: RoutingMode = "off"
    """Of a mixture of experts: what is done with the experts that the engine chose for each token.
    `replay` computes with them, instead of those that the trainer's routers like best, so that both
    compute the same function; a router learns by its scores of them. `compare` only tells how often
    the trainer chooses others (`routing_difference`). A token takes a byte or two for each layer
    and chosen expert ([model-families.md](model-families.md#routing-replay))."""

    activation_checkpointing: Recompute | None = None
    """Activations that are computed again in the backward pass instead of kept: `none`; all of a
    layer except its matrix products and its attention (`selective`, not with ZeRO 3); or all except
    its inputs (`full`). By default `full` for models of a billion parameters or more, and with
    `activation_offload`; otherwise `none`."""

    activation_offload: bool = False
    """Keep the inputs of layers, which are there to compute the rest again, in CPU memory, if the
    devices are GPUs.
    """

    compile: bool = False
    """Compile all layers but the last by `torch.compile`, without their attention. The first steps
    take minutes longer, and other lengths of samples compile nothing again. Not with mixtures of
    experts, selective recomputation, `tensor_parallel` or `deepspeed`."""

    fp8: bool = False
    """Let the linear layers of the decoder multiply in fp8 (torchao), with a scale for each token
    and each output; weights and their gradients stay as they are. `logprob_gap_mean` says how far
    the trainer is then from the engine. GPUs of compute capability 8.9 or more; CPUs only round as
    these do. Not with `lora`, `compile`, `tensor_parallel` or `deepspeed`."""

    trust_remote_code: bool = False
    """Run the code that comes with the model; `model.trust_remote_code` sets it for all parts of a
    run.
    """

    lora: LoraSettings | None = None
    """Train low-rank adapters, and freeze the model's own weights; `lora: {}` is rank 16 in all
    linear layers.
    """

    train_tower: bool = False
    """Of a model that sees: train its tower too. By default it stays as it is: it takes neither
    gradients nor moments, and is not sent to the engines. Not with `lora`."""

    train_projector: bool = False
    """Of a model that sees: train its projector too, which makes the tower's features the language
    model's. Not with `lora`."""

    sees: ClassVar[bool] = True
    """True if models that see can be trained."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.moments == "bfloat16" and max(self.betas) > _MAX_BFLOAT16_BETA:
            raise ValueError(
                f"betas of {self.betas} change a moment by less than bfloat16 can tell: write betas"
                f" of at most {_MAX_BFLOAT16_BETA}, or moments: int8 or float32"
            )
        if self.compile and self.activation_checkpointing == "selective":
            raise ValueError(
                "compile makes one program of a layer's operators, and activation_checkpointing:"
                " selective keeps the results of some of them: write full or none, or leave compile"
                " out"
            )
        if self.fp8 and (self.lora is not None or self.compile):
            other = "compile" if self.lora is None else "lora"
            raise ValueError(
                f"fp8 replaces linear layers, and has not been tried with {other}: leave one of"
                " them out"
            )
        return self

    def learning_rate(self, step: int, total_steps: int) -> float:
        """The rate of step `step`, counted from 0 in calls of `Trainer.step`: a pure function, so
        the only scheduler state of a resumed run is the step.

        A linear warm-up, then constant, or half a cosine from `lr` down to `min_lr_ratio * lr` at
        `total_steps` (SGDR, arXiv:1608.03983, equation 5, without restarts). Steps beyond
        `total_steps` keep the last rate.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        low = self.min_lr_ratio * self.lr
        return low + (self.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))

    @property
    def tokens_at_once(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_tokens or MOST_TOKENS * self.ranks_of_a_sample

    @property
    def ranks_of_a_sample(self) -> int:
        """Ranks over which the tokens of a sample are cut."""
        return 1

    def within(self, context: int) -> Self:
        """The same, with micro-batches for samples of up to `context` tokens where the settings say
        nothing.
        """
        chosen = max(2, min(context, self.tokens_at_once))
        return self.model_copy(update={"micro_batch_tokens": self.micro_batch_tokens or chosen})

    def chosen(self, *, parameters: int, context: int, gpu: bool) -> Self:
        """The same, with what is chosen by the model and its devices, for a plan before the run."""
        return self.within(context).model_copy(
            update={
                "dtype": self.dtype or ("bfloat16" if gpu else "float32"),
                "activation_checkpointing": self.recomputed(parameters),
            }
        )

    def recomputed(self, parameters: int) -> Recompute:
        """The activations that a model of so many parameters computes again."""
        large = self.activation_offload or parameters >= RECOMPUTE_FROM_PARAMETERS
        return self.activation_checkpointing or ("full" if large else "none")

    def needs(self) -> Mapping[str, str]:
        """See `Settings`."""
        needed = {"peft": install_command("lora")} if self.lora else {}
        return needed | ({"torchao": install_command("fp8")} if self.fp8 else {})

    def layout(self) -> TrainerLayout:
        """How the trainer is divided over its ranks, to estimate memory and time before a run."""
        return TrainerLayout(
            precision="autocast" if self.dtype == "bfloat16" else "float32",
            micro_batch_tokens=self.tokens_at_once,
            minibatches=self.minibatches,
            recompute=self.activation_checkpointing or "none",
            activation_offload=self.activation_offload,
            lora_rank=self.lora.rank if self.lora else 0,
            lora_targets=self.lora.names if self.lora else (),
            trains_tower=self.train_tower or self.train_projector,
            moment_bytes=_MOMENT_BYTES[self.moments],
        )
