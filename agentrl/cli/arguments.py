"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.errors import ConfigError
from agentrl.protocols import check_plain
from agentrl.yaml_values import read_yaml, value_of

Step = Annotated[
    str, typer.Option(metavar="N|best|latest", help="Which checkpoint of the run; best: on held-out tasks.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[a.b=c ...]", help="Settings that override the file's, such as engine=vllm."),
]
EnvPython = Annotated[
    str | None, typer.Option("--python", metavar="PYTHON", help="The Python that runs the environment, if another one.")
]
EnvRequires = Annotated[
    list[str] | None,
    typer.Option("--requires", metavar="PACKAGE", help="A package for the environment's own interpreter; repeatable."),
]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]


def env_options(text: str) -> dict[str, Any]:
    """The options of `reset`, from a command line."""
    try:
        root = read_yaml(text, "")
        options = {} if root is None else value_of(root)
        check_plain(options)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"cannot read --options {text!r}: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--options {text!r} is not a mapping: write --options '{{level: 2}}'")
    return options
