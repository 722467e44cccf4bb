"""`agentrl tasks`."""

import json
import tempfile
from collections.abc import Sequence, Sized
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from agentrl.cli.arguments import Overrides
from agentrl.cli.console import console
from agentrl.config.from_file import load_config
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.flow import run_steadily
from agentrl.models.source import description_folder
from agentrl.models.tiny import SIZES
from agentrl.protocols import TaskSource, count_tasks
from agentrl.rollout.next_task import next_task
from agentrl.runs.task_sources import fingerprints, task_source
from agentrl.settings.yaml_values import check_encodes, in_yaml, to_yaml
from agentrl.tasks.dataset import DatasetTasks
from agentrl.trajectory import Failed, Score, Scored, Task

if TYPE_CHECKING:
    from agentrl.conversation.renderer import TemplateRenderer
    from agentrl.recipes.preview import Opening

_MAX_MEASURED_PROMPTS = 500
"""Prompts whose tokens are counted."""


def tasks(  # noqa: PLR0917  typer calls it by name
    source: Annotated[
        str,
        typer.Argument(metavar="DATA|CONFIG", help="A file or folder of tasks, or a YAML file."),
    ],
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, help="Tasks to print.")] = 3,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Those that are evaluated on.")
    ] = False,
    answer: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="An answer to score in each task; repeatable."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Show the prompt as this model's chat template writes it."
        ),
    ] = None,
) -> None:
    """Print tasks as the model will see them, and what the reward pays for given answers.

    Without --answer, the right answer of each task is scored as if the model had said it and
    nothing else. Data are read for env=qa; other settings follow: agentrl tasks questions.jsonl
    reward=math.
    """
    from agentrl.recipes.preview import openings

    config = _load(source, [*(overrides or []), *([f"model={in_yaml(model)}"] if model else [])])
    found = task_source(config, "held-out" if held_out else "train")
    problem = ""
    try:
        fingerprints(config)
    except ConfigError as error:  # shown last, as the tasks may tell why
        problem = str(error)
    shown = [next_task(found, index) for index in range(count_tasks(found, show))]
    renderer = _renderer(config)
    if config.env.is_agent:
        raise ConfigError(
            f"{config.env.name} is a program, which makes its prompts itself: agentrl gateway shows"
            " them"
        )
    opened, scored = run_steadily(openings(config, shown)), _score_lines(config, shown, answer)
    for index, (task, opening, lines) in enumerate(zip(shown, opened, scored, strict=True)):
        where = found.where(index) if isinstance(found, DatasetTasks) else f"seed {task.seed}"
        console.rule(escape(task.id))
        console.print(f"[dim]{escape(where)}[/dim]", highlight=False, soft_wrap=True)
        _print_opening(opening, renderer)
        _print_options(task)
        for line in lines:
            _say(line)
    console.rule()
    if renderer is not None:
        _print_lengths(config, found, renderer)
    else:
        _say("no model is named: --model FOLDER shows its chat template and counts tokens")
    count = f"tasks: {len(found):,}" if isinstance(found, Sized) else "tasks without end"
    _say(f"{count}, of {config.env.name or 'several environments'}")
    if problem:
        console.print(
            f"[red]a run would not start:[/red] {escape(problem)}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(1)


def _load(source: str, overrides: Sequence[str]) -> RunConfig:
    """The config in a YAML file, or one for questions in these data."""
    if Path(source).suffix.lower() in (".yaml", ".yml"):
        return load_config(Path(source), overrides).config
    check_encodes(source, repr(source))
    values = {
        "env": "qa",
        "tasks": {"name": "dataset", "data": source, "held_out": 0.0},
        "evaluation": {"tasks": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.yaml"
        path.write_text(to_yaml(values))
        return load_config(path, overrides).config


def _renderer(config: RunConfig) -> "TemplateRenderer | None":
    from agentrl.conversation.renderer import renderer_of

    name = config.model.name
    return (
        None
        if name in SIZES
        else renderer_of(description_folder(name, config.model.revision), config.model)
    )


def _print_opening(opening: "Opening", renderer: "TemplateRenderer | None") -> None:
    if renderer is not None:
        console.print(escape(opening.text(renderer)), highlight=False, soft_wrap=True)
        _say(f"{opening.tokens(renderer):,} tokens")
        return
    for message in opening.messages:
        _print_message(message.role, message.content)
    for tool in opening.tools:
        _print_message("tool", json.dumps(tool, ensure_ascii=False))


def _print_message(role: str, text: str) -> None:
    console.print(f"[bold cyan]{role}[/bold cyan] {escape(text)}", highlight=False, soft_wrap=True)


def _print_options(task: Task) -> None:
    for name, value in task.options.items():
        if name != "prompt":
            written = (
                value
                if isinstance(value, str)
                else json.dumps(value, ensure_ascii=False, default=str)
            )
            short = written if len(written) <= 300 else f"{written[:300]}..."
            console.print(
                f"[dim]{escape(name)}: {escape(short)}[/dim]", highlight=False, soft_wrap=True
            )


def _score_lines(
    config: RunConfig, shown: Sequence[Task], answers: Sequence[str] | None
) -> list[list[str]]:
    """A line for each answer to each task."""
    from agentrl.recipes.preview import paid

    texts = [_gold_answers(task) if answers is None else answers for task in shown]
    asked = [(task, text) for task, of_task in zip(shown, texts, strict=True) for text in of_task]
    if config.reward.only_compares or not asked:
        return [[] for _ in shown]
    scored = iter(run_steadily(paid(config, asked)))
    called = "its right answer" if answers is None else "the answer"
    lines = []
    for of_task in texts:
        quoted = [json.dumps(text, ensure_ascii=False)[:80] for text in of_task]
        lines.append([f"{called} {text}: {_format_score(*next(scored))}" for text in quoted])
    return lines


def _gold_answers(task: Task) -> list[str]:
    gold = task.options.get("answer")
    golds: list[Any] = gold if isinstance(gold, list) else [gold]
    return [str(one) for one in golds[:1] if isinstance(one, str | int | float)]


def _format_score(score: Score, success: bool | None) -> str:
    if not isinstance(score.status, Scored):
        why = score.status.error if isinstance(score.status, Failed) else score.status.name
        return f"no score ({why})"
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    verdict = "unknown" if success is None else "success" if success else "no success"
    return f"{score.value:g} ({parts}), {verdict}" if parts else f"{score.value:g}, {verdict}"


def _print_lengths(config: RunConfig, source: TaskSource, renderer: "TemplateRenderer") -> None:
    """The tokens of the first prompts. Tasks without end are of seeds, and have no longest one."""
    from agentrl.recipes.preview import openings

    found = run_steadily(
        openings(
            config,
            [next_task(source, n) for n in range(count_tasks(source, _MAX_MEASURED_PROMPTS))],
        )
    )
    tokens = [opening.tokens(renderer) for opening in found]
    if tokens:
        _say(
            f"prompts of the first {len(tokens):,} tasks: {median(tokens):,g} tokens (median),"
            f" {max(tokens):,} at most"
        )


def _say(text: str) -> None:
    console.print(f"[green]{escape(text)}[/green]", highlight=False, soft_wrap=True)
