"""The project's shape: packages, links, import directions, and an import without side effects."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.processes import PATIENCE_SECONDS

# All look at the same sources, which are read once a process.
pytestmark = pytest.mark.xdist_group("layout")

ROOT = Path(__file__).parent.parent
TOP_LEVEL = ("envs", "rewards", "trainers")
SHARED_NAMES = {"Config", "Options"}
"""What many components nest."""

# Who may import whom inside agentrl: a package imports those of the layers before its own, so there
# are no circles.
LAYERS = [
    {"errors", "files", "package"},
    {"tokens"},
    {"models", "settings", "trajectory"},
    {"batch", "flow", "net"},
    {"protocols"},
    {"algorithms", "plugins"},
    {"conversation", "hosting", "ledger", "placement", "sandbox", "weights"},
    {"cluster"},
    {"estimation", "remote", "scoring"},
    {"rollout"},
    {"engines", "gateway", "observe", "tasks"},
    {"oracles"},
    {"simulate", "testing"},
    {"envs", "rewards", "trainers"},
    {"config"},
    {"planner"},
    {"runs"},
    {"assembly"},
    {"recipes", "viewer"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]
PLUGINS_MAY_IMPORT = {
    "batch",
    "branches",
    "cluster",
    "conversation",
    "errors",
    "files",
    "models",
    "net",
    "oracles",
    "package",
    "placement",
    "protocols",
    "rollout",
    "sandbox",
    "settings",
    "testing",
    "tokens",
    "trajectory",
    "weights",
}


def sources() -> list[Path]:
    folders = [ROOT / "agentrl", *(ROOT / name for name in TOP_LEVEL)]
    return [
        p
        for folder in folders
        for p in folder.rglob("*.py")
        if not (ROOT / "agentrl" in p.parents and p.is_symlink())
    ]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "agentrl" else ("agentrl", *parts)
    return ".".join(parts)


@cache
def read(path: Path) -> tuple[set[str], list[str]]:
    """What a module imports, and its classes."""
    imports: set[str] = set()
    classes: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    return imports, classes


def imports_of(path: Path) -> set[str]:
    return read(path)[0]


def packages() -> set[str]:
    found = {"agentrl"}
    for path in sources():
        if path.name == "__init__.py":
            found.add(module_of(path).removesuffix(".__init__"))
    return found


def test_every_package_is_listed_and_mapped():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["packages"]) == packages()
    for name in TOP_LEVEL:
        assert setuptools["package-dir"][f"agentrl.{name}"] == name
        link = ROOT / "agentrl" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_imports_go_one_way():
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for path in sources():
        me = module_of(path).split(".")
        if len(me) < 2 or me[1] == "__init__":
            continue
        assert me[1] in rank, f"agentrl.{me[1]} has no layer yet: give it one in LAYERS"
        for name in imports_of(path):
            parts = name.split(".")
            mine = len(parts) < 2 or parts[1] == me[1]
            if (
                parts[0] == "agentrl"
                and not mine
                and parts[1] in rank
                and rank[parts[1]] >= rank[me[1]]
            ):
                wrong.append(f"{'.'.join(me)} imports {name}")
            if parts[0] in TOP_LEVEL:
                wrong.append(f"{'.'.join(me)} imports {name}: write agentrl.{name}")
    assert not wrong


def test_the_layers_are_in_the_docs():
    layers = "\n".join(" ".join(sorted(layer)) for layer in LAYERS if layer != {"__main__"})
    assert f"```\n{layers}\n```" in (ROOT / "docs" / "architecture.md").read_text()


def test_plug_ins_import_only_the_seams_and_never_each_other():
    wrong = []
    for path in sources():
        me = module_of(path).split(".")
        if me[1] not in TOP_LEVEL:
            continue
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "agentrl" and parts[1] not in PLUGINS_MAY_IMPORT | {me[1]}:
                wrong.append(f"{'.'.join(me)} imports {name}")
    assert not wrong


def test_every_public_class_has_a_name_of_its_own():
    places: dict[str, list[str]] = {}
    for path in sources():
        for name in read(path)[1]:
            if not name.startswith("_") and name not in SHARED_NAMES:
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_tests_folders_are_the_products():
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/*.py"))}
    assert folders <= {name.removeprefix("agentrl.") for name in packages()}


MAX_DEPTH = 20
"""Files on the longest chain of imports."""
SETTINGS_MODULES = {
    "agents",
    "algorithm",
    "arrays",
    "base",
    "batch",
    "branches",
    "budget",
    "config",
    "context",
    "credentials",
    "distribution",
    "encoded_image",
    "env_config",
    "errors",
    "expert_choices",
    "faults",
    "latency",
    "observations",
    "placed_images",
    "plugins",
    "retries",
    "rule_registry",
    "run_config",
    "sampling",
    "sealed_turns",
    "staleness",
    "suites",
    "trajectory",
    "wrappers",
    "yaml_values",
}
"""Names of modules that settings may need: settings themselves, values, and pure functions."""


@cache
def module_imports() -> dict[str, set[str]]:
    """The modules that each module imports, at its top or within a function; those that it needs
    for types alone do not count.
    """
    paths = {module_of(path).removesuffix(".__init__"): path for path in sources()}
    graph = {}
    for module, path in paths.items():
        names = {
            name if name in paths else name.rpartition(".")[0]
            for name in imports_of(path) - imports_for_types(path)
        }
        graph[module] = (names & paths.keys()) - {module, "agentrl"}
    return graph


def imports_for_types(path: Path) -> set[str]:
    """The imports of a module that stand under `if TYPE_CHECKING:`."""
    names: set[str] = set()
    for block in ast.parse(path.read_text()).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            statements = [line for line in block.body if isinstance(line, ast.ImportFrom)]
            names |= {f"{line.module}.{alias.name}" for line in statements for alias in line.names}
    return names


@cache
def longest_chain(module: str) -> tuple[str, ...]:
    """The longest chain of imports that begins with a module."""
    chains = [longest_chain(name) for name in sorted(module_imports()[module])]
    return (module, *max(chains, key=len, default=()))


def test_no_module_is_deeper_than_twenty_files():
    deepest = max(map(longest_chain, sorted(module_imports())), key=len)
    assert len(deepest) <= MAX_DEPTH, (
        f"a chain of {len(deepest)} imports, of which {MAX_DEPTH} are allowed; cut it where a"
        " module needs only a value or a setting of the next one:\n" + "\n  -> ".join(deepest)
    )


def test_the_settings_of_a_run_import_no_machinery():
    reached, left = set[str](), ["agentrl.config.run_config"]
    while left:
        module = left.pop()
        is_seam = module.startswith("agentrl.protocols")
        if module not in reached and not is_seam:
            reached.add(module)
            left += module_imports()[module]
    machinery = [module for module in reached if module.rpartition(".")[2] not in SETTINGS_MODULES]
    assert not machinery, "put the settings that the config needs into a module of their own"


def test_importing_and_reading_a_config_load_no_torch_ray_or_vllm():
    heavy = {"torch", "vllm", "ray", "transformers"}
    # One process for all: what one loads is said with its name, and starting each its own costs a
    # second.
    code = (
        "import importlib, sys\n"
        "for name in ('agentrl', 'agentrl.protocols', 'agentrl.cli', 'agentrl.testing'):\n"
        "    importlib.import_module(name)\n"
        f"    print(name, *sorted({heavy!r} & set(sys.modules)))\n"
        "from pathlib import Path\n"
        "from agentrl.config import load_config\n"
        "load_config(Path('examples/frozen_lake.yaml'))\n"
        f"print('a config', *sorted({heavy!r} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
        cwd=ROOT,
    )
    assert out.stdout.split("\n") == [
        "agentrl",
        "agentrl.protocols",
        "agentrl.cli",
        "agentrl.testing",
        "a config",
        "",
    ]


def test_what_imports_for_seconds_is_not_called_by_the_event_loop():
    """The first import of transformers, or of the rules of families, takes seconds, in which
    nothing else happens.
    """
    slow = {"renderer_of", "create_tiny_model"}
    wrong = []
    for path in sources():
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.AsyncFunctionDef):
                calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
                called = {call.id for call in calls if isinstance(call, ast.Name)} & slow
                wrong += [
                    f"{path.relative_to(ROOT)}: {function.name} calls {name}" for name in called
                ]
    assert not wrong


def test_no_module_reads_the_wall_clock_or_gathers_or_draws_from_a_global_generator():
    banned = {
        "time.time(": "flow.now()",
        "time.sleep(": "asyncio.sleep",
        "asyncio.gather": "Flow",
        "asyncio.create_task": "Flow.start",
        "asyncio.ensure_future": "Flow.start",
        "random.seed(": "random.Random(seed)",
        "np.random.seed": "numpy.random.Generator",
        "torch.manual_seed": "torch.Generator",
    }
    wrong = [
        f"{path.relative_to(ROOT)}: {call} (use {instead})"
        for path in sources()
        for call, instead in banned.items()
        # check_env seeds the global generators to see that an environment does not care.
        if call in path.read_text() and path != ROOT / "agentrl/testing/envs.py"
    ]
    assert not wrong


SHIPPED = sorted(
    [*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "learn").glob("*.yaml")]
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_is_valid_and_at_most_thirty_lines(path):
    from agentrl.config import load_config

    load_config(path)
    lines = [
        line
        for line in path.read_text().splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    assert len(lines) <= 30
