"""Turns a loop that calls the model into `reset` and `step`, for libraries that own the rollout
loop.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentrl.conversation.tool_calls import ParsedReply, parse_tool_calls
from agentrl.envs import background
from agentrl.errors import EnvError

Output = TypeVar("Output")

Line = tuple[str, str]
"""(role, text) of a message."""
Ask = Callable[[Sequence[Line], Sequence[Mapping[str, Any]]], Awaitable[ParsedReply]]
"""Takes the whole conversation and the tools; returns the model's next message."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for the model's next message: the new lines of the conversation, the tools, and the
    answer's future.
    """

    lines: Sequence[Line]
    tools: tuple[Mapping[str, Any], ...]
    answer: "Future[str]"


class CallbackEnv(Generic[Output]):
    """One run of `play(ask)` in the background, which pauses while it waits for the model."""

    def __init__(self, play: Callable[[Ask], Coroutine[Any, Any, Output]]) -> None:
        self._heard: queue.SimpleQueue[Asked | Future[Output]] = queue.SimpleQueue()
        self._asked: Asked | None = None
        self._seen: list[Line] = []
        self._gone = threading.Event()
        self._done = background.start(self._run(play))
        self._done.add_done_callback(self._heard.put)

    def next(self) -> Asked | Output:
        """Wait for the next request to the model, or for the run's output. Raises the run's
        exception, if any.
        """
        heard = self._heard.get()
        if isinstance(heard, Asked):
            self._asked = heard
            return heard
        return heard.result()

    def answer(self, text: str) -> Asked | Output:
        """Answer the last request, and wait for the next one or the output."""
        assert self._asked is not None
        self._asked.answer.set_result(text)
        return self.next()

    def cancel(self, seconds: float = 5.0) -> None:
        """Cancel the run, and wait up to `seconds` for it to clean up."""
        if self._done.cancel():
            self._gone.wait(seconds)

    async def _run(self, play: Callable[[Ask], Coroutine[Any, Any, Output]]) -> Output:
        try:
            return await play(self._ask)
        finally:
            self._gone.set()

    async def _ask(self, lines: Sequence[Line], tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        if list(lines[: len(self._seen)]) != self._seen:
            # Tokens that were sampled must stay as they are, so only new lines can be appended.
            raise EnvError(
                "the environment's prompt does not continue the model's conversation: it rewrites"
                " the history, or asks models of its own. Neither is supported"
            )
        asked = Asked(lines[len(self._seen) :], tuple(tools), Future())
        self._heard.put(asked)
        text = await asyncio.wrap_future(asked.answer)
        text = text.encode(errors="replace").decode()  # a model may write half of a surrogate pair
        reply = parse_tool_calls(text) if tools else ParsedReply(text)
        message = reply if reply.calls else ParsedReply(text)  # what cannot be read stays text
        self._seen = [*lines, ("assistant", message.text)]
        return message


def opening(lines: Sequence[Line]) -> tuple[str, str]:
    """The system prompt and the first observation. If it has several messages, each is prefixed
    with its role.
    """
    system = "\n".join(text for role, text in lines if role == "system")
    rest = [(role, text) for role, text in lines if role != "system"]
    return system, (
        rest[0][1] if len(rest) == 1 else "\n\n".join(f"{role}: {text}" for role, text in rest)
    )


def line(message: Mapping[str, Any]) -> Line:
    """A chat message as (role, text).

    Raises:
        EnvError: it has parts that are not text.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return str(message["role"]), content
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise EnvError(
            "the environment shows the model something other than text, which is not supported"
        )
    return str(message["role"]), "".join(texts)


def tenths(count: int, test: bool) -> Sequence[int]:
    """Every tenth row for the test, the others for training. With fewer than ten rows, the last is
    for the test.
    """
    if count < 2:
        return range(count)
    held_out = range(count - 1, -1, -10)
    return held_out if test else [number for number in range(count) if number not in held_out]
