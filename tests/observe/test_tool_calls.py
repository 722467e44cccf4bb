"""Which tools were called in an episode, whether the calls failed, and how long they took."""

from agentrl.observe.tool_calls import CalledTool, called_tools
from agentrl.trajectory import (
    Completion,
    MadeCall,
    Message,
    Task,
    Terminated,
    ToolCall,
    Trajectory,
    Turn,
)


def played(*turns: Turn, messages: tuple[Message, ...] = ()) -> Trajectory:
    return Trajectory("t/0/0", Task("shop", 0, id="t"), turns, Terminated(), messages)


def turn(*calls: MadeCall, seconds: float = 3.0, silent: bool = False) -> Turn:
    completion = Completion([5], [-1.0], [0], "stop")
    return Turn([1], completion, 0.0, {}, env_seconds=seconds, calls=None if silent else calls)


def test_the_environment_says_what_it_took_for_calls():
    buy, look = ToolCall("buy", {"what": "tea"}), ToolCall("look", {})
    trajectory = played(
        turn(MadeCall(buy, True, 0.25), MadeCall(look)), turn(), turn(MadeCall(None))
    )
    assert list(called_tools(trajectory)) == [
        CalledTool(0, "buy", True, 0.25),
        CalledTool(0, "look", False, 1.5),  # it was not measured: half of the turn's time
        CalledTool(2, None, True, 3.0),
    ]


def test_where_it_says_nothing_the_messages_do():
    """Results answer by the id of their call, or else in order."""
    first = (ToolCall("buy", {}, "x"), ToolCall("look", {}, "y"))
    messages = (
        Message("user", "Error: no, this is no result."),
        Message("assistant", "", tool_calls=(ToolCall("example", {}),), given=True),
        Message("assistant", "", tool_calls=first),
        Message("tool", "a shop", tool_call_id="y"),
        Message("tool", "Error: no money", tool_call_id="x"),
        Message("assistant", "", tool_calls=(ToolCall("look", {}), ToolCall("leave", {}))),
        Message("tool", "Error: dark"),
    )
    silent = turn(silent=True)
    assert list(called_tools(played(silent, silent, silent, messages=messages))) == [
        CalledTool(0, "buy", True, 1.5),
        CalledTool(0, "look", False, 1.5),
        CalledTool(1, "look", True, 1.5),
        CalledTool(1, "leave", False, 1.5),
    ]
