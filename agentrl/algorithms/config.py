"""Settings of the processing of a batch: of its scores, and of its advantages."""

from typing import Literal

from pydantic import Field

from agentrl.settings.base import Settings


class Constraint(Settings):
    """A bound on the mean of a part of the score, kept by a Lagrange multiplier that follows its
    violation.
    """

    part: str
    """The part that is the cost, by the name of its metric without `reward/`, such as
    `monitor/violated`.
    """
    at_most: float = Field(ge=0, allow_inf_nan=False)
    """Bound of its mean over a batch."""
    rate: float = Field(0.1, gt=0, allow_inf_nan=False)
    """The step of the multiplier, for each unit of the mean above or below the bound."""
    initial: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The multiplier of the first step."""
    largest: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Largest multiplier, in case the bound cannot be kept."""


class BatchProcessingConfig(Settings):
    """The processing of scores and advantages."""

    normalize: Literal["group", "batch", "environment"] = "group"
    """Further normalisation of the advantages: none beyond the algorithm's own in each group
    (`group`), over the whole batch, or over each environment in the batch. A batch's own spread
    biases its gradient as `whiten` of `ppo` does; that of an environment also weighs the
    environments."""
    length_penalty: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The reward that the longest member of a group loses to the shortest, of each agent."""
    overlong: Literal["train", "mask"] = "train"
    """The loss of truncated episodes: `train` on their tokens, or `mask` them. `mask` is biased,
    whatever the batch size: what led to them is never unlearned (0.09 of the gradient with 2 %
    truncated, 0.5 with 20 %, in the example of docs/algorithms.md)."""
    keep_variance: float = Field(1.0, gt=0, le=1)
    """Train only on the groups that vary most, as many as have this share of the variance of all
    groups of a batch together (top-p filtering, RAGEN-2, arXiv:2604.06268; there 0.9). In groups
    that hardly vary, entropy and KL terms outweigh the reward. What varies is what the algorithm
    compares: whole rewards, or with credit by turn the turns' returns. In a mixture, and among
    several agents, each is compared with its own. Biased: tasks with mixed results count more. Only
    for algorithms that compare the members of a group: the others learn from all groups alike."""
    constraints: tuple[Constraint, ...] = ()
    """Bounds on parts of the score."""
