"""The user's home folder: what is written there, and `~` in settings."""

import os
import tempfile
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.files import caches
from agentrl.files.caches import cache_folder, prepare_caches
from agentrl.recipes.recordings import RecordingsConfig
from agentrl.sandbox.settings import SandboxConfig


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose folder for temporary files is `tmp`, with the environment variable HOME
    alone.
    """
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path / "home")})
    return tmp_path


def test_caches_lie_in_the_home_folder_or_where_that_is_read_only_beside_temporary_files(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_caches()
    assert cache_folder() == machine / "home" / ".cache" / "agentrl"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(cache_folder()))
    assert not caplog.text
    (machine / "home" / ".cache" / "huggingface").mkdir()
    (machine / "home" / ".cache" / "agentrl").rmdir()
    (machine / "home" / ".cache" / "agentrl").write_text("root, too, can make no folder here")
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    prepare_caches()
    (own,) = (machine / "tmp").iterdir()
    assert cache_folder() == own / "agentrl"
    assert own.stat().st_mode & 0o077 == 0
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(own)
    # Models that are there already.
    assert os.environ["HF_HOME"] == str(machine / "home" / ".cache" / "huggingface")
    (said,) = caplog.messages
    assert "File exists" in said
    assert f"caches go into {own}; XDG_CACHE_HOME names another" in said


def test_nothing_is_imported_from_a_cache_that_others_can_write(machine: Path) -> None:
    os.environ["HOME"] = "/dev/null"
    trap = machine / "tmp" / f"agentrl-cache-{os.geteuid()}"
    trap.mkdir()
    trap.chmod(0o777)
    prepare_caches()
    assert not cache_folder().is_relative_to(trap)
    assert caches.cache_folder().is_relative_to(machine / "tmp")


def test_a_user_without_a_home_folder_has_caches(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for a number without a name in a container.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    prepare_caches()
    assert cache_folder().is_relative_to(machine / "tmp")


def test_a_tilde_in_any_path_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "lake.yaml"
    file.write_text(
        "env: {name: frozen_lake, agents: {guide: {name: frozen, model: ~/guide}}}\n"
        "run_dir: ~/runs/lake\nmodel: {name: ~/model, chat_template: ~/chat.jinja}\n"
        "weights: {folder: ~/weights}\n"
        "algorithm: {name: distill, teacher: ~/teacher}\n"
    )
    loaded = load_config(file, ["weights.folder=~/others"])
    rows = {key: value for key, value, _ in loaded.rows()}
    for key, value in {
        "run_dir": "runs/lake",
        "model.name": "model",
        "model.chat_template": "chat.jinja",
        "weights.folder": "others",
        "algorithm.teacher": "teacher",
        "env.agents.guide.model": "guide",
    }.items():
        assert rows[key] == f"{tmp_path}/{value}", key
    assert "~" not in loaded.config.to_yaml()
    assert SandboxConfig(paths=("~/packages",)).paths == (f"{tmp_path}/packages",)
    assert RecordingsConfig(path=Path("~/kept")).path == tmp_path / "kept"
