"""The command line, as a user meets it."""

import re
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from agentrl.cli import training
from agentrl.config import check_installed, load_config
from agentrl.errors import ConfigError
from agentrl.ledger.ledger import Ledger
from agentrl.trajectory import Task
from tests.processes import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


def test_a_mistyped_setting_is_explained_exits_with_two_and_starts_nothing(tmp_path):
    run = tmp_path / "run"
    arguments = ("train", "examples/frozen_lake.yaml", "trainer.lrr=1", f"run_dir={run}")
    # In a process of its own, as a user meets it; all others here are called in this one.
    done = subprocess.run(
        [sys.executable, "-c", "from agentrl.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert "trainer.lrr: no such setting (command line). Did you mean 'lr'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not run.exists()


def test_envs_lists_the_built_in_ones_with_their_origin(agentrl):
    done = agentrl("envs")
    assert done.returncode == 0
    for name in ("frozen_lake", "guess_number", "calculator", "gymnasium"):
        assert name in done.stdout
    assert "agentrl" in done.stdout


def test_check_env_passes_a_good_one_and_refuses_a_bad_one(agentrl, tmp_path):
    good = agentrl("check-env", "shop", "--gold", "agentrl.envs.shop:strong_player")
    assert good.returncode == 0
    verdict, *remarks = good.stdout.splitlines()
    assert verdict == "shop keeps the contract"
    assert [remark.split("]")[0] for remark in remarks] == ["[snapshot"]
    no_gold = agentrl("check-env", "guess_number", "--gold", "agentrl.envs.shop:strong_player")
    assert no_gold.returncode == 1
    assert (
        "[gold] the player given as gold raised TypeError: this player plays Shop" in no_gold.stdout
    )
    (tmp_path / "bad.py").write_text(
        "import random\n"
        "class Bad:\n"
        "    isolation = 'inline'\n"
        "    def reset(self, *, seed, options): return 'hi', {}\n"
        "    def step(self, action): return 'x', random.random(), False, False, {}\n"
        "    def close(self): pass\n"
    )
    done = agentrl("check-env", "bad:Bad", cwd=tmp_path)
    assert done.returncode == 1
    assert "global" in done.stdout


def test_config_shows_values_and_origins(agentrl):
    done = agentrl("config", "examples/frozen_lake.yaml", "steps=7")
    assert done.returncode == 0
    assert "command line" in done.stdout
    assert "examples/frozen_lake.yaml" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "option", "form"),
    [
        (["--trainer.lr=1e-3"], "--trainer.lr", "trainer.lr=1e-3"),
        (["--trainer.lr", "1e-3"], "--trainer.lr", "trainer.lr=1e-3"),
        (["--steps=5"], "--steps", "steps=5"),
        (["-steps", "5"], "-steps", "steps=5"),
        (["steps=3", "--seed"], "--seed", "seed=VALUE"),
    ],
)
@pytest.mark.parametrize("command", ["train", "config", "eval", "plan", "simulate", "gateway"])
def test_a_setting_that_is_written_as_an_option_is_answered_with_the_right_form(
    agentrl, command, arguments, option, form
):
    done = agentrl(command, "examples/frozen_lake.yaml", *arguments)
    assert done.returncode == 2
    assert (
        f"there is no option {option}: a setting is written without dashes, {form}\n" in done.stderr
    )


def test_an_option_that_is_no_setting_is_answered_with_the_nearest_one(agentrl):
    done = agentrl("train", "examples/frozen_lake.yaml", "--resum=auto")
    assert done.returncode == 2
    assert "--resume" in done.stderr


def test_the_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["python -m agentrl", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("agentrl", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"agentrl {version('agentrl-train')}\n"


def test_the_version_is_that_of_the_package(agentrl):
    assert agentrl("--version").stdout == f"agentrl {version('agentrl-train')}\n"


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        (["com"], ["compare"]),
        (["train", "examples/frozen_lake.yaml", "trainer.lr"], ["trainer.lr="]),
        (["eval", "examples/frozen_lake.yaml", "rollout.group_s"], ["rollout.group_size="]),
        (["train", "no_such.yaml", "trainer"], []),
    ],
)
def test_a_shell_completes_commands_and_settings(agentrl, monkeypatch, line, completed):
    monkeypatch.setenv("_AGENTRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["agentrl", *line]))
    monkeypatch.setenv("COMP_CWORD", str(len(line)))
    assert agentrl().stdout.split() == completed


@pytest.mark.parametrize(
    "name", ["1e5", "2026-11-25", "0x10", "true", "a #b", "a: b", "it's", "[x]"]
)
def test_a_run_is_resumed_in_its_folder_whatever_that_is_called(
    agentrl, monkeypatch, tmp_path, name
):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.yaml").write_text("env: frozen_lake\n")
    resumed = []
    monkeypatch.setattr(training, "_run", lambda loaded, **_: resumed.append(loaded.config.run_dir))
    assert agentrl("train", "--resume", name, cwd=tmp_path).returncode == 0
    assert resumed == [Path(name)]


def test_config_shows_values_as_an_override_would_write_them(agentrl):
    done = agentrl(
        "config",
        "examples/frozen_lake.yaml",
        "env.options={a: '007', b: 1e-3, c: nan}",
        "env.options.d='x'",
    )
    rows = {
        line.split()[0]: line.split(maxsplit=2)[1]
        for line in done.stdout.splitlines()
        if line.startswith("env.")
    }
    assert rows["env.options.a"] == "'007'"
    assert (rows["env.options.b"], rows["env.options.c"], rows["env.isolation"]) == (
        "0.001",
        "nan",
        "null",
    )


def test_config_prints_a_run_as_a_config_file_and_with_the_origins_that_it_began_with(
    agentrl, tmp_path
):
    run, again = tmp_path / "run", tmp_path / "again.yaml"
    run.mkdir()
    loaded = load_config(
        ROOT / "examples" / "frozen_lake.yaml", ["env.options.id='007'", f"run_dir={run}"]
    )
    (run / "config.yaml").write_text(loaded.config.to_yaml())
    (run / "origins.json").write_text('{"seed": "long ago"}')
    done = agentrl("config", str(run), "seed=4", "--yaml")
    again.write_text(done.stdout)
    assert load_config(again).config == load_config(run / "config.yaml", ["seed=4"]).config
    assert "long ago" in agentrl("config", str(run)).stdout
    assert "long ago" not in agentrl("config", str(run), "seed=4").stdout
    assert "holds no run" in agentrl("config", str(tmp_path)).stderr


@pytest.mark.slow
def test_model_init_makes_a_model_that_loads_and_refuses_a_second(agentrl, tmp_path):
    made = agentrl("model", "init", str(tmp_path / "m"))
    assert made.returncode == 0, made.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.decode(tokenizer.encode("naïve ☃")) == "naïve ☃"
    assert model.config.vocab_size == len(tokenizer)
    assert agentrl("model", "init", str(tmp_path / "m")).returncode == 2
    assert agentrl("model", "init", str(tmp_path / "n"), "--size", "tini").returncode == 2


@pytest.mark.parametrize(
    "arguments", [("train",), ("train", "--resume", "runs/nowhere"), ("eval", "no.yaml")]
)
def test_missing_input_is_explained(agentrl, arguments):
    done = agentrl(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error:")


@pytest.mark.parametrize("setting", ["model=nowhere", "trackers=[wandb]", "env.options.sise=4"])
def test_what_is_missing_is_said_before_the_run_exists(agentrl, tmp_path, setting):
    run = tmp_path / "run"
    done = agentrl("train", "examples/frozen_lake.yaml", setting, f"run_dir={run}")
    assert done.returncode == 2
    assert setting.split("=")[0] in done.stderr
    assert not (run / "config.yaml").exists()


@pytest.mark.parametrize(
    ("setting", "missing"),
    [
        ("engine=vllm", ("vllm", "gpu")),
        ("cluster=ray", ("ray", "ray")),
        ("trainer=deepspeed", ("deepspeed", "deepspeed")),
        ("trainer.lora.rank=4", ("peft", "lora")),
    ],
)
def test_an_extra_that_is_missing_is_said_before_the_run_exists(
    agentrl, tmp_path, monkeypatch, setting, missing
):
    """Demonstrations would be played and imitated first."""
    module, extra = missing
    monkeypatch.setitem(sys.modules, module, None)
    run = tmp_path / "run"
    done = agentrl("train", "examples/frozen_lake.yaml", setting, f"run_dir={run}")
    assert done.returncode == 2
    assert (
        f"needs the package {module}, which is not installed: pip install 'agentrl-train[{extra}]'"
        in done.stderr
    )
    assert not run.exists()


def test_what_is_missing_here_may_be_installed_on_the_machines_of_a_cluster_that_is_joined(
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    joined = ["engine=vllm", "cluster={name: ray, address: 'head:6379'}"]
    check_installed(load_config(ROOT / "examples" / "frozen_lake.yaml", joined).config)
    with pytest.raises(ConfigError, match="engine=vllm needs the package vllm"):
        check_installed(
            load_config(
                ROOT / "examples" / "frozen_lake.yaml", ["engine=vllm", "cluster=ray"]
            ).config
        )


def test_ledger_says_what_became_of_a_run_that_is_going_on_and_of_each_id(agentrl, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    with Ledger(run / "ledger.sqlite") as ledger:
        for number in range(3):
            ledger.admit(number, Task("frozen_lake", number, {}, f"train-{number:06d}"), 0)
            ledger.begin(number, 0, 0)
        ledger.end(0, 0, 0, "failed", "environment: [it] broke")
        ledger.begin(0, 0, 1)
        ledger.trained(4, {0: [1.0], 1: [0.5]})
        ledger.flush()
        overview = agentrl("ledger", str(run))
        assert overview.returncode == 0, overview.stderr
        assert ["trained", "2", "66.7", "train-000000", "2", "50.0", "train-000000/0/1"] in [
            line.split() for line in overview.stdout.splitlines()
        ]
        assert "environment: [it] broke" in overview.stdout
        assert "Open: train-000002/0/0" in overview.stdout
        one = agentrl("ledger", str(run), "train-000000/0/0")
        assert one.returncode == 0, one.stderr
        assert one.stdout.startswith(
            "train-000000/0/0 was not trained: it failed: environment: [it] broke; "
            "attempt 1 took its place and was trained at step 4"
        )
    unknown = agentrl("ledger", str(run), "tran-000001")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: no task 'tran-000001'. Did you mean 'train-000001'?")


def test_ledger_of_a_folder_without_one_is_an_error(agentrl, tmp_path):
    assert agentrl("ledger", str(tmp_path)).returncode == 2
    (tmp_path / "config.yaml").write_text("")
    done = agentrl("ledger", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no ledger")


def test_the_demo_leaves_out_groups_without_an_advantage_unless_told_otherwise(
    monkeypatch, tmp_path
):
    configs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "_run", lambda loaded, **options: configs.append(loaded.config))
    training.demo(["steps=1"])
    training.demo(["algorithm=ppo", "batch_processing.keep_variance=1"])
    assert [(config.steps, config.batch_processing.keep_variance) for config in configs] == [
        (1, 0.999),
        (12, 1.0),
    ]


@pytest.mark.parametrize("name", ["with space", "[lr=0.1]", "[/b]", "it's"])
def test_the_commands_that_a_run_proposes_name_its_folder_whatever_that_is_called(
    monkeypatch, capsys, tmp_path, name
):
    summary = {
        "success_before_interval": None,
        "success_after_interval": None,
        "largest_staleness": 0,
        "max_staleness": 0,
        "tasks": {"trained": 1, "total": 1, "masked": 0, "failed": 0},
    }
    training._print_summary(tmp_path / name, summary)
    proposed = re.findall("agentrl eval (.*)", said := capsys.readouterr().out)
    assert [shlex.split(words) for words in proposed] == [[str(tmp_path / name)]]
    assert f"in {tmp_path / name}:" in said


def test_a_folder_of_a_run_that_is_named_as_a_config_is_told_how_to_go_on(agentrl, tmp_path):
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "config.yaml").write_text("env: frozen_lake\n")
    said = agentrl("train", str(folder)).stderr
    proposed = ["agentrl", "train", "--resume", str(folder)]
    assert list(map(shlex.split, re.findall("`(.*?)`", said))) == [proposed]


def test_a_file_is_not_written_over_a_folder(agentrl, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("env: frozen_lake\n")
    (tmp_path / "shared").mkdir()
    wrong = agentrl("report", str(tmp_path / "run"), "-o", str(tmp_path / "shared"))
    assert wrong.returncode == 2
    assert f"{tmp_path / 'shared'} is a folder, and this writes a file: name one" in wrong.stderr


@pytest.mark.parametrize(
    "arguments", [["train", "CONFIG", "run_dir=\udcff"], ["tasks", "\udcff.jsonl"]]
)
def test_bytes_that_are_no_utf_8_are_refused_in_a_sentence(agentrl, tmp_path, arguments):
    config = tmp_path / "config.yaml"
    config.write_text("env: frozen_lake\n")
    wrong = agentrl(*(str(config) if one == "CONFIG" else one for one in arguments))
    assert wrong.returncode == 2
    assert "a byte that is no UTF-8" in wrong.stderr
    assert "rename the file" in wrong.stderr
