"""Rows of the fault matrix that need no cluster: a full disk, replies that cannot be used. `make
chaos` runs them all.

The other rows are tests of their own: a second process, damaged checkpoints and ledgers
(test_runs.py), restarts of a server (tests/remote/test_chaos.py), and deaths and hangs of workers
(tests/cluster/test_chaos.py).
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.base import TextEnv
from agentrl.ledger.ledger import read_ledger
from agentrl.protocols import StepResult
from tests.commands import ROOT, Command
from tests.processes import PATIENCE_SECONDS, can_mount

SMALL = [
    "model=tiny",
    "steps=4",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.budget.turns=4",
    "rollout.sampling.max_tokens=4",
    "evaluation.tasks=0",
    "trainer.schedule=constant",
    "checkpoint.every=1",
    "trackers=[]",
    "run_dir=run",
]


class Flawed(TextEnv):
    """Some of its steps, by chance, are no reply; the same episode played again is another."""

    isolation = "thread"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.turns = 0
        return "Say something."

    def step(self, action: str) -> StepResult:
        self.turns += 1
        replies: list[Any] = [
            (
                "go on",
                self.rng.random() + len(action) % 2,
                self.turns == 3,
                False,
                {"success": self.turns == 3},
            ),
            ("go on", None, False, False, {}),
            ("go on", float("nan"), False, False, {}),
            ("half of a pair: \ud83d", 0.0, False, False, {}),
            ("go on", 0.0, False, False, {"lock": object()}),
            ("go on", 0.0, False),
        ]
        return replies[0 if secrets.randbelow(8) else 1 + secrets.randbelow(5)]


def settled(run: Path, steps: int) -> None:
    """Every task has its fate, and the steps' number was trained: none twice, none lost."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == steps
    with read_ledger(run / "ledger.sqlite") as ledger:
        assert ledger.task_fates().settled
        assert ledger.episode_fates().settled
        assert ledger.task_fates().trained == 2 * steps


@pytest.mark.long
def test_replies_that_cannot_be_used_cost_their_episodes_and_not_the_run(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("env: tests.recipes.test_faults:Flawed\n")
    more = ["rollout.retries.environment=50", f"run_dir={tmp_path / 'run'}"]
    command = Command("train", str(config), *SMALL[:-1], *more, cwd=ROOT, log=tmp_path / "log")
    assert command.wait(PATIENCE_SECONDS) == 0, command.output
    settled(tmp_path / "run", 4)
    with read_ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.episode_fates().failed > 0
        why = " ".join(tally.why for tally in ledger.reasons("episodes", limit=100))
    assert "Flawed" in why


DISK = """
set -e
mount -t tmpfs -o size=64m none "$DISK"
cp -r run "$DISK/run"
mount --bind "$DISK/run" run
dd if=/dev/zero of="$DISK/filler" bs=4k 2> /dev/null || true
truncate -s "-$ROOM" "$DISK/filler"
set +e
"$PYTHON" -c "from agentrl.cli import main; main()" train --resume run steps=4 > full.log 2>&1
echo $? > full.rc
rm "$DISK/filler"
"$PYTHON" -c "from agentrl.cli import main; main()" train --resume run steps=4 > again.log 2>&1
echo $? > again.rc
rm -rf run/tmp
cp -r run after
"""
"""Goes on with a run on a disk with so much room; then makes room, and goes on again."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run after two steps, and one beside it after four."""
    folder = tmp_path_factory.mktemp("disk")
    for name, steps in (("run", 2), ("whole", 4)):
        lake = str(ROOT / "examples" / "frozen_lake.yaml")
        settings = ["recipe.demonstrations=null", *SMALL, f"steps={steps}", f"run_dir={name}"]
        command = Command("train", lake, *settings, cwd=folder, log=folder / f"{name}.log")
        assert command.wait(PATIENCE_SECONDS) == 0, command.output
    return folder


def some(kib: int) -> Any:
    in_long = [pytest.mark.long] if kib == 64 else []
    return pytest.param(kib, marks=[pytest.mark.chaos, *in_long], id=f"{kib} KiB")


@pytest.mark.skipif(not can_mount(), reason="this machine does not let a user mount a disk")
@pytest.mark.parametrize("kib", [some(kib) for kib in (0, 8, 24, 40, 64, 128, 256, 1024, 2048)])
def test_a_full_disk_ends_a_run_with_a_sentence_and_with_room_it_goes_on(
    begun: Path, tmp_path: Path, kib: int
) -> None:
    shutil.copytree(begun / "run", tmp_path / "run")
    (tmp_path / "disk").mkdir()
    variables = {
        "DISK": str(tmp_path / "disk"),
        "PYTHON": sys.executable,
        "ROOM": f"{kib}K",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        ["unshare", "-rm", "sh", "-c", DISK],
        cwd=tmp_path,
        env={**os.environ, **variables},
        check=True,
        timeout=2 * PATIENCE_SECONDS,
    )
    full, again = ((tmp_path / f"{name}.log").read_text() for name in ("full", "again"))
    print(f"{kib} KiB: {full.strip().splitlines()[-1]}")
    assert (tmp_path / "full.rc").read_text() == "1\n", full
    assert "Traceback" not in full
    assert "space is left on the disk" in full
    assert "agentrl train --resume run` resumes from the checkpoint after" in " ".join(full.split())
    assert (tmp_path / "again.rc").read_text() == "0\n", again
    settled(tmp_path / "after", 4)
    whole = json.loads((begun / "whole" / "summary.json").read_text())
    assert (
        json.loads((tmp_path / "after" / "summary.json").read_text())["weights_sha256"]
        == whole["weights_sha256"]
    )
