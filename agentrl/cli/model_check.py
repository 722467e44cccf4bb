"""`agentrl check-model`: a model folder, and a check that it can be trained here."""

from collections.abc import Iterator
from pathlib import Path

from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import renderer_of
from agentrl.conversation.template_check import Finding, template_findings
from agentrl.errors import ConfigError
from agentrl.models.facts import ModelFacts, model_facts
from agentrl.models.source import check_architecture, check_weights, vocabulary_size, weight_files
from agentrl.models.tokenizer import load_tokenizer


def findings(folder: Path, config: RendererConfig) -> Iterator[Finding]:
    """All that is found: first of its config and weights, then of its tokenizer and chat template.

    Raises:
        ConfigError: its tokenizer cannot be loaded, or has no chat template.
    """
    yield from _check_model_config(folder, config)
    yield _check_weights(folder)
    renderer = renderer_of(folder, config)
    yield _check_vocabulary(folder, config)
    yield from template_findings(renderer)


def _check_model_config(folder: Path, config: RendererConfig) -> Iterator[Finding]:
    try:
        facts = model_facts(folder)
        yield Finding("model", _describe_shape(facts))
        sliding = (
            f", of which {facts.kv.sliding} layers see {facts.kv.window:,}"
            if facts.kv.sliding
            else ""
        )
        yield Finding("context", f"{facts.max_positions:,} tokens{sliding}")
    except (ConfigError, OSError, ValueError) as error:
        yield Finding("model", f"its shape is not known: {str(error).splitlines()[0]}", right=False)
    try:
        check_architecture(folder, trust_remote_code=config.trust_remote_code, setting="model")
    except ConfigError as error:
        yield Finding("training", str(error), right=False)


def _describe_shape(facts: ModelFacts) -> str:
    experts = f", {facts.chosen} of {facts.experts} experts for a token" if facts.experts else ""
    count = (
        f"{facts.parameters / 1e9:.2f} B"
        if facts.parameters >= 1e9
        else f"{facts.parameters / 1e6:.1f} M"
    )
    return f"{count} parameters, {facts.layers} layers of {facts.hidden}{experts}"


def _check_weights(folder: Path) -> Finding:
    """Their files. A folder without any is enough for prompts, so that is not wrong."""
    files = [file for file in weight_files(folder) if file.is_file()]
    if not files and not any(folder.glob("*.bin")):
        return Finding(
            "weights", "none: this is enough for prompts, and to train, the folder needs them"
        )
    try:
        check_weights(folder, str(folder), setting="model")
    except ConfigError as error:
        return Finding("weights", str(error), right=False)
    size = sum(file.stat().st_size for file in files) / 1e6
    return Finding(
        "weights", f"{len(files)} {'file' if len(files) == 1 else 'files'}, {size:,.0f} MB"
    )


def _check_vocabulary(folder: Path, config: RendererConfig) -> Finding:
    """A check that the model has a row for each token of its tokenizer."""
    rows = vocabulary_size(folder)
    largest = max(
        load_tokenizer(folder, trust_remote_code=config.trust_remote_code).get_vocab().values()
    )
    if rows is not None and largest >= rows:
        words = (
            f"the tokenizer has the token {largest}, and the model {rows:,} rows: they belong to"
            " different models"
        )
        return Finding("vocabulary", words, right=False)
    return Finding(
        "vocabulary", f"{largest + 1:,} tokens" + (f", {rows:,} rows" if rows is not None else "")
    )
