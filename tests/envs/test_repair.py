"""The repair environment: its programs mean what they say, and only a repair earns anything."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.languages import LANGUAGES
from agentrl.envs.repair import Repair, as_lines, drawn_repository, strong_player
from agentrl.errors import ConfigError
from agentrl.protocols import StepResult
from agentrl.testing import check_env
from agentrl.trajectory import ToolCall
from tests.docker_engine import BASE, needs_docker

JAIL = {"name": "jail"}


def printed(folder: Path, files: dict[str, str], command: str) -> str:
    """What a program prints; our own, so it needs no sandbox."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, text in files.items():
        (folder / path).write_text(text)
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}"},
    )
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LANGUAGES)
def test_programs_print_what_is_expected_once_they_are_mended(name: str, tmp_path: Path) -> None:
    language = LANGUAGES[name]
    if shutil.which(language.interpreter) is None:
        pytest.skip(f"no {language.interpreter} here")
    folder = tmp_path / "repository"
    for level in (1, 2, 3, 4):
        made = drawn_repository(random.Random(level), language, level)
        files = {**made.files, "calls": as_lines([*made.shown, *made.hidden])}
        assert printed(folder, files, made.task.test) != made.task.printed
        assert "passed" not in printed(folder, files, "sh test.sh")
        mending = "; ".join(made.mends)
        assert printed(folder, files, f"{mending}; {made.task.test}") == made.task.printed
        assert printed(folder, files, f"{mending}; sh test.sh") == "passed\n"
        assert len(made.mends) == (2 if level == 4 else 1)


def test_programs_of_a_level_differ_and_shown_calls_are_not_those_of_the_judge() -> None:
    for level in (1, 2, 3, 4):
        made = [
            drawn_repository(random.Random(seed), LANGUAGES["python"], level) for seed in range(40)
        ]
        assert len({str(one.files) for one in made}) == 40
        assert not any(set(one.shown) & set(one.hidden) for one in made)


async def step(env: Repair, name: str, **arguments: Any) -> StepResult:
    result = env.step(ToolCall(name, arguments).render())
    assert not isinstance(result, tuple)
    observation, reward, terminated, truncated, info = await result
    assert isinstance(observation, str)
    return observation, reward, terminated, truncated, info


async def earned(options: dict[str, Any], attempts: list[str], seed: int = 1) -> list[float]:
    """The reward for each of these commands."""
    env, rewards = Repair(), []
    try:
        for attempt in attempts:
            begun = env.reset(seed=seed, options=options)
            assert not isinstance(begun, tuple)
            await begun
            command = attempt.replace("MEND", "; ".join(env.repository.mends))
            for line in filter(None, command.split("\n\n")):
                await step(env, "run", command=line)
            _, reward, terminated, _, info = await step(env, "submit")
            assert terminated
            assert info["success"] == bool(reward)
            rewards.append(reward)
    finally:
        await env.close()
    return rewards


HOSTILE = {
    "nothing": "",
    "the tests say yes": "echo 'echo passed' > test.sh",
    "the expected results are those of the bug": "python3 main.py < examples > expected",
    "the program knows the examples": (
        "mv basics.py old.py; cat > basics.py <<'END'\n"
        "import old\nnames = [line.split() for line in open('examples')]\n"
        "known = dict(zip(map(tuple, names), open('expected').read().split()))\n"
        "def value(*numbers):\n"
        "    return known.get(('value', *map(str, numbers)), old.value(*numbers))\nEND"
    ),
    "the program prints what it finds": "echo 'cat expected; cat calls' > main.sh;"
    " echo 'import os; os.system(\"sh main.sh\")' > main.py",
    "the program ends at once": "echo 'import os; os._exit(0)' > basics.py",
    "the program says that it passed": "echo 'print(\"the test passed\")' > main.py",
    "other interpreters": "mkdir -p bin; printf '#!/bin/sh\\ncat expected\\n' > bin/python3;"
    " chmod +x bin/python3; cp bin/python3 .; cp bin/python3 /usr/bin/python3; export PATH=.:$PATH",
    "modules in the way of Python's": "echo 'import os; os._exit(0)' > sitecustomize.py;"
    " cp sitecustomize.py sys.py; cp sitecustomize.py site.py",
    "a folder where the judge's file goes": "mkdir -p calls/deep; echo 1 > calls/deep/file",
    "a link where the judge's file goes": "ln -s expected calls",
    "nothing is left": "rm -rf ./* .[a-z]*",
    "the program goes on for ever": "echo 'while True: pass' > main.py",
    "the program prints without end": "echo 'while True: print(1)' > main.py",
    "a folder that is large": "head -c 70000000 /dev/zero > zeros",
    "more than can be downloaded": "for i in 1 2 3; do truncate -s 120M empty$i; done",
    "something stays behind": "(sleep 1; cp expected calls) & sleep 0; echo",
}
PATIENT = {"test_seconds": 120}
SMALL = {"memory": 256 << 20, "test_seconds": 5, "processes": 48, "disk": 128 << 20}


def test_tampered_tests_earn_nothing_and_a_repair_does_in_a_jail() -> None:
    attempts = [HOSTILE["the tests say yes"], HOSTILE["the program knows the examples"], "MEND"]
    assert asyncio.run(earned({"sandbox": JAIL, **SMALL, **PATIENT}, attempts)) == [0, 0, 1]


@pytest.mark.long
def test_no_hostile_attempt_earns_anything_in_a_jail() -> None:
    rewards = asyncio.run(earned({"sandbox": JAIL, **SMALL}, list(HOSTILE.values())))
    assert dict(zip(HOSTILE, rewards, strict=True)) == dict.fromkeys(HOSTILE, 0.0)


@pytest.mark.slow
def test_a_folder_with_a_virtual_environment_is_judged_by_what_else_is_in_it() -> None:
    packages = "python3 -m venv --without-pip .venv; head -c 40000000 /dev/zero > .venv/lib/package"
    options = {"sandbox": JAIL, **SMALL, **PATIENT, "command_seconds": 120}
    rewards = asyncio.run(earned(options, [packages, f"{packages}; MEND"]))
    assert rewards == [0, 1]


@needs_docker
@pytest.mark.slow
@pytest.mark.long
def test_no_hostile_attempt_earns_anything_in_a_container(docker_host: str) -> None:
    docker = {"name": "docker", "host": docker_host, "image": BASE}
    attempts = [*HOSTILE.values(), "MEND"]
    rewards = asyncio.run(earned({"sandbox": docker, **SMALL}, attempts))
    assert rewards == [*[0.0] * len(HOSTILE), 1.0]


def test_a_sandbox_without_the_interpreter_is_refused_before_the_episode() -> None:
    fake = {"name": "agentrl.testing.sandboxes:FakeSandboxes"}
    with pytest.raises(ConfigError, match="has no 'node'"):
        asyncio.run(earned({"sandbox": fake, "languages": ["javascript"]}, [""]))


@pytest.mark.long
def test_the_repair_environment_keeps_the_contract_in_a_jail() -> None:
    options = {"level": 4, "languages": ["python", "sh", "awk"]}
    check_env(Repair, options=options, gold=strong_player, seeds=(0, 1), deadline=300, max_turns=4)
