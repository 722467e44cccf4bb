"""Tests that a change can reach: from changed files, along what each file depends on, to the files
of tests.

    python -m tests.reach BASE                      # their names, the nearest first
    python -m tests.reach BASE --run --seconds 300  # their long tests, in time (`make reach`)

BASE is a commit; without one, or with `all`, everything is reached. A file depends on the modules
that it imports, also inside functions; on modules, plug-ins and files that its text names; and on
data beside it. What is too much does no harm, and where nothing is known of a changed file
(pyproject.toml, a deleted module), everything is reached.

Long tests are those marked `long`, and properties, which are tried on more examples than in `make
test`. The end of the time is no failure: what has not run is listed. Of tests that are equally
near, each commit begins with others.
"""

import argparse
import ast
import fnmatch
import os
import random
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
CODE = ("agentrl/", "envs/", "rewards/", "trainers/", "tests/", "benchmarks/", "examples/")
"""Folders of modules, and of the data beside them."""
UNTESTED = (
    ".github/",
    ".gitignore",
    ".git-blame-ignore-revs",
    ".pre-commit-config.yaml",
    "LICENSE",
)
"""What no test can depend on."""
LONG = re.compile(r"mark\.long|^from hypothesis import ", re.MULTILINE)
"""What stands in a file of tests that has long ones."""
LEAST_SECONDS = 60.0
"""Less than that is no time for a long test."""
DOTTED = re.compile(r"\b[a-z_]\w*(?:\.\w+)+")
IMPORTED = re.compile(r"\bfrom +([\w.]+) +import +\(?([\w, ]+)")
FILE = re.compile(r"[\w.-]+\.[a-z]\w+")
PATTERN = re.compile(r"[\w.-]*\*[\w.*-]*\.\w+")
CONFIG = re.compile(r"[=:\[{,(-]\s*[\"']?([a-z_]\w*)\b|^([a-z_]\w*)$", re.MULTILINE)
"""A word where a config can name a plug-in: `engine=vllm`, `env: frozen_lake`, `[environment,
code]`."""


@dataclass(frozen=True)
class Tree:
    """The files of a repository, by name, and where its plug-ins are."""

    texts: Mapping[str, str]
    """The text of each file, by its path from the root; of a binary one, nothing."""
    plugins: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The modules of the plug-ins of each name."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Packages that are elsewhere than their names say: `agentrl/envs` is `envs`."""

    @cached_property
    def data(self) -> Mapping[str, Sequence[str]]:
        """What is no module, by the nearest folder above that has modules."""
        found: dict[str, list[str]] = defaultdict(list)
        modules = {str(PurePosixPath(name).parent) for name in self.texts if name.endswith(".py")}
        for file in self.texts:
            if file.startswith(CODE) and not file.endswith(".py"):
                above = (str(folder) for folder in PurePosixPath(file).parents)
                if home := next((folder for folder in above if folder in modules), None):
                    found[home].append(file)
        return found

    @cached_property
    def called(self) -> Mapping[str, Sequence[str]]:
        """The files of each name without its folder."""
        found: dict[str, list[str]] = defaultdict(list)
        for file in self.texts:
            found[PurePosixPath(file).name].append(file)
        return found

    def module(self, name: str) -> str | None:
        """The file of a module."""
        path = name.replace(".", "/")
        for package, folder in self.folders.items():
            if path == package or path.startswith(f"{package}/"):
                path = folder + path.removeprefix(package)
        return next(
            (file for file in (f"{path}.py", f"{path}/__init__.py") if file in self.texts), None
        )

    def named(self, dotted: str) -> str | None:
        """The file of the module that a dotted name begins with, as in
        `agentrl.flow.channel.Channel.put`.
        """
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            if found := self.module(".".join(parts[:end])):
                return found if end > 1 or len(parts) == 1 else None
        return None


def tree_of(root: Path) -> Tree:
    """The repository at `root`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    files = [name for name in listed if (root / name).is_file() and not (root / name).is_symlink()]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    plugins: dict[str, list[str]] = defaultdict(list)
    for points in project["project"]["entry-points"].values():
        for name, point in points.items():
            plugins[name].append(point.partition(":")[0])
    where = project["tool"]["setuptools"]["package-dir"]
    folders = {
        package.replace(".", "/"): folder for package, folder in where.items() if "." in package
    }
    return Tree({name: text_of(root / name) for name in files}, plugins, folders)


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


# What a file depends on


def dependencies(tree: Tree, file: str) -> set[str]:
    """The files that a file depends on."""
    text = tree.texts[file]
    if not file.endswith(".py"):
        if not file.startswith("examples/"):
            return set()
        return (modules_in(tree, text) | files_in(tree, text) | plugins_in(tree, text)) - {file}
    module = ast.parse(text)
    # What its fixtures import is imported for the tests that use them.
    if file.endswith("conftest.py"):
        module.body = [node for node in module.body if not is_fixture(node)]
    found = needed(tree, file, module) | beside(tree, file)
    if is_test(file):
        found |= fixtures(tree, file)
    return found - {file}


def needed(tree: Tree, file: str, code: ast.Module | ast.FunctionDef) -> set[str]:
    """What a piece of code imports, and what its texts name."""
    found = {one for node in ast.walk(code) for one in imported(tree, node)}
    if isinstance(code, ast.Module) and is_lazy(code):
        return found
    product = not file.startswith(("tests/", "benchmarks/", "examples/", "docs/"))
    for said in strings(code):
        found |= modules_in(tree, said)
        if not product:  # there, a file's name is one of a user's
            found |= files_in(tree, said)
        # There, other texts are sentences; and in conftest.py, marks.
        if (not product or re.fullmatch(r"\w+", said)) and not file.endswith("conftest.py"):
            found |= plugins_in(tree, said)
    return found


def fixtures(tree: Tree, file: str) -> set[str]:
    """The files with the fixtures of a test, and what those that it names need."""
    found: set[str] = set()
    module = ast.parse(tree.texts[file])
    words = {node.arg for node in ast.walk(module) if isinstance(node, ast.arg)} | set(
        strings(module)
    )
    for folder in PurePosixPath(file).parents:
        if (conftest := f"{folder}/conftest.py") in tree.texts:
            found.add(conftest)
            ours = {
                node.name: node for node in ast.parse(tree.texts[conftest]).body if is_fixture(node)
            }
            used = [name for name in ours if name in words]
            for name in used:  # grows
                used += [
                    one.arg
                    for one in ours[name].args.args
                    if one.arg in ours and one.arg not in used
                ]
                found |= needed(tree, conftest, ours[name])
    return found


def is_fixture(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """Whether it is a fixture. One of all tests (`autouse`) acts on what a test has imported by
    itself.
    """
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(one).startswith("pytest.fixture") for one in decorators)


def is_lazy(module: ast.Module) -> bool:
    """Whether it imports the names that it has when they are asked for (PEP 562): who imports one
    depends on it.
    """
    return any(
        isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in module.body
    )


def imported(tree: Tree, node: ast.AST) -> Iterator[str]:
    """The files that an import statement imports, with the packages around them."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from with_packages(tree, alias.name)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield from imported_from(tree, node.module, [alias.name for alias in node.names])
    elif (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "agentrl"
    ):
        yield from imported_from(tree, "agentrl", [node.attr])


def imported_from(tree: Tree, module: str, names: Iterable[str]) -> Iterator[str]:
    yield from with_packages(tree, module)
    package = tree.module(module)
    for name in names:
        if one := tree.module(f"{module}.{name}"):
            yield one
        elif package is not None and package.endswith("__init__.py"):
            yield from defined_for(tree, package, name)


def defined_for(tree: Tree, package: str, name: str) -> Iterator[str]:
    """The module from which a package that imports lazily has a name."""
    parsed = ast.parse(tree.texts[package])
    if is_lazy(parsed):
        for said in strings(parsed):
            defines = rf"^(?:class|def|async def) {name}\b|^{name}\b.*="
            for dotted in DOTTED.findall(said):
                if (module := tree.named(dotted)) and re.search(
                    defines, tree.texts[module], re.MULTILINE
                ):
                    yield module


def with_packages(tree: Tree, module: str) -> Iterator[str]:
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        if found := tree.module(".".join(parts[:end])):
            yield found


def strings(module: ast.AST) -> Iterator[str]:
    """The texts of a module that are no docstrings."""
    docs = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def modules_in(tree: Tree, text: str) -> set[str]:
    """The modules that a text names."""
    found = {one for dotted in DOTTED.findall(text) if (one := tree.named(dotted))}
    for module, names in IMPORTED.findall(text):
        found.update(imported_from(tree, module, [name.strip() for name in names.split(",")]))
    return found


def files_in(tree: Tree, text: str) -> set[str]:
    """The files that a text names, alone or by a pattern. No file depends on one of tests by its
    name.
    """
    found = {name for called in FILE.findall(text) for name in tree.called.get(called, ())}
    for pattern in PATTERN.findall(text):
        found.update(
            one
            for name, ones in tree.called.items()
            if fnmatch.fnmatchcase(name, pattern)
            for one in ones
        )
    return {name for name in found if not is_test(name)}


def plugins_in(tree: Tree, text: str) -> set[str]:
    """The modules of the plug-ins that a text names, as configs and overrides do."""
    names = {name for pair in CONFIG.findall(text) for name in pair if name}
    return {
        one
        for name in names
        for module in tree.plugins.get(name, ())
        if (one := tree.module(module))
    }


def beside(tree: Tree, file: str) -> set[str]:
    """The data in a module's folder and below."""
    return {name for name in tree.data.get(str(PurePosixPath(file).parent), ()) if name != file}


def is_test(file: str) -> bool:
    return file.startswith("tests/") and PurePosixPath(file).name.startswith("test_")


# What a change reaches


def reached(tree: Tree, changed: Iterable[str]) -> dict[str, int]:
    """The files of tests that a change of these files can reach, with how many imports away, the
    nearest first.
    """
    tests = sorted(filter(is_test, tree.texts))
    changed = [name for name in changed if not name.startswith(UNTESTED)]
    dependents: dict[str, set[str]] = defaultdict(set)
    for file in tree.texts:
        for one in dependencies(tree, file):
            dependents[one].add(file)
    known = [name for name in changed if name in tree.texts and is_understood(name)]
    if len(known) < len(changed) or any(name.endswith("conftest.py") for name in known):
        return dict.fromkeys(tests, 0)
    distances, edge = dict.fromkeys(known, 0), known
    while edge:
        nearer, edge = edge, []
        for name in nearer:
            for other in dependents[name] - distances.keys():
                distances[other] = distances[name] + 1
                edge.append(other)
    return {
        name: distances[name]
        for name in sorted(tests, key=lambda name: distances.get(name, 0))
        if name in distances
    }


def is_understood(name: str) -> bool:
    """Whether what depends on a file says so by its text: not of what builds, installs and
    configures.
    """
    return name.startswith((*CODE, "docs/")) or (name.endswith(".md") and "/" not in name)


def changed_since(base: str) -> list[str] | None:
    """The files that differ from a commit, also those that are not committed; None if that cannot
    be told.
    """
    diff = ["git", "diff", "--name-only", "--no-renames", base]
    new = ["git", "ls-files", "--others", "--exclude-standard"]
    names: list[str] = []
    for command in (diff, new):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return None
        names += done.stdout.splitlines()
    return names


# Running them


def run(files: Sequence[str], seconds: float) -> int:
    """Run the long tests in these files, in two processes, until one fails or the time is up. 1 if
    one failed.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "--maxfail=1",
        "--hypothesis-profile=full",
        "-m",
        "long or hypothesis",
    ]
    options = (
        "-v -rs --import-mode=importlib -p no:schemathesis --strict-markers --strict-config "
        "--durations=10"
    )
    command += ["-o", f"addopts={options}", *files]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    is_over = threading.Event()

    def end() -> None:
        # What fails from here on has lost its processes to this signal.
        is_over.set()
        os.killpg(process.pid, signal.SIGINT)

    ended = threading.Timer(seconds, end)
    killed = threading.Timer(seconds + 30, os.killpg, (process.pid, signal.SIGKILL))
    for timer in (ended, killed):
        timer.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        if not is_over.is_set():
            lines.append(line)
    code = process.wait()
    for timer in (ended, killed):
        timer.cancel()
    return verdict(lines, -signal.SIGINT if is_over.is_set() else code)


def verdict(lines: Sequence[str], code: int) -> int:
    """1 if a test failed, or pytest did; 0 if all passed, or those that there was time for. `lines`
    are what was printed in time.
    """
    if any(re.search(r"^(FAILED|ERROR) |\] (FAILED|ERROR) ", line) for line in lines):
        return 1
    if code in (2, -signal.SIGINT, -signal.SIGKILL):
        passed = sum(" PASSED " in line for line in lines)
        print(f"The time was up: {passed} long tests have passed; the others: make long")
        return 0
    return 0 if code in (0, 5) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", nargs="?", default="all")
    parser.add_argument("--run", action="store_true", help="run their long tests")
    parser.add_argument("--seconds", type=float, default=600, help="when to end")
    asked = parser.parse_args(arguments)
    changed = None if asked.base == "all" else changed_since(asked.base)
    near = everything() if changed is None else reached(tree_of(ROOT), changed)
    if not asked.run:
        print("\n".join(near))
        return 0
    files = [name for name in near if LONG.search((ROOT / name).read_text())]
    print(
        f"{len(near)} files of tests are reached, {len(files)} of them have long tests", flush=True
    )
    if asked.seconds < LEAST_SECONDS:
        print("No time is left for these: make long runs them")
        return 0
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    files = in_order(files, near, commit.stdout)
    return run(files, asked.seconds) if files else 0


def in_order(files: Sequence[str], near: Mapping[str, int], commit: str) -> list[str]:
    """The files in the order in which they run: the nearest first, and of those that are equally
    near, each commit begins with others.

    Those directly in tests/ come last: pytest 9.1 collects all folders beside such a file again,
    and the fixtures of a conftest.py there are not found in files after it.
    """
    shuffled = random.Random(commit).sample(files, len(files))
    return sorted(shuffled, key=lambda name: (name.count("/") == 1, near[name]))


def everything() -> dict[str, int]:
    """All files of tests, also where there is no git."""
    return dict.fromkeys(
        sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")), 0
    )


if __name__ == "__main__":
    sys.exit(main())
