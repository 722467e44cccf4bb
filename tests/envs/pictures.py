"""A game of PettingZoo's kind for two agents who act at once and see pictures."""

from collections.abc import Sequence
from typing import Any, ClassVar

from gymnasium import spaces
from pettingzoo import ParallelEnv


class _Pictures(ParallelEnv[str, Any, int]):
    metadata: ClassVar[dict[str, str]] = {"name": "pictures_v0"}
    possible_agents: Sequence[str] = ("left", "right")
    render_mode = None

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(0, 255, (64, 64, 3), "uint8")

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(2)


def parallel_env() -> _Pictures:
    return _Pictures()
