"""The graph of a run's stages and channels in some steps: how busy each was, and how long others
waited for it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.viewer.timing import Window


def stage_graph(
    window: "Window", rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The stages and channels that ran, in the order in which an episode meets them.

    Each has its `name`, its `kind` ("stage" or "channel"), and `facts`: [what, value] pairs. A
    stage has its `share`, of the time in which it was busy; a channel how `full` it was, on average
    at the end of a step, if it is bounded.
    """
    steps = {one["step"] for one in window.phases}
    inside = [row for row in rows if row["step"] in steps and "reward" in row]
    earlier = [row for row in rows if row["step"] < min(steps) and "reward" in row]
    seconds = max(window.end - window.begin, 1e-9)
    shares = {
        name: sum(spent for names, spent in window.busy.items() if name in names) / seconds
        for name in ("engine", "environments", "rewards", "trainer", "weights")
    }
    played = {
        "episodes": window.played,
        "engine": window.model,
        "environments": window.env,
        "rewards": window.rewards,
    }
    at_once = {}
    for name, intervals in played.items():
        # An episode may begin before the window, or end after it.
        inside_seconds = [
            min(end, window.end) - max(begin, window.begin) for begin, end in intervals
        ]
        at_once[name] = sum(inside_seconds) / seconds
    nodes = [_episodes_in_play(inside, at_once["episodes"], settings)]
    for name in ("engine", "environments", "rewards"):
        if at_once[name] > 0:
            nodes.append(
                _stage(name, shares[name], [["at once", round(at_once[name], 2) or "< 0.01"]])
            )
    nodes += _channels(inside, earlier)
    if ready := [row["groups/ready"] for row in inside if "groups/ready" in row]:
        nodes.append(
            _channel("ready groups", None, [["on average", round(sum(ready) / len(ready), 2)]])
        )
    blocked = _growth("blocked_seconds", inside, earlier)
    waits = [] if blocked is None else [["waited for groups", f"{blocked:.1f} s"]]
    nodes.append(_stage("trainer", shares["trainer"], waits))
    nodes.append(_stage("weights", shares["weights"], [["versions", len(inside)]]))
    return nodes


def _episodes_in_play(
    inside: Sequence[Mapping[str, Any]], at_once: float, settings: Mapping[str, Any]
) -> dict[str, Any]:
    facts: list[list[Any]] = [["at once", round(at_once, 2)]]
    limits = [row["live_episodes/limit"] for row in inside if "live_episodes/limit" in row]
    playing = [row["groups/playing"] for row in inside if "groups/playing" in row]
    if limits:
        facts.append(["slots", round(sum(limits) / len(limits))])
    if playing:
        most = (settings.get("rollout.max_staleness", 0) + 1) * settings.get(
            "rollout.groups_per_step", 0
        )
        facts.append(
            ["groups", f"{sum(playing) / len(playing):.1f}" + (f" of {most}" if most else "")]
        )
    full = at_once * len(limits) / sum(limits) if limits and sum(limits) else None
    return _channel("episodes in play", full, facts)


def _channels(
    inside: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The channels of the run's flow, by what each step has reported of them."""
    names = sorted(
        {key.split("/")[1] for row in inside for key in row if key.startswith("channels/")}
    )
    found = []
    for name in names:
        prefix = f"channels/{name}/"
        own = [row for row in inside if f"{prefix}depth" in row]
        depth = sum(row[f"{prefix}depth"] for row in own) / len(own)
        capacity = own[-1][f"{prefix}capacity"]
        facts: list[list[Any]] = [["depth", f"{depth:.1f} of {capacity:.0f}"]]
        for waiting, metric in (("episodes waited", "put_wait"), ("trainer waited", "get_wait")):
            if (grown := _growth(f"{prefix}{metric}", inside, earlier)) is not None:
                facts.append([waiting, f"{grown:.1f} s"])
        found.append(_channel(f"channel {name}", depth / capacity if capacity else None, facts))
    return found


def _growth(
    name: str, inside: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]
) -> float | None:
    """The increase of a counter in these steps. A resumed run counts from 0 again, so after a fall
    the new value is the increase.
    """
    values = [float(row[name]) for row in inside if name in row]
    if not values:
        return None
    before = [float(row[name]) for row in earlier[-1:] if name in row] or [0.0]
    pairs = zip([*before, *values], values, strict=False)
    return sum(later - former if later >= former else later for former, later in pairs)


def _stage(name: str, share: float, facts: list[list[Any]]) -> dict[str, Any]:
    return {"name": name, "kind": "stage", "share": round(share, 4), "facts": facts}


def _channel(name: str, full: float | None, facts: list[list[Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "channel",
        "full": None if full is None else round(min(1.0, full), 4),
        "facts": facts,
    }
