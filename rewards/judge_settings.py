"""`JudgeSettings`: which judge, how hard it may be asked, and what it costs."""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from agentrl.protocols import Settings


class JudgeSettings(Settings):
    """Settings of everything that asks a judge."""

    url: str
    """The endpoint, up to what stands before `/chat/completions`; without a path, `/v1` is meant."""
    model: str | None = None
    """Name of the judging model; the first that the endpoint lists when not given."""
    api_key_env: str | None = None
    """Environment variable that holds the bearer key. The key itself is written nowhere."""
    temperature: float | None = Field(default=0.0, ge=0)
    """Sampling temperature; null sends none, for endpoints that refuse it."""
    max_tokens: int | None = Field(default=1024, gt=0)
    """Longest answer, in tokens; null sends none. An answer that is cut is a failure."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More fields of each request, such as `reasoning_effort`."""
    response_format: Literal["json_schema", "json_object"] = "json_schema"
    """`json_object` is for endpoints that cannot be held to a schema; the prompt names it either way."""
    concurrency: int = Field(default=64, gt=0)
    """Requests under way at once; the others wait here."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests, retries included, are sent no denser than this, evenly spaced."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds for one request."""
    budget: float = Field(default=50.0, gt=0)
    """Seconds from the first request for a verdict to the last that may begin. `rollout.deadlines.reward`, which cuts
    all of a trajectory's (or group's) verdicts, has to be longer."""
    retries: int = Field(default=8, ge=0)
    """How often a verdict is asked for again within the budget."""
    backoff: float = Field(default=0.5, gt=0)
    """Seconds before the first retry; doubled for each further one, less a random share of up to one half."""
    cache: Path | None = Path("runs/judge_cache.sqlite")
    """Where verdicts are kept, for later runs as well; null keeps them in memory."""
    prompt_price: float = Field(default=0.0, ge=0)
    """Price of a million prompt tokens, in any currency."""
    completion_price: float = Field(default=0.0, ge=0)
    """Price of a million completion tokens."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("write an address such as http://localhost:8000 or https://api.openai.com/v1")
        if parts.username or parts.password or parts.query:
            raise ValueError("no secrets in the address, it is written into config.yaml: name a variable, api_key_env")
        if parts.path.rstrip("/").endswith("/completions"):
            raise ValueError("write only what stands before /chat/completions")
        return url
