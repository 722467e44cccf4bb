"""The turns of a batch, for algorithms whose steps are turns.

Dimension suffixes: of a batch M samples, N loss tokens, J trajectories and K turns.
"""

from dataclasses import dataclass

import numpy as np

from agentrl.batch import TrainBatch
from agentrl.tokens.arrays import FloatArray, IntArray, MaskArray, floats, ints


@dataclass(frozen=True, slots=True)
class BatchTurns:
    """The beginnings and ends of turns among the loss tokens of a batch, and the reward of each
    turn.

    `turns_N` numbers the turns of the whole batch. `lengths_J` is the number of turns of each
    trajectory.

    Example: a trajectory with answers of two tokens and one token, and one with an answer of two:

        begins_N    [1, 0, 1, 1, 0]
        ends_N      [0, 1, 1, 0, 1]
        turns_N     [0, 0, 1, 2, 2]
        lengths_J   [2, 1]
    """

    begins_N: MaskArray
    ends_N: MaskArray
    turns_N: IntArray
    rewards_K: FloatArray
    lengths_J: IntArray


def turns_of(batch: TrainBatch) -> BatchTurns:
    """The turns of a batch that have a loss token."""
    trajectories_N = batch.trajectories_N
    changes_N = (np.diff(trajectories_N) != 0) | (np.diff(batch.turns_N) != 0)
    begins_N = np.append(True, changes_N)
    turns_N = np.cumsum(begins_N, dtype=np.int32) - 1
    rewards_K = floats(np.bincount(turns_N, weights=batch.rewards_N))
    lengths_J = np.bincount(trajectories_N[begins_N], minlength=len(batch.tokens_of_trajectories))
    return BatchTurns(begins_N, np.append(changes_N, True), turns_N, rewards_K, ints(lengths_J))


def after_trajectories(ends_M: FloatArray, batch: TrainBatch) -> FloatArray:
    """The expected return after each trajectory: that after its last sample."""
    return floats(
        np.bincount(
            batch.trajectories_M, weights=ends_M, minlength=len(batch.tokens_of_trajectories)
        )
    )
