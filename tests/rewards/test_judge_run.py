"""Whole runs with a judge as a part of their reward."""

import asyncio
import json
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from agentrl.config import load_config
from agentrl.envs.base import ToolEnv, ToolResult
from agentrl.runs.run import Run
from agentrl.testing.judge_server import JudgeCall, JudgeReply, JudgeServer
from agentrl.trajectory import ToolCall

STEPS = 2
LEVELS = {"brief": 3, "bold": 8}
SMALL = {
    "seed": 0,
    "steps": STEPS,
    "env": "frozen_lake",
    "rollout": {
        "groups_per_step": 4,
        "group_size": 4,
        "budget": {"turns": 4},
        "sampling": {"max_tokens": 4},
    },
    "evaluation": {"tasks": 0},
    "trackers": [],
}


class Programs(ToolEnv):
    """Read the task, then write the program."""

    system_prompt = "Read the task with the tool, then write the program."
    isolation = "inline"
    has_read = False

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.has_read = False
        return "Begin."

    def read_task(self) -> str:
        """The task."""
        self.has_read = True
        return "Print 6."

    def reply(self, text: str) -> ToolResult:
        return ToolResult("Done.", reward=float(self.has_read), terminated=True)


def player(env: Programs, rng: Random) -> str:
    """Reads the task mostly, and prints what comes to its mind."""
    if not env.has_read and rng.random() < 0.7:
        return ToolCall("read_task", {}).render()
    return f"```\nprint({rng.choice('678')})\n```"


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
    pairs = {
        "url": server.url,
        "cache": judge["cache"],
        "better": "Which is shorter?",
        "reasons": False,
    }
    parts = [
        "environment",
        {"name": "judge", "weight": 0.5, "as": "style", **judge},
        {"name": "judge_pairwise", "as": "rank", "opponents": 1, **pairs},
    ]
    path = folder / "judged.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "reward": parts}))
    return path


def verdict(call: JudgeCall) -> JudgeReply:
    return JudgeReply.json(
        {"better": "first"} if '"better"' in call.user else {"levels": LEVELS}, seconds=0.05
    )


async def train(config: Path, name: str) -> None:
    loaded = load_config(config, [f"run_dir={config.parent / name}"])
    with Run(loaded, Console(file=StringIO())) as run:
        await run.config.recipe.call(run)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward" in row]


@pytest.mark.long
def test_a_run_waits_for_a_judge_that_is_killed_and_the_same_run_again_asks_nothing(
    tmp_path: Path,
) -> None:
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
        assert row["reward"] == pytest.approx(
            row["reward/environment"] + 0.5 * row["reward/style"] + 0.5
        )
    assert (
        sum(row["scoring/style/unreachable"] + row["scoring/rank/unreachable"] for row in first) > 0
    )
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert summary["tasks"]["trained"] == STEPS * 4
    assert summary["episodes"]["failed"] == 0
    scores = [
        json.loads(row["parts"])["style"]
        for file in sorted((tmp_path / "first" / "trajectories").iterdir())
        for row in pq.read_table(file).to_pylist()
    ]
    assert scores == pytest.approx([0.675] * STEPS * 16)  # none was made up


@pytest.mark.long
def test_a_rule_a_sandbox_a_judge_and_a_monitor_train_together_on_a_tool_environment(
    tmp_path: Path,
) -> None:
    def friendly(call: JudgeCall) -> JudgeReply:
        return JudgeReply.json({"levels": {"right": 9 if "print(6)" in call.user else 2}})

    async def main() -> int:
        async with JudgeServer(friendly) as server:
            settings = {
                "url": server.url,
                "cache": str(tmp_path / "judge.sqlite"),
                "reasons": False,
            }
            parts = [
                "environment",
                {"name": "regex", "pattern": "print", "as": "prints", "weight": 0.25},
                {"name": "code", "weight": 2.0},
                {
                    "name": "judge",
                    "criteria": {"right": "It prints what the task wants."},
                    **settings,
                },
                {"name": "monitor", "formula": "read_task", "as": "careful", "weight": 0.5},
            ]
            play = {
                "player": "tests.rewards.test_judge_run:player",
                "episodes": 192,
                "episodes_per_step": 4,
                "lr": 2e-3,
            }
            config = {
                **SMALL,
                "env": {
                    "name": "tests.rewards.test_judge_run:Programs",
                    "options": {"tests": [{"stdout": "6"}]},
                },
                "recipe": {"demonstrations": play},
                "rollout": {
                    "groups_per_step": 2,
                    "group_size": 8,
                    "budget": {"turns": 3},
                    "sampling": {"max_tokens": 64},
                },
                "reward": parts,
            }
            path = tmp_path / "parts.yaml"
            path.write_text(yaml.safe_dump(config))
            await train(path, "run")
            return len(server.calls)

    asked = asyncio.run(main())
    steps = steps_of(tmp_path / "run")
    weights = {"environment": 1.0, "prints": 0.25, "code": 2.0, "judge": 1.0, "careful": 0.5}
    assert len(steps) == STEPS
    for row in steps:
        assert row["reward"] == pytest.approx(
            sum(weight * row[f"reward/{part}"] for part, weight in weights.items())
        )
        assert 0 < row["reward/code"] < 1, "of three numbers that the player prints, one is right"
        assert row["reward/judge"] > 0.2 + 0.7 * row["reward/code"] - 1e-6, (
            "it also likes what is in no fence"
        )
        assert row["reward/careful"] > 0
        assert row["reward/careful/violated"] == pytest.approx(1 - row["reward/careful"])
    assert 0 < asked <= STEPS * 16
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["episodes"]["failed"] == 0
