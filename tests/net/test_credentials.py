"""Credentials in addresses are refused before anything is written, and never repeated."""

import sys
from pathlib import Path

import pytest

from agentrl import cli, plugins
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.net.credentials import refuse_credentials, secret_in, without_credentials
from agentrl.remote.client import RemoteEnv

SECRET = "hunter2"
WITH_CREDENTIALS = [
    f"http://me:{SECRET}@games.example:8800",
    f"https://{SECRET}@games.example",
    f"remote:http://one:8800,https://me:{SECRET}@two:8800",
    f"openenv:https://:{SECRET}@games.example",
    f"mcp:http://games.example/mcp?api_key={SECRET}",
    f"mcp:http://games.example/mcp?user=me&access-token={SECRET}&x=1",
    f"postgres://me:{SECRET}@db.example/games",
    f"WSS://{SECRET}@games.example",
]
WITHOUT = [
    "http://games.example:8800/path?level=2",
    "git+ssh://git@github.com/me/game.git",
    "write to me@games.example",
    "http://games.example/@me",
    "see https://games.example, or ask me: a@b.example",
]


@pytest.mark.parametrize("text", WITH_CREDENTIALS)
def test_an_address_with_credentials_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="contains credentials") as refused:
        refuse_credentials({"env": [text]}, "")
    assert SECRET not in str(refused.value)
    assert str(refused.value).startswith("env: ")
    assert SECRET not in without_credentials(f"cannot reach {text}: refused")


@pytest.mark.parametrize("text", WITHOUT)
def test_other_addresses_are_left_alone(text: str) -> None:
    refuse_credentials(text, "env")
    assert without_credentials(text) == text


@pytest.mark.parametrize(
    "key", ["env", "engine.url", "cluster.address", "reward.0.url", "nonsense"]
)
def test_a_config_refuses_them_wherever_they_stand(key: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: guess_number\nmodel: tiny\nreward: [environment]\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path, [f"{key}=http://me:{SECRET}@games.example"])
    assert SECRET not in str(refused.value)
    assert key in str(refused.value)


def test_a_command_line_refuses_them_and_writes_no_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"env: http://me:{SECRET}@127.0.0.1:9\nmodel: tiny\n")
    monkeypatch.setattr(sys, "argv", ["agentrl", "train", str(path), f"run_dir={tmp_path / 'run'}"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        cli.main()
    said = capfd.readouterr()
    assert "contains credentials" in said.out + said.err
    assert SECRET not in said.out + said.err
    assert not (tmp_path / "run").exists()


def test_code_that_names_an_environment_is_told_too() -> None:
    for make in (lambda url: plugins.load("envs", url), lambda url: RemoteEnv([url])):
        with pytest.raises(ConfigError, match="contains credentials") as refused:
            make(f"http://me:{SECRET}@games.example")
        assert SECRET not in str(refused.value)


def test_a_secret_is_read_without_the_line_break_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", f" {SECRET}\r\n")
    assert secret_in("A_KEY") == SECRET
    monkeypatch.delenv("A_KEY")
    assert secret_in("A_KEY") == ""


@pytest.mark.parametrize("more", ["\nX-Evil: 1", "\r\n\r\n", "é", "\u200b", "\x7f", "\t"])
def test_a_secret_that_no_header_can_carry_is_refused_and_not_repeated(
    more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", f"{SECRET}{more}{SECRET}")
    with pytest.raises(ConfigError, match="A_KEY") as refused:
        secret_in("A_KEY")
    assert SECRET not in str(refused.value)
