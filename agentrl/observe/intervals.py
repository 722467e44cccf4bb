"""Results of tasks that were played several times, with intervals: means, pass@k, and differences of two models.

The tasks are a sample of all that could be asked, so intervals are over tasks, and the samples of one task are not
independent (E. Miller, "Adding error bars to evals", arXiv:2411.00640, sections 2.2 and 4.2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from agentrl.observe.metrics import wilson_interval

_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """The probability that one of k answers of a task is right, estimated without bias from `samples` of them.

    1 - C(n - c, k) / C(n, k), equation 1 of M. Chen et al., "Evaluating large language models trained on code",
    arXiv:2107.03374.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {samples}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def mean_over_tasks(values: Sequence[float]) -> Interval:
    """The mean of one value for each task, with a normal interval. NaN for no tasks, or the bounds for a single one."""
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    mean = fmean(values)
    error = _Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Interval(mean, mean - error, mean + error)


def share_over_tasks(values: Sequence[float]) -> Interval:
    """As `mean_over_tasks`, of values from 0 to 1; by Wilson's method, if all are 0 or 1."""
    if values and set(values) <= {0.0, 1.0}:
        return Interval(fmean(values), *wilson_interval(round(sum(values)), len(values)))
    found = mean_over_tasks(values)
    return Interval(found.value, max(0.0, found.low), min(1.0, found.high))


def passes(by_task: Mapping[str, Sequence[bool]], samples: int) -> dict[int, Interval]:
    """pass@k for k = 1, 2, 4, ... up to `samples`, of the tasks that were played at least k times."""
    ks = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    return {
        k: share_over_tasks([pass_at_k(sum(own), len(own), k) for own in by_task.values() if len(own) >= k]) for k in ks
    }


def paired_difference(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[int, Interval]:
    """How many tasks both have, and by how much `other` is larger there: the mean of the differences, task by task.

    The interval is narrower than that of two separate means, as a task is hard or easy for both.
    """
    both = sorted(one.keys() & other.keys())
    return len(both), mean_over_tasks([other[task] - one[task] for task in both])
