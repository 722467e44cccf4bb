"""Checks what an engine answers, where it enters: what is no completion of the request is a failure
of the engine.
"""

from dataclasses import replace

import numpy as np

from agentrl.errors import EngineError
from agentrl.protocols import GenerateRequest
from agentrl.tokens.arrays import floats
from agentrl.trajectory import Completion

_MOST_IDS = int(np.iinfo(np.int32).max)
ROUNDING = 1e-5
"""By how much a logprob may be above 0: that of a certain token, computed as a difference of
float32 numbers.
"""


def checked_completion(
    completion: object, request: GenerateRequest, vocab_size: int | None = None
) -> Completion:
    """An engine's answer to a request; logprobs that rounding has put above 0 are 0. All ids are
    below `vocab_size`.

    Raises:
        EngineError: it is no completion, or has tokens or logprobs that no model can have sampled.
    """
    if not isinstance(completion, Completion):
        raise EngineError(
            f"the engine answered {request.id} with a {type(completion).__name__}, and no"
            " Completion"
        )
    ids, logprobs = completion.token_ids, completion.logprobs
    outside = np.flatnonzero((ids < 0) | (ids >= (_MOST_IDS if vocab_size is None else vocab_size)))
    if len(outside):
        at = int(outside[0])
        more = (
            ""
            if vocab_size is None
            else f": the model has {vocab_size} tokens, and the engine may serve another model"
        )
        raise EngineError(
            f"the engine answered {request.id} with {ids[at]} as token {at}, which is no token's"
            f" id{more}"
        )
    # -inf is a token of probability 0, which cannot be sampled. The comparison is false for NaN,
    # too.
    wrong = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= ROUNDING)))
    if len(wrong):
        at = int(wrong[0])
        raise EngineError(
            f"the engine answered {request.id} with the logprob {logprobs[at]:g} for token {at}"
            f" ({ids[at]}), and {len(wrong)} of {len(ids)} are such: a logprob is a finite number,"
            " and at most 0"
        )
    if len(logprobs) and logprobs.max() > 0:
        return replace(completion, logprobs=floats(np.minimum(logprobs, np.float32(0.0))))
    return completion
