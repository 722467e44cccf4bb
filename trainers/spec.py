"""What the ranks of a trainer are made from. Nothing here loads torch: that is done where a rank lives."""

from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

from agentrl.trainers.settings import TrainerSettings

if TYPE_CHECKING:
    from agentrl.trainers.rank import TrainerRank

Head = Literal["policy", "value"]
"""What a model says of a token: its logprob, or the reward that is to be expected when all before it are there."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """What all ranks are made from. `sharding` is the "module:function" that makes a rank's `Sharding`
    (`agentrl/trainers/sharding.py`); `head` says what the model is to say of a token.
    """

    sharding: str
    config: TrainerSettings
    origin: Path
    total_steps: int
    temperature: float
    head: Head = "policy"

    def make_rank(self, rank: int) -> "TrainerRank":
        """The worker of a rank, in the process that it works in."""
        made: TrainerRank = resolve_name("agentrl.trainers.rank:TrainerRank")(self, rank)
        return made


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a rank stands among `world_size`; they meet at the `address`, "host:port" of rank 0."""

    rank: int
    world_size: int
    address: str
