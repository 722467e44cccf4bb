"""The process environment that vLLM is imported in, and the file that its log goes to."""

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from agentrl.net.interfaces import LOOPBACK, stay_on_loopback

_LOGGER = "vllm"
_QUIET = "ERROR"


def set_environment() -> None:
    """Set what vLLM reads when it is imported, here and in its processes. Values that the user has
    set are kept, and so is the network on which to meet other machines (`Surroundings`).
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", _QUIET)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)  # all its processes are on this machine
    stay_on_loopback()


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import vLLM inside, in its environment and without the warnings of its imports, which users
    cannot cure.
    """
    set_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def logging_to(file: Path | None) -> Iterator[dict[str, Any]]:
    """vLLM's arguments for a log in this file, for processes that start inside; none without a
    file, or if the user has configured vLLM's logging.

    Errors go to standard error too. The file is appended to.
    """
    is_own = {"VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"} & os.environ.keys()
    if file is None or is_own:
        yield {}
        return
    from vllm.config.logging import LoggingConfig
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError:  # such as on a machine that the folder of the run is not shared with
        yield {}
        return
    level = os.environ.get("VLLM_LOGGING_LEVEL", _QUIET)
    level = "INFO" if level == _QUIET else level
    config = deepcopy(DEFAULT_LOGGING_CONFIG)
    config["handlers"]["file"] = {
        "class": "logging.FileHandler",
        "filename": str(file.absolute()),
        "encoding": "utf-8",
        "formatter": _LOGGER,
        "level": level,
    }
    config["loggers"][_LOGGER] |= {"handlers": [_LOGGER, "file"], "level": level}
    # vLLM takes the path of a config, and reads it when its processes start.
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
        written = Path(folder, "logging.json")
        written.write_text(json.dumps(config))
        yield {"logging_config": LoggingConfig(pylogging_config_file=str(written))}


def close_log(file: Path | None) -> None:
    """Close the file in this process."""
    logger = logging.getLogger(_LOGGER)
    for handler in list(logger.handlers):
        if isinstance(handler, logging.FileHandler) and file is not None:
            with suppress(FileNotFoundError):
                if Path(handler.baseFilename).samefile(file):
                    logger.removeHandler(handler)
                    handler.close()


__all__ = ["close_log", "logging_to", "quiet_imports", "set_environment"]
