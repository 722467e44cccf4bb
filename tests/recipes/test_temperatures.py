"""What others have said is imitated at temperature 1, whatever temperature the run samples at."""

import asyncio
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from agentrl.config import load_config
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.recipes.demonstrations import DemonstrationsConfig, learn
from agentrl.recipes.dpo import DpoSettings, dpo
from agentrl.recipes.recordings import RecordingsConfig
from agentrl.recipes.written_conversation import trajectory_from_messages
from agentrl.runs.run import Run
from agentrl.trajectory import Message, Trajectory

SAID = ("left", "left", "right")


def run_of(folder: Path, model: Path, temperature: float) -> Run:
    path = folder / "run.yaml"
    folder.mkdir()
    path.write_text(
        f"env: guess_number\nmodel: {model}\ntrackers: []\nrun_dir: {folder / 'run'}\ntrainer:"
        f" {{device: cpu}}\nrollout: {{sampling: {{temperature: {temperature}}}}}\n"
    )
    return Run(load_config(path), Console(file=StringIO()))


def conversations(renderer: TemplateRenderer) -> Sequence[Trajectory]:
    return [
        trajectory_from_messages(
            [Message("user", "Which way?"), Message("assistant", answer)], renderer
        )
        for answer in SAID
    ]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def nats(model: Path, shown: Sequence[Trajectory], temperature: float) -> float:
    """The cross entropy of what was said, worked out with the model alone."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: list[float] = []
    for trajectory in shown:
        (turn,) = trajectory.turns
        ids = np.concatenate([turn.prompt_ids, turn.completion.token_ids])
        with torch.no_grad():
            logits_TV = (
                policy(torch.tensor(ids, dtype=torch.long)[None]).logits[0].double() / temperature
            )
        logprobs_TV = logits_TV.log_softmax(-1)
        begin = len(turn.prompt_ids)
        found += [float(logprobs_TV[at - 1, ids[at]]) for at in range(begin, len(ids))]
    return -sum(found) / len(found)


def imitated(folder: Path, model: Path, sampled: float, **how: Any) -> tuple[bytes, float, float]:
    """The weights after three steps in a run that samples at this temperature, the loss of the
    first step, and what it should be.
    """
    said: list[str] = []
    chosen = DemonstrationsConfig(player="x:y", episodes_per_step=3, epochs=3, **how)
    with run_of(folder, model, sampled) as run:
        run.display.say = said.append  # type: ignore[method-assign]
        shown = conversations(renderer_of(model, run.config.model))
        asyncio.run(learn(run, shown, model, folder / "model", chosen))
    return (
        weights(folder / "model"),
        float(said[0].split("loss ")[1].split()[0]),
        nats(model, shown, chosen.temperature),
    )


def test_imitation_is_the_same_at_every_sampling_temperature(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    one, loss, expected = imitated(tmp_path / "one", tiny_model_dir, 1.0)
    assert loss == pytest.approx(expected, abs=6e-4)
    assert imitated(tmp_path / "half", tiny_model_dir, 0.5) == (one, loss, expected)
    told, loss, expected = imitated(tmp_path / "told", tiny_model_dir, 0.5, temperature=2.0)
    assert told != one
    assert loss == pytest.approx(expected, abs=6e-4)
    assert RecordingsConfig(path=tmp_path).temperature == 1


def test_offline_preferences_are_learned_the_same_at_every_sampling_temperature(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    row = '{"prompt": "Which way?", "chosen": "left", "rejected": "right"}\n'
    (tmp_path / "pairs.jsonl").write_text(row * 4)
    pairs = {"path": tmp_path / "pairs.jsonl", "pairs_per_step": 2, "held_out": 0.0, "lr": 1e-3}

    def learned(name: str, sampled: float, **told: float) -> tuple[bytes, list[float]]:
        settings = DpoSettings.model_validate({"preferences": pairs, **told})
        with run_of(tmp_path / name, tiny_model_dir, sampled) as run:
            asyncio.run(dpo(run, settings))
            margins = [row["margin"] for row in run.metrics.rows()]
        return weights(tmp_path / name / "run" / "dpo"), margins

    one = learned("one", 1.0)
    assert one[1][0] == 0.0
    assert one[1][1] > 0.0
    assert learned("half", 0.5) == one
    assert learned("told", 0.5, temperature=2.0) == learned("warm", 1.0, temperature=2.0) != one
