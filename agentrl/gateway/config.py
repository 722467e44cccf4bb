"""The settings of the gateway."""

from typing import Literal

from pydantic import Field

from agentrl.settings.base import NameText, Settings


class GatewayConfig(Settings):
    """The address at which agents reach the run, and the limits of their requests."""

    host: NameText = "127.0.0.1"
    """The address that it listens on. Agents on other machines need another one than the default,
    which is this machine alone; each request needs the key of an episode."""
    port: int = Field(0, ge=0, le=65535)
    """The port; 0: any free one."""
    url: NameText | None = None
    """The address that agents are given, if it is not that of `host` and `port`: that of a proxy,
    or of a container.
    """
    model: NameText = "policy"
    """The policy's name. The policy answers to any name; but if an episode calls it by this one,
    what it asks of others (a small model that writes titles) is not trained on and costs no turn.
    """
    token_env: NameText | None = None
    """The environment variable with the token that agents elsewhere (`env: agent:remote`) show to
    get tasks. Needed unless the gateway listens on this machine alone."""
    network: Literal["open", "gateway"] = "open"
    """The network that the run's program can reach: yours, or the gateway alone. The latter is for
    programs in processes of their own (a command, or a function with `env.isolation: process`), and
    needs user namespaces."""
    max_body_bytes: int = Field(16 << 20, ge=1024)
    """The longest request."""
    request_seconds: float = Field(30.0, gt=0)
    """Time for a program to send a request, in seconds; a connection that is idle this long is
    closed.
    """
    max_answers: int = Field(16, ge=1)
    """Most answers of one call (`n`)."""
    calls_at_once: int = Field(64, ge=1)
    """Most calls of one episode that are under way; others get status 429 and are sent again."""
    max_episodes: int = Field(1024, ge=1)
    """Most open episodes where a model is served to any client; further ones get status 429. A run
    limits its own.
    """
    idle_seconds: float = Field(600.0, gt=0)
    """An episode fails if its program makes no call for so long."""
    reward_seconds: float = Field(0.0, ge=0)
    """Time for the reward of an episode to come after its program has ended (`POST /v1/rewards`),
    in seconds; 0: it does not come.
    """
    lease_seconds: float = Field(60.0, gt=0)
    """Agents elsewhere (`env: agent:remote`) lose their task if they have made no request for so
    long.
    """
