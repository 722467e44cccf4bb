"""Whole runs, as a user starts them: bounded, reproducible, nothing lost when killed."""

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algorithms.grpo import Grpo
from agentrl.assembly import assemble_training
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.ledger.ledger import Ledger
from agentrl.models.tiny import create_tiny_model
from agentrl.weights.store import default_parent
from tests.commands import Command
from tests.ledger.ledger_queries import trained_tasks
from tests.model_families import make_model
from tests.processes import PATIENCE_SECONDS, open_to_others, still_alive

ROOT = Path(__file__).parents[2]
SMALL = [
    str(ROOT / "examples" / "frozen_lake.yaml"),
    "recipe.demonstrations=null",
    "steps=6",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.budget.turns=4",
    "evaluation.tasks=8",
    "checkpoint.every=2",
    "trackers=[]",
]


def start(*arguments: str, cwd: Path, background: bool = False) -> Command:
    return Command("train", *arguments, cwd=cwd, log=cwd / "run.log", background=background)


def wait_for_a_step(command: Command, metrics: Path) -> None:
    """Return when the run has recorded a step."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while not (metrics.exists() and '"reward"' in metrics.read_text()):
        assert command.poll() is None, command.output
        assert time.monotonic() < limit, command.output
        time.sleep(0.05)


def train(*arguments: str, cwd: Path) -> dict:
    command = start(*arguments, cwd=cwd)
    assert command.wait(300) == 0, command.output
    # Nor does anything go wrong at the very end, which has no effect.
    assert "Traceback" not in command.output
    return json.loads((cwd / "run" / "summary.json").read_text())


def folder(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    return made


@pytest.mark.parametrize(
    "bound",
    [
        pytest.param(0, marks=pytest.mark.long),
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(4, marks=pytest.mark.long),
    ],
)
def test_the_bound_holds_and_every_fate_is_known(tmp_path, bound):
    summary = train(*SMALL, "run_dir=run", f"rollout.max_staleness={bound}", cwd=tmp_path)
    assert summary["largest_staleness"] <= bound
    for fates in (summary["tasks"], summary["episodes"]):
        assert fates["open"] == 0
        assert fates["total"] == sum(
            fates[fate] for fate in ("trained", "filtered", "stale", "cancelled", "failed")
        )
    assert summary["tasks"]["trained"] == 24
    assert summary["episodes"]["trained"] == 96
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == list(range(6))
    if bound == 0:
        assert all(row["logprob_gap_max"] < 1e-3 for row in steps)
    assert all(row["logprob_gap_mean"] <= row["logprob_gap_max"] for row in steps)
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 6]
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written >= {
        "config.yaml",
        "metrics.jsonl",
        "ledger.sqlite",
        "summary.json",
        "reward_curve.png",
    }
    assert written >= {"trajectories", "checkpoints"}
    episodes = pq.read_table(tmp_path / "run" / "trajectories" / "step_000000.parquet").to_pylist()
    assert len(episodes) == 16
    assert all(
        len(turn["token_ids"]) == len(turn["logprobs"])
        for episode in episodes
        for turn in episode["turns"]
    )


STRAGGLER = """
import asyncio
from pathlib import Path

class Slow:
    system_prompt = "Say a or b."

    async def reset(self, *, seed, options):
        self.turn = 0
        began = Path("run/timeline.jsonl")  # before, episodes are played for the tokenizer
        self.straggles = began.exists() and not Path("straggler").exists()
        if self.straggles:
            Path("straggler").touch()
        return "a or b?", {}

    async def step(self, action):
        self.turn += 1
        while self.straggles and self.turn == 2 and steps_done() < 4:
            await asyncio.sleep(0.05)
        return "a or b?", float("a" in action), self.turn == 3, False, {"straggles": self.straggles}

    async def close(self):
        pass

def steps_done():
    metrics = Path("run/metrics.jsonl")
    return metrics.read_text().count('"reward"') if metrics.exists() else 0
"""


def versions_of(part: dict[str, Any]) -> list[int]:
    """Of the tokens that are new in a part of an episode."""
    return [
        version
        for turn in part["turns"][part["trained_turns"] :]
        for version in turn["policy_versions"]
    ]


@pytest.mark.long
def test_a_straggler_that_outlasts_four_steps_is_trained_on_in_parts_and_holds_none_of_them(
    tmp_path,
):
    (tmp_path / "slow.py").write_text(STRAGGLER)
    own = ["env.name=file:slow.py:Slow", "algorithm=turn_ppo", "rollout.staleness_rule=segment"]
    sizes = [
        "rollout.max_staleness=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=1",
        "evaluation.tasks=0",
    ]
    summary = train(*SMALL, *own, *sizes, "env.options={}", "run_dir=run", cwd=tmp_path)
    assert summary["largest_staleness"] <= 1
    assert summary["tasks"]["trained"] == 12
    episodes = [
        {**row, "step": int(file.stem.removeprefix("step_"))}
        for file in sorted((tmp_path / "run" / "trajectories").glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]
    # On a busy machine other episodes may be cut too, and the straggler a second time when it goes
    # on.
    straggler = next(
        row["id"] for row in episodes if json.loads(row["turns"][0]["info"])["straggles"]
    )
    parts = [row for row in episodes if row["id"] == straggler]
    first, last = parts[0], parts[-1]
    assert (first["step"], len(first["turns"]), first["trained_turns"]) == (1, 1, 0)
    assert (last["status"], len(last["turns"])) == ("terminated", 3)
    assert last["step"] >= 4
    for part, following in pairwise(parts):
        assert part["detail"] == "segment"
        assert following["trained_turns"] == len(part["turns"])
        assert following["turns"][: len(part["turns"])] == part["turns"]
    # A part that is too old by the time it is cut carries no loss, and is none that was trained on.
    fresh = [part for part in parts[:-1] if max(versions_of(part)) >= part["step"] - 1]
    assert parts[0] in fresh
    cuts = [
        (part["trained_turns"], len(part["turns"]) - part["trained_turns"], part["step"])
        for part in fresh
    ]
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        number = ledger.task_named(first["task"]).number
        assert [(s.first, s.turns, s.step) for s in ledger.segments(number)] == cuts


@pytest.mark.long
def test_two_runs_with_one_seed_end_in_the_same_weights_and_another_seed_in_others(tmp_path):
    sums = [
        train(*SMALL, "run_dir=run", "steps=3", f"seed={seed}", cwd=folder(tmp_path, name))[
            "weights_sha256"
        ]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert sums[0] == sums[1] != sums[2]


@pytest.mark.parametrize(
    ("bound", "kills", "isolation"),
    [
        pytest.param(0, 1, "inline", marks=pytest.mark.slow),
        pytest.param(0, 12, "inline", marks=pytest.mark.long),
        pytest.param(0, 12, "process", marks=pytest.mark.long),
        pytest.param(1, 12, "process", marks=pytest.mark.long),
    ],
)
def test_a_run_killed_at_any_moment_trains_the_same_tasks_as_one_that_was_not_and_leaves_nothing(
    tmp_path, monkeypatch, bound, kills, isolation
):
    steps = kills + 3
    settings = [
        *SMALL,
        "run_dir=run",
        f"steps={steps}",
        f"rollout.max_staleness={bound}",
        f"env.isolation={isolation}",
    ]
    settings += ["checkpoint.every=1"]
    outside = folder(tmp_path, "outside")
    monkeypatch.setenv("TMPDIR", str(outside))
    whole = train(*settings, cwd=folder(tmp_path, "whole"))
    killed_in = folder(tmp_path, "killed")
    rng = random.Random(bound)
    arguments = settings
    for kill in range(kills):
        command = start(*arguments, cwd=killed_in)
        kill_during(command, killed_in / "run", steps=kill + 1, extra=rng.uniform(0, 0.4))
        arguments = ["--resume", "run"]
    killed = train("--resume", "run", cwd=killed_in)
    assert list(outside.iterdir()) == []
    assert not (killed_in / "run" / "tmp").exists()
    with (
        Ledger(tmp_path / "whole" / "run" / "ledger.sqlite") as a,
        Ledger(killed_in / "run" / "ledger.sqlite") as b,
    ):
        assert trained_tasks(a) == trained_tasks(b)
        assert b.task_fates().settled
        assert b.episode_fates().settled
    rows = [
        json.loads(line) for line in (killed_in / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "reward" in row] == list(range(steps))
    if bound == 0 and isolation == "inline":
        # At staleness 0 the weights are those of the run that was not killed, too. Environments in
        # processes answer at any time, so the engine batches their requests differently, which
        # changes the last bits of logprobs.
        assert killed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.long
def test_a_run_that_is_killed_and_whose_workers_are_trains_the_same_tasks(tmp_path):
    kills = 10  # of a worker, and as many of the run
    arguments = [
        *SMALL,
        "run_dir=run",
        f"steps={kills + 2}",
        "evaluation.tasks=0",
        "checkpoint.every=1",
        "rollout.max_staleness=1",
    ]
    whole_in, killed_in = folder(tmp_path, "whole"), folder(tmp_path, "killed")
    train(*arguments, cwd=whole_in)
    arguments.append("rollout.workers=2")
    run, rng = killed_in / "run", random.Random(0)
    for kill in range(kills):
        command = start(*arguments, cwd=killed_in)
        limit = time.monotonic() + PATIENCE_SECONDS
        # The launch before may have made this step already.
        while not (has_step(run, kill) and (workers := workers_of(command.pid))):
            assert command.poll() is None, command.output
            assert time.monotonic() < limit, command.output
            time.sleep(0.01)
        rng.choice(workers).kill()
        kill_during(command, run, steps=kill + 1, extra=rng.uniform(0, 2))
        arguments = ["--resume", "run"]
    train("--resume", "run", cwd=killed_in)
    with (
        Ledger(whole_in / "run" / "ledger.sqlite") as whole,
        Ledger(run / "ledger.sqlite") as killed,
    ):
        assert trained_tasks(killed) == trained_tasks(whole)
        assert killed.task_fates().settled
        assert killed.episode_fates().settled


def workers_of(run: int) -> list[psutil.Process]:
    """The rollout workers of a run: they tell the kernel to kill them before it."""
    children = psutil.Process(run).children(recursive=True)
    found = [one for one in children if adjustment(one.pid) > adjustment(run)]
    return [one for one in found if one.name().startswith("rollout")]


def adjustment(process: int) -> int:
    """What is added to a process's score when the kernel chooses whom to kill for memory."""
    return int(Path(f"/proc/{process}/oom_score_adj").read_text())


@pytest.mark.long
@pytest.mark.parametrize("transport", ["stream", "handles"])
def test_a_run_killed_while_it_writes_the_files_of_a_live_version_goes_on(tmp_path, transport):
    create_tiny_model(tmp_path / "tiny")
    write_wide_model(tmp_path / "tiny", tmp_path / "model")
    steps, kills = 4, 2
    arguments = [
        *SMALL,
        "run_dir=run",
        f"steps={steps}",
        "evaluation.tasks=0",
        "checkpoint.every=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "trainer.lr=1e-4",
        f"model={tmp_path / 'model'}",
        "trainer=fsdp",
        "trainer.world_size=2",
        "cluster.engines=2",
        f"weights.transport={transport}",
        "weights.bucket_mib=1",
    ]
    stores = set[Path]()
    for _ in range(kills):
        command = start(*arguments, cwd=tmp_path)
        limit = time.monotonic() + PATIENCE_SECONDS
        # A version has a name that is hidden while its files are written. Others may train beside.
        while not [
            one
            for one in default_parent().glob("agentrl-weights-*/.v*/bucket-*")
            if one.parents[1] in stores_of(command.pid)
        ]:
            assert command.poll() is None, command.output
            assert time.monotonic() < limit, command.output
        stores |= stores_of(command.pid)
        kill(command)
        arguments = ["--resume", "run"]
    command = start(*arguments, cwd=tmp_path)
    while command.poll() is None:
        stores |= stores_of(command.pid)
        time.sleep(0.5)
    assert command.poll() == 0, command.output
    assert "Traceback" not in command.output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, lines) if "reward" in row] == list(range(steps))
    assert len(stores) > kills
    assert [store for store in stores if store.exists()] == []


def stores_of(run: int) -> set[Path]:
    """The folders of published weights in this machine's shared memory that a run's processes have
    locked.
    """
    opened = set[str]()
    with suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(run), *psutil.Process(run).children(recursive=True)]:
            with suppress(OSError):  # the process has ended meanwhile
                for descriptor in os.listdir(f"/proc/{process.pid}/fd"):
                    with suppress(FileNotFoundError):  # it has been closed
                        opened.add(os.readlink(f"/proc/{process.pid}/fd/{descriptor}"))
    return {store for store in default_parent().glob("agentrl-weights-*") if str(store) in opened}


def write_wide_model(tiny: Path, folder: Path) -> None:
    """Write a model that takes a while to write, with the tokenizer of another one."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = AutoConfig.from_pretrained(tiny)
    config.hidden_size, config.intermediate_size = 768, 3072
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.long
def test_a_run_that_is_killed_in_the_middle_of_trees_plays_them_again_and_loses_no_fate(tmp_path):
    kills = 10
    arguments = [
        *SMALL,
        "run_dir=run",
        f"steps={kills + 2}",
        "evaluation.tasks=0",
        "checkpoint.every=1",
        "rollout.max_staleness=1",
        "algorithm.advantage=branch",
        "rollout.branches={at: every, budget: 2, before: 3}",
    ]
    run, rng = tmp_path / "run", random.Random(0)
    for kill in range(kills):
        command = start(*arguments, cwd=tmp_path)
        limit = time.monotonic() + PATIENCE_SECONDS
        while not (has_step(run, kill) and branches_underway(run)):
            assert command.poll() is None, command.output
            assert time.monotonic() < limit, command.output
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        command.send_signal(signal.SIGKILL)
        command.wait(PATIENCE_SECONDS)
        arguments = ["--resume", "run"]
    train("--resume", "run", cwd=tmp_path)
    with Ledger(run / "ledger.sqlite") as ledger:
        assert ledger.task_fates().settled
        assert ledger.episode_fates().settled
        assert len(trained_tasks(ledger)) == len(set(trained_tasks(ledger))) == 4 * (kills + 2)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as read:
        fates = {
            tuple(key): (name, fate)
            for name, fate, *key in read.execute(
                "SELECT t.id || '/' || e.member || '/' || e.attempt, e.fate, e.task, e.member,"
                " e.attempt, e.launch FROM episodes e JOIN tasks t ON t.number = e.task"
            )
        }
        left = {
            tuple(key): parent
            for parent, *key in read.execute(
                "SELECT parent, task, member, attempt, launch FROM branches"
            )
        }
    assert left.keys() <= fates.keys()
    trained = {(name, key[-1]) for key, (name, fate) in fates.items() if fate == "trained"}
    lost = {key[-1] for key in left if fates[key][1] == "cancelled"}
    assert len(lost) == kills  # each of these launches has ended in the middle of a tree
    for key, parent in left.items():
        if fates[key][1] == "trained":
            assert (parent, key[-1]) in trained
    whole = Counter(
        key[0] for key, (_, fate) in fates.items() if fate == "trained" and key not in left
    )
    assert set(whole.values()) == {4}


@pytest.mark.long
def test_a_resumed_run_branches_where_one_does_that_was_never_stopped(tmp_path):
    found = []
    for name, launches in {"whole": [4], "resumed": [2, 4]}.items():
        cwd = folder(tmp_path, name)
        for number, steps in enumerate(launches):
            arguments = [
                *SMALL,
                "run_dir=run",
                "evaluation.tasks=0",
                "algorithm.advantage=branch",
                "rollout.branches.at=disagreement",
                "trainer.schedule=constant",
            ]
            told = train(*(["--resume", "run"] if number else arguments), f"steps={steps}", cwd=cwd)
        with closing(sqlite3.connect(cwd / "run" / "ledger.sqlite")) as read:
            query = "SELECT task, member, parent, turn FROM branches ORDER BY task, member"
            left = read.execute(query).fetchall()
        state = json.loads((cwd / "run" / "checkpoints" / "step_000004" / "state.json").read_text())
        found.append((told["weights_sha256"], left, state["disagreement"]))
    assert found[0] == found[1]
    _, left, known = found[0]
    assert left
    assert known["frozen_lake"]["lengths"]
    assert known["frozen_lake"]["variances"]


def has_step(run: Path, step: int) -> bool:
    """True if the run has recorded this step."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and f'"step": {step}, "reward"' in metrics.read_text()


def branches_underway(run: Path) -> bool:
    """True if branches of the run's newest start have no fate yet."""
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as read:
        (found,) = read.execute(
            "SELECT count(*) FROM branches JOIN episodes USING (task, member, attempt, launch)"
            " WHERE fate IS NULL AND launch = (SELECT max(launch) FROM episodes)"
        ).fetchone()
    return bool(found)


@pytest.mark.long
def test_a_killed_run_of_a_mixture_of_experts_ends_with_the_weights_of_one_that_was_not(tmp_path):
    make_model("Qwen3-MoE", tmp_path / "model")
    settings = [
        *SMALL,
        "run_dir=run",
        f"model={tmp_path / 'model'}",
        "steps=4",
        "evaluation.tasks=0",
    ]
    settings += [
        "checkpoint.every=1",
        "rollout.budget.turns=2",
        "rollout.max_staleness=0",
        "env.isolation=inline",
    ]
    settings += ["rollout.sampling.max_tokens=8", "engine.max_context=2048"]
    whole = train(*settings, cwd=folder(tmp_path, "whole"))
    killed_in = folder(tmp_path, "killed")
    command = start(*settings, cwd=killed_in)
    kill_during(command, killed_in / "run", steps=2, extra=0)
    assert command.poll() == -signal.SIGKILL, command.output
    killed = train("--resume", "run", cwd=killed_in)
    assert killed["weights_sha256"] == whole["weights_sha256"]
    rows = [
        json.loads(line) for line in (killed_in / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    # Each step has changed the weights, by the bonus for entropy alone where all rewards are equal.
    assert [row["grad_norm"] > 0 for row in rows if "reward" in row] == [True] * 4


@pytest.mark.slow
@pytest.mark.long
def test_a_run_whose_newest_checkpoint_or_ledger_is_damaged_says_so_and_trains_nothing_twice(
    tmp_path,
):
    whole = train(
        *SMALL, "run_dir=run", "steps=3", "evaluation.tasks=0", "checkpoint.every=1", cwd=tmp_path
    )
    weights = tmp_path / "run" / "checkpoints" / "step_000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-8192:-4096] = bytes(4096)
    weights.write_bytes(content)
    again = train("--resume", "run", cwd=tmp_path)
    assert (
        "step_000003 is damaged (model.safetensors is not as it was written)"
        in (tmp_path / "run.log").read_text()
    )
    back = train("--resume", "run", "--step", "2", cwd=tmp_path)
    for resumed in (again, back):
        assert resumed["weights_sha256"] == whole["weights_sha256"]
        assert resumed["tasks"] == whole["tasks"]
    for path in (tmp_path / "run").glob("ledger.sqlite*"):
        path.unlink()
    refused = start("--resume", "run", cwd=tmp_path)
    assert refused.wait(PATIENCE_SECONDS) == 2
    assert "ledger.sqlite is missing or empty" in refused.output


WRITING = """
import pathlib, sys, time
from agentrl.trainers.rank.checkpoint import Snapshot
write = Snapshot.write
def held(snapshot, folder):
    if snapshot.state["step"] == 2:
        snapshot.tensors[0].write(folder, snapshot.rank)
        time.sleep(1e6)
    write(snapshot, folder)
Snapshot.write = held
from agentrl.cli import main
main()
"""
"""A run that never gets further with its second checkpoint than the weights."""


@pytest.mark.long
def test_a_run_killed_while_it_writes_a_checkpoint_and_trains_goes_on_from_the_one_before(tmp_path):
    settings = [*SMALL, "run_dir=run", "steps=4", "evaluation.tasks=0", "checkpoint.every=1"]
    whole = train(*settings, cwd=folder(tmp_path, "whole"))
    killed_in = folder(tmp_path, "killed")
    with (killed_in / "run.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITING, "train", *settings],
            cwd=killed_in,
            stdout=log,
            stderr=log,
        )
    limit, metrics = time.monotonic() + PATIENCE_SECONDS, killed_in / "run" / "metrics.jsonl"
    while not (metrics.exists() and '"step": 2, "reward"' in metrics.read_text()):
        assert process.poll() is None, (killed_in / "run.log").read_text()
        assert time.monotonic() < limit, (killed_in / "run.log").read_text()
        time.sleep(0.05)
    process.kill()
    process.wait(PATIENCE_SECONDS)
    there = sorted(path.name for path in (killed_in / "run" / "checkpoints").iterdir())
    assert there == [".unfinished-step_000002", "step_000001"]
    resumed = train("--resume", "run", cwd=killed_in)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["tasks"] == whole["tasks"]


def kill_during(command: Command, run: Path, *, steps: int, extra: float) -> None:
    """SIGKILL `extra` seconds after `metrics.jsonl` has a row of step `steps` - 1, if the run does
    not end before. All that it has started ends with it.
    """
    metrics = run / "metrics.jsonl"
    limit = time.monotonic() + PATIENCE_SECONDS
    while command.poll() is None and time.monotonic() < limit:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if any(f'"step": {steps - 1}, "reward"' in line for line in lines):
            break
        time.sleep(0.02)
    time.sleep(extra)
    kill(command)


def kill(command: Command) -> None:
    """SIGKILL a run. All that it has started ends with it."""
    started = psutil.Process(command.pid).children(recursive=True) if command.poll() is None else []
    command.send_signal(signal.SIGKILL)
    command.wait(PATIENCE_SECONDS)
    assert still_alive(started, PATIENCE_SECONDS) == []


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sigterm_ends_a_run_as_ctrl_c_does_also_one_in_the_background(tmp_path, background):
    command = start(
        *SMALL,
        "run_dir=run",
        "steps=1000",
        "evaluation.tasks=0",
        cwd=tmp_path,
        background=background,
    )
    wait_for_a_step(command, tmp_path / "run" / "metrics.jsonl")
    command.send_signal(signal.SIGTERM)
    assert command.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM, command.output
    assert "agentrl train --resume run" in command.output
    assert "Traceback" not in command.output


@pytest.mark.slow
def test_a_second_process_is_refused_and_an_interrupted_run_says_how_to_go_on(tmp_path):
    command = start(*SMALL, "run_dir=run", "steps=1000", "evaluation.tasks=0", cwd=tmp_path)
    wait_for_a_step(command, tmp_path / "run" / "metrics.jsonl")
    second = Command("train", "--resume", "run", cwd=tmp_path, log=tmp_path / "second.log")
    assert second.wait(PATIENCE_SECONDS) == 2
    assert f"run is in use: process {command.pid} on" in second.output
    command.send_signal(signal.SIGINT)
    assert command.wait(PATIENCE_SECONDS) == 130, command.output
    assert "--resume" in command.output
    assert "Traceback" not in command.output


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, agentrl):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("env: frozen_lake\n")
    again = agentrl("train", *SMALL, "run_dir=run", cwd=tmp_path)
    assert again.returncode == 2
    assert "resume it with `agentrl train --resume run`" in " ".join(again.stderr.split())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.long
@pytest.mark.vllm
def test_the_same_config_trains_on_vllm_which_does_not_outlive_it(tmp_path):
    settings = ["engine=vllm", "engine.max_batch=16", "steps=1000", "rollout.max_staleness=0"]
    command = start(*SMALL, "run_dir=run", *settings, "evaluation.tasks=0", cwd=tmp_path)
    wait_for_a_step(command, tmp_path / "run" / "metrics.jsonl")
    driver = psutil.Process(command.pid)
    assert open_to_others([driver, *driver.children(recursive=True)]) == []
    kill_during(command, tmp_path / "run", steps=3, extra=0)
    assert command.poll() == -signal.SIGKILL, command.output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "reward" in row]
    assert len(steps) >= 3
    assert max(row["logprob_gap_max"] for row in steps) < 1e-3
    assert max(row["grad_norm"] for row in steps) > 0


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize("bound", [0, 1])
def test_a_whole_run_on_vllm_keeps_the_bound_and_the_logprobs(tmp_path, bound, monkeypatch):
    # As users have it: what vLLM compiles agrees with the trainer.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    settings = ["engine=vllm", "engine.max_batch=16", "steps=3", f"rollout.max_staleness={bound}"]
    summary = train(*SMALL, "run_dir=run", *settings, cwd=tmp_path)
    assert summary["tasks"]["trained"] == summary["tasks"]["total"] == 12
    assert summary["largest_staleness"] <= bound
    if bound == 0:
        assert summary["largest_logprob_gap"] < 1e-3


@pytest.mark.long
def test_with_truncated_sampling_the_trainer_computes_what_the_engine_sampled_from(tmp_path):
    truncated = (
        "rollout.sampling.top_p=0.8",
        "rollout.sampling.min_p=0.001",
        "evaluation.top_p=0.5",
    )
    train(*SMALL, "run_dir=run", "rollout.max_staleness=0", "steps=2", *truncated, cwd=tmp_path)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    gaps = [row["logprob_gap_max"] for row in rows if "reward" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-3  # over the whole vocabulary it would be -log(0.8) at least


def test_an_engine_that_cannot_take_new_weights_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "env: frozen_lake\nengine: {name: openai, url: 'http://127.0.0.1:1'}\n"
    )
    config = load_config(tmp_path / "run.yaml", []).config

    async def main() -> None:
        async with assemble_training(config, Grpo(), tmp_path):
            raise AssertionError

    with pytest.raises(
        ConfigError, match=r"can neither take new weights.*evaluate with engine=openai"
    ):
        asyncio.run(main())


def test_an_engine_that_does_not_say_which_experts_it_chose_is_refused_before_anything_starts(
    tmp_path,
):
    (tmp_path / "run.yaml").write_text(
        "env: frozen_lake\nengine: {name: openai, url: 'http://localhost:8000'}\n"
        "trainer: {routing: compare}\n"
    )
    config = load_config(tmp_path / "run.yaml", []).config

    async def main() -> None:
        async with assemble_training(config, Grpo(), tmp_path):
            raise AssertionError

    with pytest.raises(
        ConfigError, match=r"routing=compare: engine 'openai' does not say .* engine=local"
    ):
        asyncio.run(main())


@pytest.mark.long
def test_a_model_may_imitate_its_own_best_episodes(tmp_path):
    (tmp_path / "own.yaml").write_text("""
recipe: {name: sft, rejection: {keep: best}}
steps: 2
env: guess_number
rollout: {groups_per_step: 2, group_size: 4, budget: {turns: 2}, sampling: {max_tokens: 4}}
evaluation: {tasks: 2}
trackers: []
""")
    train("own.yaml", "run_dir=run", cwd=tmp_path)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["loss"] > 0 for row in rows if "nll" in row] == [True, True]


@pytest.mark.long
def test_a_policy_comes_nearer_to_a_teacher_that_a_trainer_computes(tmp_path):
    for name, seed in (("student", 0), ("teacher", 1)):
        create_tiny_model(
            tmp_path / name, corpus=["You cross a frozen lake: left, right, up or down."], seed=seed
        )
    settings = [
        "algorithm={name: distill, teacher: teacher}",
        "model.name=student",
        "trainer.lr=3e-3",
        "steps=6",
    ]
    less = [
        "rollout.groups_per_step=2",
        "rollout.budget.turns=2",
        "evaluation.tasks=0",
        "checkpoint.every=6",
    ]
    train(SMALL[0], *SMALL[1:], "algorithm={}", *settings, *less, "run_dir=run", cwd=tmp_path)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    kl = [row["reference_kl"] for row in rows if "reference_kl" in row]
    assert len(kl) == 6
    assert sum(kl[-2:]) < 0.7 * sum(kl[:2])
