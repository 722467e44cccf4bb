"""The messages between the controller and a rollout worker.

    controller ── Play, Cancel ─▶ worker      an episode, from its assignment to its trajectories
               ◀─ Sampled, Progress, Played, Raised, Cancelled ──
    controller ── MemoryShared, Received ─▶ worker      how large episodes travel
    controller ── Serves, ClockHeld, ClockReleased ─▶ worker      an engine and its clock
    controller ── ServesDirectly ─▶ worker    which replicas it may ask itself
               ◀─ AskedDirectly ──            what it has asked there
    controller ◀─ Ready, Pulse ── worker      that it plays, and a sign of life of its event loop
    controller ── Welcome, HavePlayed, Stop ─▶ worker

Requests to an engine travel as agentrl/cluster/engine_link.py says, over this link or over one
to the engine itself.
Assignments and trajectories are pickled by themselves: they are unpickled by the task that waits
for them, and a defect in one harms no other. From a worker on the controller's machine, long
episodes do not travel at all: the controller maps the memory where the worker has laid them
(`Parcel`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agentrl.cluster.parcel import MemoryProbe, Parcel
from agentrl.net.pickled import Pickled
from agentrl.rollout.assignment import TokensSampled
from agentrl.settings.sampling import SamplingParams

if TYPE_CHECKING:
    from agentrl.cluster.engine_door import Doors
    from agentrl.net.link import Door


@dataclass(frozen=True, slots=True)
class PlayedPolicy:
    """The policy of an episode: an engine of the controller, and how it samples."""

    engine: str
    """The name of the engine among those that the controller serves (`Serves`)."""
    sampling: SamplingParams
    trained: bool
    """Its answers are trained on (`EnginePolicy.trained`)."""
    opponent: str = ""
    """The engine that plays `opposing` agents, in self-play; "" if there is none."""
    opposing: tuple[str, ...] = ()


class Play(NamedTuple):
    """Play an episode."""

    number: int
    policy: PlayedPolicy
    assignment: bytes
    """The pickled `Assignment`."""


class Cancel(NamedTuple):
    """Cancel an episode; `Cancelled` follows when nothing of it runs any more."""

    number: int


class Serves(NamedTuple):
    """The controller serves an engine by this name."""

    engine: str
    max_context: int
    held: bool
    """Its clock stands still."""


class ServesDirectly(NamedTuple):
    """From now on, the worker asks these replicas of an engine itself. If there are none, and where
    one cannot be reached, it asks the controller.
    """

    engine: str
    doors: "Doors"


class AskedDirectly(NamedTuple):
    """The worker's requests to a replica, if they have changed since its last such message."""

    engine: str
    door: "Door"
    live: int
    """Requests in flight."""
    answers: int
    """Answers since the last such message."""


class ClockHeld(NamedTuple):
    """The clock of an engine stands still from now on."""

    engine: str


class ClockReleased(NamedTuple):
    """The clock of an engine goes on."""

    engine: str


class Welcome(NamedTuple):
    """The first message to a worker."""

    elapsed: float
    """The controller's clock, by which times in trajectories are told (`agentrl.flow.elapsed`)."""


class HavePlayed(NamedTuple):
    """A worker of the run has played an episode that did not fail. So the settings are right: an
    environment that cannot be opened from now on is only unavailable for a while.
    """


class Stop(NamedTuple):
    """End: close the environments and leave."""


class Ready(NamedTuple):
    """The worker has made its parts, and plays."""

    probe: MemoryProbe
    """Shows the controller whether both are on one machine."""


class MemoryShared(NamedTuple):
    """The controller can open the memory of the worker."""


class Pulse(NamedTuple):
    """A sign of life of the worker's event loop."""

    cpu_seconds: float
    """CPU time of the worker's process so far."""
    busy_seconds: float
    """Seconds so far in which its event loop ran callbacks, and episodes waited for their turn."""


class Sampled(NamedTuple):
    """Answers that episodes got since the last message of this kind."""

    answers: Mapping[int, tuple[int, int, int]]
    """The fields of `TokensSampled` by episode. Their class would be most of what it costs the
    controller to read them."""

    @classmethod
    def of(cls, reports: Mapping[int, TokensSampled]) -> "Sampled":
        """The reports of these episodes."""
        return cls({n: (one.tokens, one.answers, one.context) for n, one in reports.items()})


class Progress(NamedTuple):
    """What an episode has played so far (`TurnsPlayed`), as a pickled `SegmentChanges`."""

    number: int
    changes: bytes


class Played(NamedTuple):
    """An episode has ended: its pickled trajectories."""

    number: int
    trajectories: Pickled | Parcel


class Received(NamedTuple):
    """The controller has the trajectories of an episode, and needs the `Parcel` no more."""

    number: int


class Raised(NamedTuple):
    """An episode has raised what is no failure of a rollout: wrong settings, or a defect."""

    number: int
    error: BaseException


class Cancelled(NamedTuple):
    """Nothing of a cancelled episode runs any more."""

    number: int
