"""Messages to tokens by the model's own chat template, incrementally.

The prompt of a turn is the prompt of the turn before, what the engine sampled, and the tokens of the *text that the
template puts after it*. Sampled tokens are never re-tokenised. This is sound only while the template shows earlier
turns exactly as the model saw and wrote them, and that is checked at every turn, on the template's own text:

    template(messages so far) must begin with  text the model saw + text the model wrote

Where it does not (a template that strips earlier reasoning, say), the conversation forks: the whole prompt is
tokenised anew and a new training sample begins, which the caller counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import ConfigError
from agentrl.protocols import Prompt
from agentrl.trajectory import Completion, Message


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


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

    @staticmethod
    def of_model(folder: Path) -> "TemplateRenderer":
        """The renderer of the Hugging Face model in `folder`."""
        from transformers import AutoTokenizer

        return TemplateRenderer(AutoTokenizer.from_pretrained(folder))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The eos token: it ends an assistant turn."""
        return self._stop_token_ids

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> "TemplateConversation":
        """A new, empty conversation."""
        return TemplateConversation(self, tools)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """The template's text of `messages`, up to where the assistant begins to write."""
        rendered: str = self._tokenizer.apply_chat_template(
            [asdict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        return rendered

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of template text; its special tokens stand in it already."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens, special ones included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """The tokens a model would sample to say `text` and end its turn: for demonstrations."""
        return (*self.encode(text), self._stop_token_ids[0])


class TemplateConversation:
    """One episode's messages, and the text and tokens that the model saw and wrote, in step."""

    def __init__(self, renderer: TemplateRenderer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._renderer = renderer
        self._tools = tools
        self._messages: list[Message] = []
        self._seen_text = ""  # the last prompt's text with the answer's behind it
        self._seen_ids: tuple[int, ...] = ()  # the last prompt's tokens with the answer's behind them

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far."""
        return tuple(self._messages)

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Append `messages` and render the prompt for the next answer."""
        self._messages += messages
        text = self._renderer.text(self._messages, self._tools)
        forked = not text.startswith(self._seen_text)
        if forked:
            self._seen_ids = ()
            new_ids = self._renderer.encode(text)
        else:
            new_ids = self._renderer.encode(text[len(self._seen_text) :])
            # The template writes the end of turn that the model has sampled already, unless it was cut short.
            stop = self._renderer.stop_token_ids
            if self._seen_ids and self._seen_ids[-1] in stop and new_ids[:1] == self._seen_ids[-1:]:
                new_ids = new_ids[1:]
        self._seen_text = text
        self._seen_ids += new_ids
        return Prompt(self._seen_ids, new_ids, forked)

    def answer(self, completion: Completion) -> str:
        """Append what was sampled; its text without the stop token is the assistant's message."""
        said = completion.token_ids
        if said and said[-1] in self._renderer.stop_token_ids:
            said = said[:-1]
        text = self._renderer.decode(said)
        self._messages.append(Message("assistant", text))
        self._seen_text += text
        self._seen_ids += completion.token_ids
        return text
