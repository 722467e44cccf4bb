"""Tasks in Harbor's format: read as Harbor reads them, and judged as their verifiers say."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl import plugins
from agentrl.envs.harbor import Harbor
from agentrl.errors import ConfigError, PluginError
from agentrl.protocols import SandboxOffers, StepReply
from agentrl.sandbox.harbor.check import TaskCheck, check_task
from agentrl.sandbox.harbor.task import lacking, read_task, resolved, task_folders
from agentrl.sandbox.harbor.task_file import read_task_file
from agentrl.sandbox.harbor.trial import TrialSettings, parsed_rewards
from agentrl.sandbox.providers import open_provider
from agentrl.trajectory import ToolCall
from tests.docker_engine import BASE, needs_docker

EXAMPLES = Path(__file__).parents[2] / "examples" / "harbor"
FIELDS = json.loads(Path(__file__).with_name("harbor_fields.json").read_text())
"""What `harbor.models.task.config.TaskConfig` of harbor 0.26.0 makes of files: of those that its
wheel carries, two that set every field, and our twelve. Written by that class as `model_dump_json`;
its module also runs under Python 3.11, with pydantic and toml."""


def compared(ours: Any, theirs: Any, where: str) -> None:
    """Every field that we read has their value."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            if name in theirs or value:
                compared(value, theirs[name], f"{where}.{name}")
    elif isinstance(ours, list) and len(ours) == len(theirs):
        for at, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            is_source = isinstance(their, str) and isinstance(our, dict)
            compared(our, {"source": their} if is_source else their, f"{where}[{at}]")
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_equal_to_those_of_harbors_own_models(name: str) -> None:
    text = FIELDS[name]["text"] or (EXAMPLES / name / "task.toml").read_text()
    ours = read_task_file(text).model_dump(mode="json")
    compared(ours, FIELDS[name]["fields"], name)


def test_the_examples_are_what_their_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "generate.py"), str(tmp_path)], check=True)
    written = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    there = {
        path.relative_to(EXAMPLES): path.read_text()
        for path in EXAMPLES.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != "generate.py"
    }
    assert written == there
    assert len(task_folders(tmp_path)) == 12


def made(folder: Path, **files: str) -> Path:
    """A task like the first example, with other files (`tests_test` for tests/test.sh)."""
    shutil.copytree(EXAMPLES / "01-hello", folder)
    paths = {
        "toml": "task.toml",
        "test": "tests/test.sh",
        "solve": "solution/solve.sh",
        "dockerfile": "environment/Dockerfile",
        "compose": "environment/docker-compose.yaml",
    }
    for name, text in files.items():
        (folder / paths[name]).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"compose": "services: {}"}, "compose"),
        ({"toml": "[environment]\ngpus = 2"}, "GPUs"),
        ({"toml": '[environment]\nos = "windows"'}, "'windows'"),
        ({"toml": '[environment]\nnetwork_mode = "allowlist"'}, "allowed hosts"),
        ({"toml": '[agent]\nuser = "agent"'}, "users"),
        (
            {"toml": '[[environment.mcp_servers]]\nname = "x"\ntransport = "stdio"\ncommand = "x"'},
            "MCP",
        ),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    files: dict[str, str], what: str, tmp_path: Path
) -> None:
    task = read_task(made(tmp_path / "task", **files))
    found = lacking(task, SandboxOffers(), network=True)
    assert len(found) == 1
    assert what in found[0]


def test_folders_that_are_no_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="is no task of Harbor"):
        plugins.load("envs", f"harbor:{tmp_path}")
    with pytest.raises(ConfigError, match="several steps"):
        read_task(made(tmp_path / "steps", toml='[[steps]]\nname = "one"'))
    folder = made(tmp_path / "no-tests")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"no tests/test\.sh"):
        read_task(folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_task(made(tmp_path / "wrong", toml="[environment]\ncpus = 'many'"))


def test_variables_come_from_this_process_or_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.delenv("SHAPE", raising=False)
    assert resolved({"A": "${COLOUR}", "B": "${SHAPE:-round}", "C": "plain"}, "it") == {
        "A": "red",
        "B": "round",
        "C": "plain",
    }
    with pytest.raises(ConfigError, match="the variable SHAPE"):
        resolved({"A": "${SHAPE}"}, "it")


def test_rewards_are_finite_numbers_by_name() -> None:
    assert parsed_rewards(" 0.5\n", is_json=False) == {"reward": 0.5}
    assert parsed_rewards('{"reward": 1, "style": 0.25}', is_json=True) == {
        "reward": 1.0,
        "style": 0.25,
    }
    for text, is_json in (
        ("", False), ("nan", False), ("{}", True), ("[1]", True), ('{"a": "1"}', True),
        ('{"a": Infinity}', True),
    ):  # fmt: skip
        with pytest.raises(ValueError):  # noqa: PT011  the numbers' own messages are many
            parsed_rewards(text, is_json)


async def checks(folders: list[Path], **sandbox: Any) -> list[TaskCheck]:
    provider = await open_provider(sandbox)
    try:
        return [await check_task(one, provider, TrialSettings()) for one in folders]
    finally:
        await provider.close()


@pytest.mark.slow
def test_checks_of_tasks_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    reward = "#!/bin/bash\necho {} > /logs/verifier/reward.txt\n"
    shared = '[verifier]\ntimeout_sec = 2.0\n[environment]\nnetwork_mode = "no-network"\n'
    tasks = {
        "right": {},
        "generous": {"test": reward.format(1)},
        "impossible": {"test": reward.format(0)},
        "silent": {"test": "#!/bin/bash\necho nothing to say\n"},
        "endless": {"test": "#!/bin/bash\nsleep 60\n", "toml": shared},
        "broken": {"solve": "#!/bin/bash\necho no idea; exit 3\n"},
        "ours": {"dockerfile": "FROM x\nWORKDIR /app\nUSER me\n"},
    }
    folders = [made(tmp_path / name, **files) for name, files in tasks.items()]
    right, generous, impossible, silent, endless, broken, ours = asyncio.run(
        checks(folders, name="jail")
    )
    assert right == TaskCheck("right", 1.0, 0.0, "")
    assert generous.why == "doing nothing earns 1.0"
    assert "does not earn 1: the tests said" in impossible.why
    assert "wrote neither" in silent.why
    assert "killed by its limit of deadline" in endless.why
    assert "solve.sh ended with 3 (no idea)" in broken.why
    assert "'USER me'" in ours.why


def test_the_command_checks_tasks_in_jails(agentrl: Any) -> None:
    done = agentrl("check-tasks", str(EXAMPLES / "06-totals"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1].split() == ["06-totals", "1", "0"]


@pytest.mark.long
def test_the_examples_are_sound_in_jails() -> None:
    found = asyncio.run(checks(task_folders(EXAMPLES), name="jail"))
    assert [(one.why, one.solution, one.nothing) for one in found] == [("", 1.0, 0.0)] * 12


def with_base(host: str) -> dict[str, Any]:
    """The provider, after its engine has got the examples' base image."""
    words = ["docker", "--host", host, "tag", BASE, "agentrl-base"]
    subprocess.run(words, check=True, capture_output=True)
    return {"name": "docker", "host": host}


@needs_docker
@pytest.mark.long
def test_tasks_of_each_kind_are_sound_in_containers(docker_host: str) -> None:
    """With a shared verifier, with a fresh copy of the machine, and with an image of its own."""
    folders = [EXAMPLES / name for name in ("01-hello", "06-totals", "08-edit-config")]
    found = asyncio.run(checks(folders, **with_base(docker_host)))
    assert [(one.why, one.solution, one.nothing) for one in found] == [("", 1.0, 0.0)] * 3


@needs_docker
@pytest.mark.long
def test_the_examples_are_sound_in_containers(docker_host: str) -> None:
    found = asyncio.run(checks(task_folders(EXAMPLES), **with_base(docker_host)))
    assert [(one.why, one.solution, one.nothing) for one in found] == [("", 1.0, 0.0)] * 12


async def played(commands: list[str], **options: Any) -> list[StepReply]:
    """The steps of an episode of these commands and a submit."""
    env = plugins.load("envs", f"harbor:{EXAMPLES}")()
    assert isinstance(env, Harbor)
    try:
        begun = env.reset(seed=0, options=options)
        assert not isinstance(begun, tuple)
        observation, _ = await begun
        assert observation == (EXAMPLES / options["task"] / "instruction.md").read_text()
        calls = [*(ToolCall("run", {"command": line}) for line in commands), ToolCall("submit", {})]
        return [await env.step(call.render()) for call in calls]
    finally:
        await env.close()


FORGED = "mkdir -p /app /logs/verifier; (sleep 2; echo 1 > /logs/verifier/reward.txt) & echo 1 >"
FORGED += " /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"


def test_an_artifact_keeps_a_file_whose_other_name_is_left_out(tmp_path: Path) -> None:
    folder = made(
        tmp_path / "linked",
        toml=(
            "[[artifacts]]\nsource = '/logs/out'\nexclude = ['cache']\n"
            "[verifier]\nenvironment_mode = 'separate'\n"
        ),
        test="#!/bin/sh\ncd /logs/out && cmp before after || exit\n"
        "cat after > /logs/verifier/reward.txt\n",
        # One of the two comes after the folder in the archive, whatever order that has.
        solve="#!/bin/sh\nmkdir /logs/out; cd /logs/out; echo 1 > before\n"
        "mkdir cache; ln before cache/b; echo 1 > cache/a; ln cache/a after\n",
    )
    assert asyncio.run(checks([folder], name="jail")) == [TaskCheck("linked", 1.0, 0.0, "")]


@pytest.mark.slow
def test_an_agent_does_a_task_of_harbor_and_cannot_forge_the_verdict_of_another_machine() -> None:
    word = (EXAMPLES / "01-hello" / "instruction.md").read_text().split()[3]
    answered = ["pwd; ls /tests/ /solution/", f"echo {word} > /app/hello.txt"]
    for verifier in ("task", "fresh"):
        shown, _, last = asyncio.run(played(answered, task="01-hello", verifier=verifier))
        assert "/app\n" in str(shown[0])
        assert "cannot access '/tests/'" in str(shown[0])
        assert last[1:3] == (1.0, True)
        assert last[4]["success"]
    for task in ("01-hello", "03-sum-column"):
        forged = asyncio.run(played([FORGED], task=task, verifier="fresh"))[-1]
        assert forged[1:3] == (0.0, True)


def test_unknown_tasks_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean '01-hello'\?"):
        asyncio.run(played([], task="hello"))
