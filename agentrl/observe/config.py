"""What a run records besides its metrics."""

from pydantic import Field

from agentrl.protocols import Settings


class ObserveConfig(Settings):
    """What a run records besides its metrics, for `agentrl view`."""

    token_groups: int = Field(1, ge=0)
    """Groups of each step, drawn at random, of whose tokens the trainer's logprobs, ratios and advantages are kept
    (`samples/` in the run's folder)."""
