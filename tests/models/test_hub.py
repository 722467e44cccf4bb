"""Uploads to the hub by its own library, to a stand-in for it; nothing here reaches a network."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from tests.models.hub_server import Hub, serving_hub

# The hub's library sends files by a name of an argument that its HTTP library has given up.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub at which an account is logged in."""
    with serving_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model with a card, as far as an upload looks at it."""
    folder = tmp_path / "lake"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"lm_head.weight": np.eye(64, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# lake\n")
    return folder


def test_a_model_arrives_byte_for_byte_in_a_private_repository_and_again_in_the_same(
    hub: Hub, model: Path, agentrl: Callable[..., Any]
) -> None:
    done = agentrl("push-to-hub", str(model), "us/lake")
    assert done.returncode == 0, done.stderr
    assert f"{hub.address}/us/lake/commit/" in done.stdout
    assert hub.private == {"us/lake": True}
    sent = {path.name: path.read_bytes() for path in model.iterdir()}
    assert hub.files["us/lake@main"] == sent
    assert any(blob == sent["model.safetensors"] for blob in hub.blobs.values())
    (model / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# a better lake\n")
    assert agentrl("push-to-hub", str(model), "us/lake", "--public").returncode == 0
    assert b"a better lake" in hub.files["us/lake@main"]["README.md"]
    assert hub.private == {"us/lake": True}  # an existing repository stays as it is


def test_what_cannot_be_uploaded_is_refused_before_anything_is_sent(
    hub: Hub, model: Path, tmp_path: Path, agentrl: Callable[..., Any], monkeypatch: Any
) -> None:
    def refused(folder: Path, name: str) -> str:
        done = agentrl("push-to-hub", str(folder), name)
        assert (done.returncode, hub.asked) == (2, [])
        return " ".join(done.stderr.split())

    assert "write OWNER/NAME" in refused(model, "lake")
    assert "agentrl export RUN FOLDER" in refused(tmp_path, "us/lake")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "huggingface_hub", None)
        assert "pip install huggingface_hub" in refused(model, "us/lake")
    with monkeypatch.context() as patched:
        patched.delenv("HF_TOKEN")
        patched.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        patched.setattr("huggingface_hub.utils._auth._get_token_from_google_colab", lambda: None)
        assert "log in with `hf auth login`" in refused(model, "us/lake")
    with monkeypatch.context() as patched:
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in refused(model, "us/lake")
    (model / "README.md").unlink()
    assert "has no card (README.md)" in refused(model, "us/lake")
    (model / "model.safetensors").unlink()
    assert "no weights" in refused(model, "us/lake")


def test_a_refusal_of_the_hub_is_a_sentence(
    hub: Hub, model: Path, agentrl: Callable[..., Any], monkeypatch: Any
) -> None:
    def refused(name: str = "us/lake") -> str:
        done = agentrl("push-to-hub", str(model), name)
        assert done.returncode == 1
        assert hub.files == {}
        return " ".join(done.stderr.split())

    assert "may not write there: You don't have the rights" in refused("others/lake")
    (model / "README.md").write_text(
        "---\nmodel-index:\n- results:\n  - {task: {}, dataset: {}}\n---\n"
    )
    assert "Invalid metadata in README.md" in refused()
    with monkeypatch.context() as patched:
        patched.setenv("HF_TOKEN", "hf_wrong")
        assert "does not know the token" in refused()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the connection to the hub at http://127.0.0.1:9 failed" in refused()
