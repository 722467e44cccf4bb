"""Rewards for the use of tools in an episode."""

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Literal

from pydantic import Field

from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.conversation.tools import is_refusal
from agentrl.settings.base import Settings
from agentrl.trajectory import MadeCall, Message, Score, ToolCall, Trajectory, Turn

Said = str | tuple[MadeCall, ...]
"""An answer of the model: the calls in it, as its environment or its renderer took them, or else
its text.
"""


class ToolUse:
    """The share of calls that could be read, were not refused by the tools, and did not repeat an
    earlier one.

    Calls are those that the environment says it made (`Env.calls_made`), or that an agent's program
    got; else those in JSON in the messages. Parts: `calls`, and the shares `malformed`, `refused`
    and `repeated`.
    """

    isolation: Literal["inline"] = "inline"

    class Config(Settings):
        """The penalties for calls."""

        repeats: bool = True
        """A call that was made before, with the same arguments, is a bad one."""
        without_calls: float = Field(0.0, allow_inf_nan=False)
        """The score of an episode in which no tool was called."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def content(self, trajectory: Trajectory) -> tuple[tuple[Said, str], ...]:
        """The model's answers, each with what the tools said to it."""
        return tuple(exchanges(trajectory))

    def evaluate(self, content: tuple[tuple[Said, str], ...]) -> Score:
        """The share of good calls."""
        seen: set[str] = set()
        counts = {"malformed": 0, "refused": 0, "repeated": 0}
        calls = 0
        for said, answered in content:
            for made in calls_in(said, answered):
                calls += 1
                call = made.call
                # The order in which a call names its arguments makes no other call of it.
                written = (
                    None
                    if call is None
                    else json.dumps([call.name, dict(call.arguments)], sort_keys=True, default=str)
                )
                if made.refused:
                    counts["refused"] += 1
                elif written is None:
                    counts["malformed"] += 1
                elif self._config.repeats and written in seen:
                    counts["repeated"] += 1
                seen |= {written} if written is not None else set()
        bad = sum(counts.values())
        shares = {name: count / max(1, calls) for name, count in counts.items()}
        return Score(
            (calls - bad) / calls if calls else self._config.without_calls,
            {"calls": float(calls), **shares},
        )


def exchanges(trajectory: Trajectory) -> Iterator[tuple[Said, str]]:
    """The model's answers, each with what the tools said to it.

    The last answer belongs to the last turn, and so on backwards: a conversation may begin with
    examples.
    """
    messages = trajectory.messages
    places = [number for number, message in enumerate(messages) if message.is_answer]
    for back in range(max(len(places), len(trajectory.turns)), 0, -1):
        turn = trajectory.turns[-back] if back <= len(trajectory.turns) else None
        if back > len(places):
            yield (turn.calls or () if turn else ()), ""
            continue
        place = places[-back]
        following = messages[place + 1 :]
        results = list(takewhile(lambda message: message.role == "tool", following))
        yield _calls_or_text(messages[place], turn, results), results[0].content if results else ""


def calls_in(said: Said, answered: str) -> tuple[MadeCall, ...]:
    """The calls of an answer. Where all that is known is its text, an error of the tools shows that
    it was one.
    """
    if not isinstance(said, str):
        return said
    reply = parse_tool_calls(said)
    count = len(reply.calls) + len(reply.errors)
    if not count and is_refusal(answered):
        name, *_ = said.split() or [""]
        return (MadeCall(ToolCall(name, {"": said}), refused=True),)
    read = [MadeCall(call, _is_refused(answered, call.name, count)) for call in reply.calls]
    return (*read, *[MadeCall(None)] * len(reply.errors))


def _calls_or_text(message: Message, turn: Turn | None, results: Sequence[Message]) -> Said:
    """The calls of an answer from who knows them best: the environment, then the renderer."""
    if turn is not None and turn.calls is not None:
        return turn.calls
    if not message.tool_calls:
        return message.content
    errors = parse_tool_calls(message.said).errors
    return (*_match_results(message.tool_calls, results), *[MadeCall(None)] * len(errors))


def _match_results(calls: Sequence[ToolCall], results: Sequence[Message]) -> Iterator[MadeCall]:
    """Calls that a renderer has read, with what their results say: by id, in order, or in the lines
    of one result.
    """
    by_id = {result.tool_call_id: result.content for result in results if result.tool_call_id}
    for number, call in enumerate(calls):
        if call.id in by_id and len(by_id) == len(results):
            yield MadeCall(call, is_refusal(by_id[call.id]))
        elif len(results) == len(calls):
            yield MadeCall(call, is_refusal(results[number].content))
        else:
            answered = results[0].content if results else ""
            yield MadeCall(call, _is_refused(answered, call.name, len(calls)))


def _is_refused(answered: str, name: str, calls: int) -> bool:
    """True if the tools answered a call of this name with an error.

    Where a message had several calls, each has a line in the answer that begins with its name.
    """
    if calls == 1:
        return is_refusal(answered)
    return any(line.startswith(f"{name[:64]}: Error:") for line in answered.splitlines())
