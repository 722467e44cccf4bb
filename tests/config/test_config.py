"""Configs: strict, with the way out in every error and the origin of every value."""

from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import yaml

from agentrl.config import RENAMED, check_options, load_config, parse_config
from agentrl.errors import ConfigError, PluginError
from agentrl.plugins import load
from agentrl.protocols import Curriculum
from agentrl.runs.task_sources import task_source
from agentrl.settings.base import Settings
from agentrl.tasks.seeded import SeededTasks
from agentrl.trajectory import Task

BASE = "env: frozen_lake\nsteps: 3\ntrainer:\n  lr: 1e-3\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "lake.yaml"
    file.write_text(BASE)
    return file


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_an_unknown_key_names_the_nearest_right_one_and_where_it_was_written(path):
    said = problem(path, "trainer.lrr=1")
    assert "trainer.lrr: no such setting (command line). Did you mean 'lr'?" in said
    path.write_text(BASE + "rollout:\n  group_sise: 4\n")
    assert "Did you mean 'group_size'?" in problem(path)
    assert "lake.yaml:6" in problem(path)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (b"{}", "a mapping of settings"),
        (b"", "a mapping of settings"),
        (b"- 1", "a mapping of settings"),
        (b"env: [", "not YAML"),
        (b"env: \xff", "cannot be read"),
    ],
)
def test_a_file_that_is_no_config_is_told_by_its_name(path, written, expected):
    path.write_bytes(written)
    said = problem(path)
    assert "lake.yaml" in said
    assert expected in said


def test_a_config_is_validated_again_without_a_look_into_what_is_installed(path, monkeypatch):
    load_config(path)
    # Each distribution's metadata takes milliseconds, and every rule asks for plug-ins.
    monkeypatch.setattr(PathDistribution, "read_text", lambda self, name: pytest.fail(name))
    load_config(path)


def test_a_folder_in_place_of_a_config_is_answered_with_what_to_write(path):
    run = path.parent / "run"
    run.mkdir()
    assert problem(run) == f"{run} is a folder, not a config file."
    assert (
        problem(path.parent)
        == f"{path.parent} is a folder, not a config file. YAML files there: {path}"
    )
    (run / "config.yaml").write_text(BASE)
    assert (
        f"{run} is the folder of a run. `agentrl train --resume {run}` goes on with it"
        in problem(run)
    )


def test_a_missing_config_is_answered_with_those_that_are_there_or_with_commands_that_need_none(
    path,
):
    assert problem(path.with_name("lkae.yaml")).endswith(f"Did you mean {str(path)!r}?")
    assert problem(path.with_name("x")).endswith(f" YAML files there: {path}")
    assert "`agentrl demo` trains an example without one" in problem(
        path.parent / "examples" / "frozen_lake.yaml"
    )
    assert problem(path.with_name("steps=3")).endswith(" The config comes before what overrides it")


def test_all_problems_are_said_at_once(path):
    said = problem(path, "trainer.lrr=1", "stepps=1", "rollout.deadlines.stepp=1", "seed=-1")
    for name in ("trainer.lrr", "stepps", "rollout.deadlines.stepp", "seed"):
        assert name in said
    assert "Did you mean 'step'?" in said


def test_an_unknown_plug_in_names_the_nearest_right_one(path):
    assert "no engine named 'vlm'. Did you mean 'vllm'?" in problem(path, "engine=vlm")
    assert "Did you mean 'frozen_lake'?" in problem(path, "env=frozen_lak")
    assert "Did you mean 'policy_gradient'?" in problem(path, "recipe=policy_gradiant")
    assert "Did you mean 'tensorboard'?" in problem(path, "trackers=[tensorbord]")


def test_short_forms_set_the_name(path):
    config = load_config(
        path, ["engine=local", "cluster=local", "trainer=local", "model=some/folder"]
    ).config
    assert (config.engine.name, config.trainer.name, config.model.name) == (
        "local",
        "local",
        "some/folder",
    )
    assert config.trainer.settings.lr == 1e-3
    path.write_text(BASE + "engine: local\n")
    assert load_config(path, ["engine.max_batch=7"]).config.engine.settings.max_batch == 7


def test_the_command_line_wins_and_every_value_says_where_it_came_from(path):
    rows = {key: (value, origin) for key, value, origin in load_config(path, ["steps=9"]).rows()}
    assert rows["steps"] == (9, "command line")
    assert rows["trainer.lr"][0] == 1e-3
    assert rows["trainer.lr"][1].endswith("lake.yaml:4")
    assert rows["env.name"][1].endswith("lake.yaml:1")
    assert rows["rollout.group_size"] == (8, "default")
    assert rows["run_dir"][0] == "runs/lake"


def test_the_resolved_config_reads_back_to_itself(path, tmp_path):
    config = load_config(path, ["rollout.max_staleness=2", "env.options={size: 4}"]).config
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again).config == config
    env = yaml.safe_load(config.to_yaml())["env"]
    assert (env["name"], env["options"], env["isolation"]) == ("frozen_lake", {"size": 4}, None)


SECTIONS = {
    "one part": "env: frozen_lake\nreward: environment",
    "several parts": "env: frozen_lake\nreward: [environment, {name: length, free: 1, limit: 9}]",
    "a mixture": (
        "env: [{name: frozen_lake, weight: 2, reward: [environment, exact]}, {name: text_maze}]\n"
        "trackers: []"
    ),
    "suites": (
        "env: frozen_lake\nevaluation:\n"
        "  suites: [{name: hard, env: {name: frozen_lake, options: {size: 5}}}]\n"
        "trackers: [tensorboard]\nrollout: {workers: {min: 1, max: 2}}"
    ),
    "a template": (
        "env: qa\ntasks: {name: dataset, data: rows.jsonl, prompt: '{question}'}\nreward: exact"
    ),
}


@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS)
def test_a_config_is_read_in_another_process_as_it_was_written(sections, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(sections)
    config = load_config(path).config
    assert parse_config(config.to_yaml()) == config


def test_a_value_of_a_wrong_type_says_what_was_given(path):
    assert "rollout.group_size" in problem(path, "rollout.group_size=many")
    assert "got 'many'" in problem(path, "rollout.group_size=many")
    assert "steps.x (command line): steps is 3, not a section" in problem(path, "steps.x=1")
    assert "write key=value" in problem(path, "steps")


@pytest.mark.parametrize(
    "override",
    [
        'model.name=""',
        'model.revision=""',
        'tasks={name: dataset, data: ""}',
        'tasks={name: dataset, data: d.jsonl, key: [""]}',
        'evaluation.suites=[{name: puzzles, data: ""}]',
        'env.python=""',
        'gateway.host=""',
        'gateway.token_env=""',
        'weights.host=""',
        'trainer.device=""',
        'trackers=[{name: wandb, project: ""}]',
    ],
)
def test_an_empty_text_is_no_name(path: Path, override: str) -> None:
    assert "at least 1 character, got ''" in problem(path, override)


@pytest.mark.parametrize(
    "override",
    [
        'run_dir=""',
        "run_dir=",
        'model.chat_template=""',
        'weights.folder=""',
        'recipe={name: sft, recordings: {path: ""}}',
        'algorithm={name: distill, teacher: ""}',
        'reward={name: reward_model, path: ""}',
    ],
)
def test_an_empty_text_does_not_name_the_current_folder(path: Path, override: str) -> None:
    said = problem(path, override)
    assert "is no path (command line): write that of a file or folder (. is the current" in said


def test_the_current_folder_can_be_named(path: Path) -> None:
    assert load_config(path, ["run_dir=."]).config.run_dir == Path()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "env.options.sise=4",
            (
                "env.options.sise: no such setting (command line). Did you mean 'size'? Known here:"
                " size"
            ),
        ),
        ("env.options.size=many", "env.options.size: Input should be a valid integer"),
        ("env.options.p=7", "env.options.p: Input should be less than or equal to 1"),
        (
            "env=[{name: frozen_lake, options: {sise: 4}}, guess_number]",
            "env.mixture.0.options.sise: no such setting",
        ),
        (
            "evaluation.suites=[{name: a, env: {name: frozen_lake, options: {sise: 4}}}]",
            (
                "evaluation.suites.0.env.options.sise: no such setting (command line). Did you mean"
                " 'size'?"
            ),
        ),
    ],
)
def test_a_wrong_option_of_an_environment_is_told_before_anything_starts(path, override, said):
    with pytest.raises(ConfigError) as caught:
        check_options(load_config(path, [override]))
    assert said in str(caught.value)


def test_options_that_tasks_or_wrappers_see_to_are_left_to_them(path):
    # Whose prompts come from the rows.
    check_options(load_config(path, ["env=qa", "tasks=questions.jsonl"]))
    check_options(
        load_config(path, ["env.options.mine=4", "env.wrappers=[{name: time_limit, turns: 3}]"])
    )


def test_a_missing_file_names_one_that_exists(path):
    assert "lake.yaml'?" in problem(path.with_name("lak.yaml"))


def test_a_plug_in_by_address_is_loaded_and_a_wrong_one_explained():
    assert load("envs", "agentrl.envs.calculator:Calculator").__name__ == "Calculator"
    with pytest.raises(PluginError, match=r"write 'agentrl\.envs\.calculator:Calculator' instead"):
        load("envs", "envs.calculator:Calculator")
    with pytest.raises(PluginError, match="Did you mean 'Calculator'"):
        load("envs", "agentrl.envs.calculator:Calculater")
    with pytest.raises(PluginError, match="cannot import 'no_such_package'"):
        load("envs", "no_such_package:Env")


@pytest.mark.parametrize(
    "raised", ["SystemExit('usage: game.py')", "__import__('asyncio').CancelledError"]
)
def test_a_plug_in_whose_import_exits_is_explained(raised, tmp_path, monkeypatch):
    (tmp_path / "exits_when_imported.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        PluginError,
        match=r"raised (SystemExit: usage: game.py|CancelledError) \(.*exits_when_imported.py:1",
    ):
        load("envs", "exits_when_imported:Env")
    with pytest.raises(
        PluginError,
        match=r"raised (SystemExit: usage: game.py|CancelledError) \(.*exits_when_imported.py:1",
    ):
        load("envs", f"file:{tmp_path / 'exits_when_imported.py'}:Env")


@pytest.mark.parametrize(
    "name", [path.name for path in (Path(__file__).parents[2] / "examples").glob("*.yaml")]
)
def test_an_example_is_a_valid_config_whose_player_exists(name):
    loaded = load_config(Path(__file__).parents[2] / "examples" / name)
    if demonstrations := getattr(loaded.config.recipe.settings, "demonstrations", None):
        assert callable(load("players", demonstrations.player))


def test_a_key_without_a_value_says_so(path):
    path.write_text(BASE.replace("steps: 3", "steps:") + "placement: {engine: 0, 7}\n")
    said = problem(path)
    assert "steps: Input should be a valid integer, got None" in said
    assert "quote it" in said


def test_a_value_that_is_no_yaml_says_so(path):
    assert "cannot read the value of the override 'trainer={name:': this is not YAML" in problem(
        path, "trainer={name:"
    )


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("+trainer.lr=1e-3", "trainer.lr=1e-3"),
        ("++trainer.lr=1e-3", "trainer.lr=1e-3"),
        ("--trainer.lr=1e-3", "trainer.lr=1e-3"),
        ("-steps=4", "steps=4"),
        ("~reference", "reference=null"),
        (" trainer.lr = 1e-3", "trainer.lr=1e-3"),
        ("trainer..lr=1e-3", "trainer.lr=1e-3"),
        ("trainer.lr: 1e-3", "trainer.lr=1e-3"),
        ("trainer.lr:=1e-3", "trainer.lr=1e-3"),
        ("reward[0].weight=2", "reward.0.weight=2"),
        ("env[options]['size']=4", "env.options.size=4"),
        ("+env=https://me:secret@host", "env=https://***@host"),
        ("steps", "key=value, such as trainer.lr=1e-3"),
        ("=4", "key=value, such as trainer.lr=1e-3"),
        ("+", "key=value, such as trainer.lr=1e-3"),
    ],
)
def test_what_is_nearly_an_override_is_answered_with_the_right_form(
    path: Path, written: str, form: str
) -> None:
    said = problem(path, written)
    assert said.endswith(f": write {form}")
    assert "secret" not in said


def test_a_setting_in_a_file_that_is_written_as_an_override_is_answered_with_its_section(
    path: Path,
) -> None:
    path.write_text("env: frozen_lake\ntrainer.lr: 1e-3\n")
    assert "trainer.lr: write it within its section (" in problem(path)
    assert "lake.yaml:2), as `trainer: {lr: ...}`" in problem(path)


@pytest.mark.parametrize("value", ["0123", "1e5", "true", "3"])
def test_a_value_that_should_be_text_says_how_to_quote_it(path: Path, value: str) -> None:
    said = problem(path, f"model.revision={value}")
    assert (
        "is no text (command line): put quotes around it (model.revision=\"'...'\" for a shell)"
        in said
    )
    assert load_config(path, [f"model.revision='{value}'"]).config.model.revision == value


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "algorithm.normalizer=tokenz",
            "Input should be 'tokens' or 'trajectories' or a valid number, got 'tokenz'",
        ),
        (
            "algorithm.normalizer=-7.5",
            "Input should be greater than or equal to 0.000001, got -7.5",
        ),
        (
            "algorithm.normalizer=[1]",
            "Input should be 'tokens' or 'trajectories' or a valid number, got [1]",
        ),
        ("trainer.lora.targets=q_proj", "Input should be 'all-linear' or a list, got 'q_proj'"),
        (
            "trainer.lora.targets=[q_proj, {a: 1}]",
            ".1: Input should be a valid string, got {'a': 1}",
        ),
        (
            "rollout.context=ful",
            ".name: there is no 'ful': write one of full, last_k, scratchpad, summary",
        ),
        (
            "rollout.context={turns: 3}",
            ".name: missing: write one of full, last_k, scratchpad, summary",
        ),
        (
            "env.agents={b: {name: frozn}}",
            ".b.name: there is no 'frozn': write one of policy, frozen, scripted",
        ),
        (
            "simulation.episode_seconds={kind: gama}",
            ".kind: there is no 'gama': write one of constant, uniform",
        ),
        (
            "tasks={data: x.jsonl, held_out: [1]}",
            ".held_out: Input should be a valid number or a valid string",
        ),
        ("rollout.budget=3", "Input should be a mapping, got 3"),
        ("reference={nme: 2}", "the algorithm 'grpo', as configured, uses none"),
    ],
)
def test_a_wrong_value_where_several_types_may_stand_is_told_once(
    path: Path, override: str, line: str
) -> None:
    said = problem(path, override).replace(" (command line)", "")
    assert said.startswith(override.partition("=")[0])
    assert line in said
    assert "\n" not in said


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_setting_by_its_old_name_is_refused_with_the_new_one(path, old, new):
    old, new = old.replace(".N.", ".0."), new.replace(".N.", ".0.")
    assert f"{old}: renamed to {new} (command line)" in problem(path, f"{old}=1")


def test_a_new_name_is_one_that_there_is(path):
    known = {key for key, _, _ in load_config(path, ["recipe.demonstrations.player=m:f"]).rows()}
    known |= {
        key
        for key, _, _ in load_config(
            path, ["recipe=reward_model", "recipe.preferences.path=x"]
        ).rows()
    }
    path.write_text("env: [frozen_lake]\nevaluation: {suites: [{name: hard, env: frozen_lake}]}\n")
    known |= {key.replace(".0.", ".N.") for key, _, _ in load_config(path).rows()}
    for new in RENAMED.values():
        assert any(key == new or key.startswith(f"{new}.") for key in known), new


def test_a_recipe_has_settings_of_its_own(path):
    settings = load_config(
        path, ["recipe.demonstrations.player=m:f", "recipe.demonstrations.episodes=7"]
    )
    assert settings.config.recipe.settings.demonstrations.episodes == 7
    assert "there is nothing to imitate: name a player" in problem(path, "recipe=sft")
    assert "recipe.preferences: no such setting (command line)" in problem(
        path, "recipe.preferences.path=x"
    )
    assert "Did you mean 'episodes'?" in problem(
        path, "recipe.demonstrations={player: m:f, episode: 3}"
    )


class Levels:
    """A curriculum: the level of its tasks rises with success."""

    class Config(Settings):
        """Where it begins."""

        level: int = 1

    def __init__(self, config, env, seed, split, options):
        self.level, self.inner = config.level, SeededTasks(config, env, seed, split, options)

    def task(self, index):
        task = self.inner.task(index)
        return Task(task.env, task.seed, {**task.options, "level": self.level}, task.id)

    def observe(self, index, task, rewards_G):
        self.level += all(rewards_G)


def test_a_config_names_where_its_tasks_come_from(path):
    loaded = load_config(
        path, [f"tasks={Levels.__module__}:Levels", "tasks.level=3", "env.options={size: 6}"]
    ).config
    source = task_source(loaded, "held-out")
    assert isinstance(source, Curriculum)
    source.observe(0, source.task(0), [1.0, 1.0])
    seeded = task_source(load_config(path, ["env.options={size: 6}"]).config, "held-out").task(5)
    assert source.task(5) == Task("frozen_lake", seeded.seed, {"size": 6, "level": 4}, seeded.id)
    assert "tasks.levle: no such setting" in problem(
        path, f"tasks={Levels.__module__}:Levels", "tasks.levle=3"
    )
    assert "no task source named 'seedd'. Did you mean 'seeded'?" in problem(path, "tasks=seedd")


def test_groups_of_one_are_refused_where_members_are_compared(path: Path) -> None:
    assert "compares the members of a group" in problem(path, "rollout.group_size=1")
    assert "filters every group of one member" in problem(
        path, "rollout.group_size=1", "algorithm=ppo", "rollout.filter_zero_variance=true"
    )
    assert (
        load_config(path, ["rollout.group_size=1", "algorithm=ppo"]).config.rollout.group_size == 1
    )


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm=reinforce", "algorithm.reward_to_go=false", "batch_processing.normalize=batch"],
        ["algorithm=reinforce_pp"],
    ],
)
def test_a_batch_of_one_episode_is_refused_where_a_batch_is_normalised(
    path: Path, settings: list[str]
) -> None:
    alone = ["rollout.group_size=1", "rollout.groups_per_step=1"]
    assert "compares the episodes of a batch" in problem(path, *alone, *settings)
    assert load_config(path, ["rollout.group_size=1", "rollout.groups_per_step=2", *settings])
    assert load_config(path, [*alone, "algorithm=reinforce"])


FILTER, KEEP = "rollout.filter_zero_variance=true", "batch_processing.keep_variance=0.9"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        *[
            ((f"algorithm={name}", FILTER), "asks a critic")
            for name in ("ppo", "turn_ppo", "archer")
        ],
        *[((f"algorithm={name}", KEEP), "asks a critic") for name in ("ppo", "turn_ppo", "archer")],
        *[
            ((f"algorithm={name}", both), "the whole batch")
            for name in ("reinforce_pp", "rebn")
            for both in (FILTER, KEEP)
        ],
        (("algorithm=rae", FILTER), "what earlier batches have earned"),
        (("algorithm=distill", FILTER), "adds to them what no reward says"),
        (("recipe=distill", FILTER), "recipe=distill adds to them what no reward says"),
        (("algorithm.kl_reward=0.1", KEEP), "what no reward says (kl_reward)"),
        (("algorithm=reinforce", KEEP), "does not compare the members"),
        (("algorithm=rejection", KEEP), "does not compare the members"),
        (("recipe=sft", "recipe.rejection={}", KEEP), "recipe=sft does not compare the members"),
        (
            ("algorithm=gigpo", FILTER, "batch_processing.normalize=batch"),
            "would move those that are 0",
        ),
        (
            ("algorithm.reward_to_go=true", KEEP, "batch_processing.normalize=environment"),
            "would move those",
        ),
        (
            ("algorithm=reinforce", FILTER, "batch_processing.normalize=batch"),
            "would move those that are 0",
        ),
    ],
)
def test_groups_are_left_out_only_where_they_alone_tell_what_they_teach(
    path: Path, settings, why: str
) -> None:
    assert why in problem(path, *settings)


@pytest.mark.parametrize(
    "settings",
    [
        *[
            (f"algorithm={name}", both)
            for name in ("grpo", "rloo", "gspo", "gigpo", "dpo")
            for both in (FILTER, KEEP)
        ],
        ("algorithm.reward_to_go=true", FILTER, KEEP),
        ("algorithm=reinforce", FILTER),
        ("algorithm=rejection", FILTER),
        (FILTER, KEEP, "batch_processing.normalize=batch"),
    ],
)
def test_groups_may_be_left_out_where_they_alone_tell_what_they_teach(path: Path, settings) -> None:
    assert load_config(path, list(settings)).config


@pytest.mark.parametrize("normalize", ["batch", "environment"])
@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm=dpo"],
        ["algorithm=rejection"],
        ["algorithm=distill", "algorithm.reward_weight=1"],
        ["recipe=sft", "recipe.rejection={}"],
        ["recipe=distill"],
    ],
)
def test_labels_and_weights_are_not_normalised(
    path: Path, settings: list[str], normalize: str
) -> None:
    assert "labels or weights" in problem(
        path, *settings, f"batch_processing.normalize={normalize}"
    )


def test_a_setting_that_is_gone_is_refused_with_what_to_do(path: Path) -> None:
    assert "trainer.row_tokens: no such setting any more" in problem(path, "trainer.row_tokens=128")
    assert "leave it out (see micro_batch_tokens)" in problem(
        path, "trainer=fsdp", "trainer.row_tokens=128"
    )
    assert "write activation_checkpointing=full" in problem(
        path, "trainer.gradient_checkpointing=true"
    )


def test_parts_of_episodes_are_refused_where_nothing_says_what_follows_them(path: Path) -> None:
    rule = "rollout.staleness_rule=segment"
    for without in ([], ["algorithm=rloo"], ["algorithm=ppo", "algorithm.truncated=terminal"]):
        assert "Choose algorithm=ppo or algorithm=turn_ppo" in problem(path, rule, *without)
    compared = (
        "reward={name: judge_pairwise, url: 'http://localhost:1/v1', model: m, better: shorter}"
    )
    assert "'judge_pairwise' compares whole ones" in problem(path, rule, "algorithm=ppo", compared)
    for filtered in ("rollout.filter_zero_variance=true", "batch_processing.keep_variance=0.9"):
        assert "before their rewards are known" in problem(
            path, rule, "algorithm=turn_ppo", filtered
        )
    assert (
        load_config(path, [rule, "algorithm=turn_ppo"]).config.rollout.staleness_rule == "segment"
    )


@pytest.mark.parametrize(
    ("written", "overrides", "names", "project"),
    [
        ("", (), ["tensorboard"], None),
        ("trackers: []", (), [], None),
        (
            "trackers: [tensorboard, {name: wandb, project: lakes}]",
            (),
            ["tensorboard", "wandb"],
            "lakes",
        ),
        (
            "trackers: [tensorboard, wandb]",
            ("trackers.1.project=lakes",),
            ["tensorboard", "wandb"],
            "lakes",
        ),
        (
            "trackers: [tensorboard]",
            ("trackers=[{name: wandb, project: lakes}]",),
            ["wandb"],
            "lakes",
        ),
        ("trackers: [tensorboard, mlflow]", ("trackers=wandb",), ["wandb"], None),
    ],
)
def test_trackers_are_a_list_of_names_with_settings_and_a_saved_config_says_the_same(
    tmp_path, written, overrides, names, project
):
    path = tmp_path / "lake.yaml"
    path.write_text(f"env: frozen_lake\n{written}\n")
    config = load_config(path, overrides).config
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    for one in (config, load_config(again).config):
        assert [tracker.name for tracker in one.trackers] == names
        assert (
            getattr(one.trackers[-1].settings, "project", None) == project
            if names
            else project is None
        )


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (
            "trackers: [{name: wandb, projct: lakes}]",
            r"trackers.0.projct: no such setting.*Did you mean 'project'\?",
        ),
        ("trackers: [wand]", r"trackers.0.name: no tracker named 'wand'. Did you mean 'wandb'\?"),
        (
            "trackers: {0: wandb, project: lakes}",
            r"trackers.project.*in trackers.0.project=NAME; there is 0 is wandb",
        ),
        ("trackers: [wandb, {name: wandb, project: lakes}]", "trackers: wandb is named twice"),
        ("trackers: 3", "trackers: 3 is no list of trackers.*write \\[\\] for none"),
    ],
)
def test_what_is_wrong_with_a_tracker_s_settings_is_said(tmp_path, written, says):
    path = tmp_path / "lake.yaml"
    path.write_text(f"env: frozen_lake\n{written}\n")
    with pytest.raises(ConfigError, match=says):
        load_config(path)
