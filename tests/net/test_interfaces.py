"""Processes of a run meet on the network that others can reach."""

import os
import socket
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from agentrl.cluster.ray_process import Surroundings
from agentrl.engines.vllm_environment import set_environment
from agentrl.net import interfaces
from agentrl.net.interfaces import meet_other_machines, own_address

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
    networks.setattr(interfaces, "own_address", lambda: "10.0.0.7")
    meet_other_machines()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_an_interface_of_the_user_is_kept(networks: pytest.MonkeyPatch) -> None:
    networks.setattr(interfaces, "own_address", lambda: "10.0.0.7")
    networks.setenv("NCCL_SOCKET_IFNAME", "ib0")
    meet_other_machines()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(("spans_machines", "interface"), [(True, "eth0"), (False, "lo")])
def test_vllm_meets_the_ranks_of_other_machines_if_there_are_any(
    spans_machines: bool, interface: str, networks: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    networks.setattr(interfaces, "own_address", lambda: "10.0.0.7")
    networks.chdir(tmp_path)
    for name in ("LOGGING_LEVEL", "NO_USAGE_STATS", "HOST_IP"):
        networks.setenv(f"VLLM_{name}", os.environ.get(f"VLLM_{name}", ""))
    Surroundings(tmp_path, spans_machines).settle()  # what every actor does first
    set_environment()
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface}"


class NoRoute(socket.socket):
    """A socket of a machine from which nothing leads outside."""

    def connect(self, address: object) -> None:
        raise OSError("Network is unreachable")


def test_without_a_way_outside_the_address_is_that_of_a_network(
    networks: pytest.MonkeyPatch,
) -> None:
    networks.setattr(socket, "socket", NoRoute)
    assert own_address() == "10.1.0.7"
