"""The newest metrics of runs in Prometheus' text format, for those who watch many runs with other
tools.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from agentrl.viewer.folders import RunFolder


def exposition(runs: Iterable[RunFolder]) -> bytes:
    """A gauge with the newest value of each metric of each run, its steps done, and whether it goes
    on.
    """
    registry = CollectorRegistry()
    values = Gauge(
        "agentrl_metric", "Newest value of a run's metric.", ["run", "metric"], registry=registry
    )
    steps = Gauge(
        "agentrl_step", "Step that a run is in, counted from 0.", ["run"], registry=registry
    )
    live = Gauge("agentrl_live", "1 while a run's process lives.", ["run"], registry=registry)
    for run in runs:
        status = run.status()
        live.labels(run.name).set(float(status["live"]))
        if isinstance(status["step"], int):
            steps.labels(run.name).set(status["step"])
        newest = {
            name: value
            for row in run.metrics()
            for name, value in row.items()
            if isinstance(value, int | float)
        }
        for name, value in newest.items():
            if name != "step":
                values.labels(run.name, name).set(value)
    return generate_latest(registry)
