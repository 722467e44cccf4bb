"""Ranks of two machines meet: two network namespaces of Linux, each with an address of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
from agentrl.placement.mesh import Mesh
from agentrl.trainers.rank.process_group import join, sum_of_ranks
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.spec import RankInfo

rank, meeting = int(sys.argv[1]), Path(sys.argv[2])
worker = TrainerRank(None, rank)
if rank == 0:
    address = worker.reserve(loopback=False)
    written = meeting.with_suffix(".new")
    written.write_text(address)
    written.rename(meeting)
while not meeting.exists():
    time.sleep(0.05)
join(RankInfo(rank, Mesh(shard=2), meeting.read_text(), worker._meeting))
total = sum_of_ranks(torch.tensor([1.0 + rank]))
print(json.dumps([worker.machine().split()[-1], meeting.read_text().split(":")[0], float(total)]))
"""
NAMES = ("agentrl-a", "agentrl-b")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def two_machines() -> Iterator[None]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    first, second = NAMES
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "agentrl-va", "type", "veth", "peer", "name", "agentrl-vb")
        for name, end, number in ((first, "agentrl-va", 1), (second, "agentrl-vb", 2)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove_machines()
        pytest.skip(f"this machine makes no network namespaces: {error.stderr}")
    yield
    remove_machines()


def remove_machines() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.usefixtures("two_machines")
def test_ranks_of_two_machines_compute_together(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.pop(variable, None)
    ranks = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-c",
                PROGRAM,
                str(rank),
                str(tmp_path / "at"),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(NAMES)
    ]
    try:
        answers = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    assert [out.splitlines()[-1] for out, _ in answers] == [
        '["10.78.0.1", "10.78.0.1", 3.0]',
        '["10.78.0.2", "10.78.0.1", 3.0]',
    ]
