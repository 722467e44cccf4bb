"""Two machines in one: network namespaces of Linux, each with an address and shared memory of its
own, joined by one link. They share the disk and the processes' numbers.

It needs root and iproute2; elsewhere, tests that ask for `two_machines` are skipped.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.processes import PATIENCE_SECONDS

HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray gives up a node that is silent after some seconds, as busy ones may be too."""
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

    def inside(self, *command: str) -> list[str]:
        """The command, as it is run on this machine."""
        return ["nsenter", "-t", str(self.holder.pid), "-n", "-m", f"--wd={os.getcwd()}", *command]

    @property
    def shared_memory(self) -> Path:
        """Its /dev/shm, seen from outside."""
        return Path(f"/proc/{self.holder.pid}/root/dev/shm")

    def bundles(self) -> list[Path]:
        """The published weights that lie in its shared memory, without unfinished ones."""
        return sorted(self.shared_memory.glob("agentrl-weights-*/v*"))

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
        where = ["--head", f"--port={_PORT}", f"--temp-dir={logs / 'ray'}"]
        where += ["--include-dashboard=false"]
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

    def stop_ray(self) -> None:
        """End its node, and all that it has started."""
        node, self.node = self.node, None
        if node is not None:
            node.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                node.wait(60)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if node is not None:
            node.kill()
            node.wait()

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
    def ray(self, logs: Path, variables: Mapping[str, str] | None = None) -> Iterator[None]:
        """Ray runs on both while the block lasts."""
        logs.mkdir(exist_ok=True)
        try:
            for machine in (self.first, self.second):
                machine.environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RAY_AUTH_MODE": "disabled",
                    "RAY_raylet_start_wait_time_s": "600",
                    **(variables or {}),
                }
            self.first.start_ray(None, logs)
            self.wait_for_nodes(1)
            self.second.start_ray(self.first, logs)
            self.wait_for_nodes(2)
            yield
        finally:
            self.second.stop_ray()
            self.first.stop_ray()

    def wait_for_nodes(self, count: int) -> None:
        """Wait until so many nodes are alive."""
        asked = self.first.inside(sys.executable, "-c", _WAIT, self.address, str(count))
        subprocess.run(
            asked,
            check=True,
            capture_output=True,
            env=self.first.environment,
            timeout=PATIENCE_SECONDS,
        )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds; what it is for the message."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < limit, f"no {what}"
        time.sleep(0.1)


_WAIT = """
import sys, time
from ray._raylet import GcsClient

wanted = int(sys.argv[2])
while True:
    try:
        nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)
        if sum(node.state == 0 for node in nodes.values()) == wanted:
            break
    except Exception as error:
        print(error, file=sys.stderr)
    time.sleep(0.2)
"""
"""Ends when Ray's head counts so many nodes that live, whose state is 0."""


@pytest.fixture
def two_machines() -> Iterator[TwoMachines]:
    """Two machines without anything that runs on them."""
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
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise OSError("no mount namespace")
        yield Machine(name, address, link, holder)
    finally:
        holder.kill()
        holder.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
