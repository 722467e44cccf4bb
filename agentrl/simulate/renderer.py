"""A renderer for simulations: prompts have lengths, but no content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from agentrl.protocols import Prompt
from agentrl.simulate.engine import END, FILLER
from agentrl.tokens.arrays import IntArray, ints
from agentrl.trajectory import Completion, Message


@dataclass(frozen=True, slots=True)
class SimulatedRenderer:
    """A `Renderer` whose prompt grows by `prompt_tokens` at first, and by `observation_tokens` at
    each later turn.
    """

    prompt_tokens: int
    observation_tokens: int

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The simulated engine's stop token."""
        return (END,)

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> "SimulatedConversation":
        """A new, empty conversation."""
        return SimulatedConversation(self)


class SimulatedConversation:
    """The lengths of one episode's prompts."""

    __slots__ = ("_length", "_renderer")

    def __init__(self, renderer: SimulatedRenderer) -> None:
        self._renderer = renderer
        self._length = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """None are kept."""
        return ()

    @property
    def shown(self) -> tuple[Message, ...]:
        """None are kept, so there is nothing to leave out."""
        return ()

    def show(self, messages: Sequence[Message]) -> None:
        """Has no effect: the length of a prompt does not depend on what is shown."""

    def size(self, messages: Sequence[Message]) -> int:
        """The length of the next prompt."""
        return self._length + self._grows_by

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The next prompt, filled up to its length."""
        new = self._grows_by
        self._length += new
        return Prompt(_tokens(self._length), _tokens(new), False)

    @property
    def _grows_by(self) -> int:
        return self._renderer.observation_tokens if self._length else self._renderer.prompt_tokens

    def answer(self, completion: Completion) -> str:
        """The action is always the same."""
        self._length += len(completion.token_ids)
        return "go"


@lru_cache(maxsize=4096)
def _tokens(length: int) -> IntArray:
    return ints(np.full(length, FILLER))
