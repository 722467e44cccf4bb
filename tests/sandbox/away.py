"""An environment whose provider of sandboxes can be away, as a Docker engine is that restarts."""

import os
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError
from agentrl.protocols import ResetResult, SandboxProvider, StepResult
from agentrl.sandbox.providers import borrow_provider, give_back_provider
from agentrl.testing import FakeSandboxes


class Engine(FakeSandboxes):
    """Can be opened while a file is there."""

    class Config(FakeSandboxes.Config):
        """Its settings."""

        file: str = ""

    @classmethod
    async def open(cls, settings: Config) -> "Engine":  # type: ignore[override]
        if not os.path.exists(settings.file):  # noqa: ASYNC240
            raise ConfigError("could not reach the engine")
        return cls(settings)


class Docked:
    """Says which process it lives in, once it has the provider."""

    isolation = "inline"
    provider: SandboxProvider | None = None

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        await self.close()
        self.provider = await borrow_provider({"name": f"{__name__}:Engine", **options})
        return str(os.getpid()), {}

    async def step(self, action: str) -> StepResult:
        return action, 0.0, True, False, {}

    async def close(self) -> None:
        if self.provider is not None:
            provider, self.provider = self.provider, None
            await give_back_provider(provider)


def docked() -> type[Docked]:
    return Docked
