"""Scores a program that the model wrote by tests that run in the sandbox."""

import json
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, TypeAdapter, ValidationError

from agentrl.errors import ConfigError, RewardError
from agentrl.protocols import Settings
from agentrl.sandbox.outcome import Outcome, Ran, SandboxLost
from agentrl.sandbox.pool import Sandbox
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits
from agentrl.trajectory import Score, Task, Trajectory


class InOut(Settings):
    """The program's output for an input; spaces at the ends of lines do not count."""

    stdin: str = ""
    """The program's input."""
    stdout: str
    """The expected output."""


class Call(Settings):
    """The result of a function of the program for these arguments. All values are JSON."""

    call: str
    """Name of the function."""
    args: tuple[Any, ...] = ()
    """Arguments by position."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments by name."""
    returns: Any
    """The expected result. Floats are compared to nine digits; a tuple equals a list, and True does not equal 1."""


Test = InOut | Call | str
"""A string is Python code that runs after the program and fails by raising: `assert double(2) == 4`."""

_TESTS: TypeAdapter[list[Test]] = TypeAdapter(list[Test])
_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


class CodeTests:
    """The share of the task's tests that the program in the model's last message passes; `all_passed` is a part.

    The program is the last fenced block that is marked as Python or has no language; a message without one passes no
    test. Every test is a separate run. A test that hits a limit fails. If the sandbox breaks, the reward fails.
    """

    class Config(Settings):
        """Where the tests are, and what a program may use."""

        tests: str = "tests"
        """The task's option with the list of tests."""
        sandbox: SandboxConfig = SandboxConfig(limits=SandboxLimits(wall=10.0, cpu=5.0))
        """The sandbox, with the limits of one test."""
        all_or_nothing: bool = False
        """Whether to score 1 if all tests pass and else 0, instead of the share."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sandbox = Sandbox(config.sandbox)

    async def __aenter__(self) -> Self:
        await self._sandbox.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._sandbox.__aexit__(*exc)

    async def score(self, trajectory: Trajectory) -> Score:
        """Run the tests, as many at a time as the sandbox has places.

        Raises:
            RewardError: the sandbox was lost.
            ConfigError: the task has no tests, or one of them is invalid.
        """
        tests = tests_of(trajectory.task, self._config.tests)
        program = program_in(trajectory)
        passed = [False] * len(tests) if program is None else await self._run_all(program, tests)
        whole = float(all(passed))
        return Score(whole if self._config.all_or_nothing else sum(passed) / len(passed), {"all_passed": whole})

    def check_task(self, task: Task) -> None:
        """Check that the task has tests.

        Raises:
            ConfigError: it has none, or one of them is invalid.
        """
        tests_of(task, self._config.tests)

    async def _run_all(self, program: str, tests: Sequence[Test]) -> list[bool]:
        mark = secrets.token_hex(16)  # so that no print of the program looks like the end of a test
        runs = [
            (program, test.stdin) if isinstance(test, InOut) else (_harness(program, test, mark), "") for test in tests
        ]
        outcomes = await self._sandbox.run_all(runs)
        return [_passed(test, outcome, mark) for test, outcome in zip(tests, outcomes, strict=True)]


def _passed(test: Test, outcome: Outcome, mark: str) -> bool:
    if isinstance(outcome, SandboxLost):
        raise RewardError(f"the sandbox was lost: {outcome.error}")
    if not isinstance(outcome, Ran) or outcome.exit != 0:
        return False
    if isinstance(test, InOut):
        return _lines(outcome.stdout) == _lines(test.stdout)
    _, marked, returned = outcome.stdout.rpartition(mark)
    return bool(marked) and (isinstance(test, str) or _equal(_read(returned), test.returns))


def program_in(trajectory: Trajectory) -> str | None:
    """The last fenced block of the model's last message that is marked as Python or has no language."""
    replies = (message.content for message in reversed(trajectory.messages) if message.role == "assistant")
    blocks = _FENCED.findall(next(replies, ""))
    return next(
        (code for language, code in reversed(blocks) if language.lower() in ("", "python", "py", "python3")), None
    )


def tests_of(task: Task, option: str) -> list[Test]:
    """The tests of a task.

    Raises:
        ConfigError: there are none, or one of them is invalid.
    """
    written, named = task.options.get(option), f"task {task.id!r}" if task.id else "the task"
    try:
        tests = _TESTS.validate_python(written)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"option {option!r} of {named}: {first['msg']}, got {written!r:.200}. Write a list of "
            "{stdin: ..., stdout: ...}, {call: NAME, args: [...], returns: ...} or Python that asserts"
        ) from error
    if not tests:
        raise ConfigError(f"option {option!r} of {named} is a list without a test")
    return tests


def _harness(program: str, test: Call | str, mark: str) -> str:
    """A program that runs `program`, then the test, and then prints `mark`. It does not contain the expected result."""
    if isinstance(test, Call):
        arguments = f"*json.loads({json.dumps(test.args)!r}), **json.loads({json.dumps(test.kwargs)!r})"
        check = f"last = json.dumps(scope[{test.call!r}]({arguments}))"
    else:
        check = f"exec(compile({test!r}, 'test.py', 'exec'), scope)\nlast = ''"
    return f"""
import json, os, sys
scope = {{"__name__": "solution"}}
exec(compile({program!r}, "solution.py", "exec"), scope)
{check}
sys.stdout.flush()
sys.stdout.write({mark!r} + last)
"""


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read(text: str) -> Any:
    """The parsed result of a call; an object that equals nothing if it cannot be parsed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return object()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, bool) or isinstance(other, bool):  # Python's True equals 1
        return one is other
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        close = 1e-9 if other == 0 else 0.0  # what is computed is rarely 0 itself
        try:
            return numbers and math.isclose(one, other, rel_tol=1e-9, abs_tol=close)
        except OverflowError:  # an integer that is larger than any float
            return False
    return bool(one == other)
