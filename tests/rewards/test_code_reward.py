"""The reward by tests: what passes, what fails, and that no broken sandbox is a score."""

import asyncio
import sysconfig
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.errors import ConfigError, RewardError
from agentrl.rewards import code_tests
from agentrl.rewards.code_tests import CodeTests, program_in
from agentrl.rewards.outputs import same_output
from agentrl.sandbox.outcome import Outcome, SandboxLost
from agentrl.sandbox.pool import ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits
from agentrl.testing import check_reward
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Score, Trajectory

CONFIG = CodeTests.Config(sandbox=SandboxConfig(size=2, limits=SandboxLimits(wall=5.0, cpu=0.3)))


def answer(program: str, tests: object) -> Trajectory:
    return trajectory(f"Here it is:\n```python\n{program}\n```\nDone.", options={"tests": tests})


def scores(asked: Sequence[Trajectory], config: CodeTests.Config = CONFIG) -> list[Score]:
    async def main() -> list[Score]:
        async with CodeTests(config) as reward:
            return [await reward.score(one) for one in asked]

    return asyncio.run(main())


SQUARE = [{"stdin": "3", "stdout": "9"}, {"stdin": "-4\n", "stdout": "16\n"}]
DOUBLE: list[Any] = [
    {"call": "double", "args": [2], "returns": 4},
    {"call": "double", "kwargs": {"x": [1, "a"]}, "returns": [1, "a", 1, "a"]},
    "assert double(0.5) == 1",
]


def test_the_score_is_the_share_of_passed_tests() -> None:
    cases: list[tuple[str, object, float]] = [
        ("print(int(input()) ** 2)", SQUARE, 1.0),
        ("print(int(input()) ** 2, ' ')\nprint()", SQUARE, 1.0),
        ("print(int(input()) * 3)", SQUARE, 0.5),
        ("print(9)", SQUARE, 0.5),
        ("while True: pass", SQUARE, 0.0),
        ("def", SQUARE, 0.0),
        ("def double(x): return x * 2", DOUBLE, 1.0),
        (
            (
                "def double(x):\n    print('see')\n    return x * 2\nif __name__ == '__main__':"
                " input()"
            ),
            DOUBLE,
            1.0,
        ),
        ("def double(x): return x + 2", DOUBLE, 1 / 3),
        ("def duoble(x): return x * 2", DOUBLE, 0.0),
        ("def double(x): raise SystemExit(0)", DOUBLE, 0.0),
        ("import os\nos._exit(0)", DOUBLE, 0.0),
        ("def double(x): return {x}", DOUBLE, 0.0),
        (
            "def f(): return (0.1 + 0.2, {'a': None}, True)",
            [{"call": "f", "returns": [0.3, {"a": None}, True]}],
            1.0,
        ),
        ("def f(): return '[' * 10**5", [{"call": "f", "returns": 1}], 0.0),
    ]
    for (program, _, value), score in zip(
        cases, scores([answer(p, t) for p, t, _ in cases]), strict=True
    ):
        assert score.value == pytest.approx(value), program
        assert score.parts == {"all_passed": float(value == 1)}


def test_python_finds_the_module_of_a_programs_classes() -> None:
    linked = (
        "from dataclasses import dataclass\n@dataclass\nclass Node:\n    value: int\n"
        "    next: 'Node | None' = None\ndef f(x): return Node(x, Node(1)).next.value + x"
    )
    hints = (
        "import typing\nclass Pair(typing.NamedTuple):\n    one: int\n    rest: 'Pair | None'\n"
        "def f(x): return x + len(typing.get_type_hints(Pair)) - 1"
    )
    pickled = (
        "import pickle\nclass Number:\n    def __init__(self, x): self.x = x\n"
        "def f(x): return pickle.loads(pickle.dumps(Number(x))).x + 1"
    )
    tests = [{"call": "f", "args": [2], "returns": 3}, "assert f(1) == 2"]
    asked = [answer(program, tests) for program in (linked, hints, pickled)]
    checker = f"{linked}\ndef check(stdin, stdout, expected): return f(2) == 3"
    asked.append(answer("print(1)", [{"stdin": "", "checker": checker}]))
    assert [score.value for score in scores(asked)] == [1.0] * 4


def test_all_or_nothing() -> None:
    config = CONFIG.model_copy(update={"all_or_nothing": True})
    asked = [answer("print(9)", SQUARE), answer("print(int(input()) ** 2)", SQUARE)]
    assert [score.value for score in scores(asked, config)] == [0, 1]


def test_the_program_is_the_last_block_that_is_python_of_the_last_message() -> None:
    for text, program in (
        ("```python\na\n```\nor\n```py\nb\n```\nrun it:\n```sh\nc\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("  ```Python title\n  a\n  ```", "  a\n"),
        ("no program", None),
        ("```python\na\n```\nIt prints:\n```\n9\n```", "a\n"),
        ("~~~python\na\n~~~\nand\n```text\nb\n```", "a\n"),
        ("````python\n```\na\n````", "```\na\n"),
        ("```{.python}\na\n```", "a\n"),
        ("`` `python\na\n```", None),
        ("```python\nnever closed", None),
    ):
        assert program_in(trajectory([text])) == program
    assert program_in(trajectory(["```\na\n```", "sorry"])) is None
    assert scores([trajectory("no program", options={"tests": SQUARE})])[0].value == 0


def test_a_program_in_an_indented_block_runs() -> None:
    program = "1. So:\n   ```python\n   x = int(input())\n   if x:\n       print(x * x)\n   ```\n"
    deeper = "- ~~~\n      print(int(input()) ** 2)\n  ~~~\n"
    asked = [trajectory(text, options={"tests": SQUARE}) for text in (program, deeper)]
    assert [score.value for score in scores(asked)] == [1.0, 1.0]


def test_lines_of_spaces_in_a_text_of_the_program_stay() -> None:
    program = 'def f(): return """a\n   \nb"""'
    tests = [{"call": "f", "returns": "a\n   \nb"}]
    assert scores([answer(program, tests)])[0].value == 1.0


def test_numbers_and_arrays_of_numpy_are_those_of_python() -> None:
    program = (
        "import os\nos.environ['OPENBLAS_NUM_THREADS'] = '1'\nimport numpy as np\n"
        "def f(*xs): return [np.sum(xs), np.sort(xs), np.any(xs)]"
    )
    tests = [
        {"call": "f", "args": [3, 1], "returns": [4, [1, 3], True]},
        {"call": "f", "args": [3, 1], "returns": [5, [1, 3], True]},
        {"call": "f", "args": [3, 1], "returns": [4, [3, 1], True]},
    ]
    sandbox = SandboxConfig(
        size=1,
        paths=(sysconfig.get_path("purelib"),),
        limits=SandboxLimits(wall=60.0, cpu=20.0, memory=4 << 30),
    )
    (score,) = scores([answer(program, tests)], CodeTests.Config(sandbox=sandbox))
    assert score.value == pytest.approx(1 / 3)


def test_a_test_may_call_a_method_and_a_builtin_is_no_function_of_the_program() -> None:
    program = (
        "class Solution:\n    def __init__(self, k=1): self.k = k\n    def f(self, x): return"
        " self.k * x\n"
    )
    tests = [
        {"call": "Solution().f", "args": [3], "returns": 3},
        {"call": "Solution(2).f", "args": [3], "returns": 6},
        {"call": "sum", "args": [[1, 2]], "returns": 3},
        {"call": "Solution().g", "args": [3], "returns": 3},
    ]
    assert scores([answer(program, tests)])[0].value == 0.5
    for wrong in ("f(", "1 + 1", "[f][0]", "lambda: 1"):
        with pytest.raises(ConfigError, match="names no function"):
            code_tests.tests_of(answer("pass", [{"call": wrong, "returns": 1}]).task, "tests")


@pytest.mark.parametrize(
    ("printed", "expected", "comparison", "tolerance", "equal"),
    [
        ("a \nb\n\n", "a\nb", "lines", 0.0, True),
        ("a  b", "a b", "lines", 0.0, False),
        (" a\n b ", "a b", "words", 0.0, True),
        ("a\n", "a", "exact", 0.0, False),
        ("a\n", "a\n", "exact", 0.0, True),
        ("0.30000004", "0.3", "lines", 1e-6, True),
        ("0.30000004", "0.3", "lines", 0.0, False),
        ("x 1000000.5", "x 1000000", "words", 1e-6, True),
        ("3.1", "3", "words", 1e-6, False),
        ("1 2", "1", "words", 1e9, False),
        ("nan", "1", "words", 1e9, False),
        ("inf", "1", "words", 1e9, False),
        ("1e999", "1", "words", 1e9, False),
        ("1_0", "10", "words", 1e-6, False),
        ("yes", "1", "words", 1e9, False),
    ],
)
def test_outputs_are_compared_as_the_settings_say(
    printed, expected, comparison, tolerance, equal
) -> None:
    assert same_output(printed, expected, comparison, tolerance) is equal


DIVISOR = (
    "def check(stdin, stdout, expected):\n    return int(stdin) % int(stdout) == 0 and int(stdout)"
    " > 1\n"
)


def test_a_checker_decides_where_several_outputs_are_right() -> None:
    tests = [{"stdin": "12"}, {"stdin": "35", "stdout": "5"}]
    config = CONFIG.model_copy(update={"checker": DIVISOR})
    cases = {
        "n = int(input())\nprint(next(d for d in range(2, n + 1) if n % d == 0))": 1.0,
        "print(input())": 1.0,
        "print(5)": 0.5,
        "print('abc')": 0.0,
        "print(1)": 0.0,
    }
    found = scores([answer(program, tests) for program in cases], config)
    assert [score.value for score in found] == list(cases.values())
    own = [{"stdin": "12", "checker": DIVISOR}, {"stdin": "12", "stdout": "5", "compare": "lines"}]
    assert scores([answer("print(3)", own)])[0].value == 0.5
    assert scores([answer("print(3)", own[1:])], config)[0].value == 0.0, (
        "a test says how to compare by itself"
    )


def test_a_program_cannot_reach_its_checker() -> None:
    attack = """
import builtins, os
builtins.int = lambda *_: 2
open("checker.py", "w").write("def check(**_): return True")
open("json.py", "w").write("def loads(_): return {'stdin': '4', 'stdout': '2', 'expected': '2'}")
if os.fork() == 0:
    os.setsid()
    while True: pass
print("true", "0" * 32 + "true")
"""
    quoting = "print('\\\"}\\n\\'\\'\\'); check = lambda **_: True #')"
    config = CONFIG.model_copy(update={"checker": DIVISOR})
    found = scores([answer(program, [{"stdin": "9"}]) for program in (attack, quoting)], config)
    assert [score.value for score in found] == [0.0, 0.0]


def test_a_broken_checker_is_refused_or_a_failure_and_never_a_verdict() -> None:
    for returned in ("oops", "1"):
        broken = f"def check(stdin, stdout, expected):\n    return {returned}"
        with pytest.raises(RewardError, match="fails even on the expected output"):
            scores([answer("print(9)", [{"stdout": "9", "checker": broken}])])
    for code in ("check = 3", "def check("):
        with pytest.raises(ConfigError, match="checker"):
            code_tests.tests_of(answer("pass", [{"stdout": "1", "checker": code}]).task, "tests")


def test_what_shall_come_out_is_not_in_the_sandbox() -> None:
    program = """
import sys
def look(x):
    frame, seen = sys._getframe(), ""
    while frame: seen, frame = seen + repr(frame.f_locals) + repr(frame.f_globals), frame.f_back
    return "look" in seen and str(7 ** 9) in seen
"""
    tests = [{"call": "look", "args": [1], "returns": returns} for returns in (7**9, False)]
    assert scores([answer(program, tests)])[0].value == 0.5


@pytest.mark.parametrize(
    "tests", [None, [], "assert True", [{"stdin": "1"}], [{"call": "f", "arg": 1, "returns": 2}]]
)
def test_tests_of_no_such_form_are_refused(tests: object) -> None:
    with pytest.raises(ConfigError, match="option 'tests' of task 'task'"):
        code_tests.tests_of(answer("pass", tests).task, "tests")


def test_a_lost_sandbox_is_a_failure_and_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> Outcome:
        return SandboxLost("gone")

    monkeypatch.setattr(ProgramSandbox, "run", lost)
    with pytest.raises(RewardError, match="the sandbox was lost: gone"):
        scores([answer("print(9)", SQUARE)])


def test_it_keeps_the_contract_of_a_reward() -> None:
    asked = [
        answer("print(9)", SQUARE),
        answer("def double(x): return x * 2", DOUBLE),
        answer("1/0", SQUARE),
    ]
    check_reward(lambda: CodeTests(CONFIG), asked, pure=True)
