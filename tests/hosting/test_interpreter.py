"""Environments in their own interpreter: made once, sound or absent, played as any other."""

import asyncio
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError, DeadlineError
from agentrl.hosting import interpreter
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.interpreter import find_interpreter
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.testing import check_env
from tests.processes import still_alive
from tests.tiers import only

ROOT = Path(__file__).parents[2]

ECHO = '''
    """Says which interpreter it runs in; only the worker imports it."""
    import importlib.util, os, shutil, subprocess, sys, time

    class Where:
        def reset(self, *, seed, options):
            there = [name for name in ("torch", "lonely") if importlib.util.find_spec(name)]
            python = shutil.which("python")
            pid = os.getpid()
            return sys.prefix, {"packages": there, "cwd": os.getcwd(), "python": python, "pid": pid}

        def step(self, action):
            if action == "hang":
                self.child = subprocess.Popen(["sleep", "1000"])
                time.sleep(1000)
            return action, 0.0, True, False, {}

        def close(self):
            pass

    def player(env, rng):
        return f"{sys.prefix} {rng.random()}"
'''


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def here(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with an environment, one with a package that is nowhere else, and a cache of
    the tests.
    """
    # Uv's own cache stays where it was.
    monkeypatch.setenv(
        "UV_CACHE_DIR", os.environ.get("UV_CACHE_DIR", str(Path("~/.cache/uv").expanduser()))
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    interpreter.agentrl_alone.cache_clear()
    (tmp_path / "where.py").write_text(dedent(ECHO))
    (tmp_path / "lonely").mkdir()
    (tmp_path / "lonely" / "lonely.py").write_text("word = 'lonely'\n")
    (tmp_path / "lonely" / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'lonely'\nversion = '1'\n[tool.setuptools]\npy-modules = ['lonely']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return tmp_path


@pytest.mark.slow
def test_an_environment_runs_in_another_python_with_nothing_of_this_one_but_agentrl(here):
    async def main() -> None:
        envs = EnvPool({"where": env_factory("where:Where", python=sys.executable)}, EnvDeadlines())
        env = envs.acquire("where")
        observation, info = await env.reset(0, {})
        assert observation == sys.prefix
        assert info["cwd"] not in (str(here), str(ROOT))
        assert await env.step("on") == ("on", 0.0, True, False, {})
        import where

        assert (await env.consult(where.player, random.Random(5))).endswith(
            str(random.Random(5).random())
        )
        await envs.release("where", env)
        await envs.close()
        assert not psutil.pid_exists(info["pid"])

    asyncio.run(main())


def test_one_that_hangs_over_there_is_killed_at_its_deadline(here):
    async def main() -> None:
        env = LiveEnv(env_factory("where:Where", python=sys.executable)(), EnvDeadlines(step=0.3))
        _, info = await env.reset(0, {})
        worker = psutil.Process(info["pid"])
        with pytest.raises(DeadlineError):
            await env.step("hang")
        family = [worker, *worker.children(recursive=True)]
        assert len(family) == 2
        await env.close()
        assert await asyncio.to_thread(still_alive, family, 5) == []

    asyncio.run(main())


def test_an_environment_that_is_not_over_there_is_said_before_anything_is_played(here):
    with pytest.raises(ConfigError, match="no env named 'wher'"):
        env_factory("wher", python=sys.executable)
    with pytest.raises(ConfigError, match="'where' has no 'Here'"):
        env_factory("where:Here", python=sys.executable)


def test_a_python_that_cannot_host_is_refused_and_says_what_to_install(tmp_path):
    with pytest.raises(ConfigError, match="no executable 'pithon'"):
        find_interpreter("pithon")
    with pytest.raises(ConfigError, match="/bin/true is not a Python"):
        find_interpreter("/bin/true")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    with pytest.raises(
        ConfigError,
        match=r"(?s)No module named '(numpy|pydantic)'.*-m pip install 'numpy' 'pydantic>=2.7'",
    ):
        find_interpreter(str(tmp_path / "empty" / "bin" / "python"))
    (tmp_path / "old").write_text("#!/bin/sh\necho cpython 3 9 1\n")
    (tmp_path / "old").chmod(0o755)
    with pytest.raises(ConfigError, match=r"is Python 3\.9\.1; agentrl's worker needs 3\.11"):
        find_interpreter(str(tmp_path / "old"))


def test_a_workers_modules_need_no_packages_but_those_that_it_is_said_to_need():
    allowed = {
        "numpy",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_extensions",
        "typing_inspection",
    }
    code = f"""
import importlib.abc, sys
class Others(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = sys.stdlib_module_names | {allowed | {"agentrl"}!r}
        if top not in known and not top.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Others())
import agentrl.hosting.fork_server_process
"""
    assert [re.split("[<>=]", need)[0] for need in interpreter.WORKER_NEEDS] == [
        "numpy",
        "pydantic",
    ]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_config_names_the_interpreter_and_does_not_look_for_the_environment_here():
    path = ROOT / "examples" / "frozen_lake.yaml"
    config = load_config(path, ["env={name: only_over_there, requires: [wcwidth]}"]).config
    assert config.env.requires == ("wcwidth",)
    assert config.env.foreign
    with pytest.raises(ConfigError, match="leave out isolation, which is 'inline'"):
        load_config(path, ["env.python=python3", "env.isolation=inline"])


@pytest.mark.long
def test_requirements_are_installed_once_whoever_asks_and_what_was_left_half_made_is_made_anew(
    here, cache, caplog
):
    def made() -> int:
        return sum("installing" in record.message for record in caplog.records)

    with ThreadPoolExecutor() as pool:
        pythons = set(pool.map(lambda _: find_interpreter(None, ["./lonely"]), range(3)))
    assert len(pythons) == made() == 1
    (python,) = map(Path, pythons)
    assert cache in python.parents
    (python.parent.parent / ".complete").unlink()
    (python.parent / "python").unlink()
    assert find_interpreter(None, ["./lonely"]) == str(python)
    assert made() == 2

    env = env_factory("where:Where", requires=["./lonely"])()
    assert isinstance(env, ProcessEnv)
    prefix, info = env.reset(seed=0, options={})
    assert prefix == str(python.parent.parent)
    assert info["python"] == str(python)  # programs of its own come first
    assert info["packages"] == ["lonely"]  # and no torch
    env.close()
    assert made() == 2
    check_env(env_factory("calculator", requires=["./lonely"]), seeds=(0,), deadline=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("tool", only(["uv", "pip"], "uv"))
def test_what_cannot_be_installed_ends_with_the_installer_s_words_and_leaves_nothing(
    tool, cache, monkeypatch
):
    if tool == "pip":
        monkeypatch.setattr(interpreter, "_uv", lambda: None)
    with pytest.raises(
        ConfigError,
        match=r"(?s)env\.requires: /nowhere/x\.whl.* cannot be installed.*/nowhere/x\.whl",
    ):
        find_interpreter(None, ["/nowhere/x.whl"])
    left = [
        path
        for path in (cache / "agentrl" / "venvs").iterdir()
        if not (path / ".complete").exists()
    ]
    assert [path.suffix for path in left if path.is_dir()] == []


@pytest.mark.parametrize("written", [".", "..", "./package", "package/"])
def test_a_folder_is_required_from_the_current_one(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)
    assert interpreter._resolve_requirement(written) == str((tmp_path / written).resolve())
    assert interpreter._resolve_requirement("package") == "package", (
        "a package's name is no folder, though there is one"
    )
