"""Renderers: messages as the exact tokens of a model's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.tokens.arrays import IntArray, same_fields
from agentrl.tokens.placed_images import PlacedImage, images_from, shifted
from agentrl.trajectory import Completion, Message


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The model's next prompt. `ids` is the whole prompt, `new_ids` its part after the last turn's
    last token, `images` are the pictures in `ids`.
    """

    ids: IntArray
    new_ids: IntArray
    forked: bool
    images: tuple[PlacedImage, ...] = ()

    __eq__ = same_fields

    @property
    def new_images(self) -> tuple[PlacedImage, ...]:
        """The pictures in `new_ids`."""
        known = len(self.ids) - len(self.new_ids)
        return shifted(images_from(self.images, known), -known)


class Conversation(Protocol):
    """One agent's messages in an episode, together with their exact tokens."""

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Append `messages` (system, user or tool) and return the prompt for the next assistant
        turn.

        Raises:
            ImagesRefusedError: they hold pictures, which the model cannot see.
        """
        ...

    def answer(self, completion: Completion) -> str:
        """Append the model's completion and return its text (without the stop token)."""
        ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far."""
        ...

    @property
    def shown(self) -> Sequence[Message]:
        """The messages that the next prompt shows besides its new ones. The caller must not modify
        them.
        """
        ...

    def show(self, messages: Sequence[Message]) -> None:
        """Show `messages` instead of those shown so far."""
        ...

    def size(self, messages: Sequence[Message]) -> int:
        """The number of tokens that `prompt(messages)` would have."""
        ...


class Renderer(Protocol):
    """Renders messages as tokens by the model's own chat template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        ...

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """A new, empty conversation."""
        ...
