"""An environment for servers over processes (test_spread.py), which imports as little as it can."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl.envs.base import TextEnv
from agentrl.protocols import StepResult


class Telling(TextEnv):
    """Says which process it lives in. `end` ends the episode, `die` the process; `closed` is where
    it writes that it was closed.
    """

    isolation = "inline"
    closed: Path | None = None

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.closed = Path(options["closed"]) if "closed" in options else None
        return str(os.getpid())

    def step(self, action: str) -> StepResult:
        if action == "die":
            os._exit(3)
        return f"{os.getpid()} {action}", 0.5, action == "end", False, {}

    def close(self) -> None:
        if self.closed is not None:
            self.closed.write_text("closed")


def telling() -> Callable[[], Telling]:
    return Telling


def hanging() -> Callable[[], Telling]:
    if multiprocessing.parent_process() is not None:
        threading.Event().wait()
    return Telling
