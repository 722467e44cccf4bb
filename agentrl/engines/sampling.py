"""Sampling whose noise depends only on a request's seed and a token's position.

Dimension suffixes: R rows of a batch, V tokens of the vocabulary, K most likely tokens.

A generator object per request would have to be stepped once per token and row; a counter-based hash
has no state, so a whole batch is one vectorised expression, and a token does not depend on the
other requests in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014): an odd
# increment and a mixer that turns a counter into 64 random bits. torch has no unsigned shift, so
# its constants are signed.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def noise_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """One 64-bit key per row from the request's seed and the index of the token among the sampled
    ones.
    """
    with np.errstate(over="ignore"):
        keys = _mix(
            _mix(seeds + np.uint64(_GAMMA)) + (positions + np.uint64(1)) * np.uint64(_GAMMA)
        )
    return keys.view(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


class Sampler:
    """Draws one token per row from logits. Its only state is a counter for each token of the
    vocabulary.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        counters = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        self._counters_V = torch.from_numpy(counters.view(np.int64)).to(device)

    def gumbel(self, keys_R: Tensor) -> Tensor:
        """Standard Gumbel noise of shape (R, V), float32, for int64 keys."""
        x = keys_R[:, None] + self._counters_V  # wraps around, as splitmix64 requires
        x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX_1))
        x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX_2))
        # The top 50 bits as a float strictly inside (0, 1): half a step from either end, so the
        # logarithms stay finite. A token of probability p is drawn by an exponential variate below
        # about p: fewer bits, or float32, would have no such values for p below 1e-7. So log1p is
        # taken in float64, and only its logarithm in float32.
        uniform = (
            (x >> 14).bitwise_and_((1 << 50) - 1).to(torch.float64).add_(0.5).mul_(-(2.0**-50))
        )
        return uniform.log1p_().neg_().float().log_().neg_()

    def sample(
        self,
        logits_RV: Tensor,
        temperature_R: Tensor,
        keys_R: Tensor | None,
        truncation: "Truncation | None" = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, their logprobs, and the logprobs of all tokens, which are -inf for those left
        out.

        Gumbel-max: argmax(logits / temperature + noise) is a draw from softmax(logits /
        temperature). A row of temperature 0 takes the argmax, and its logprob is at temperature 1.
        If all rows are such, `keys_R` is None.
        """
        greedy_R = temperature_R == 0
        scaled_RV = logits_RV.float() / temperature_R.where(~greedy_R, 1.0)[:, None]
        if truncation is not None:
            scaled_RV = truncated(scaled_RV, truncation)
        logprobs_RV = torch.log_softmax(scaled_RV, dim=-1)
        if keys_R is None:
            tokens_R = logprobs_RV.argmax(dim=-1)
        else:
            noise_RV = self.gumbel(keys_R).masked_fill_(greedy_R[:, None], 0.0)
            tokens_R = noise_RV.add_(logprobs_RV).argmax(dim=-1)
        return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0], logprobs_RV


@dataclass(frozen=True, slots=True)
class Truncation:
    """`SamplingParams.top_k`, `top_p` and `min_p` of each row: int64, float32 and float32."""

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor

    @classmethod
    def of(cls, params: Sequence[tuple[int, float, float]], device: torch.device) -> Self:
        """From the (top_k, top_p, min_p) of each row."""
        top_k, top_p, min_p = zip(*params, strict=True)
        return cls(
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor(top_p, dtype=torch.float32, device=device),
            torch.tensor(min_p, dtype=torch.float32, device=device),
        )


def truncated(logits_RV: Tensor, truncation: Truncation) -> Tensor:
    """Logits, at their temperature, with -inf for the tokens that are left out.

    First `min_p` (arXiv:2407.01082), then `top_k`, then `top_p` (arXiv:1904.09751) of the
    probability that is left: the order of vLLM. Of equally likely tokens at the border, those of
    the lowest ids are kept, so that never more than `top_k` remain, on any device. (Logits in
    bfloat16 are often equal.)
    """
    vocab = logits_RV.shape[1]
    top_k_R = truncation.top_k_R.where(truncation.top_k_R > 0, vocab).clamp(max=vocab)
    best_RK = logits_RV.topk(int(top_k_R.max()), dim=1).values
    likely_RK = best_RK >= best_RK[:, :1] + truncation.min_p_R[:, None].log()
    likely_RK &= torch.arange(best_RK.shape[1], device=best_RK.device) < top_k_R[:, None]
    probabilities_RK = best_RK.masked_fill(~likely_RK, float("-inf")).softmax(dim=1)
    before_RK = probabilities_RK.cumsum(dim=1) - probabilities_RK
    whole_R1 = truncation.top_p_R[:, None] >= 1  # rounding must not leave out the last ones
    counts_R1 = (likely_RK & (whole_R1 | (before_RK < truncation.top_p_R[:, None]))).sum(
        dim=1, keepdim=True
    )
    border_R1 = best_RK.gather(1, counts_R1 - 1)
    above_RV, at_RV = logits_RV > border_R1, logits_RV == border_R1
    room_R1 = counts_R1 - above_RV.sum(dim=1, keepdim=True)
    kept_RV = above_RV | (at_RV & (at_RV.cumsum(dim=1) <= room_R1))
    return logits_RV.masked_fill(~kept_RV, float("-inf"))


__all__ = ["Sampler", "Truncation", "noise_keys", "truncated"]
