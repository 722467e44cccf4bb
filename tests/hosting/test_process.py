"""Environments in processes: what hangs is killed, what crashes costs its episode only, and nothing
is left behind.
"""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError, DeadlineError, EnvError, LethalTaskError, OutageError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.factory import env_factory
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.protocols import Isolation
from agentrl.testing import check_env
from tests.processes import still_alive, title

ROOT = Path(__file__).parents[2]
HERE = "odd_env_of_a_process:Odd"

ODD = '''
    """Written to a folder of the tests, and imported by the worker alone."""
    import os, re, signal, subprocess, sys, time

    class Odd:
        isolation = "process"
        system_prompt = "Do what you are told."

        def reset(self, *, seed, options):
            self.seed = seed
            if options.get("hang"):
                time.sleep(1000)
            if options.get("die"):
                os.kill(os.getpid(), signal.SIGSEGV)
            return "begin", {"pid": os.getpid(), "folder": os.getcwd()}

        def step(self, action):
            print("asked to", action[:40])
            match action.split():
                case ["exit"]: sys.exit(3)
                case ["die", *_]: os.kill(os.getpid(), signal.SIGSEGV)
                case ["sleep"]: time.sleep(1000)
                case ["regex"]: re.match(r"(a+)+$", "a" * 100 + "b")
                case ["raise"]: raise KeyError("mine")
                case ["shape"]: return "only an observation"
                case ["object"]: return "x", 0.0, False, False, {"it": self}
                case ["huge"]: return "x" * (65 << 20), 0.0, False, False, {}
                case ["babble"]: print("x" * (2 << 20))
                case ["write"]: open("here.txt", "w").write("x")
                case ["child"]:
                    self.child = subprocess.Popen(["sleep", "1000"])
                    return str(self.child.pid), 0.0, False, False, {}
            return action, 1.0, False, False, {"seed": self.seed}

        def close(self):
            print("closed", file=open(os.environ.get("ODD_CLOSED", os.devnull), "w"))

    def player(env, rng):
        return f"{env.seed} {rng.random()}"
'''


@pytest.fixture(autouse=True)
def odd_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module, importable from a folder that is given as a relative path, as the command line's
    own is.
    """
    (tmp_path / "odd_env_of_a_process.py").write_text(dedent(ODD))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def host(**deadlines: float) -> EnvPool:
    return EnvPool({HERE: lambda: ProcessEnv(HERE)}, EnvDeadlines(**deadlines))


def fork_servers() -> list[psutil.Process]:
    """The processes that environments are forked from."""
    return [child for child in psutil.Process().children() if "run_fork_server" in title(child)]


def workers() -> list[psutil.Process]:
    """Those that are forked from them."""
    return [worker for server in fork_servers() for worker in server.children()]


async def left_behind(folder: Path) -> list[str]:
    """Scratch folders that are still there after a while: a process that was given up while it
    started is ended when it has started, which takes seconds on a busy machine.
    """
    found: list[str] = []
    for _ in range(6000):
        found = [name for name in os.listdir(folder) if name.startswith("agentrl-env-")]
        if not found:
            break
        await asyncio.sleep(0.01)
    return found


def test_sandboxes_that_are_away_are_waited_for_once_an_episode_was_played(
    odd_env: Path,
) -> None:
    engine = odd_env / "engine"
    name = "tests.sandbox.away:Docked"
    envs = EnvPool({name: lambda: ProcessEnv(name)}, EnvDeadlines())

    async def played() -> None:
        env = envs.acquire(name)
        try:
            await env.reset(0, {"file": str(engine)})
        finally:
            await envs.release(name, env)

    async def main() -> None:
        with pytest.raises(ConfigError, match="could not reach the engine"):
            await played()
        engine.touch()
        await played()
        engine.unlink()
        with pytest.raises(OutageError, match="could not reach the engine"):
            await played()
        engine.touch()
        await played()
        await envs.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["sleep", "regex"])
def test_a_hung_env_is_killed_at_its_deadline_with_its_children_and_nothing_is_left(how, odd_env):
    async def main() -> None:
        envs = host(step=0.3)
        env = envs.acquire(HERE)
        _, info = await env.reset(0, {})
        child = int((await env.step("child"))[0])
        with pytest.raises(DeadlineError, match=r"rollout\.deadlines\.step"):
            await env.step(how)
        await envs.release(HERE, env)
        assert await asyncio.to_thread(still_alive, [info["pid"], child], 5) == []
        assert await left_behind(odd_env) == []

    asyncio.run(main())


@pytest.mark.slow
def test_one_that_hangs_while_it_starts_is_killed_too(odd_env):
    async def main() -> None:
        for seconds in (0.001, 1.5):
            env = host(reset=seconds).acquire(HERE)
            with pytest.raises(DeadlineError):
                await env.reset(0, {"hang": True})
            await env.close()
            assert await left_behind(odd_env) == []
        assert workers() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("exit", "ended with exit status 3; it last wrote:\n  asked to exit"),
        ("die", "(?s)was killed by SIGSEGV; it last wrote:.*Segmentation fault"),
        ("raise", r"Odd.step raised KeyError: 'mine' \(.*odd_env_of_a_process.py:\d+ in step\)"),
        ("shape", r"step must return \(observation: str, reward"),
        ("object", r"\(Odd\) cannot leave its process"),
        pytest.param("huge", "its answer cannot be read", marks=pytest.mark.slow),
    ],
)
def test_what_goes_wrong_over_there_is_said_and_costs_its_own_episode_only(action, said):
    async def main() -> None:
        envs = host()
        env, other = envs.acquire(HERE), envs.acquire(HERE)
        await env.reset(0, {})
        await other.reset(0, {})
        with pytest.raises(EnvError, match=said):
            await env.step(action)
        assert env.broken
        await envs.release(HERE, env)
        assert (await other.step("on"))[1] == 1.0
        await other.close()

    asyncio.run(main())


def test_a_crash_loses_nothing_of_what_was_printed_where_python_buffers():
    code = """
        from agentrl.errors import EnvError
        from agentrl.hosting.process_env import ProcessEnv

        env = ProcessEnv("odd_env_of_a_process:Odd")
        env.reset(seed=0, options={})
        try:
            env.step("die of it")
        except EnvError as error:
            print(error)
        env.close()
    """
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path.cwd())])
    command = [sys.executable, "-c", dedent(code)]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    ).stdout
    assert "was killed by SIGSEGV" in said
    assert "asked to die of it" in said
    assert "Segmentation fault" in said


def test_after_a_crash_the_next_reset_starts_another_process():
    env = ProcessEnv(HERE)
    _, first = env.reset(seed=0, options={})
    with pytest.raises(EnvError):
        env.step("exit")
    with pytest.raises(EnvError, match="call reset first"):
        env.step("on")
    _, second = env.reset(seed=0, options={})
    assert first["pid"] != second["pid"]
    env.close()
    env.close()


def test_a_reset_or_the_same_steps_that_two_processes_die_of_are_set_aside():
    async def main() -> None:
        envs, before = host(), len(fork_servers())
        dies = {"die": True}
        assert [await played(envs, 0, dies), await played(envs, 0, dies)] == ["died", "set aside"]
        assert await played(envs, 1, dies) == "died"  # another task
        assert [await played(envs, 2, {}, "on", "die") for _ in range(3)] == [
            "died",
            "set aside",
            "set aside",
        ]
        # The same task, whose episode goes another way.
        assert await played(envs, 2, {}, "on", "on") == "on"
        assert await played(envs, 2, {}, "die") == "died"
        assert len(fork_servers()) <= max(1, before)
        await envs.close()
        assert workers() == []
        assert all("was killed by SIGSEGV" in one for one in said)
        assert (
            sum(
                "processes of the environment died 2 times while they worked on" in one
                for one in said
            )
            == 3
        )

    said: list[str] = []

    async def played(envs: EnvPool, seed: int, options: dict[str, bool], *actions: str) -> str:
        env, seen = envs.acquire(HERE), ""
        try:
            await env.reset(seed, options)
            for action in actions:
                seen = (await env.step(action))[0]
        except EnvError as error:
            said.append(str(error))
            return "set aside" if isinstance(error, LethalTaskError) else "died"
        finally:
            await envs.release(HERE, env)
        return seen

    asyncio.run(main())


@pytest.mark.slow
def test_many_start_at_once_and_when_their_parent_dies_the_next_are_forked_from_another():
    async def main() -> None:
        envs = host()
        live = [envs.acquire(HERE) for _ in range(24)]
        async with asyncio.TaskGroup() as group:
            for env in live:
                group.create_task(env.reset(0, {}))
        assert len(workers()) == 24
        for server in fork_servers():
            server.kill()
            assert await asyncio.to_thread(still_alive, [server], 5) == []
        other = envs.acquire(HERE)
        await other.reset(0, {})
        for env in (*live, other):
            assert (await env.step("on"))[1] == 1.0
            await env.close()
        assert workers() == []

    asyncio.run(main())


def test_a_sound_process_plays_on_in_a_folder_of_its_own_and_is_closed_properly(
    odd_env, monkeypatch
):
    monkeypatch.setenv("ODD_CLOSED", str(odd_env / "closed"))

    async def main() -> None:
        envs = host()
        infos = []
        for seed in range(3):
            env = envs.acquire(HERE)
            infos.append((await env.reset(seed, {}))[1])
            assert (await env.step("write"))[4] == {"seed": seed}
            assert (await env.step("漢 é"))[0] == "漢 é"
            await envs.release(HERE, env)
        assert len({info["pid"] for info in infos}) == 1
        assert (Path(infos[0]["folder"]) / "here.txt").exists()
        await envs.close()
        assert (odd_env / "closed").read_text() == "closed\n"
        assert await asyncio.to_thread(still_alive, [infos[0]["pid"]], 5) == []
        assert await left_behind(odd_env) == []

    asyncio.run(main())


def test_output_is_caught_and_does_not_grow_for_ever(odd_env, capfd):
    env = ProcessEnv(HERE)
    for _ in range(2):
        env.reset(seed=0, options={})
        env.step("babble")
    env.reset(seed=0, options={})
    (output,) = odd_env.glob("agentrl-env-*/output")
    assert output.stat().st_size < 1000
    env.close()
    assert capfd.readouterr() == ("", "")


def test_a_player_is_asked_where_the_environment_lives(odd_env):
    import odd_env_of_a_process as odd

    async def main() -> None:
        env = LiveEnv(ProcessEnv(HERE), EnvDeadlines())
        await env.reset(7, {})
        assert await env.consult(odd.player, random.Random(5)) == f"7 {random.Random(5).random()}"
        with pytest.raises(ConfigError, match="at the top level of a module"):
            await env.consult(lambda env, rng: "", random.Random(0))
        await env.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["frozen_lake", "guess_number", "calculator"])
def test_episodes_are_the_same_in_a_process_and_inline(name):
    words = [
        "left",
        "down",
        "5",
        "",
        '<tool_call>{"name": "calculate", "arguments": {"expression": "1+1"}}</tool_call>',
    ]

    async def episodes(isolation: Isolation) -> list[object]:
        env = LiveEnv(env_factory(name, isolation)(), EnvDeadlines(), isolation=isolation)
        seen: list[object] = []
        for seed in range(5):
            seen += [await env.reset(seed, {}), env.system_prompt, list(env.tools)]
            for word in words:
                seen.append(result := await env.step(word))
                if result[2] or result[3]:
                    break
        await env.close()
        return seen

    assert asyncio.run(episodes("process")) == asyncio.run(episodes("inline"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frozen_lake", "calculator"])
def test_the_built_in_environments_keep_the_contract_from_a_process_of_their_own(name):
    check_env(lambda: ProcessEnv(name), seeds=(0,), deadline=20.0)


def test_wrong_options_and_a_wrong_name_end_the_run_and_say_the_way_out():
    env = ProcessEnv("frozen_lake")
    with pytest.raises(ConfigError, match="did you mean 'size'"):
        env.reset(seed=0, options={"sise": 4})
    with pytest.raises(ConfigError, match="must be plain JSON"):
        env.reset(seed=0, options={"size": object()})
    env.close()
    env = ProcessEnv("frozen_lak")
    with pytest.raises(ConfigError, match="Did you mean 'frozen_lake'"):
        env.reset(seed=0, options={})
    env.close()


def test_the_environment_says_where_it_runs_and_the_config_overrides_it():
    assert isinstance(env_factory(HERE)(), ProcessEnv)
    assert not isinstance(env_factory(HERE, "thread")(), ProcessEnv)
    assert isinstance(env_factory("frozen_lake", "process")(), ProcessEnv)
    assert not isinstance(env_factory("frozen_lake")(), ProcessEnv)
    with pytest.raises(ConfigError, match="needs its own process"):
        LiveEnv(env_factory(HERE, "thread")(), EnvDeadlines())
    LiveEnv(env_factory(HERE, "thread")(), EnvDeadlines(), isolation="thread")
    with pytest.raises(ConfigError, match=r"env\.isolation"):
        load_config(ROOT / "examples" / "frozen_lake.yaml", ["env.isolation=fork"])


@pytest.mark.parametrize("action", ["on", pytest.param("regex", marks=pytest.mark.slow)])
def test_no_process_survives_a_driver_that_is_killed(action):
    driver = dedent(f"""
        import threading
        from agentrl.hosting.process_env import ProcessEnv
        env = ProcessEnv({HERE!r})
        info = env.reset(seed=0, options={{}})[1]
        print(info["pid"], env.step("child")[0], flush=True)
        env.step({action!r})
        threading.Event().wait()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    assert still_alive(pids, 5) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "count",
    [pytest.param(2_000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.long)],
)
def test_memory_and_handles_stay_flat_over_thousands_of_episodes(count):
    async def episodes(envs: EnvPool, count: int) -> psutil.Process:
        for seed in range(count):
            env = envs.acquire(HERE)
            _, info = await env.reset(seed, {})
            for _ in range(5):
                await env.step("on")
            await envs.release(HERE, env)
        return psutil.Process(info["pid"])

    def size(process: psutil.Process) -> tuple[int, int, int]:
        gc.collect()
        return process.memory_info().rss, process.num_fds(), process.num_threads()

    async def main() -> None:
        envs = host()
        driver = psutil.Process(os.getpid())
        worker = await episodes(envs, 500)
        before = size(driver), size(worker)
        assert await episodes(envs, count) == worker
        for (rss, *handles), (rss_after, *handles_after) in zip(
            before, (size(driver), size(worker)), strict=True
        ):
            assert rss_after - rss < 4 << 20
            assert handles_after == handles
        await envs.close()

    asyncio.run(main())


@pytest.mark.long
def test_handles_stay_flat_when_every_process_is_killed(odd_env):
    async def main() -> None:
        driver = psutil.Process(os.getpid())
        before = (0, 0)
        for round_ in range(30):
            env = host(step=0.01).acquire(HERE)
            await env.reset(0, {})
            with pytest.raises(DeadlineError):
                await env.step("sleep")
            await env.close()
            assert await left_behind(odd_env) == []
            await asyncio.sleep(0.02)
            if round_ == 5:
                before = driver.num_fds(), driver.num_threads()
        assert (driver.num_fds(), driver.num_threads()) == before
        assert workers() == []

    asyncio.run(main())
