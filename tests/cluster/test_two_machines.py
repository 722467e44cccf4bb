"""What crosses the link between two machines, and what happens when it is cut
(`tests/cluster/machines.py`).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import psutil
import pytest

from agentrl.ledger.ledger import Fate, Fates, read_ledger
from tests.cluster.chaos import CONFIG, nothing_is_lost
from tests.cluster.machines import Machine, RunningOn, TwoMachines, made_machines, wait_until
from tests.commands import ROOT
from tests.processes import PATIENCE_SECONDS, title


@pytest.fixture
def two_machines() -> Iterator[TwoMachines]:
    with made_machines() as machines:
        yield machines


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


@pytest.mark.long
def test_ranks_of_two_machines_compute_together(two_machines: TwoMachines, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.pop(variable, None)
    ranks = [
        subprocess.Popen(
            machine.inside(sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "at")),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate((two_machines.first, two_machines.second))
    ]
    try:
        answers = [rank.communicate(timeout=PATIENCE_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    assert [out.splitlines()[-1] for out, _ in answers] == [
        '["10.78.0.1", "10.78.0.1", 3.0]',
        '["10.78.0.2", "10.78.0.1", 3.0]',
    ]


MEBIBYTES = 64
BRING = """
import asyncio, json, os, signal, sys
from pathlib import Path
import ray, torch
from agentrl.cluster.ray_cluster import join_ray
from agentrl.cluster.ray_receivers import RayReceivers
from agentrl.weights.store import WeightStore, default_parent

def read_bytes():
    return int(Path("/proc/self/io").read_text().split()[1])

def say(**said):
    print(json.dumps(said), flush=True)
    sys.stdin.readline()

async def main(address, mebibytes):
    join_ray(address)
    own = ray.get_runtime_context().get_node_id()
    (other,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != own]
    store = WeightStore.open(default_parent(), 8 << 20)
    weights = {f"w{i}": torch.randn(1 << 18) for i in range(mebibytes)}
    bundles = [store.place(version).write(weights) for version in (1, 2)]
    receivers = RayReceivers()
    before = read_bytes()
    copies = [await receivers.bring(bundles[0], other, engine) for engine in "ab"]
    say(same=copies[0] == copies[1], moved=copies[0].folder != bundles[0].folder,
        driver=read_bytes() - before)
    copies = [await receivers.bring(bundles[1], other, engine) for engine in "ab"]
    say()
    await receivers.keep_only(bundles[1].checksum, "a")
    say()
    await receivers.keep_only(bundles[1].checksum, "b")
    os.kill(receivers._receivers[other].process.pid, signal.SIGKILL)
    again = await receivers.bring(bundles[1], other, "a")
    say(another=again.folder != copies[0].folder)
    receivers.forget("a")
    await receivers.close()
    store.close()
    say()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.long
def test_all_engines_of_a_machine_read_one_copy_which_does_not_go_through_the_driver(
    two_machines: TwoMachines, tmp_path: Path
) -> None:
    here, there, size = two_machines.first, two_machines.second, MEBIBYTES << 20
    pipe = subprocess.PIPE
    with (
        two_machines.ray(tmp_path),
        subprocess.Popen(
            here.inside(sys.executable, "-c", BRING, two_machines.address, str(MEBIBYTES)),
            cwd=ROOT,
            env=here.environment,
            stdin=pipe,
            stdout=pipe,
            text=True,
        ) as driver,
    ):

        def answer() -> dict[str, object]:
            for line in driver.stdout or ():
                if line.startswith("{"):  # Ray prints warnings there
                    found: dict[str, object] = json.loads(line)
                    return found
            raise AssertionError("the driver has ended")

        def go_on() -> None:
            driver.stdin.write("\n")  # type: ignore[union-attr]
            driver.stdin.flush()  # type: ignore[union-attr]

        first = answer()
        assert first["same"]
        assert first["moved"]
        assert isinstance(first["driver"], int)
        assert first["driver"] < 0.1 * size
        assert len(there.bundles()) == 1
        # The modules of the actors come from the disk; what else goes is Ray's own.
        assert size < here.sent_bytes < 1.3 * size
        go_on()
        answer()
        assert len(there.bundles()) == 2
        go_on()
        answer()
        assert len(there.bundles()) == 2, "one of the engines has not taken the new one yet"
        go_on()
        assert answer() == {"another": True}
        # What the killed one had is removed by its shell.
        wait_until(lambda: len(there.bundles()) == 1, "end of a killed receiver's files")
        go_on()
        answer()
        wait_until(lambda: not there.bundles(), "end of all copies")
        assert here.stores() == there.stores() == []
        go_on()
        assert driver.wait(PATIENCE_SECONDS) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("transport", "phase"), [("auto", "generating"), ("stream", "updating weights")]
)
def test_a_run_whose_second_machine_is_cut_off_and_comes_back_mixes_no_weights(
    transport: str, phase: str, two_machines: TwoMachines, tmp_path: Path
) -> None:
    here, there = two_machines.first, two_machines.second
    run = RunningOn(
        tmp_path / "run",
        [
            "cluster.name=tests.cluster.machines:RayOnMachines",
            f'cluster.engines_on=["{here.address}","{there.address}","{there.address}"]',
            f'cluster.trainer_on=["{here.address}","{there.address}"]',
            *("cluster.engines=3", "cluster.env_workers=0", "cluster.reward_workers=0"),
            *(f"cluster.address={two_machines.address}", "cluster.lease=600"),
            *(f"weights.transport={transport}", "weights.bucket_mib=1"),
        ],
        CONFIG,
        patience=PATIENCE_SECONDS,
        machine=here,
    )
    with two_machines.ray(tmp_path), run:
        run.start()
        run.wait_for("first steps", lambda: run.steps() >= 2, PATIENCE_SECONDS)
        if transport == "auto":
            # Ray takes the machine that an actor is meant for as a wish: one or two engines are
            # there.
            run.wait_for("weights there", lambda: bool(there.bundles()), PATIENCE_SECONDS)
            assert len(there.stores()) == 1, "one for all of them"
            assert len(there.bundles()) <= 2, "a version, and its successor"
        with run.in_phase(phase):
            there.cut()
        before = run.steps()
        run.wait_for("steps without it", lambda: run.steps() >= before + 2, PATIENCE_SECONDS)
        there.reconnect()
        wait_until(there.has_ended, "end of its node")
        there.stop_ray()
        wait_until(lambda: not there.bundles(), "end of the files that it had")
        two_machines.start_node(there, tmp_path)
        # Engines that are replaced from now on go to where they were, or to any other place.
        before = run.steps()
        run.wait_for("more steps", lambda: run.steps() >= before + 2, PATIENCE_SECONDS)
        run.stop()
        nothing_is_lost(run)
        rows = [
            json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()
        ]
        assert max(row.get("restarts/engine", 0) for row in rows) >= 1
        # Of every sampled token, the logprob is that of the version that was trained with it.
        assert max(row["logprob_gap_max"] for row in rows) < 1e-4
        wait_until(lambda: not (here.stores() or there.stores()), "end of all files")


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_a_trainer_on_another_machine_than_the_driver_sends_weights_past_it(
    transport: str, two_machines: TwoMachines, tmp_path: Path
) -> None:
    here, there = two_machines.first, two_machines.second
    run = RunningOn(
        tmp_path / "run",
        [
            "cluster.name=tests.cluster.machines:RayOnMachines",
            f'cluster.engines_on=["{here.address}","{there.address}","{there.address}"]',
            f'cluster.trainer_on=["{there.address}","{there.address}"]',
            *("cluster.engines=3", "cluster.env_workers=0", "cluster.reward_workers=0"),
            *(f"cluster.address={two_machines.address}", "cluster.lease=600"),
            "cluster.they_move=false",
            *(f"weights.transport={transport}", "weights.bucket_mib=1"),
        ],
        CONFIG,
        patience=PATIENCE_SECONDS,
        machine=here,
    )

    def rows() -> list[dict[str, float]]:
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def engines(machine: Machine) -> list[int]:
        return [
            p for p in machine.processes() if title(psutil.Process(p)).startswith("ray::engine")
        ]

    with two_machines.ray(tmp_path), run:
        run.start()
        run.wait_for("first steps", lambda: run.steps() >= 2, PATIENCE_SECONDS)
        assert (len(engines(here)), len(engines(there))) == (1, 2)
        before, sent, received = run.steps(), here.sent_bytes, here.received_bytes
        run.wait_for("more steps", lambda: run.steps() >= before + 6, PATIENCE_SECONDS)
        sent, received = here.sent_bytes - sent, here.received_bytes - received
        size, steps = rows()[-1]["weights/bytes"], run.steps() - before
        print(
            f"{transport}: {steps} steps of {size:.0f} bytes: {sent} to the ranks, {received} back"
        )
        # They come over the link for the engine here, once, and do not go back.
        assert 0.8 * size * (steps - 1) < received < 1.4 * size * (steps + 1)
        assert sent < 0.4 * size * steps
        # One copy a machine: that of the ranks, and that of the receiver here.
        assert len({bundle.parent for bundle in there.bundles()}) == 1
        assert len(there.bundles()) <= 2, "a version, and its successor"
        assert len({bundle.parent for bundle in here.bundles()}) == (transport == "auto")
        # An engine that starts here later gets the files that lie there.
        os.kill(engines(here)[0], signal.SIGKILL)
        run.wait_for("weights here", lambda: bool(here.bundles()), PATIENCE_SECONDS)
        before = run.steps()
        run.wait_for("steps after that", lambda: run.steps() >= before + 2, PATIENCE_SECONDS)
        assert (len(engines(here)), len(engines(there))) == (1, 2)
        run.stop()
        nothing_is_lost(run)
        assert max(row.get("restarts/engine", 0) for row in rows()) >= 1
        # Of every sampled token, the logprob is that of the version that was trained with it.
        assert max(row["logprob_gap_max"] for row in rows()) < 1e-4
        wait_until(lambda: not (here.stores() or there.stores()), "end of all files")


@pytest.mark.long
@pytest.mark.parametrize("phase", ["generating", "updating weights"])
def test_a_run_goes_on_when_the_machine_of_a_rollout_worker_is_cut_off(
    phase: str, two_machines: TwoMachines, tmp_path: Path
) -> None:
    here, there = two_machines.first, two_machines.second
    run = RunningOn(
        tmp_path / "run",
        [
            "cluster.name=tests.cluster.machines:RayOnMachines",
            f'cluster.engines_on=["{here.address}","{there.address}"]',
            f'cluster.workers_on=["{here.address}","{there.address}"]',
            f'cluster.trainer_on=["{here.address}","{here.address}"]',
            *("cluster.engines=2", "cluster.env_workers=0", "cluster.reward_workers=0"),
            *(f"cluster.address={two_machines.address}", "cluster.lease=600"),
            "rollout.workers=2",
        ],
        CONFIG,
        patience=PATIENCE_SECONDS,
        machine=here,
    )

    def players(machine: Machine) -> list[int]:
        return [
            p for p in machine.processes() if title(psutil.Process(p)).startswith("ray::rollout")
        ]

    def episodes() -> Fates:
        with read_ledger(run.folder / "ledger.sqlite") as ledger:
            return ledger.episode_fates()

    with two_machines.ray(tmp_path), run:
        run.start()
        run.wait_for("first steps", lambda: run.steps() >= 2, PATIENCE_SECONDS)
        assert (len(players(here)), len(players(there))) == (1, 1)
        with run.in_phase(phase):
            there.cut()
        before = run.steps()
        run.wait_for("steps without it", lambda: run.steps() >= before + 2, PATIENCE_SECONDS)
        there.reconnect()
        wait_until(there.has_ended, "end of its node")
        wait_until(lambda: not players(there), "end of the worker that was cut off")
        there.stop_ray()
        two_machines.start_node(there, tmp_path)
        before = run.steps()
        run.wait_for("more steps", lambda: run.steps() >= before + 2, PATIENCE_SECONDS)
        run.stop()
        nothing_is_lost(run)
        rows = [
            json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()
        ]
        assert max(row.get("restarts/rollout", 0) for row in rows) >= 1
        assert max(row["logprob_gap_max"] for row in rows) < 1e-4
        # Each episode has one fate: those of a step were trained, whoever played them.
        fates = episodes()
        assert fates.trained in (8 * run.steps(), 8 * run.steps() + 8)
        named = (getattr(fates, name) for name in (*get_args(Fate), "open"))
        assert sum(named) == fates.total
