"""Runs packed rows through a Hugging Face model, for the logprobs or the values of the loss tokens only.

Dimension suffixes: B rows, T columns, N loss tokens of the micro-batch, flattened in row order.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from agentrl.errors import ConfigError
from agentrl.trainers.packing import MicroBatch, lay


@dataclass(frozen=True, slots=True)
class DeviceMicroBatch:
    """Rows as tensors on the device.

    `attention_B1TT`: true where a token may attend to a column: in its own segment, up to itself.
    `predictors_N`: for each loss token, the flat index into B * T of the token before it.
    `support_NS`: for each loss token, the ids that it was sampled from, filled up with -1. A row of -1 is the whole
    vocabulary; `None` means that for all.
    """

    tokens_BT: Tensor
    position_ids_BT: Tensor
    attention_B1TT: Tensor
    predictors_N: Tensor
    targets_N: Tensor
    rollout_logprobs_N: Tensor
    reference_logprobs_N: Tensor
    advantages_N: Tensor
    segments_N: Tensor
    weights_N: Tensor
    support_NS: Tensor | None


def to_device(micro_batch: MicroBatch, device: torch.device) -> DeviceMicroBatch:
    """Lay out a micro-batch, move it to a device and build its mask there."""

    def move(array: Any) -> Tensor:
        wide = array.astype(np.int64 if array.dtype == np.int32 else array.dtype)  # a copy; torch indexes with int64
        return torch.from_numpy(wide).to(device, non_blocking=True)

    rows, samples = lay(micro_batch), micro_batch.samples
    segments_BT = move(rows.segments_BT)
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return DeviceMicroBatch(
        tokens_BT=move(rows.tokens_BT),
        position_ids_BT=move(rows.positions_BT),
        attention_B1TT=same_BTT.tril()[:, None],
        predictors_N=move(rows.loss_mask_BT.ravel().nonzero()[0] - 1),
        targets_N=move(rows.tokens_BT[rows.loss_mask_BT]),
        rollout_logprobs_N=move(samples.rollout_logprobs_N),
        reference_logprobs_N=move(samples.reference_logprobs_N),
        advantages_N=move(samples.advantages_N),
        segments_N=move(rows.segments_BT[rows.loss_mask_BT]),
        weights_N=move(samples.weights_N),
        support_NS=move(samples.support_N.padded(-1)) if len(samples.support_N.values) else None,
    )


def token_logprobs(model: Any, rows: DeviceMicroBatch, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of each loss token, float32, shape N, over the ids that it was sampled from.

    The output head runs only at the N positions that predict a loss token. A token that was sampled from a part of the
    vocabulary is normalised over the same part ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556), so that its
    ratio to the engine's probability is exact.
    """
    logits_NV = model.get_output_embeddings()(_before(model, rows)).float() / temperature
    if rows.support_NS is None:
        return -cross_entropy(logits_NV, rows.targets_N, reduction="none")
    return _over_support(logits_NV, rows.targets_N, rows.support_NS)


def _over_support(logits_NV: Tensor, targets_N: Tensor, support_NS: Tensor) -> Tensor:
    own_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    part_N = support_NS[:, 0] >= 0
    logprobs_N = own_N.new_zeros(len(own_N))
    ids_NS = support_NS[part_N]
    kept_NS = logits_NV[part_N].gather(1, ids_NS.clamp(min=0)).masked_fill(ids_NS < 0, float("-inf"))
    logprobs_N[part_N] = own_N[part_N] - kept_NS.logsumexp(dim=1)
    logprobs_N[~part_N] = -cross_entropy(logits_NV[~part_N], targets_N[~part_N], reduction="none")
    return logprobs_N


def token_values(model: Any, rows: DeviceMicroBatch) -> Tensor:
    """The output of the model's value head before each loss token, float32, shape N."""
    values_N1: Tensor = model.score(_before(model, rows)).float()
    return values_N1[:, 0]


def _before(model: Any, rows: DeviceMicroBatch) -> Tensor:
    """The last hidden states of the tokens before the loss tokens, shape (N, H)."""
    hidden_BTH: Tensor = model.base_model(
        input_ids=rows.tokens_BT,
        attention_mask=rows.attention_B1TT,
        position_ids=rows.position_ids_BT,
        use_cache=False,
    ).last_hidden_state
    return hidden_BTH.flatten(0, 1).index_select(0, rows.predictors_N)


def check_attention(model: Any) -> None:
    """Refuse a model whose attention is not plain causal attention.

    Our own mask would replace a sliding window.

    Raises:
        ConfigError: the model has another kind of attention.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (not hasattr(config, "layer_types") and getattr(config, "sliding_window", None)):
        raise ConfigError(
            f"{type(model).__name__} has attention layers of the kinds {sorted(kinds)}, with a sliding window of "
            f"{getattr(config, 'sliding_window', None)}; packed training supports full attention only"
        )


def check_head(model: Any) -> None:
    """Refuse a model whose logits are not just the output head over the last hidden state.

    Raises:
        ConfigError: the logits differ.
    """
    config = model.config.get_text_config()
    tokens_BT = torch.arange(8, device=model.device)[None] % config.vocab_size
    with torch.no_grad():
        expected = model(input_ids=tokens_BT, use_cache=False).logits
        got = model.get_output_embeddings()(model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state)
    if not torch.allclose(expected.float(), got.float(), rtol=1e-3, atol=1e-3):
        raise ConfigError(
            f"the logits of {type(model).__name__} are not its output embedding over its last hidden state (it caps "
            "or scales them), so the trainer would compute other logprobs than the engine; such models need a trainer "
            "of their own"
        )
