"""Lineage: a chain of models is followed to the first one, and what is not as it was recorded is
found.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.errors import CheckpointError
from agentrl.recipes.lineage import (
    LINEAGE,
    ModelRecord,
    rewards_of,
    verified_lineage,
    weights_sha256,
)


def model(folder: Path, weights: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_text(weights)
    (folder / "model-2.safetensors").write_text(weights * 2)
    return folder


def born(folder: Path, parent: Path, judge: Path, number: int = 1, **changed: Any) -> Path:
    """A model with its lineage."""
    model(folder, f"weights {number}")
    records = {
        role: {"folder": f"../{path.name}", "sha256": weights_sha256(path)}
        for role, path in (("parent", parent), ("judge", judge))
    }
    lineage = {
        "iteration": number,
        "sha256": weights_sha256(folder),
        "parent": records["parent"],
        "reference": records["parent"],
        "reward": [{"name": "reward_model", "settings": {}, "models": {"path": records["judge"]}}],
        "tasks": ["train-000000"],
        "pairs": 1,
        "updates": number,
        "seed": 0,
        "config_sha256": "",
    }
    (folder / LINEAGE).write_text(json.dumps(lineage | changed))
    return folder


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The third model of a chain: first, one, two; the judge is the reward's model."""
    first, judge = model(tmp_path / "first", "weights"), model(tmp_path / "judge", "judge")
    return born(tmp_path / "two", born(tmp_path / "one", first, judge), judge, number=2)


def test_a_chain_is_followed_to_the_first_model(newest: Path, tmp_path: Path) -> None:
    chain = verified_lineage(newest)
    assert [one.folder.name for one in chain] == ["two", "one", "first"]
    assert [one.lineage.iteration if one.lineage else None for one in chain] == [2, 1, None]
    assert [one.sha256 for one in chain] == [weights_sha256(one.folder) for one in chain]
    tmp_path.rename(tmp_path.with_name("moved"))  # paths inside of a run are relative
    assert [one.folder.name for one in verified_lineage(tmp_path.with_name("moved") / "two")] == [
        "two",
        "one",
        "first",
    ]
    tmp_path.with_name("moved").rename(tmp_path)


def test_the_command_shows_the_chain_of_a_model_or_says_what_is_wrong(
    newest: Path, tmp_path: Path, agentrl
) -> None:
    shown = agentrl("lineage", str(newest), cwd=tmp_path)
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        one.sha256[:12] for one in verified_lineage(newest)
    ]
    assert lines[0].endswith("two  pairs: 1, tasks: 1")
    assert lines[-1].endswith("first  the first model")
    (newest / "model-1.safetensors").write_text("others")
    refused = agentrl("lineage", str(newest), cwd=tmp_path)
    assert (refused.returncode, "are not those that were trained there" in refused.stderr) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("two", "two are not those that were trained there"),
        ("one", "one are not those with which .*two was trained, as the parent"),
        ("first", "first are not those with which .*one was trained, as the parent"),
        (
            "judge",
            (
                "judge are not those with which .*two was trained, as the path of the reward"
                " reward_model"
            ),
        ),
    ],
)
def test_changed_weights_are_found_and_named(
    newest: Path, tmp_path: Path, changed: str, says: str
) -> None:
    (tmp_path / changed / "model-2.safetensors").write_text("others")
    with pytest.raises(CheckpointError, match=says):
        verified_lineage(newest)


def test_what_is_missing_or_cannot_be_read_is_named(newest: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"first has no lineage\.json: name a folder iterations"
    ):
        verified_lineage(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="first as the parent, and there is no such folder"):
        verified_lineage(newest)
    for path in (tmp_path / "one").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="one holds no weights"):
        verified_lineage(newest)
    (newest / LINEAGE).write_text('{"iteration": "two"}')
    with pytest.raises(
        CheckpointError,
        match=r"lineage\.json cannot be read: iteration: Input should be a valid int",
    ):
        verified_lineage(newest)


def test_a_chain_that_goes_in_a_circle_ends(tmp_path: Path) -> None:
    judge = model(tmp_path / "judge", "judge")
    one = model(tmp_path / "one", "weights 1")
    two = born(tmp_path / "two", one, judge, number=2)
    for path in one.iterdir():
        path.unlink()
    one.rmdir()
    born(one, two, judge)
    with pytest.raises(CheckpointError, match="circle"):
        verified_lineage(two)


def test_the_record_of_a_reward_has_its_settings_and_the_checksums_of_its_models(
    tmp_path: Path,
) -> None:
    judge = model(tmp_path / "judge", "judge")
    (tmp_path / "run.yaml").write_text(
        f"env: guess_number\nreward: [environment, {{name: reward_model, path: {judge}, weight:"
        " 0.5}]\n"
    )
    environment, trained = rewards_of(load_config(tmp_path / "run.yaml").config.reward.parts)
    assert (environment.name, environment.models) == ("environment", {})
    assert (trained.name, trained.settings["weight"]) == ("reward_model", 0.5)
    assert trained.models == {"path": ModelRecord(folder=judge, sha256=weights_sha256(judge))}
