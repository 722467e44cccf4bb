"""Messages to tokens, incrementally, and answers back to messages.

The prompt of a turn is the last prompt, the tokens that the engine sampled, and the tokens of what is new. Sampled
tokens are never rendered or tokenised again. With `history: extend`, what is new is all that is rendered, by the
template's own rules (`agentrl.rollout.chat_template`): a late turn costs what an early one does, and a conversation
never forks.

With `history: template`, each prompt is what the template renders of the whole conversation. Where it does not begin
with the text that the model saw and wrote (many templates strip earlier reasoning), the conversation forks: the whole
prompt is tokenised again and a new training sample begins. The caller counts forks.

This runs once a turn, on the event loop. The tokens of new text are cached, because the members of a group begin with
the same text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from agentrl.arrays import GrowingInts, IntArray, ints
from agentrl.errors import ConfigError
from agentrl.protocols import Prompt, Settings
from agentrl.rollout.chat_template import ChatTemplate
from agentrl.trajectory import Completion, Message


class RendererConfig(Settings):
    """How a model's conversations become tokens."""

    history: Literal["extend", "template"] = "extend"
    """`extend` shows the model all that it has written, reasoning included, and renders only what is new. `template`
    renders the whole conversation at every turn, as the model's chat template does: if that strips earlier reasoning,
    the conversation forks at every turn, and every prompt is computed again."""
    chat_template: Path | None = None
    """File of a chat template (Jinja) to use instead of the model's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking: false`."""


class Tokenizer(Protocol):
    """The used part of a Hugging Face tokenizer's interface."""

    chat_template: Any
    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class _FastTokenizer:
    """A Hugging Face tokenizer without the layers above its Rust core, which cost more than the core itself."""

    def __init__(self, tokenizer: Any) -> None:
        self.chat_template = tokenizer.chat_template
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.apply_chat_template = tokenizer.apply_chat_template
        self._core = tokenizer.backend_tokenizer
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self._core.no_truncation()  # a tokenizer's files may enable either
        self._core.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._core.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class TemplateRenderer:
    """`Renderer` over a tokenizer with a chat template. `stops`: tokens that end an answer, besides the eos token.

    Raises:
        ConfigError: the tokenizer has no chat template, or no token that ends an assistant turn; or the template cannot
            render a conversation.
    """

    def __init__(self, tokenizer: Tokenizer, config: RendererConfig | None = None, stops: Sequence[int] = ()) -> None:
        self.config = config or RendererConfig()
        if not tokenizer.chat_template and self.config.chat_template is None:
            raise ConfigError(
                "the model's tokenizer has no chat template: name a file with one in model.chat_template, or add a "
                "chat_template.jinja to the model's folder"
            )
        known = [*([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]), *stops]
        self._tokenizer = tokenizer
        self._encode = lru_cache(maxsize=1024)(
            lambda text: ints(tokenizer.encode(text, add_special_tokens=False)),
        )
        self._variables = dict(self.config.chat_template_kwargs)
        if self.config.chat_template is not None:
            self._variables["chat_template"] = _read(self.config.chat_template)
        specials = {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self._template = ChatTemplate(
            self._render, stops=[self._text_of(i) for i in known], specials=list(specials.values())
        )
        derived = [i for i, text in specials.items() if text in self._template.stops]
        self._stop_token_ids = tuple(dict.fromkeys([*known, *derived]))
        if not self._stop_token_ids:
            raise ConfigError(
                "nothing would end an assistant turn: the model's tokenizer has no eos token, and its chat template "
                "writes no special token after an answer. Add `eos_token` to tokenizer_config.json"
            )

        closing = self.encode(self._template.closing([Message("user", "")])).tolist()
        ends = bool(closing) and closing[-1] in self._stop_token_ids
        self._end_of_turn = closing if ends else [self._stop_token_ids[0]]

    @staticmethod
    def of_model(folder: Path, config: RendererConfig | None = None) -> "TemplateRenderer":
        """The renderer of the Hugging Face model in `folder`."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        has_core = tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces
        return TemplateRenderer(_FastTokenizer(tokenizer) if has_core else tokenizer, config, _stops_of(folder))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: eos, those of generation_config.json, those that the template writes there."""
        return self._stop_token_ids

    @property
    def template(self) -> ChatTemplate:
        """The chat template."""
        return self._template

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> "TemplateConversation":
        """A new, empty conversation."""
        return TemplateConversation(self, tools)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """The template's text of `messages`, up to where the assistant begins to write."""
        return self._template.text(messages, tools)

    def encode(self, text: str) -> IntArray:
        """The tokens of template text, which already contains its special tokens."""
        return self._encode(text)

    def decode(self, token_ids: IntArray) -> str:
        """The text of sampled tokens, special ones included."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    def answer_ids(self, text: str) -> IntArray:
        """The tokens a model would sample to write `text` and end its turn: for demonstrations."""
        return ints([*self.encode(text).tolist(), *self._end_of_turn])

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begin_answer: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=begin_answer, **self._variables
        )
        return text

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


class TemplateConversation:
    """One agent's messages in an episode, kept in step with the tokens that the model read and wrote."""

    def __init__(self, renderer: TemplateRenderer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._renderer = renderer
        self._tools = [dict(tool) for tool in tools]
        self._extends = renderer.config.history == "extend"
        self._messages: list[Message] = []
        self._shown: list[Message] = []
        self._answered = False  # what is shown ends with the answer that the seen tokens end with
        self._seen_text = ""  # the text of the last prompt and its answer; not kept while the conversation extends
        self._seen_ids = GrowingInts()  # the tokens of the last prompt and its answer

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far."""
        return tuple(self._messages)

    @property
    def shown(self) -> Sequence[Message]:
        """The earlier messages that the next prompt shows, before its new ones."""
        return self._shown

    def show(self, messages: Sequence[Message]) -> None:
        """Show these messages from now on instead of those shown so far; the property `messages` keeps all."""
        self._shown = list(messages)
        self._answered = False

    def size(self, messages: Sequence[Message]) -> int:
        """How many tokens the prompt would have with `messages`."""
        _, new_ids, forked = self._next(messages)
        return len(new_ids) + (0 if forked else len(self._seen_ids))

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Append `messages` and render the prompt for the next answer."""
        messages = self._linked(messages)
        self._seen_text, new_ids, forked = self._next(messages)
        self._append(messages)
        self._answered = False
        if forked:
            self._seen_ids = GrowingInts()
        self._seen_ids.append(new_ids)
        return Prompt(self._seen_ids.values, new_ids, forked)

    def _next(self, messages: Sequence[Message]) -> tuple[str, IntArray, bool]:
        """The text of the prompt, its new tokens, and whether it forks; on a fork all of its tokens are new."""
        if self._extends and self._answered and messages:
            return "", self._added(messages), False
        text = self._renderer.text([*self._shown, *messages], self._tools)
        seen = self._seen_text if self._seen_text or not len(self._seen_ids) else None
        if seen is None or not text.startswith(seen):
            return text, self._renderer.encode(text), True
        return text, self._without_stop(self._renderer.encode(text[len(seen) :])), False

    def _added(self, messages: Sequence[Message]) -> IntArray:
        """The tokens of what follows the last answer. An answer that was cut short has its end of turn added."""
        template = self._renderer.template
        text = template.added(messages)
        if self._seen_ids.last in self._renderer.stop_token_ids:
            return self._without_stop(self._renderer.encode(text))
        return self._renderer.encode(template.closing(messages) + text)

    def _without_stop(self, new_ids: IntArray) -> IntArray:
        """New tokens without the end of turn that the template writes, if the model has sampled it already."""
        last = self._seen_ids.last
        repeated = last in self._renderer.stop_token_ids and len(new_ids) and new_ids[0] == last
        return new_ids[1:] if repeated else new_ids

    def answer(self, completion: Completion) -> str:
        """Append the sampled tokens; their text without the stop token is the assistant's message."""
        answer_ids = completion.token_ids
        if len(answer_ids) and int(answer_ids[-1]) in self._renderer.stop_token_ids:
            answer_ids = answer_ids[:-1]
        text = self._renderer.decode(answer_ids)
        self._append([Message("assistant", text)])
        self._seen_text += text
        self._seen_ids.append(completion.token_ids)
        self._answered = True
        return text

    def _linked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages whose results of tools name the call that they answer: the first of the last answer."""
        calls = self._shown[-1].tool_calls if self._shown else ()
        if not calls:
            return messages
        call = calls[0]
        return [
            replace(message, tool_call_id=message.tool_call_id or call.id, name=message.name or call.name)
            if message.role == "tool"
            else message
            for message in messages
        ]

    def _append(self, messages: Sequence[Message]) -> None:
        self._messages += messages
        self._shown += messages


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {file} cannot be read: {error}") from error


def _stops_of(folder: Path) -> list[int]:
    """All eos tokens that the model's generation_config.json names."""
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    named = json.loads(file.read_text()).get("eos_token_id")
    return [] if named is None else [named] if isinstance(named, int) else [int(token) for token in named]
