"""What of its conversation a model is shown: `rollout.context`.

    context: full
    context: {name: last_k, turns: 3}
    context: {name: scratchpad}
    context: {name: summary, max_prompt_tokens: 2000}

A conversation keeps its whole transcript, and a part that is shown. Here is decided what stays in that part; it always
begins with the opening: the system message and the first observation. Where the part no longer extends the last prompt
token for token, the conversation forks and a new training sample begins, so what is trained on is what was shown.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl.protocols import Conversation, Settings
from agentrl.trajectory import Message

_PAD = re.compile(r"<scratchpad>.*?</scratchpad>", re.DOTALL)


class ContextPolicy(Settings):
    """What they share: everything is shown, and nothing is asked."""

    name: str

    @property
    def instructions(self) -> str:
        """What the system message says besides the environment's prompt."""
        return ""

    def keep(self, shown: Sequence[Message]) -> Sequence[Message]:
        """What stays of the messages shown so far, the last of which is an answer; `shown` itself for all of them."""
        return shown

    def request(self, conversation: Conversation, coming: Sequence[Message]) -> str:
        """What the model is asked before its next turn, which shows it the messages `coming`; mostly nothing."""
        return ""


class Full(ContextPolicy):
    """Everything is shown. The only one that never forks."""

    name: Literal["full"] = "full"


class LastK(ContextPolicy):
    """The opening and the last `turns` exchanges: what the model said, and what came back. Forks at each later turn."""

    name: Literal["last_k"] = "last_k"
    turns: int = Field(gt=0)
    """Exchanges to show."""

    def keep(self, shown: Sequence[Message]) -> Sequence[Message]:
        """The opening, and from the k-th last answer on."""
        answers = [place for place, message in enumerate(shown) if message.role == "assistant"]
        if len(answers) <= self.turns:
            return shown
        return [*shown[: answers[0]], *shown[answers[-self.turns] :]]


class Scratchpad(ContextPolicy):
    """The opening, the model's own scratchpad, and what came last. A pad stands until the model writes another."""

    name: Literal["scratchpad"] = "scratchpad"
    prompt: str = (
        "You will not see this conversation again, only its beginning, the newest message, and what you last wrote "
        "between <scratchpad> and </scratchpad>: note there what you need to remember."
    )
    """Stands in the system message, for the model to know."""

    @property
    def instructions(self) -> str:
        """How to use the pad."""
        return self.prompt

    def keep(self, shown: Sequence[Message]) -> Sequence[Message]:
        """The opening, and the newest pad as the model's message; an empty one where it wrote none."""
        opening = _opening(shown)
        if len(opening) == len(shown):
            return shown
        pads = [pad for message in shown[len(opening) :] if message.role == "assistant" for pad in _pads(message)]
        return [*opening, Message("assistant", pads[-1] if pads else "<scratchpad></scratchpad>")]


class Summary(ContextPolicy):
    """The opening, the model's own summary, and what came after it.

    When the next prompt would be longer than `max_prompt_tokens`, the model is asked for a summary of all before it.
    That is a turn like any other, with exact tokens, trained like any other, and marked `info["context"] = "summary"`.
    """

    name: Literal["summary"] = "summary"
    max_prompt_tokens: int = Field(gt=0)
    """Tokens of the longest prompt without a summary; one of opening, summary and newest message may have more."""
    prompt: str = (
        "Summarise what has happened so far and what you need to know to go on. From now on you will be shown the "
        "beginning and your summary instead of all this. Answer with the summary only."
    )
    """What the model is asked."""

    def keep(self, shown: Sequence[Message]) -> Sequence[Message]:
        """After a summary the opening and the summary, else everything."""
        if len(shown) > 1 and shown[-2] == Message("user", self.prompt):
            return [*_opening(shown), shown[-1]]
        return shown

    def request(self, conversation: Conversation, coming: Sequence[Message]) -> str:
        """A summary, where there is something to summarise and the next prompt would be too long."""
        begun = bool(conversation.shown)  # the first observation is still to come, else
        return self.prompt if begun and conversation.size(coming) > self.max_prompt_tokens else ""


def _opening(shown: Sequence[Message]) -> Sequence[Message]:
    """The messages before the first answer."""
    first = next((place for place, message in enumerate(shown) if message.role == "assistant"), len(shown))
    return shown[:first]


def _pads(message: Message) -> list[str]:
    return _PAD.findall(message.content)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Context = Annotated[Full | LastK | Scratchpad | Summary, Field(discriminator="name"), BeforeValidator(_named)]
"""One of them, by its name."""

FULL = Full()
