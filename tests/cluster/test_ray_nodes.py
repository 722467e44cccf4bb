"""Two Ray nodes on one machine: a run that loses one of them in the middle, and finishes; and the same losses on Ray as
in one process.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.chaos import CONFIG, PATIENCE_SECONDS, PHASES, RECOVERY_SECONDS, Running, finish, finished
from tests.processes import still_alive, title

pytestmark = pytest.mark.slow
OF_CI = ("generating", signal.SIGKILL)
STEPS = 12
ENVIRONMENT = {
    "RAY_health_check_initial_delay_ms": "2000",  # how soon a node that says nothing is taken for dead
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "2",
}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of a head, where the controller lives, and one node beside it."""
    from ray.cluster_utils import Cluster

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Running]:
    """A run, which ends with the test."""
    with Running(tmp_path / "run") as running:
        yield running


def workers_of(raylet: int) -> list[psutil.Process]:
    """The actors of a node."""
    children = psutil.Process(raylet).children(recursive=True)
    return [child for child in children if title(child).startswith("ray::")]


def kill(processes: list[psutil.Process]) -> None:
    """Those that are left: a stopped one does not end with its node."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        pytest.param(phase, kind, marks=() if (phase, kind) == OF_CI else pytest.mark.chaos)
        for phase in PHASES
        for kind in (signal.SIGKILL, signal.SIGSTOP)
    ],
)
def test_a_run_that_loses_a_node_in_the_middle_finishes(
    nodes: Any, phase: str, kind: signal.Signals, run: Running, request: pytest.FixtureRequest
) -> None:
    run.patience = PATIENCE_SECONDS if (phase, kind) == OF_CI else RECOVERY_SECONDS
    run.overrides = [f"steps={STEPS}", "cluster.env_workers=2", f"cluster.address={nodes.address}"]
    run.start()
    run.wait_for("first step", lambda: run.steps() >= 2, 180)
    (node,) = nodes.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    lost = workers_of(raylet)
    assert lost, "nothing of the run lives on the second node"
    request.addfinalizer(partial(kill, lost))
    with run.in_phase(phase):
        for process in [psutil.Process(raylet), *(lost if kind is signal.SIGSTOP else [])]:
            process.send_signal(kind)
        before = run.steps()
    seconds = run.wait_for("recovery of a lost node", lambda: run.steps() >= before + 2, run.patience)
    print(f"node / {phase} / {kind.name} with {len(lost)} workers: two more steps after {seconds:.1f} s")
    if kind is signal.SIGSTOP:  # what comes after is the same, so half of them are interrupted, and half are not
        run.stop()
        finish(run)
    else:
        finished(run, STEPS)


def test_nothing_of_ray_outlives_who_has_started_it(tmp_path: Path) -> None:
    script = "from agentrl.cluster.ray_cluster import join_ray; join_ray(); print('ready', flush=True); input()"
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        started: list[psutil.Process] = []
        while not any("Agent" in title(process) for process in started):  # Ray starts its agents beside
            time.sleep(0.2)
            started = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    assert still_alive(started, 60) == []


@pytest.mark.long
def test_a_run_lives_on_the_devices_of_its_plan(run: Running, request: pytest.FixtureRequest) -> None:
    """On GPUs that are not there: what runs on them is on the CPU. The plan says how many engines and ranks."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "num_gpus": 2,
            "resources": {"accelerator_type:H100": 1},
            "include_dashboard": False,
        },
    )
    request.addfinalizer(cluster.shutdown)
    run.overrides = [
        *("steps=2", "placement=colocated", f"cluster.address={cluster.address}"),
        *("cluster.env_workers=0", "cluster.reward_workers=0", "trainer.world_size=1"),
    ]
    run.start()
    assert run.process is not None
    assert run.process.wait(180) == 0, run.log[-4000:]
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4


def test_the_same_recipe_has_the_same_losses_to_the_bit_on_ray_as_in_one_process(tmp_path: Path) -> None:
    # One at a time: what an engine computes together is a matter of timing, and rounds the last bits otherwise.
    config = CONFIG.replace("name: fsdp, world_size: 2", "name: local").replace("max_batch: 16", "max_batch: 1")

    def losses(name: str, *overrides: str) -> list[dict[str, float]]:
        with Running(tmp_path / name, ["steps=3", "cluster.env_workers=0", *overrides], config) as run:
            run.start()
            assert run.process is not None
            assert run.process.wait(180) == 0, run.log[-4000:]
            assert "died or was killed" not in run.log, "Ray took the end of a healthy run for a death"
            rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: row[key] for key in ("loss", "grad_norm", "reward", "logprob_gap_max")} for row in rows]

    here = losses("here", "cluster=local", "cluster.reward_workers=0")
    assert len(here) == 3
    assert all(row["loss"] != 0 and row["grad_norm"] > 0 for row in here)
    assert losses("ray") == here
