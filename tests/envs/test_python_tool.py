"""The Python-tool environment: programs run, names stay, and every problem has the answer that its
program prints.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envs import python_tool
from agentrl.envs.python_tool import (
    MAX_OUTPUT_CHARACTERS,
    PythonTool,
    hasty_player,
    make_problem,
    strong_player,
    weak_player,
)
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import StepResult
from agentrl.sandbox.outcome import Outcome, SandboxLost
from agentrl.sandbox.pool import ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig
from agentrl.sandbox.shared import borrow, give_back
from agentrl.testing import check_env
from agentrl.trajectory import ToolCall
from tests.processes import still_alive

_REAL_RUN = ProgramSandbox.run


async def reset(env: PythonTool, seed: int, **options: Any) -> str:
    begun = env.reset(seed=seed, options=options)
    assert not isinstance(begun, tuple)
    observation, _ = await begun
    assert isinstance(observation, str)
    return observation


async def step(env: PythonTool, action: str) -> StepResult:
    result = env.step(action)
    assert not isinstance(result, tuple)
    observation, reward, terminated, truncated, info = await result
    assert isinstance(observation, str)
    return observation, reward, terminated, truncated, info


async def python(env: PythonTool, code: str) -> str:
    return (await step(env, ToolCall("python", {"code": code}).render()))[0]


def play(test: Callable[[PythonTool], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        env = PythonTool()
        try:
            await reset(env, 3, **options)
            await test(env)
        finally:
            await env.close()

    asyncio.run(main())


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    check_env(
        PythonTool,
        seeds=(0,),
        actions=weak_player,
        options={"level": 2},
        deadline=20.0,
        max_turns=6,
    )


def test_names_stay_for_the_next_program_and_what_failed_leaves_nothing() -> None:
    async def main(env: PythonTool) -> None:
        assert (
            await python(
                env,
                "import math\ndef half(x): return x / 2\nx = math.comb(10, 5); print('seen once')",
            )
            == "seen once"
        )
        assert await python(env, "half(x)") == "126.0"
        assert (
            await python(env, "x = 1\nundefined")
            == '  File "code.py", line 2, in <module>\n    undefined\n'
            "NameError: name 'undefined' is not defined\nError: it ended with exit status 1"
        )
        assert await python(env, "print(x)") == "252"
        assert await python(env, "x = 5") == "(nothing was printed)"
        assert await python(env, "x") == "5"
        assert "SyntaxError" in await python(env, "def")

    play(main)


def test_python_finds_the_module_of_a_programs_classes() -> None:
    async def main(env: PythonTool) -> None:
        program = "import pickle, typing\nclass Pair:\n    rest: 'Pair | None' = None"
        assert await python(env, program) == "(nothing was printed)"
        assert await python(env, "pickle.loads(pickle.dumps(Pair())).rest is None") == "True"
        assert await python(env, "len(typing.get_type_hints(Pair))") == "1"

    play(main)


def test_limits_and_long_outputs_are_told() -> None:
    async def main(env: PythonTool) -> None:
        said = await python(env, "print('begun', flush=True)\nwhile True: pass")
        assert (
            said == "begun\nError: the program was stopped, it used more processor time than it may"
        )
        said = await python(env, "print('x' * 10_000 + 'end')")
        assert len(said) < MAX_OUTPUT_CHARACTERS + 100
        assert said.endswith("end")
        assert "8004 characters" in said

    play(main, limits={"cpu": 0.2})


def test_a_lost_sandbox_is_asked_again_once_and_then_fails_the_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(env: PythonTool) -> None:
        losses = [SandboxLost("gone")]

        async def lossy(self: ProgramSandbox, *arguments: Any, **named: Any) -> Outcome:
            return losses.pop() if losses else await _REAL_RUN(self, *arguments, **named)

        monkeypatch.setattr(ProgramSandbox, "run", lossy)
        assert await python(env, "print(1)") == "1"
        losses += [SandboxLost("gone")] * 2
        with pytest.raises(EnvError, match="lost twice: gone"):
            await python(env, "print(1)")

    play(main)


def test_many_environments_share_one_sandbox_which_ends_with_the_last() -> None:
    async def main() -> None:
        before = psutil.Process().children()
        envs = [PythonTool() for _ in range(5)]
        for env in envs:
            await reset(env, seed=1)
        assert len({id(env.programs._sandbox) for env in envs}) == 1
        for env in envs[1:]:
            await env.close()
            await env.close()
        assert await python(envs[0], "print(1)") == "1"
        jails = [process for process in psutil.Process().children() if process not in before]
        assert jails
        await envs[0].close()
        assert still_alive(jails, 5) == []
        with pytest.raises(EnvError, match="call reset first"):
            await python(envs[0], "print(1)")

    asyncio.run(main())


def test_two_sandboxes_of_the_same_config_are_one_while_somebody_has_it() -> None:
    async def main() -> None:
        config = SandboxConfig(size=1)
        one, other = await borrow(config), await borrow(config)
        assert one is other
        await give_back(one)
        assert one.backend
        await give_back(other)
        assert not one.backend
        await give_back(other)  # once too often
        again = await borrow(config)
        assert again is not one
        await give_back(again)

    asyncio.run(main())


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="level"):
        play(lambda env: asyncio.sleep(0), level=6)


@given(seed=st.integers(0, 2**32), level=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_the_program_of_a_problem_prints_its_answer_and_the_question_is_the_seeds(
    seed: int, level: int
) -> None:
    problem = make_problem(level, seed)
    assert problem == make_problem(level, seed)
    assert problem.question != make_problem(level, seed + 1).question
    printed: list[object] = []
    exec(problem.program, {"print": printed.append})
    assert printed == [problem.answer]


@given(seed=st.integers(0, 2**32), level=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_a_program_of_one_expression_has_the_answer_as_its_value(seed: int, level: int) -> None:
    problem = make_problem(level, seed)
    assert (problem.expression is None) == (level > 2 or problem.solve is python_tool.change)
    if problem.expression is not None:
        assert eval(problem.expression) == problem.answer


def test_digit_sums_of_a_larger_base_are_many_more_problems() -> None:
    made = [make_problem(1, seed, "digit_sum", 99_999) for seed in range(300)]
    assert len({problem.question for problem in made}) == 300
    assert max(problem.arguments[0] for problem in made) > 90_000
    assert {len(str(problem.answer)) for problem in made} <= {2, 3, 4}
    assert made[0].expression == "sum(map(int, str({} ** {})))".format(*made[0].arguments)
    assert make_problem(1, 7, "digit_sum").arguments[0] <= 99


def test_a_kind_of_problem_may_be_named_and_a_wrong_name_says_which_there_are() -> None:
    assert {make_problem(1, seed, "multiples").solve for seed in range(20)} == {
        python_tool.multiples
    }
    with pytest.raises(
        ConfigError, match="no problems of the kind 'primes', but: multiples, digit_sum"
    ):
        play(lambda env: asyncio.sleep(0), kind="primes")


@pytest.mark.parametrize(
    ("function", "arguments", "answer"),
    [
        ("multiples", (1, 10, 3, 5), 33),
        ("digit_sum", (2, 15), 26),
        ("primes", (1, 30), 10),
        ("change", (10, [2, 5]), 2),
        ("recurrence", ((1, 1), (1, 1), 10, 1000), 55),
        ("common", ("abcbd", "bdcab"), 3),
        ("knapsack", (10, [5, 4, 6], [10, 40, 30]), 70),
        ("shortest", (3, [(1, 0, 5), (2, 0, 20), (2, 1, 4)]), 9),
        ("paths", (3, [(1, 1)]), 2),
        ("subsets", ([1, 2, 3, 3], 6), 3),
    ],
)
def test_the_answers_are_right(function: str, arguments: tuple[Any, ...], answer: int) -> None:
    assert getattr(python_tool, function)(*arguments) == answer


def test_the_strong_player_solves_every_level_in_two_turns() -> None:
    async def main(env: PythonTool) -> None:
        for level in range(1, 6):
            for seed in range(2):
                await reset(env, seed, level=level)
                rng = Random(seed)
                await step(env, strong_player(env, rng))
                _, reward, terminated, _, info = await step(env, strong_player(env, rng))
                assert (reward, terminated, info) == (1.0, True, {"success": True})

    play(main)


def test_a_hasty_player_computes_as_often_as_its_skill_says_and_answers_what_was_printed() -> None:
    async def solved(env: PythonTool, skill: float) -> int:
        won = 0
        for seed in range(20):
            await reset(env, seed, kind="multiples")
            rng, over = Random(seed), False
            while not over:
                _, reward, over, _, _ = await step(env, hasty_player(env, rng, skill))
            won += reward == 1.0
        return won

    async def main(env: PythonTool) -> None:
        assert await solved(env, 1.0) == 20
        assert 3 <= await solved(env, 0.5) <= 17
        assert await solved(env, 0.0) == 0

    play(main)
