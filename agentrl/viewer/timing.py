"""The use of a run's time: the resources that were busy while others waited, and advice.

The table of busy sets is RL-Scope's (J. Gleeson et al., MLSys 2021, section 3): every moment
belongs to the set of resources that were busy in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.observe.machine import MachineState
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex
from agentrl.viewer.folders import Phase, RunFolder
from agentrl.viewer.stage_graph import stage_graph

Intervals = Sequence[tuple[float, float]]
_TIMELINE_BINS = 240
_MAX_SHOWN_RESOURCES = 8
_MOST_FILES = 16
"""More files of trajectories than these are not read for one picture, which then lacks engine and
environments.
"""
_LANES = {"train": "trainer", "weights": "weights", "evaluation": "evaluation"}
_OTHER_PHASE = "rest of the loop"


@dataclass(frozen=True, slots=True)
class Window:
    """The events of some steps, in Unix time: the loop's phases, and the times at which the model
    answered, environments worked, rewards worked and episodes were played.
    """

    begin: float
    end: float
    phases: Sequence[Phase]
    model: Intervals
    env: Intervals
    rewards: Intervals
    played: Intervals

    @property
    def lanes(self) -> dict[str, list[tuple[float, float]]]:
        """The phases by resource; `trainer` and `weights` are always among them."""
        found: dict[str, list[tuple[float, float]]] = {"trainer": [], "weights": []}
        for one in self.phases:
            name = (
                "waits for episodes"
                if one["phase"] == "rollout"
                else _LANES.get(one["phase"], _OTHER_PHASE)
            )
            found.setdefault(name, []).append((one["begin"], one["end"] or one["begin"]))
        return found

    @property
    def busy(self) -> dict[frozenset[str], float]:
        """Seconds by set of busy resources."""
        lanes = self.lanes
        resources = {"engine": self.model, "environments": self.env, "rewards": self.rewards}
        resources |= {name: lanes[name] for name in ("trainer", "weights")}
        return busy_sets(resources, self.begin, self.end)


def window_of(
    run: RunFolder,
    index: EpisodeIndex,
    reader: EpisodeReader,
    steps: tuple[int, int] | None,
    most_files: int,
) -> Window | None:
    """The steps from the first to the last of `steps`, by default all of the run; `None` if none of
    them was timed.

    If their episodes are in more than `most_files` files, turns are left out.
    """
    timed = [one for one in run.phases() if one["end"] is not None]
    phases = (
        timed if steps is None else [one for one in timed if steps[0] <= one["step"] <= steps[1]]
    )
    if not phases:
        return None
    begin, end = phases[0]["begin"], max(one["end"] or one["begin"] for one in phases)
    rows = index.in_play(begin, end)
    model, env, rewards = _work_intervals(reader, rows, begin, end, most_files)
    played = [(row["started"], row["started"] + row["seconds"]) for row in rows]
    return Window(begin, end, phases, model, env, rewards, played)


def timing(
    run: RunFolder, index: EpisodeIndex, reader: EpisodeReader, steps: tuple[int, int] | None
) -> dict[str, Any]:
    """The lanes of the steps from the first to the last of `steps`, by default the newest ones.

    `lanes`: for each resource, its intervals (phases) or its mean load in equal bins. `busy`:
    seconds by set of busy resources. `bound` and `advice`: what bound these steps, and what
    follows, in sentences. `graph`: see `stage_graph`. `all` and `played`: the steps that can be
    asked for, and those whose episodes are known. Times are seconds from `begin`.
    """
    known = sorted({one["step"] for one in run.phases() if one["end"] is not None})
    newest = (known[-min(_MAX_SHOWN_RESOURCES, len(known))], known[-1]) if known else None
    window = window_of(run, index, reader, steps or newest, _MOST_FILES)
    if window is None:
        return {
            "begin": None,
            "steps": [],
            "lanes": [],
            "busy": [],
            "advice": [],
            "all": known,
            "played": [],
            "bound": None,
            "graph": [],
        }
    begin, busy = window.begin, window.busy
    bins = np.linspace(begin, window.end, _TIMELINE_BINS + 1)
    lanes: list[dict[str, Any]] = [
        {"name": name, "intervals": [[a - begin, b - begin] for a, b in found]}
        for name, found in window.lanes.items()
    ]
    loads = {"episodes in play": window.played, "engine": window.model, "environments": window.env}
    for name, found in (loads | ({"rewards": window.rewards} if window.rewards else {})).items():
        lanes.append({"name": name, "load": [round(float(one), 3) for one in load(found, bins)]})
    lanes += machine_lanes(run.machine(begin, window.end), bins)
    return {
        "begin": begin,
        "seconds": window.end - begin,
        "steps": [[step, at - begin] for step, at in _step_begins(window.phases)],
        "all": known,
        "played": list(run.files("trajectories")),
        "lanes": lanes,
        "busy": [{"set": sorted(names), "seconds": seconds} for names, seconds in busy.items()],
        "bound": bound_by(busy),
        "advice": advice(
            busy,
            run.settings(),
            index.failed_layers(window.phases[0]["step"], window.phases[-1]["step"]),
        ),
        "graph": stage_graph(window, run.metrics(), run.settings()),
    }


def machine_lanes(
    states: Sequence[MachineState], bins: npt.NDArray[np.float64]
) -> list[dict[str, Any]]:
    """Lanes of the machine: means of what was sampled in each bin, or else what was sampled last
    before its end.

    `most`: what fills the lane; `unit`: `share`, `bytes` or `bytes/s`.
    """
    if not states:
        return []
    names = dict.fromkeys(name for state in states for name in state.gpus)
    largest = max(state.memory_total for state in states)
    found: dict[str, tuple[str, float | None, list[float]]] = {
        "CPU": ("share", 1.0, [state.cpu for state in states]),
        "memory": ("bytes", float(largest), [float(state.memory) for state in states]),
        **{name: ("share", 1.0, [state.gpus.get(name, 0.0) for state in states]) for name in names},
        **{
            f"{name} memory": ("share", 1.0, [one.gpu_memory.get(name, 0.0) for one in states])
            for name in names
        },
        "disk reads": ("bytes/s", None, [state.disk_read for state in states]),
        "disk writes": ("bytes/s", None, [state.disk_written for state in states]),
    }
    at = np.array([state.at for state in states])
    return [
        {
            "name": name,
            "unit": unit,
            "most": most,
            "load": _bin_means(at, np.array(values, np.float64), bins),
        }
        for name, (unit, most, values) in found.items()
    ]


def _bin_means(
    at: npt.NDArray[np.float64], values: npt.NDArray[np.float64], bins: npt.NDArray[np.float64]
) -> list[float | None]:
    places = np.searchsorted(at, bins)
    found: list[float | None] = []
    for begin, end in pairwise(places.tolist()):
        inside = values[begin:end] if end > begin else values[max(0, end - 1) : end]
        found.append(round(float(inside.mean()), 4) if len(inside) else None)
    return found


def busy_sets(
    resources: Mapping[str, Intervals], begin: float, end: float
) -> dict[frozenset[str], float]:
    """The seconds between `begin` and `end` in which exactly these resources were busy, the most
    first.

    The seconds add up to `end - begin`. The empty set is the time in which none of them was busy.

    Example: with the engine busy from 0 to 3 and the trainer from 2 to 4, the seconds from 0 to 5
    are {engine}: 2, {engine, trainer}: 1, {trainer}: 1, {}: 1.
    """
    # Between two marks, nothing begins or ends. `codes` has a bit for each resource: whether it was
    # busy in that stretch.
    marks = [begin, end, *(at for found in resources.values() for pair in found for at in pair)]
    times = np.unique(np.clip(np.asarray(marks, np.float64), begin, end))
    lengths, codes = np.diff(times), np.zeros(max(0, len(times) - 1), np.int64)
    for bit, found in enumerate(resources.values()):
        if len(found):
            edges = np.searchsorted(times, np.clip(np.asarray(found, np.float64), begin, end))
            change = np.zeros(len(times) + 1, np.int64)
            np.add.at(change, edges[:, 0], 1)
            np.add.at(change, edges[:, 1], -1)
            codes |= (np.cumsum(change)[: len(lengths)] > 0).astype(np.int64) << bit
    totals = {}
    for code in np.unique(codes).tolist():
        names = frozenset(name for bit, name in enumerate(resources) if code >> bit & 1)
        totals[names] = float(lengths[codes == code].sum())
    return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def load(intervals: Intervals, bins: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean number of intervals that are open in each bin."""
    if not len(intervals):
        return np.zeros(len(bins) - 1)
    ends = np.asarray(intervals, np.float64)
    covered = np.zeros(len(bins))
    for sign, times in ((1.0, np.sort(ends[:, 0])), (-1.0, np.sort(ends[:, 1]))):
        # The integral up to a bin's edge of how many intervals have begun (or ended) by then.
        summed = np.concatenate([[0.0], np.cumsum(times)])
        count = np.searchsorted(times, bins)
        covered += sign * (count * bins - summed[count])
    return np.diff(covered) / np.diff(bins)


def bound_by(busy: Mapping[frozenset[str], float]) -> str | None:
    """The bottleneck of the run: the trainer, if it works most of the time; else the resource that
    worked longest while it did not.

    `None` if nothing that is known of was busy most of the time.
    """
    without = {names: seconds for names, seconds in busy.items() if "trainer" not in names}
    total, idle = sum(busy.values()), sum(without.values())
    if total <= 0 or busy.get(frozenset(), 0.0) > 0.5 * total:
        return None
    if idle < 0.5 * total:
        return "trainer"
    working = {
        name: sum(s for names, s in without.items() if name in names)
        for names in without
        for name in names
    }
    return max(working, key=lambda name: working[name], default=None)


def advice(
    busy: Mapping[frozenset[str], float], settings: Mapping[str, Any], failed: Sequence[str] = ()
) -> list[str]:
    """The bottleneck of the run, and the settings that change it. `failed`: layers at fault for
    episodes that failed.
    """
    total = sum(busy.values())
    if total <= 0:
        return []

    def share(*names: str, without: tuple[str, ...] = ()) -> float:
        fitting = [
            seconds
            for found, seconds in busy.items()
            if found.issuperset(names) and not found.intersection(without)
        ]
        return sum(fitting) / total

    said = []
    waits, staleness = 1 - share("trainer"), settings.get("rollout.max_staleness", 0)
    if waits > 0.5 and share("engine") > 0.2:
        way_out = (
            "raise rollout.max_staleness to 1, so that the next step's episodes are played while it"
            " trains"
            if not staleness and share("trainer") > 0.1
            else (
                "give the engine more to do at once (rollout.max_live_episodes,"
                " rollout.groups_per_step), or add engines, or give the devices of the trainer to"
                " them"
            )
        )
        said.append(f"The trainer does not train in {waits:.0%} of the time: {way_out}.")
    if share("environments", without=("engine", "trainer")) > 0.15:
        alone = share("environments", without=("engine", "trainer"))
        said.append(
            f"In {alone:.0%} of the time only environments work: play more episodes at once"
            " (rollout.max_live_episodes), run them on more workers (cluster.env_workers), or make"
            " them faster."
        )
    if (alone := share("rewards", without=("engine", "environments", "trainer"))) > 0.15:
        said.append(
            f"In {alone:.0%} of the time only rewards work: let more of them run at once, give a"
            " judge more endpoints, or raise rollout.max_staleness, so that scoring overlaps with"
            " playing."
        )
    if share("trainer") > 0.6:
        said.append(
            f"The trainer is busy in {share('trainer'):.0%} of the time: more ranks"
            " (trainer.world_size) or larger micro-batches (trainer.micro_batch_tokens) make steps"
            " faster."
        )
    if share("weights") > 0.15:
        said.append(
            f"Publishing weights takes {share('weights'):.0%} of the time: see weights.transport,"
            " or train longer between updates (rollout.groups_per_step)."
        )
    idle = busy.get(frozenset(), 0.0) / total
    if idle > 0.2 and failed:
        said.append(
            f"In {idle:.0%} of the time none of these was busy, and episodes failed (in the layer"
            f" {' and '.join(failed)}): what most of these did is not kept. See why they failed,"
            " shorten rollout.deadlines, or record everything (observe.profile=true)."
        )
    elif idle > 0.2:
        said.append(
            f"In {idle:.0%} of the time none of these was busy. Evaluation, checkpoints and the"
            " writing of files are not among them: see the other lanes."
        )
    return said or ["Nothing stands out: engine and trainer share the time evenly."]


def _work_intervals(
    reader: EpisodeReader,
    rows: Sequence[Mapping[str, Any]],
    begin: float,
    end: float,
    most_files: int,
) -> tuple[list[tuple[float, float]], list[tuple[float, float]], list[tuple[float, float]]]:
    """The times at which the model answered, and environments and rewards worked, in the episodes
    of these rows.
    """
    files = sorted({(row["step"], row["kind"]) for row in rows})
    model: list[tuple[float, float]] = []
    env: list[tuple[float, float]] = []
    rewards: list[tuple[float, float]] = []
    for step, kind in files if len({step for step, _ in files}) <= most_files else ():
        for episode in reader.turns_of_step(step, kind):
            for asked, generated, waited in episode["turns"]:
                answered = asked + generated
                if asked < end and answered + waited > begin:
                    model.append((asked, answered))
                    env.append((answered, answered + waited))
            rewards += [
                (began, ended)
                for began, ended in episode["scoring"]
                if began < end and ended > begin
            ]
    return model, env, rewards


def _step_begins(phases: Sequence[Phase]) -> list[tuple[int, float]]:
    found: dict[int, float] = {}
    for one in phases:
        found.setdefault(one["step"], one["begin"])
    return sorted(found.items())
