"""Makes small, randomly initialised language models with tokenizer and chat template, in the
Hugging Face format.

Nothing is downloaded. The folder loads with `AutoModelForCausalLM`, `AutoTokenizer` and vLLM;
tests, examples and laptops train such models. The architecture is Qwen3 with tied embeddings, that
of a model that sees Qwen3-VL (`agentrl.models.tiny_vision`). The tokenizer is byte-level BPE, so it
decodes any text that it encoded unchanged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from agentrl.errors import ConfigError
from agentrl.models import tiny_vision

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig

ModelSize = Literal["tiny", "small", "tiny_vision"]
SIZES: dict[str, ModelSize] = {size: size for size in get_args(ModelSize)}
SEEING: frozenset[str] = frozenset({"tiny_vision"})
"""Those of models that see."""
ChatTemplate = Literal["compact", "chatml"]

MAX_POSITIONS = 2048
"""The context length of the models made here, in tokens."""
MAX_VOCAB_SIZE = 1024
"""The vocabulary may be smaller: the model has exactly the tokens that its tokenizer learned."""


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # vLLM's CPU attention supports 32, 64, 80, 96, 112, 128 and up
    mlp: int


_SHAPES: dict[ModelSize, _Shape] = {
    "tiny": _Shape(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=512),
    "small": _Shape(hidden=256, layers=6, heads=4, kv_heads=2, head_dim=64, mlp=768),
    "tiny_vision": _Shape(hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=512),
}


@dataclass(frozen=True, slots=True)
class _Dialect:
    """A chat template with the special tokens it uses."""

    template: str
    end: str
    pad: str
    others: tuple[str, ...]


# One token per role and one per end, no newline: a turn costs two tokens beside its content.
_COMPACT = _Dialect(
    template=(
        "{%- if tools %}{{- '<|system|>' }}"
        "{%- if messages and messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}"
        "{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|end|>' }}{%- endif %}"
        "{%- for message in messages %}"
        "{%- if not (tools and loop.first and message.role == 'system') %}"
        "{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    ),
    end="<|end|>",
    pad="<|pad|>",
    others=("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
)

# As Qwen's own: newlines after the role and after the end, tool results as a user turn.
_CHATML = _Dialect(
    template=(
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages and messages[0].role =="
        " 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools\\n\\nYou are"
        " provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}{%- for"
        " tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools>\\n\\nFor"
        " each function call, return a json object with function name and arguments within"
        " <tool_call></tool_call> XML tags.<|im_end|>\\n' }}{%- endif %}{%- for message in messages"
        " %}{%- if message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role !="
        " 'tool' %}{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' +"
        " message.content + '\\n</tool_response>' }}{%- if loop.last or messages[loop.index0 +"
        " 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- elif not (tools and loop.first"
        " and message.role == 'system') %}{{- '<|im_start|>' + message.role + '\\n' +"
        " message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt"
        " %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    end="<|im_end|>",
    pad="<|endoftext|>",
    others=("<|im_start|>",),
)

_DIALECTS: dict[ChatTemplate, _Dialect] = {"compact": _COMPACT, "chatml": _CHATML}
_SEEING = _Dialect(
    template=tiny_vision.TEMPLATE,
    end=_COMPACT.end,
    pad=_COMPACT.pad,
    others=(*_COMPACT.others, *tiny_vision.MARKS),
)

# A word with its leading space, one digit, a run of signs with its leading space, or one
# white-space character: a newline never joins its neighbours, so each cell of a grid and each line
# end is a token of its own.
_PIECE_PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"

_CORE_TEXT = (
    "P . . O\n. O . .\nO . P .\n. . O G\n G P O .\n",
    "left\ndown\nright\nup\nLeft\nDown\nRight\nUp\n left down right up",
    "0 1 2 3 4 5 6 7 8 9 0123456789 + - * / = ( ) < >",
    (
        "You are at P. Reach the goal G and keep out of the holes O. Answer with one word: left,"
        " down, right or up."
    ),
    "Guess a number. Too high. Too low. Correct! Your guess is higher, lower, yes, no.",
    "The result of the tool call is an error. Use the tools, then answer with the result.",
    '{"name": "add", "arguments": {"a": 1, "b": 2}} <tool_call> </tool_call>',
)


def create_tiny_model(
    folder: Path,
    *,
    corpus: Iterable[str] | None = None,
    size: ModelSize = "tiny",
    seed: int = 0,
    template: ChatTemplate = "compact",
) -> None:
    """Write a model, its tokenizer and its chat template into `folder`, float32.

    The tokenizer's merges are learned from `corpus` and a few built-in lines (grids, moves, digits,
    sentences), whose words always become single tokens. "tiny" has 1.1 million parameters, "small"
    4.9; "tiny_vision" has 1.0 and sees, and has a template of its own. The same arguments give the
    same files; no global random state is touched.

    Raises:
        ConfigError: `folder` is not empty, or the size or template is unknown.
    """
    if size not in _SHAPES or template not in _DIALECTS:
        raise ConfigError(
            f"no size {size!r} with template {template!r}; sizes: {[*_SHAPES]}, templates:"
            f" {[*_DIALECTS]}"
        )
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a new folder for the model")
    from transformers import PreTrainedTokenizerFast

    dialect = _SEEING if size in SEEING else _DIALECTS[template]
    specials = [dialect.pad, dialect.end, *dialect.others]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(corpus or (), specials),
        eos_token=dialect.end,
        pad_token=dialect.pad,
        additional_special_tokens=list(dialect.others),
        chat_template=dialect.template,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    _write_weights(folder, model_config(size, len(tokenizer), **ends), seed)
    if size in SEEING:
        tiny_vision.image_processor().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_tokenizer(corpus: Iterable[str], specials: Sequence[str]) -> "Tokenizer":
    """A byte-level tokenizer whose merges are learned from `corpus` and a few built-in lines."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=[*specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_with_core(corpus), trainer)
    return tokenizer


def _with_core(corpus: Iterable[str]) -> Iterator[str]:
    """The corpus texts with the core text between them, so that the corpus does not cost any core
    word its token.
    """
    yield from _CORE_TEXT
    for text in corpus:
        yield text
        yield from _CORE_TEXT


def model_config(
    size: ModelSize, vocab_size: int = MAX_VOCAB_SIZE, **special_tokens: int | None
) -> "PreTrainedConfig":
    """The shape of a model of this size."""
    from transformers import Qwen3Config

    shape = _SHAPES[size]
    text: dict[str, Any] = dict(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        # With this initial scale a small model learns its first words several times faster than
        # with the usual 0.02. It learns offsets between near tokens faster if no rotation is slower
        # than the context is long.
        initializer_range=shape.hidden**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        **special_tokens,
        dtype="float32",
    )
    if size not in SEEING:
        return Qwen3Config(**text)
    marks = (_SEEING.pad, _SEEING.end, *_SEEING.others)
    return tiny_vision.vision_language_config(text, marks)


def _write_weights(folder: Path, config: "PreTrainedConfig", seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import (
        GenerationConfig,
        Qwen3ForCausalLM,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    # transformers initialises from torch's CPU generator only; fork it, so that its state is
    # restored.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: Any
        if isinstance(config, Qwen3VLConfig):
            model = Qwen3VLForConditionalGeneration(config)
            tiny_vision.scale_tower(model)
        else:
            model = Qwen3ForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(model.named_parameters())  # lists a tied weight once
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    text = config.get_text_config()
    GenerationConfig(
        do_sample=True, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id
    ).save_pretrained(folder)


__all__ = [
    "MAX_POSITIONS",
    "MAX_VOCAB_SIZE",
    "SEEING",
    "SIZES",
    "ChatTemplate",
    "ModelSize",
    "create_tiny_model",
    "model_config",
    "train_tokenizer",
]
