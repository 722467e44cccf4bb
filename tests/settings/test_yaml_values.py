"""YAML is read in one way, from files and from the command line, and what is written is read back
as it was.
"""

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.cli.arguments import env_options
from agentrl.config import RunConfig, load_config, validate_config
from agentrl.errors import ConfigError
from agentrl.settings import yaml_values
from agentrl.settings.base import Settings
from agentrl.settings.yaml_values import in_yaml, read_value, read_yaml, to_yaml, value_of

WRITTEN: list[tuple[str, Any]] = [
    ("1e-3", 0.001),
    ("1E5", 1e5),
    ("-1e3", -1000.0),
    ("+.5e3", 500.0),
    (".5", 0.5),
    ("5.", 5.0),
    ("0.1", 0.1),
    ("5e-324", 5e-324),
    ("0.30000000000000004", 0.1 + 0.2),
    ("6.02e23", 6.02e23),
    ("-0.0", -0.0),
    ("1.0", 1.0),
    ("0", 0),
    ("123456789012345680.0", 123456789012345680.0),
    ("007", 7),
    ("010", 10),
    ("08", 8),
    ("-0", 0),
    ("+3", 3),
    ("0x1F", 31),
    ("-0x10", -16),
    ("0o17", 15),
    ("0b101", 5),
    ("1_000_000", 1_000_000),
    ("1_000.5", 1000.5),
    ("9223372036854775808", 2**63),
    ("1" * 60, int("1" * 60)),
    ("'007'", "007"),
    ('"007"', "007"),
    ("'1e-3'", "1e-3"),
    ("'true'", "true"),
    ("'null'", "null"),
    ("''", ""),
    ("' x '", " x "),
    ("'it''s'", "it's"),
    (r'"a\nb\tc"', "a\nb\tc"),
    (r'"\0\x7f\x85\u2028\ufeff\U0001F600"', "\0\x7f\x85\u2028\ufeff\U0001f600"),
    ("'yes'", "yes"),
    ("'2026-11-25'", "2026-11-25"),
    ("'.inf'", ".inf"),
    ("'0x1F'", "0x1F"),
    ("'1_000'", "1_000"),
    ("'~'", "~"),
    ("'a # b: c'", "a # b: c"),
    ("'- a'", "- a"),
    ("'[1]'", "[1]"),
    ("a#b", "a#b"),
    ("nan", "nan"),
    ("NaN", "NaN"),
    ("inf", "inf"),
    ("-inf", "-inf"),
    ("infinity", "infinity"),
    ("12:30", "12:30"),
    ("190:20:30", "190:20:30"),
    ("2026-11-25", "2026-11-25"),
    ("2026-11-25T10:00:00Z", "2026-11-25T10:00:00Z"),
    ("2026-11-25 10:00:00", "2026-11-25 10:00:00"),
    ("1.2.3", "1.2.3"),
    ("1e", "1e"),
    ("e3", "e3"),
    ("0x", "0x"),
    ("0xg", "0xg"),
    ("_1", "_1"),
    ("1_", "1_"),
    ("1__0", "1__0"),
    (".", "."),
    ("..", ".."),
    ("...", "..."),
    ("---", "---"),
    ("=", "="),
    ("<<", "<<"),
    ("a=b", "a=b"),
    ("http://h:80/p?q=1#f", "http://h:80/p?q=1#f"),
    (r"C:\new", r"C:\new"),
    ("Grüße, 世界 \U0001f600", "Grüße, 世界 \U0001f600"),
    ("two words", "two words"),
    ("true", True),
    ("False", False),
    ("yes", True),
    ("no", False),
    ("on", True),
    ("OFF", False),
    ("y", "y"),
    ("tRUE", "tRUE"),
    ("null", None),
    ("~", None),
    ("", None),
    ("Null", None),
    ("none", "none"),
    ("None", "None"),
    ("[]", []),
    ("{}", {}),
    (
        "[1e-3, '007', nan, 2026-11-25, 12:30, ~]",
        [0.001, "007", "nan", "2026-11-25", "12:30", None],
    ),
    ("[[], [[]], {}]", [[], [[]], {}]),
    ("{a: 1, 'b c': [true]}", {"a": 1, "b c": [True]}),
    (
        "{1: a, 1.5: b, yes: c, null: d, 2026-11-25: e}",
        {"1": "a", "1.5": "b", "yes": "c", "null": "d", "2026-11-25": "e"},
    ),
    ("{a.b: 1, '': 2, ' ': 3}", {"a.b": 1, "": 2, " ": 3}),
    ("[{1: {2: 3}}]", [{"1": {"2": 3}}]),
    (
        "{tasks: q.jsonl, name: x, reward: {'1': exact}}",
        {"tasks": "q.jsonl", "name": "x", "reward": {"1": "exact"}},
    ),
    ("{mixture: [a, b], '0': {name: null}}", {"mixture": ["a", "b"], "0": {"name": None}}),
    ("[&a [1], *a, *a]", [[1], [1], [1]]),
    ("{a: &x {p: 1, q: 2}, b: {<<: *x, q: 3}}", {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}}),
    ("{<<: [{p: 1}, {p: 2, q: 2}], r: 3}", {"p": 1, "q": 2, "r": 3}),
    ("{'<<': 1}", {"<<": 1}),
    ("!!str 007", "007"),
    ("!!float 3", 3.0),
    ("!!int '3'", 3),
    ("[" * 90 + "]" * 90, None),
]
"""Texts of YAML, and the values that they are."""
WRITTEN[-1] = (WRITTEN[-1][0], eval(WRITTEN[-1][0]))
REFUSED = {
    ".nan": "nan is not a finite number",
    ".inf": "inf is not a finite number",
    "[{a: -.INF}]": "-inf is not a finite number",
    "1e31": "too large to compute with",
    "1e999": "too large a number",
    "!!binary aGk=": "the tag !!binary",
    "!!timestamp 2026-11-25": "the tag !!timestamp",
    "!!set {a, b}": "the tag !!set",
    "!!python/object/apply:os.system [ls]": "the tag !!python/object/apply:os.system",
    "!mine x": "the tag !mine",
    "{!mine x: 1}": "the tag !mine",
    "!!int x": "'x', which is no int",
    "!!bool 7": "'7', which is no bool",
    "9" * 5000: "a number that is too long",
    "{a: 1, a: 2}": "'a' for the second time",
    "{a: 1, 'a': 2}": "'a' for the second time",
    "[{x: {a: 1, a: 1}}]": "'a' for the second time",
    "{[a]: 1}": "a key that is a list",
    "{<<: 3}": "`<<` without a mapping",
    "{<<: {a: 1}, <<: {b: 1}}": "a second `<<`",
    "&a [*a]": "holds itself",
    "&a {x: {<<: *a}}": "holds itself",
    r"*a": "not YAML",
    "@a": "not YAML",
    "[1, 2": "not YAML",
    "[" * 150 + "]" * 150: "more than 100 levels",
    "[" * 600: "(more than 100 levels|not YAML)",
}
"""Texts that are no values of settings, and what is said of them."""


@pytest.fixture(params=["built", "pure"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With libyaml, if it is there, and without."""
    if request.param == "pure":
        pure = type(
            "Pure",
            (yaml.SafeLoader,),
            {"yaml_implicit_resolvers": yaml_values._Reader.yaml_implicit_resolvers},
        )
        monkeypatch.setattr(yaml_values, "_Reader", pure)


def same(one: Any, other: Any) -> bool:
    """Equal, also in their types: 1 is neither 1.0 nor true."""
    if isinstance(one, dict):
        return (
            type(other) is dict
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list):
        return type(other) is list and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def options_of(path: Path, *overrides: str) -> Any:
    return load_config(path, overrides).config.env.options


@pytest.mark.usefixtures("reader")
def test_a_value_is_the_same_from_a_file_an_override_an_option_and_a_saved_config(
    tmp_path: Path,
) -> None:
    path, saved = tmp_path / "run.yaml", tmp_path / "config.yaml"
    expected = {f"k{number}": value for number, (_, value) in enumerate(WRITTEN)}
    texts = [text for text, _ in WRITTEN]
    lines = "".join(f"    k{number}: {text}\n" for number, text in enumerate(texts))
    path.write_text(f"env:\n  name: frozen_lake\n  options:\n{lines}", encoding="utf-8")
    assert same(options_of(path), expected)
    saved.write_text(load_config(path).config.to_yaml())
    assert same(options_of(saved), expected)
    path.write_text("env: frozen_lake\n")
    assert same(
        options_of(path, *(f"env.options.k{number}={text}" for number, text in enumerate(texts))),
        expected,
    )
    assert same(
        options_of(
            path, *(f"env.options.{key}={in_yaml(value)}" for key, value in expected.items())
        ),
        expected,
    )
    for text, value in WRITTEN:
        assert same(env_options(f"k: {text}"), {"k": value}), text


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(("text", "why"), REFUSED.items(), ids=list(range(len(REFUSED))))
def test_what_is_no_value_is_refused_alike_everywhere(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"env:\n  name: frozen_lake\n  options:\n    k: {text}\n")
    with pytest.raises(ConfigError, match=rf"run\.yaml:?[45]?: .*{why}|{why}.*run\.yaml:4"):
        load_config(path)
    path.write_text("env: frozen_lake\n")
    with pytest.raises(ConfigError, match=why):
        load_config(path, [f"env.options.k={text}"])
    with pytest.raises(ConfigError, match=f"--options.*{why}"):
        env_options(f"k: {text}")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e30, 1e30) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(PLAIN)
def test_what_is_written_is_read_back(value: Any) -> None:
    root = read_yaml(to_yaml({"value": value}), "")
    assert root is not None
    assert same(value_of(root), {"value": value})
    assert same(read_value(in_yaml(value)), value)
    assert same(yaml.safe_load(to_yaml({"value": value})), {"value": value}), (
        "other programs read it as we do"
    )


def test_infinities_are_read_and_written() -> None:
    for text, value in ((".inf", math.inf), ("-.Inf", -math.inf)):
        assert read_value(text) == value
        assert read_value(in_yaml(value)) == value
    assert math.isnan(read_value(in_yaml(read_value(".NaN"))))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Answer # 3", "'# 3' would be left out as a comment"),
        ("[1, 2] # two", "'# two' would be left out as a comment"),
        ("# all", "'# all' would be left out as a comment"),
        ("one\n  two", "several lines"),
        ("one\nb: 2", "several lines"),
        ("a: b", "not YAML"),
        ("- a", "not YAML"),
    ],
)
def test_an_override_loses_nothing_in_silence(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: frozen_lake\n")
    with pytest.raises(ConfigError, match=rf"cannot read the value of the override .*{why}.*Quote"):
        load_config(path, [f"env.rules={text}"])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_may_have_each_encoding_of_yaml(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: {name: frozen_lake, rules: Grüße}\n", encoding=encoding)
    assert load_config(path).config.env.rules == "Grüße"


def test_settings_are_merged_from_an_anchor_with_the_lines_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "env: frozen_lake\nalgorithm: ppo\ntrainer: &t\n  lr: 1e-3\n  warmup_steps: 3\n"
        "critic:\n  <<: *t\n  warmup_steps: 5\n"
    )
    loaded = load_config(path)
    critic = loaded.config.critic.settings
    assert (critic.lr, critic.warmup_steps) == (1e-3, 5)
    origins = {key: origin.rpartition(":")[2] for key, _, origin in loaded.rows()}
    assert (origins["critic.lr"], origins["critic.warmup_steps"]) == ("4", "8")


def test_a_setting_that_is_written_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: frozen_lake\nseed: 1\ntrainer: {lr: 1}\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:4: 'seed' for the second time, after line 2"):
        load_config(path)


SECTIONS = sorted(RunConfig.model_fields.keys() - {"seed", "steps", "run_dir", "trackers", "env"})
SECTIONS += [
    "rollout.budget",
    "rollout.sampling",
    "env.options",
    "env.agents",
    "rollout.deadlines",
    "trainer.name",
]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_whose_lines_are_all_comments_is_as_one_that_is_left_out(
    tmp_path: Path, section: str
) -> None:
    path, nested = tmp_path / "run.yaml", section.split(".")
    path.write_text("env: frozen_lake\n")
    as_usual = load_config(path).config
    env = "" if nested[0] == "env" else "env: frozen_lake\n"
    inner = (
        f"{nested[0]}:\n" if len(nested) == 1 else f"{nested[0]}:\n  {nested[1]}:\n    # comment\n"
    )
    path.write_text(env + inner)
    assert load_config(path, ["env=frozen_lake"]).config == as_usual


WRONG = [
    "5",
    "true",
    "[]",
    "[null]",
    "[5]",
    "[[x]]",
    "{0: null}",
    "{0: 5}",
    "{name: null, x: 1}",
    "{name: 5}",
    "{1: a}",
]


@pytest.mark.parametrize(
    "section",
    [*SECTIONS, "env", "env.mixture", "evaluation.suites", "trackers", "recipe.demonstrations"],
)
def test_something_else_than_a_section_ends_in_no_traceback(tmp_path: Path, section: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: frozen_lake\n")
    for wrong in WRONG:
        for others in ([], ["env=[frozen_lake, guess_number]"], ["algorithm=ppo"]):
            with suppress(ConfigError):
                load_config(path, [*others, f"{section}={wrong}"])


@pytest.mark.parametrize("wrong", [(3, 4), {1: "a"}, b"x", {"s"}, Path("p"), 1 + 2j])
def test_a_value_that_files_do_not_keep_is_refused_at_launch(wrong: Any) -> None:
    for value in (wrong, {"deep": [wrong]}):
        with pytest.raises(ConfigError, match=r"env\.options: .*(would come back|is a key)"):
            validate_config({"env": {"name": "frozen_lake", "options": {"x": value}}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:\n\tb: 1\n", "f:2: this is not YAML: a tab begins a line or a value: indent by"),
        ("a: b\n\tc: d\n", "f:2: this is not YAML: a tab begins a line or a value: indent by"),
        ("ä: ö\nb: %x\n", "f:2: this is not YAML: % begins a value: put the value in quotes"),
        ("b: `x`\n", "f:1: this is not YAML: ` begins a value: put the value in quotes"),
    ],
)
@pytest.mark.parametrize("encoded", [False, True])
def test_a_character_that_begins_no_value_is_named(text: str, said: str, encoded: bool) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_yaml(text.encode() if encoded else text, "f")


class _Numbers(Settings):
    count: int = 1
    rate: float | None = None
    room: int | Literal["auto"] = "auto"
    flag: bool = False
    either: int | bool = 0
    text: float | str = ""
    value: Any = None


@pytest.mark.parametrize("name", ["count", "rate", "room"])
def test_true_is_no_number(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="Input should be a"):
        _Numbers.model_validate({name: True})
    taken = _Numbers.model_validate({"flag": True, "either": True, "value": True})
    assert (taken.flag, taken.either, taken.value) == (True, True, True)
    path = tmp_path / "run.yaml"
    path.write_text("env: frozen_lake\nsteps: yes\n")
    with pytest.raises(
        ConfigError, match=r"^steps: Input should be a valid integer.* got 'True' \(.*:2\)"
    ):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("STEPS=3", r"STEPS: no such setting .* Did you mean 'steps'?"),
        ("algorithm=GRPO", r"no algorithm named 'GRPO'. Did you mean 'grpo'?"),
        ("env=FrozenLake", r"no env named 'FrozenLake'. Did you mean 'frozen_lake'?"),
    ],
)
def test_a_name_in_capitals_is_answered_with_the_right_one(
    override: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: frozen_lake\n")
    with pytest.raises(ConfigError, match=said):
        load_config(path, [override])
