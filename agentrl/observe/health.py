"""Early signs that learning goes wrong, which show before the reward does: in a step's episodes,
and in its batch.

`agentrl/observe/silence.py` has the thresholds, and what to do. Dimension suffixes: N loss tokens,
G members of a group.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from agentrl.batch import TrainBatch
from agentrl.observe.samples import TrainedBatch
from agentrl.tokens.arrays import ROUNDING, FloatArray, IntArray, constant, scale_of
from agentrl.trajectory import Group, columns_of

_WINDOW = 8
"""Tokens of a passage that counts as repeated when it comes again in the same answer."""


def episode_health(groups: Sequence[Group]) -> dict[str, float]:
    """Signs in a step's whole episodes; those that the step cannot show are left out.

    `health/length_correlation` is Pearson's, of score and sampled tokens;
    `health/reward_by_length/1` to `/4` are the mean scores of the episodes' quarters from the
    shortest on. `health/repetition` is the share of passages of 8 tokens that stood in the same
    answer before. `health/disagreement`: of the pairs of members of a group that two parts of the
    reward both tell apart, the share that they order differently; of all pairs of parts the
    largest.
    """
    whole = [group for group in groups if not group.partial]
    scores = np.array([score.value for group in whole for score in group.scores], np.float64)
    lengths = np.array(
        [trajectory.num_tokens for group in whole for trajectory in group.trajectories], np.float64
    )
    answers = [
        answer
        for group in whole
        for trajectory in group.trajectories
        for answer in columns_of(trajectory.turns).answers()
    ]
    found = {
        "health/length_correlation": correlation(scores, lengths),
        "health/repetition": repetition(answers),
        "health/disagreement": disagreement(whole),
    }
    return {name: value for name, value in found.items() if value is not None} | reward_by_length(
        scores, lengths
    )


def reward_by_length(scores: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """The mean score of each quarter of the episodes by length; nothing for fewer than eight, or
    equal lengths.
    """
    if len(lengths) < 8 or lengths.std() == 0:
        return {}
    quarters = np.array_split(scores[np.argsort(lengths, kind="stable")], 4)
    return {
        f"health/reward_by_length/{number}": float(own.mean())
        for number, own in enumerate(quarters, 1)
    }


def batch_health(trained: TrainedBatch, step: int) -> dict[str, float]:
    """Signs in what `step` was trained on; those that need the trainer's logprobs only if it tells
    them.

    `health/effective_sample_size` is (sum w)^2 / (N sum w^2) of the importance weights w = exp(old
    logprob - engine's) (Kish, "Survey Sampling", 1965): the share of the tokens that would be worth
    as much without weights.
    """
    advantages_N = trained.batch.advantages_N.astype(np.float64)
    found = {
        "health/advantage_std": float(advantages_N.std()),
        "health/advantage_positive": float((advantages_N > 0).mean()),
    }
    if trained.told_3N is None:
        return found
    old_N, new_N = trained.told_3N[:2].astype(np.float64)
    weights_N = np.exp(np.clip(old_N - trained.batch.rollout_logprobs_N, -30, 30))
    low, high = np.exp(np.quantile(new_N - old_N, (0.01, 0.99)))
    return {
        **found,
        "health/effective_sample_size": float(
            weights_N.sum() ** 2 / (len(weights_N) * np.square(weights_N).sum())
        ),
        "health/ratio_p1": float(low),
        "health/ratio_p99": float(high),
        **_gaps_by_age(trained.batch, old_N, step),
    }


def _gaps_by_age(batch: TrainBatch, old_N: FloatArray, step: int) -> dict[str, float]:
    """The mean |engine's - trainer's logprob| of the tokens of each age, in versions.

    At age 0 both have the same weights. So a gap there does not come from changes of the policy:
    the two programs differ, or the engine does not have the weights that it stamps tokens with.
    """
    gaps_N = np.abs(old_N - batch.rollout_logprobs_N)
    # Tokens without weight are not of this policy's episodes: -1 leaves them out.
    ages_N = np.where(batch.weights_N > 0, step - batch.versions_N, -1)
    return {
        f"health/logprob_gap/{age}": float(gaps_N[ages_N == age].mean())
        for age in np.unique(ages_N).tolist()
        if age >= 0
    }


def correlation(
    one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray
) -> float | None:
    """Pearson's correlation; `None` where one of them does not vary."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if constant(a.tolist()) or constant(b.tolist()):
        return None
    return float(np.clip(np.mean((a - a.mean()) * (b - b.mean())) / (a.std() * b.std()), -1, 1))


def repetition(answers: Sequence[IntArray]) -> float | None:
    """The share of an answer's passages that stood in it before, over all answers; `None` if those
    that are long enough to repeat any have less than a tenth of the tokens.
    """
    # Each passage is a window over the tokens, and its hash a sum of tokens times odd random
    # factors. Two different passages have the same hash once in 2^63.
    factors = np.random.default_rng(0).integers(1, 2**63, _WINDOW, dtype=np.uint64) | np.uint64(1)
    passages = distinct = in_long = 0
    for tokens in answers:
        if len(tokens) >= 2 * _WINDOW:
            in_long += len(tokens)
            windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), _WINDOW)
            hashes = (windows * factors).sum(1, dtype=np.uint64)  # modulo 2^64
            passages += len(hashes)
            distinct += len(np.unique(hashes))
    rare = in_long * 10 < sum(map(len, answers))
    return None if rare or not passages else 1 - distinct / passages


def disagreement(groups: Sequence[Group]) -> float | None:
    """See `episode_health`; `None` if no two parts tell the same members apart."""
    parts = sorted(
        {
            name
            for group in groups
            for score in group.scores
            for name in score.parts
            if "/" not in name
        }
    )
    by_agent = [of_agent for group in groups for of_agent in group.by_agent()]
    shares = []
    for one, other in combinations(parts, 2):
        apart = opposite = 0
        for of_agent in by_agent:
            both = [
                score.parts
                for score in of_agent.scores
                if one in score.parts and other in score.parts
            ]
            ordered = _order([each[one] for each in both]) * _order([each[other] for each in both])
            apart, opposite = apart + int((ordered != 0).sum()), opposite + int((ordered < 0).sum())
        if apart:
            shares.append(opposite / apart)
    return max(shares, default=None)


def _order(values_G: Sequence[float]) -> np.ndarray:
    """[G, G] For each pair of members: 1 if the first has more, -1 if less, 0 if both are equal but
    for rounding.
    """
    values = np.asarray(values_G, np.float64)
    apart = values[:, None] - values[None, :]
    return np.where(np.abs(apart) <= ROUNDING * scale_of(values_G), 0.0, np.sign(apart))
