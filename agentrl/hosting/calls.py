"""The calls that an environment has made, which go the way of its infos, as its pictures do.

Only the environment knows what it takes for a call: JSON, words, or whatever its library reads. One
that has tools keeps those of its last step in `calls_made`. `KeepsCalls` adds them to the info
where the environment runs, so that they cross every transport. Where an episode is played,
`calls_taken` takes them out again, into the turn.
"""

from collections.abc import Awaitable, Mapping
from typing import Any

from agentrl.hosting.wrappers import Wrapper
from agentrl.protocols.env import Env, StepResult
from agentrl.trajectory import MadeCall, ToolCall

CALLS = "calls_made"
"""The attribute of an environment, and the key of an info."""


class KeepsCalls(Wrapper):
    """An environment whose infos have the calls that it made."""

    picklable = True

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._last_list: object = None

    def restore(self, state: bytes) -> None | Awaitable[None]:
        """Go back to a state, whose last step has told its calls already."""
        restoring = super().restore(state)
        if restoring is not None:
            return self._restore_later(restoring)
        self._last_list = getattr(self.env, CALLS, None)
        return None

    async def _restore_later(self, restoring: Awaitable[None]) -> None:
        await restoring
        self._last_list = getattr(self.env, CALLS, None)

    def stepped(self, result: StepResult) -> StepResult:
        """The result with the calls of the step. A malformed one is left for the host to refuse."""
        made: Any = getattr(self.env, CALLS, None)
        if made is None or len(result) != 5 or not isinstance(result[-1], Mapping):
            return result
        # A wrapper may answer without a step of the environment, whose calls are then the old ones:
        # an environment makes a new list for each step.
        new = made if made is not self._last_list else ()
        self._last_list = made
        return (*result[:-1], {**result[-1], CALLS: [_as_json(call) for call in new]})


def recorded(env: Env) -> Env:
    """The environment with its calls in its infos, if it keeps them."""
    return KeepsCalls(env) if hasattr(env, CALLS) else env


def calls_taken(info: dict[str, Any]) -> tuple[list[MadeCall] | None, dict[str, Any]]:
    """The calls of an info, None if it says nothing about them, and the info without them."""
    if CALLS not in info:
        return None, info
    rest = {key: value for key, value in info.items() if key != CALLS}
    try:
        return list(map(_from_json, info[CALLS])), rest
    except (LookupError, TypeError, ValueError):  # another's info that happens to have this key
        return None, info


def _as_json(made: MadeCall) -> dict[str, Any]:
    if made.call is None:
        return {"name": None, "refused": made.refused}
    written = {
        "name": made.call.name,
        "arguments": dict(made.call.arguments),
        "refused": made.refused,
    }
    return written if made.seconds is None else {**written, "seconds": made.seconds}


def _from_json(written: Mapping[str, Any]) -> MadeCall:
    if written["name"] is None:
        return MadeCall(None, bool(written["refused"]))
    seconds = written.get("seconds")
    call = ToolCall(str(written["name"]), dict(written["arguments"]))
    return MadeCall(call, bool(written["refused"]), None if seconds is None else float(seconds))
