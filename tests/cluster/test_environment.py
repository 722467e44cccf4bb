"""Workers compute with their share of the cores, and meet on the network that others can reach."""

import asyncio
import os
import socket
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from agentrl.cluster import environment, processes
from agentrl.cluster.environment import THREADS, meet_other_machines, own_address, thread_variables
from agentrl.cluster.processes import start_local


class Started:
    """Says what its process was started with, before it imported anything."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def threads(self) -> str:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
        return next((e.decode() for e in entries if e.startswith(THREADS.encode())), "")


def threads_of_ranks() -> list[str]:
    async def main() -> list[str]:
        group = await start_local("trainer", Started, 2)
        try:
            return await group.all("threads")
        finally:
            await group.stop()

    return asyncio.run(main())


def test_ranks_on_this_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 6)
    monkeypatch.delenv(THREADS, raising=False)
    assert threads_of_ranks() == [f"{THREADS}=3"] * 2
    assert THREADS not in os.environ


def test_a_share_is_at_least_one_core_and_a_choice_is_kept() -> None:
    assert thread_variables(128, 8) == {THREADS: "16"}
    assert thread_variables(2, 8) == {THREADS: "1"}
    assert thread_variables(128, 8, "4") == {THREADS: "4"}


Address = namedtuple("Address", "family address")
Interface = namedtuple("Interface", "isup")


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a bridge of Docker that is down, and two networks."""
    addresses = {
        "lo": [Address(socket.AF_INET, "127.0.0.1")],
        "docker0": [Address(socket.AF_INET, "172.17.0.1")],
        "ib0": [Address(socket.AF_INET6, "fe80::1"), Address(socket.AF_INET, "10.1.0.7")],
        "eth0": [Address(socket.AF_INET, "10.0.0.7")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    up = {name: Interface(name != "docker0") for name in addresses}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    for library in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", "")
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME")
    return monkeypatch


def test_ranks_of_several_machines_meet_on_the_interface_of_their_own_address(
    networks: pytest.MonkeyPatch,
) -> None:
    networks.setattr(environment, "own_address", lambda: "10.0.0.7")
    meet_other_machines()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_an_interface_of_the_user_is_kept(networks: pytest.MonkeyPatch) -> None:
    networks.setattr(environment, "own_address", lambda: "10.0.0.7")
    networks.setenv("NCCL_SOCKET_IFNAME", "ib0")
    meet_other_machines()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


class NoRoute(socket.socket):
    """A socket of a machine from which nothing leads outside."""

    def connect(self, address: object) -> None:
        raise OSError("Network is unreachable")


def test_without_a_way_outside_the_address_is_that_of_a_network(
    networks: pytest.MonkeyPatch,
) -> None:
    networks.setattr(socket, "socket", NoRoute)
    assert own_address() == "10.1.0.7"
