"""Responses of servers with OpenAI's protocol, with only the fields that agentrl needs.

Parsing only these takes a third of the time that `json` takes for all fields. An array is checked
up to its first wrong item, so an answer of millions of them costs no gigabytes of findings.
"""

from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    FailFast,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from agentrl.trajectory import FinishReason

Item = TypeVar("Item")
_Array = Annotated[tuple[Item, ...], FailFast()]


class ServedModel(BaseModel):
    """One model of a server; `max_model_len` is vLLM's, in tokens."""

    id: str
    max_model_len: int | None = None


class ServedModels(BaseModel):
    """The answer of `GET /v1/models`."""

    data: _Array[ServedModel]


Count = Annotated[int, Field(ge=0, le=1 << 53)]
"""A number of tokens: one that prices can be multiplied by, whatever a server writes."""


class PromptTokenDetails(BaseModel):
    """The number of cached tokens of a prompt."""

    cached_tokens: Count = 0


class TokenUsage(BaseModel):
    """Tokens that a request used."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptTokenDetails | None = None


def _usage_or_nothing(value: Any, read: ValidatorFunctionWrapHandler) -> TokenUsage:
    try:
        usage: TokenUsage = read(value)
    except ValidationError:
        return TokenUsage()
    return usage


Usage = Annotated[TokenUsage, WrapValidator(_usage_or_nothing)]
"""What a server says that an answer has used. An answer counts whatever that is: what makes no
sense (null, less than nothing) is nothing.
"""


class TokenLogprobs(BaseModel):
    """Logprobs of the sampled tokens, in nats."""

    token_logprobs: _Array[float]

    @property
    def of_tokens(self) -> tuple[float, ...]:
        """One for each token."""
        return self.token_logprobs


class CompletionChoice(BaseModel):
    """A completion as tokens, with vLLM's `return_token_ids`."""

    token_ids: _Array[int]
    logprobs: TokenLogprobs
    finish_reason: FinishReason


class CompletionAnswer(BaseModel):
    """The answer of `POST /v1/completions`."""

    choices: _Array[CompletionChoice] = Field(min_length=1)
    usage: Usage = TokenUsage()


class GeneratedLogprob(BaseModel):
    """The logprob of a sampled token, in nats."""

    logprob: float


class GeneratedLogprobs(BaseModel):
    """Logprobs of the sampled tokens."""

    content: _Array[GeneratedLogprob]

    @property
    def of_tokens(self) -> tuple[float, ...]:
        """One for each token."""
        return tuple(one.logprob for one in self.content)


class GeneratedChoice(BaseModel):
    """A completion of `POST /inference/v1/generate`."""

    token_ids: _Array[int]
    logprobs: GeneratedLogprobs
    finish_reason: FinishReason


class GeneratedAnswer(BaseModel):
    """The answer of vLLM's `POST /inference/v1/generate`, with `return_token_ids`.

    `prompt_token_ids` are those that the model has read, with all that stands for pictures.
    """

    choices: _Array[GeneratedChoice] = Field(min_length=1)
    prompt_token_ids: _Array[int]
    usage: Usage = TokenUsage()


class ChatMessage(BaseModel):
    """The model's text, or its reason to refuse."""

    content: str | None = None
    refusal: str | None = None


class ChatChoice(BaseModel):
    """One answer in a chat."""

    message: ChatMessage
    finish_reason: str | None = None


class ChatAnswer(BaseModel):
    """The answer of `POST /v1/chat/completions`."""

    choices: _Array[ChatChoice] = Field(min_length=1)
    usage: Usage = TokenUsage()
