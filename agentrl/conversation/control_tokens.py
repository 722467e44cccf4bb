"""Control tokens, and the text that must not become any.

Chat templates write control tokens as text, such as `<|im_end|>`, and a tokenizer makes one token
of such a text wherever it stands: in an observation, too, where it would end the turn and let an
opponent write as the system. So what others wrote is guarded before it is rendered: a text that no
one can guess is put inside each control token's text. Where the rendered text is tokenised, a
control token is what has no guard in it, and the rest is text:

    <|im_start|>user\nIt says <[guard]|im_end|>.<|im_end|>
    |control---|     |text-----------------------||control-|

Text without control tokens is not touched. The rest is tokenised by a twin of the tokenizer, in
which the control tokens have other names, so that whatever else a tokenizer does with the text
between them is the same.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from agentrl.trajectory import Message, ToolCall

_KEY = secrets.token_hex(12)
GUARD = f"xq{_KEY}xq"
"""Letters and digits, which no template trims, escapes or splits."""
_BREAK = f"xqbreak{_KEY}xq"
_PLAIN_ELEMENT = re.compile(
    r"</?(?:a|b|blockquote|body|br|caption|code|div|em|h[1-6]|head|hr|html|i|img|li|ol|p|pre|s|"
    r"span|strong|sub|sup|table|tbody|td|tfoot|th|thead|title|tr|u|ul)>"
)
"""HTML, which some tokenizers (Gemma's) have single tokens for."""


@dataclass(frozen=True, slots=True)
class ExtraToken:
    """A token that a tokenizer has been given besides its vocabulary."""

    text: str
    special: bool
    """Decoding leaves it out where special tokens are skipped."""
    normalized: bool
    """It is found in normalised text, not in the text as written."""


def extra_tokens(tokenizer: Any) -> dict[int, ExtraToken]:
    """The added tokens of a tokenizer by their numbers; none of one that is not transformers'."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token_id: ExtraToken(str(token), token.special, token.normalized)
        for token_id, token in added.items()
    }


def is_control(token: ExtraToken, template: str) -> bool:
    """True if an added token of a tokenizer steers the model.

    Others are pieces of plain text: white space, letters, HTML.
    """
    text = token.text
    if token.special or text in template:
        return bool(text.strip())
    plain = len(text) == 1 or all(one.isalnum() or one.isspace() or one == "\u2581" for one in text)
    return not plain and not _PLAIN_ELEMENT.fullmatch(text)


class ControlTokens:
    """The control tokens of a tokenizer. `template`: its chat template; what that writes is one of
    them.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        added = extra_tokens(tokenizer)
        self._tokenizer = tokenizer
        self._ids = {token.text: i for i, token in added.items() if is_control(token, template)}
        self._pattern = re.compile(_pattern_of(self._ids))
        self._starts = re.compile(f"(?=({_pattern_of(self._ids)}))(.)", re.DOTALL)
        long = [text for text in self._ids if len(text) > 1]
        self._beginnings = {text[:end] for text in long for end in range(2, len(text))}
        self._rests = {text[1:] for text in long}
        self._reach = sorted({len(text) for text in self._beginnings | self._rests})
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        changing = any(token.normalized for token in added.values())
        self._normalizer = self._core.normalizer if self._core is not None and changing else None

    @property
    def texts(self) -> Collection[str]:
        """The texts of the control tokens."""
        return self._ids.keys()

    @property
    def ids(self) -> Collection[int]:
        """Their numbers."""
        return self._ids.values()

    def found_in(self, text: str) -> set[str]:
        """The control tokens that stand in a text without a guard."""
        return set(self._pattern.findall(text))

    # Guarding what others wrote

    def guarded(self, text: str, own: Collection[str] = ()) -> str:
        """The text with a guard in each control token but `own`, and in what the template could
        complete to one.
        """
        if self._pattern.search(text):
            text = self._starts.sub(
                lambda found: (
                    found[2]
                    if found[1] in own
                    else GUARD + found[2]
                    if len(found[1]) == 1
                    else found[2] + GUARD
                ),
                text,
            )
        elif self._normalizer is not None and self._pattern.search(
            self._normalizer.normalize_str(text)
        ):
            # Only the normalised text has a control token. Any guard makes `encode` use the twin,
            # which takes no text for one, whatever it is normalised to.
            return f"{text[0]}{GUARD}{text[1:]}"
        return self._guard_edges(text)

    def _guard_edges(self, text: str) -> str:
        """The text with a guard where a control token may begin at its end, or end at its
        beginning: the template's own text is put right beside it.
        """
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for size in self._reach:  # the shorter ones first, which move none of the places of others
            if end - size >= begin and text[end - size : end] in self._beginnings:
                text = f"{text[: end - size + 1]}{GUARD}{text[end - size + 1 :]}"
        if any(text[begin : begin + size] in self._rests for size in self._reach):
            text = f"{text[:begin]}{GUARD}{text[begin:]}"
        return text

    def guarded_message(self, message: Message, own: Collection[str]) -> Message:
        """A message whose texts are guarded. An answer may have control tokens of its `own`, such
        as `</think>`.
        """
        answers = message.role == "assistant"
        calls = tuple(self._guard_call(call) for call in message.tool_calls)
        said = self.guarded(message.said, own if answers else ())
        return replace(
            message,
            content="\n".join(filter(None, (said, *(call.render() for call in calls))))
            if calls
            else said,
            reasoning=self.guarded(message.reasoning, own),
            tool_calls=calls,
            tool_call_id=self.guarded(message.tool_call_id),
            name=self.guarded(message.name),
        )

    def guarded_value(self, value: Any) -> Any:
        """A JSON value whose texts are guarded, such as the description of a tool."""
        if isinstance(value, str):
            return self.guarded(value)
        if isinstance(value, Mapping):
            return {self.guarded_value(key): self.guarded_value(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded_value(one) for one in value]
        return value

    def _guard_call(self, call: ToolCall) -> ToolCall:
        return ToolCall(
            self.guarded(call.name), self.guarded_value(call.arguments), self.guarded(call.id)
        )

    # Tokenising guarded text

    def encode(self, text: str) -> list[int]:
        """The tokens of rendered text: control tokens where there is no guard, else text."""
        if self._core is None:
            # There is no core to make a twin of, so the pieces between guards are tokenised.
            found: list[int] = []
            for piece in filter(None, text.split(GUARD)):
                found += self._tokenizer.encode(piece, add_special_tokens=False)
            return found
        twin, ids, names = self._twin
        named = self._pattern.sub(lambda found: names[found[0]], text)
        tokens = self._encode_named(named.replace(GUARD, ""))
        if any(token in self._in_vocabulary for token in tokens):
            # Guarded text has become a control token after all, since the model's own vocabulary
            # has it. A token in the guard's place keeps its pieces apart, and is then dropped.
            broken = twin.token_to_id(_BREAK)
            tokens = [
                token
                for token in self._encode_named(named.replace(GUARD, _BREAK))
                if token != broken
            ]
        return [ids.get(token, token) for token in tokens]

    def _encode_named(self, named: str) -> list[int]:
        ids: list[int] = self._twin[0].encode_batch_fast([named], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _twin(self) -> tuple[Any, Mapping[int, int], Mapping[str, str]]:
        """A tokenizer core whose control tokens have unguessable names; the model's token for each
        of its added ones; and the name of each control token.
        """
        from tokenizers import AddedToken, Tokenizer

        core = self._core
        assert core is not None
        twin = Tokenizer(core.model)  # not a copy: it has the same vocabulary
        if core.normalizer is not None:
            twin.normalizer = core.normalizer
        if core.pre_tokenizer is not None:
            twin.pre_tokenizer = core.pre_tokenizer
        added = core.get_added_tokens_decoder()
        names = {text: f"xq{number}n{_KEY}xq" for text, number in self._ids.items()}
        ids: dict[int, int] = {}
        for number, token in added.items():
            flags = {
                flag: getattr(token, flag)
                for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            name = names.get(token.content, token.content)
            twin.add_tokens([AddedToken(name, **flags)])
            ids[int(twin.token_to_id(name) or 0)] = number
        twin.add_tokens([AddedToken(_BREAK, normalized=False)])
        return twin, ids, names

    @cached_property
    def _in_vocabulary(self) -> frozenset[int]:
        """The control tokens that the model's own vocabulary has under their text."""
        assert self._core is not None
        model = self._core.model
        return frozenset(
            number for text, number in self._ids.items() if model.token_to_id(text) == number
        )


class CarefulTokenizer:
    """A tokenizer for a family's rules, which takes for control tokens only what has no guard."""

    def __init__(self, tokenizer: Any, control: ControlTokens) -> None:
        self._tokenizer = tokenizer
        self._control = control

    def encode(self, text: str, **_: Any) -> list[int]:
        """The tokens of guarded text."""
        return self._control.encode(text)

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)  # it gives no offsets
        return getattr(self._tokenizer, name)


def bare(text: str) -> str:
    """Rendered text without guards."""
    return text.replace(GUARD, "")


def _pattern_of(texts: Collection[str]) -> str:
    """A regular expression for these texts that finds the longest, and none that has a guard in or
    right before it.
    """
    long = sorted(text for text in texts if len(text) > 1)
    single = [re.escape(text) for text in texts if len(text) == 1]
    found = [_branches(long)] if long else []
    found += [f"(?<!{GUARD})(?:{'|'.join(single)})"] if single else []
    return "|".join(found) or r"(?!)"


def _branches(texts: Sequence[str]) -> str:
    """A regular expression of sorted texts as a prefix tree, because some tokenizers have a
    thousand: `ab`, `abc` and `ax` become `a(?:b(?:c)?|x)`.
    """
    branches = []
    ends = "" in texts
    rests: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
    for first, following in rests.items():
        branches.append(re.escape(first) + _branches(following))
    if not branches:
        return ""
    joined = "|".join(branches)
    if ends:
        return f"(?:{joined})?"
    return joined if len(branches) == 1 else f"(?:{joined})"
