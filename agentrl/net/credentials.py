"""Credentials: they stand in environment variables, and in no address, because addresses are
written into `config.yaml`, logs, errors and trackers.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError

_IN_ADDRESS = re.compile(
    r"(?P<start>\b(?:https?|wss?)://)[^/\s?#@]+@"  # https://TOKEN@host
    # postgres://user:password@host, but not ssh://git@host
    r"|(?P<other>\b[a-z][\w+.-]*://)[^/\s?#@:]*:[^/\s?#@]+@"
    r"|(?P<query>://\S*?[?&][^=&\s]*"
    r"(?:key|token|secret|passw|signature|credential|auth)[^=&\s]*=)[^&\s]+",
    re.IGNORECASE,
)


def refuse_credentials(value: Any, where: str) -> None:
    """Check that no text in `value` is an address with a user's name, a password or a key in it.

    Raises:
        ConfigError: one is. The message names `where` it was written, and does not repeat it.
    """
    match value:
        case str() if _IN_ADDRESS.search(value):
            raise ConfigError(
                f"{where}: the address {without_credentials(value)!r} contains credentials, which"
                " would be written into config.yaml and logs. Put them into an environment"
                " variable (docs/security.md#keys lists them)"
            )
        case Mapping():
            for key, part in value.items():
                refuse_credentials(part, f"{where}.{key}" if where else str(key))
        case list() | tuple():
            for part in value:
                refuse_credentials(part, where)


def secret_in(variable: str) -> str:
    """The key or token in an environment variable, as a header can carry it; empty if there is
    none.

    White space around it is dropped: it is a file's last line break, and no header keeps it.

    Raises:
        ConfigError: it has characters that no header has. The message names the variable, and
        nothing of what is in it.
    """
    secret = os.environ.get(variable, "").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(
            f"the environment variable {variable} holds a key or token with characters that no"
            " HTTP header may have (a line break, or a letter beyond ASCII): write it again"
        )
    return secret


def without_credentials(text: str) -> str:
    """The text, with *** in place of the credentials in its addresses."""
    return _IN_ADDRESS.sub(_mask, text)


def _mask(match: re.Match[str]) -> str:
    if match["query"] is not None:
        return f"{match['query']}***"
    return f"{match['start'] or match['other']}***@"
