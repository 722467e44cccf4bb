"""Overrides: settings on the command line, `a.b=c`, and the right form for what is nearly one."""

import re
from typing import Any

from agentrl.errors import ConfigError
from agentrl.net.credentials import without_credentials
from agentrl.settings.yaml_values import read_value

_SIGNS = "-+~"
"""Signs that other programs write before a setting: `--a.b=c`, `+a.b=c`, `~a.b`."""


def read_override(override: str) -> tuple[tuple[str, ...], Any]:
    """The path of a setting, and its value.

    Raises:
        ConfigError: it is no override, or its value cannot be read; names the right form.
    """
    key, equals, text = override.partition("=")
    if not equals or not key or key != setting_of(key):
        form = right_form(override)
        ways = f"write {form}" if form else "write key=value, such as trainer.lr=1e-3"
        raise ConfigError(f"cannot read the override {without_credentials(override)!r}: {ways}")
    try:
        return tuple(key.split(".")), read_value(text)
    except ConfigError as error:
        raise ConfigError(
            f"cannot read the value of the override {without_credentials(override)!r}: {error}."
            f" Quote a value that is text, for the shell too: {key}=\"'...'\""
        ) from None


def right_form(written: str, value: str = "") -> str:
    """The correction of an argument that is nearly an override; nothing if there is no telling.
    `value`: the argument after it, which may be its value.
    """
    if re.fullmatch(r"~[\w.]+", written):
        return f"{setting_of(written)}=null"
    key, equals, text = written.partition("=")
    if not equals:
        key, colon, text = written.partition(":")
        text = text if colon else value
    setting, text = setting_of(key), text.strip()
    if not text or not re.fullmatch(r"[\w-]+(\.[^.\s]+)*", setting):
        return ""
    return without_credentials(f"{setting}={text}")


def setting_of(key: str) -> str:
    """The path of the setting that somebody means: `reward.0.weight` by `--reward[0].weight`."""
    bare = re.sub(r"\[['\"]?([\w-]+)['\"]?\]", r".\1", key.strip().lstrip(_SIGNS).rstrip(":+ "))
    return ".".join(part.strip() for part in bare.split(".") if part.strip())
