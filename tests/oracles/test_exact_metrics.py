"""Exact metrics of a run: its return, and how far its advantages and values are from the exact
ones.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.assembly.exact_metrics import ExactMetrics, compared
from agentrl.batch import TrainBatch, collate, to_samples
from agentrl.config import RunConfig, load_config
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.oracle import OracleEnv
from agentrl.oracles.exact import answer_probabilities
from agentrl.tokens.arrays import floats, ints
from agentrl.trainers.local import LocalTrainer
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn

ROOT = Path(__file__).parents[2]
OPTIONS = {"problem": "chain", "settings": {"length": 2}, "other": -0.3}


def config_of(*overrides: str) -> RunConfig:
    return load_config(
        ROOT / "examples" / "t_maze.yaml", ["env.options=" + str(OPTIONS), *overrides]
    ).config


class Constant:
    """A critic that always expects the same."""

    def __init__(self, value: float) -> None:
        self._value = value

    async def predict(self, batch: TrainBatch) -> Any:
        return np.full(batch.num_loss_tokens, self._value, np.float32)


def played(renderer: TemplateRenderer, options: dict[str, Any]) -> Group:
    """Two episodes, the second with a message that ends it."""
    task = Task("oracle", 0, options)

    def turn(number: int, word: str, answer: str) -> Turn:
        token_ids = renderer.answer_ids(answer)
        completion = Completion(
            token_ids, floats(np.zeros(len(token_ids))), ints(np.zeros(len(token_ids))), "stop"
        )
        return Turn(ints([1, 2, 3]), completion, 0.0, {"decision": number, "word": word})

    whole = (turn(0, "same", "same"), turn(1, "other", "other"))
    cut = (turn(0, "other", "other"), turn(2, "", "nonsense"))
    trajectories = tuple(
        Trajectory(f"{i}", task, turns, Terminated()) for i, turns in enumerate((whole, cut))
    )
    return Group(task, trajectories, (Score(1.0), Score(0.0)))


def batch_of(group: Group, advantages: Sequence[Sequence[float]]) -> TrainBatch:
    pairs = zip(group.trajectories, advantages, strict=True)
    return collate(
        sample for trajectory, of_turns in pairs for sample in to_samples(trajectory, of_turns)
    )


def test_exact_advantages_have_no_error_and_others_have_theirs(shallow_model_dir: Path) -> None:
    renderer = TemplateRenderer.of_model(shallow_model_dir)
    problem = OracleEnv().enumeration(OPTIONS)
    group = played(renderer, OPTIONS)

    async def main() -> None:
        async with LocalTrainer(
            LocalTrainer.Config(device="cpu"), shallow_model_dir, total_steps=1
        ) as trainer:
            probabilities = await answer_probabilities(
                trainer, renderer, problem.questions, max_tokens=6
            )
            found = [problem.credit(probabilities, one) or () for one in group.trajectories]
            exact = [[credit.advantage for credit in of_turns] for of_turns in found]
            values = [credit.value for of_turns in found for credit in of_turns]
            metrics = ExactMetrics.of_run(config_of(), renderer, trainer, None)

            async def measured(
                advantages: Sequence[Sequence[float]], group: Group = group
            ) -> dict[str, float]:
                return dict(await metrics.measure([group], batch_of(group, advantages)))

            right = await measured(exact)
            assert right["exact/return"] == pytest.approx(problem.metrics(probabilities)["return"])
            # A model at random answers anything.
            assert right["exact/return"] == pytest.approx(-0.3, abs=0.01)
            assert right["exact/best_return"] == pytest.approx(1.2)
            assert right["exact/advantage_cosine"] == pytest.approx(1, abs=1e-5)
            assert right["exact/advantage_residual"] == pytest.approx(0, abs=1e-5)
            assert 0 <= right["exact/respelled"] < 1
            twice = await measured(
                [[2 * advantage for advantage in of_turns] for of_turns in exact]
            )
            assert twice["exact/advantage_cosine"] == pytest.approx(1, abs=1e-5)
            assert twice["exact/advantage_residual"] == pytest.approx(1, abs=1e-5)
            opposite = await measured(
                [[-advantage for advantage in of_turns] for of_turns in exact]
            )
            assert opposite["exact/advantage_cosine"] == pytest.approx(-1, abs=1e-5)
            nothing = await measured([[0.0, 0.0], [0.0, 0.0]])
            assert "exact/advantage_cosine" not in nothing
            assert "exact/return" in nothing
            fewer = replace(group, trajectories=group.trajectories[:1], scores=group.scores[:1])
            part = await metrics.measure([group], batch_of(fewer, exact[:1]))
            assert "exact/advantage_cosine" not in part  # an episode is not trained on
            other = played(renderer, OPTIONS | {"other": 0.0})
            # A task of another problem.
            assert "exact/advantage_cosine" not in await measured(exact, other)
            critic: Any = Constant(0.25)
            judged = replace(metrics, critic=critic)
            error = (await judged.measure([group], batch_of(group, exact)))["exact/value_error"]
            assert error == pytest.approx(
                np.sqrt(np.mean((0.25 - np.array(values)) ** 2)), abs=1e-5
            )

    asyncio.run(main())


def test_the_comparison_is_by_direction_and_by_distance() -> None:
    found = compared(floats([1.0, 0.0]), floats([1.0, 1.0]))
    assert found == pytest.approx({"advantage_cosine": 0.5**0.5, "advantage_residual": 0.5**0.5})
    assert compared(floats([0.0]), floats([1.0])) == {}
    assert compared(floats([1.0]), floats([0.0])) == {}


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["rollout.sampling.top_p=0.9"], "truncates the policy"),
        (["rollout.sampling.stop=[x]"], "stops of its own"),
        (["rollout.context={name: summary, max_prompt_tokens: 200}"], "asks for free text"),
        (
            ["rollout.budget.turns=1"],
            "episodes have up to 2 turns, and rollout.budget.turns is less",
        ),
    ],
)
def test_where_the_numbers_would_be_wrong_they_are_left_out_with_a_reason(
    shallow_model_dir: Path, caplog: pytest.LogCaptureFixture, overrides: list[str], why: str
) -> None:
    renderer = TemplateRenderer.of_model(shallow_model_dir)
    trainer = LocalTrainer(LocalTrainer.Config(), shallow_model_dir, total_steps=1)
    with caplog.at_level(logging.WARNING):
        metrics = ExactMetrics.of_run(config_of(*overrides), renderer, trainer, None)
    assert metrics.enumeration is None
    assert why in caplog.text
    assert ExactMetrics.of_run(config_of(), renderer, trainer, None).enumeration is not None


def test_a_run_on_another_environment_or_in_wrappers_has_none_and_asks_nothing(
    shallow_model_dir: Path,
) -> None:
    renderer = TemplateRenderer.of_model(shallow_model_dir)
    trainer: Any = object()  # asking it anything would fail
    other = load_config(ROOT / "examples" / "frozen_lake.yaml").config
    wrapped = config_of("env.wrappers=[{name: time_limit, turns: 9}]")
    for config in (other, wrapped):
        metrics = ExactMetrics.of_run(config, renderer, trainer, None)
        assert (
            asyncio.run(
                metrics.measure([], collate(to_samples(played(renderer, {}).trajectories[0], 0.0)))
            )
            == {}
        )
