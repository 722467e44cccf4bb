"""Messages to tokens by the model's own chat template, incrementally.

The prompt of a turn is the previous prompt, the tokens that the engine sampled, and the tokens of the *text that the
template adds after them*. Sampled tokens are never re-tokenised. This is sound only while the template renders earlier
turns exactly as the model saw and wrote them, which is checked at every turn on the template's own text:

    template(messages so far) must begin with  text the model saw + text the model wrote

If it does not (for example, because the template strips earlier reasoning), the conversation forks: the whole prompt
is tokenised again and a new training sample begins. The caller counts forks.

This runs once a turn, on the event loop. Half of its time goes into the check, which renders all messages (about 2
microseconds each). The other half goes into tokenising new text. The tokens are cached, because the members of a group
begin with the same text.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from agentrl.arrays import GrowingInts, IntArray, ints
from agentrl.errors import ConfigError
from agentrl.protocols import Prompt
from agentrl.trajectory import Completion, Message


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
        self._core.no_truncation()  # a tokenizer's files may enable either
        self._core.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._core.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class TemplateRenderer:
    """`Renderer` over a tokenizer with a chat template.

    Raises:
        ConfigError: the tokenizer has no chat template, or no token that ends an assistant turn.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template: add `chat_template` to its tokenizer_config.json, "
                "or a chat_template.jinja beside it"
            )
        if tokenizer.eos_token_id is None:
            raise ConfigError("the model's tokenizer has no eos token, so nothing would end an assistant turn")
        self._tokenizer = tokenizer
        self._stop_token_ids = (tokenizer.eos_token_id,)
        self._encode = lru_cache(maxsize=1024)(
            lambda text: ints(tokenizer.encode(text, add_special_tokens=False)),
        )

    @staticmethod
    def of_model(folder: Path) -> "TemplateRenderer":
        """The renderer of the Hugging Face model in `folder`."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        has_core = tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces
        return TemplateRenderer(_FastTokenizer(tokenizer) if has_core else tokenizer)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The eos token: it ends an assistant turn."""
        return self._stop_token_ids

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> "TemplateConversation":
        """A new, empty conversation."""
        return TemplateConversation(self, tools)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """The template's text of `messages`, up to where the assistant begins to write."""
        return self.template_text([_as_dict(message) for message in messages], [dict(tool) for tool in tools])

    def template_text(self, messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> str:
        """`text` of messages and tools that are dictionaries already."""
        rendered: str = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        return rendered

    def encode(self, text: str) -> IntArray:
        """The tokens of template text, which already contains its special tokens."""
        return self._encode(text)

    def decode(self, token_ids: IntArray) -> str:
        """The text of sampled tokens, special ones included."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    def answer_ids(self, text: str) -> IntArray:
        """The tokens a model would sample to write `text` and end its turn: for demonstrations."""
        return ints([*self.encode(text).tolist(), self._stop_token_ids[0]])


class TemplateConversation:
    """One agent's messages in an episode, kept in step with the text and tokens that the model read and wrote."""

    def __init__(self, renderer: TemplateRenderer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._renderer = renderer
        self._tools = [dict(tool) for tool in tools]
        self._messages: list[Message] = []
        self._shown: list[Message] = []
        self._template_messages: list[dict[str, str]] = []  # those that are shown
        self._seen_text = ""  # the text of the last prompt and its answer
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
        self._template_messages = [_as_dict(message) for message in messages]

    def size(self, messages: Sequence[Message]) -> int:
        """How many tokens the prompt would have with `messages`."""
        _, new_ids, forked = self._next([*self._template_messages, *map(_as_dict, messages)])
        return len(new_ids) + (0 if forked else len(self._seen_ids))

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Append `messages` and render the prompt for the next answer."""
        self._append(messages)
        self._seen_text, new_ids, forked = self._next(self._template_messages)
        if forked:
            self._seen_ids = GrowingInts()
        self._seen_ids.append(new_ids)
        return Prompt(self._seen_ids.values, new_ids, forked)

    def _next(self, messages: list[dict[str, str]]) -> tuple[str, IntArray, bool]:
        """The text of these messages, its new tokens, and whether it forks; on a fork all of its tokens are new."""
        text = self._renderer.template_text(messages, self._tools)
        if not text.startswith(self._seen_text):
            return text, self._renderer.encode(text), True
        new_ids = self._renderer.encode(text[len(self._seen_text) :])
        # The template writes the end of turn, which the model has sampled already unless its answer was cut short.
        last = self._seen_ids.last
        if last in self._renderer.stop_token_ids and len(new_ids) and new_ids[0] == last:
            new_ids = new_ids[1:]
        return text, new_ids, False

    def answer(self, completion: Completion) -> str:
        """Append the sampled tokens; their text without the stop token is the assistant's message."""
        answer_ids = completion.token_ids
        if len(answer_ids) and int(answer_ids[-1]) in self._renderer.stop_token_ids:
            answer_ids = answer_ids[:-1]
        text = self._renderer.decode(answer_ids)
        self._append([Message("assistant", text)])
        self._seen_text += text
        self._seen_ids.append(completion.token_ids)
        return text

    def _append(self, messages: Sequence[Message]) -> None:
        self._messages += messages
        self._shown += messages
        self._template_messages += map(_as_dict, messages)


def _as_dict(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
