"""The settings of sampling."""

from typing import Annotated

from pydantic import AfterValidator, Field

from agentrl.settings.base import Settings, check_temperature


class SamplingParams(Settings):
    """The sampling of the policy: set in the config, and part of each request."""

    max_tokens: int = Field(64, gt=0)
    """Longest answer of a turn, in tokens."""
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(1.0, ge=0)
    """Logits are divided by it, in the engine and in the trainer's policy gradients, which are of
    the distribution that was sampled from; 0 is greedy. What others have said is imitated at
    temperature 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the fewest most likely tokens that have at least this probability together;
    1: from all.
    """
    top_k: int = Field(0, ge=0)
    """Sample only from so many of the most likely tokens; 0: from all. In training, `top_p` and
    `min_p` alone also leave at most 256 tokens, because the trainer needs those that each token was
    sampled from."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample only from tokens that are at least this times as likely as the most likely one; 0:
    from all.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, as its last token. The tokens that end the model's turns are
    always added.
    """
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, as soon as it contains one. The text stays in the answer."""

    @property
    def truncated(self) -> bool:
        """True if some tokens of the vocabulary may be left out."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def with_bounded_support(self) -> "SamplingParams":
        """The same with at most `MAX_SUPPORT` tokens to sample from, if it is truncated and has no
        `top_k`.
        """
        return (
            self.model_copy(update={"top_k": MAX_SUPPORT})
            if self.truncated and not self.top_k
            else self
        )


MAX_SUPPORT = 256
"""Most tokens to sample from in training, if `top_p` or `min_p` truncates the distribution and
`top_k` says nothing.
"""
