"""The public face: the names of `agentrl` and `agentrl.testing`, and nothing else in the docs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl
import agentrl.testing
from agentrl.cli.new_env import write_env_package
from tests.processes import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
NAMES = [
    "AgentRLError",
    "Algorithm",
    "AlgorithmOffers",
    "CodingAgent",
    "Command",
    "Completion",
    "ConfigError",
    "Curriculum",
    "EncodedImage",
    "Engine",
    "EngineOffers",
    "EngineStats",
    "Enumerable",
    "Env",
    "EnvError",
    "Failed",
    "Group",
    "GenerateRequest",
    "GroupReward",
    "Grpo",
    "LossOutput",
    "LossTokens",
    "Message",
    "Observation",
    "PolicyAlgorithm",
    "ProgramSandbox",
    "Reading",
    "RendererConfig",
    "Reward",
    "RewardOffers",
    "Rloo",
    "Rule",
    "Sandbox",
    "SandboxConfig",
    "SandboxProvider",
    "SandboxSpec",
    "Score",
    "Settings",
    "StalenessRule",
    "Stateful",
    "StepReply",
    "StepResult",
    "Task",
    "TaskSource",
    "TemplateRenderer",
    "Terminated",
    "TextEnv",
    "ToolCall",
    "ToolEnv",
    "ToolFormat",
    "ToolResult",
    "Tracker",
    "TrainBatch",
    "Trainer",
    "Trajectory",
    "Truncated",
    "Turn",
    "Wrapper",
    "__version__",
    "group_mean",
    "group_std",
    "leave_one_out",
    "load_config",
    "metrics_of",
    "open_provider",
    "plays",
    "plot",
    "read_options",
    "returns_to_go",
    "train",
    "verified_lineage",
]
TESTING = [
    "ByteTokenizer",
    "FakeSandboxes",
    "JudgeReply",
    "JudgeServer",
    "Oracle",
    "ScriptedEngine",
    "chain",
    "check_env",
    "check_reward",
    "check_staleness_rule",
    "check_trainer",
    "corridor",
    "residual",
    "stopping",
    "trajectory",
]
PUBLIC = {"agentrl", "agentrl.testing", "agentrl.testing.fixtures"}
"""Modules that docs, examples and messages may import from, besides the built-in environments."""
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.py")])


def test_the_public_names_are_these() -> None:
    assert sorted(agentrl.__all__) == sorted(NAMES)
    assert sorted(agentrl.testing.__all__) == sorted(TESTING)


@pytest.mark.parametrize("module", [agentrl, agentrl.testing], ids=lambda module: module.__name__)
def test_every_public_name_is_there_listed_and_explained(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        value = getattr(module, name)
        assert name in dir(module)
        assert value.__doc__, name


@pytest.mark.parametrize("face", ["agentrl/__init__.py", "agentrl/testing/__init__.py"])
def test_type_checkers_see_the_names_where_they_are_loaded_from(face: str) -> None:
    tree = ast.parse((ROOT / face).read_text())
    seen = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    module = sys.modules[face.removesuffix("/__init__.py").replace("/", ".")]
    assert seen == {(home, name) for name, home in module._HOME_OF.items()}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trajectry'\. Did you mean 'Traj"):
        _ = agentrl.Trajectry  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        from agentrl import nothing_of_this_name  # noqa: F401


def test_importing_agentrl_loads_none_of_its_modules() -> None:
    code = "import sys, agentrl; print(*[n for n in sys.modules if n.startswith('agentrl.')])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
        cwd=ROOT,
    )
    assert out.stdout.split() == ["agentrl.package", "agentrl.package.lazy_names"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_and_examples_import_public_names_only(page: Path) -> None:
    assert inner_imports(page.read_text()) == []


@pytest.mark.parametrize("tools", [False, True])
def test_scaffolds_import_public_names_only(tools: bool, tmp_path: Path) -> None:
    folder = write_env_package("scaffolded", tmp_path, tools=tools)
    for path in folder.rglob("*.py"):
        assert inner_imports(path.read_text()) == []


def test_messages_name_public_modules_only() -> None:
    """No message of the code tells a user to import from an inner module."""
    wrong = []
    for path in (ROOT / "agentrl").rglob("*.py"):
        for text in texts_of(path):
            wrong += [f"{path.name}: {name}" for name in inner_imports(text)]
    assert wrong == []


def texts_of(path: Path) -> list[str]:
    """The texts of a module that are not docstrings and hold more than one word."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    found = [n.value for n in constants if isinstance(n.value, str) and id(n) not in docstrings]
    return [text for text in found if " " in text and "sys.path" not in text]


def inner_imports(text: str) -> list[str]:
    """The modules that a text says to import from and that are not public."""
    modules = re.findall(r"from (agentrl[\w.]*) import", text)
    modules += re.findall(r"^\s*import (agentrl\.[\w.]+)", text, flags=re.MULTILINE)
    return [name for name in modules if name not in PUBLIC and not is_environment(name)]


def is_environment(module: str) -> bool:
    """Whether a module is that of a built-in environment, which has its players beside it."""
    return module.startswith("agentrl.envs.") and module != "agentrl.envs.base"
