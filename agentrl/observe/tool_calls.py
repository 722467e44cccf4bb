"""The tools called in an episode, by the environment's info, or else by the messages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentrl.conversation.tools import is_refusal
from agentrl.trajectory import Message, Trajectory

_Call = tuple[str | None, bool, float | None]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call in the turn with this number. `name` is None if it could not be read, which counts as
    `refused`, as does a call that was answered by an error. `seconds`: how long it took, or its
    share of the environment's time in the turn, where the environment does not measure it.
    """

    turn: int
    name: str | None
    refused: bool
    seconds: float


def called_tools(trajectory: Trajectory) -> Iterator[CalledTool]:
    """The calls of an episode, in order."""
    said = _calls_by_message(trajectory.messages)
    for number, turn in enumerate(trajectory.turns):
        if turn.calls is None:
            found: list[_Call] = [
                (*one, None) for one in (said[number] if number < len(said) else ())
            ]
        else:
            found = [
                (one.call.name if one.call else None, one.refused or not one.call, one.seconds)
                for one in turn.calls
            ]
        share = turn.env_seconds / max(1, len(found))
        for name, refused, seconds in found:
            yield CalledTool(number, name, refused, share if seconds is None else seconds)


def _calls_by_message(messages: Sequence[Message]) -> list[list[tuple[str, bool]]]:
    """The calls in each message of the model, and whether each call's result is a refusal."""
    places = [place for place, message in enumerate(messages) if message.is_answer]
    found = []
    for place, following in pairwise([*places, len(messages)]):
        # Results name their call if the template has ids; the others are in the order of the calls.
        results = messages[place + 1 : following]
        by_id = {result.tool_call_id: result for result in results if result.tool_call_id}
        in_order = iter([result for result in results if not result.tool_call_id])
        calls = messages[place].tool_calls
        answers = [by_id.get(call.id) or next(in_order, None) for call in calls]
        refused = [answer is not None and is_refusal(answer.content) for answer in answers]
        found.append([(call.name, no) for call, no in zip(calls, refused, strict=True)])
    return found
