"""Whole runs with a judge as a part of their reward."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from agentrl.testing.judge_server import JudgeCall, JudgeServer, Reply

ROOT = Path(__file__).parent.parent
STEPS = 2
LEVELS = {"brief": 3, "bold": 8}
SMALL = {
    "seed": 0,
    "steps": STEPS,
    "env": "frozen_lake",
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_turns": 4, "sampling": {"max_tokens": 4}},
    "evaluation": {"tasks": 0},
    "trackers": [],
}


def config(folder: Path, server: JudgeServer) -> Path:
    judge = {
        "url": server.url,
        "cache": str(folder / "judge.sqlite"),
        "criteria": {"brief": "Few words.", "bold": {"about": "Goes on.", "weight": 3}},
        "reasons": False,
        "backoff": 0.05,
        "retries": 1000,
        "prompt_price": 1.0,
    }
    pairs = {"url": server.url, "cache": judge["cache"], "better": "Which is shorter?", "reasons": False}
    parts = [
        "environment",
        {"name": "judge", "weight": 0.5, "as": "style", **judge},
        {"name": "judge_pairwise", "as": "rank", "opponents": 1, **pairs},
    ]
    path = folder / "judged.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "reward": parts}))
    return path


def verdict(call: JudgeCall) -> Reply:
    return Reply.json({"better": "first"} if '"better"' in call.user else {"levels": LEVELS}, seconds=0.05)


@asynccontextmanager
async def training(config: Path, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [
        sys.executable,
        "-c",
        "from agentrl.cli import main; main()",
        "train",
        str(config),
        f"run_dir={config.parent / name}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=PIPE, stderr=STDOUT)
    try:
        yield process
        output, _ = await asyncio.wait_for(process.communicate(), 300)
        assert process.returncode == 0, output.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward" in row]


@pytest.mark.slow
def test_a_run_waits_for_a_judge_that_is_killed_and_the_same_run_again_asks_nothing(tmp_path: Path) -> None:
    async def main() -> int:
        async with JudgeServer(verdict) as server:
            path = config(tmp_path, server)
            async with training(path, "first") as run:
                while len(server.calls) < 20:
                    assert run.returncode is None, "the run ended before the judge was killed"
                    await asyncio.sleep(0.01)
                await server.stop()
                asked = len(server.calls)
                await asyncio.sleep(1.0)
                assert len(server.calls) == asked
                assert run.returncode is None
                await server.start()
            asked = len(server.calls)
            async with training(path, "second"):
                pass
            return len(server.calls) - asked

    asked_again = asyncio.run(main())
    first, second = steps_of(tmp_path / "first"), steps_of(tmp_path / "second")
    assert len(first) == len(second) == STEPS
    assert asked_again == 0
    assert sum(row["scoring/style/cost"] + row["scoring/rank/answers"] for row in second) == 0
    assert sum(row["scoring/style/cached"] for row in second) == STEPS * 16
    for row in first:
        assert row["reward/style"] == pytest.approx((0.3 + 3 * 0.8) / 4)
        assert row["reward/style/brief"] == pytest.approx(0.3)
        assert row["reward/rank"] == pytest.approx(0.5)
        assert row["reward"] == pytest.approx(row["reward/environment"] + 0.5 * row["reward/style"] + 0.5)
    assert sum(row["scoring/style/unreachable"] + row["scoring/rank/unreachable"] for row in first) > 0
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert summary["tasks"]["trained"] == STEPS * 4
    assert summary["episodes"]["failed"] == 0
    scores = [
        json.loads(row["parts"])["style"]
        for file in sorted((tmp_path / "first" / "trajectories").iterdir())
        for row in pq.read_table(file).to_pylist()
    ]
    assert scores == pytest.approx([0.675] * STEPS * 16)  # none was made up
