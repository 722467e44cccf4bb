"""Cards: is the next one higher or lower? An environment in a package of its own."""

from collections.abc import Mapping
from random import Random
from typing import Any

from agentrl.envs.base import TextEnv


class HigherLower(TextEnv):
    """Five of thirteen cards, shown one by one. Each right guess pays 1/4; a wrong one ends the episode."""

    system_prompt = "Is the next card higher or lower? Say higher or lower."
    isolation = "inline"  # it answers in microseconds; one that may block leaves this out and gets a thread

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.cards = self.rng.sample(range(1, 14), 5)  # `rng` is seeded with the task's seed
        return str(self.cards[0])

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        shown, following = self.cards.pop(0), self.cards[0]
        right = action.strip() == ("higher" if following > shown else "lower")
        won = right and len(self.cards) == 1
        return str(following), right / 4, won or not right, False, {"success": won}


def random_player(env: HigherLower, rng: Random) -> str:
    return rng.choice(["higher", "lower"])
