"""How well an episode used its tools."""

import json
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from agentrl.protocols import Settings
from agentrl.rollout.tools import parse_tool_calls
from agentrl.trajectory import Message, Score, Trajectory

_REFUSED = "Error:"


class ToolUse:
    """The share of calls that could be read, were not refused by the tools, and did not repeat an earlier one.

    Parts: `calls`, and the shares `malformed`, `refused` and `repeated`.
    """

    isolation: Literal["inline"] = "inline"

    class Config(Settings):
        """What counts against a call."""

        repeats: bool = True
        """A call that was made before, with the same arguments, is a bad one."""
        without_calls: float = Field(0.0, allow_inf_nan=False)
        """The score of an episode in which no tool was called."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def content(self, trajectory: Trajectory) -> tuple[tuple[str, str], ...]:
        """The model's messages, each with what the tools said to it."""
        return tuple(exchanges(trajectory.messages))

    def evaluate(self, content: tuple[tuple[str, str], ...]) -> Score:
        """The share of good calls."""
        seen: set[str] = set()
        counts = {"calls": 0, "malformed": 0, "refused": 0, "repeated": 0}
        for message, answered in content:
            reply = parse_tool_calls(message)
            counts["calls"] += len(reply.calls) + len(reply.errors)
            counts["malformed"] += len(reply.errors)
            for call in reply.calls:
                written = json.dumps([call.name, dict(call.arguments)], sort_keys=True, default=str)
                if refused(answered, call.name, len(reply.calls) + len(reply.errors)):
                    counts["refused"] += 1
                elif self._config.repeats and written in seen:
                    counts["repeated"] += 1
                seen.add(written)
        calls = counts.pop("calls")
        bad = sum(counts.values())
        shares = {name: count / max(1, calls) for name, count in counts.items()}
        return Score((calls - bad) / calls if calls else self._config.without_calls, {"calls": float(calls), **shares})


def exchanges(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """The model's messages, each with what the tools said to it."""
    for number, message in enumerate(messages):
        if message.role == "assistant":
            following = messages[number + 1] if number + 1 < len(messages) else message
            yield message.content, following.content if following.role == "tool" else ""


def refused(answered: str, name: str, calls: int) -> bool:
    """Whether the tools answered a call of this name by an error.

    Where a message had several calls, each has a line in the answer that begins with its name.
    """
    if calls == 1:
        return answered.startswith(_REFUSED)
    return any(line.startswith(f"{name[:64]}: {_REFUSED}") for line in answered.splitlines())
