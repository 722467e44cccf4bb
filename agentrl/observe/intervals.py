"""Results of tasks that were played several times, with intervals: means, pass@k, and differences
of two models.

The tasks are a sample of all that could be asked, so intervals are over tasks, and the samples of
one task are not independent (E. Miller, "Adding error bars to evals", arXiv:2411.00640, sections
2.2 and 4.2).
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev

_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """The probability that one of k answers of a task is right, estimated without bias from
    `samples` of them.

    1 - C(n - c, k) / C(n, k), equation 1 of M. Chen et al., "Evaluating large language models
    trained on code", arXiv:2107.03374.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {samples}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def wilson_interval(successes: int, episodes: int) -> tuple[float, float]:
    """The 95 % confidence interval of a success rate: the rates at which so many successes are not
    unusual.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927);
    unlike the rate plus or minus its standard error, it stays within [0, 1] and has a width where
    all or none succeed. NaN for no episodes.
    """
    if episodes == 0:
        return math.nan, math.nan
    z, rate = _Z, successes / episodes
    centre = rate + z * z / (2 * episodes)
    half_width = z * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes * episodes))
    scale = 1 + z * z / episodes
    low, high = (centre - half_width) / scale, (centre + half_width) / scale
    # Rounding must not leave out the rate itself.
    return max(0.0, min(low, rate)), min(1.0, max(high, rate))


def mean_over_tasks(values: Sequence[float]) -> Interval:
    """The mean of one value for each task, with a normal interval.

    NaN for no tasks. The bounds are NaN for a single one, and where all values are equal: nothing
    tells then how far others would lie.
    """
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    mean = fmean(values)
    error = _Z * stdev(values) / math.sqrt(len(values)) if len(set(values)) > 1 else math.nan
    return Interval(mean, mean - error, mean + error)


def share_over_tasks(values: Sequence[float]) -> Interval:
    """The mean of one value from 0 to 1 for each task.

    The interval is Wilson's, if all values are 0 or 1. Otherwise it is the normal one, and at least
    as wide as with two values of 0 and two of 1 added (A. Agresti and B. Coull, "Approximate is
    better than 'exact'", 1998), so that tasks which are all alike give no certainty.
    """
    if values and set(values) <= {0.0, 1.0}:
        return Interval(fmean(values), *wilson_interval(round(sum(values)), len(values)))
    found = mean_over_tasks(values)
    if len(values) < 2:
        return found
    low, high = _interval_with(values, (0.0, 0.0, 1.0, 1.0))
    low, high = (
        (low, high) if math.isnan(found.low) else (min(low, found.low), max(high, found.high))
    )
    return Interval(found.value, max(0.0, low), min(1.0, high))


def passes(
    by_task: Mapping[Hashable, Iterable[Sequence[bool]]], samples: int
) -> tuple[int, dict[int, Interval]]:
    """pass@k for k = 1, 2, 4, ... up to `samples`, all of the same tasks, and how many these are:
    those of which enough answers are known for the largest k. NaN if there are none.

    `by_task`: the verdicts on each agent's answers to each task. The value of a task is the mean of
    its agents, which are not independent.
    """
    ks = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    enough = ([own for own in agents if len(own) >= ks[-1]] for agents in by_task.values())
    known = [agents for agents in enough if agents]
    found: dict[int, Interval] = {}
    for k in ks:
        means = [fmean(pass_at_k(sum(own), len(own), k) for own in agents) for agents in known]
        found[k] = share_over_tasks(means)
    return len(known), found


def paired_difference(
    one: Mapping[Hashable, float], other: Mapping[Hashable, float], largest: float | None = None
) -> tuple[int, Interval]:
    """The number of tasks that both have, and the mean by which `other` is larger there, task by
    task.

    The interval is narrower than that of two separate means, as a task is hard or easy for both. It
    is the normal one of the differences with the `largest` possible one added in both directions
    (for shares that of D. Bonett and R. Price, "Adjusted Wald confidence interval for a difference
    of binomial proportions based on paired data", 2012), so that few tasks which all change alike
    give no certainty. Without `largest`, it is the difference between the smallest and the largest
    value of all; where these are equal, the bounds are NaN.
    """
    both = [task for task in one if task in other]
    differences = [other[task] - one[task] for task in both]
    if not differences:
        return 0, Interval(math.nan, math.nan, math.nan)
    values = [own[task] for own in (one, other) for task in both]
    bound = max(values) - min(values) if largest is None else largest
    mean = fmean(differences)
    if bound == 0:
        return len(both), Interval(mean, math.nan, math.nan)
    low, high = _interval_with(differences, (-bound, bound))
    return len(both), Interval(mean, max(-bound, min(low, mean)), min(bound, max(high, mean)))


def _interval_with(values: Sequence[float], added: Sequence[float]) -> tuple[float, float]:
    """The normal interval of the mean of the values and some added ones."""
    every = [*values, *added]
    mean, error = fmean(every), _Z * pstdev(every) / math.sqrt(len(every))
    return mean - error, mean + error
