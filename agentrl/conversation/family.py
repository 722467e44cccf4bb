"""Model families that the library `renderers` knows: their own rules for prompts, answers and
calls.

A model is recognised by what its chat template writes: a family's rules must give the very same
tokens for a few conversations. So a folder with any name is recognised, a fine-tuned model too, and
one whose template was changed is not. Models that are not recognised are rendered by their template
(`agentrl.conversation.chat_template`).
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from typing import Any

from agentrl.conversation.harmony import read_harmony
from agentrl.conversation.library_formats import calls_in
from agentrl.conversation.reading import Reading, is_call
from agentrl.errors import ConfigError
from agentrl.tokens.arrays import IntArray, ints
from agentrl.trajectory import Message, ToolCall

logger = logging.getLogger(__name__)

_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "string"},
                "c": {"type": "array"},
            },
            "required": ["a", "b"],
        },
    },
}
_CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "add", "arguments": {"a": 1, "b": "x y", "c": [1, {"d": True}]}},
}
_USER, _ANSWER = {"role": "user", "content": "U u?"}, {"role": "assistant", "content": "A a."}
_PROBES: Sequence[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = (
    ([{"role": "system", "content": "S s."}, _USER], None),
    ([_USER, _ANSWER, {"role": "user", "content": "V v."}], None),
    (
        [
            {"role": "system", "content": "S s."},
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "R r", "tool_call_id": "call00001", "name": "add"},
        ],
        [dict(_TOOL)],
    ),
    ([_USER, {**_ANSWER, "reasoning_content": "T t."}, {"role": "user", "content": "V v."}], None),
)
"""Conversations that tell the families apart: a system message, a second turn, a call with its
result, reasoning.
"""
_GPT_OSS = "gpt-oss"
_MARKS = {_GPT_OSS: "<|channel|>"}
"""A token that tells a model of the family. Its rules fetch files over the network, so they are not
tried for any other model.
"""


class Family:
    """The rules of one model family. `name` is that of the library.

    `tokenizer` is that of the model. `header`: the tokens at the end of a prompt that the family
    takes for a part of the answer, if it is used to read the answers of a template that ends its
    prompts earlier than the family does.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        rules: Any,
        header: Sequence[int] = (),
        made: Callable[[Any], Any] | None = None,
    ) -> None:
        """`made`: makes the same rules for another tokenizer."""
        self.name = name
        self._tokenizer = tokenizer
        self._rules = rules
        self._header = list(header)
        self._make_renderer = made

    def of_tokenizer(self, tokenizer: Any) -> "Family":
        """The same rules with another tokenizer, which has the same tokens."""
        if self._make_renderer is None:
            return self
        return Family(
            self.name, tokenizer, self._make_renderer(tokenizer), self._header, self._make_renderer
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(self._rules.get_stop_token_ids())

    def whole(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> IntArray:
        """The tokens of a whole conversation, up to where the assistant begins to write."""
        return ints(self.rendered(list(map(_as_json, messages)), _tool_dicts(tools), True))

    def rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begin_answer: bool
    ) -> list[int]:
        """The tokens of messages as chat templates take them, with or without the beginning of an
        answer at the end.
        """
        return list(
            self._rules.render_ids(messages, tools=tools, add_generation_prompt=begin_answer)
        )

    def added(
        self,
        prompt_ids: IntArray,
        answer_ids: IntArray,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> IntArray | None:
        """The tokens that follow an answer: `messages`, and where the next answer begins.

        `prompt_ids`: the end of the prompt, from the answer before. None if the family has no rule
        for these messages.
        """
        seen = [*prompt_ids.tolist(), *answer_ids.tolist()]
        given = list(map(_as_json, messages))
        extended = self._rules.bridge_to_next_turn(
            prompt_ids.tolist(), answer_ids.tolist(), given, tools=_tool_dicts(tools)
        )
        if extended is None or list(extended.token_ids[: len(seen)]) != seen:
            return None
        return ints(extended.token_ids[len(seen) :])

    def read(
        self, prompt_ids: IntArray, answer_ids: IntArray, tools: Sequence[Mapping[str, Any]]
    ) -> Reading:
        """An answer, taken apart by the library's parser. Never raises, whatever the tokens are."""
        begun, answer = prompt_ids.tolist(), answer_ids.tolist()
        if self.name == _GPT_OSS:
            return read_harmony(self._tokenizer, begun, answer)
        if self._header:
            begun, answer = begun[: len(begun) - len(self._header)], [*self._header, *answer]
        found = self._rules.parse_response(answer, tools=_tool_dicts(tools), prompt_ids=begun)
        calls, malformed = calls_in(found.tool_calls)
        cut = found.reasoning_complete is False
        return Reading(
            found.content, found.reasoning_content or "", calls, malformed, cut, literal=True
        )


def find_family(
    tokenizer: Any, variables: Mapping[str, Any], own: Mapping[str, Any]
) -> Family | None:
    """The family whose rules give the same tokens as the chat template; None if there is none.

    `variables`: those of the template, which the family must have too. `own`: another template than
    the tokenizer's.
    """
    wanted = [
        _ids_by_template(tokenizer, messages, tools, {**variables, **own})
        for messages, tools in _PROBES
    ]
    if wanted[0] is None and wanted[1] is None:
        return None
    for name in names():
        rules = _rules(name, tokenizer, variables)
        if rules is not None and _renders_same(rules, wanted):
            made = partial(_rules_with_reasoning, name, variables)
            return Family(name, tokenizer, made(tokenizer), made=made)
    return None


def family_named(name: str, tokenizer: Any, variables: Mapping[str, Any]) -> Family:
    """The family with that name.

    Raises:
        ConfigError: the tokenizer lacks a token that it needs, it has none of these variables, or a
            file that it needs cannot be had.
    """
    try:
        if not _has_mark(name, tokenizer):
            raise ValueError(f"its tokenizer has no token {_MARKS[name]}")
        made = partial(_rules_with_reasoning, name, variables)
        return Family(
            name,
            tokenizer,
            _make_renderer(name, tokenizer, variables, thinking_retention="all"),
            made=made,
        )
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.renderer={name} does not fit this model: {error}. Write model.renderer=auto, or"
            " template"
        ) from error
    except RuntimeError as error:
        raise ConfigError(f"model.renderer={name} cannot be used: {_missing(error)}") from error


def names() -> Iterator[str]:
    """The families that the library knows."""
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return (name for name in RENDERER_REGISTRY if name != "default")


def reading_family(
    tokenizer: Any, prompt: str, header: str, written: str, call: ToolCall
) -> Family | None:
    """The family whose parser reads this call as a template has written it after `prompt`, though
    its own prompts differ.

    `header`: the end of the prompt, where the answer begins.
    """
    before, begun, answer = (
        ints(tokenizer.encode(text, add_special_tokens=False)) for text in (prompt, header, written)
    )
    headers = (
        [[], begun.tolist()]
        if header and before[-len(begun) :].tolist() == begun.tolist()
        else [[]]
    )
    for name in names():
        # Answers of gpt-oss are read without its rules, and so without the files that these need.
        is_read_here = name == _GPT_OSS and _has_mark(name, tokenizer)
        rules = None if is_read_here else _rules(name, tokenizer, {})
        for own in headers if is_read_here or rules is not None else ():
            family = Family(name, tokenizer, rules, own)
            with suppress(Exception):  # the answer is of another form
                if is_call(family.read(before, answer, ()).calls, call):
                    return family
    return None


def _make_renderer(name: str, tokenizer: Any, variables: Mapping[str, Any], **more: Any) -> Any:
    from renderers.base import RENDERER_REGISTRY, merge_chat_template_kwargs
    from renderers.configs import _config_class_for

    config = merge_chat_template_kwargs(_config_class_for(name)(**more), variables)
    return RENDERER_REGISTRY[name](tokenizer, config)


def _rules_with_reasoning(name: str, variables: Mapping[str, Any], tokenizer: Any) -> Any:
    """The rules of a family, set to show earlier reasoning if they can."""
    return _rules(name, tokenizer, variables, thinking_retention="all") or _rules(
        name, tokenizer, variables
    )


def _rules(name: str, tokenizer: Any, variables: Mapping[str, Any], **more: Any) -> Any | None:
    """The rules of a family, if the tokenizer has the tokens that they need."""
    if not _has_mark(name, tokenizer):
        return None
    with redirect_stdout(StringIO()), suppress(Exception):
        try:
            return _make_renderer(name, tokenizer, variables, **more)
        except RuntimeError as error:
            if name == _GPT_OSS:
                logger.warning(
                    "whether the model is of the family %s cannot be told, so its prompts are"
                    " written by its chat template: %s",
                    name,
                    _missing(error),
                )
    return None


def _has_mark(name: str, tokenizer: Any) -> bool:
    """Whether the tokenizer has the token that all models of the family have."""
    return name not in _MARKS or len(tokenizer.encode(_MARKS[name], add_special_tokens=False)) == 1


def _missing(error: RuntimeError) -> str:
    """What the rules of gpt-oss lack where their package has no vocabulary, and how to get it."""
    return (
        f"{error}. Install oss-harmony in place of openai-harmony, as it has the vocabulary in it,"
        " or name a folder with the file o200k_base.tiktoken in TIKTOKEN_ENCODINGS_BASE, or write"
        " model.renderer=template"
    )


def _renders_same(rules: Any, wanted: Sequence[list[int] | None]) -> bool:
    for (messages, tools), ids in zip(_PROBES, wanted, strict=True):
        if ids is None:
            continue
        try:
            if list(rules.render_ids(messages, tools=tools, add_generation_prompt=True)) != ids:
                return False
        except Exception:  # it refuses what the template renders
            return False
    return True


def _ids_by_template(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> list[int] | None:
    # Some templates take the arguments of calls as objects, others as JSON in a text.
    for form in (messages, list(map(_write_arguments_as_json, messages))):
        with suppress(Exception):  # templates raise what they like
            text = tokenizer.apply_chat_template(
                form, tools=tools, tokenize=False, add_generation_prompt=True, **variables
            )
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids
    return None


def _write_arguments_as_json(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _tool_dicts(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None


def _as_json(message: Message) -> dict[str, Any]:
    one: dict[str, Any] = {"role": message.role, "content": message.said}
    if message.reasoning:
        one["reasoning_content"] = message.reasoning
    if message.tool_calls:
        one["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        one |= {"tool_call_id": message.tool_call_id or "call00000", "name": message.name or "tool"}
    return one
