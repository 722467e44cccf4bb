"""Algorithms: an advantage and a loss, with or without a critic.

Dimension suffixes: N loss tokens of a micro-batch, flattened; G members of a group; M samples of a
batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from agentrl.batch import TrainBatch
from agentrl.protocols.offers import Offers
from agentrl.tokens.arrays import FloatArray
from agentrl.trajectory import Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The inputs of a loss: one entry per loss token of the micro-batch, so no masked token can
    leak in.

    `old_logprobs_N`: the trainer's own, before the first update on this batch;
    `rollout_logprobs_N`: the engine's; `reference_logprobs_N`: the reference model's if the
    algorithm uses one, else the engine's; `segments_N`: the index of a token's training sample in
    the batch. `entropies_N`: the entropy of the policy before each token, in nats, over the ids
    that the token may have been sampled from; differentiable, and there only for a loss that
    `uses_entropy`.
    """

    old_logprobs_N: "Tensor"
    rollout_logprobs_N: "Tensor"
    reference_logprobs_N: "Tensor"
    advantages_N: "Tensor"
    segments_N: "Tensor"
    entropies_N: "Tensor | None" = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss_N`: one loss per token, differentiable; the trainer sums it and divides by the batch's
    normaliser.

    `metrics`: named per-token values of shape N (detached), reported as their mean over the batch's
    loss tokens.
    """

    loss_N: "Tensor"
    metrics: Mapping[str, "Tensor"]


MemberAdvantage = float | Sequence[float]
"""The advantage of a trajectory: one number for all of its turns, or one for each turn."""

Advantages = Sequence[Sequence[MemberAdvantage]]
"""Of each group of a batch, the advantages of its members."""


@dataclass(frozen=True, slots=True)
class AlgorithmOffers(Offers):
    """The facts of an algorithm that a config and a run must know, as its attribute `offers`. The
    last five are optional methods, which are found by their names.
    """

    uses_reference: bool = False
    """It gets a reference: the model with which the run began, whose logprobs are
    `LossTokens.reference_logprobs_N`."""
    reference_model: Path | None = None
    """The folder of the reference, if it is not the model with which the run began."""
    uses_entropy: bool = False
    """Its loss gets `LossTokens.entropies_N`."""
    compares_members: bool = False
    """It compares the members of a group; a config with groups of a single member is refused."""
    fixed_scale: bool = False
    """Its advantages are labels or weights; a config that normalises them is refused."""
    beyond_rewards: str = ""
    """The setting that adds to the advantages what no reward says. A config that leaves out groups
    by their rewards is refused."""
    credits_turns: bool = False
    """The turns of an episode have advantages of their own, which do not add up to 0 over a
    group."""
    credits_trees: bool = False
    """It compares episodes that have left others of their group, whose first turns they share
    (`rollout.branches`)."""
    charges_rewards: bool = False
    """`prepared` takes costs off the rewards (`TrainBatch.charged`), so its batches know what their
    advantages come from."""
    values_answers: bool = False
    """The critic is also asked after each answer (`ActorCritic`)."""
    estimate: Callable[..., Any] | None = None
    """The method of an algorithm with a critic (`ActorCritic`)."""
    prepared: Callable[[TrainBatch], TrainBatch] | None = None
    """Changes a whole batch before it is trained on and the critic is asked about it, such as the
    weights of its tokens. The batch has the reference's logprobs, if there is a reference."""
    normalized: Callable[[Advantages], Advantages] | None = None
    """Returns the advantages to train with, from those of each group of a batch."""
    spread: Callable[[Group], float] | None = None
    """The mean square of a group's advantages before they are divided by anything, for an algorithm
    that compares members: 0 only if all are 0."""
    learn: Callable[[Sequence[Group]], Mapping[str, float]] | None = None
    """Learns from the groups of a step that has just been trained on, and returns metrics. Each is
    a group of one agent, with the scores that its advantages were computed from. The algorithm is
    `Stateful`: what it has learned is kept in each checkpoint."""


Loss = Callable[["Tensor", LossTokens], LossOutput]
"""A pure function of the trainer's logprobs [N] (or a critic's values) and the `LossTokens`. If it,
or the algorithm whose method it is, offers `uses_entropy` (`AlgorithmOffers`), it gets
`LossTokens.entropies_N`."""


def uses_entropy(loss: Loss) -> bool:
    """True if a loss, or the algorithm whose method it is, asks for entropies."""
    plugin = loss.__self__ if isinstance(loss, MethodType) else loss
    return AlgorithmOffers.of(plugin).uses_entropy


class Algorithm(Protocol):
    """An advantage and a loss. What else a run must know of it is `AlgorithmOffers`."""

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """For each member of the group one advantage, or one for each of its turns
        (`Group.turn_rewards_G`).
        """
        ...

    def loss(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The loss of each token."""
        ...

    def normalizer(self, batch: TrainBatch) -> float:
        """The divisor of the summed token losses of a whole batch."""
        ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """For each loss token, its advantage, and the return that the critic should have predicted
    before it.

    `weights_N`: how much the critic learns from each token. The sum of its weighted losses is
    divided by the number of all loss tokens.
    """

    advantages_N: FloatArray
    returns_N: FloatArray
    weights_N: FloatArray


@runtime_checkable
class ActorCritic(Algorithm, Protocol):
    """An algorithm with a critic, which is trained on the same batches as the policy, or on earlier
    ones too.

    If it offers `values_answers` (`AlgorithmOffers`), the critic is also asked after each answer.
    The batch of `estimate` then has one more loss token after the last one of each turn, for the
    value before it (`agentrl/estimation/value_points.py`), and the weight 0 for tokens that the
    policy does not learn from.
    """

    @property
    def bootstraps(self) -> bool:
        """True if `estimate` needs the critic's values after truncated episodes."""
        ...

    def estimate(self, batch: TrainBatch, values_N: FloatArray, ends_M: FloatArray) -> Estimate:
        """Estimate from a batch's rewards, the critic's values before its loss tokens, and those
        after its samples.

        `ends_M`: what the critic expects after the last token of a truncated trajectory's last
        sample, where the next turn would have begun; 0 for other samples, and for all if it does
        not bootstrap.
        """
        ...

    def value_loss(self, values_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The critic's loss of each token: `advantages_N` are the returns, `rollout_logprobs_N` its
        old values.
        """
        ...
