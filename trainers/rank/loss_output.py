"""A check of what a loss returns, which may be a user's.

Dimension suffix: N loss tokens of a micro-batch.
"""

from typing import Any

from torch import Tensor

from agentrl.errors import TrainingError
from agentrl.protocols import LossOutput


def check_output(output: Any, logprobs_N: Tensor) -> LossOutput:
    """The output of a loss, if it has one number for each of the loss tokens. A tensor of another
    shape would be broadcast, and the sum of the step would have other terms than the loss meant.

    Raises:
        TrainingError: it has other numbers, or no gradient.
    """
    if not isinstance(output, LossOutput):
        raise TrainingError(
            f"the loss returned a {type(output).__name__}: return a LossOutput, of the loss of each"
            " token and its metrics"
        )
    _check_shape("losses", output.loss_N, logprobs_N)
    if not output.loss_N.requires_grad:
        raise TrainingError(
            "the losses that the loss returned have no gradient: compute them from the logprobs"
            " that it gets, without detach() or torch.no_grad()"
        )
    for name, values_N in output.metrics.items():
        _check_shape(f"the metric {name!r}", values_N, logprobs_N)
    return output


def _check_shape(what: str, values: Any, logprobs_N: Tensor) -> None:
    count = len(logprobs_N)
    # Of a single token, nothing can be summed wrongly: `squeeze` leaves a number without an axis.
    alone = count == 1 and isinstance(values, Tensor) and values.numel() == 1
    if not alone and (not isinstance(values, Tensor) or values.shape != logprobs_N.shape):
        found = (
            f"a tensor of shape {tuple(values.shape)}"
            if isinstance(values, Tensor)
            else f"a {type(values).__name__}"
        )
        raise TrainingError(
            f"the loss returned {found} for {what}, and {count} tokens have one number each: a"
            f" tensor of shape ({count},). Do not average or sum: the trainer adds up the losses,"
            " divides them by the normalizer, and takes the mean of each metric"
        )
