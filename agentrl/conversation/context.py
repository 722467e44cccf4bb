"""The part of its conversation that a model sees: `rollout.context`.

    context: full
    context: {name: last_k, turns: 3}
    context: {name: scratchpad}
    context: {name: summary, max_prompt_tokens: 2000}
    context: {name: summary, max_prompt_tokens: 2000, train: false}

A conversation keeps its whole transcript, of which the model sees a part. A context policy decides
what stays in that part. It always begins with the opening: the system message and the first
observation. If the part no longer extends the last prompt token for token, the conversation forks:
a new training sample begins, so the model is trained on exactly what it saw.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl.protocols.renderer import Conversation
from agentrl.settings.base import Settings
from agentrl.trajectory import Message

_PAD = re.compile(r"<scratchpad>.*?</scratchpad>", re.DOTALL)


class ContextPolicy(Settings):
    """Base class of the context policies: shows everything and requests nothing."""

    name: str
    observation_characters: int = Field(0, ge=0)
    """Most characters that are shown of what the environment answers to an action, such as the
    output of a tool: of longer ones the beginning and the end, with a notice between them. 0: no
    limit."""

    @property
    def instructions(self) -> str:
        """Text that follows the environment's prompt in the system message."""
        return ""

    def shorten(self, observation: str) -> str:
        """What is shown of an observation."""
        left_out = len(observation) - self.observation_characters
        if not self.observation_characters or left_out <= 0:
            return observation
        end = self.observation_characters // 2
        begin = self.observation_characters - end
        last = observation[len(observation) - end :]
        return f"{observation[:begin]}\n[{left_out} characters left out]\n{last}"

    @property
    def trains_requests(self) -> bool:
        """Whether the answers to `request` are trained on."""
        return True

    def keep(self, shown: Sequence[Message]) -> Sequence[Message]:
        """The messages to keep of those shown so far, which end with an answer; `shown` itself to
        keep all.
        """
        return shown

    def request(self, conversation: Conversation, coming: Sequence[Message]) -> str:
        """A request to the model before its next turn, which adds the messages `coming`; usually
        empty.
        """
        return ""


class Full(ContextPolicy):
    """Shows everything. The only policy that causes no forks."""

    name: Literal["full"] = "full"


class LastK(ContextPolicy):
    """Shows the opening and the last `turns` exchanges (an answer and its reply). Forks at each
    later turn.
    """

    name: Literal["last_k"] = "last_k"
    turns: int = Field(gt=0)
    """Exchanges to show."""

    def keep(self, shown: Sequence[Message]) -> Sequence[Message]:
        """The opening, and everything from the k-th last answer on."""
        answers = [place for place, message in enumerate(shown) if message.is_answer]
        if len(answers) <= self.turns:
            return shown
        return [*shown[: answers[0]], *shown[answers[-self.turns] :]]


class Scratchpad(ContextPolicy):
    """Shows the opening, the model's own scratchpad and the newest message. A pad stays until the
    model replaces it.
    """

    name: Literal["scratchpad"] = "scratchpad"
    prompt: str = (
        "You will not see this conversation again, only its beginning, the newest message, and what"
        " you last wrote between <scratchpad> and </scratchpad>: note there what you need to"
        " remember."
    )
    """Added to the system message, to tell the model about the scratchpad."""

    @property
    def instructions(self) -> str:
        """Instructions for the scratchpad."""
        return self.prompt

    def keep(self, shown: Sequence[Message]) -> Sequence[Message]:
        """The opening, and the newest pad as the model's message; an empty pad if the model wrote
        none.
        """
        opening = _opening(shown)
        if len(opening) == len(shown):
            return shown
        pads = [
            pad
            for message in shown[len(opening) :]
            if message.is_answer
            for pad in _PAD.findall(message.content)
        ]
        return [*opening, Message("assistant", pads[-1] if pads else "<scratchpad></scratchpad>")]


class Summary(ContextPolicy):
    """Shows the opening, the model's own summary, and everything after it.

    When the next prompt would be longer than `max_prompt_tokens`, the model must first summarise
    everything before it. The summary is a turn like any other, with exact tokens, and marked
    `info["context"] = "summary"`. It is trained like any other, unless `train` is false: then the
    prompts after it hold the same tokens, and its own carry no loss.
    """

    name: Literal["summary"] = "summary"
    max_prompt_tokens: int = Field(gt=0)
    """Most tokens of a prompt before a summary is requested; opening, summary and newest message
    may have more.
    """
    prompt: str = (
        "Summarise what has happened so far and what you need to know to go on. From now on you"
        " will be shown the beginning and your summary instead of all this. Answer with the summary"
        " only."
    )
    """The request for a summary."""
    train: bool = True
    """Train on the summaries: they earn what the episode earns. False masks them."""

    @property
    def trains_requests(self) -> bool:
        """As the setting says."""
        return self.train

    def keep(self, shown: Sequence[Message]) -> Sequence[Message]:
        """The opening and the summary right after a summary, else everything."""
        if len(shown) > 1 and shown[-2] == Message("user", self.prompt):
            return [*_opening(shown), shown[-1]]
        return shown

    def request(self, conversation: Conversation, coming: Sequence[Message]) -> str:
        """A request for a summary if there is something to summarise and the next prompt would be
        too long.
        """
        begun = bool(conversation.shown)  # else the first observation has not been shown yet
        return self.prompt if begun and conversation.size(coming) > self.max_prompt_tokens else ""


def _opening(shown: Sequence[Message]) -> Sequence[Message]:
    """The messages before the first answer."""
    first = next((place for place, message in enumerate(shown) if message.is_answer), len(shown))
    return shown[:first]


def _expand_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Context = Annotated[
    Full | LastK | Scratchpad | Summary, Field(discriminator="name"), BeforeValidator(_expand_name)
]
"""A context policy, by its name."""

FULL = Full()
