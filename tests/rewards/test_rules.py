"""The rules: what is right, what is wrong, and that nothing a model writes can hold them up."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, RewardError, RuleLimitError
from agentrl.plugins import load
from agentrl.rewards.code_tests import _equal
from agentrl.rewards.rules.numeric import last_number
from agentrl.scoring.build import build_reward
from agentrl.scoring.config import RulePoolConfig
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.scoring.rule_pool import RulePool
from agentrl.testing import check_reward
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Score, Task, ToolCall, Trajectory
from tests.processes import PATIENCE_SECONDS, still_alive, title


def judge(
    name: str, answer: str | list[str], gold: object = None, **settings: object
) -> Score | float:
    """What a rule says, here in this process."""
    rule = build_reward(load("rewards", name), settings)
    option = settings.get("gold", "schema" if name == "json_schema" else "answer")
    said = rule.evaluate(
        rule.content(trajectory(answer, options={option: gold} if gold is not None else {}))
    )
    return said if isinstance(said, Score) else float(said)


@pytest.mark.parametrize(
    ("name", "answer", "gold", "settings", "value"),
    [
        ("exact", " New\n York ", "new york", {}, 1),
        ("exact", "new york", "New York", {"ignore_case": False}, 0),
        ("exact", "It's York!", "its york", {"ignore_punctuation": True}, 1),
        ("exact", "b", ["a", "b"], {}, 1),
        ("exact", "so <answer>x</answer> or <answer> y </answer>", "y", {"tag": "answer"}, 1),
        ("exact", "y", "y", {"tag": "answer"}, 0),
        ("exact", "0.00005", 0.00005, {}, 1),
        ("exact", "5e-5", 0.00005, {}, 1),
        ("exact", "6.02e23", 6.02e23, {}, 1),
        ("exact", "1,000,000", 1000000, {}, 1),
        ("exact", "0.00006", 0.00005, {}, 0),
        ("exact", "-5", 5, {}, 0),
        ("exact", "true", True, {}, 1),
        ("exact", "1", True, {}, 0),
        ("exact", "5", "-5", {"ignore_punctuation": True}, 0),
        ("exact", "35", "3.5", {"ignore_punctuation": True}, 0),
        ("exact", "It\u2019s York", "its york", {"ignore_punctuation": True}, 1),
        ("exact", "cafe\u0301", "caf\u00e9", {}, 1),
        ("regex", "the year 1989.", r"\b19\d\d\b", {}, 1),
        ("regex", "the year 1989.", None, {"pattern": r"19\d\d", "whole": True}, 0),
        ("numeric", "So 3 + 4 makes 1,007.50", 1007.5, {}, 1),
        ("numeric", "about 3.2", "3.14159", {"tolerance": 0.02}, 1),
        ("numeric", "about 3.3", "3.14159", {"tolerance": 0.02}, 0),
        ("numeric", "12 %", 0.12, {}, 1),
        ("numeric", "5-3", 3, {}, 1),
        ("numeric", "it is -3e-2", -0.03, {}, 1),
        ("numeric", "none", 0, {}, 0),
        ("numeric", "it is 5 × 10⁻⁵ m", 0.00005, {}, 1),
        ("numeric", r"$5 \times 10^{-5}$", "5e-5", {}, 1),
        ("numeric", "−１２", -12, {}, 1),
        ("numeric", "1\u202f234", 1234, {}, 1),
        ("numeric", "rows of 10 200 300", 300, {}, 1),
        ("numeric", "9" * 60 + "7", 7, {}, 0),
        ("numeric", r"it is $7\%$", 7, {}, 0),
        ("numeric", r"it is $7\%$", 0.07, {}, 1),
        ("numeric", "0", 5e-10, {}, 0),
        ("numeric", "0.0", 0, {}, 1),
        ("numeric", "1e999", 5, {}, 0),
        ("choice", "I think the answer is (C), not A.", "C", {}, 1),
        ("choice", "A cat. Answer: B", "b", {}, 1),
        ("choice", r"\boxed{D}", 3, {}, 1),
        ("choice", "B", "B", {}, 1),
        ("choice", "A cat sat there", "A", {}, 0),
        ("choice", "(A) or (B)", "A", {}, 0),
        ("choice", "(A) or (B)", "B", {}, 0),
        ("choice", "The answer is A or B", "A", {}, 0),
        ("choice", "Answer: **A**/**B**", "A", {}, 0),
        ("choice", "The answer is A and B.", "A", {}, 0),
        ("choice", "The answer is A and B is wrong.", "A", {}, 1),
        ("choice", "Either (A) or (B). The answer is (B)", "B", {}, 1),
        ("choice", "Answer:A", "A", {}, 1),
        ("choice", "**Answer**: A", "A", {}, 1),
        ("choice", "**Answer:** A", "A", {}, 1),
        ("choice", "The answer is **(C)**", "C", {}, 1),
        ("choice", r"\boxed{\text{A}}", "A", {}, 1),
        ("choice", r"\boxed{(A)}", "A", {}, 1),
        ("choice", r"The answer is $\boxed{\textbf{(D)}}$", "D", {}, 1),
        ("choice", "（Ｃ）", "C", {}, 1),
        (
            "json_schema",
            '{"n": 3}',
            {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
            {},
            1,
        ),
        (
            "json_schema",
            'Here:\n```json\n{"n": "3"}\n```',
            {"properties": {"n": {"type": "integer"}}},
            {},
            0,
        ),
        ("json_schema", "[NaN]", None, {"json_schema": {}}, 0),
        ("json_schema", '{"n": "x", "n": 3}', {"properties": {"n": {"type": "integer"}}}, {}, 0),
        ("json_schema", "[1e999]", None, {"json_schema": {}}, 0),
        ("json_schema", "no json", {"type": "string"}, {}, 0),
        ("tags", "<think>a</think>\n<answer>b</answer>", None, {}, 1),
        ("tags", "<think>a</think> well <answer>b</answer>", None, {}, 0),
        ("tags", "<think>a</think> well <answer>b</answer>", None, {"alone": False}, 1),
        ("tags", "<answer>b</answer><think>a</think>", None, {}, 0),
        ("tags", "<think>a<answer>b</answer></think>", None, {}, 0),
        ("tags", "<think> </think><answer>b</answer>", None, {}, 0),
        ("tags", ["<think>a</think><answer>b</answer>", "b"], None, {}, 0.5),
        ("tags", ["b", "<think>a</think><answer>b</answer>"], None, {"last_only": True}, 1),
        ("length", "1234567890", None, {"free": 10, "limit": 20}, 0),
        ("length", "123456789012345", None, {"free": 10, "limit": 20}, -0.5),
        ("length", "1" * 50, None, {"free": 10, "limit": 20}, -1),
        ("length", ["a", "b", "c"], None, {"free": 1, "limit": 3, "unit": "turns"}, -1),
    ],
)
def test_a_rule_tells_right_from_wrong(name, answer, gold, settings, value):
    assert judge(name, answer, gold, **settings) == pytest.approx(value)


@pytest.mark.slow  # importing sympy takes seconds
@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        (r"so we get \boxed{\frac{2}{4}}", "0.5", 1),
        ("$1 + 2x$", "2x+1", 1),
        (r"$\{2, 1\}$", r"\{1,2\}", 1),
        ("The answer is 41", "42", 0),
        ("no idea", "42", 0),
        ("$5 = 7$", "7", 0),
        ("$1 = 7 = 7$", "7", 0),
        ("$3 + 4 = 7$", "7", 1),
        ("$x = 7$", "7", 1),
        ("$7 = x$", "x = 7", 1),
        (r"$7\%$", "7", 0),
        (r"$700\%$", "7", 0),
        ("7%", "0.07", 1),
        (r"$7\%$", r"$7\%$", 1),
        ("$7$", r"$7\%$", 0),
        ("$[7,7]$", "7", 0),
        (r"$\{7\}$", "7", 0),
        ("$[7,8]$", "[7,8]", 1),
        ("True", "1", 0),
    ],
)
def test_mathematics_is_held_against_mathematics(answer, gold, value):
    assert judge("math", answer, gold) == value
    with pytest.raises(ConfigError, match="no mathematics"):
        judge("math", "1", "$ $")


def test_a_truth_value_is_no_right_number():
    with pytest.raises(ConfigError, match="truth value"):
        judge("numeric", "1", True)


@pytest.mark.parametrize("name", ["exact", "numeric", "choice", "math", "regex", "json_schema"])
def test_no_message_at_all_is_wrong(name):
    gold = {"regex": "x", "json_schema": {}, "choice": "A"}.get(name, "1")
    assert judge(name, [], gold) == 0.0


def test_a_task_without_a_right_answer_or_with_another_form_of_it_is_an_error_with_a_remedy():
    rule = load("rewards", "exact")
    with pytest.raises(
        ConfigError, match=r"has no option 'answer'.*it has 'size'. Write gold: OPTION"
    ):
        rule(rule.Config()).content(trajectory("x", options={"size": 4}))
    with pytest.raises(ConfigError, match="'answer' is 'many': the rule `numeric` needs a number"):
        judge("numeric", "3", "many")
    with pytest.raises(ConfigError, match="one of the letters ABCDE, or its number"):
        judge("choice", "A", "Q")
    with pytest.raises(ConfigError, match="no regular expression"):
        judge("regex", "x", "(")
    with pytest.raises(ValueError, match="no regular expression"):
        judge("regex", "x", pattern="(")
    with pytest.raises(ConfigError, match="a pattern is text"):
        judge("regex", "x", 42)
    with pytest.raises(ConfigError, match="needs a text or a number"):
        judge("exact", "x", {"a": 1})
    with pytest.raises(ConfigError, match="too large"):
        judge("numeric", "x", 10**400)
    with pytest.raises(ConfigError, match="not a JSON schema"):
        judge("json_schema", "1", {"type": "nonsense"})
    with pytest.raises(ValueError, match=r"free \(5\) has to be below limit \(5\)"):
        judge("length", "x", free=5, limit=5)


@given(
    st.floats(-1e15, 1e15, allow_nan=False), st.sampled_from(["{:.6f}", "{:,.6f}", "{:.9e}", "{}"])
)
def test_a_number_is_read_as_it_was_written(value, form):
    assert last_number(f"after 17, it is {form.format(value)}.") == pytest.approx(
        value, rel=1e-6, abs=1e-5
    )


def test_a_sign_before_a_currency_is_that_of_the_number():
    for text in ("It lost -$1,200.50.", "−€1200.50", "-\\$1200.50", "negative $1200.50"):
        assert last_number(text) == -1200.5
    assert last_number("from $3-$5") == last_number("10 - $5") == 5


def test_tool_use_counts_malformed_refused_and_repeated_calls():
    price, wrong = ToolCall("price", {"shop": "north"}).render(), ToolCall("pric", {}).render()
    said = trajectory(
        [price, wrong, "<tool_call>{</tool_call>", price],
        observations=["3", "Error: no tool", "Error", "3"],
    )
    rule = load("rewards", "tool_use")
    score = rule(rule.Config()).evaluate(rule(rule.Config()).content(said))
    assert score == Score(0.25, {"calls": 4, "malformed": 0.25, "refused": 0.25, "repeated": 0.25})
    lenient = rule(rule.Config(repeats=False))
    assert lenient.evaluate(lenient.content(said)).value == 0.5
    assert judge("tool_use", "no call", without_calls=-1.0) == Score(
        -1.0, {"calls": 0, "malformed": 0, "refused": 0, "repeated": 0}
    )


HOSTILE = [
    ("regex", "a" * 40, {"pattern": r"(a+)+b"}),
    (
        "json_schema",
        '"' + "a" * 40 + '"',
        {"json_schema": {"type": "string", "pattern": "^(a+)+$b"}},
    ),
    ("math", r"\boxed{10^{10^{10^{10}}}}", {}),
    ("math", r"\boxed{(99999!)!}", {}),
]
HARMLESS = [
    ("json_schema", "[" * 15_000 + "]" * 15_000, {"json_schema": {}}),
    ("numeric", "9" * 200_000, {}),
    ("numeric", "1e" * 50_000, {}),
    ("choice", "answer is (" * 20_000, {}),
    ("exact", "<answer>" * 30_000, {"tag": "answer"}),
    ("tags", "<think>" * 30_000, {}),
    ("math", "(" * 5_000, {}),
]
PART = {"exact": "1", "numeric": 7, "choice": "A", "math": "1"}


def parts_of(cases: list[tuple[str, str, dict]]) -> list[RewardPart]:
    return [
        RewardPart(build_reward(load("rewards", name), settings), f"{name}/{number}")
        for number, (name, _, settings) in enumerate(cases)
    ]


async def outcomes(pool: RulePool, cases: list[tuple[str, str, dict]]) -> list[float]:
    """The score of each case. A plain answer before and after is right."""
    plain = ("math", "$2$", {"gold": "two"})
    *parts, warm = parts_of([*cases, plain])
    found = []
    asks = {part: part.bind(pool) for part in (*parts, warm)}
    async with RewardPipeline([*parts, warm], pool, deadline=PATIENCE_SECONDS):
        two = trajectory("$2$", options={"two": "2"})
        assert (await asks[warm]([two]))[0].value == 1.0
        for part, (name, answer, _) in zip(parts, cases, strict=True):
            found.append(
                (await asks[part]([trajectory(answer, options={"answer": PART.get(name)})]))[
                    0
                ].value
            )
        pool.forget()
        assert (await asks[warm]([two]))[0].value == 1.0
    return found


@pytest.mark.slow
def test_a_hostile_answer_uses_up_its_cpu_time_and_is_wrong_and_the_pool_is_alive_after():
    limits = RulePoolConfig(workers=2, cpu_seconds=1.0, deadline=PATIENCE_SECONDS, memory_mb=1500)
    found = asyncio.run(outcomes(RulePool(limits), HOSTILE))
    assert found == [0.0] * len(HOSTILE)
    left = [
        name
        for name in map(title, psutil.Process().children(recursive=True))
        if "spawn_main" in name
    ]
    assert left == []


DRIVER = """
import asyncio, re
from agentrl.scoring.rule_pool import RulePool, RulePoolConfig

async def main():
    async with RulePool(RulePoolConfig(deadline=2.0, workers=1)) as pool:
        await pool.run(re.compile("x").search, "")
        print("ready", flush=True)
        await pool.run(re.compile("(a+)+b").fullmatch, "a" * 60)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.long
def test_a_rule_that_hangs_when_the_driver_is_killed_does_not_outlive_it_for_long(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        time.sleep(0.3)
        children = psutil.Process(driver.pid).children(recursive=True)
        assert len(children) >= 2
        driver.kill()
    assert still_alive(children, 40) == []  # 3 s of computing, on a machine that may be busy


@pytest.mark.long
def test_long_answers_are_wrong_and_slow_nothing_down():
    limits = RulePoolConfig(workers=1, deadline=PATIENCE_SECONDS)
    assert asyncio.run(outcomes(RulePool(limits), HARMLESS)) == [0.0] * len(HARMLESS)


class Naps:
    """A rule that waits and computes nothing, like any on a machine without free CPU time."""

    def content(self, played: Trajectory) -> float:
        return 0.0

    def evaluate(self, content: float) -> float:
        time.sleep(3600)
        return 1.0


@pytest.mark.slow
def test_a_rule_that_misses_its_deadline_without_computing_fails_and_is_no_verdict():
    async def main() -> None:
        pool = RulePool(RulePoolConfig(workers=1, deadline=1.0))
        part = RewardPart(Naps(), "naps")
        ask = part.bind(pool)
        async with pool:
            with pytest.raises(RewardError, match="did not answer within 1 s") as failed:
                await ask([trajectory("x")])
            assert not isinstance(failed.value, RuleLimitError)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["exact", "numeric", "tags", "tool_use", "environment"])
def test_the_built_in_rewards_keep_the_contract(name):
    factory = load("rewards", name)
    played = [
        trajectory(text, options={"answer": "4"}) for text in ("4", "5", "<think>4</think>", "")
    ]
    check_reward(lambda: factory(factory.Config()), played)


@pytest.mark.parametrize(
    ("returned", "expected", "equal"),
    [
        (True, 1, False),
        (1, True, False),
        ([True], [1], False),
        (True, True, True),
        (1, 1.0, True),
        (0, 5e-10, False),
        (1e-12, 0.0, True),
        (10**400, 1.5, False),
        (1.5, 10**400, False),
        (0.1 + 0.2, 0.3, True),
        ((1, 2), [1, 2], False),
        ([1, 2], (1, 2), True),
    ],
)
def test_the_result_of_a_program_is_compared_by_kind_and_to_nine_digits(returned, expected, equal):
    assert _equal(returned, expected) is equal


@pytest.mark.parametrize(
    ("rule", "module", "options"),
    [
        ("math", "math_verify", {"answer": "1/2"}),
        ("json_schema", "jsonschema", {"schema": {"type": "object"}}),
    ],
)
def test_a_rule_whose_package_is_missing_says_how_to_install_it(monkeypatch, rule, module, options):
    monkeypatch.setitem(sys.modules, module, None)
    factory = load("rewards", rule)
    made = factory(factory.Config())
    look = getattr(made, "check_first_task", made.golds)
    with pytest.raises(ConfigError, match=f"{rule} needs .*pip install 'agentrl-train.rewards.'"):
        look(Task("qa", 0, options))
