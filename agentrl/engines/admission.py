"""What every engine refuses, in the same words."""

from collections.abc import Collection

from agentrl.errors import EngineError
from agentrl.protocols import GenerateRequest


def max_new_tokens(
    request: GenerateRequest, *, max_context: int, vocab_size: int | None, live_ids: Collection[str]
) -> int:
    """How many tokens the request may sample: its `max_tokens`, or less where `max_context` is nearer.

    Raises:
        EngineError: no token fits behind the prompt, or the request is malformed.
    """
    length = len(request.prompt_ids)
    sampling = request.sampling
    if length + 1 > max_context:
        raise EngineError(
            f"the prompt of {request.id} has {length} tokens and leaves no room for one more in a context of "
            f"{max_context}; raise engine.max_context, or end the episode earlier"
        )
    if not length or sampling.max_tokens < 1 or sampling.temperature < 0:
        raise EngineError(
            f"request {request.id} needs a prompt, max_tokens >= 1 and temperature >= 0; it has {length} prompt "
            f"tokens, max_tokens={sampling.max_tokens}, temperature={sampling.temperature}"
        )
    if vocab_size is not None and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        raise EngineError(f"the prompt of {request.id} holds ids outside of the vocabulary of {vocab_size} tokens")
    if request.id in live_ids:
        raise EngineError(f"a request {request.id!r} is live already; ids are unique among live requests")
    return min(sampling.max_tokens, max_context - length)


__all__ = ["max_new_tokens"]
