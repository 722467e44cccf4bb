"""Scores a program that the model wrote by tests that run in the sandbox."""

import ast
import json
import math
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from agentrl.errors import ConfigError, LethalContentError, RewardError
from agentrl.rewards.fenced_blocks import blocks_in
from agentrl.rewards.outputs import Comparison, same_output
from agentrl.sandbox.outcome import Outcome, Ran, SandboxLost
from agentrl.sandbox.pool import ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits
from agentrl.settings.base import NameText, Settings
from agentrl.trajectory import Score, Task, Trajectory


def _check_checker(code: str) -> str:
    """Python code, as it is, if it defines `check`."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the checker is no Python: {error}") from error
    if not any(isinstance(one, ast.FunctionDef) and one.name == "check" for one in body):
        raise ValueError(
            "a checker is Python code with a function check(stdin, stdout, expected) that returns a"
            " bool"
        )
    return code


def _check_call(text: str) -> str:
    """The name of a function, or how to get it, as it is, if it is one."""
    try:
        called: ast.AST = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text!r} names no function") from error
    while isinstance(called, ast.Attribute | ast.Call):
        called = called.value if isinstance(called, ast.Attribute) else called.func
    if not isinstance(called, ast.Name):
        raise ValueError(
            f"{text!r} names no function; write f, module.f, or Solution().f for a method"
        )
    return text


Checker = Annotated[str, AfterValidator(_check_checker)]


class InOut(Settings):
    """The program's output for an input. What is not given here is as in the reward's settings."""

    stdin: str = ""
    """The program's input."""
    stdout: str | None = None
    """The expected output; not needed with a checker."""
    compare: Comparison | None = None
    """The comparison of outputs."""
    tolerance: float | None = Field(None, ge=0, allow_inf_nan=False)
    """By how much numbers in them may differ."""
    checker: Checker | None = None
    """Python code that decides instead."""


class Call(Settings):
    """The result of a function of the program for these arguments. All values are JSON."""

    call: Annotated[str, AfterValidator(_check_call)]
    """Name of the function, or how to get it: `Solution().f` is a method."""
    args: tuple[Any, ...] = ()
    """Arguments by position."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments by name."""
    returns: Any
    """The expected result. Floats are compared to nine digits; a tuple equals a list, and True does
    not equal 1.
    """


Test = InOut | Call | str
"""A string is Python code that runs after the program and fails by raising: `assert double(2) ==
4`.
"""

_TESTS: TypeAdapter[list[Test]] = TypeAdapter(list[Test])
_PYTHON = ("python", "py", "python3")
_FORMS = (
    "Write a list of {stdin: ..., stdout: ...}, {call: NAME, args: [...], returns: ...} or Python"
    " that asserts"
)


class CodeTests:
    """The share of the task's tests that the program in the model's last message passes;
    `all_passed` is a part.

    The program is the last fenced block that is marked as Python, or the last that has no language
    if none is; a message without one passes no test. Every test is a separate run. A test that hits
    a limit fails. If the sandbox breaks, the reward fails.
    """

    class Config(Settings):
        """The place of the tests, and the limits of a program."""

        tests: NameText = "tests"
        """The task's option with the list of tests."""
        sandbox: SandboxConfig = SandboxConfig(limits=SandboxLimits(wall=10.0, cpu=5.0))
        """The sandbox, with the limits of one test."""
        all_or_nothing: bool = False
        """If true, the score is 1 if all tests pass and else 0, instead of the share."""
        compare: Comparison = "lines"
        """The comparison of a program's output. `lines`: spaces at the ends of lines and empty
        lines at the end do not count; `words`: nor does how words are parted; `exact`: everything
        counts."""
        tolerance: float = Field(0.0, ge=0, allow_inf_nan=False)
        """Numbers in an output may differ by so much, or by so much of the expected number if that
        is larger than 1.
        """
        checker: Checker | None = None
        """Python code with a function `check(stdin, stdout, expected)`, which says whether an
        output is right, instead of a comparison. It runs by itself in the sandbox, after the
        program has ended."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sandbox = ProgramSandbox(config.sandbox)

    async def __aenter__(self) -> Self:
        await self._sandbox.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._sandbox.__aexit__(*exc)

    def metrics(self) -> Mapping[str, float]:
        """The number of sandboxes lost so far, and replaced."""
        return {"sandboxes_lost": float(self._sandbox.lost)}

    async def score(self, trajectory: Trajectory) -> Score:
        """Run the tests, as many at a time as the sandbox has places.

        Raises:
            RewardError: the sandbox was lost.
            ConfigError: the task has no tests, or one of them is invalid.
        """
        tests = self._tests(trajectory.task)
        program = _program(trajectory, stripped=True)
        passed = [False] * len(tests) if program is None else await self._run_tests(program, tests)
        whole = float(all(passed))
        return Score(
            whole if self._config.all_or_nothing else sum(passed) / len(passed),
            {"all_passed": whole},
        )

    def check_task(self, task: Task) -> None:
        """Check that the task has tests.

        Raises:
            ConfigError: it has none, or one of them is invalid.
        """
        self._tests(task)

    def _tests(self, task: Task) -> list[Test]:
        return (tests_of if self._config.checker is None else _tests_in)(task, self._config.tests)

    async def _run_tests(self, program: str, tests: Sequence[Test]) -> list[bool]:
        """True for each test that the program passes."""
        mark = secrets.token_hex(16)  # so that no print of the program looks like the end of a test
        runs = [
            (
                (program, test.stdin)
                if isinstance(test, InOut)
                else (_harness(program, test, mark), "")
            )
            for test in tests
        ]
        outcomes = [_completed_run(outcome) for outcome in await self._sandbox.run_all(runs)]
        return [
            await self._passes(test, ran, mark) for test, ran in zip(tests, outcomes, strict=True)
        ]

    async def _passes(self, test: Test, ran: Ran | None, mark: str) -> bool:
        if ran is None:
            return False
        if isinstance(test, InOut):
            return await self._has_right_output(test, ran.stdout)
        # The program may have printed before the mark; what it returned stands after it.
        _, marked, returned = ran.stdout.rpartition(mark)
        if not marked or isinstance(test, str):
            return bool(marked)
        try:
            return _equal(json.loads(returned), test.returns)
        except (ValueError, RecursionError):
            return False

    async def _has_right_output(self, test: InOut, stdout: str) -> bool:
        """True if the program printed the right output."""
        config = self._config
        # A test that says how to compare does not mean the checker of all others.
        compares = test.compare is not None or test.tolerance is not None
        checker = test.checker or (None if compares else config.checker)
        if checker is None:
            tolerance = config.tolerance if test.tolerance is None else test.tolerance
            return same_output(stdout, test.stdout or "", test.compare or config.compare, tolerance)
        said = await self._ask_checker(checker, test, stdout)
        # The program's output may be what the checker fails on. If it also fails on the right one,
        # the checker is at fault, and no score of the program would be true.
        if (
            said is None
            and test.stdout is not None
            and await self._ask_checker(checker, test, test.stdout) is None
        ):
            raise RewardError("the checker of a test fails even on the expected output")
        return said is True

    async def _ask_checker(self, checker: str, test: InOut, stdout: str) -> bool | None:
        """The checker's verdict on an output; None if it fails. It gets nothing but the output of
        the program.
        """
        mark = secrets.token_hex(16)
        data = json.dumps({"stdin": test.stdin, "stdout": stdout, "expected": test.stdout})
        ran = _completed_run(await self._sandbox.run(_harness_of_checker(checker, mark), data))
        said = ran.stdout.rpartition(mark)[2] if ran is not None and mark in ran.stdout else ""
        return {"true": True, "false": False}.get(said)


def _completed_run(outcome: Outcome) -> Ran | None:
    """The result of a run that ended by itself and well, else None.

    Raises:
        RewardError: the sandbox was lost.
    """
    if isinstance(outcome, SandboxLost):
        failure = LethalContentError if outcome.final else RewardError
        raise failure(f"the sandbox was lost: {outcome.error}")
    return outcome if isinstance(outcome, Ran) and outcome.exit == 0 else None


def program_in(trajectory: Trajectory) -> str | None:
    """The last fenced block of the model's last message that is marked as Python; if none is, the
    last without a language.
    """
    return _program(trajectory, stripped=False)


def _program(trajectory: Trajectory, *, stripped: bool) -> str | None:
    """The program, `stripped` of the indentation of its fence."""
    replies = (message.content for message in reversed(trajectory.messages) if message.is_answer)
    blocks = list(blocks_in(next(replies, "")))
    marked = [block for block in blocks if block.language in _PYTHON]
    found = marked or [block for block in blocks if not block.language]
    if not found:
        return None
    if not stripped:
        return found[-1].text
    code = found[-1].code
    # `dedent` empties lines of spaces, also those inside of texts.
    return textwrap.dedent(code) if code.lstrip("\r\n")[:1].isspace() else code


def tests_of(task: Task, option: str) -> list[Test]:
    """The tests of a task, each of which says by itself what is right.

    Raises:
        ConfigError: there are none, or one of them is invalid.
    """
    tests = _tests_in(task, option)
    if any(
        isinstance(test, InOut) and test.stdout is None and test.checker is None for test in tests
    ):
        raise ConfigError(
            f"option {option!r} of {_name_of(task)} has a test with neither stdout nor a checker."
            f" {_FORMS}"
        )
    return tests


def _tests_in(task: Task, option: str) -> list[Test]:
    written, named = task.options.get(option), _name_of(task)
    try:
        tests = _TESTS.validate_python(written)
    except ValidationError as error:
        # Of each kind of test, so that the first may be of another kind.
        found = error.errors(include_url=False)
        first = next((one for one in found if one["type"] == "value_error"), found[0])
        raise ConfigError(
            f"option {option!r} of {named}: {first['msg']}, got {written!r:.200}. {_FORMS}"
        ) from error
    if not tests:
        raise ConfigError(f"option {option!r} of {named} is a list without a test")
    return tests


def _name_of(task: Task) -> str:
    return f"task {task.id!r}" if task.id else "the task"


def _harness(program: str, test: Call | str, mark: str) -> str:
    """A program that runs `program`, then the test, and then prints `mark`. It does not contain the
    expected result.
    """
    if isinstance(test, Call):
        arguments = (
            f"*json.loads({json.dumps(test.args)!r}), **json.loads({json.dumps(test.kwargs)!r})"
        )
        # A bare name has to be the program's own; the built-in `sum` does not pass for it.
        found = (
            f"scope[{test.call!r}]" if test.call.isidentifier() else f"eval({test.call!r}, scope)"
        )
        # Numbers and arrays of NumPy, which JSON has no form for, give that of Python's own.
        returned = f"{found}({arguments}), default=lambda one: one.tolist()"
        check = f"last = json.dumps({returned})"
    else:
        check = f"exec(compile({test!r}, 'test.py', 'exec'), scope)\nlast = ''"
    return f"""
import json, sys
{_module("solution")}
exec(compile({program!r}, "solution.py", "exec"), scope)
{check}
sys.stdout.flush()
sys.stdout.write({mark!r} + last)
"""


def _module(name: str) -> str:
    """Python code that makes a module of this name, with its names in `scope`.

    Python looks modules up by the name that their classes have: data classes whose annotations are
    texts, pickle, and `typing.get_type_hints`.
    """
    return (
        f"import types\nmodule = sys.modules[{name!r}] = types.ModuleType({name!r})\n"
        "scope = module.__dict__"
    )


def _harness_of_checker(checker: str, mark: str) -> str:
    """A program that gives its input, which is JSON, to the checker, and prints `mark` and then
    the verdict.
    """
    return f"""
import json, sys
{_module("checker")}
exec(compile({checker!r}, "checker.py", "exec"), scope)
said = scope["check"](**json.loads(sys.stdin.read()))
if not isinstance(said, bool):
    raise TypeError("check returned " + type(said).__name__ + ", and no bool")
sys.stdout.flush()
sys.stdout.write({mark!r} + json.dumps(said))
"""


def _equal(one: Any, other: Any) -> bool:
    """Equal as values of JSON. Lists may also be tuples, and floats are compared to nine digits."""
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
