"""A trace of a run (`agentrl/observe/profiler.py`), read: the busy resources, and the cost of
recording.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.observe.profiler import (
    CONTROLLER,
    CPU,
    FOLDER,
    GPU,
    LOOP_BUSY,
    PHASES,
    PROFILER,
    SUFFIX,
    TRACING,
    resource_of,
)
from agentrl.observe.trace_file import Trace, read_trace
from agentrl.viewer.timing import busy_sets

_COMMIT = "commit"
"""While weights are committed, engines hold their requests and sample nothing."""
_LEAST_PERCENT = 0.5
"""Workers that are less busy than this are left out of a table."""


@dataclass(slots=True)
class TracedTime:
    """A stretch of a trace, in Unix time.

    `tracing` are the seconds that recording itself took, which are subtracted from `busy` and
    `seconds`.
    """

    trace: Trace
    path: Path
    begin: float
    end: float
    tracing: float = field(init=False)

    def __post_init__(self) -> None:
        length = self.end - self.begin
        self.tracing = length * self.trace.mean(PROFILER, TRACING, self.begin, self.end) / 100

    @property
    def seconds(self) -> float:
        """Its length, without the time of recording."""
        return self.end - self.begin - self.tracing

    @property
    def resources(self) -> dict[str, list[tuple[float, float]]]:
        """The times at which each resource was busy."""
        found = defaultdict[str, list[tuple[float, float]]](list)
        for one in self.trace.slices:
            if one.group != PHASES:
                found[resource_of(one.group)].append((one.begin, one.end))
        return dict(sorted(found.items()))

    @property
    def busy(self) -> dict[frozenset[str], float]:
        """Seconds by set of busy resources, the most first; see `without`."""
        return without(busy_sets(self.resources, self.begin, self.end), self.tracing)

    @property
    def sampling(self) -> float:
        """The share of the time in which an engine sampled tokens: it had requests, and no weights
        were committed.
        """
        committed = [(one.begin, one.end) for one in self.trace.slices if one.name == _COMMIT]
        sets = busy_sets(
            {"engine": self.resources.get("engine", []), _COMMIT: committed}, self.begin, self.end
        )
        return sets.get(frozenset({"engine"}), 0.0) / max(self.end - self.begin, 1e-9)

    @property
    def answers(self) -> float:
        """The mean number of answers that were sampled simultaneously."""
        spans = self.resources.get("engine", [])
        clipped = (min(end, self.end) - max(begin, self.begin) for begin, end in spans)
        return sum(seconds for seconds in clipped if seconds > 0) / max(self.end - self.begin, 1e-9)

    @property
    def controller(self) -> float:
        """The share of the time in which the event loop worked, without what recording took."""
        busy = self.trace.mean(CONTROLLER, LOOP_BUSY, self.begin, self.end) / 100
        return max(0.0, busy - self.tracing / max(self.end - self.begin, 1e-9))

    def workers(self) -> list[tuple[str, str, float]]:
        """Of each worker: what it is, of what, and the percentage. CPU is in percent of one core;
        then GPUs, and how long each of several engines, ranks and so on had something to do.
        """
        rows = []
        for kind in (CPU, GPU):
            names = [name for group, name in self.trace.levels if group == kind]
            means = {name: self.trace.mean(kind, name, self.begin, self.end) for name in names}
            used = {
                name: mean for name, mean in means.items() if kind == GPU or mean >= _LEAST_PERCENT
            }
            rows += [
                (name, kind, mean) for name, mean in sorted(used.items(), key=lambda pair: -pair[1])
            ]
        by_group = defaultdict[str, list[tuple[float, float]]](list)
        for one in self.trace.slices:
            if resource_of(one.group) != one.group:
                by_group[one.group].append((one.begin, one.end))
        for group, spans in sorted(by_group.items()):
            sets = busy_sets({group: spans}, self.begin, self.end)
            rows.append(
                (
                    group,
                    "busy",
                    100 * sets.get(frozenset({group}), 0.0) / max(self.end - self.begin, 1e-9),
                )
            )
        return rows


def without(busy: Mapping[frozenset[str], float], tracing: float) -> dict[frozenset[str], float]:
    """The table without the time that recording took, as RL-Scope corrects for its book-keeping
    (section 3.4).

    Recording works where the controller does: its time is subtracted from the sets with the
    controller, in proportion, and what they do not have from the time in which nothing was busy.
    """
    left = dict(busy)
    for fitting in ([names for names in busy if CONTROLLER in names], [frozenset[str]()]):
        there = sum(left.get(names, 0.0) for names in fitting)
        taken = min(tracing, there)
        for names in fitting:
            if there > 0 and names in left:
                left[names] -= taken * left[names] / there
        tracing -= taken
    return dict(sorted(left.items(), key=lambda pair: -pair[1]))


def newest_trace(run: Path, during: Sequence[tuple[float, float]] | None) -> TracedTime | None:
    """The newest trace of a run that recorded anything between some times, by default any; None if
    there is none.

    Raises:
        ConfigError: a trace cannot be read.
    """
    for path in sorted(
        (run / FOLDER).glob(f"*{SUFFIX}"), key=lambda one: one.stat().st_mtime, reverse=True
    ):
        trace = read_trace(path)
        begin, end = trace.begin, trace.end
        if during is not None:
            begin, end = max(begin, during[0][0]), min(end, during[-1][1])
        if end > begin:
            return TracedTime(trace, path, begin, end)
    return None


def advice_on(busy: Mapping[frozenset[str], float]) -> list[str]:
    """The advice of a trace besides `agentrl.viewer.timing.advice`: rewards and the controller as
    bottlenecks.
    """
    total = max(sum(busy.values()), 1e-9)
    alone = (
        sum(seconds for names, seconds in busy.items() if names == frozenset({"rewards"})) / total
    )
    loop = (
        sum(seconds for names, seconds in busy.items() if names == frozenset({CONTROLLER})) / total
    )
    said = []
    if alone > 0.15:
        said.append(
            f"In {alone:.0%} of the time only rewards are computed: let more rules run at once "
            "(rollout.rules.workers, cluster.reward_workers), or use a faster judge."
        )
    if loop > 0.15:
        said.append(
            f"In {loop:.0%} of the time only the controller works: run environments elsewhere "
            "(cluster.env_workers), and look at its longest spans in the trace."
        )
    return said
