"""The configs of examples/learn, whose runs `make learn` trains: each is short, and tests on tasks
it has not seen.
"""

import asyncio
import inspect
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl import plugins
from agentrl.config import RunConfig, load_config
from agentrl.envs.base import TextEnv
from agentrl.runs.task_sources import task_source
from tests.tiers import evenly

CONFIGS = sorted((Path(__file__).parents[2] / "examples" / "learn").glob("*.yaml"))
NOT_THE_TASK = {"rng", "_index", "programs", "solution"}
"""Parts of an environment's state in which two instances of one task may differ."""


def plain(state: Any) -> Any:
    """The same for the same state, in whatever order it was built; without what is not a part of
    the task.
    """
    if is_dataclass(state):
        state = {field.name: getattr(state, field.name) for field in fields(state)}
    if isinstance(state, Mapping):
        return sorted(
            (str(name), plain(value)) for name, value in state.items() if name not in NOT_THE_TASK
        )
    return sorted(map(str, state)) if isinstance(state, Set) else str(state)


def contents(config: RunConfig, splits: Mapping[str, int]) -> set[str]:
    """What the environment draws for so many tasks of each split: all its state after the reset."""
    env: TextEnv = plugins.load("envs", config.env.name)()
    found = set()

    async def draw() -> None:
        for split, count in splits.items():
            source = task_source(config, split)
            for index in range(count):
                task = source.task(index)
                begun = env.reset(seed=task.seed, options=task.options)
                if inspect.isawaitable(begun):
                    await begun
                found.add(str(plain(vars(env))))
        closed = env.close()
        if inspect.isawaitable(closed):
            await closed

    asyncio.run(draw())
    return found


@pytest.mark.parametrize("path", evenly(CONFIGS, 2), ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "seed",  # those of benchmarks/learn.py
    [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 4, 6, 8))],
)
def test_a_thousand_different_tasks_are_trained_on_and_none_of_them_is_held_out(
    path: Path, seed: int
) -> None:
    config = load_config(path, [f"seed={seed}"]).config
    settings: Any = config.recipe.settings
    trained = {
        "demonstrations": settings.demonstrations.episodes,
        "train": config.steps * config.rollout.groups_per_step,
    }
    training, held_out = (
        contents(config, trained),
        contents(config, {"held-out": config.evaluation.tasks}),
    )
    assert len(training) >= 1000
    assert len(held_out) >= 0.95 * config.evaluation.tasks
    assert not training & held_out


def test_there_are_configs() -> None:
    assert CONFIGS
