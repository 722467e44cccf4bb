"""The calls of one episode: what a program asked, what the model answered, and how both are
compared.

A program sends the whole conversation with each call. Two messages are the same if they say the
same: white space around an answer, the ids of calls and the order of an object's keys do not
matter, because programs change them on the way. What the model sampled is never tokenised again,
however a program writes it back.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from agentrl.protocols import AnswerFormat
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import IntArray, ints
from agentrl.tokens.placed_images import PlacedImage, shifted
from agentrl.trajectory import Completion, Message, ToolCall

CallKind = Literal["start", "extension", "branch", "retry", "subagent", "compaction", "edit"]
"""The beginning of a call, from the calls before it in its episode:

- `start`: it is the first one;
- `extension`: it goes on after an answer that no other call went on after;
- `branch`: it goes on after an answer that another call went on after, too;
- `retry`: it asks the same as an earlier call, for another answer;
- `compaction`: with tools and system messages of an earlier conversation, it has another, shorter
  history, in which an earlier answer is quoted (a summary);
- `edit`: it goes on with an earlier conversation that the program has changed: it begins as that
  one and has another history, or has the same tools and an answer of it;
- `subagent`: it is a conversation of its own.
"""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Sampling options from the request; None means unset.

    The run's own `temperature` and `top_p` win in training. `max_tokens` can only lower the run's,
    and `stop` adds to it.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    may_call: bool = True
    """True if an answer may call tools; else what looks like a call stays text."""
    format: AnswerFormat | None = None

    def applied(self, sampling: SamplingParams, *, trained: bool) -> SamplingParams:
        """The run's sampling, with the options that a program may set."""
        update: dict[str, Any] = {}
        if self.max_tokens is not None and self.max_tokens < sampling.max_tokens:
            update["max_tokens"] = self.max_tokens
        if self.stop:
            update["stop"] = (*sampling.stop, *self.stop)
        if not trained:
            wished = {"temperature": self.temperature, "top_p": self.top_p}
            update |= {name: value for name, value in wished.items() if value is not None}
        return sampling.model_copy(update=update) if update else sampling


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of a program, whatever protocol it speaks. `count`: how many answers it wants.

    `request_id`: its idempotency key, if it sends one. `repeated`: the client marked this
    as a retry. `model`: the name that it calls the model by; empty: none.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    count: int = 1
    options: RequestOptions = RequestOptions()
    request_id: str = ""
    repeated: bool = False
    model: str = ""


@dataclass(eq=False, slots=True)
class AgentCall:
    """A request, and its answers so far. `number` counts the calls of the episode.

    Its prompt is the tokens up to `parent`, and `new_ids`. Without a parent, these are the whole
    prompt. `new_images` are the pictures among `new_ids`.
    """

    number: int
    kind: CallKind
    parent: "AgentAnswer | None"
    new_messages: Sequence[Message]
    new_ids: IntArray
    asked: float = 0.0
    opening: bytes = b""
    """Identifies how its conversation begins: the messages before the first answer."""
    episode: str = ""
    """Identifies its episode in what programs get: no two answers of a run have the same id."""
    by_name: bool = True
    """True if it asked for the policy by its name."""
    created: int = field(default_factory=lambda: int(datetime.now(UTC).timestamp()))
    """The time of the request, as programs see it: in seconds since 1970."""
    answers: list["AgentAnswer"] = field(default_factory=list)
    delivered: bool = False
    """True if the program has received all answers."""
    error: Exception | None = None
    new_images: tuple[PlacedImage, ...] = ()
    prompt_length: int = field(init=False)
    """The number of tokens of the whole prompt."""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.new_ids) + (0 if self.parent is None else self.parent.end)

    @property
    def name(self) -> str:
        """Its id for programs; each protocol puts a prefix before it."""
        return f"{self.episode}_{self.number}"

    @property
    def prompt_ids(self) -> IntArray:
        """The tokens of the whole prompt."""
        pieces = [self.new_ids]
        answer = self.parent
        while answer is not None:
            pieces += [answer.completion.token_ids, answer.call.new_ids]
            answer = answer.call.parent
        return ints(np.concatenate(pieces[::-1]))

    @property
    def prompt_images(self) -> tuple[PlacedImage, ...]:
        """The pictures among the tokens of the whole prompt."""
        calls: list[AgentCall] = [self]
        while (answer := calls[-1].parent) is not None:
            calls.append(answer.call)
        return tuple(
            image
            for call in reversed(calls)
            for image in shifted(call.new_images, call.prompt_length - len(call.new_ids))
        )


@dataclass(eq=False, slots=True)
class AgentAnswer:
    """A sampled answer. `message` is what the program got, with the ids of tool calls that the
    model wrote.

    `thread` names the engine's session that sampled it. `extended`: a call goes on after it, and in
    its row. `returned`: a call goes on after it, so the program saw it. `digest` is that of the
    conversation up to its end.
    """

    call: AgentCall
    completion: Completion
    message: Message
    thread: str
    answered: float = 0.0
    digest: bytes = b""
    extended: bool = False
    returned: bool = False
    stopped_at: str = ""
    """The program's stop text that ended it, which is not in the message."""
    reward: float = 0.0
    rewarded: bool = False
    """True if a reward came for it."""

    @property
    def end(self) -> int:
        """The number of tokens of the conversation up to its end."""
        return self.call.prompt_length + len(self.completion.token_ids)

    @property
    def seen(self) -> bool:
        """True if the program has seen it. Others are not trained on, because nothing followed from
        them.
        """
        return self.call.delivered or self.returned

    @property
    def id(self) -> str:
        """Its name in the episode: the number of its call, and its place among several answers."""
        place = self.call.answers.index(self)
        return f"{self.call.number}-{place}" if place else str(self.call.number)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Its calls of tools, with the ids that the program gets: no two of a run are the same."""
        return tuple(
            replace(call, id=f"call_{self.call.episode}_{self.id}_{number}")
            for number, call in enumerate(self.message.tool_calls)
        )


def digest_of_tools(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Identifies tools, with which each conversation begins."""
    return blake2b(_canonical([dict(tool) for tool in tools]), digest_size=16).digest()


def digest_after(before: bytes, message: Message) -> bytes:
    """Identifies a conversation that one more message follows."""
    said = message.said.strip() if message.role == "assistant" else message.content
    # Lengths separate the fields, so that no content can imitate another role or message.
    text = said.encode(errors="surrogatepass")
    whole = b"%b%b %d %b" % (before, message.role.encode(), len(text), text)
    if message.tool_calls:
        whole += _canonical([[call.name, dict(call.arguments)] for call in message.tool_calls])
    for image in message.images:
        whole += b" image " + image.digest.encode()
    return blake2b(whole, digest_size=16).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
