"""The messages keep a format of tags."""

from typing import Literal

from pydantic import Field

from agentrl.settings.base import Settings
from agentrl.trajectory import Trajectory


class Tags:
    """The share of the model's messages that hold each tag once, closed, with text in it, and in
    order.
    """

    isolation: Literal["inline"] = "inline"

    class Config(Settings):
        """The format."""

        tags: tuple[str, ...] = Field(("think", "answer"), min_length=1)
        """The tags, in order: <think>...</think> and then <answer>...</answer>."""
        alone: bool = True
        """Nothing but space stands outside of them."""
        last_only: bool = False
        """Look at the last message only."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def content(self, trajectory: Trajectory) -> tuple[str, ...]:
        """The model's messages."""
        replies = tuple(message.content for message in trajectory.messages if message.is_answer)
        return replies[-1:] if self._config.last_only else replies

    def evaluate(self, content: tuple[str, ...]) -> float:
        """The share of well-formed messages; 0 without any."""
        return sum(self.well_formed(text) for text in content) / len(content) if content else 0.0

    def well_formed(self, text: str) -> bool:
        """True if a message keeps the format."""
        rest, outside = text, ""
        for tag in self._config.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return False
            before, _, rest = rest.partition(opening)
            inside, closed, rest = rest.partition(closing)
            if not closed or not inside.strip():
                return False
            outside += before
        return not (self._config.alone and (outside + rest).strip())
