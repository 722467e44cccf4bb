"""Shared by the engines: the checks of a request, and the settings for the KV cache at a weight
update.
"""

from collections.abc import Collection
from typing import Literal

from agentrl.errors import EngineError, FormatError, ImagesRefusedError
from agentrl.protocols import GenerateRequest, ScoreRequest

KvOnUpdate = Literal["recompute", "keep", "reuse"]
"""What a weight update does to KV that the old weights computed.

- `recompute`: it is dropped, and computed again for requests in flight.
- `keep`: requests in flight keep theirs to their end, however old; no other request gets it.
- `reuse`: each session keeps its own, in flight and between turns, until it is too old
  (`KvChains`). What begins anew gets none of older weights. With a bound of 0 versions, this is
  `recompute`.

Kept KV saves a prefill, but what is sampled after it is sampled from a mixture of versions: its
logprobs are those of the distribution that it was sampled from, and no plain forward pass of one
version reproduces them.
"""


def effective_kv_on_update(setting: KvOnUpdate, max_staleness: int) -> KvOnUpdate:
    """The setting that counts with a bound of so many versions: 0 leaves nothing to reuse."""
    return "recompute" if setting == "reuse" and not max_staleness else setting


def max_new_tokens(
    request: GenerateRequest,
    *,
    max_context: int,
    vocab_size: int | None,
    live_ids: Collection[str],
    checked: int = 0,
    formats: bool = False,
    images: bool = False,
) -> int:
    """The number of tokens the request may sample: its `max_tokens`, or fewer if `max_context` is
    reached first.

    The first `checked` tokens of the prompt are already known to be in the vocabulary. `formats`:
    the engine can constrain a completion. `images`: it reads pictures.

    Raises:
        ImagesRefusedError: the request has pictures, and the engine reads none.
        FormatError: the request wants a format, and the engine cannot constrain a completion, or
        was interrupted in it.
        EngineError: the prompt leaves no room for a token, or the request is malformed.
    """
    length = len(request.prompt_ids)
    sampling = request.sampling
    if length + 1 > max_context:
        raise EngineError(
            f"the prompt of {request.id} has {length} tokens and leaves no room for one more in a"
            f" context of {max_context}; raise engine.max_context, or end the episode earlier"
        )
    if not length or sampling.max_tokens < 1 or sampling.temperature < 0:
        raise EngineError(
            f"request {request.id} needs a prompt, max_tokens >= 1 and temperature >= 0; it has"
            f" {length} prompt tokens, max_tokens={sampling.max_tokens},"
            f" temperature={sampling.temperature}"
        )
    if request.format is not None and (request.resumed or not formats):
        why = "cannot go on with an interrupted answer" if formats else "does not constrain answers"
        raise FormatError(f"{request.id} asks for an answer of a format: this engine {why}")
    if request.images and not images:
        raise ImagesRefusedError(_unread(request.id))
    new_ids = request.prompt_ids[checked:]
    if (
        vocab_size is not None
        and len(new_ids)
        and not 0 <= new_ids.min() <= new_ids.max() < vocab_size
    ):
        raise EngineError(
            f"the prompt of {request.id} holds ids outside of the vocabulary of {vocab_size} tokens"
        )
    if request.id in live_ids:
        raise EngineError(
            f"a request {request.id!r} is live already; ids are unique among live requests"
        )
    return min(sampling.max_tokens, max_context - length)


def check_score(request: ScoreRequest, *, max_context: int, vocab_size: int | None) -> None:
    """Check the request.

    Raises:
        EngineError: it has more than `max_context` tokens, or is malformed.
        ImagesRefusedError: it has pictures, which no engine scores.
    """
    if request.images:
        raise ImagesRefusedError(_unread(request.id))
    ids, length = request.token_ids, len(request.token_ids)
    if length > max_context:
        raise EngineError(
            f"{request.id} has {length} tokens to score, more than a context of {max_context};"
            " raise engine.max_context of the engine that scores"
        )
    if not 1 <= request.start < length or request.temperature <= 0:
        raise EngineError(
            f"{request.id} needs 1 <= start < tokens and temperature > 0; it has"
            f" start={request.start}, {length} tokens, temperature={request.temperature}"
        )
    if vocab_size is not None and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise EngineError(
            f"{request.id} holds ids outside of the vocabulary of {vocab_size} tokens"
        )


def _unread(name: str) -> str:
    return (
        f"{name} has pictures in its tokens, and this engine reads text alone: take engine=local"
        " with a model that has eyes"
    )


__all__ = ["KvOnUpdate", "check_score", "effective_kv_on_update", "max_new_tokens"]
