"""The specification of a trainer's ranks. Nothing here imports torch; only the ranks do."""

import socket
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from agentrl.placement.mesh import Mesh
from agentrl.trainers.settings import RoutingMode

if TYPE_CHECKING:
    from agentrl.trainers.rank.worker import TrainerRank

Head = Literal["policy", "value"]
"""A model's output for a token: its logprob, or the reward that is expected after the tokens before
it.
"""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The specification that all ranks share.

    `sharding` is the "module:function" that makes a rank's `Sharding`
    (`agentrl/trainers/rank/sharding.py`); `head` says what the model computes for a token.
    """

    sharding: str
    config: Any
    """The trainer's `TrainerSettings`, of the class that its sharding knows."""
    origin: Path
    total_steps: int
    temperature: float
    head: Head = "policy"

    @property
    def routing(self) -> RoutingMode:
        """The use of the experts that the engine chose (`trainer.routing`). A critic has
        experts of its own.
        """
        mode: RoutingMode = self.config.routing
        return mode if self.head == "policy" else "off"

    def make_rank(self, rank: int) -> "TrainerRank":
        """Make the worker of a rank; runs in the worker's process."""
        made: TrainerRank = resolve_name("agentrl.trainers.rank.worker:TrainerRank")(self, rank)
        return made


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank's number on the mesh of all ranks, and where they meet."""

    rank: int
    mesh: Mesh
    address: str
    """Rank 0's "host:port"."""
    meeting: socket.socket | None = None
    """On rank 0: the socket that is bound to `address`."""
