"""`JudgeSettings`: which judge to use, how often to ask it, and what it costs."""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from agentrl.settings.base import NameText, Settings


class JudgeSettings(Settings):
    """Settings common to all judges."""

    url: str
    """The endpoint's address without `/chat/completions`. If it has no path, `/v1` is added."""
    model: NameText | None = None
    """Name of the judging model; by default the first that the endpoint lists."""
    api_key_env: NameText | None = None
    """Environment variable that holds the bearer key. The key itself is never written to a file."""
    temperature: float | None = Field(default=0.0, ge=0)
    """Sampling temperature; null sends none, for endpoints that refuse it."""
    max_tokens: int | None = Field(default=1024, gt=0)
    """Longest answer, in tokens; null sends no limit. A truncated answer is a failure."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More fields of each request, such as `reasoning_effort`."""
    response_format: Literal["json_schema", "json_object"] = "json_schema"
    """`json_object` is for endpoints that cannot enforce a schema; the prompt contains the schema
    either way.
    """
    concurrency: int = Field(default=64, gt=0)
    """Most requests at a time; further ones wait."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests per minute, retries included; they are spaced evenly."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds for one request."""
    budget: float = Field(default=50.0, gt=0)
    """Seconds after a verdict's first request in which retries may begin.
    `rollout.deadlines.reward`, the limit of all verdicts of a trajectory (or group), has to be
    longer."""
    retries: int = Field(default=8, ge=0)
    """Most retries of a verdict, within the budget."""
    backoff: float = Field(default=0.5, gt=0)
    """Seconds before the first retry; doubled for each further one, less a random share of up to
    one half.
    """
    cache: Path | None = Path("runs/judge_cache.sqlite")
    """The file that keeps verdicts, also for later runs; null keeps them in memory."""
    prompt_price: float = Field(default=0.0, ge=0)
    """Price of a million prompt tokens, in any currency."""
    completion_price: float = Field(default=0.0, ge=0)
    """Price of a million completion tokens."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                "write an address such as http://localhost:8000 or https://api.openai.com/v1"
            )
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "no secrets in the address, it is written into config.yaml: name a variable,"
                " api_key_env"
            )
        if parts.path.rstrip("/").endswith("/completions"):
            raise ValueError("write only the part before /chat/completions")
        return url
