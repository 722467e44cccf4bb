"""The tokenizer in a model's folder."""

from pathlib import Path
from typing import Any

TEKKEN = "tekken.json"
"""The only tokenizer file that some models of Mistral come with."""


def load_tokenizer(folder: Path) -> Any:
    """A tokenizer of transformers with its chat template.

    Models of Mistral may come with `tekken.json` alone, which is converted; its template is that of mistral-common.

    Raises:
        OSError, ValueError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if (folder / TEKKEN).is_file():
        if (folder / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(folder, mistral_format=False)
        from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

        return convert_tekken_tokenizer(str(folder / TEKKEN))
    return AutoTokenizer.from_pretrained(folder)


__all__ = ["load_tokenizer"]
