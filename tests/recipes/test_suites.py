"""Evaluation suites in whole runs: fixed tasks, several samples, reports, and comparisons."""

import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.engines.local import LocalEngine
from agentrl.errors import ConfigError
from agentrl.testing.openai_server import serve_engine
from tests.processes import PATIENCE_SECONDS

CONFIG = """
env: {{name: guess_number, options: {{high: 4}}}}
steps: 2
rollout: {{groups_per_step: 2, group_size: 2, budget: {{turns: 3}}, sampling: {{max_tokens: 4}}}}
evaluation:
  tasks: 2
  suites:
    - {{name: wide, tasks: 3, samples: 4, every: 1, budget: {{turns: 1}},
       env: {{name: guess_number, options: {{high: 90}}}}}}
    - {{name: questions, env: qa, data: {data}, split: train, tasks: 9,
       reward: {{name: length, free: 1, limit: 9}}}}
checkpoint: {{every: 1, keep: 1, best: eval/wide/success}}
trackers: []
"""


def results_of(report: Path) -> dict[str, Any]:
    """All that a report says but when it was written."""
    found: dict[str, Any] = json.loads(report.read_text())
    assert found.pop("at")
    return found


@pytest.fixture
def path(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(5)))
    path = tmp_path / "run.yaml"
    path.write_text(
        CONFIG.format(data=data) + f"model: {tiny_model_dir}\nrun_dir: {tmp_path / 'run'}\n"
    )
    return path


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("evaluation.suites.1.name=wide", "more than one suite is called 'wide'"),
        ("evaluation.suites.1.name=envs", "envs is the name of other metrics"),
        ("checkpoint.every=2", r"must divide that of the suite wide \(1\)"),
        ("evaluation.suites.0.samlpes=3", "Did you mean 'samples'"),
        (
            "evaluation.suites.1.reward=lenght",
            r"evaluation.suites.1.reward.name: no reward named 'lenght'",
        ),
        ("checkpoint.best=eval/wild/success", "names the suite 'wild'; there is wide, questions"),
        ("checkpoint.best=eval/wide/turns", "write eval/success"),
        ("evaluation={overlap: true, engines: 1}", "leave one of both out"),
        ("env=[frozen_lake, {name: guess_number}]", ""),
    ],
)
def test_a_wrong_suite_is_refused(path: Path, override: str, why: str) -> None:
    if not why:
        text = path.read_text().replace(
            "env: {name: guess_number, options: {high: 4}}", "env: [frozen_lake, qa]", 1
        )
        path.write_text(text.replace("env: qa, data", "data"))
        override, why = "seed=0", "name that of questions in its env"
    with pytest.raises(ConfigError, match=why):
        load_config(path, [override])


@pytest.mark.slow
def test_suites_are_played_at_their_steps_saved_kept_and_compared(path: Path, agentrl: Any) -> None:
    run = path.with_name("run")
    done = agentrl("train", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wide = {row["step"]: row for row in rows if "eval/wide/success" in row}
    assert list(wide) == [0, 1, 2]
    assert [row["step"] for row in rows if "eval/questions/reward" in row] == [0, 2]
    assert (
        wide[0]["eval/wide/tasks"],
        wide[0]["eval/wide/episodes"],
        wide[0]["eval/wide/turns"],
    ) == (3, 12, 1)
    assert {f"eval/wide/pass@{k}" for k in (1, 2, 4)} <= wide[0].keys()
    last = next(row for row in rows if row["step"] == 2 and "eval/questions/reward" in row)
    assert last["eval/questions/tasks"] == 5
    summary = json.loads((run / "summary.json").read_text())
    assert (
        summary["suites"]["wide"]["after"]["tasks"],
        summary["suites"]["wide"]["after"]["pass_tasks"],
    ) == (3, 3)
    assert (summary["episodes_after"], summary["failed_after"]) == (2, 0)
    assert "wide: success" in done.stdout
    reports = sorted(file.name for file in (run / "evaluations").iterdir())
    assert reports == [f"held_out_{n:06d}.json" for n in (0, 2)] + [
        f"questions_{n:06d}.json" for n in (0, 2)
    ] + [f"wide_{n:06d}.json" for n in (0, 1, 2)]
    done = agentrl(
        "eval", str(run), "--suite", "wide", "--show", "0", "--report", str(path.with_name("again"))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    again = path.with_name("again") / "wide_000002.json"
    assert results_of(again) == results_of(run / "evaluations" / "wide_000002.json")
    done = agentrl("eval", str(run), "--suite", "wild")
    assert "no suite 'wild' in evaluation.suites; there is held_out, wide, questions" in done.stderr
    done = agentrl("compare", str(run), str(path.with_name("again")))
    assert done.returncode == 0, done.stderr
    assert re.search(r"difference \+0.0% \(95 % interval -\d.*% to \+\d.*%\)", done.stdout)


@pytest.mark.long
def test_an_evaluation_beside_training_changes_no_weight_and_arrives_under_its_step(
    path: Path, agentrl: Any
) -> None:
    results, checksums = {}, {}
    for name, overrides in {
        "beside": ["evaluation.engines=1"],
        "overlapping": ["evaluation.overlap=true"],
        "in_turn": [],
        "none": ["evaluation.tasks=0", "evaluation.suites=[]", "checkpoint.best=null"],
    }.items():
        run = path.with_name(name)
        done = agentrl("train", str(path), f"run_dir={run}", "steps=3", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        checksums[name] = json.loads((run / "summary.json").read_text())["weights_sha256"]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        evaluated = [
            {key: row[key] for key in row if key == "step" or "eval/" in key} for row in rows
        ]
        results[name] = sorted(json.dumps(row, sort_keys=True) for row in evaluated if len(row) > 1)
        assert not list(run.glob("evaluation_weights/version_*"))
        phases = {
            json.loads(line)["phase"] for line in (run / "timeline.jsonl").read_text().splitlines()
        }
        assert ("evaluation" in phases) == (name == "in_turn")
    assert (
        checksums["beside"] == checksums["in_turn"] == checksums["none"] == checksums["overlapping"]
    )
    assert results["beside"] == results["in_turn"] == results["overlapping"]
    assert len(results["beside"]) == 2 + 2 + 4


@pytest.mark.slow
def test_a_model_behind_an_endpoint_is_evaluated_as_the_same_model_in_the_process(
    path: Path, tiny_model_dir: Path, agentrl: Any
) -> None:
    async def behind_an_endpoint() -> Any:
        engine = LocalEngine(LocalEngine.Config(), tiny_model_dir)
        async with engine, serve_engine(engine) as url:
            address = f"engine={{name: openai, url: '{url}'}}"
            return await asyncio.to_thread(
                agentrl, "eval", str(path), address, "--report", str(path.with_name("endpoint"))
            )

    for done in (
        asyncio.run(behind_an_endpoint()),
        agentrl("eval", str(path), "--report", str(path.with_name("in_process"))),
    ):
        assert done.returncode == 0, done.stdout + done.stderr
    names = [f"{name}_000000.json" for name in ("held_out", "questions", "wide")]
    for folder in ("endpoint", "in_process"):
        assert sorted(file.name for file in path.with_name(folder).iterdir()) == names
    for name in names:
        assert results_of(path.with_name("endpoint") / name) == results_of(
            path.with_name("in_process") / name
        )


HOLDING = """
import asyncio
import agentrl.recipes.evaluate as evaluate
record = evaluate._record
async def held(run, step, evaluation):
    if step == 1:
        await asyncio.Event().wait()
    await record(run, step, evaluation)
evaluate._record = held
from agentrl.cli import main
main()
"""
"""A run whose evaluation after the first step is played, and never gets to its result."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "file", "reached"),
    [
        pytest.param(
            *("evaluation.engines=1", "metrics.jsonl", '"step": 2, "reward"'),
            marks=pytest.mark.long,
        ),
        ("evaluation.overlap=true", "timeline.jsonl", '"step": 1, "phase": "weights"'),
    ],
)
@pytest.mark.long
def test_a_run_killed_while_it_is_evaluated_has_each_result_once_when_it_was_resumed(
    path: Path, agentrl: Any, where: str, file: str, reached: str
) -> None:
    whole, killed = path.with_name("whole"), path.with_name("killed")
    settings = ["train", str(path), "steps=4", where]
    assert agentrl(*settings, f"run_dir={whole}").returncode == 0
    process = subprocess.Popen([sys.executable, "-c", HOLDING, *settings, f"run_dir={killed}"])
    limit = time.monotonic() + PATIENCE_SECONDS
    # Written while steps go on, and kept until it has its results.
    awaited = killed / "checkpoints" / "step_000001"
    while not (
        awaited.exists() and (killed / file).exists() and reached in (killed / file).read_text()
    ):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.kill()
    process.wait(PATIENCE_SECONDS)
    assert not (killed / "evaluations" / "wide_000001.json").exists()
    done = agentrl("train", "--resume", str(killed))
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, killed)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[0]["suites"] == summaries[1]["suites"]
    rows = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert sorted(row["step"] for row in rows if "eval/wide/success" in row) == [0, 1, 2, 3, 4]
    for report in (whole / "evaluations").iterdir():
        assert results_of(killed / "evaluations" / report.name) == results_of(report)
    assert not list(killed.glob("evaluation_weights/version_*"))
