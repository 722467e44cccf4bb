"""The shell environment: tools work in a sandbox, and only the working folder reaches the test."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentrl.envs.shell import Shell, strong_player
from agentrl.errors import ConfigError, SandboxError
from agentrl.flow import Flow, now
from agentrl.protocols import Command, Executed, SandboxSpec, StepResult
from agentrl.sandbox.shell_task import ShellTask, TaskSandboxes
from agentrl.testing import FakeSandboxes, check_env
from agentrl.trajectory import ToolCall
from tests.docker_engine import BASE, needs_docker

TASK = {
    "instruction": "Write yes into answer.",
    "files": {"src/question": "1\n2\n3\n"},
    "test": "cat answer",
    "test_files": {"hidden/expected": "yes\n"},
}
FAKE = {"name": "agentrl.testing.sandboxes:FakeSandboxes"}


def play(checks: Callable[[Shell], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        env = Shell()
        try:
            await reset(env, **{"sandbox": FAKE, **TASK, **options})
            await checks(env)
        finally:
            await env.close()

    asyncio.run(main())


async def reset(env: Shell, **options: Any) -> str:
    begun = env.reset(seed=3, options=options)
    assert not isinstance(begun, tuple)
    observation, _ = await begun
    assert isinstance(observation, str)
    return observation


async def step(env: Shell, name: str, **arguments: Any) -> StepResult:
    result = env.step(ToolCall(name, arguments).render())
    assert not isinstance(result, tuple)
    observation, reward, terminated, truncated, info = await result
    assert isinstance(observation, str)
    return observation, reward, terminated, truncated, info


async def told(env: Shell, name: str, **arguments: Any) -> str:
    return (await step(env, name, **arguments))[0]


def test_a_model_runs_commands_and_reads_writes_and_edits_files() -> None:
    async def main(env: Shell) -> None:
        assert await told(env, "run", command="echo out; echo bad >&2; exit 2") == (
            "out\nbad\n[exit status 2]"
        )
        assert await told(env, "run", command="true") == "(no output)"
        assert await told(env, "read", path="src/question", first=2, lines=1) == (
            "2\n[1 more lines]"
        )
        assert "does not exist" in await told(env, "read", path="nothing")
        assert await told(env, "write", path="a", content="one two two") == "written"
        assert "occurs 2 times" in await told(env, "edit", path="a", old="two", new="2")
        assert await told(env, "edit", path="a", old="one ", new="") == "written"
        assert await told(env, "run", command="cat a") == "two two"
        shown = await told(env, "run", command="head -c 5000 /dev/zero")
        assert "bytes left out" in shown
        assert len(shown) < 500

    play(main, output=100)


def test_a_command_that_takes_too_long_is_killed_and_the_model_is_told() -> None:
    async def main(env: Shell) -> None:
        assert "[killed: it took longer than it may]" in await told(env, "run", command="sleep 60")

    play(main, command_seconds=0.2)


@pytest.mark.parametrize(("answer", "reward"), [("yes", 1.0), ("", 0.0)])
def test_submitting_tests_the_working_folder_in_a_fresh_sandbox(
    answer: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = of_fakes(monkeypatch)

    async def main(env: Shell) -> None:
        ours = fake[0].live[0]
        if answer:
            await step(env, "write", path="answer", content=answer)
        await step(env, "write", path="hidden/expected", content="forged")
        await step(env, "write", path="/etc/elsewhere", content="x")
        judged: list[dict[str, bytes]] = []

        def answering(command: Command, files: dict[str, bytes]) -> Executed | None:
            if "find" in command.argv[-1]:
                return Executed(0, "", "")
            judged.append(dict(files))
            return None

        fake[0].answer = answering
        _, got, terminated, _, info = await step(env, "submit")
        assert (got, terminated, info["success"]) == (reward, True, bool(reward))
        expected = [text for path, text in judged[0].items() if path.endswith("hidden/expected")]
        assert expected == [b"yes\n"]
        assert "/etc/elsewhere" not in judged[0]
        assert ours not in fake[0].live
        assert fake[0].live == []

    play(main)


def test_a_folder_that_is_too_large_to_be_tested_fails_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(env: Shell) -> None:
        await step(env, "write", path="answer", content="yes\n" * (1 << 20))
        _, got, terminated, _, _ = await step(env, "submit")
        assert (got, terminated) == (0.0, True)

    play(main, disk=4 << 20)
    assert "judged as a failed task: '.' has more than 4194304 bytes" in caplog.text


def of_fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeSandboxes]:
    """The fakes that will be opened."""
    made: list[FakeSandboxes] = []

    async def remembered(settings: FakeSandboxes.Config) -> FakeSandboxes:
        made.append(FakeSandboxes(settings))
        return made[-1]

    monkeypatch.setattr(FakeSandboxes, "open", remembered)
    return made


def test_a_lost_sandbox_is_a_failure_and_never_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = of_fakes(monkeypatch)

    async def main(env: Shell) -> None:
        for name, arguments in (("run", {"command": "true"}), ("submit", {})):
            fake[0].fail_next()
            with pytest.raises(SandboxError):
                await step(env, name, **arguments)

    play(main)


def test_a_test_that_dies_with_its_sandbox_is_a_failure_and_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = of_fakes(monkeypatch)

    async def main(env: Shell) -> None:
        def dying(command: Command, files: dict[str, bytes]) -> Executed | None:
            if "find" in command.argv[-1]:
                return Executed(0, "", "")
            fake[0].fail_next()
            return Executed(137, "", "")

        fake[0].answer = dying
        with pytest.raises(SandboxError):
            await step(env, "submit")

    play(main)


def test_large_working_folders_are_in_memory_one_after_another(
    virtual: Callable[..., Any],
) -> None:
    begun: list[float] = []

    class Large:
        async def download(self, folder: str = ".", most: int = 0) -> bytes:
            if most < 20 << 20:
                raise OSError("it has more bytes")
            return b""

    async def judge(sandboxes: TaskSandboxes) -> None:
        async with sandboxes.work_in(Large()) as made:  # type: ignore[arg-type]
            assert made == b""
            begun.append(now())
            await asyncio.sleep(5)

    async def main() -> None:
        sandboxes = TaskSandboxes(FakeSandboxes(), SandboxSpec(), ShellTask("", {}, "true"), 60)
        async with Flow("test") as flow:
            for _ in range(3):
                flow.start(judge(sandboxes), name="judge")

    virtual(main)
    assert [at - begun[0] for at in begun] == [0, 5, 10]


def test_a_task_without_a_test_is_refused() -> None:
    with pytest.raises(ConfigError, match="an instruction and no test"):
        play(None, test="")  # type: ignore[arg-type]


@pytest.mark.long
def test_the_shell_environment_keeps_the_contract_in_a_jail() -> None:
    check_env(Shell, gold=strong_player, seeds=(0, 1), deadline=300, max_turns=3)


def test_background_processes_and_forged_tests_do_not_count_in_a_jail() -> None:
    async def main(env: Shell) -> None:
        env.task = ShellTask("", {}, "sh check.sh", {"check.sh": "grep -qx yes answer"})
        assert "forged" in await told(
            env, "run", command="echo 'exit 0' > check.sh; echo no > answer; echo forged"
        )
        assert (await step(env, "submit"))[1] == 0.0

    play(main, sandbox={"name": "jail"})


@needs_docker
@pytest.mark.slow
def test_a_task_is_done_in_a_container(docker_host: str) -> None:
    async def main(env: Shell) -> None:
        rng = random.Random(0)
        while True:
            result = env.step(strong_player(env, rng))
            assert not isinstance(result, tuple)
            observation, reward, terminated, _, _ = await result
            if terminated:
                break
        assert (observation, reward) == ("the test passed", 1.0)

    none = {"instruction": "", "files": {}, "test": "", "test_files": {}}
    play(main, sandbox={"name": "docker", "host": docker_host, "image": BASE}, **none)
