"""A loop that asks for the model's messages, turned into `reset` and `step`: for libraries that own their loops."""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentrl.envs import background
from agentrl.errors import EnvError
from agentrl.rollout.tools import ParsedReply, parse_tool_calls

Output = TypeVar("Output")

Line = tuple[str, str]
"""(role, text) of a message."""
Ask = Callable[[Sequence[Line], Sequence[Mapping[str, Any]]], Awaitable[ParsedReply]]
"""Called with the whole conversation and the tools; gives the model's next message."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is new in the conversation, the tools, and where the answer goes."""

    lines: Sequence[Line]
    tools: tuple[Mapping[str, Any], ...]
    answer: "Future[str]"


class CallbackEnv(Generic[Output]):
    """One run of `play(ask)` in the background, which stands still while the model is asked."""

    def __init__(self, play: Callable[[Ask], Coroutine[Any, Any, Output]]) -> None:
        self._heard: queue.SimpleQueue[Asked | Future[Output]] = queue.SimpleQueue()
        self._asked: Asked | None = None
        self._seen: list[Line] = []
        self._gone = threading.Event()
        self._done = background.start(self._run(play))
        self._done.add_done_callback(self._heard.put)

    def next(self) -> Asked | Output:
        """What the model is asked next, or the output of the whole run; raises what the run raised."""
        heard = self._heard.get()
        if isinstance(heard, Asked):
            self._asked = heard
            return heard
        return heard.result()

    def answer(self, text: str) -> Asked | Output:
        """Answer what was asked last, and wait for the next."""
        assert self._asked is not None
        self._asked.answer.set_result(text)
        return self.next()

    def cancel(self, seconds: float = 5.0) -> None:
        """End it where it stands, and give it so long to put away what it holds."""
        if self._done.cancel():
            self._gone.wait(seconds)

    async def _run(self, play: Callable[[Ask], Coroutine[Any, Any, Output]]) -> Output:
        try:
            return await play(self._ask)
        finally:
            self._gone.set()

    async def _ask(self, lines: Sequence[Line], tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        if list(lines[: len(self._seen)]) != self._seen:
            raise EnvError(
                "the environment shows the model another conversation than the one it was in: it rewrites its history, "
                "or asks models of its own. Neither is played here"
            )
        asked = Asked(lines[len(self._seen) :], tuple(tools), Future())
        self._heard.put(asked)
        text = await asyncio.wrap_future(asked.answer)
        text = text.encode(errors="replace").decode()  # a model may write half of a surrogate pair
        reply = parse_tool_calls(text) if tools else ParsedReply(text)
        message = reply if reply.calls else ParsedReply(text)
        self._seen = [*lines, ("assistant", message.text)]
        return message


def opening(lines: Sequence[Line]) -> tuple[str, str]:
    """The system prompt and the first observation; of several messages each says whose it is."""
    system = "\n".join(text for role, text in lines if role == "system")
    rest = [(role, text) for role, text in lines if role != "system"]
    return system, rest[0][1] if len(rest) == 1 else "\n\n".join(f"{role}: {text}" for role, text in rest)


def line(message: Mapping[str, Any]) -> Line:
    """A chat message as (role, text).

    Raises:
        EnvError: it has other parts than text.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return str(message["role"]), content
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise EnvError("the environment shows the model something other than text, which is not played here")
    return str(message["role"]), "".join(texts)


def tenths(count: int, test: bool) -> Sequence[int]:
    """Every tenth row for the test, the others for training; with fewer than ten the last is for the test."""
    if count < 2:
        return range(count)
    held_out = range(count - 1, -1, -10)
    return held_out if test else [number for number in range(count) if number not in held_out]
