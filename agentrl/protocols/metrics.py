"""Metrics that the parts of a run report, and how they become one mapping."""

from collections.abc import Mapping

from agentrl.errors import MetricNameError

Metrics = Mapping[str, float]
"""Values by the name of their metric."""


def merge_metrics(parts: Mapping[str, Metrics]) -> dict[str, float]:
    """The metrics of several parts as one mapping, in the order of the parts.

    Raises:
        MetricNameError: two parts have a metric of the same name.
    """
    merged: dict[str, float] = {}
    owners: dict[str, str] = {}
    for part, metrics in parts.items():
        for name, value in metrics.items():
            if name in owners:
                raise MetricNameError(
                    f"the metric {name!r} is reported twice, by {owners[name]} and by {part}, and"
                    " one value would hide the other: give it another name where your loss,"
                    " reward, curriculum or algorithm reports it"
                )
            merged[name], owners[name] = value, part
    return merged
