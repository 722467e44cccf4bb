"""The page `api.md` of the site: the public names of agentrl, from their own sources.

Signatures and docstrings are read from the syntax tree, so that the page is the same under every
version of Python, and nothing has to be evaluated.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import agentrl
import agentrl.protocols
import agentrl.testing

_SECTION = re.compile(r"(Args|Raises|Returns|Yields):")
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def api_page() -> str:
    """The page, as Markdown."""
    public = [name for name in agentrl.__all__ if name != "__version__"]
    seams = [name for name in agentrl.protocols.__all__ if name not in public]
    lines = [
        "# API reference",
        "",
        (
            "This page lists the names that plug-ins, notebooks and tests import, with what each"
            " takes and does. All other"
        ),
        "modules are inner ones, and may move. `make docs` writes the page from the code.",
        "",
    ]
    for module, names, about in (
        (agentrl, public, "What environments, rewards, algorithms and notebooks import."),
        (agentrl.testing, agentrl.testing.__all__, _first(agentrl.testing.__doc__ or "")),
        (
            agentrl.protocols,
            seams,
            "What the protocols above are made of, for authors of engines, trainers and sandboxes.",
        ),
    ):
        lines += [f"## {module.__name__}", "", about, ""]
        for name in names:
            lines += _entry(module, name)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _entry(module: ModuleType, name: str) -> Iterator[str]:
    """The heading, the signature, the meaning and the members of a public name."""
    home = _home(module, name)
    node, meaning = _definition(home, name)
    yield from (f"### {module.__name__}.{name}", "")
    yield from ("```python", _signature(node), "```", "")
    yield from _text(meaning)
    if isinstance(node, ast.ClassDef) and (members := list(_members(node))):
        yield from ("Members:", "", *members, "")


def _home(module: ModuleType, name: str) -> ModuleType:
    """The module in which a name is defined."""
    value = getattr(module, name)
    where = getattr(value, "__module__", None)
    if (inspect.isclass(value) or inspect.isfunction(value)) and where:
        return importlib.import_module(where)
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return _home(importlib.import_module(str(node.module)), name)
    return module


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))


def _definition(module: ModuleType, name: str) -> tuple[ast.stmt, str]:
    """The statement that defines a name in a module, and its docstring."""
    body = _tree(module).body
    for number, node in enumerate(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                return node, ast.get_docstring(node) or ""
        elif name in _assigned(node):
            return node, _below(body, number)
    raise LookupError(f"{module.__name__} does not define {name}")


def _assigned(node: ast.stmt) -> list[str]:
    """The names that an assignment gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _below(body: Sequence[ast.stmt], number: int) -> str:
    """The docstring under an assignment."""
    below = body[number + 1] if number + 1 < len(body) else None
    value = below.value if isinstance(below, ast.Expr) else None
    said = value.value if isinstance(value, ast.Constant) else None
    return inspect.cleandoc(said) if isinstance(said, str) else ""


def _signature(node: ast.stmt) -> str:
    """The first line of a definition: without decorators, body and docstring."""
    if isinstance(node, ast.ClassDef):
        bases = [base for base in map(ast.unparse, node.bases) if base != "Protocol"]
        start = next((one for one in node.body if _is_function(one, "__init__")), None)
        after = f"({', '.join(bases)})" if bases else ""
        made = f"\n{_of_function(start)}" if isinstance(start, ast.FunctionDef) else ""
        return f"class {node.name}{after}{made}"
    if isinstance(node, _FUNCTIONS):
        return _of_function(node)
    return ast.unparse(node)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    start = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    whole = f"{start} {node.name}({ast.unparse(node.args)}){returns}"
    if len(whole) <= 96:
        return whole
    return f"{start} {node.name}(\n    {_broken(node.args)},\n){returns}"


def _broken(arguments: ast.arguments) -> str:
    """The arguments of a function, one a line."""
    text, depth, parts, part = ast.unparse(arguments), 0, [], ""
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return ",\n    ".join([*parts, part.strip()])


def _is_function(node: ast.stmt, name: str) -> bool:
    return isinstance(node, _FUNCTIONS) and node.name == name


def _members(node: ast.ClassDef) -> Iterator[str]:
    """The public fields, properties and methods of a class, as items of a list."""
    for number, one in enumerate(node.body):
        if isinstance(one, _FUNCTIONS):
            if one.name.startswith("_") or _decorated(one, "overload", "setter"):
                continue
            said = _first(ast.get_docstring(one) or "")
            of_property = _decorated(one, "property", "cached_property")
            returns = f": {ast.unparse(one.returns)}" if one.returns else ""
            shown = f"{one.name}{returns}" if of_property else _one_line(one)
            yield f"- `{shown}`{f': {said}' if said else ''}"
        elif isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_"):
            said = " ".join(_below(node.body, number).split())
            yield f"- `{_field(one)}`{f': {said}' if said else ''}"


def _one_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    taken = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    return f"{start}{node.name}({taken}){returns}"


def _field(node: ast.AnnAssign) -> str:
    value = f" = {ast.unparse(node.value)}" if node.value is not None else ""
    return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{value}"


def _decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, *names: str) -> bool:
    return any(ast.unparse(one).rpartition(".")[2] in names for one in node.decorator_list)


def _first(text: str) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join(text.partition("\n\n")[0].split())


def _text(docstring: str) -> Iterator[str]:
    """A docstring as Markdown: its sections (`Raises:`) become lists."""
    in_section = False
    for line in docstring.splitlines():
        if found := _SECTION.fullmatch(line.strip()):
            in_section = True
            yield from ("", f"{found[0]}", "")
        elif in_section and line.startswith(" "):
            begins = len(line) - len(line.lstrip()) == 4 and ":" in line
            yield f"- {line.strip()}" if begins else f"  {line.strip()}"
        else:
            in_section = in_section and not line
            yield line
    yield ""
