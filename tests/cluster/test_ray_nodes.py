"""Two Ray nodes on one machine: a run that loses one of them in the middle, and finishes; and the
same losses on Ray as in one process.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.chaos import CONFIG, PHASES, Running, finish, finished, two_nodes
from tests.commands import ROOT
from tests.processes import PATIENCE_SECONDS, still_alive, title

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Running]:
    """A run, which ends with the test."""
    with Running(tmp_path / "run") as running:
        yield running


@pytest.mark.chaos
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_that_loses_a_node_in_the_middle_finishes(
    phase: str, kind: signal.Signals, run: Running
) -> None:
    with two_nodes(hangs=kind is signal.SIGSTOP) as nodes:
        run.overrides = [
            f"steps={STEPS}",
            "cluster.env_workers=2",
            f"cluster.address={nodes.address}",
        ]
        run.start()
        run.wait_for("first step", lambda: run.steps() >= 2, PATIENCE_SECONDS)
        run.lose_node(nodes.beside, phase, kind)
        # What comes after is the same, so half of them are interrupted, and half are not.
        if kind is signal.SIGSTOP:
            run.stop()
            finish(run)
        else:
            finished(run, STEPS)


@pytest.mark.long
def test_nothing_of_ray_outlives_who_has_started_it(tmp_path: Path) -> None:
    script = (
        "from agentrl.cluster.ray_cluster import join_ray; join_ray(); print('ready', flush=True);"
        " input()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        started: list[psutil.Process] = []
        # Ray starts its agents beside.
        while not any("Agent" in title(process) for process in started):
            time.sleep(0.2)
            started = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    assert still_alive(started, 60) == []


@pytest.mark.long
def test_a_run_lives_on_the_devices_of_its_plan(
    run: Running, request: pytest.FixtureRequest
) -> None:
    """On GPUs that are not there: what runs on them is on the CPU. The plan says how many engines
    and ranks.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "num_gpus": 2,
            "env_vars": {"CUDA_VISIBLE_DEVICES": "4,5"},
            "include_dashboard": False,
        },
    )
    request.addfinalizer(cluster.shutdown)
    run.overrides = [
        "cluster.name=tests.cluster.fake_gpus:RayOnFakes",
        *("steps=2", "placement=colocated", f"cluster.address={cluster.address}"),
        *("cluster.env_workers=0", "cluster.reward_workers=0", "trainer.world_size=1"),
    ]
    run.start()
    assert run.process is not None
    assert run.process.wait(PATIENCE_SECONDS) == 0, run.log[-4000:]
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4


USE_DEVICES = """
import asyncio, json, sys
from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.ray_cluster import join_ray
from agentrl.cluster.ray_placement import gpus_of_ray, reserved
from agentrl.placement.config import PlacementConfig
from agentrl.placement.device_map import PlacementRequest, device_maps
from tests.cluster.fake_gpus import Seeing, probe_fakes

async def main():
    inventory = gpus_of_ray(probe_fakes)
    devices = device_maps(PlacementConfig(name="colocated"), PlacementRequest(), inventory)[0]
    async with reserved(devices) as placement:
        group = await RayWorkers(placement)("trainer", Seeing, 3)
        names = await group.all("variable", "CUDA_VISIBLE_DEVICES")
        homes = [worker.process.node for worker in group.workers]
        await group.stop()
        print(json.dumps([inventory.sizes, sorted(names), len(set(homes))]))

join_ray(sys.argv[1])
asyncio.run(main())
"""


@pytest.mark.long
def test_ranks_see_the_devices_of_nodes_of_different_sizes(
    request: pytest.FixtureRequest,
) -> None:
    from ray.cluster_utils import Cluster

    def node(count: int, names: str) -> dict[str, Any]:
        return {"num_cpus": 1, "num_gpus": count, "env_vars": {"CUDA_VISIBLE_DEVICES": names}}

    first = {**node(2, "GPU-aa,GPU-bb"), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=first)
    request.addfinalizer(cluster.shutdown)
    cluster.add_node(**node(1, "7"))
    done = subprocess.run(
        [sys.executable, "-c", USE_DEVICES, cluster.address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes, names, homes = json.loads(done.stdout.splitlines()[-1])
    assert sorted(sizes) == [1, 2]
    assert names == ["7", "GPU-aa", "GPU-bb"]
    assert homes == 2


@pytest.mark.long
def test_the_same_recipe_has_the_same_losses_to_the_bit_on_ray_as_in_one_process(
    tmp_path: Path,
) -> None:
    # One at a time and without what earlier turns have left: both are a matter of timing, and round
    # the last bits otherwise.
    alone = "max_batch: 1, prefix_cache: false"
    config = CONFIG.replace("name: fsdp, world_size: 2", "name: local").replace(
        "max_batch: 16", alone
    )

    def losses(name: str, *overrides: str) -> list[dict[str, float]]:
        with Running(
            tmp_path / name, ["steps=3", "cluster.env_workers=0", *overrides], config
        ) as run:
            run.start()
            assert run.process is not None
            assert run.process.wait(PATIENCE_SECONDS) == 0, run.log[-4000:]
            assert "died or was killed" not in run.log, (
                "Ray took the end of a healthy run for a death"
            )
            rows = [
                json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()
            ]
        return [
            {key: row[key] for key in ("loss", "grad_norm", "reward", "logprob_gap_max")}
            for row in rows
        ]

    here = losses("here", "cluster=local", "cluster.reward_workers=0")
    assert len(here) == 3
    # The loss itself is 0, up to the last bits: the advantages of a group sum to 0, and all
    # episodes are equally long.
    assert all(row["grad_norm"] > 0 for row in here)
    assert losses("ray") == here
