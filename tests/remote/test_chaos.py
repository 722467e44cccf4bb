"""A training run whose environments live on two servers, of which one stops for a while and the
other is killed.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from agentrl.envs.base import TextEnv
from agentrl.ledger.ledger import Ledger
from agentrl.protocols import StepResult
from tests.processes import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
STEPS = 6


class Noted(TextEnv):
    """Four turns. Each is written down where it happens; its info tells of which episode it is, and
    the how many-th.
    """

    isolation = "thread"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.episode = secrets.token_hex(8)
        self.turn = 0
        return "Say up or down."

    def step(self, action: str) -> StepResult:
        self.turn += 1
        time.sleep(0.03)
        with Path(os.environ["NOTES"]).open("a") as notes:
            notes.write(f"{self.episode} {self.turn}\n")
        info = {
            "episode": self.episode,
            "turn": self.turn,
            "server": os.environ["SERVER"],
            "success": True,
        }
        return "up or down?", self.rng.random() + len(action) % 2, self.turn == 4, False, info


@contextmanager
def server(
    name: str, notes: Path, port: int = 0, processes: int = 1
) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", "serve"]
    with subprocess.Popen(
        [
            *(*command, "file:tests/remote/test_chaos.py:Noted", "--port", str(port)),
            *("--processes", str(processes)),
        ],
        cwd=ROOT,
        env={**os.environ, "NOTES": str(notes), "SERVER": name},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip().rpartition(" ")[2]


@contextmanager
def training(folder: Path, *urls: str, retries: int = 6) -> Iterator["subprocess.Popen[str]"]:
    settings = [
        f"env=remote:{','.join(urls)}",
        "model=tiny",
        f"steps={STEPS}",
        "rollout.groups_per_step=4",
        "rollout.group_size=4",
        "rollout.sampling.max_tokens=4",
        "rollout.deadlines.reset=2",
        "rollout.deadlines.step=2",
        f"rollout.retries.environment={retries}",
        f"rollout.max_failed_tasks={retries}",
        "evaluation.tasks=0",
        "trackers=[]",
        "run_dir=run",
    ]
    (folder / "run.yaml").write_text("seed: 0\nenv: frozen_lake\n")
    command = [
        sys.executable,
        "-c",
        "from agentrl.cli import main; main()",
        "train",
        "run.yaml",
        *settings,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )
    return sum("reward" in row for row in rows)


def has_gone_on(run: Path, since: int) -> bool:
    return steps_done(run) > since


def wait_for(
    what: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 180
) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.02)


def turns_of(run: Path) -> dict[str, list[int]]:
    """The turns that every trained episode was told, by the episode's own name on its server."""
    told: dict[str, list[int]] = {}
    for path in (run / "trajectories").glob("step_*.parquet"):
        for episode in pq.read_table(path).to_pylist():
            infos = [json.loads(turn["info"]) for turn in episode["turns"]]
            names = {info["episode"] for info in infos}
            assert len(names) == 1, "an episode went on in another's place"
            assert not names & told.keys(), "two episodes were one"
            told[names.pop()] = [info["turn"] for info in infos]
    return told


def check_turns(run: Path, notes: Path) -> None:
    """Check that each trained episode was told the turns that happened, once each."""
    told = turns_of(run)
    assert len(told) == STEPS * 16
    happened = defaultdict(list)
    for line in notes.read_text().splitlines():
        episode, turn = line.split()
        happened[episode].append(int(turn))
    for episode, turns in told.items():
        assert turns == happened[episode] == [1, 2, 3, 4]


@pytest.mark.long
def test_a_run_goes_on_while_a_server_stops_and_another_is_killed_and_no_step_is_lost_or_doubled(
    tmp_path,
):
    notes, run = tmp_path / "notes", tmp_path / "run"
    with ExitStack() as stack:
        one, two = (stack.enter_context(server(name, notes)) for name in ("one", "two"))
        process = stack.enter_context(training(tmp_path, url_of(one), url_of(two)))
        wait_for(lambda: steps_done(run) >= 1, process)
        two.send_signal(signal.SIGSTOP)
        stopped = steps_done(run)
        wait_for(lambda: steps_done(run) >= stopped + 2, process)  # without it
        two.send_signal(signal.SIGCONT)
        one.kill()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, output

    summary = json.loads((run / "summary.json").read_text())
    assert summary["tasks"]["trained"] == STEPS * 4
    assert summary["episodes"]["trained"] == STEPS * 16
    assert summary["episodes"]["failed"] > 0  # played again, and none of them scored
    with Ledger(run / "ledger.sqlite") as ledger:
        assert ledger.task_fates().settled
        assert ledger.episode_fates().settled

    check_turns(run, notes)


@pytest.mark.long
def test_a_run_goes_on_while_processes_of_its_server_are_killed(tmp_path):
    notes, run = tmp_path / "notes", tmp_path / "run"
    with ExitStack() as stack:
        front = stack.enter_context(server("front", notes, processes=2))
        url = url_of(front)
        process = stack.enter_context(training(tmp_path, url))
        for name in ("env-0", "env-1"):
            wait_for(partial(has_gone_on, run, steps_done(run)), process)
            workers = psutil.Process(front.pid).children(recursive=True)
            [worker] = [worker for worker in workers if worker.name() == name]
            worker.kill()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tasks"]["trained"] == STEPS * 4
    assert summary["tasks"]["failed"] == 0
    with Ledger(run / "ledger.sqlite") as ledger:
        assert ledger.episode_fates().settled
    check_turns(run, notes)


@pytest.mark.long
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(s, marks=pytest.mark.chaos) for s in (1, 20, 120)),
    ],
)
def test_a_run_waits_for_its_only_server_to_come_back_and_spends_no_retry(tmp_path, seconds):
    with ExitStack() as stack:
        first = stack.enter_context(server("first", tmp_path / "notes"))
        url = url_of(first)
        process = stack.enter_context(training(tmp_path, url, retries=0))
        wait_for(lambda: steps_done(tmp_path / "run") >= 1, process)
        first.kill()
        first.wait()
        assert process.stdout is not None
        waits = "episodes wait for up to 600 s (rollout.deadlines.outage)"
        assert any(waits in line for line in process.stdout), "the run ended without waiting"
        time.sleep(seconds)
        stack.enter_context(server("second", tmp_path / "notes", port=int(url.rpartition(":")[2])))
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tasks"]["trained"] == STEPS * 4
    assert summary["tasks"]["failed"] == 0
