"""What the best constant earns: held-out success of a player that says one and the same text in
every turn.

    python benchmarks/constant.py runs/real-1

A policy that has collapsed to one answer earns no more than this, so a figure of learning has to be
above it. Tried are the answers that the run's episodes have most often, before and after training,
and, where tasks bring their right answers (the option `answer`), each of these.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from pyarrow import parquet

from agentrl.assembly import env_host, reward_of
from agentrl.config import RunConfig, load_config
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.recipes.evaluate import play_all
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.runs.task_sources import held_out_tasks
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Failed, Task, succeeded

MOST_FREQUENT = 20
"""How many of the most frequent answers are tried."""


def answers_of(run: Path, at_most: int = MOST_FREQUENT) -> list[str]:
    """The answers that are most frequent in the episodes of a run, in training and evaluation."""
    counts = Counter[str]()
    for file in sorted((run / "trajectories").glob("*.parquet")):
        for row in parquet.read_table(file, columns=["messages"]).to_pylist():
            counts.update(one["content"] for one in row["messages"] if one["role"] == "assistant")
    return [text for text, _ in counts.most_common(at_most)]


async def shares(
    config: RunConfig, texts: Iterable[str], tasks: Sequence[Task]
) -> dict[str, float]:
    """The success of each constant on these tasks."""
    found: dict[str, float] = {}
    renderer = TemplateRenderer(ByteTokenizer())
    limits = config.rollout.budget, config.rollout.deadlines.episode
    async with env_host(config, shown=False) as envs, reward_of(config) as reward:
        for text in texts:
            policy = ScriptedPolicy(_Constant(text), renderer)
            runner = EnvEpisodeRunner(
                policy, renderer, envs, *limits, own_budgets=config.own_budgets()
            )
            right = 0
            for trajectory in await play_all(runner, tasks, config, policy.turnstile):
                if not isinstance(trajectory.status, Failed):
                    right += bool(succeeded(trajectory, await reward.score(trajectory)))
            found[text] = right / len(tasks)
    return found


class _Constant:
    """A scripted player that always says the same; environments in processes get it too."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, env: Any, rng: Random) -> str:
        return self.text


def best_constant(run: Path) -> tuple[float, str]:
    """(success, answer) of the best constant on the held-out tasks of a run."""
    config = load_config(run / "config.yaml").config
    tasks = held_out_tasks(config, config.evaluation.tasks)
    right = [
        task.options["answer"] for task in tasks if isinstance(task.options.get("answer"), str)
    ]
    texts = dict.fromkeys([*answers_of(run), *right])
    found = asyncio.run(shares(config, texts, tasks))
    return max((share, text) for text, share in found.items())


def main() -> int:
    """Print the best constant of each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for run in parser.parse_args().runs:
        share, text = best_constant(run)
        print(f"{run}: {share:.1%} with {text!r}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
