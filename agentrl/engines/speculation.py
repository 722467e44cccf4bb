"""The settings of speculative decoding."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.settings.base import PathText, Settings


class SpeculativeSettings(Settings):
    """Tokens are proposed in advance, and the model computes the probabilities of all of them in
    one step. What is sampled, and its logprobs, are the model's own: proposals change the speed
    alone (arXiv:2211.17192).
    """

    method: Literal["ngram", "draft_model"] = "ngram"
    """The source of proposals: what followed the last tokens earlier in the request (`ngram`), or a
    smaller model."""
    tokens: int = Field(default=3, ge=1, le=64)
    """Tokens that are proposed in each step."""
    longest_match: int = Field(default=4, ge=1)
    """Most tokens that `ngram` looks for in the request."""
    shortest_match: int = Field(default=2, ge=1)
    """Least tokens that must match."""
    model: PathText | None = None
    """The draft model of `draft_model`: a folder, or the id of a model on the hub, with the same
    vocabulary. Its weights stay as they are while the policy is trained."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """GPUs that the draft model is split over; by default as many as the model."""

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.shortest_match > self.longest_match:
            raise ValueError(
                f"shortest_match={self.shortest_match} is above longest_match={self.longest_match}"
            )
        if self.method == "draft_model" and self.model is None:
            raise ValueError(
                "method=draft_model needs the folder or id of a model: write model=..."
            )
        if self.method == "ngram" and self.model is not None:
            raise ValueError(
                "method=ngram proposes tokens without a model: write method=draft_model, or leave"
                " model out"
            )
        return self

    def arguments(self) -> dict[str, Any]:
        """vLLM's `speculative_config`, without the model."""
        common = {"method": self.method, "num_speculative_tokens": self.tokens}
        if self.method == "ngram":
            matched = {
                "prompt_lookup_max": self.longest_match,
                "prompt_lookup_min": self.shortest_match,
            }
            return common | matched
        split = self.tensor_parallel
        return common | ({} if split is None else {"draft_tensor_parallel_size": split})
