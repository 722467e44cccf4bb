"""Messages to tokens, incrementally, and answers back to messages.

The prompt of a turn is the last prompt, the tokens that the engine sampled, and the tokens of what
is new. Sampled tokens are never rendered or tokenised again. With `history: extend`, what is new is
all that is rendered, by the template's own rules (`agentrl.conversation.chat_template`): a late
turn costs what an early one does, and a conversation never forks.

With `history: template`, each prompt is what the template renders of the whole conversation. Where
it does not begin with the text that the model saw and wrote (many templates strip earlier
reasoning), the conversation forks: the whole prompt is tokenised again and a new training sample
begins. The caller counts forks.

This runs once a turn, on the event loop. The tokens of new text are cached, because the members of
a group begin with the same text.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import numpy as np

from agentrl import plugins
from agentrl.conversation.chat_template import ChatTemplate, not_in
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.control_tokens import (
    GUARD,
    CarefulTokenizer,
    ControlTokens,
    bare,
    extra_tokens,
)
from agentrl.conversation.eyes import Eyes
from agentrl.conversation.family import Family, family_named, find_family, names, reading_family
from agentrl.conversation.placing import Places, place_messages
from agentrl.conversation.reading import (
    Marks,
    Reading,
    marks_in,
    refused_by_parser,
    without_reasoning,
)
from agentrl.conversation.tool_formats import (
    PROBE_CALL,
    Syntax,
    accounted,
    call_reader,
    canonical,
    known_marks,
    read_tags,
    slow_call_reader,
    syntax_of,
    syntax_read_by,
)
from agentrl.errors import ConfigError, ImagesRefusedError
from agentrl.models.tokenizer import load_tokenizer
from agentrl.models.vision_families import FAMILIES
from agentrl.protocols import Prompt
from agentrl.tokens.arrays import GrowingInts, IntArray, ints
from agentrl.tokens.placed_images import PlacedImage, shifted
from agentrl.trajectory import Completion, Message, ToolCall

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The used part of a Hugging Face tokenizer's interface."""

    chat_template: Any
    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class _FastTokenizer:
    """A Hugging Face tokenizer without the layers above its Rust core, which cost more than the
    core itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.chat_template = tokenizer.chat_template
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.apply_chat_template = tokenizer.apply_chat_template
        self.whole = tokenizer
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self.unk_token_id = tokenizer.unk_token_id
        self._core = self.backend_tokenizer = tokenizer.backend_tokenizer
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self._core.no_truncation()  # a tokenizer's files may enable either
        self._core.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._core.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0].ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._core.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class TemplateRenderer:
    """`Renderer` over a tokenizer with a chat template.

    `stops`: tokens that end an answer, besides the eos token. `family`: rules that come before the
    template's. `eyes`: those of a model that sees; without, messages with pictures are refused.

    Raises:
        ConfigError: the tokenizer has no chat template, or no token that ends an assistant turn; or
            the template cannot render a conversation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: RendererConfig | None = None,
        stops: Sequence[int] = (),
        family: Family | None = None,
        eyes: Eyes | None = None,
    ) -> None:
        self._eyes = eyes
        self.config = config or RendererConfig()
        if not tokenizer.chat_template and self.config.chat_template is None:
            raise ConfigError(
                "the model's tokenizer has no chat template: name a file with one in"
                " model.chat_template, or add a chat_template.jinja to the model's folder"
            )
        known = [*([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]), *stops]
        known += family.stop_token_ids if family is not None else ()
        self._tokenizer = tokenizer
        self._whole_tokenizer: Any = tokenizer
        """With the layers that `_FastTokenizer` leaves out."""
        if isinstance(tokenizer, _FastTokenizer):
            self._whole_tokenizer = tokenizer.whole
        self._variables = dict(self.config.chat_template_kwargs)
        chosen, for_tools = _choose_templates(tokenizer, self.config)
        if chosen is not None:
            self._variables["chat_template"] = chosen
        written = str(self._variables.get("chat_template", tokenizer.chat_template))
        self._control = control = ControlTokens(tokenizer, written)
        self._encode = lru_cache(maxsize=1024)(
            lambda text: ints(
                control.encode(text)
                if GUARD in text
                else tokenizer.encode(text, add_special_tokens=False)
            ),
        )
        self._added = extra_tokens(tokenizer)
        specials = {token_id: token.text for token_id, token in self._added.items()}
        self._template = ChatTemplate(
            self._render,
            stops=[self._text_of(i) for i in known],
            specials=list(specials.values()),
            own_tools=self.config.tool_format != "canonical",
        )
        self._family = family if self.config.tool_format == "auto" else None
        if self._family is None and self.config.history != "template":
            self._template.check_later_turns()
        self._searched = False  # among vLLM's parsers too, whose import takes seconds
        self._marks = marks_in(written, known_marks())
        self._known_tools: (
            tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]] | None
        ) = None
        own = syntax_of(self._template.calls) if self.config.tool_format != "canonical" else None
        self._read_calls = call_reader(
            self._whole_tokenizer, self._template, self.config.tool_format, own
        )
        self._reader: Family | None = None
        self._syntax: Syntax | None = None
        if self._family is not None and self._read_calls is not canonical:
            self._syntax = self._syntax_of_family(self._family, own)
        if self._family is None and self._read_calls is None:
            prompt, written = self._template.call(PROBE_CALL)
            self._reader = reading_family(
                tokenizer, prompt, self._template.header, written, PROBE_CALL
            )
        derived = [i for i, text in specials.items() if text in self._template.stops]
        self._stop_token_ids = tuple(dict.fromkeys([*known, *derived]))
        if not self._stop_token_ids:
            raise ConfigError(
                "nothing would end an assistant turn: the model's tokenizer has no eos token, and"
                " its chat template writes no special token after an answer. Add `eos_token` to"
                " tokenizer_config.json"
            )
        closing = self.encode(self._template.closing([Message("user", "")])).tolist()
        ends = bool(closing) and closing[-1] in self._stop_token_ids
        self._end_of_turn = closing if ends else [self._stop_token_ids[0]]
        self._with_tools = self._with_template(for_tools, family)
        if isinstance(self._with_tools, TemplateRenderer):
            self._stop_token_ids = self._with_tools.stop_token_ids

    def _with_template(
        self, template: str | None, family: Family | None
    ) -> "TemplateRenderer | ConfigError":
        """The same with another template, which knows these stops too; itself, if there is no
        other; the error, if it cannot be used.
        """
        if template is None:
            return self
        variables = {**self._variables, "chat_template": template}
        config = self.config.model_copy(update={"chat_template_kwargs": variables})
        try:
            return TemplateRenderer(
                self._tokenizer, config, self._stop_token_ids, family, self._eyes
            )
        except ConfigError as error:
            return error

    @staticmethod
    def of_model(folder: Path, config: RendererConfig | None = None) -> "TemplateRenderer":
        """The renderer of the Hugging Face model in `folder`.

        Raises:
            ConfigError: it has no tokenizer that can be read, or no chat template.
        """
        config = config or RendererConfig()
        try:
            tokenizer = load_tokenizer(folder, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(
                f"the tokenizer in {folder} cannot be loaded ({str(error).strip()[:300]}): copy"
                " tokenizer.json and tokenizer_config.json of the model into it"
            ) from error
        has_core = tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces
        family = _choose_family(tokenizer, config)
        return TemplateRenderer(
            _FastTokenizer(tokenizer) if has_core else tokenizer,
            config,
            _read_stop_ids(folder, tokenizer),
            family,
            Eyes.of_model(folder, tokenizer),
        )

    @property
    def sees(self) -> bool:
        """True if messages may hold pictures."""
        return self._eyes is not None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: eos, those of generation_config.json, those that the
        template writes there.
        """
        return self._stop_token_ids

    @property
    def template(self) -> ChatTemplate:
        """The chat template."""
        return self._template

    @property
    def reasons(self) -> bool:
        """True if an answer may begin with reasoning, which environments do not get."""
        return self._marks is not None or self._family is not None

    @property
    def family(self) -> str:
        """The family whose rules are used; empty if they are the template's."""
        return "" if self._family is None else self._family.name

    @property
    def reasoning_marks(self) -> Marks | None:
        """The marks that the model writes around its reasoning, where the template shows them."""
        return self._marks

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The numbers of the tokens that text of others never becomes, by their texts."""
        return dict(zip(self._control.texts, self._control.ids, strict=True))

    @property
    def calls_read_by(self) -> str:
        """The reader of tool calls, in words; empty if nothing reads them, but for calls in the
        canonical form.
        """
        reader = self._family or self._reader
        if self._read_calls is canonical:
            return "the canonical parser"
        if reader is not None:
            return f"the family {reader.name}"
        if self._read_calls is None:
            return ""
        if isinstance(self._read_calls, MethodType):
            syntax = type(self._read_calls.__self__).__name__
            return f"the syntax that the template shows ({syntax})"
        return "a known parser"

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> "TemplateRenderer":
        """The renderer of conversations with these tools: another, if the model has a chat template
        of its own for them (`tool_use`, as Hermes and Command R).

        Raises:
            ConfigError: that template cannot be used.
        """
        found = self._with_tools if tools else self
        if isinstance(found, ConfigError):
            raise ConfigError(
                f"of the model's chat templates, that for tools (tool_use): {found}"
            ) from found
        return found

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> "TemplateConversation":
        """A new, empty conversation."""
        if (one := self.for_tools(tools)) is not self:
            return one.conversation(tools)
        if (
            tools
            and (self._family or self._reader or self._read_calls) is None
            and not self._searched
        ):
            self._searched = True
            self._search_slow_reader()
        return TemplateConversation(self, tools)

    def _search_slow_reader(self) -> None:
        """Look among the parsers of vLLM for one that reads the calls which the template writes, or
        warn.
        """
        self._read_calls = slow_call_reader(self._whole_tokenizer, self._template)
        if self._read_calls is None:
            logger.warning(
                "the model's chat template writes calls of tools as %.300r, which no tool format"
                " reads, so only calls in the canonical form are understood. Write"
                " model.tool_format=canonical: tools are then described in the system message, and"
                ' called as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Or name a'
                " renderer of yours in model.renderer",
                self._template.call(PROBE_CALL)[1],
            )

    def whole(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> IntArray:
        """The tokens of a whole conversation, up to where the assistant begins to write."""
        if (one := self.for_tools(tools)) is not self:
            return one.whole(messages, tools)
        if self._family is not None and (self._template.abilities.tools or not tools):
            ids = self._encode_by_family(
                messages, tools, lambda family, shown, described: family.whole(shown, described)
            )
            if ids is not None:
                return ids
        return self.encode(self.guarded_text(messages, tools))

    def encode_conversation(self, messages: Sequence[Message]) -> IntArray:
        """The tokens of a whole conversation to its end, for a model that judges it."""
        return self.encode(self.guarded_text(messages, (), add_generation_prompt=False))

    def added(
        self,
        prompt_ids: IntArray,
        answer_ids: IntArray,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> IntArray:
        """The tokens that follow an answer: `messages`, and where the next answer begins.

        `prompt_ids`: the end of the prompt, from the answer before. An answer that was cut short
        gets its end of turn, and before that the end of its reasoning, if it was cut within that.
        """
        if (one := self.for_tools(tools)) is not self:
            return one.added(prompt_ids, answer_ids, messages, tools)
        if self._family is not None:
            added = self._encode_by_family(
                messages,
                tools,
                lambda family, shown, described: family.added(
                    prompt_ids, answer_ids, shown, described
                ),
                begins=False,
            )
            if added is not None:
                return added
        shown = self._guard_messages(messages)
        text = self._with_pictures(self._template.added(shown), messages, begins=False)
        last = int(answer_ids[-1]) if len(answer_ids) else -1
        if last not in self._stop_token_ids:
            thinks = self._marks is not None and self.read(prompt_ids, answer_ids, ()).cut
            thought = self._marks.end if self._marks is not None and thinks else ""
            return self.encode(thought + self._template.closing(shown) + text)
        new_ids = self._encode_after(self._text_of(last), text)
        return new_ids[1:] if len(new_ids) and new_ids[0] == last else new_ids

    def _encode_by_family(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        rendered: Callable[
            [Family, Sequence[Message], Sequence[Mapping[str, Any]]], IntArray | None
        ],
        *,
        begins: bool = True,
    ) -> IntArray | None:
        """The tokens of messages by the family's rules; None if these refuse the messages, or leave
        one out.
        """
        assert self._family is not None
        if any(message.images for message in messages):
            return None
        shown, described = self._guard_messages(messages), self._guard_tools(tools)
        guarded = shown is not messages or described is not tools
        try:
            ids = rendered(
                self._careful_family if guarded else self._family,
                place_messages(shown, self._family_places, begins=begins),
                described,
            )
            # A family that does not use the given tokenizer leaves the guards in its tokens, and
            # needs none.
            if guarded and ids is not None and GUARD in self.decode(ids):
                ids = rendered(
                    self._family,
                    place_messages(messages, self._family_places, begins=begins),
                    tools,
                )
        except Exception:  # its rules raise what they like
            logger.debug("the rules of %s refuse messages", self._family.name, exc_info=True)
            return None
        return ids if ids is not None and self._shows_all(ids, messages) else None

    def _shows_all(self, ids: IntArray, messages: Sequence[Message]) -> bool:
        """True if all that others wrote is in these tokens, as far as the vocabulary can say it."""

        text = self.decode(ids)
        if not_in(text, messages) is None:
            return True
        sayable = [
            replace(one, content=self.decode(self.encode(one.content.strip()))) for one in messages
        ]
        return not_in(text, sayable) is None

    @cached_property
    def _family_places(self) -> Places:
        """The places that the family's rules have: often the same as the template's."""
        family = self._family
        assert family is not None

        def render(
            messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begin_answer: bool
        ) -> str:
            return self.decode(ints(family.rendered(messages, tools, begin_answer)))

        try:
            return ChatTemplate(
                render, stops=self._template.stops, specials=list(self._control.texts)
            ).abilities
        except ConfigError:
            return self._template.abilities

    # What others wrote becomes no control token

    def _guard_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with guards, or themselves if they need none. All that is rendered comes
        through here.
        """
        if self._eyes is None:
            _refuse_images(messages)
        guarded = [
            self._control.guarded_message(message, self._tokens_of_answers) for message in messages
        ]
        return messages if guarded == list(messages) else guarded

    def _guard_tools(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The tools with guards, or themselves if they need none."""
        if not tools:
            return tools
        known = self._known_tools
        if known is None or known[0] != tools:
            guarded = [self._control.guarded_value(tool) for tool in tools]
            self._known_tools = known = (tools, tools if guarded == list(tools) else guarded)
        return tools if known[1] is known[0] else known[1]

    @cached_property
    def _careful_family(self) -> Family:
        """The family's rules, which take for control tokens only what has no guard."""
        assert self._family is not None
        return self._family.of_tokenizer(CarefulTokenizer(self._whole_tokenizer, self._control))

    @cached_property
    def _tokens_of_answers(self) -> frozenset[str]:
        """The control tokens that an answer may have: those of its reasoning and calls, and none
        that frames turns.

        They are what a template writes within an answer, and tokens that are not marked as
        special, without those that it writes around messages, and without stops.
        """
        find = self._control.found_in
        plain = {token.text for token in self._added.values() if not token.special}
        called = find(self._template.call(PROBE_CALL)[1] + PROBE_CALL.render())
        within = (plain | called) - find(self._template.frames())
        eyes = [self._eyes.placeholder, self._eyes.asked] if self._eyes else []
        steering = {*self._template.stops, *eyes}
        return frozenset((within | find("".join(self._marks or ()))).difference(steering))

    def read(
        self, prompt_ids: IntArray, answer_ids: IntArray, tools: Sequence[Mapping[str, Any]]
    ) -> Reading:
        """An answer, taken apart; its last token may be the stop token. Never raises, whatever the
        tokens are.
        """
        if (one := self.for_tools(tools)) is not self:
            return one.read(prompt_ids, answer_ids, tools)
        try:
            return self._read(prompt_ids, answer_ids, tools)
        except Exception as error:  # other packages' parsers raise at some of what models write
            logger.debug("an answer could not be taken apart", exc_info=True)
            thought = without_reasoning(
                self.answer_text(answer_ids), self._marks, self.decode(prompt_ids[-_TAIL:])
            )
            return (
                refused_by_parser(thought, error)
                if self._may_hold_call(thought.content, tools)
                else thought
            )

    def _may_hold_call(self, text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
        """True if a text that no parser can read may hold a call: something that stands before a
        call's name, or the name of a tool.
        """
        written = self._template.calls([PROBE_CALL]) if tools else ""
        before = written.partition(PROBE_CALL.name)[0].split("\n")
        names = [str(tool.get("function", tool).get("name", "")) for tool in tools]
        return any(sign in text for sign in filter(None, (*map(str.strip, before), *names)))

    def answer_message(
        self, prompt_ids: IntArray, answer_ids: IntArray, tools: Sequence[Mapping[str, Any]]
    ) -> Message:
        """An answer as a message. Its content is what environments get: without reasoning, unless
        that is shown.
        """
        reading = self.read(prompt_ids, answer_ids, tools)
        thought = len(self.encode(reading.reasoning)) if reading.reasoning else 0
        shows = self.config.show_reasoning
        action = self.answer_text(answer_ids) if shows else reading.action
        calls = () if shows or reading.malformed else reading.calls
        return Message(
            "assistant",
            action,
            reasoning=reading.reasoning,
            tool_calls=calls,
            reasoning_tokens=thought,
        )

    def _syntax_of_family(self, family: Family, own: Syntax | None) -> Syntax | None:
        """The syntax in tags that the family reads, if it is one."""

        def read(text: str) -> Sequence[ToolCall]:
            end = "" if self._marks is None else self._marks.end
            return family.read(ints(()), self.encode(f"{end}{text}"), ()).calls

        return syntax_read_by(read, own, self._template.calls)

    def _read(
        self, prompt_ids: IntArray, answer_ids: IntArray, tools: Sequence[Mapping[str, Any]]
    ) -> Reading:
        text, before = self.answer_text(answer_ids), self.decode(prompt_ids[-_TAIL:])
        reader = self._family or self._reader
        if reader is not None:
            return self._read_by_family(
                reader, reader.read(prompt_ids, answer_ids, tools), text, before, tools
            )
        thought = without_reasoning(text, self._marks, before)
        if not tools or thought.cut or self._read_calls is None:
            return thought
        found = self._read_calls(thought.content, tools)
        return replace(found, reasoning=thought.reasoning or found.reasoning)

    def _read_by_family(
        self,
        family: Family,
        found: Reading,
        text: str,
        before: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> Reading:
        """The reading of an answer by the family, with calls read to the letter and all that was
        written accounted for.

        The family's parser is followed in what is reasoning.
        """
        if found.cut or family.name == "gpt-oss":
            return found
        marks = self._marks or marks_in(text, known_marks())
        thought = without_reasoning(text, marks, before)
        said = found.content.lstrip("\n") if thought.content != text else found.content
        if not tools and not found.calls and not found.malformed:
            return Reading(said, found.reasoning)
        visible = thought.content
        if thought.cut:
            # The end of the reasoning is missing, but a call ends it, too.
            start = self._syntax.start(text) if self._syntax is not None else text.find(_TAG)
            visible = text[start:] if start >= 0 else found.content
        if self._syntax is not None:
            read = self._syntax.read(visible, tools)
        elif self._read_calls is canonical:
            read = read_tags(visible)
        else:
            read = accounted(found, visible, self._template)
        content = said if read.literal and not read.calls and not read.malformed else read.content
        return replace(read, content=content, reasoning=found.reasoning)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """The template's text of `messages`, up to where the assistant begins to write. To tokenise
        it, see `whole`.
        """
        return bare(self.guarded_text(messages, tools))

    def guarded_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The same, with guards in what must not become control tokens. Without
        `add_generation_prompt`, it ends with the last message.
        """
        if (one := self.for_tools(tools)) is not self:
            return one.guarded_text(messages, tools, add_generation_prompt=add_generation_prompt)
        text = self._template.text(
            self._guard_messages(messages),
            self._guard_tools(tools),
            add_generation_prompt=add_generation_prompt,
        )
        return self._with_pictures(text, messages, begins=True)

    def _with_pictures(self, text: str, messages: Sequence[Message], *, begins: bool) -> str:
        """The text of messages with as many placeholders for each picture as it has tokens."""
        images = self._template.images_of(messages, begins=begins)
        return text if self._eyes is None else self._eyes.expanded(text, images)

    def placed(
        self, token_ids: IntArray, messages: Sequence[Message], *, begins: bool
    ) -> tuple[PlacedImage, ...]:
        """Where messages' pictures are in their tokens. `begins`: else they follow an answer."""
        images = self._template.images_of(messages, begins=begins)
        return () if self._eyes is None else self._eyes.placed(token_ids, images)

    def encode(self, text: str) -> IntArray:
        """The tokens of rendered text. What has no guard in it becomes control tokens, as in what a
        model writes.
        """
        return self._encode(text)

    def encode_answer(self, text: str) -> IntArray:
        """The tokens of an answer's text where the template writes it, right after a prompt."""
        # A token at the end of the prompt may take up white space, which the answer would lose.
        return self.encode(text) if text[:1].isspace() else self._encode_after(self._prompt, text)

    @cached_property
    def _prompt(self) -> str:
        return self._template.before_answer

    def _encode_after(self, before: str, text: str) -> IntArray:
        """The tokens of `text` where it follows `before`, whose own tokens stay the same; else as
        if it stood alone.

        Many tokenizers put a space before what stands first in a text, and some tokens take up the
        white space that follows them.
        """
        begun, whole = self.encode(before), self.encode(before + text)
        same = len(begun) and np.array_equal(whole[: len(begun)], begun)
        return whole[len(begun) :] if same else self.encode(text)

    def decode(self, token_ids: IntArray) -> str:
        """The text of sampled tokens, special ones included."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    def answer_ids(self, text: str) -> IntArray:
        """The tokens a model would sample to write `text` and end its turn: for demonstrations."""
        return ints([*self.encode_answer(text).tolist(), *self._end_of_turn])

    def quoted_answer_ids(self, text: str) -> IntArray:
        """The same for an answer that others wrote down: control tokens that frame turns are text
        in it.
        """
        return self.answer_ids(self._control.guarded(text, self._tokens_of_answers))

    @cached_property
    def ids_by_text(self) -> Mapping[str, Sequence[int]]:
        """The tokens of the vocabulary, by the text that each is decoded to."""
        found: dict[str, list[int]] = {}
        for token_id in sorted(self._whole_tokenizer.get_vocab().values()):
            found.setdefault(self._text_of(token_id), []).append(token_id)
        return found

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begin_answer: bool
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=begin_answer,
            **self._variables,
        )
        return text

    def answer_text(self, answer_ids: IntArray) -> str:
        """The text of an answer without its stop token."""
        stopped = len(answer_ids) and int(answer_ids[-1]) in self._stop_token_ids
        return self.decode(answer_ids[:-1] if stopped else answer_ids)

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


class TemplateConversation:
    """One agent's messages in an episode, kept in step with the tokens that the model read and
    wrote.
    """

    def __init__(self, renderer: TemplateRenderer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._renderer = renderer
        self._tools = [dict(tool) for tool in tools]
        self._extends = renderer.config.history == "extend"
        self._messages: list[Message] = []
        self._shown: list[Message] = []
        self._answered = False  # what is shown ends with the answer that the seen tokens end with
        self._seen_text = ""  # the text of the last prompt and its answer, with `history: template`
        self._seen_ids = GrowingInts()  # the tokens of the last prompt and its answer
        self._seen_images: tuple[PlacedImage, ...] = ()  # the pictures in these
        # The new part of the last prompt, and the last answer.
        self._prompt_ids = self._answer_ids = ints(())

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far."""
        return tuple(self._messages)

    @property
    def shown(self) -> Sequence[Message]:
        """The earlier messages that the next prompt shows, before its new ones."""
        return self._shown

    def show(self, messages: Sequence[Message]) -> None:
        """Show these messages from now on instead of those shown so far; the property `messages`
        keeps all.
        """
        self._shown = list(messages)
        self._answered = False

    def size(self, messages: Sequence[Message]) -> int:
        """The number of tokens of the prompt with `messages`."""
        _, new_ids, forked = self._next(messages)
        return len(new_ids) + (0 if forked else len(self._seen_ids))

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Append `messages` and render the prompt for the next answer."""
        messages = self._link_results(messages)
        self._seen_text, new_ids, forked = self._next(messages)
        follows = len(self._seen_ids) > 0 and not forked
        shown = messages if follows else [*self._shown, *messages]
        images = self._renderer.placed(new_ids, shown, begins=not follows)
        self._append(messages)
        self._answered = False
        if forked:
            self._seen_ids, self._seen_images = GrowingInts(), ()
        self._seen_images += shifted(images, len(self._seen_ids))
        self._seen_ids.append(new_ids)
        self._prompt_ids = new_ids
        return Prompt(self._seen_ids.values, new_ids, forked, self._seen_images)

    def _next(self, messages: Sequence[Message]) -> tuple[str, IntArray, bool]:
        """The text of the prompt, its new tokens, and whether it forks; on a fork all of its tokens
        are new.

        Without `history: template` there is no text.
        """
        if self._extends:
            if self._answered and messages:
                return (
                    "",
                    self._renderer.added(self._prompt_ids, self._answer_ids, messages, self._tools),
                    False,
                )
            whole = self._renderer.whole([*self._shown, *messages], self._tools)
            return "", whole, len(self._seen_ids) > 0
        text = self._renderer.guarded_text([*self._shown, *messages], self._tools)
        seen = [image for message in self._shown for image in message.images]
        same = seen == [placed.image for placed in self._seen_images]
        if not same or not text.startswith(self._seen_text):
            return text, self._renderer.encode(text), True
        new_ids = self._renderer.encode(text[len(self._seen_text) :])
        # The template writes the end of turn too, which the model may have sampled already.
        last = self._seen_ids.last
        repeated = last in self._renderer.stop_token_ids and len(new_ids) and new_ids[0] == last
        return text, new_ids[1:] if repeated else new_ids, False

    def answer(self, completion: Completion) -> str:
        """Append the sampled tokens, and return what the environment gets: the answer, without
        reasoning.
        """
        self._answer_ids = completion.token_ids
        message = self._renderer.answer_message(self._prompt_ids, completion.token_ids, self._tools)
        self._append([message])
        self._seen_text += "" if self._extends else self._renderer.answer_text(completion.token_ids)
        self._seen_ids.append(completion.token_ids)
        self._answered = True
        return message.content

    def _link_results(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages whose results of tools name the call that they answer: the first of the last
        answer.
        """
        calls = self._shown[-1].tool_calls if self._shown else ()
        if not calls:
            return messages
        call = calls[0]
        return [
            (
                replace(
                    message,
                    tool_call_id=message.tool_call_id or call.id,
                    name=message.name or call.name,
                )
                if message.role == "tool"
                else message
            )
            for message in messages
        ]

    def _append(self, messages: Sequence[Message]) -> None:
        self._messages += messages
        self._shown += messages


def _refuse_images(messages: Sequence[Message]) -> None:
    """Check that messages are texts.

    Raises:
        ImagesRefusedError: one holds pictures.
    """
    if image := next((image for message in messages for image in message.images), None):
        raise ImagesRefusedError(
            f"a message holds a picture ({image.format}, {image.width} x {image.height}), and the"
            f" model reads text alone: take one that sees ({', '.join(FAMILIES)}), or choose what"
            " the environment says in words, such as env.options.view=grid"
        )


def renderer_of(folder: Path, config: RendererConfig) -> TemplateRenderer:
    """The renderer of the model in `folder`, as its settings choose it.

    A plug-in of the group `agentrl.renderers` is a function of the folder and the settings.

    Raises:
        ConfigError: the settings do not fit the model.
        PluginError: there is no such renderer.
    """
    if config.renderer in ("auto", "template", *names()):
        return TemplateRenderer.of_model(folder, config)
    renderer: TemplateRenderer = plugins.load("renderers", config.renderer)(folder, config)
    return renderer


def by_template(folder: Path, config: RendererConfig) -> TemplateRenderer:
    """The plug-in `template`: the rules of the model's own chat template."""
    return TemplateRenderer.of_model(folder, config.model_copy(update={"renderer": "template"}))


_TAG = "<tool_call>"
_TAIL = 64
"""Tokens before an answer that are searched for the beginning of its reasoning."""


def _choose_family(tokenizer: Any, config: RendererConfig) -> Family | None:
    """The family that the settings name, or that is recognised."""
    variables = dict(config.chat_template_kwargs)
    if config.renderer == "auto" and config.history == "extend" and config.tool_format == "auto":
        file = config.chat_template
        own = {} if file is None else {"chat_template": _read_template(file)}
        return find_family(tokenizer, variables, own)
    return (
        None
        if config.renderer in ("auto", "template")
        else family_named(config.renderer, tokenizer, variables)
    )


def _choose_templates(
    tokenizer: Tokenizer, config: RendererConfig
) -> tuple[str | None, str | None]:
    """The template that the settings name, or the default one of several by name, and that of them
    for conversations with tools. None: the tokenizer's only one, and no other for tools.

    Raises:
        ConfigError: the file cannot be read, or none of several is the default.
    """
    if config.chat_template is not None:
        return _read_template(config.chat_template), None
    named, asked = tokenizer.chat_template, config.chat_template_kwargs.get("chat_template")
    if not isinstance(named, Mapping):
        return asked, None
    if asked is not None:
        return named.get(asked, asked), None
    if "default" not in named:
        raise ConfigError(
            "the model has several chat templates, and none of them is the default:"
            f" {', '.join(sorted(named))}. Write model.chat_template_kwargs.chat_template=NAME"
        )
    # The canonical form describes tools in the system message, whatever the templates know.
    return named["default"], None if config.tool_format == "canonical" else named.get("tool_use")


def _read_template(file: Path) -> str:
    try:
        # Some editors begin a file with a mark of its encoding, which is no part of a prompt.
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {file} cannot be read: {error}") from error


def _read_stop_ids(folder: Path, tokenizer: Any) -> list[int]:
    """All eos tokens that the model's generation_config.json names and its tokenizer has."""
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    try:
        named = json.loads(file.read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}): copy it again, or remove it"
        ) from error
    if named is None:
        return []
    listed = named if isinstance(named, list) else [named]
    if not all(type(token) is int for token in listed):
        raise ConfigError(
            f"{file} has the eos_token_id {named!r:.80}: write the number of a token, or a list of"
            " such numbers"
        )
    known = {*tokenizer.get_vocab().values()}
    lacking = [token for token in listed if token not in known]
    if lacking:  # some files write -1 for no token
        logger.warning("%s: the tokenizer has no tokens %s, so they end no answer", file, lacking)
    return [token for token in listed if token in known]
