"""Trajectories to training samples to packed batches.

Dimension suffixes: T tokens of a sample; in a packed batch B rows and T columns. Arrays are numpy, so that a batch
crosses a process boundary without a copy and this module loads no torch.

The tokens are the engine's own (`Turn.prompt_ids`, `Completion.token_ids`), laid end to end; nothing here ever sees
text. `loss_mask` is one exactly where the engine sampled the token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.trajectory import Trajectory

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One token sequence to train on; all fields are of equal length T.

    Where `loss_mask` is 0, `rollout_logprobs` and `advantages` are 0 and `policy_versions` is -1.
    `turn_ids` numbers the turn a token belongs to (its prompt's tokens too).
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    policy_versions: tuple[int, ...]
    turn_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Samples packed into rows.

    `segment_ids_BT` numbers the samples from 1 over the whole batch (0 is padding); attention stays inside a segment.
    `position_ids_BT` restarts at 0 with each segment. A token is predicted from the token before it in its segment,
    so the first token of a segment never carries loss.
    """

    tokens_BT: IntArray
    loss_mask_BT: IntArray
    rollout_logprobs_BT: FloatArray
    advantages_BT: FloatArray
    policy_versions_BT: IntArray
    position_ids_BT: IntArray
    segment_ids_BT: IntArray
    num_loss_tokens: int
    num_samples: int


def to_samples(trajectory: Trajectory, advantage: float) -> list[TrainingSample]:
    """Lay a trajectory's turns end to end; each fork starts a new sample. Every sampled token gets `advantage`."""
    raise NotImplementedError


def collate(samples: Iterable[TrainingSample], *, row_tokens: int, pad_token_id: int = 0) -> TrainBatch:
    """Pack samples into rows of at most `row_tokens` tokens."""
    raise NotImplementedError


__all__ = ["Sequence", "TrainBatch", "TrainingSample", "collate", "to_samples"]
