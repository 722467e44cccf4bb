"""Two machines in one: network namespaces of Linux, each with an address and shared memory of its
own, joined by one link. They share the disk and the processes' numbers.

They need root and iproute2; elsewhere, tests that ask for them are skipped.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from agentrl.cluster.ray_cluster import RayCluster
from agentrl.cluster.ray_placement import Unplaced
from tests.cluster.chaos import Running
from tests.commands import ROOT, Command
from tests.processes import PATIENCE_SECONDS

_PORT = 6399
_RAY = str(Path(sys.executable).with_name("ray"))
_HOLD = "mount -t tmpfs -o size=2g tmpfs /dev/shm && echo ready && exec sleep infinity"


@dataclass
class Machine:
    """A namespace, and the process that holds it open."""

    name: str
    address: str
    link: str
    """Its end of the link between the machines."""
    holder: "subprocess.Popen[str]"
    node: "subprocess.Popen[bytes] | None" = None
    """`ray start`, which ends with the node."""
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """Where Ray's head keeps its files: the names of sockets must be short."""

    def inside(self, *command: str) -> list[str]:
        """The command, as it is run on this machine."""
        return ["nsenter", "-t", str(self.holder.pid), "-n", "-m", f"--wd={os.getcwd()}", *command]

    @property
    def shared_memory(self) -> Path:
        """Its /dev/shm, seen from outside."""
        return Path(f"/proc/{self.holder.pid}/root/dev/shm")

    def stores(self) -> list[Path]:
        """The folders of published weights in its shared memory."""
        return sorted(self.shared_memory.glob("agentrl-weights-*"))

    def bundles(self) -> list[Path]:
        """The published weights that lie there, without unfinished ones."""
        return sorted(path for store in self.stores() for path in store.glob("v*"))

    @property
    def received_bytes(self) -> int:
        """Bytes that have come over the link, as the kernel counts them."""
        return self._counted(0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that have gone over the link."""
        return self._counted(8)

    def _counted(self, column: int) -> int:
        for line in Path(f"/proc/{self.holder.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.strip().partition(":")
            if name == self.link:
                return int(numbers.split()[column])
        raise AssertionError(f"{self.name} has no link {self.link}")

    def cut(self) -> None:
        """Take its end of the link down: nothing gets through, and nobody is told."""
        _ip("-n", self.name, "link", "set", self.link, "down")

    def reconnect(self) -> None:
        """The link is there again, and with it the way to the other machine."""
        _ip("-n", self.name, "link", "set", self.link, "up")
        with suppress(subprocess.CalledProcessError):  # it may have stayed
            _ip("-n", self.name, "route", "add", "default", "dev", self.link)

    def start_ray(self, head: "Machine | None", logs: Path) -> None:
        """Start a node of Ray, as the head or beside it."""
        where = ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        if self.folder is not None:
            where.append(f"--temp-dir={self.folder}")
        if head is not None:
            where = [f"--address={head.address}:{_PORT}"]
        command = [_RAY, "start", "--block", "--num-cpus=2", "--object-store-memory=200000000"]
        with (logs / f"{self.name}.log").open("ab") as log:
            self.node = subprocess.Popen(
                self.inside(*command, f"--node-ip-address={self.address}", *where),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )
        # A node ends itself when its agents take more than 15 seconds to start. As a session of its
        # own, it goes before what else the machine does.
        with suppress(OSError):
            Path(f"/proc/{self.node.pid}/autogroup").write_text("-15")

    def has_ended(self) -> bool:
        """True if its node of Ray has ended."""
        return self.node is None or self.node.poll() is not None

    def stop_ray(self) -> None:
        """End its node, and what that has started."""
        node, self.node = self.node, None
        if node is None:
            return
        started = []
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        with suppress(subprocess.TimeoutExpired):
            node.wait(60)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill()
        node.wait()

    def end(self) -> None:
        """End all that runs here, but its holder."""
        self.stop_ray()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """The processes that run here, without its holder."""
        mine = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(entry / "ns/net") == mine:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.holder.pid]


@dataclass(frozen=True)
class TwoMachines:
    """The first machine is Ray's head, if Ray runs on them, and the place of the driver."""

    first: Machine
    second: Machine

    @property
    def address(self) -> str:
        """Of Ray's head."""
        return f"{self.first.address}:{_PORT}"

    @contextmanager
    def ray(self, logs: Path) -> Iterator[None]:
        """Ray runs on both while the block lasts. It gives up a node that is silent for a minute or
        more: with less patience, it would give up busy ones.
        """
        folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
        self.first.folder = folder
        try:
            for machine in (self.first, self.second):
                machine.environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RAY_AUTH_MODE": "disabled",
                    "RAY_raylet_start_wait_time_s": "60",
                }
            self.start_node(self.first, logs)
            self.start_node(self.second, logs)
            yield
        finally:
            self.second.end()
            self.first.end()
            shutil.rmtree(folder, ignore_errors=True)

    def start_node(self, machine: Machine, logs: Path) -> None:
        """Start Ray on a machine, and wait until its head counts it; if the machine is too busy,
        again.
        """
        head = None if machine is self.first else self.first
        asked = self.first.inside(sys.executable, "-c", _WAIT, self.address, machine.address)
        with subprocess.Popen(asked, env=self.first.environment) as waiting:
            try:
                machine.start_ray(head, logs)
                while waiting.poll() is None:
                    wait_until(lambda: waiting.poll() is not None or machine.has_ended(), "node")
                    if machine.has_ended():
                        machine.stop_ray()
                        machine.start_ray(head, logs)
            finally:
                waiting.kill()
        assert waiting.returncode == 0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds; what it is for the message."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < limit, f"no {what}"
        time.sleep(0.1)


_WAIT = """
import sys, time
from ray._raylet import GcsClient

wanted = sys.argv[2]
while True:
    try:
        nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)
        alive = [node for node in nodes.values() if node.state == 0]
        if wanted in [node.node_manager_address for node in alive]:
            break
    except Exception:
        pass  # the head is not there yet
    time.sleep(0.2)
"""
"""Ends when Ray's head counts a node with this address that lives: its state is 0."""


@contextmanager
def made_machines() -> Iterator[TwoMachines]:
    """Two machines without anything that runs on them, or the test is skipped."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("machines in network namespaces need root, iproute2 and util-linux")
    names = [f"agentrl-{os.getpid()}-{letter}" for letter in "ab"]
    links = [f"v{letter}{os.getpid()}" for letter in "ab"]
    with ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
            machines = [
                stack.enter_context(_machine(name, link, number))
                for number, (name, link) in enumerate(zip(names, links, strict=True), 1)
            ]
        except (subprocess.CalledProcessError, OSError) as error:
            why = getattr(error, "stderr", error)
            pytest.skip(f"this machine makes no network namespaces: {why}")
        yield TwoMachines(*machines)


@contextmanager
def _machine(name: str, link: str, number: int) -> Iterator[Machine]:
    """The namespace gets its link, and a holder with its own shared memory."""
    address = f"10.78.0.{number}"
    _ip("link", "set", link, "netns", name)
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
    for interface in (link, "lo"):
        _ip("-n", name, "link", "set", interface, "up")
    # From its default route, a program finds its machine's address.
    _ip("-n", name, "route", "add", "default", "dev", link)
    command = ["ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", _HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                raise OSError("no mount namespace")
            yield Machine(name, address, link, holder)
        finally:
            holder.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class RunningOn(Running):
    """An `agentrl train` on a machine."""

    machine: Machine | None = None

    def start(self) -> None:
        """Begin."""
        assert self.machine is not None
        config = self.folder.with_suffix(".yaml")
        config.write_text(self.config)
        train = [sys.executable, "-m", "agentrl", "train", str(config), f"run_dir={self.folder}"]
        with self.folder.with_suffix(".log").open("ab") as log:
            started = subprocess.Popen(
                self.machine.inside(*train, *self.overrides),
                cwd=ROOT,
                env=self.machine.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self.process = cast(Command, started)


class RayOnMachines(RayCluster):
    """`cluster=ray` whose engines, ranks and rollout workers live where the test wants them, while
    that is there.
    """

    class Config(RayCluster.Config):
        engines_on: tuple[str, ...] = ()
        """The address of each engine's machine."""
        trainer_on: tuple[str, ...] = ()
        """The address of each rank's machine."""
        workers_on: tuple[str, ...] = ()
        """The address of each rollout worker's machine."""
        they_move: bool = True
        """Whether Ray may choose another machine for engines and ranks; it must when that is gone,
        and then it does for rollout workers too."""

    def _unplaced(self) -> Unplaced:
        assert isinstance(self.config, RayOnMachines.Config)
        wanted = {
            "engine": self.config.engines_on,
            "trainer": self.config.trainer_on,
            "rollout": self.config.workers_on,
        }
        return _OnMachines(wanted, self.config.they_move)


class _OnMachines(Unplaced):
    def __init__(self, addresses: Mapping[str, Sequence[str]], they_move: bool) -> None:
        super().__init__()
        self._addresses = addresses
        self._they_move = they_move

    def options(self, role: str, rank: int, count: int = 0) -> Mapping[str, Any]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = super().options(role, rank, count)
        wanted = self._addresses.get(role, ())
        all_nodes: Any = ray.nodes
        for node in all_nodes() if rank < len(wanted) else ():
            if node["Alive"] and node["NodeManagerAddress"] == wanted[rank]:
                # As a wish, Ray sometimes starts it elsewhere although there is room.
                moves = self._they_move and role != "rollout"
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=moves)
                return {**options, "scheduling_strategy": there}
        return options
