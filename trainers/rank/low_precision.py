"""AdamW whose moments take two bytes of each parameter, or one, instead of four.

`bfloat16` moments are rounded to the nearest number. `int8` ones are codes for levels between -1
and 1, times a scale for each block of a row: Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization", arXiv 2110.02861. Of the second moment the square root is coded, whose range is half
as wide. Three things make a moment independent of how it is sharded and stored: blocks lie within
rows, which no sharding cuts; the scale is the number of largest magnitude with its sign, which is
then coded exactly; and so coding what was decoded gives the same codes. A checkpoint therefore has
float32 moments, whatever they are in memory.

Dimension suffixes: N numbers, R blocks, B numbers of a block.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from agentrl.trainers.rank.host_buffers import local

SCALE = "_scale"
"""What the name of a moment's scales ends with, in the state of a parameter."""
_BLOCK, _SMALLEST_BLOCK = 256, 16
"""Numbers with one scale, and the fewest for which codes are worth it: other moments stay float32.
"""
_SMALLEST_SCALE = 1e-12
"""Blocks of smaller numbers are zero. They are far below AdamW's `eps`, and their squares below
float32.
"""
_AT_ONCE = 1 << 22
"""Numbers of a moment that are decoded at a time; a multiple of all blocks."""


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW for float32 parameters, with moments of type `moments`: torch.bfloat16 or torch.int8.

    Each step is that of torch's fused kernel in float32, for a piece of a parameter at a time.
    """

    def __init__(self, groups: Any, moments: torch.dtype, **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self.moments = moments

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of each parameter that has a gradient. Nothing here is computed twice."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for moment in ("exp_avg", "exp_avg_sq"):
                state.update(_zero_state(moment, parameter, self.moments))
        weights_N, gradients_N = _flat_local(parameter), local(gradient).reshape(-1)
        for first in range(0, weights_N.numel(), _AT_ONCE):
            piece = slice(first, first + _AT_ONCE)
            mean_N, square_N = (read(state, moment, piece) for moment in ("exp_avg", "exp_avg_sq"))
            fused_adamw(
                [weights_N[piece]],
                [gradients_N[piece]],
                [mean_N],
                [square_N],
                [],
                [state["step"].to(weights_N.device, copy=True)],  # the kernel counts up
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            write(state, "exp_avg", piece, mean_N)
            write(state, "exp_avg_sq", piece, square_N)
        state["step"] += 1


def read(state: dict[str, Tensor], moment: str, piece: slice) -> Tensor:
    """Numbers of a moment in float32: a copy, unless that is how they are kept."""
    values_N = _flat_local(state[moment])
    if values_N.dtype != torch.uint8:
        return values_N[piece].float()
    scales_R = state[moment + SCALE]
    block = values_N.numel() // scales_R.numel()
    decoded_N = decode(
        values_N[piece],
        scales_R[piece.start // block : -(-piece.stop // block)],
        moment == "exp_avg",
    )
    return decoded_N if moment == "exp_avg" else decoded_N.square_()


def write(state: dict[str, Tensor], moment: str, piece: slice, new_N: Tensor) -> None:
    """Set numbers of a moment."""
    values_N = _flat_local(state[moment])
    if values_N.dtype != torch.uint8:
        values_N[piece].copy_(new_N)
        return
    scales_R = state[moment + SCALE]
    block = values_N.numel() // scales_R.numel()
    own_N = new_N if moment == "exp_avg" else new_N.sqrt()
    codes_N, of_blocks_R = encode(own_N, block, moment == "exp_avg")
    values_N[piece].copy_(codes_N)
    scales_R[piece.start // block : -(-piece.stop // block)].copy_(of_blocks_R)


def whole(state: dict[str, Tensor], moment: str) -> Tensor:
    """All numbers of a moment that is kept in codes, in float32 and CPU memory; flat."""
    size = _flat_local(state[moment]).numel()
    decoded_N = torch.empty(size)
    for first in range(0, size, _AT_ONCE):
        piece = slice(first, min(first + _AT_ONCE, size))
        decoded_N[piece] = read(state, moment, piece).cpu()
    return decoded_N


def set_whole(state: dict[str, Tensor], moment: str, new_N: Tensor) -> None:
    """The reverse of `whole`."""
    for first in range(0, new_N.numel(), _AT_ONCE):
        piece = slice(first, min(first + _AT_ONCE, new_N.numel()))
        write(state, moment, piece, new_N[piece].to(state[moment].device))


def encode(values_N: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and the scales of blocks. Numbers that `decode` gave get the codes and scales
    that they had.

    Example: the block (0.5, -2, 0) has the scale -2. Its shares (-0.25, 1, 0) get the codes of the
    nearest levels, and 1 and 0 are levels themselves.
    """
    values_RB = values_N.view(-1, block)
    scales_R1 = values_RB.gather(-1, values_RB.abs().argmax(-1, keepdim=True))
    scales_R1[scales_R1.abs() < _SMALLEST_SCALE] = 0
    shares_RB = (values_RB / scales_R1).masked_fill_(scales_R1 == 0, 0)  # not 0 / 0
    levels = _levels(signed, values_N.device)
    codes_RB = torch.bucketize(shares_RB, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return codes_RB.to(torch.uint8).view(-1), scales_R1.view(-1)


def decode(codes_N: Tensor, scales_R: Tensor, signed: bool) -> Tensor:
    """The numbers of codes, in float32."""
    shares_N = _levels(signed, codes_N.device).index_select(0, codes_N.int())
    return (shares_N.view(len(scales_R), -1) * scales_R[:, None]).view(-1)


@lru_cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """The 256 levels of the paper's dynamic quantization (sections 1.3 and 2.2), in ascending
    order.

    Each power of ten from 1e-6 to 1 has twice as many levels as the one before.
    """
    ranges = []
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power + (0 if signed else 1)) + 1)
        ranges.append(10.0 ** (power - 6) * (edges[1:] + edges[:-1]) / 2)
    positive = torch.cat(ranges)
    levels = [positive, -positive] if signed else [positive]
    return torch.cat([*levels, torch.tensor([0.0, 1.0])]).sort().values.to(device)


def _zero_state(moment: str, parameter: Tensor, moments: torch.dtype) -> dict[str, Tensor]:
    """The state of a moment that is zero."""
    if moments != torch.int8:
        return {moment: torch.zeros_like(parameter, dtype=moments)}
    block = math.gcd(parameter.shape[1:].numel(), _BLOCK)
    if block < _SMALLEST_BLOCK or not _flat_local(parameter).numel():
        return {moment: torch.zeros_like(parameter)}
    levels = _levels(moment == "exp_avg", torch.device("cpu"))
    codes = torch.full_like(parameter, int((levels == 0).nonzero()), dtype=torch.uint8)
    scales_R = torch.zeros(_flat_local(parameter).numel() // block, device=parameter.device)
    return {moment: codes, moment + SCALE: scales_R}


def _flat_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a vector to read and to fill."""
    return local(tensor).view(-1)
