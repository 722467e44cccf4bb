"""The `local` cluster: every worker in this process."""

from pathlib import Path

from pydantic import Field

from agentrl.plugins import Component
from agentrl.protocols import Engine, Settings, Trainer


class LocalCluster:
    """Makes engine and trainer as objects of this process. Used by laptops, tests and the virtual clock."""

    class Config(Settings):
        """Settings of `cluster=local`."""

        engines: int = Field(default=1, ge=1)
        """Replicas of the engine."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def engines(self, chosen: Component, model: Path) -> list[Engine]:
        """The engines that serve the model in `model`."""
        return [chosen.make(model) for _ in range(self.config.engines)]

    def trainer(self, chosen: Component, model: Path, *, total_steps: int, temperature: float) -> Trainer:
        """A trainer that starts from the model in `model`."""
        trainer: Trainer = chosen.make(model, total_steps=total_steps, temperature=temperature)
        return trainer
