"""The `ray` cluster: workers and engines are actors, on this machine or on an existing cluster."""

import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from agentrl.cluster.engine_logs import with_log_of
from agentrl.cluster.environment import inherited
from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.ray_engine import RayEngine
from agentrl.cluster.ray_node import RayNode, watched
from agentrl.cluster.ray_placement import RayPlacement, Unplaced, gpus_of_ray, node_of, reserved
from agentrl.cluster.ray_receivers import RayReceivers
from agentrl.cluster.workers import ClusterSettings, EngineFactory, StartWorker
from agentrl.errors import ConfigError, StallError
from agentrl.package.distribution import install_command
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.inventory import Inventory
from agentrl.placement.probe import probe_machine
from agentrl.plugins import Component
from agentrl.weights.machines import serving


class RayCluster:
    """`Cluster` on Ray, which is joined or started on entering.

    Ray is left only when this process ends, because other code in the process may use it.
    """

    class Config(ClusterSettings):
        """Settings of `cluster=ray`."""

        address: str = ""
        """Address of a cluster to join: "auto", or "host:port" of its head. By default, Ray is
        started on this machine and ends with this process."""

        @property
        def has_others(self) -> bool:
            """See `ClusterSettings`."""
            return bool(self.address)

        def needs(self) -> Mapping[str, str]:
            """See `Settings`."""
            return {"ray": install_command("ray")}

    def __init__(self, config: Config) -> None:
        self.config = config
        self._placement: RayPlacement = self._unplaced()
        self._receivers = RayReceivers()
        self._open = AsyncExitStack()

    @property
    def start(self) -> RayWorkers:
        """See `Cluster`."""
        return RayWorkers(self._placement, self.config.lease, self.config.start_seconds)

    @property
    def start_one(self) -> StartWorker:
        """See `Cluster`."""
        return self.start.one

    @property
    def spans_machines(self) -> bool:
        """See `Cluster`."""
        return self.config.address != ""

    async def __aenter__(self) -> Self:
        """Join or start Ray, and watch over its node on this machine.

        Raises:
            ConfigError: Ray is not installed, or there is no cluster at the address.
            NodeDiedError: while it is open: the node died.
        """
        join_ray(self.config.address)
        node = self._open.enter_context(RayNode.joined())
        await self._open.enter_async_context(watched(node.death))
        self._open.push_async_callback(self._receivers.close)
        if self.spans_machines:
            self._open.enter_context(serving(self._receivers))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        """End the watch. Ray stays until this process ends."""
        await self._open.__aexit__(*exc)

    def engines(self, chosen: Component, model: Path) -> list[EngineFactory]:
        """See `Cluster`."""
        count = self._placement.count("engine") or self.config.engines
        places = [self._placement.options("engine", number, count) for number in range(count)]
        engines = [with_log_of(chosen, number=str(number)) for number in range(count)]
        return [
            EngineFactory(partial(self._engine, engine, model, options), node_of(options))
            for engine, options in zip(engines, places, strict=True)
        ]

    def _engine(self, chosen: Component, model: Path, options: Mapping[str, Any]) -> RayEngine:
        return RayEngine(
            chosen, model, options, self._receivers, spans_machines=self.spans_machines
        )

    @asynccontextmanager
    async def another_engine(
        self, chosen: Component, model: Path, number: int
    ) -> AsyncIterator[EngineFactory]:
        """See `Cluster`. It gets the devices of the plan's engine of this number, if there is one,
        and else GPUs of the cluster that nobody has reserved.
        """
        engine = with_log_of(chosen, number=str(number))
        async with self._placement.another("engine", number) as place:
            yield EngineFactory(partial(self._engine, engine, model, place.options), place.node)

    def gpus(self) -> Inventory | None:
        """See `Cluster`."""
        return gpus_of_ray(probe_machine)

    @asynccontextmanager
    async def placed(self, devices: DeviceMap) -> AsyncIterator[None]:
        """See `Cluster`."""
        async with reserved(devices) as self._placement:
            yield
        self._placement = self._unplaced()

    def _unplaced(self) -> Unplaced:
        # A Ray that this process has started has its environment.
        return Unplaced(inherits=not self.config.address)


def join_ray(address: str = "", **options: Any) -> None:
    """Make Ray usable in this process: join the cluster at `address`, or if that is empty, start
    Ray on this machine.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"cluster=ray needs Ray ({error}): {install_command('ray')}") from error
    if ray.is_initialized():
        return
    try:
        if address:
            ray.init(address, log_to_driver=False, **options)
        else:
            # Ray's processes find the modules that this one does: a user's environments, rewards
            # and players.
            python_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
            started_with = {"PYTHONPATH": python_path, _SPANS_MACHINES: "0"}
            started_with[_NICENESS] = os.environ.get(_NICENESS, "0")
            with inherited(started_with), _on_loopback():
                options["_temp_dir"] = str(Path(tempfile.gettempdir(), "ray"))
                ray.init(
                    "local",
                    log_to_driver=False,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    **options,
                )
            _end_agents_at_exit()
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster at {address!r} (cluster.address): {error}") from error
    except (
        Exception
    ) as error:  # Ray raises plain ones when a process of its node does not come up in time
        if type(error) is not Exception:
            raise
        raise StallError(
            f"Ray did not start on this machine: {' '.join(str(error).split())} Start the run"
            " again, on a less busy machine, or look into Ray's logs in session_latest/logs of its"
            " temporary folder"
        ) from error


_SPANS_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable: whether other machines may join. Elsewhere than on these systems they may by
default.
"""
_NICENESS = "RAY_worker_niceness"
"""Ray's variable: how far its workers step back for others. By default they get a thirtieth of a
core that another process wants too, and trainers and engines are the run's own work."""
_REAPER = """
read -r _
while readlink "/proc/$1/exe"; do sleep 0.2; done >/dev/null 2>&1
for process in /proc/[0-9]*; do
    grep -q "^ray::" "$process/cmdline" && ls -l "$process/fd" | grep -qF "$2" &&
        kill -9 "${process#/proc/}"
done 2>/dev/null
"""
"""Waits until this process has ended, in whatever way, which closes the pipe, and until Ray's node
has ended. Then it kills the remaining Ray processes that have the node's log open.
"""


def _end_agents_at_exit() -> None:
    """Start a shell that outlives this process and kills the agents of Ray's node.

    When this process is killed, Ray's node ends, but the node's agents do not.
    """
    import psutil  # a dependency of Ray

    reading, _ = os.pipe()  # the other end closes when this process ends
    for raylet in [child.pid for child in psutil.Process().children() if child.name() == "raylet"]:
        log = os.readlink(f"/proc/{raylet}/fd/1")
        files: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)
        ]
        files.append((os.POSIX_SPAWN_DUP2, reading, 0))
        command = ["/bin/sh", "-c", _REAPER, "sh", str(raylet), log]
        os.posix_spawn(command[0], command, os.environ, file_actions=files, setsid=True)
    os.close(reading)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray that is started in the block takes the loopback address for its own, and so listens
    there only.

    Ray does this on macOS and Windows; on Linux it listens on all interfaces. It reads the variable
    that turns this on when it is imported, which may have happened already.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
