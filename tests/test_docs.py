"""The documents are true: their commands parse, their code runs, their names exist."""

import datetime
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from agentrl import plugins
from agentrl.cli import app
from agentrl.config import load_config
from agentrl.flow import Retries
from agentrl.scoring.build import build_pipeline
from agentrl.scoring.rule_pool import RulePool
from agentrl.testing import check_env

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "higher_lower"
DOCS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
STAND_IN = ROOT / "examples" / "frozen_lake.yaml"
"""The config of commands that name a run which does not exist here, or a placeholder in capitals.
"""

each_doc = pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))


def blocks(doc: Path, *languages: str) -> list[str]:
    """The fenced blocks in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", doc.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def inline_code(doc: Path) -> list[str]:
    """What stands between single backticks, outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", doc.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def commands(doc: Path, program: str) -> list[list[str]]:
    """The arguments of each call of `program` that the document shows, in blocks and in prose."""
    lines = [line for block in blocks(doc, "sh", "") for line in block.splitlines()] + inline_code(
        doc
    )
    calls = []
    for line in lines:
        words = shlex.split(line, comments=True) if line.count("'") % 2 == 0 else line.split()
        while words and re.fullmatch(r"[A-Z]+=.*", words[0]):
            words.pop(0)
        if words[:1] == [program]:
            calls.append(words[1:])
    return calls


def subcommand_calls(doc: Path) -> list[list[str]]:
    """The calls of `agentrl`, without its name alone and its own options, which act when they are
    parsed.
    """
    return [
        arguments
        for arguments in commands(doc, "agentrl")
        if arguments and not arguments[0].startswith("-")
    ]


def parse(arguments: list[str]) -> tuple[str, dict[str, object]]:
    """(subcommand, its parameters), by the command line's own parser; raises what a user would be
    told.
    """
    command = get_command(app)
    context = command.context_class(command, info_name="agentrl")
    path = []
    while isinstance(command, TyperGroup):
        name, found, arguments = command.resolve_command(context, list(arguments))
        assert found is not None, f"no subcommand {name!r}"
        command, path = found, [*path, str(name)]
    context = command.make_context(path[-1], list(arguments), parent=context)
    return " ".join(path), context.params


def subcommands(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The full names of all commands below."""
    if not isinstance(command, TyperGroup):
        yield " ".join(path)
        return
    for name, below in command.commands.items():
        yield from subcommands(below, (*path, name))


def validate_settings(arguments: list[str], parameters: dict[str, object]) -> None:
    """Load the config that a command names, with its overrides."""
    config = parameters.get("config") or parameters.get("run")
    overrides = (
        list(parameters["overrides"] or [])
        if isinstance(parameters["overrides"], list | tuple)
        else []
    )
    if config is not None and "=" in str(config):  # `train --resume RUN a=b`
        config, overrides = None, [str(config), *overrides]
    path = ROOT / str(config) if config is not None and str(config).endswith(".yaml") else STAND_IN
    load_config(path, [override for override in overrides if override != "a.b=c"])


@pytest.fixture
def example_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example package as if installed: its folder and its entry points on the path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "example.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1\n"
    )
    lines = [
        f"[{group}]\n{name} = {point}\n"
        for group, points in project["entry-points"].items()
        for name, point in points.items()
    ]
    (metadata / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)


@each_doc
@pytest.mark.usefixtures("example_installed")
def test_every_command_line_shown_is_one_that_the_program_takes(doc: Path) -> None:
    for arguments in subcommand_calls(doc):
        try:
            _, parameters = parse(arguments)
            if "overrides" in parameters:
                validate_settings(arguments, parameters)
        except Exception as error:
            pytest.fail(f"agentrl {shlex.join(arguments)}: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "wrong",
    [
        "trian x.yaml",
        "train --resme runs/x",
        "train examples/frozen_lake.yaml trainer.lrr=1",
        "eval",
        "model make x",
    ],
)
def test_a_wrong_command_line_would_be_found(wrong: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|lrr"):
        validate_settings(wrong.split(), parse(wrong.split())[1])


def test_the_page_of_commands_shows_every_subcommand() -> None:
    shown = {parse(arguments)[0] for arguments in subcommand_calls(ROOT / "docs" / "commands.md")}
    assert shown == set(subcommands(get_command(app)))


def test_the_changelog_has_a_version_s_changes_by_category() -> None:
    categories = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    versions = re.split(
        r"^## \d+\.\d+\.\d+.*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    for version in versions[1:]:
        found = re.findall(r"^### (\w+)$", version, re.MULTILINE)
        assert found == [one for one in categories if one in found]


RECORDS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_decision_has_a_number_a_date_and_a_status_and_stands_in_the_index(record: Path) -> None:
    text, index = record.read_text(), record.with_name("index.md").read_text()
    number, status = (
        int(record.name[:4]),
        r"proposed|accepted|replaced by \[\d+\]\((\d{4}-[a-z-]+\.md)\)",
    )
    found = re.match(
        rf"# {number}\. .+\n\nDate: (\d{{4}}-\d\d-\d\d)\. Status: (?:{status})\.\n\n## Context\n",
        text,
    )
    assert found, text[:200]
    datetime.date.fromisoformat(found[1])
    assert found[2] is None or record.with_name(found[2]).exists()
    assert f"({record.name})" in index
    assert RECORDS.index(record) == number - 1


@pytest.mark.parametrize("doc", sorted((ROOT / "docs").glob("*.md")), ids=lambda doc: doc.name)
def test_every_page_begins_with_what_it_is_for(doc: Path) -> None:
    title, first = [part for part in doc.read_text().split("\n\n") if part.strip()][:2]
    assert title.startswith("# ")
    assert re.match(r"This (page|tutorial) ", first), first


@each_doc
def test_every_make_target_named_exists(doc: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {target for call in commands(doc, "make") for target in call} <= targets


@each_doc
def test_every_relative_link_leads_somewhere(doc: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", doc.read_text())
    assert [t for t in targets if "://" not in t and not (doc.parent / t).exists()] == []


@each_doc
def test_every_file_and_test_named_exists(doc: Path) -> None:
    missing = []
    for code in inline_code(doc):
        path, _, test = code.partition("::")
        if "/" not in path or not re.fullmatch(r"[\w./-]+\.(py|md|yaml|toml)", path):
            continue
        file = next((base / path for base in (ROOT, doc.parent) if (base / path).exists()), None)
        if file is None or (test and f"def {test}(" not in file.read_text()):
            missing.append(code)
    assert missing == []


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are resolved by the module's name
    spec.loader.exec_module(module)
    return module


FILE_OF_BLOCK = re.compile(r"# (algorithm|test): (\S+\.py)\n")
RUNNABLE = [
    (match[1], block)
    for doc in DOCS
    for block in blocks(doc, "python")
    if (match := re.match(r"# file: (\S+\.py)\n", block))
]


@pytest.mark.parametrize(("name", "block"), RUNNABLE, ids=[name for name, _ in RUNNABLE])
def test_every_environment_shown_runs_and_keeps_the_contract(
    name: str, block: str, tmp_path: Path
) -> None:
    path = tmp_path / Path(name).name
    path.write_text(block)
    module = load(f"shown_{path.stem}", path)
    try:
        envs = [
            v
            for v in vars(module).values()
            if inspect.isclass(v) and v.__module__ == module.__name__
        ]
        assert envs
        for env in envs:
            check_env(env)
    finally:
        del sys.modules[module.__name__]


@pytest.mark.slow
def test_the_algorithm_shown_is_configurable_and_passes_the_test_that_is_shown_with_it(
    tmp_path: Path,
) -> None:
    shown = [
        match
        for block in blocks(ROOT / "docs" / "your-algorithm.md", "python")
        if (match := FILE_OF_BLOCK.match(block))
    ]
    assert [match[1] for match in shown] == ["algorithm", "test"]
    for match in shown:
        (tmp_path / match[2]).write_text(match.string)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    named = [
        Path(sys.executable).with_name("agentrl"),
        "config",
        STAND_IN,
        "algorithm={}",
        "algorithm=spo:Spo",
    ]
    configured = subprocess.run(
        named, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "epsilon" in configured.stdout, configured.stderr


@pytest.mark.long
def test_the_package_shown_for_credit_by_turn_is_short_proved_and_found_by_its_name(
    tmp_path: Path,
) -> None:
    page = ROOT / "docs" / "credit-by-turn.md"
    shown = [match for block in blocks(page, "python") if (match := FILE_OF_BLOCK.match(block))]
    assert [match[1] for match in shown] == ["algorithm", "test"]
    for match in shown:
        (tmp_path / match[2]).write_text(match.string)
    (package,) = blocks(page, "toml")
    (group, points) = re.findall(r'entry-points\."(.*)"\]\n(.*)', package)[0]
    metadata = tmp_path / "by_state-0.1.dist-info"  # as pip would install it
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: by-state\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{points.replace(chr(34), '')}\n")
    assert len([line for line in shown[0].string.splitlines() if line.strip()]) <= 30
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    named = [
        Path(sys.executable).with_name("agentrl"),
        "config",
        STAND_IN,
        "algorithm={name: by_state, gamma: 0.95}",
    ]
    configured = subprocess.run(
        named, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert re.search(r"algorithm.gamma +0.95", configured.stdout), configured.stderr


def test_the_rewards_shown_are_valid_and_keep_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc = ROOT / "docs" / "rewards.md"
    shown, contract = blocks(doc, "python")
    (tmp_path / "mine.py").write_text(shown)
    monkeypatch.syspath_prepend(tmp_path)
    exec(contract, {})
    del sys.modules["mine"]
    for number, settings in enumerate(blocks(doc, "yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(
            settings if settings.startswith("env:") else f"env: frozen_lake\n{settings}"
        )
        reward = build_pipeline(
            load_config(path).config.reward, RulePool(), deadline=60.0, retries=Retries()
        )
        assert len(reward.parts) == 3
    listed = re.findall(
        r"`(\w+)`",
        "".join(line.split("|")[1] for line in doc.read_text().splitlines() if ".py` |" in line),
    )
    assert set(listed) == {plugin.name for plugin in plugins.installed("rewards")}


def test_the_environment_shown_is_the_example_file_and_both_are_short() -> None:
    shown = dict(RUNNABLE)
    path = "examples/higher_lower/higher_lower.py"
    assert shown[path].removeprefix(f"# file: {path}\n") == (ROOT / path).read_text()
    for text in shown.values():
        assert len([line for line in text.splitlines() if line.strip()]) <= 20 + len(
            ["# file: ..."]
        )
