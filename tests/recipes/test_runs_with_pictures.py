"""Whole runs whose environment shows pictures: each family learns, and nothing is lost."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.models.vision_families import FAMILIES
from agentrl.testing.vision_models import VisionFamily, create_tiny_vision_model
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Trajectory
from tests.engines.test_vllm_pictures import needs_torchvision
from tests.recipes.test_runs import SMALL, folder, kill_during, start, train

ROOT = Path(__file__).parents[2]
GAP = 1e-4
"""The largest difference between the engine's logprobs and the trainer's, both in float32."""
PICTURES = [
    *SMALL,
    "env.options={view: picture, size: 2}",
    "steps=2",
    "evaluation.tasks=0",
    "rollout.budget.turns=2",
    "rollout.max_staleness=0",
]


def steps_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def check_two_steps(done: Any, run: Path) -> None:
    """A run has ended after two steps, the second with the weights that the first published."""
    assert done.returncode == 0, done.stderr
    rows = steps_of(run)
    # The second step's tokens were sampled from the weights that the first step has published.
    assert [row["logprob_gap_max"] < GAP for row in rows] == [True, True], rows
    assert all(row["grad_norm"] > 0 for row in rows)
    shown = json.loads((run / "summary.json").read_text())
    assert shown["episodes"]["trained"] == 32


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=pytest.mark.slow if one == "smolvlm" else pytest.mark.long)
        for one in FAMILIES
    ],
)
def test_a_family_trains_from_pictures_and_what_it_publishes_is_taken_up(
    agentrl: Any, family: VisionFamily, tmp_path: Path
) -> None:
    create_tiny_vision_model(tmp_path / "model", family)
    run = tmp_path / "run"
    done = agentrl(
        "train",
        *PICTURES,
        f"run_dir={run}",
        f"model={tmp_path / 'model'}",
        "trainer.lr=0.02",
        "trainer.max_grad_norm=null",
        "trainer.train_tower=true",
        "trainer.train_projector=true",
    )
    check_two_steps(done, run)
    assert all(row["forked_turns"] == 0 for row in steps_of(run))


WHOLE = ["trainer.train_tower=true", "trainer.train_projector=true"]


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("smolvlm", WHOLE),
        ("idefics3", []),
        ("smolvlm", ["trainer.lora={rank: 4}"]),
        ("smolvlm", ["cluster=ray", "rollout.workers=2", *WHOLE]),
        *(
            pytest.param(one, WHOLE, marks=needs_torchvision)
            for one in ("internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
        ),
    ],
)
def test_vllm_plays_with_pictures_and_takes_up_what_is_trained(
    family: VisionFamily, settings: list[str], tmp_path: Path
) -> None:
    create_tiny_vision_model(tmp_path / "model", family)
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "agentrl", "train"),
        *PICTURES,
        f"run_dir={run}",
        f"model={tmp_path / 'model'}",
        "engine=vllm",
        "engine.kv_cache_gib=0.1",
        "trainer.lr=0.02",
        "trainer.max_grad_norm=null",
        *settings,
    ]
    # In a process of its own: one starts Ray only once, and that of other tests has GPUs that are
    # not there.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    check_two_steps(done, run)


@pytest.mark.long
def test_a_killed_run_with_pictures_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    settings = [
        *PICTURES,
        "run_dir=run",
        "model=tiny_vision",
        "steps=4",
        "checkpoint.every=1",
        "env.isolation=inline",
        "trainer.train_tower=true",
        "trainer.train_projector=true",
    ]
    whole = train(*settings, cwd=folder(tmp_path, "whole"))
    killed_in = folder(tmp_path, "killed")
    command = start(*settings, cwd=killed_in)
    kill_during(command, killed_in / "run", steps=2, extra=0)
    assert command.poll() == -signal.SIGKILL, command.output
    killed = train("--resume", "run", cwd=killed_in)
    assert killed["weights_sha256"] == whole["weights_sha256"]
    assert killed["tasks"] == whole["tasks"]
    kept = [
        sorted(path.name for path in (one / "run" / "images").iterdir())
        for one in (tmp_path / "whole", killed_in)
    ]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_a_run_learns_from_data_with_pictures(agentrl: Any, tmp_path: Path) -> None:
    rows, names = [], set()
    for number in range(8):
        red = EncodedImage.of_pixels(np.full((28, 56, 3), [25 * number, 0, 0], np.uint8))
        names.add(red.name)
        (tmp_path / f"{number}.png").write_bytes(red.data)
        rows.append({"prompt": "<image>a or b?", "images": [f"{number}.png"], "answer": "a"})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        f"env: qa\ntasks: {{data: {data}, held_out: 0.25}}\nmodel: tiny_vision\nsteps: 2\n"
        "rollout: {groups_per_step: 2, group_size: 4, sampling: {max_tokens: 4}}\n"
        "reward: {name: tests.recipes.test_runs_with_pictures:length}\nevaluation: {tasks: 2}\n"
    )
    run = tmp_path / "run"
    done = agentrl("train", str(tmp_path / "run.yaml"), f"run_dir={run}")
    assert done.returncode == 0, done.stderr
    assert all(row["logprob_gap_max"] < GAP for row in steps_of(run))
    # Of the rows that were played: two groups a step, and two that are held out.
    kept = [path.name for path in (run / "images").iterdir()]
    assert names.issuperset(kept)
    assert len(kept) >= 6


def length(trajectory: Trajectory) -> float:
    return float(trajectory.num_tokens)
