"""The `local` cluster: engines in this process, other workers in threads and processes of this
machine.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Self

from agentrl.cluster.engine_logs import with_log_of
from agentrl.cluster.processes import ProcessWorker, start_local
from agentrl.cluster.workers import ClusterSettings, EngineFactory
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.inventory import Inventory
from agentrl.plugins import Component


class LocalCluster:
    """`Cluster` on this machine. Used by laptops, tests and the virtual clock."""

    one_device = True
    """Everything runs on the first device of this machine, and `placement` is ignored."""

    class Config(ClusterSettings):
        """Settings of `cluster=local`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.start = partial(start_local, lease=config.lease, start_seconds=config.start_seconds)
        self.start_one = partial(
            ProcessWorker.start, lease=config.lease, start_seconds=config.start_seconds
        )

    @property
    def spans_machines(self) -> bool:
        """See `Cluster`."""
        return False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nothing to do: workers are ended by the code that started them."""

    def engines(self, chosen: Component, model: Path) -> list[EngineFactory]:
        """See `Cluster`."""
        numbers = range(self.config.engines)
        engines = [with_log_of(chosen, number=str(number)) for number in numbers]
        return [EngineFactory(partial(engine.make, model)) for engine in engines]

    @asynccontextmanager
    async def another_engine(
        self, chosen: Component, model: Path, number: int
    ) -> AsyncIterator[EngineFactory]:
        """See `Cluster`. It is where the others are, so there is nothing to hold."""
        engine = with_log_of(chosen, number=str(number))
        yield EngineFactory(partial(engine.make, model))

    def gpus(self) -> Inventory | None:
        """None: everything runs on the first device."""
        return None

    @asynccontextmanager
    async def placed(self, devices: DeviceMap) -> AsyncIterator[None]:
        """There is nothing to reserve."""
        yield
