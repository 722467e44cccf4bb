"""What engines have in common: what they refuse, in the same words, and what new weights do to their caches."""

from collections.abc import Collection
from typing import Literal

from agentrl.errors import EngineError
from agentrl.protocols import GenerateRequest

KvOnUpdate = Literal["recompute", "keep"]
"""The KV of requests in flight, when weights change: recomputed, or kept as the old weights made it. Kept, it saves
a prefill, and the rest of such a completion is sampled from a mixture: its logprobs are what was sampled from, and no
plain forward pass gives them again. Either way no other request is ever served KV of an older version.
"""


def max_new_tokens(
    request: GenerateRequest,
    *,
    max_context: int,
    vocab_size: int | None,
    live_ids: Collection[str],
    checked: int = 0,
) -> int:
    """How many tokens the request may sample: its `max_tokens`, or less where `max_context` is nearer.

    The first `checked` tokens of the prompt are known to be of the vocabulary.

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
    new_ids = request.prompt_ids[checked:]
    if vocab_size is not None and len(new_ids) and not 0 <= new_ids.min() <= new_ids.max() < vocab_size:
        raise EngineError(f"the prompt of {request.id} holds ids outside of the vocabulary of {vocab_size} tokens")
    if request.id in live_ids:
        raise EngineError(f"a request {request.id!r} is live already; ids are unique among live requests")
    return min(sampling.max_tokens, max_context - length)


__all__ = ["KvOnUpdate", "max_new_tokens"]
