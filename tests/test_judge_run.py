"""Whole runs with a judge as a part of their reward."""

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from agentrl.config import load_config
from agentrl.recipes.policy_gradient import policy_gradient
from agentrl.run import Run
from agentrl.testing.judge_server import JudgeCall, JudgeServer, Reply

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


async def train(config: Path, name: str) -> None:
    loaded = load_config(config, [f"run_dir={config.parent / name}"])
    with Run(loaded, Console(file=StringIO())) as run:
        await policy_gradient(run)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward" in row]


@pytest.mark.slow
def test_a_run_waits_for_a_judge_that_is_killed_and_the_same_run_again_asks_nothing(tmp_path: Path) -> None:
    async def main() -> int:
        async with JudgeServer(verdict) as server:
            path = config(tmp_path, server)
            training = asyncio.ensure_future(train(path, "first"))
            while len(server.calls) < 20 and not training.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await server.stop()
            asked = len(server.calls)
            await asyncio.sleep(1.0)
            assert not training.done()
            assert len(server.calls) == asked
            await server.start()
            await training
            asked = len(server.calls)
            await train(path, "second")
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
