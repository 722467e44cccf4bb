"""Figures of the code's shape, and how they compare with another checkout.

    python benchmarks/house.py [--beside OTHER_CHECKOUT] [--folders]

A *room* is a module or a folder at the top of `agentrl`; an *arrow* leads from a room to one that
it imports. A folder's *doors* are its modules that other rooms import, its *names* those that they
take from them. A *chain* leads from import to import, as the modules run: what only type checkers
read, below `if TYPE_CHECKING:`, is no part of it, and may lead in circles. *Functions* are all of
`def`: methods, those of protocols and overloads, and nested functions too. A *literal probe* is
`getattr` or `hasattr` with a name that stands in the code. All figures are read from the sources;
nothing is imported.
"""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PLUGIN_FOLDERS = ("envs", "rewards", "trainers")
"""Folders at the top of the repository that import as `agentrl.envs` and so on."""
COLUMNS = 100
COMPLEXITY = 12
"""Largest cyclomatic complexity that is not counted."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Module:
    """A module, read from its source."""

    name: str
    """Dotted, such as `agentrl.rollout.group`."""
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """The part of the name after `agentrl`."""
        return self.name.split(".")[1] if "." in self.name else "agentrl"

    def nodes(self, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
        """All nodes of one kind."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kind))

    @cached_property
    def for_types(self) -> set[ast.AST]:
        """All nodes below an `if TYPE_CHECKING:`."""
        blocks = [node for node in self.nodes(ast.If) if is_for_types(node)]
        return {node for block in blocks for node in ast.walk(block)}

    @cached_property
    def comments(self) -> int:
        """Comments that stand on lines of their own."""
        count = 0
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            before = token.line[: token.start[1]].strip()
            count += token.type == tokenize.COMMENT and not before
        return count


@dataclass(frozen=True)
class House:
    """The modules of a checkout."""

    root: Path
    modules: Mapping[str, Module] = field(repr=False)

    @staticmethod
    def read(root: Path) -> "House":
        """Read `agentrl` and the folders of its plug-ins below `root`."""
        modules = {}
        for top in ("agentrl", *PLUGIN_FOLDERS):
            for path in sorted((root / top).rglob("*.py")):
                if path.is_symlink() or any(parent.is_symlink() for parent in path.parents):
                    continue
                parts = path.relative_to(root).with_suffix("").parts
                dotted = ".".join(parts if top == "agentrl" else ("agentrl", *parts))
                name = dotted.removesuffix(".__init__")
                modules[name] = Module(name, path, path.read_text())
        return House(root, modules)

    @cached_property
    def imports(self) -> Mapping[str, Sequence[tuple[str, str]]]:
        """For each module, what it imports: the module, and the name or an empty string."""
        found: dict[str, list[tuple[str, str]]] = {}
        for name, module in self.modules.items():
            taken = self._taken(module, set())
            found[name] = [(home, what) for home, what in taken if home != name]
        return found

    @cached_property
    def loads(self) -> Mapping[str, set[str]]:
        """For each module, those that it imports when it runs, at its top or within a function."""
        found = {}
        for name, module in self.modules.items():
            homes = {home for home, _ in self._taken(module, module.for_types)}
            found[name] = homes - {name, "agentrl"}
        return found

    def _taken(self, module: Module, skipped: set[ast.AST]) -> Iterator[tuple[str, str]]:
        for node in module.nodes(ast.ImportFrom):
            assert isinstance(node, ast.ImportFrom)
            if node in skipped:
                continue
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in self.modules:
                    yield submodule, ""
                elif node.module in self.modules:
                    yield node.module, alias.name
        for node in module.nodes(ast.Import):
            assert isinstance(node, ast.Import)
            for alias in node.names:
                if alias.name in self.modules:
                    yield alias.name, ""

    @cached_property
    def rooms(self) -> set[str]:
        """The modules and folders at the top of `agentrl`, without its two entrances."""
        return {module.room for module in self.modules.values()} - {"agentrl", "__main__"}

    @cached_property
    def arrows(self) -> set[tuple[str, str]]:
        """Pairs of rooms of which the first imports from the second."""
        arrows = set()
        for name, imports in self.imports.items():
            for home, _ in imports:
                start, end = self.modules[name].room, self.modules[home].room
                if start != end and {start, end} <= self.rooms:
                    arrows.add((start, end))
        return arrows

    @cached_property
    def longest_chain(self) -> Sequence[str]:
        """The longest sequence of modules of which each imports the next."""
        longest: dict[str, list[str]] = {}

        def below(name: str) -> list[str]:
            if name not in longest:
                longest[name] = [name]  # a circle would end here
                chains = [below(home) for home in sorted(self.loads[name])]
                longest[name] = [name, *max(chains, key=len, default=[])]
            return longest[name]

        return max((below(name) for name in self.modules if name != "agentrl"), key=len)

    def doors_of(self, room: str) -> tuple[int, int]:
        """How many modules of a room others import, and how many names they take from it."""
        doors, names = set(), set()
        for name, imports in self.imports.items():
            if self.modules[name].room in (room, "agentrl"):
                continue
            for home, taken in imports:
                if self.modules[home].room == room:
                    doors.add(home)
                    names.add((home, taken))
        return len(doors), len(names)

    def count(self, matches: Callable[[ast.AST], bool]) -> int:
        """The nodes of all modules that match."""
        nodes = (node for module in self.modules.values() for node in ast.walk(module.tree))
        return sum(matches(node) for node in nodes)

    @property
    def lines(self) -> list[str]:
        """All lines of code, without empty ones."""
        return [
            line
            for module in self.modules.values()
            for line in module.text.splitlines()
            if line.strip()
        ]

    def complex_functions(self) -> int:
        """Functions whose cyclomatic complexity is larger than `COMPLEXITY`, by ruff."""
        limit = f"lint.mccabe.max-complexity={COMPLEXITY}"
        folders = ["agentrl", *PLUGIN_FOLDERS]
        options = [
            "--isolated",
            "--select",
            "C901",
            "--config",
            limit,
            "--output-format",
            "concise",
        ]
        out = subprocess.run(
            [sys.executable, "-m", "ruff", "check", *options, *folders],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )
        return out.stdout.count("C901")

    def figures(self) -> dict[str, float]:
        """All figures by name."""
        lines = self.lines
        modules = self.modules.values()
        thousands = len(lines) / 1000
        return {
            "modules": len(self.modules),
            "rooms": len(self.rooms),
            "arrows between rooms": len(self.arrows),
            "longest chain of imports": len(self.longest_chain),
            "imports a module": sum(map(len, self._homes())) / len(self.modules),
            "functions": self.count(is_function),
            "functions in 1,000 lines": self.count(is_function) / thousands,
            "protocols": self.count(is_protocol),
            "literal probes": self.count(is_literal_probe),
            "casts": self.count(is_cast),
            f"functions of a complexity over {COMPLEXITY}": self.complex_functions(),
            "lines with code or text": len(lines),
            "characters a line, unindented": sum(len(line.strip()) for line in lines) / len(lines),
            f"lines over {COLUMNS} columns": sum(len(line) > COLUMNS for line in lines),
            "comments on lines of their own": sum(module.comments for module in modules),
            "comprehensions in 1,000 lines": self.count(is_comprehension) / thousands,
        }

    def _homes(self) -> list[set[str]]:
        return [{home for home, _ in imports} for imports in self.imports.values()]


def is_for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_function(node: ast.AST) -> bool:
    """A function or method."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def is_protocol(node: ast.AST) -> bool:
    """A class with the base `Protocol`."""
    if not isinstance(node, ast.ClassDef):
        return False
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in bases)


def is_literal_probe(node: ast.AST) -> bool:
    """`getattr(x, "name")` or `hasattr(x, "name")`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    )


def is_cast(node: ast.AST) -> bool:
    """`cast(...)`."""
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "cast"


def is_comprehension(node: ast.AST) -> bool:
    """A comprehension or a generator expression."""
    return isinstance(node, COMPREHENSIONS)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--beside", type=Path, help="another checkout, in a column before")
    parser.add_argument("--folders", action="store_true", help="the doors and names of each folder")
    arguments = parser.parse_args()
    here = House.read(Path(__file__).parents[1])
    houses = [House.read(arguments.beside.resolve()), here] if arguments.beside else [here]
    columns = [house.figures() for house in houses]
    for name in columns[-1]:
        print(f"{name:<36}" + "".join(f"{written(figures[name]):>12}" for figures in columns))
    print("\nlongest chain:\n  " + "\n  ".join(here.longest_chain))
    if arguments.folders:
        print_folders(houses)


def written(figure: float) -> str:
    """A figure as text; a count in full."""
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:,.4g}"


def print_folders(houses: Sequence[House]) -> None:
    """The doors and names of each room of more than one module."""
    sizes: dict[str, int] = defaultdict(int)
    for module in houses[-1].modules.values():
        sizes[module.room] += 1
    print(f"\n{'folder':<16}{'modules':>8}" + f"{'doors':>8}{'names':>8}" * len(houses))
    for room in sorted(houses[-1].rooms):
        if sizes[room] > 1:
            doors = "".join(f"{d:>8}{n:>8}" for d, n in (h.doors_of(room) for h in houses))
            print(f"{room:<16}{sizes[room]:>8}{doors}")


if __name__ == "__main__":
    main()
