"""The `local` cluster: every worker in this process."""

from pathlib import Path

from agentrl.plugins import Component, NoSettings
from agentrl.protocols import Engine, Trainer


class LocalCluster:
    """Makes engine and trainer as objects of this process. Used by laptops, tests and the virtual clock."""

    Config = NoSettings

    def __init__(self, config: NoSettings) -> None:
        self.config = config

    def engine(self, chosen: Component, model: Path) -> Engine:
        """An engine that serves the model in `model`."""
        engine: Engine = chosen.make(model)
        return engine

    def trainer(self, chosen: Component, model: Path, *, total_steps: int, temperature: float) -> Trainer:
        """A trainer that starts from the model in `model`."""
        trainer: Trainer = chosen.make(model, total_steps=total_steps, temperature=temperature)
        return trainer
