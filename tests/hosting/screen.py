"""An environment that shows pictures, in a module that a process imports quickly."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl import EncodedImage, Observation, StepReply, TextEnv


class Screen(TextEnv):
    """Shows its steps as pictures, one more each time, and the second picture again and again."""

    isolation = "inline"
    deterministic = True

    def start(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.steps = 0
        return self._seen()

    def step(self, action: str) -> StepReply:
        self.steps += 1
        return self._seen(), 0.0, self.steps == 3, False, {"mine": [self.steps]}

    def _seen(self) -> Observation:
        shades = [0, *[200] * self.steps]
        pixels = [np.full((6, 8, 3), shade, np.uint8) for shade in shades]
        return Observation(f"step {self.steps}", [EncodedImage.of_pixels(one) for one in pixels])
