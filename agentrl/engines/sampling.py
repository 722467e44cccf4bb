"""Sampling whose noise depends only on a request's seed and a token's position.

Dimension suffixes: R rows of a batch, V tokens of the vocabulary.

A generator object per request would have to be stepped once per token and row; a counter-based hash has no state, so
a whole batch is one vectorised expression, and a token does not depend on the other requests in the batch.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014): an odd increment and a
# mixer that turns a counter into 64 random bits. torch has no unsigned shift, so its constants are signed.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """One 64-bit key per row from the request's seed and the index of the token among the sampled ones."""
    with np.errstate(over="ignore"):
        keys = _mix(_mix(seeds + np.uint64(_GAMMA)) + (positions + np.uint64(1)) * np.uint64(_GAMMA))
    return keys.view(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


class Sampler:
    """Draws one token per row from logits. Its only state is a counter for each token of the vocabulary."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        counters = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        self._counters_V = torch.from_numpy(counters.view(np.int64)).to(device)

    def gumbel(self, keys_R: Tensor) -> Tensor:
        """Standard Gumbel noise of shape (R, V), float32, for int64 keys."""
        x = keys_R[:, None] + self._counters_V  # wraps around, as splitmix64 requires
        x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX_1))
        x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX_2))
        # The top 50 bits as a float strictly inside (0, 1): half a step from either end, so the logarithms stay finite.
        # A token of probability p is drawn by an exponential variate below about p: fewer bits, or float32, would have
        # no such values for p below 1e-7. So log1p is taken in float64, and only its logarithm in float32.
        uniform = (x >> 14).bitwise_and_((1 << 50) - 1).to(torch.float64).add_(0.5).mul_(-(2.0**-50))
        return uniform.log1p_().neg_().float().log_().neg_()

    def sample(self, logits_RV: Tensor, temperature_R: Tensor, keys_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens and their logprobs.

        Gumbel-max: argmax(logits / temperature + noise) is a draw from softmax(logits / temperature). A row of
        temperature 0 takes the argmax, and its logprob is at temperature 1. If all rows are such, `keys_R` is None.
        """
        greedy_R = temperature_R == 0
        logprobs_RV = torch.log_softmax(logits_RV.float() / temperature_R.where(~greedy_R, 1.0)[:, None], dim=-1)
        if keys_R is None:
            tokens_R = logprobs_RV.argmax(dim=-1)
        else:
            noise_RV = self.gumbel(keys_R).masked_fill_(greedy_R[:, None], 0.0)
            tokens_R = noise_RV.add_(logprobs_RV).argmax(dim=-1)
        return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]


__all__ = ["Sampler", "noise_keys"]
