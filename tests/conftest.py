"""Fixtures shared by the suite."""

from pathlib import Path

import pytest

from agentrl.tiny_model import create_tiny_model

pytest_plugins = ["agentrl.testing.fixtures"]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer and compact chat template; read-only by agreement."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    create_tiny_model(folder, seed=0)
    return folder
