"""Each family of models: played with tools, trained, published and taken up, as
docs/model-families.md says.

With AGENTRL_WRITE_TABLE=1 and in one process (-n 0), the tests write what they have found into the
table.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.batch import TrainingSample, collate
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import renderer_of
from agentrl.engines.vllm import VllmEngine
from agentrl.errors import ConfigError, EngineError
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.trainers import LOSS
from agentrl.tokens.arrays import ints
from agentrl.trainers.local import LocalTrainer
from tests.model_families import FAMILIES, TABLE, make_model, row_of
from tests.processes import PATIENCE_SECONDS

IN_CI = ("gpt-oss",)
"""It has experts, windows and sinks."""
SETTINGS = [
    "env: tests.model_families:Parrot",
    "reward: tests.model_families:EvenLetters",
    "steps: 2",
    "rollout: {groups_per_step: 2, group_size: 3, budget: {turns: 3}, max_staleness: 0, "
    "sampling: {max_tokens: 12}}",
    "evaluation: {tasks: 0}",
    "trackers: []",
    "checkpoint: {every: 2}",
    "engine: {name: local, max_context: 4096}",
]
WRITE = "AGENTRL_WRITE_TABLE=1 python -m pytest -n 0 -m long tests/recipes/test_model_families.py"
UNTRIED = "?"
"""A cell that claims nothing yet, so that nothing found can contradict it."""
GAP = 1e-3
"""Most nats between the logprobs of engine and trainer. One step of this size moves them by far
more.
"""


def each(in_ci: Sequence[str], mark: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """A test of each family. It has this mark for the families `in_ci`, and takes too long there
    for the others.
    """
    marks = {name: mark if name in in_ci else pytest.mark.long for name in FAMILIES}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=one) for name, one in marks.items()]
    )


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("families") / "model"
            make_model(name, made[name])
        return made[name]

    return folder


def trained(agentrl: Any, folder: Path, run: Path, *overrides: str) -> list[dict[str, float]]:
    """The rows of the steps of a run that starts from this model."""
    (run.parent / f"{run.name}.yaml").write_text("\n".join([*SETTINGS, f"run_dir: {run}"]))
    done = agentrl("train", str(run.parent / f"{run.name}.yaml"), f"model={folder}", *overrides)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def found(name: str, first: int, cells: list[str], why: str = "") -> None:
    """Compare cells of the family's row with the docs, or write them there. If one is untried, the
    test is skipped.
    """
    row = row_of(name)
    new = [*row[:first], *cells, *row[first + len(cells) :]]
    if os.environ.get("AGENTRL_WRITE_TABLE"):
        old_line, new_line = (f"| {' | '.join([name, *each])} |" for each in (row, new))
        TABLE.write_text(TABLE.read_text().replace(old_line, new_line))
    elif UNTRIED in row[first : first + len(cells)]:
        pytest.skip(
            f"{name}: found {', '.join(cells)} {why}where {TABLE.name} has `{UNTRIED}`; to write"
            f" it: {WRITE}"
        )
    else:
        assert row == new


@each(IN_CI, pytest.mark.slow)
def test_a_family_plays_with_tools_trains_and_is_taken_up(
    name: str, agentrl: Any, folder_of: Any, tmp_path: Path
) -> None:
    folder = folder_of(name)
    watched = ["trainer.routing=replay"] if FAMILIES[name].mixture else []
    rows = trained(
        agentrl, folder, tmp_path / "run", "trainer.lr=0.02", "trainer.max_grad_norm=null", *watched
    )
    assert len(rows) == 2
    # The second step's tokens were sampled from the weights that the first step has published.
    assert [row["logprob_gap_max"] < GAP for row in rows] == [True, True], [
        row["logprob_gap_max"] for row in rows
    ]
    assert all(row["grad_norm"] > 0 for row in rows)
    # Both compute in float32, so hardly a token has two experts that are nearly as likely.
    assert [row.get("routing_difference", 1) < 0.01 for row in rows] == [
        FAMILIES[name].mixture
    ] * 2, rows
    renderer = renderer_of(folder, RendererConfig())
    can = renderer.template.abilities
    tools = "own" if can.tools and can.calls else "in text"
    extends = "yes" if all(row["forked_turns"] == 0 for row in rows) else "no"
    found(name, 0, ["yes", extends, tools, "apart" if renderer.reasons else "none"])
    # What was saved is a model that training starts from, and its adapters are taken up as well.
    saved, changes = (
        tmp_path / "run" / "checkpoints" / "step_000002",
        ["trainer.lora.rank=4", "trainer.lr=0.1"],
    )
    if FAMILIES[name].adapters:
        again = trained(agentrl, saved, tmp_path / "adapters", *changes)
        assert all(row["logprob_gap_max"] < GAP for row in again), [
            row["logprob_gap_max"] for row in again
        ]
        found(name, 4, ["yes"])
    else:
        with pytest.raises(
            AssertionError, match=r"error: trainer.lora supports linear layers only"
        ):
            trained(agentrl, saved, tmp_path / "adapters", *changes)
        found(name, 4, ["refused"])


async def gaps_of_vllm(folder: Path) -> list[float]:
    """The largest gap between vLLM's logprobs and the trainer's, before and after two updates."""
    config = VllmEngine.Config(max_batch=4, max_context=256, kv_cache_gib=0.1)
    prompt, gaps = ints(range(40, 100)), []
    trainer = LocalTrainer(
        LocalTrainer.Config(device="cpu", lr=0.02, max_grad_norm=None), folder, total_steps=2
    )
    async with VllmEngine(config, folder) as engine, trainer:
        for version in (0, 1, 2):
            request = GenerateRequest(
                f"r{version}", prompt, SamplingParams(max_tokens=24), seed=version
            )
            answer = await engine.generate(request)
            ids, loss = (
                np.append(prompt, answer.token_ids),
                np.repeat([False, True], [len(prompt), 24]),
            )
            logprobs = np.append(np.zeros(len(prompt)), answer.logprobs)
            versions = np.where(loss, version, -1)
            batch = collate(
                [TrainingSample(ids, loss, logprobs, loss * 1.0, versions, np.zeros(len(ids)))]
            )
            gaps.append(float(np.abs(await trainer.predict(batch) - answer.logprobs).max()))
            if version < 2:
                await trainer.step(batch, LOSS, 24.0)
                await engine.update_weights(await trainer.weights(), version + 1)
    return gaps


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_serves_a_family_and_takes_up_its_weights(name: str, folder_of: Any) -> None:
    try:
        gaps = asyncio.run(asyncio.wait_for(gaps_of_vllm(folder_of(name)), PATIENCE_SECONDS))
    except EngineError as error:
        if "vLLM did not start" not in str(error):
            raise
        found(name, 5, ["not on CPUs"], f"({error}) ")  # vLLM for GPUs knows more
        return
    except ConfigError as error:
        found(name, 5, ["refused"], f"({error}) ")
        return
    found(name, 5, ["yes" if max(gaps) < GAP else "differs"], f"({gaps}) ")
