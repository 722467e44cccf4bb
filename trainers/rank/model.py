"""A Hugging Face model as a function of packed samples, with one output for each loss token.

The output is a policy's logprob of the token, or the reward that a critic expects before it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.batch import TrainingSample, collate
from agentrl.errors import ConfigError
from agentrl.models.attention_check import check_context, check_kind
from agentrl.models.last_layer import compute_only_needed
from agentrl.models.routing import Balance, layers_with_experts, take_choices
from agentrl.models.source import here
from agentrl.models.vision import attention_of, auto_class
from agentrl.models.weight_names import WeightNames
from agentrl.tokens.arrays import floats, ints, mask
from agentrl.trainers.compute.attention import ATTENTION
from agentrl.trainers.compute.compiled import compile_blocks
from agentrl.trainers.compute.context import ContextGroup
from agentrl.trainers.compute.forward import (
    DeviceMicroBatch,
    check_choices,
    compute_logprobs_in,
    scaling_of,
    to_device,
    token_logprobs,
    token_values,
)
from agentrl.trainers.compute.recomputation import recompute_blocks
from agentrl.trainers.compute.tensor import TensorGroup, VocabularyPart
from agentrl.trainers.packing import micro_batches
from agentrl.trainers.rank.checkpoint import quiet
from agentrl.trainers.rank.lora import Adapters, first_factor
from agentrl.trainers.rank.origin import (
    Origin,
    load_by_transformers,
    on_meta,
    state_by_name,
    stored_tensors,
)
from agentrl.trainers.rank.seeing import check_seeing, freeze_parts
from agentrl.trainers.rank.sharding import Sharding
from agentrl.trainers.rank.trainable import AllWeights, TrainableParameters
from agentrl.trainers.settings import TrainerSettings
from agentrl.trainers.spec import TrainerSpec


class Predictor(nn.Module):
    """The model and the computation of its outputs as one module, which is called and sharded as a
    whole.

    `autocast`: compute matrix products in bfloat16, with float32 weights. `balance`: watches the
    routers of a mixture of experts. `tensor`: the ranks over which the model's matrices have been
    divided.
    """

    def __init__(self, model: Any, *, autocast: bool, balance: Balance | None = None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        self.balance = balance
        self.tensor: TensorGroup | None = None

    def forward(self, samples: DeviceMicroBatch | None, *, entropy: bool = False) -> Tensor:
        """One output for each loss token, float32, shape N; with `entropy` a policy's entropy too,
        shape 2N.

        Where the balance of experts is asked for (`times_S`), all of these are flat, and followed
        by `Balance.sums`. Without samples, `prepare`.
        """
        if samples is None:
            self.prepare()
            return torch.zeros(())
        check_context(
            self.model.config,
            samples.segments.longest,
            f"a sample has {samples.segments.longest} tokens",
        )
        with (
            torch.autocast(samples.tokens_S.device.type, torch.bfloat16)
            if self.autocast
            else nullcontext()
        ):
            if self.balance is None or samples.times_S is None:
                return self.compute(samples, entropy=entropy)
            with self.balance.recording():
                found = self.compute(samples, entropy=entropy)
        return torch.cat([found.flatten(), self.balance.sums(samples.times_S).flatten()])

    def prepare(self) -> None:
        """Prepare the model once, with the weights in place, before it is used."""

    def compute(self, samples: DeviceMicroBatch, *, entropy: bool) -> Tensor:
        """See `forward`."""
        raise NotImplementedError


def check_context_parallel(
    model: Any,
    predict: Callable[[DeviceMicroBatch], Tensor],
    device: torch.device,
    context: ContextGroup,
) -> None:
    """Compare the outputs of a model for a short sample whose tokens are cut over ranks with those
    of the whole sample. All ranks have to call it at the same time.

    Raises:
        ConfigError: they differ, because layers look at other tokens in other ways than by
            attention.
    """
    length, vocab = 2 * context.ranks, model.config.get_text_config().vocab_size
    tokens, none, nothing = np.arange(1, length + 1) * 7 % vocab, ints([0] * length), [0.0] * length
    is_loss = mask(np.arange(length) > 0)
    sample = TrainingSample(ints(tokens), is_loss, floats(nothing), floats(nothing), none, none)
    ((micro_batch,),) = micro_batches(collate([sample]), length)
    with torch.no_grad():
        cut_N = predict(to_device(micro_batch, device, context=context))
        whole_N = predict(to_device(micro_batch, device))
    difference, size = float((cut_N - whole_N).norm()), float(whole_N.norm())
    if not difference <= (1e-3 if device.type == "cpu" else 0.05) * size:
        raise ConfigError(
            f"{type(model).__name__} computes other outputs for a sample whose tokens are cut over"
            f" ranks than for the whole one (they differ by {difference:.2g}, of {size:.2g}): some"
            " of its layers look at other tokens in other ways than by attention. Write"
            " trainer.context_parallel=1"
        )


class LogprobPredictor(Predictor):
    """log softmax(logits / temperature) of each token, at the sampling temperature."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        *,
        autocast: bool,
        balance: Balance | None = None,
        takes_choices: bool = False,
    ) -> None:
        super().__init__(model, autocast=autocast, balance=balance)
        self.temperature = temperature
        self.takes_choices = takes_choices

    def prepare(self) -> None:
        """See `Predictor`."""
        head, tensor = self.model.get_output_embeddings(), self.tensor
        part = (
            None
            if tensor is None
            else VocabularyPart(tensor, self.model.get_input_embeddings().num_embeddings)
        )
        compute_logprobs_in(head, scaling_of(self.model, self.temperature), part)
        if self.takes_choices:
            check_choices(self.model)

    def compute(self, samples: DeviceMicroBatch, *, entropy: bool) -> Tensor:
        """See `Predictor`."""
        return token_logprobs(self.model, samples, entropy=entropy)


class ValuePredictor(Predictor):
    """The value of each token: a linear head over the hidden state of the tokens before it."""

    def compute(self, samples: DeviceMicroBatch, *, entropy: bool) -> Tensor:
        """See `Predictor`. A value has no entropy."""
        return token_values(self.model, samples, self.tensor)


def in_bfloat16(settings: TrainerSettings, device: torch.device) -> bool:
    """True if a trainer computes in bfloat16 on this device: by its settings, else wherever a GPU
    has it.
    """
    if settings.dtype is not None:
        return settings.dtype == "bfloat16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def make_model(
    spec: TrainerSpec, *, autocast: bool = False
) -> tuple[Predictor, TrainableParameters, Origin]:
    """Make the spec's model in float32 and without dropout, like the policy that sampled; its
    trainable parameters; and where its values are. Its parameters are on the meta device. When they
    have memory, `begin` fills them.

    A critic is the same model with a head of zeros in place of the output head, so its first values
    are all zero.

    Raises:
        ConfigError: the folder has no model, or one that cannot be trained exactly.
    """
    from transformers import AutoConfig, AutoModelForTokenClassification

    folder, valued = here(spec.origin), spec.head == "value"
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is no Hugging Face model folder: there is no config.json in it"
        )
    options: dict[str, Any] = {"trust_remote_code": spec.config.trust_remote_code}
    options |= {"num_labels": 1} if valued else {}
    with quiet(), on_meta():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        check_kind(config, folder, trust_remote_code=spec.config.trust_remote_code)
        check_seeing(spec, config)
        kind: Any = AutoModelForTokenClassification if valued else auto_class(config)
        model = kind.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_of(config, ATTENTION),
            trust_remote_code=spec.config.trust_remote_code,
        )
    model.eval()
    frozen = freeze_parts(model, spec)
    compute_only_needed(model)
    balance = _router_balance(model, spec)
    if spec.routing != "off":
        _use_engine_choices(model, spec)
    stored, before = stored_tensors(model), state_by_name(model)
    # A folder may have a tied tensor under any of its names.
    others = {
        name: [
            other
            for other, tied in model.state_dict(keep_vars=True).items()
            if tied is tensor and other != name
        ]
        for name, tensor in before.items()
    }
    made: dict[str, Callable[[], Tensor]] = {}
    if valued:
        made |= {
            name: partial(torch.zeros, shape) for name, shape in _value_head_shapes(model).items()
        }
    if spec.config.compile:
        compile_blocks(model)
    how = spec.config.recomputed(sum(parameter.numel() for parameter in model.parameters()))
    recompute_blocks(model, how, offload=spec.config.activation_offload)
    lora = spec.config.lora
    trainable: TrainableParameters
    if lora is None:
        trainable = AllWeights(
            model,
            folder,
            {name: weight.shape for name, weight in before.items()},
            WeightNames.of(model),
            stored,
            frozen,
        )
    else:
        with on_meta():
            trainable = Adapters.add(model, folder, lora, stored)
        made |= {
            name: partial(first_factor, name, shape) for name, shape in trainable.shapes.items()
        }
    # Adapters wrap layers, whose tensors have longer names since.
    now = {id(tensor): name for name, tensor in state_by_name(model).items()}
    names = {name: now[id(tensor)] for name, tensor in before.items()}
    stored = [replace(one, of=names[one.of]) for one in stored if names[one.of] not in made]
    predictor = (
        ValuePredictor(model, autocast=autocast)
        if valued
        else LogprobPredictor(
            model,
            spec.temperature,
            autocast=autocast,
            balance=balance,
            takes_choices=spec.routing != "off",
        )
    )
    load = partial(load_by_transformers, kind, folder, options)
    return predictor, trainable, Origin(folder, stored, others, made, names, load)


def _router_balance(model: Any, spec: TrainerSpec) -> Balance | None:
    """The recorder of the routers of a policy, if they are balanced by a loss.

    Raises:
        ConfigError: the model has no routers.
    """
    coefficient = spec.config.router_aux_loss_coef
    if spec.head != "policy" or not coefficient:
        return None
    try:
        return Balance(model)
    except ValueError as error:
        raise ConfigError(
            f"trainer.router_aux_loss_coef is {coefficient:g}, and {error}: only a mixture of"
            " experts of transformers has any to balance. Leave the setting out"
        ) from error


def _use_engine_choices(model: Any, spec: TrainerSpec) -> None:
    """Let a policy take the experts that the engine chose.

    Raises:
        ConfigError: it has none.
    """
    if not layers_with_experts(model):
        raise ConfigError(
            f"trainer.routing={spec.routing}, and {type(model).__name__} has no layers of experts"
            " that choose among them: only a mixture of experts of transformers has. Leave the"
            " setting out"
        )
    take_choices(model)


def begin(sharding: Sharding, origin: Origin) -> None:
    """Read the model's first values, and prepare it."""
    origin.fill(sharding)
    sharding.prepare()


def _value_head_shapes(model: Any) -> dict[str, torch.Size]:
    """The parameters of a critic's head."""
    head = dict(model.named_children()).get("score")
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear head named `score`, as transformers' Llama, Qwen"
            " and their relatives have, so it cannot be a critic: take an algorithm without one,"
            " such as grpo"
        )
    return {f"score.{name}": parameter.shape for name, parameter in head.named_parameters()}
