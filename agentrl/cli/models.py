"""`agentrl export`, `push-to-hub` and `check-model`, and `agentrl model` with its subcommands."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from agentrl import plugins
from agentrl.cli.arguments import Step
from agentrl.cli.console import console
from agentrl.cli.run_folders import checkpoint_of, output
from agentrl.errors import ConfigError
from agentrl.models.source import description_folder
from agentrl.models.tiny import SIZES, create_tiny_model


def export_model(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|CHECKPOINT", help="The folder of a run, or a checkpoint's."),
    ],
    into: Annotated[Path, typer.Argument(metavar="INTO", help="A new folder.")],
    step: Step = "latest",
) -> None:
    """Write a trained model as a plain Hugging Face folder: weights, config, tokenizer, and a model
    card, without the optimizer.
    """
    from agentrl.runs.checkpoint import export
    from agentrl.viewer.model_card import write_card

    if not source.is_dir():
        raise ConfigError(
            f"{str(source)!r} is not a folder: name that of a run, or one of its"
            " checkpoints/step_..."
        )
    is_run = (source / "config.yaml").exists()
    if not is_run and step != "latest":
        raise ConfigError(
            f"{source} is not a run (it has no config.yaml), so there is no choice: leave out"
            " --step"
        )
    checkpoint = checkpoint_of(source, step) if is_run else source
    place = output(into)

    def describe(folder: Path) -> None:
        write_card(checkpoint, folder, place.resolve().name, is_best=step == "best")

    export(checkpoint, place, describe)
    console.print(
        f"wrote {escape(str(into))}: the model of {escape(str(checkpoint))}",
        highlight=False,
        soft_wrap=True,
    )


def push_to_hub(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of a model, by `agentrl export`.")
    ],
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="A repository on the hub, new or not.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="A new repository is for everybody to read.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="The branch to commit to; by default main.")
    ] = None,
) -> None:
    """Upload an exported model with its card to the Hugging Face hub, into a private repository
    unless told otherwise.
    """
    from agentrl.models.hub import push

    commit = push(folder.expanduser(), repository, public=public, revision=revision)
    console.print(f"{escape(str(folder))} is on the hub: {commit}", highlight=False, soft_wrap=True)


def check_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on the hub.")
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own code.")
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option(help="A chat template instead of the model's own.")
    ] = None,
) -> None:
    """Check a model: context, family, parsers of calls and reasoning, control tokens, and round
    trips of its template.

    A config and a tokenizer are enough. The exit status is 1 if something would go wrong in a run.
    """
    from agentrl.cli.model_check import findings
    from agentrl.conversation.config import RendererConfig

    config = RendererConfig(trust_remote_code=trust_remote_code, chat_template=chat_template)
    found = list(findings(description_folder(model, revision, setting="model"), config))
    width = max(len(one.subject) for one in found)
    for one in found:
        style = "green" if one.right else "red"
        text = f"[{style}]{one.subject:{width}}[/{style}]  {escape(one.words)}"
        console.print(text, highlight=False, soft_wrap=True)
    if not all(one.right for one in found):
        raise typer.Exit(1)


def model_init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it.")],
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    corpus: Annotated[
        list[Path] | None, typer.Option(help="Text files to learn the tokenizer from.")
    ] = None,
) -> None:
    """Make a tiny, randomly initialised model and its tokenizer."""
    if size not in SIZES:
        raise ConfigError(
            f"no size {size!r}.{plugins.nearest(size, SIZES)} Sizes: {', '.join(SIZES)}"
        )
    folder = output(folder)
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds a model already")
    texts = [path.read_text() for path in corpus] if corpus else None
    create_tiny_model(folder, corpus=texts, size=SIZES[size], seed=seed)
    console.print(f"wrote {escape(str(folder))}", highlight=False)
