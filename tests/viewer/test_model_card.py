"""The cards of exported models, as the hub's own library reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard, constants
from safetensors.numpy import save_file

from agentrl.config import load_config
from agentrl.models.base_model import base_model_of
from agentrl.observe.metrics import MetricsFile
from agentrl.testing.made_up_run import MadeUpRun

EVALUATED = {0: 0.25, 2: 0.75, 4: 0.5}


def run_with(folder: Path, settings: dict[str, Any]) -> Path:
    """A run of four steps with a checkpoint after two of them and after all."""
    run = MadeUpRun(
        folder / "lake",
        env="frozen_lake",
        settings={
            "run_dir": str(folder / "lake"),
            "algorithm": {"name": "rloo"},
            "reward": {"name": "environment"},
            **settings,
        },
    )
    run.begin()
    for _ in range(4):
        run.step()
    metrics = MetricsFile(run.folder / "metrics.jsonl")
    for step, success in EVALUATED.items():
        row = {"": success, "_low": success - 0.1, "_high": success + 0.1}
        counts = {"eval/reward": success, "eval/episodes": 40, "eval/failed": 2}
        metrics.append(
            {"step": step, **{f"eval/success{key}": value for key, value in row.items()}, **counts}
        )
    for step in (2, 4):
        checkpoint = run.folder / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text('{"model_type": "qwen3"}')
        save_file({"w": np.eye(4, dtype=np.float32)}, checkpoint / "model.safetensors")
    return run.folder


def test_a_card_says_what_the_model_was_trained_on_how_well_it_does_and_how_to_repeat_it(
    tmp_path: Path, agentrl: Callable[..., Any]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(
        "---\nlicense: other\nlicense_name: lakes-1\nbase_model: someone/lakes\n---\n"
    )
    run = run_with(tmp_path, {"model": {"name": str(base)}})
    done = agentrl("export", str(run), str(tmp_path / "lake-4"))
    assert done.returncode == 0, done.stderr
    card = ModelCard.load(tmp_path / "lake-4" / "README.md")
    assert (card.data.license, card.data.license_name) == ("other", "lakes-1")
    assert card.data.base_model == "someone/lakes"
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags == ["agentrl", "reinforcement-learning", "rloo", "frozen_lake"]
    (result,) = card.data.eval_results
    assert (card.data.model_name, result.dataset_type) == ("lake-4", "frozen_lake")
    assert (result.metric_type, result.metric_value) == ("success_rate", 0.5)
    assert result.metric_name == "success after 4 steps (95 % interval 40.0% to 60.0%)"
    text = card.text
    assert "| held out | 2 | 75.0% | 65.0% to 85.0% | 0.75 | 40 | 2 |" in text
    assert "`lakes-1`" in text
    assert "chosen because it does best here" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("agentrl train")]
    again = load_config(tmp_path / "lake-4" / "agentrl.yaml", [line.split()[-1]]).config
    assert (again.env.name, again.algorithm.name) == ("frozen_lake", "rloo")
    assert (again.steps, again.run_dir) == (100, Path("runs/lake"))
    assert (tmp_path / "lake-4" / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_card_of_a_chosen_checkpoint_says_so_and_knows_nothing_of_later_steps(
    tmp_path: Path, agentrl: Callable[..., Any]
) -> None:
    run = run_with(tmp_path, {"model": {"name": "tiny"}})
    done = agentrl("export", str(run), str(tmp_path / "best"), "--step", "best")
    assert done.returncode == 0, done.stderr
    card = ModelCard.load(tmp_path / "best" / "README.md")
    (result,) = card.data.eval_results
    assert result.metric_value == 0.75
    assert "chosen because it does best here" in card.text
    assert "| held out | 4 |" not in card.text
    assert "| steps | 2 of 100 |" in card.text
    assert (card.data.license, card.data.base_model) == (None, None)
    assert "none was chosen here" in card.text


def test_the_card_of_a_checkpoint_without_its_run_claims_nothing(
    tmp_path: Path, agentrl: Callable[..., Any]
) -> None:
    run = run_with(tmp_path, {})
    alone = (run / "checkpoints" / "step_000004").rename(tmp_path / "alone")
    assert agentrl("export", str(alone), str(tmp_path / "model")).returncode == 0
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.eval_results is None
    assert "nothing is known here of its training" in card.text
    assert not (tmp_path / "model" / "agentrl.yaml").exists()


def test_the_licence_of_a_model_of_the_hub_is_that_of_its_card_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--someone--talk" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\n---\n# talk\n")
    (snapshot / "config.json").write_text(json.dumps({}))
    by_name = base_model_of("someone/talk", "1" * 40)
    assert (by_name.name, by_name.licence) == ("someone/talk", {"license": "apache-2.0"})
    assert base_model_of(str(snapshot)) == by_name
    (snapshot / "README.md").write_text("---\nlicense: [\n---\n")
    assert base_model_of("someone/talk", "1" * 40).licence == {}
    assert base_model_of("someone/never-seen").licence == {}
