"""The logprobs of tokens, and entropies, from hidden states and an output head, with the logits of
few tokens at once.

The backward pass computes the logits again. Memory does not grow with the number of tokens, and the
products are as many as with checkpointing. Dimension suffixes: N tokens, C tokens of a piece, H
hidden size, V vocabulary or this rank's part of it, S kept ids.

If the vocabulary is divided over ranks, each has the logits of its ids, and they exchange a few
numbers for each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from agentrl.placement.footprint import LOGIT_BYTES, LOGITS_AT_ONCE
from agentrl.trainers.compute.tensor import VocabularyPart

MOST_AT_ONCE = 4096
"""Tokens of a piece on a GPU: more are not faster."""
FREE_SHARE = 0.25
"""Part of a GPU's free memory that a piece may take."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scaling of a model's outputs to logits, with the temperature: cap tanh(factor x / cap) /
    temperature.

    Without a cap: factor x / temperature.
    """

    temperature: float = 1.0
    factor: float = 1.0
    cap: float | None = None

    def apply(self, outputs_CV: Tensor) -> Tensor:
        """The logits, in float32; in place where that is possible."""
        logits_CV = outputs_CV.float()
        if self.cap is None:
            return logits_CV.mul_(self.factor / self.temperature)
        return logits_CV.mul_(self.factor / self.cap).tanh_().mul_(self.cap / self.temperature)

    def backward(self, grad_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """The gradient of the head's outputs, from that of the logits; in place."""
        grad_CV.mul_(self.factor / self.temperature)
        if self.cap is None:
            return grad_CV
        # -inf: could not be sampled.
        capped_CV = logits_CV.nan_to_num(neginf=0.0) * (self.temperature / self.cap)
        return grad_CV.mul_(1 - capped_CV.square_())


def linear_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    scaling: Scaling,
    *,
    bias_V: Tensor | None = None,
    support_NS: Tensor | None = None,
    entropy: bool = False,
    part: VocabularyPart | None = None,
) -> Tensor:
    """log softmax(logits) of each target, differentiable, float32, shape N.

    `support_NS`: the ids that a token was sampled from, filled up with -1, over which it is
    normalised; a row of -1 is the whole vocabulary. With `entropy`, the shape is 2N: the logprobs,
    and -sum p log p over the same ids, in nats.

    With a `part`, weights and bias are those of its ids. The results are the same on each rank, and
    the gradient of the hidden states is this rank's share.
    """
    inputs = (hidden_NH, weight_VH, bias_V, targets_N, support_NS, scaling, entropy, part)
    found: Tensor = _LinearLogprobs.apply(*inputs)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class _Head:
    """An output head. `low`: its products are in bfloat16."""

    weight_VH: Tensor
    bias_V: Tensor | None
    scaling: Scaling
    low: bool
    part: VocabularyPart | None = None

    def logits(self, hidden_CH: Tensor, support_CS: Tensor | None) -> Tensor:
        """Logits in float32, -inf outside of a token's support."""
        kind = torch.bfloat16 if self.low else self.weight_VH.dtype
        bias_V = None if self.bias_V is None else self.bias_V.to(kind)
        logits_CV = self.scaling.apply(linear(hidden_CH.to(kind), self.weight_VH.to(kind), bias_V))
        if support_CS is not None:
            # The last column takes what fills up the rows.
            left_out = torch.ones(
                len(logits_CV), logits_CV.shape[1] + 1, dtype=torch.bool, device=logits_CV.device
            )
            ids_CS, is_own_CS = (
                (support_CS, support_CS >= 0) if self.part is None else self.part.own(support_CS)
            )
            left_out.scatter_(1, ids_CS.where(is_own_CS, logits_CV.shape[1]), value=False)
            left_out &= support_CS[:, :1] >= 0
            logits_CV.masked_fill_(left_out[:, :-1], float("-inf"))
        return logits_CV

    def forward(
        self,
        hidden_CH: Tensor,
        targets_C: Tensor,
        support_CS: Tensor | None,
        found_3C: Tensor,
        *,
        entropy: bool,
    ) -> None:
        """Find the logits of the targets, and the entropies (if asked for) and the logsumexps of
        all logits. Of targets that other ranks have, the logits are 0.
        """
        logits_CV = self.logits(hidden_CH, support_CS)
        totals_C = logits_CV.logsumexp(1)
        ids_C, is_own_C = self._own(targets_C)
        found_3C[0] = logits_CV.gather(1, ids_C[:, None])[:, 0].where(is_own_C, 0.0)
        found_3C[2] = totals_C
        if entropy:
            logprobs_CV = logits_CV.sub_(totals_C[:, None]).clamp_(min=_NEVER)
            found_3C[1] = -torch.linalg.vecdot(logprobs_CV.exp(), logprobs_CV)

    def backward(
        self,
        hidden_CH: Tensor,
        targets_C: Tensor,
        support_CS: Tensor | None,
        found_2C: Tensor,
        grads_2C: Tensor,
        *,
        entropy: bool,
    ) -> Tensor:
        """The gradient of the head's outputs, from those of the logprobs and entropies.

        `found_2C` are the entropies and the logsumexps.
        """
        entropies_C, totals_C = found_2C[:, :, None]
        grad_C, grad_entropy_C = grads_2C[:, :, None]
        logits_CV = self.logits(hidden_CH, support_CS)
        # d log p(target) = [target] - p, and dH = -p (log p + H)
        logprobs_CV = logits_CV - totals_C
        if entropy:
            grad_CV = logprobs_CV.exp()
            grad_CV.mul_(
                logprobs_CV.clamp_(min=_NEVER).add_(entropies_C).mul_(-grad_entropy_C).sub_(grad_C)
            )
        else:
            grad_CV = logprobs_CV.exp_().mul_(-grad_C)
        ids_C, is_own_C = self._own(targets_C)
        grad_CV.scatter_add_(1, ids_C[:, None], grad_C * is_own_C[:, None])
        return self.scaling.backward(grad_CV, logits_CV).to(
            torch.bfloat16 if self.low else self.weight_VH.dtype
        )

    def finish(self, found_3N: Tensor, *, entropy: bool) -> None:
        """Turn the logits of the targets into logprobs, over the ids of all ranks."""
        if self.part is not None:
            of_ranks_R3N = self.part.group.all_of(found_3N)
            totals_N = of_ranks_R3N[:, 2].logsumexp(0)
            found_3N[0], found_3N[2] = of_ranks_R3N[:, 0].sum(0), totals_N
            if entropy:
                # Of what rank it is, and then of the ids there: a rank without ids counts nothing.
                logprobs_RN = (of_ranks_R3N[:, 2] - totals_N).clamp_(min=_NEVER)
                of_ids_RN = of_ranks_R3N[:, 1].nan_to_num(nan=0.0)
                found_3N[1] = (logprobs_RN.exp() * (of_ids_RN - logprobs_RN)).sum(0)
        found_3N[0] -= found_3N[2]

    def _own(self, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of targets among this rank's ids, and which of them it has."""
        if self.part is None:
            return targets_C, torch.ones_like(targets_C, dtype=torch.bool)
        return self.part.own(targets_C)

    def pieces(self, tokens: int) -> Iterator[slice]:
        """So many tokens at a time that their logits are at most `LOGITS_AT_ONCE`, or more where a
        GPU has memory for them.
        """
        vocabulary, device = len(self.weight_VH), self.weight_VH.device
        at_once = LOGITS_AT_ONCE
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            at_once = affordable_logits(free + unused, vocabulary)
        size = max(1, at_once // vocabulary)
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def affordable_logits(free: int, vocabulary: int) -> int:
    """The logits that a GPU with so many free bytes computes at a time: `LOGITS_AT_ONCE`, doubled
    as long as they take at most a share of these (`FREE_SHARE`) and are of at most `MOST_AT_ONCE`
    tokens.

    Each piece reads the head's weight three times and adds to its float32 gradient, so pieces of a
    few hundred tokens are bound by memory. Doubling keeps runs on alike devices alike.
    """
    logits = LOGITS_AT_ONCE
    while 2 * logits <= min(MOST_AT_ONCE * vocabulary, FREE_SHARE * free / LOGIT_BYTES):
        logits *= 2
    return logits


_NEVER = -1e4
"""The logprob, in place of -inf, of what could not be sampled: its probability is zero all the
same.
"""


class _LinearLogprobs(torch.autograd.Function):
    """Keeps the inputs, entropies and the logsumexp of each token, and nothing of the size of the
    vocabulary.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes tensors by position
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        support_NS: Tensor | None,
        scaling: Scaling,
        entropy: bool,
        part: VocabularyPart | None,
    ) -> Tensor:
        low = torch.is_autocast_enabled(hidden_NH.device.type)
        head = _Head(weight_VH, bias_V, scaling, low, part)
        found_3N = torch.zeros(3, len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        for piece in head.pieces(len(hidden_NH)):
            support_CS = None if support_NS is None else support_NS[piece]
            head.forward(
                hidden_NH[piece], targets_N[piece], support_CS, found_3N[:, piece], entropy=entropy
            )
        head.finish(found_3N, entropy=entropy)
        ctx.scaling, ctx.low, ctx.entropy, ctx.part = scaling, low, entropy, part
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, support_NS, found_3N[1:])
        return (
            found_3N[:2] if entropy else found_3N[0]
        ).clone()  # a sharded module must not return a view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, support_NS, found_2N = ctx.saved_tensors
        grads_2N = grads[0] if ctx.entropy else torch.stack([grads[0], torch.zeros_like(grads[0])])
        head = _Head(weight_VH, bias_V, ctx.scaling, ctx.low, ctx.part)
        grad_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = (
            torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        grad_bias_V = (
            torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        )
        for piece in head.pieces(len(hidden_NH)):
            support_CS = None if support_NS is None else support_NS[piece]
            found_2C, grads_2C = found_2N[:, piece], grads_2N[:, piece]
            grad_CV = head.backward(
                hidden_NH[piece],
                targets_N[piece],
                support_CS,
                found_2C,
                grads_2C,
                entropy=ctx.entropy,
            )
            if grad_hidden_NH is not None:
                grad_hidden_NH[piece] = (grad_CV @ weight_VH.to(grad_CV.dtype)).to(hidden_NH.dtype)
            if grad_weight_VH is not None:
                grad_weight_VH += grad_CV.T @ hidden_NH[piece].to(grad_CV.dtype)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0, dtype=torch.float32).to(grad_bias_V.dtype)
            del grad_CV  # before the next piece needs the memory
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight, grad_bias_V, None, None, None, None, None
