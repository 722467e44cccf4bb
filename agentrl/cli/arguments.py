"""Arguments and options that several commands take."""

from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from agentrl.config.from_file import load_config
from agentrl.config.overrides import right_form, setting_of
from agentrl.config.run_config import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.settings.base import check_numbers, check_plain
from agentrl.settings.yaml_values import read_yaml, value_of

Step = Annotated[
    str,
    typer.Option(
        metavar="N|best|latest", help="Which checkpoint of the run; best: on held-out tasks."
    ),
]


def _complete_settings(context: typer.Context, incomplete: str) -> list[str]:
    """The settings of the command's config whose names begin with the typed text, for shell
    completion.
    """
    given = (context.params.get(name) for name in ("config", "run", "source", "resume"))
    path = Path(str(next(filter(None, given), "")))
    try:
        rows = load_config(path / "config.yaml" if path.is_dir() else path).rows()
    except AgentRLError:  # a shell shows no messages while somebody types
        return []
    return [f"{key}=" for key, _, _ in rows if key.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[a.b=c ...]",
        help="Settings that override the file's, such as engine=vllm.",
        autocompletion=_complete_settings,
    ),
]
EnvPython = Annotated[
    str | None,
    typer.Option(
        "--python", metavar="PYTHON", help="The Python that runs the environment, if another one."
    ),
]
EnvRequires = Annotated[
    list[str] | None,
    typer.Option(
        "--requires",
        metavar="PACKAGE",
        help="A package for the environment's own interpreter; repeatable.",
    ),
]
ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)
]


class TakesSettings(TyperCommand):
    """A command with overrides. It answers a setting that is written as an option with the right
    form.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises:
            ConfigError: a setting is written as an option.
        """
        known = {"--", "--help"}.union(*(one.opts + one.secondary_opts for one in self.params))
        for one, after in zip_longest(args, args[1:], fillvalue=""):
            option = one.partition("=")[0]
            key = setting_of(option)
            if (
                one.startswith("-")
                and option not in known
                and ("." in key or key in RunConfig.model_fields)
            ):
                form = right_form(one, after) or f"{key}=VALUE"
                raise ConfigError(
                    f"there is no option {option}: a setting is written without dashes, {form}"
                )
        return super().parse_args(ctx, args)


def env_options(text: str) -> dict[str, Any]:
    """The options of `reset`, from a command line."""
    try:
        root = read_yaml(text, "")
        options = {} if root is None else value_of(root)
        check_plain(options)
        check_numbers(options)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"cannot read --options {text!r}: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--options {text!r} is not a mapping: write --options '{{level: 2}}'")
    return options
