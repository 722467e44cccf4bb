"""What a resume changes of a run's config: overrides on saved configs, what is said, kept and
refused.
"""

import asyncio
import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from agentrl.cli.training import train
from agentrl.config import (
    ConfigHistory,
    LoadedConfig,
    load_config,
    notes_of_schedules,
    notes_of_warm_up,
    refuse_another_run,
)
from agentrl.errors import ConfigError
from agentrl.protocols import Savable
from agentrl.runs.preflight import was_begun
from agentrl.runs.run import Run
from agentrl.trajectory import Task
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.report import write_report

CONFIG = """
env: {name: frozen_lake, options: {size: 4}}
steps: 20
rollout: {sampling: {max_tokens: 4}}
trainer: {lr: 1e-3, schedule: cosine, min_lr_ratio: 0.2}
algorithm: {name: grpo, entropy_bonus: 0.005}
evaluation: {tasks: 0}
trackers: []
"""


class Saved(Savable):
    """A checkpoint with files and folders of these names, those with a dot are files."""

    def __init__(self, *names: str) -> None:
        self._names = names

    async def save(self, folder: Path) -> None:
        await asyncio.to_thread(self._write, folder)

    def _write(self, folder: Path) -> None:
        folder.mkdir()
        for name in self._names:
            if "." in name:
                (folder / name).write_text("{}")
            else:
                (folder / name).mkdir()


def opened(loaded: LoadedConfig, **how: Any) -> tuple[Run, StringIO]:
    printed = StringIO()
    return Run(loaded, Console(file=printed, width=500), **how), printed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config as a user has written it, with a run of it beside it that has not made a step."""
    path = tmp_path_factory.mktemp("written") / "lake.yaml"
    path.write_text(CONFIG)
    with opened(load_config(path, [f"run_dir={path.parent / 'run'}"]))[0]:
        return path


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """The folder of that run, which has moved."""
    return Path(shutil.copytree(written.parent / "run", tmp_path / "run"))


def again(run: Path, *overrides: str) -> LoadedConfig:
    """The config of a run to resume with overrides, as the command reads it."""
    return load_config(run / "config.yaml", [*overrides, f"run_dir={run}"])


def resumed(
    run: Path, *overrides: str, step: int = 0, change: bool = False, state: Saved | None = None
) -> str:
    """Resume a run as the command does, after so many steps; returns what is printed."""
    if step:
        with opened(again(run), resume=True)[0] as before:
            for number in range(step):
                before.ledger.admit(
                    number, Task("frozen_lake", number, {}, f"train-{number}"), number
                )
                before.ledger.trained(number, {number: [1.0]})
            asyncio.run(before.save_checkpoint(step, state or Saved()))
    goes_on, printed = opened(again(run, *overrides), resume=True, change=change)
    with goes_on:
        return printed.getvalue()


def rows(loaded: LoadedConfig) -> dict[str, Any]:
    return {key: value for key, value, _ in loaded.rows() if key != "run_dir"}


# Overrides on a saved config.

OVERRIDES = [
    ["trainer=fsdp"],
    ["algorithm=ppo"],
    ["trainer.lora.rank=4"],
    ["algorithm=ppo", "trainer.lr=3e-4"],
    ["algorithm.kl=0.1"],
    ["engine=vllm"],
    ["reward=exact"],
    ["reward=[environment, exact]"],
    ["env=[frozen_lake, guess_number]"],
    ["recipe=sft", "recipe.rejection={}"],
    ["rollout.sampling.max_tokens=4000"],
    ["rollout.context={name: last_k, turns: 2}"],
    ["placement.assume.links=0.5", "cluster=ray", "tasks.name=seeded"],
]


@pytest.mark.parametrize("overrides", OVERRIDES, ids=" ".join)
def test_overrides_of_a_saved_config_work_as_on_the_one_that_was_written(
    written: Path, run: Path, overrides: list[str]
) -> None:
    assert rows(load_config(run / "config.yaml", overrides)) == rows(
        load_config(written, overrides)
    )


def test_so_do_those_of_a_copy_without_origins(written: Path, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text((run / "config.yaml").read_text())
    overrides = [
        "trainer=fsdp",
        "algorithm=ppo",
        "rollout.sampling.max_tokens=4000",
        "reward=exact",
    ]
    assert rows(load_config(copy, overrides)) == rows(load_config(written, overrides))


def test_what_overrides_do_not_change_stays_as_it_was_saved(run: Path) -> None:
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["trainer"]["weight_decay"] = 0.25  # as another version of agentrl may have it by default
    saved["rollout"]["deadlines"]["generate"] = 77.0
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    for overrides in (["steps=30"], ["trainer=fsdp"]):
        config = load_config(run / "config.yaml", overrides).config
        assert config.trainer.settings.model_dump()["weight_decay"] == 0.25
        assert config.rollout.deadlines.generate == 77.0
    longer = load_config(run / "config.yaml", ["rollout.sampling.max_tokens=4000"]).config
    assert longer.rollout.deadlines.generate > 500


def test_what_a_user_has_written_and_the_new_component_lacks_is_refused_by_its_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        f"{CONFIG}run_dir: {tmp_path / 'run'}\nengine: {{name: local, prefix_cache: false}}\n"
    )
    with opened(load_config(path))[0] as begun:
        folder = begun.folder
    with pytest.raises(
        ConfigError, match=r"engine\.prefix_cache: no such setting \(.*run/config\.yaml:\d+\)"
    ):
        load_config(folder / "config.yaml", ["engine=openai", "engine.url=http://127.0.0.1:1"])


# What a resume says, keeps and refuses.


def test_a_resume_names_what_it_changes_and_keeps_each_config(run: Path) -> None:
    first = (run / "config.yaml").read_text()
    assert resumed(run) == ""
    printed = resumed(run, "trainer.lr=5e-4", "algorithm=rloo", "evaluation.tasks=8", step=3)
    assert printed.startswith("resuming after 3 steps with changes:\n")
    assert "  trainer.lr: 0.001 -> 0.0005\n" in printed
    assert "  algorithm.name: grpo -> rloo\n" in printed
    assert "run_dir" not in printed
    assert resumed(run) == ""
    assert "  steps: 20 -> 40\n" in resumed(run, "steps=40", "trainer.schedule=constant")
    assert sorted(path.name for path in run.glob("config*.yaml")) == [
        "config.0.yaml",
        "config.1.yaml",
        "config.2.yaml",
        "config.yaml",
    ]
    assert (run / "config.0.yaml").read_text() == first
    kept = [load_config(run / f"config.{number}.yaml").config for number in range(3)]
    assert [(one.trainer.settings.model_dump()["lr"], one.steps) for one in kept] == [
        (0.001, 20),
        (0.0005, 20),
        (0.0005, 40),
    ]
    assert (run / "config.2.yaml").read_text() == (run / "config.yaml").read_text()
    changes = [json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines()]
    assert [(row["config"], row["step"]) for row in changes] == [(0, 0), (1, 3), (2, 3)]
    assert changes[1]["changed"]["trainer.lr"] == [0.001, 0.0005]
    shown = RunFolder("run", run).changes()
    assert [(row["config"], row["step"]) for row in shown] == [(0, 0), (1, 3), (2, 3)]
    write_report(run, run / "report.html")
    assert "trainer.lr: 0.001 → 0.0005" in (run / "report.html").read_text()
    origins = json.loads((run / "origins.json").read_text())
    assert origins["trainer.lr"] == "command line, from step 3 on"
    assert origins["algorithm.entropy_bonus"].endswith("lake.yaml:6")
    assert origins["trainer.eps"] == "default"


def test_a_config_that_somebody_has_edited_in_the_folder_counts_as_changed(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.002"))
    assert "  trainer.lr: 0.001 -> 0.002\n" in resumed(run)
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(ConfigError, match="seed: 0 -> 1"):
        resumed(run)


def test_a_run_of_an_earlier_version_keeps_the_config_that_it_had(run: Path) -> None:
    first = (run / "config.yaml").read_text()
    for path in (run / "config.0.yaml", run / "changes.jsonl", run / "origins.json"):
        path.unlink()
    assert "steps: 20 -> 21" in resumed(run, "steps=21", "trainer.schedule=constant")
    assert (run / "config.0.yaml").read_text() == first
    assert load_config(run / "config.1.yaml").config.steps == 21


DEFINING = [
    ("seed=6", "seed: 0 -> 6"),
    ("model=small", "model.name: tiny -> small"),
    ("model.history=template", "model.history: extend -> template"),
    ("env=guess_number", "env.name: frozen_lake -> guess_number"),
    ("env.options.size=5", "env.options.size: 4 -> 5"),
    ("env.rules='Be quick.'", 'env.rules: "" -> Be quick.'),
    ("env=[frozen_lake, guess_number]", "env.mixture.0.name: (none) -> frozen_lake"),
    ("recipe={name: sft, rejection: {}}", "recipe.name: policy_gradient -> sft"),
    ("tasks={name: levels, levels: [{size: 3}, {size: 4}]}", "tasks.name: seeded -> levels"),
]


@pytest.mark.parametrize(("override", "named"), DEFINING)
def test_what_would_make_another_run_of_it_is_refused(run: Path, override: str, named: str) -> None:
    changes = ConfigHistory(run).changes(again(run, override))
    with pytest.raises(ConfigError) as refused:
        refuse_another_run(changes, run)
    assert named in str(refused.value)
    assert "run_dir=ANOTHER for a new run" in str(refused.value)


def test_it_is_taken_with_change(run: Path) -> None:
    with pytest.raises(ConfigError, match="--change"):
        resumed(run, "seed=6")
    assert not (run / "config.1.yaml").exists()
    assert "  seed: 0 -> 6\n" in resumed(run, "seed=6", change=True)
    assert load_config(run / "config.1.yaml").config.seed == 6


@pytest.mark.parametrize(
    "override",
    ["env.isolation=process", "rollout.group_size=4", "reward.weight=2", "env.exhausted=others"],
)
def test_what_makes_no_other_run_of_it_needs_no_more_than_to_be_said(
    run: Path, override: str
) -> None:
    changes = ConfigHistory(run).changes(again(run, override))
    assert [change.key for change in changes] == [override.partition("=")[0]]
    refuse_another_run(changes, run)


def test_the_command_names_all_that_it_refuses_before_anything_else_is_looked_at(run: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    with pytest.raises(ConfigError) as refused:
        train(
            Path("seed=6"),
            ["model=/another/model", "env=guess_number", "steps=99"],
            resume=str(run),
        )
    for named in (
        "seed: 0 -> 6",
        "model.name: tiny -> /another/model",
        "env.name: frozen_lake -> guess_number",
    ):
        assert named in str(refused.value)
    assert "steps" not in str(refused.value)
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before
    with pytest.raises(ConfigError, match="stays in its folder"):
        train(None, ["run_dir=elsewhere"], resume=str(run))
    with pytest.raises(ConfigError, match="--change is for a run to resume"):
        train(run / "config.yaml", change=True)


def test_auto_takes_another_config_only_with_change(written: Path, run: Path) -> None:
    at = f"run_dir={run}"
    other = load_config(written, ["trainer.lr=5e-4", "steps=30", at])
    with pytest.raises(ConfigError, match=r"trainer\.lr: 0\.001 -> 0\.0005"):
        was_begun(other)
    assert was_begun(other, change=True)
    assert was_begun(load_config(written, ["steps=30", at]))
    with pytest.raises(ConfigError, match="steps: 20 -> 10"):
        was_begun(load_config(written, ["steps=10", at]))


@pytest.mark.parametrize(
    ("state", "override", "message"),
    [
        (("trainer.pt",), "algorithm=ppo", "ppo needs a critic, and .*step_000001 has none"),
        (
            ("trainer.pt",),
            "trainer.lora.rank=4",
            "trains adapters, and .*step_000001 is of whole weights",
        ),
        (("trainer.pt",), "model=small", "step_000001 has other shapes than the model 'small'"),
    ],
)
def test_a_checkpoint_that_cannot_go_on_so_is_refused_before_the_start(
    run: Path, state: tuple[str, ...], override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*model=.*step_000001 run_dir=ANOTHER"):
        resumed(run, override, change=True, step=1, state=Saved(*state))
    assert not (run / "config.1.yaml").exists()


def test_a_refusal_to_go_back_leaves_the_later_checkpoints_in_place(run: Path) -> None:
    resumed(run, step=1, state=Saved("trainer.pt"))
    with opened(again(run, "checkpoint.keep=2"), resume=True)[0] as later:
        later.ledger.admit(1, Task("frozen_lake", 1, {}, "train-1"), 1)
        later.ledger.trained(1, {1: [1.0]})
        asyncio.run(later.save_checkpoint(2, Saved("trainer.pt")))
    with pytest.raises(ConfigError, match=r"trains adapters, and .*step_000001 is of whole"):
        opened(again(run, "trainer.lora.rank=4"), resume=True, step=1)
    (run / "data.json").write_text("{")
    with pytest.raises(ConfigError, match=r"data\.json cannot be read"):
        opened(again(run), resume=True, step=1)
    checkpoints = run / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step_000001", "step_000002"}
    (run / "data.json").unlink()
    with opened(again(run), resume=True, step=1)[0]:
        assert {path.name for path in checkpoints.iterdir()} == {"step_000001", "left-step_000002"}


def test_models_that_were_made_before_are_made_again_of_another_model(run: Path) -> None:
    (run / "model").mkdir()
    (run / "model_commit").write_text("0123\n")
    assert "set aside as left-model" in resumed(run, "model=small", change=True)
    assert (run / "left-model").is_dir()
    assert not (run / "model_commit").exists()


def test_a_change_of_demonstrations_that_are_made_already_is_said_to_change_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        f"{CONFIG}recipe: {{demonstrations: {{player: "
        f"'agentrl.envs.frozen_lake:careful_player'}}}}\n"
    )
    with opened(load_config(path, [f"run_dir={tmp_path / 'run'}"]))[0] as begun:
        pass
    assert notes(resumed(begun.folder, "recipe.demonstrations.lr=0.5")) == []
    (begun.folder / "demonstrations").mkdir()
    (text,) = notes(resumed(begun.folder, "recipe.demonstrations.lr=0.25"))
    assert (
        text
        == "recipe.demonstrations.lr: changes nothing any more, as demonstrations/ is made already"
    )


def test_open_tasks_of_an_environment_that_is_gone_are_cancelled(run: Path) -> None:
    with opened(again(run), resume=True)[0] as before:
        before.ledger.admit(0, Task("frozen_lake", 1, {}, "train-0"), 0)
        assert len(before.open_tasks(0)) == 1
    other = again(run, "env=guess_number", "env.options={}")
    with opened(other, resume=True, change=True)[0] as after:
        assert after.open_tasks(0) == []
        assert after.ledger.task_fates().cancelled == 1


# Learning rates.


def notes(printed: str) -> list[str]:
    return [
        line.removeprefix("note: ") for line in printed.splitlines() if line.startswith("note: ")
    ]


def test_a_warm_up_that_is_longer_than_the_run_is_said_before_the_start_and_kept(
    written: Path, tmp_path: Path
) -> None:
    overrides = [
        "trainer.warmup_steps=50",
        "algorithm=ppo",
        "critic.warmup_steps=20",
        f"run_dir={tmp_path / 'run'}",
    ]
    begun, printed = opened(load_config(written, overrides))
    with begun:
        (text,) = notes(printed.getvalue())
    assert text == (
        "trainer.warmup_steps is 50, and the run has 20 steps: the learning rate ends at 0.0004 "
        "and never reaches 0.001. Write fewer, such as trainer.warmup_steps=2"
    )
    kept = json.loads((tmp_path / "run" / "warnings.jsonl").read_text())
    assert (kept["step"], kept["text"]) == (0, text)


@pytest.mark.parametrize(
    ("overrides", "jump"),
    [
        (
            ["steps=40"],
            "from 0.000663 in step 9 to 0.000883 in step 10, as the cosine now ends after 40 "
            "steps, and ended after 20. To go on evenly, write trainer.schedule=constant "
            "trainer.lr=0.000663",
        ),
        (["trainer.warmup_steps=18"], "as the schedule has changed"),
        (["trainer.schedule=constant"], "to 0.001 in step 10, as the schedule has changed"),
        (["trainer.lr=5e-4"], None),
        (["algorithm.entropy_bonus=0"], None),
        (["steps=40", "trainer.schedule=constant", "trainer.lr=6e-4"], None),
    ],
)
def test_a_learning_rate_that_jumps_at_a_resume_is_said(
    run: Path, overrides: list[str], jump: str | None
) -> None:
    found = notes(resumed(run, *overrides, step=10))
    if jump is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith("trainer: the learning rate jumps from ")
        assert jump in found[0]


def test_recipes_that_learn_from_files_have_as_many_steps_as_those(written: Path) -> None:
    overrides = ["recipe=dpo", "recipe.preferences.path=pairs.jsonl", "trainer.warmup_steps=50"]
    config = load_config(written, overrides).config
    assert not list(notes_of_schedules(config))
    (text,) = notes_of_warm_up("trainer.warmup_steps", config.trainer.settings, 20, "recipe=dpo")
    assert text.startswith("trainer.warmup_steps is 50, and recipe=dpo has 20 steps")
    assert not list(
        notes_of_warm_up("trainer.warmup_steps", config.trainer.settings, 50, "recipe=dpo")
    )
