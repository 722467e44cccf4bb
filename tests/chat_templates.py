"""The chat templates that TRL ships, each with a tokenizer of bytes that knows the template's
special tokens.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(
    r"<\|[^|<>\n'\"]+\|>|<｜[^｜<>\n]+｜>|<(?:start|end)_of_(?:turn|utterance)>|<\|[a-z_\"]+>|<[a-z_\"]+\|>|</?s>"
    r"|</?(?:tool_call|tool_response|think|arg_key|arg_value)>"
)
_ENDS = (
    "<|return|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
    "<end_of_utterance>",
    "</s>",
)
"""Texts of eos tokens: a tokenizer has the first of them that its template writes."""


_MORE = {
    "<|im_end|>": (
        "<|endoftext|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<image>",
        "<img>",
        "</img>",
    ),
    "<|observation|>": (
        "<|endoftext|>",
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "/nothink",
    ),
    "<turn|>": ("<eos>", "<pad>", "<|image|>", "<image|>", "<|image>"),
    "<|channel|>": ("<|constrain|>", "<|endoftext|>", "<|startoftext|>"),
}
"""Tokens that the tokenizers of some families have besides those which their templates write."""
_PLAIN = frozenset(
    (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
)
"""Single tokens, but no special ones."""


def templates() -> dict[str, str]:
    """All templates, by name. `make install` installs TRL, without what it depends on."""
    trl = find_spec("trl")
    assert trl is not None, "TRL is missing, whose chat templates are tested: make install"
    folder = Path(str(trl.origin)).parent / "chat_templates"
    return {file.stem: file.read_text() for file in sorted(folder.glob("*.jinja"))}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with this template of TRL."""
    return byte_tokenizer(templates()[name])


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with this template."""
    specials = set(_SPECIAL.findall(template))
    end = next((end for end in _ENDS if end in specials), "</s>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    more = {text for key, texts in _MORE.items() if key in template for text in texts}
    core.add_special_tokens(
        [
            AddedToken(text, special=True)
            for text in sorted({*specials, *more, end, "<bos>"} - _PLAIN)
        ]
    )
    core.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text in sorted((specials | more) & _PLAIN)
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer
