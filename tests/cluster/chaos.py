"""Faults in a running `agentrl train`, and whether it goes on: the harness of
tests/cluster/test_chaos.py.

A cell of the matrix is a component, the phase of the run that it is hit in, and a signal. A run is
hit by one cell after the other: when it has trained two more steps, it has recovered of it.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.ledger.ledger import read_ledger
from agentrl.observe.live_status import read_live_state
from agentrl.trajectory import Trajectory
from tests.commands import ROOT, Command
from tests.processes import PATIENCE_SECONDS, is_alive, still_alive, title

RECOVERY_SECONDS = 60.0
PHASES = {
    "idle": "idle",
    "generating": "rollout",
    "stepping": "train",
    "updating weights": "weights",
    "checkpointing": "checkpoint",
}
"""The matrix's names of phases, and those that status.json has."""
COMPONENTS = {
    "env worker": "env_0",
    "reward worker": "reward_0",
    "engine": "engine",
    "trainer rank": "trainer_1",
}
"""What the processes of a component are called by Ray."""
HELPERS = {"critic rank": "critic_1", "reference rank": "reference_1"}
"""The same, where an algorithm asks for them."""
PLAYERS = {"rollout worker": "rollout_1"}
"""The same, with `rollout.workers`, which have environments of their own."""
_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
CONFIG = """
steps: 1000000
env: frozen_lake
model: tiny
rollout: {groups_per_step: 2, group_size: 4, budget: {turns: 5}, sampling: {max_tokens: 4}}
reward: [environment, {name: "tests.cluster.chaos:odd", isolation: process}]
cluster: {name: ray, env_workers: 1, reward_workers: 1, lease: 5}
engine: {max_batch: 16}
trainer: {name: fsdp, world_size: 2, micro_batch_tokens: 512}
evaluation: {tasks: 0}
checkpoint: {every: 1}
trackers: ["tests.cluster.chaos:Hold"]
"""


def odd(trajectory: Trajectory) -> float:
    """A reward that is judged in a process: of what was said, so that members of a group differ."""
    return sum(turn.completion.token_ids[0] % 2 for turn in trajectory.turns) / 2


class Hold:
    """A tracker that stops the run between two steps for as long as the file `hold` is there: all
    is idle then.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if (self._folder / "hold").exists():
            (self._folder / "holding").touch()
            while (self._folder / "hold").exists():
                time.sleep(0.01)
            (self._folder / "holding").unlink()

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Cell:
    """One fault."""

    component: str
    phase: str
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.component} / {self.phase} / {self.signal.name}"


def actors_of(raylet: int) -> list[psutil.Process]:
    """The actors of a node of Ray: neither its agents, nor workers that wait for an actor."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(raylet).children(recursive=True)
        return [child for child in children if re.match(r"ray::(?!IDLE|\w*Agent)", title(child))]
    return []


@dataclass(frozen=True)
class TwoNodes:
    """A Ray of a head, where the controller lives, and one node beside it."""

    address: str
    head: int
    beside: int
    """The pids of the raylets."""


_USE_BOTH = """
import sys
import ray

ray.init(sys.argv[1], log_to_driver=False)
spread = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
where = spread(lambda: ray.get_runtime_context().get_node_id())
while len(set(ray.get([where.remote() for _ in range(4)]))) < 2:
    pass
"""
"""Ends when Ray's scheduler knows of both nodes, which is some time after they are there."""


@contextmanager
def two_nodes(*, hangs: bool = False) -> Iterator[TwoNodes]:
    """Two nodes on this machine. If one `hangs`, it is taken for dead after some seconds, as busy
    ones may be too.
    """
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        for name, value in _HEALTH_CHECKS.items() if hangs else ():
            patched.setenv(name, value)
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        nodes = cluster.head_node, cluster.add_node(num_cpus=2)
        try:
            subprocess.run(
                [sys.executable, "-c", _USE_BOTH, cluster.address],
                check=True,
                timeout=PATIENCE_SECONDS,
            )
            yield TwoNodes(
                cluster.address, *(node.all_processes["raylet"][0].process.pid for node in nodes)
            )
        finally:
            cluster.shutdown()


@dataclass
class Running:
    """An `agentrl train` in a process of its own. A context manager: nothing of it outlives the
    block.
    """

    folder: Path
    overrides: Sequence[str] = ()
    config: str = CONFIG
    process: Command | None = None
    seen: list[psutil.Process] = field(default_factory=list)
    patience: float = RECOVERY_SECONDS
    """How long a recovery may take."""
    raylets: Sequence[int] = ()
    """The processes, one a node, of the Ray that it joins; without any it starts one of its own."""

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)  # all others end with it
            self.process.wait(PATIENCE_SECONDS)

    def start(self) -> None:
        """Begin, or go on."""
        config = self.folder.with_suffix(".yaml")
        config.write_text(self.config)
        resume = (self.folder / "config.yaml").exists()
        arguments = (
            ["--resume", str(self.folder)] if resume else [str(config), f"run_dir={self.folder}"]
        )
        self.process = Command("train", *arguments, *self.overrides, cwd=ROOT, log=self._log)

    @property
    def _log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def steps(self) -> int:
        """Steps that are written down."""
        with suppress(FileNotFoundError, json.JSONDecodeError):
            rows = [
                json.loads(line)
                for line in (self.folder / "metrics.jsonl").read_text().splitlines()
            ]
            return max((int(row["step"]) + 1 for row in rows), default=0)
        return 0

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float) -> float:
        """Wait; the seconds that it took."""
        begun = time.monotonic()
        while not condition():
            waited = time.monotonic() - begun
            assert self.process is not None
            assert self.process.poll() is None, (
                f"the run ended while waiting for {what}:\n{self.log[-6000:]}"
            )
            assert waited < seconds, (
                f"no {what} within {seconds:g} s; {self.status()}\n{self.log[-6000:]}"
            )
            time.sleep(0.004)
        return time.monotonic() - begun

    def status(self) -> dict[str, Any]:
        """What status.json says."""
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
            return found
        return {}

    def processes(self) -> list[psutil.Process]:
        """The controller, all that it has started, and its actors on Ray's nodes."""
        assert self.process is not None
        controller = psutil.Process(self.process.pid)
        actors = (actor for raylet in self.raylets for actor in actors_of(raylet))
        return [controller, *controller.children(recursive=True), *actors]

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """What happens inside happens when a phase has just begun, in a step after this one."""
        if phase == "idle":
            (self.folder / "hold").touch()
            self.wait_for("pause", (self.folder / "holding").exists, self.patience)
            time.sleep(0.3)  # for what was under way
            yield
            time.sleep(0.3)
            (self.folder / "hold").unlink()
            return
        step = self.status().get("step", 0)
        wanted = PHASES[phase]
        self.wait_for(
            phase,
            lambda: (now := self.status()).get("phase") == wanted and now["step"] > step,
            self.patience,
        )
        yield

    def named(self, name: str) -> psutil.Process:
        """The process of a worker, which may still be starting again."""

        def found() -> list[psutil.Process]:
            return [
                process for process in self.processes() if title(process).startswith(f"ray::{name}")
            ]

        self.wait_for(f"process of {name}", lambda: bool(found()), self.patience)
        return found()[0]

    def all_are_alive(self, *, since: float) -> bool:
        """True if a report of the run that is newer than this Unix time has every worker alive: one
        that is still starting may take minutes, and is no victim.
        """
        state = read_live_state(self.folder)
        return (
            state is not None
            and state.at > since
            and all(workers.alive == workers.count for workers in state.workers)
        )

    def hit(self, *cells: Cell) -> float:
        """Send signals to components in one phase; the seconds until the run has trained two more
        steps.
        """
        hit_at = time.time()
        self.wait_for("all workers", lambda: self.all_are_alive(since=hit_at), self.patience)
        self.seen += self.processes()
        victims = [self.named((COMPONENTS | HELPERS | PLAYERS)[cell.component]) for cell in cells]
        with self.in_phase(cells[0].phase):
            for victim, cell in zip(victims, cells, strict=True):
                victim.send_signal(cell.signal)
            before = self.steps()
        what = ", ".join(map(str, cells))
        seconds = self.wait_for(
            f"recovery of {what}", lambda: self.steps() >= before + 2, self.patience
        )
        for victim in victims:  # Ray first asks a process that it kills to go, for five seconds
            self.wait_for(
                f"end of what was hit by {what}",
                lambda hit=victim: not is_alive(hit),
                self.patience,
            )
        return seconds

    def lose_node(self, raylet: int, phase: str, kind: signal.Signals) -> float:
        """A node of the run dies (SIGKILL) or hangs (SIGSTOP), in a phase; the seconds until two
        more steps.
        """
        while not (lost := actors_of(raylet)):
            # Ray takes the node that an actor is meant for as a wish; a restarted one goes to the
            # next node in turn.
            self.hit(Cell("env worker", "generating", signal.SIGKILL))
        names = sorted(title(process).split()[0].removeprefix("ray::") for process in lost)
        with self.in_phase(phase):
            for process in [psutil.Process(raylet), *lost]:
                process.send_signal(kind)
            before = self.steps()
        try:
            seconds = self.wait_for(
                "recovery of a lost node", lambda: self.steps() >= before + 2, self.patience
            )
        finally:
            for process in lost:  # a stopped one does not end with its node
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.raylets = [other for other in self.raylets if other != raylet]
        print(
            f"node / {phase} / {kind.name} with {', '.join(names)}: two more steps after"
            f" {seconds:.1f} s"
        )
        return seconds

    def stop(self) -> None:
        """Stop it as a user does."""
        assert self.process is not None
        self.seen += self.processes()
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(self.patience)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR2)
            time.sleep(1)
            raise AssertionError(
                f"it did not stop within {self.patience:g} s:\n{self.log[-12000:]}"
            ) from None
        assert code == 130, self.log[-6000:]

    def end(self) -> None:
        """Stop it, and see that nothing is left of it."""
        self.stop()
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        """No process of it lives on."""
        left = still_alive(set(self.seen), 20)
        assert not left, left


def finish(run: Running) -> None:
    """Go on to an end."""
    steps = run.steps() + 1
    run.overrides = (*run.overrides, f"steps={steps}")
    run.start()
    finished(run, steps)


def finished(run: Running, steps: int) -> None:
    """Wait for its end, and check that every task and episode has its fate."""
    assert run.process is not None
    assert run.process.wait(PATIENCE_SECONDS) == 0, run.log[-6000:]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["largest_staleness"] == 0
    with read_ledger(run.folder / "ledger.sqlite") as ledger:
        assert ledger.task_fates().settled
        assert ledger.episode_fates().settled
    nothing_is_lost(run)


def nothing_is_lost(run: Running) -> None:
    """As many tasks were trained as the steps have groups, with those of the step that it was
    stopped in: no step was made twice or left out, and no task failed.
    """
    with read_ledger(run.folder / "ledger.sqlite") as ledger:
        fates = ledger.task_fates()
    assert fates.trained in (2 * run.steps(), 2 * run.steps() + 2)
    assert fates.failed == 0
