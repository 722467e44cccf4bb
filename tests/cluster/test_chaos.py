"""The fault matrix: a run goes on, whatever dies or hangs, whenever (`make chaos`); a part of it
runs in CI.

In CI, workers and a node are killed. That a rank which is stopped is replaced, CI sees in
tests/cluster/test_recovery.py, and that a run goes on after it was stopped, in
tests/recipes/test_runs.py.
"""

import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.cluster.chaos import (
    COMPONENTS,
    HELPERS,
    PHASES,
    RECOVERY_SECONDS,
    Cell,
    Running,
    finish,
    nothing_is_lost,
    two_nodes,
)
from tests.processes import PATIENCE_SECONDS

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
OF_CI = [[Cell(component, "updating weights", KILL) for component in COMPONENTS]]
"""One of each kind at once: one recovery."""
ONE_BY_ONE = [
    (Cell("env worker", "generating", KILL), Cell("reward worker", "generating", KILL)),
    (Cell("engine", "updating weights", KILL),),
    (Cell("trainer rank", "checkpointing", KILL),),
]


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    made = Table("component", "phase", "signal", "recovered after (s)", title="faults")
    yield made
    Console().print(made)


def begin(run: Running) -> None:
    run.start()
    run.wait_for("first step", lambda: run.steps() >= 1, PATIENCE_SECONDS)


def play(faults: Iterable[Sequence[Cell]], run: Running, table: Table) -> None:
    """A run is hit by all of the faults, one after the other; the cells of one come together."""
    for cells in faults:
        seconds = run.hit(*cells)
        for cell in cells:
            table.add_row(cell.component, cell.phase, cell.signal.name, f"{seconds:.1f}")


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(OF_CI, id="at once", marks=[pytest.mark.long, pytest.mark.chaos]),
        pytest.param(ONE_BY_ONE, id="one by one", marks=pytest.mark.long),
    ],
)
def test_a_run_survives_the_loss_of_a_node_and_a_fault_of_each_of_its_workers(
    faults: Sequence[Sequence[Cell]], tmp_path: Path, table: Table
) -> None:
    with two_nodes() as nodes, Running(tmp_path / "run", patience=PATIENCE_SECONDS) as run:
        # Deaths need no lease; on a busy machine, a short one would take a worker for dead that
        # only waits for a core.
        run.overrides = [f"cluster.address={nodes.address}", "cluster.lease=600"]
        run.raylets = [nodes.head, nodes.beside]
        begin(run)
        table.add_row(
            "node",
            "generating",
            "SIGKILL",
            f"{run.lose_node(nodes.beside, 'generating', KILL):.1f}",
        )
        play(faults, run, table)
        run.end()
        nothing_is_lost(run)


@pytest.mark.chaos
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_run_survives_the_death_and_the_hanging_of_a_worker_in_every_phase(
    component: str, tmp_path: Path, table: Table
) -> None:
    with Running(tmp_path / "run") as run:
        begin(run)
        play(
            [[Cell(component, phase, kind)] for phase in PHASES for kind in (KILL, STOP)],
            run,
            table,
        )
        run.end()
        finish(run)


@pytest.mark.chaos
@pytest.mark.parametrize("transport", ["stream", "handles"])
def test_a_run_survives_the_death_and_the_hanging_of_who_sends_and_who_reads_live_weights(
    transport: str, tmp_path: Path, table: Table
) -> None:
    cells = [
        [Cell(component, "updating weights", kind)]
        for component in ("engine", "trainer rank")
        for kind in (KILL, STOP)
    ]
    overrides = (f"weights.transport={transport}", "weights.bucket_mib=1", "cluster.engines=2")
    with Running(tmp_path / "run", overrides) as run:
        begin(run)
        play(cells, run, table)
        run.end()
        finish(run)


@pytest.mark.chaos
def test_a_run_survives_the_death_and_the_hanging_of_a_rollout_worker_in_every_phase(
    tmp_path: Path, table: Table
) -> None:
    with Running(tmp_path / "run", ("cluster.env_workers=0", "rollout.workers=2")) as run:
        begin(run)
        cells = [[Cell("rollout worker", phase, kind)] for phase in PHASES for kind in (KILL, STOP)]
        play(cells, run, table)
        run.end()
        finish(run)


@pytest.mark.chaos
def test_a_run_survives_the_death_and_the_hanging_of_who_helps_the_trainer(
    tmp_path: Path, table: Table
) -> None:
    faults = (("stepping", KILL), ("idle", STOP))
    cells = [[Cell(helper, phase, kind)] for helper in HELPERS for phase, kind in faults]
    with Running(tmp_path / "run", ("algorithm=ppo", "algorithm.kl=0.1")) as run:
        begin(run)
        play(cells, run, table)
        run.end()
        finish(run)


@pytest.mark.chaos
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_whose_controller_is_killed_leaves_nothing_and_goes_on_when_it_is_resumed(
    phase: str, tmp_path: Path, table: Table
) -> None:
    with Running(tmp_path / "run") as run:
        run.start()
        run.wait_for("first step", lambda: run.steps() >= 2, PATIENCE_SECONDS)
        run.seen += run.processes()
        assert run.process is not None
        with run.in_phase(phase):
            run.process.send_signal(KILL)
            run.process.wait(10)
        run.nothing_is_left()
        before = run.steps()
        run.start()
        seconds = run.wait_for(
            "steps of the resumed run", lambda: run.steps() >= before + 2, PATIENCE_SECONDS
        )
        table.add_row("controller", phase, "SIGKILL", f"{seconds:.1f} (resumed)")
        run.end()
        finish(run)


@pytest.mark.chaos
def test_a_run_whose_controller_was_stopped_for_longer_than_a_lease_goes_on(
    tmp_path: Path, table: Table
) -> None:
    with Running(tmp_path / "run") as run:
        run.start()
        run.wait_for("first step", lambda: run.steps() >= 1, PATIENCE_SECONDS)
        assert run.process is not None
        for phase in PHASES:
            with run.in_phase(phase):
                run.process.send_signal(STOP)
                time.sleep(8)
                run.process.send_signal(signal.SIGCONT)
                before = run.steps()
            seconds = run.wait_for(
                "recovery", lambda before=before: run.steps() >= before + 2, RECOVERY_SECONDS
            )
            table.add_row("controller", phase, "SIGSTOP, SIGCONT", f"{seconds:.1f}")
        run.end()
        finish(run)
