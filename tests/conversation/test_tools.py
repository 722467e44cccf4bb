"""Tools: schemas from methods, arguments held against them, and calls read out of whatever a model
writes.
"""

import json
import time
from contextlib import suppress
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.conversation.tools import ToolError, ToolSpec, find_tool, tools_of
from agentrl.errors import ConfigError
from agentrl.trajectory import ToolCall

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=4)
# Texts made of the pieces that parsing looks at, besides any text at all.
tricky = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "{",
                "}",
                "[",
                "]",
                '"',
                '"name"',
                ":",
                ",",
                '{"name": "a", "arguments": {}}',
            ),
            *(
                "```json",
                "```",
                "\n",
                " ",
                "\\",
                "NaN",
                "1" * 5000,
                '"arguments"',
                "null",
                "é",
                "\ud800",
                "\x00",
            ),
        ]
    ),
    max_size=25,
).map("".join)


class Point(BaseModel):
    x: int
    y: int = 0


class Kit:
    """A class with every kind of parameter."""

    def look(self) -> str:
        """Look around."""
        return ""

    def go(
        self, direction: Literal["north", "south"], steps: int = 1, note: str | None = None
    ) -> str:
        """Walk.

        Somewhere else.

        Args:
            direction: where to; it may
                take two lines
            steps (int): how far

        Returns:
            what is there
        """
        return f"{direction} {steps} {note}"

    def mark(
        self, points: list[Point], weight: Annotated[float, Field(gt=0, description="in kg")]
    ) -> str:
        return ""

    def copy(
        self, schema: str, json: bool, model_config: int
    ) -> str:  # names that pydantic models have themselves
        return ""

    @staticmethod
    async def wait(seconds: float) -> str:
        return ""

    @property
    def size(self) -> int:
        return 1

    def _hidden(self, x) -> str:  # type: ignore[no-untyped-def]
        return ""


def spec(name: str) -> ToolSpec:
    return find_tool(tools_of(Kit), name)


def test_the_public_methods_of_a_class_or_an_instance_are_its_tools_in_order() -> None:
    names = ["look", "go", "mark", "copy", "wait"]
    assert [tool.name for tool in tools_of(Kit)] == [tool.name for tool in tools_of(Kit())] == names


def test_the_methods_of_the_base_are_no_tools() -> None:
    class More(Kit):
        def go(
            self, direction: Literal["north", "south"], steps: int = 1, note: str | None = None
        ) -> str:
            return ""

        def extra(self) -> str:
            return ""

    assert [tool.name for tool in tools_of(More, base=Kit)] == ["extra"]


def test_the_schema_says_names_types_defaults_and_descriptions() -> None:
    assert spec("go").schema == {
        "type": "function",
        "function": {
            "name": "go",
            "description": "Walk.\n\nSomewhere else.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "direction": {
                        "type": "string",
                        "enum": ["north", "south"],
                        "description": "where to; it may take two lines",
                    },
                    "steps": {"type": "integer", "default": 1, "description": "how far"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                },
                "required": ["direction"],
            },
        },
    }
    assert (
        spec("mark").schema["function"]["parameters"]["properties"]["weight"]["description"]
        == "in kg"
    )


def test_arguments_are_validated_and_defaults_are_left_to_the_method() -> None:
    assert spec("go").validate({"direction": "north"}) == {"direction": "north"}
    assert Kit().go(**spec("go").validate({"direction": "north", "note": None})) == "north 1 None"
    assert spec("look").validate({}) == {}
    assert spec("wait").validate({"seconds": 2}) == {"seconds": 2.0}
    assert (
        spec("copy").validate({"schema": "s", "json": True, "model_config": 3})["model_config"] == 3
    )


def test_nested_models_reach_the_method_as_models() -> None:
    assert spec("mark").validate({"points": [{"x": 1}], "weight": 1.5})["points"] == [
        Point(x=1, y=0)
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("go", {}, "'direction' is missing"),
        ("go", {"direction": "up"}, "'north' or 'south'"),
        (
            "go",
            {"direction": "north", "steps": "2"},
            "'steps': input should be a valid integer, got '2'",
        ),
        ("go", {"direction": "north", "steps": True}, "valid integer, got True"),
        ("go", {"direction": "north", "steps": 1.5}, "valid integer"),
        ("go", {"direction": "north", "steps": None}, "valid integer"),
        (
            "go",
            {"direction": "north", "speed": 2},
            "there is no argument 'speed'. go takes direction, steps (optional",
        ),
        ("mark", {"points": [{"x": "1"}], "weight": 1}, "'points.0.x'"),
        ("mark", {"points": [], "weight": 0}, "greater than 0"),
        ("look", {"at": "sky"}, "look takes no arguments"),
        ("look", {"at": object()}, "not plain JSON"),
        ("go", {"direction": "\ud800"}, "go takes direction"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ToolError) as error:
        spec(name).validate(arguments)
    assert said in str(error.value)


class Several:
    def take(self, count: int | Literal["all"] | list[int]) -> str:
        """Take some."""
        return "taken"


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (
            "al",
            "'count': input should be a valid integer or 'all' or a valid array, got 'al'. take",
        ),
        ([1, "a"], "'count.1': input should be a valid integer, got 'a'. take"),
    ],
)
def test_an_argument_of_several_types_is_refused_in_one_sentence(count: Any, said: str) -> None:
    (take,) = tools_of(Several)
    with pytest.raises(ToolError) as caught:
        take.validate({"count": count})
    assert str(caught.value).startswith(f"take: {said}")


def test_an_unknown_tool_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ToolError, match="did you mean 'look'") as error:
        find_tool(tools_of(Kit), "lok")
    assert "look, go, mark" in str(error.value)
    with pytest.raises(ToolError, match=r"there is no tool 'zzz'\. Tools: look"):
        find_tool(tools_of(Kit), "zzz")


def test_a_method_that_cannot_be_a_tool_is_an_error_with_a_way_out() -> None:
    class Untyped:
        def go(self, where) -> str:  # type: ignore[no-untyped-def]
            return ""

    class Variadic:
        def go(self, *where: str) -> str:
            return ""

    class NoJson:
        def go(self, where: type[Kit] | Kit) -> str:
            return ""

    with pytest.raises(ConfigError, match=r"Untyped.go.*`where: int`.*`_go`"):
        tools_of(Untyped)
    with pytest.raises(ConfigError, match=r"\*where: str cannot be filled"):
        tools_of(Variadic)
    with pytest.raises(ConfigError, match="cannot be expressed in JSON"):
        tools_of(NoJson)


@settings(deadline=None)
@given(
    name=st.text(),
    arguments=json_objects,
    before=st.text(alphabet="ab \n"),
    after=st.text(alphabet="ab \n"),
)
def test_what_is_rendered_is_read_back(
    name: str, arguments: dict[str, Any], before: str, after: str
) -> None:
    call = ToolCall(name, arguments)
    reply = parse_tool_calls(f"{before}{call.render()}{after}")
    assert reply.calls == (call,)
    assert reply.errors == ()
    assert reply.text == (before + after).strip()


@settings(deadline=None)
@given(
    arguments=json_objects, key=st.sampled_from(["arguments", "parameters"]), fenced=st.booleans()
)
def test_bare_and_fenced_json_is_read_back(
    arguments: dict[str, Any], key: str, fenced: bool
) -> None:
    body = json.dumps({"name": "f", key: arguments}, indent=1)
    # A rendered call may not hold the tag, else the tag is what counts.
    reply = parse_tool_calls(f"so:\n```json\n{body}\n```" if fenced else f"so: {body}")
    if "<tool_call>" not in body:
        assert reply.calls == (ToolCall("f", arguments),)
        assert (reply.text, reply.errors) == ("so:", ())


@settings(deadline=None)
@given(st.text() | tricky)
def test_any_text_at_all_is_read_without_an_exception(text: str) -> None:
    reply = parse_tool_calls(text)
    for call in reply.calls:
        for tool in tools_of(Kit):
            with suppress(ToolError):
                tool.validate(call.arguments)


@pytest.mark.parametrize(
    "piece", ["[", '{"a":', '{"name":', "<tool_call>", "<tool_call>[", '[{"', "```", " {"]
)
def test_the_time_for_hostile_texts_grows_with_their_length_and_no_faster(piece: str) -> None:
    started = time.process_time()
    reply = parse_tool_calls(piece * 10_000)
    # A fraction of a second; where it grows with the square, an hour.
    assert time.process_time() - started < 60
    assert reply.calls == ()


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    text = (
        'First <tool_call>\n{"name": "a", "arguments": {"x": "</tool_call>"}}\n</tool_call>'
        ' then\n<tool_call>{"name": "b"}</tool_call><tool_call>[{"name": "c", "arguments":'
        ' "{\\"y\\": 1}"}]'
    )
    reply = parse_tool_calls(text)
    assert reply.calls == (
        ToolCall("a", {"x": "</tool_call>"}),
        ToolCall("b", {}),
        ToolCall("c", {"y": 1}),
    )
    assert reply.errors == ()
    assert reply.text == "First  then"


def test_a_list_of_bare_calls_is_read() -> None:
    reply = parse_tool_calls(
        '[{"name": "a", "arguments": {}}, {"name": "b", "parameters": {"x": [1]}}]'
    )
    assert reply.calls == (ToolCall("a", {}), ToolCall("b", {"x": [1]}))


def test_json_that_is_no_call_is_text() -> None:
    text = 'The set {"x": 1} and {1, 2} and {"name": "Bob"} and [{"name": "Bob"}] and { and {"a'
    assert parse_tool_calls(text) == parse_tool_calls("").__class__(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "a", "arguments": {"x": 1,}}</tool_call>', "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>", "nothing is there"),
        ('<tool_call>{"name": "a"} and more</tool_call>', "nothing after it"),
        ("<tool_call>a(x=1)</tool_call>", "near 'a(x=1)"),
        ("<tool_call>5</tool_call>", 'with a "name"'),
        ('<tool_call>{"name": 5}</tool_call>', 'with a "name"'),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        (
            '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
            "not valid JSON",
        ),
        pytest.param(  # some Pythons read 10,000 of them
            "<tool_call>" + "[" * 1_000_000 + "</tool_call>", "nested too deeply", id="nested"
        ),
        (
            '<tool_call>{"name": "a", "arguments": {"x": '
            + "[" * 300
            + "]" * 300
            + "}}</tool_call>",
            "too deep nesting",
        ),
        ('<tool_call>{"name": "a", "arguments": {"x": 1e400}}</tool_call>', "an infinite number"),
        (
            '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',
            "half of a surrogate pair",
        ),
        ('{"name": "a", "arguments": {"x": 1}', "not valid JSON"),
        ('```json\n{"name": "a", "arguments": {x: 1}}\n```', "not valid JSON"),
        ('{"name": 5, "arguments": {}}', 'with a "name"'),
    ],
)
def test_a_malformed_call_is_an_error_that_says_what_is_wrong(text: str, said: str) -> None:
    reply = parse_tool_calls(text)
    assert reply.calls == ()
    assert len(reply.errors) == 1
    assert said in reply.errors[0]
    assert len(reply.errors[0]) < 300


def test_endless_malformed_calls_give_a_short_answer() -> None:
    assert len(parse_tool_calls("<tool_call>{oops" * 1000).errors) == 8


def test_a_malformed_call_does_not_hide_the_next() -> None:
    good = '<tool_call>{"name": "b"}</tool_call>'
    for bad in (
        "<tool_call>{oops</tool_call>",
        "<tool_call>{oops",
        '<tool_call>{"name": "a"} oops</tool_call>',
    ):
        reply = parse_tool_calls(bad + good)
        assert reply.calls == (ToolCall("b", {}),)
        assert len(reply.errors) == 1
