"""A completion that was interrupted, and the request for the rest of it."""

from dataclasses import replace

import numpy as np

from agentrl.protocols import GenerateRequest
from agentrl.rollout.seeds import derive_seed
from agentrl.tokens.arrays import Ragged
from agentrl.tokens.expert_choices import ExpertChoices
from agentrl.trajectory import Completion


def rest_of(request: GenerateRequest, done: Completion) -> GenerateRequest:
    """The request for the tokens after `done`. Its positions start at 0 again, so it gets a new,
    derived seed.
    """
    sampled = len(done.token_ids)
    return replace(
        request,
        id=f"{request.id}+{sampled}",
        prompt_ids=np.concatenate([request.prompt_ids, done.token_ids]),
        sampling=request.sampling.model_copy(
            update={"max_tokens": request.sampling.max_tokens - sampled}
        ),
        seed=derive_seed(request.seed, "rest", sampled) if sampled else request.seed,
        resumed=request.resumed + sampled,
    )


def joined(first: Completion, rest: Completion) -> Completion:
    """Both parts of a completion as one."""
    kept = first.support is not None or rest.support is not None
    return Completion(
        np.concatenate([first.token_ids, rest.token_ids]),
        np.concatenate([first.logprobs, rest.logprobs]),
        np.concatenate([first.policy_versions, rest.policy_versions]),
        rest.finish_reason,
        Ragged.joined([first.support_of_each, rest.support_of_each]) if kept else None,
        ExpertChoices.joined([first.experts, rest.experts]),
    )


__all__ = ["joined", "rest_of"]
