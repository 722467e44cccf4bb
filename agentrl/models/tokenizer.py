"""The tokenizer in a model's folder."""

from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

TEKKEN = "tekken.json"
"""The only tokenizer file that some models of Mistral come with."""
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer of transformers with its chat template.

    Models of Mistral may come with `tekken.json` alone, which is converted; its template is that of
    mistral-common.

    Raises:
        OSError, ValueError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if (folder / TEKKEN).is_file():
        if (folder / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(folder, mistral_format=False)
        from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

        return convert_tekken_tokenizer(str(folder / TEKKEN))
    if not trust_remote_code and not any(
        file for kind in _VOCABULARIES for file in folder.glob(kind)
    ):
        # Transformers makes one without tokens.
        raise OSError(f"there is none of {', '.join(_VOCABULARIES)} in it")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def check_same_tokens(model: Path, other: Path, setting: str = "algorithm.teacher") -> None:
    """Check that two models have the same tokens under the same numbers. `setting` is the one that
    names the other.

    Raises:
        ConfigError: they have not, or there is no such model.
    """
    if not (other / "config.json").is_file():
        raise ConfigError(f"{setting}: {other} is no folder of a Hugging Face model")
    vocabulary, other_vocabulary = (load_tokenizer(folder).get_vocab() for folder in (model, other))
    if vocabulary != other_vocabulary:
        differing = sorted(
            token
            for token in vocabulary.keys() | other_vocabulary.keys()
            if vocabulary.get(token) != other_vocabulary.get(token)
        )
        raise ConfigError(
            f"{setting}: the tokenizer of {other} differs from that of {model} in {len(differing)}"
            f" tokens, such as {differing[0]!r}: a teacher is asked for the logprobs of the"
            " policy's own tokens, so it must have the same ones. Take a teacher of the same"
            " family"
        )


__all__ = ["check_same_tokens", "load_tokenizer"]
