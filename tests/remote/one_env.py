"""One environment for all transports (test_transports.py); the worker and the server read it from
this file.
"""

import re
from collections.abc import Mapping
from typing import Any

from agentrl.envs.base import TextEnv
from agentrl.protocols import StepResult


class Dials(TextEnv):
    """A safe with dials: 1/3 for each that is right, in at most six tries."""

    system_prompt = "Open the safe ⚙. Say three digits."
    isolation = "inline"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.code, self.tries = (
            [str(self.rng.randrange(options.get("digits", 2))) for _ in range(3)],
            0,
        )
        return f"The dials hum {self.rng.random()}."

    def step(self, action: str) -> StepResult:
        self.tries += 1
        right = sum(
            said == dial for said, dial in zip(re.findall(r"\d", action), self.code, strict=False)
        )
        opened, heard = right == 3, self.rng.random()
        info = {"success": opened, "heard": [heard, "click ♪"]}
        return (
            f"{right} right, a hum of {heard}.",
            right / 3,
            opened,
            self.tries == 6 and not opened,
            info,
        )
