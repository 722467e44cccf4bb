"""`RunState`: the state of a run's parts, which each checkpoint has in `state.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from agentrl.protocols import Stateful

STATE_FILE = "state.json"
"""The state's file in a checkpoint. Like the other files, it has a checksum there."""

Part = TypeVar("Part", bound=Stateful)


class RunState:
    """The parts of a run whose state is kept in its checkpoints, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}
        self._loaded: Mapping[str, Any] = {}

    def load(self, states: Mapping[str, Any]) -> None:
        """Restore these states, by name, into the parts that are added from now on."""
        self._loaded = states

    def add(self, name: str, part: Part) -> Part:
        """Restore a part from the loaded checkpoint, if it was saved there, and keep its state from
        now on. Returns the part.

        Raises:
            ValueError: there is a part of this name already.
        """
        if name in self._parts:
            raise ValueError(f"the state of {name!r} is kept already")
        if name in self._loaded:
            part.restore(self._loaded[name])
        self._parts[name] = part
        return part

    def snapshot(self) -> str:
        """The present state of all parts, as the text of `state.json`."""
        states = {name: part.state() for name, part in self._parts.items()}
        return json.dumps(states, indent=2) + "\n"


def write_state(checkpoint: Path, snapshot: str) -> None:
    """Write what `RunState.snapshot` has returned into a checkpoint."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / STATE_FILE).write_text(snapshot)


def read_state(checkpoint: Path) -> Mapping[str, Any] | None:
    """The states in a checkpoint, by the part's name; None if it is of a version without them."""
    path = checkpoint / STATE_FILE
    if not path.exists():
        return None
    states: Mapping[str, Any] = json.loads(path.read_text())
    return states
