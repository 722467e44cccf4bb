"""Settings of hosted environments: the deadlines of their calls."""

from pydantic import Field

from agentrl.settings.base import Settings


class EnvDeadlines(Settings):
    """Seconds of loop time that each call of an environment may take before it counts as failed."""

    reset: float = Field(30.0, gt=0)
    """`Env.reset`."""
    step: float = Field(30.0, gt=0)
    """`Env.step` of an environment without tools."""
    tool: float = Field(60.0, gt=0)
    """`Env.step` of an environment with tools: one tool call."""
    close: float = Field(5.0, gt=0)
    """`Env.close`."""
