"""Which tests a change reaches: along imports, names of modules, plug-ins and files, and data; else
all of them.
"""

import re
import signal
from collections.abc import Mapping

import pytest

from tests.reach import LONG, ROOT, Tree, dependencies, in_order, reached, tree_of, verdict

FILES: Mapping[str, str] = {
    "agentrl/__init__.py": '_NAMES = {"Task": "agentrl.tasks"}\ndef __getattr__(name): ...',
    "agentrl/tasks.py": "class Task: ...",
    "agentrl/flow.py": "def now(): ...",
    "agentrl/run.py": (
        "def run():\n    from agentrl.flow import now\n    return load('engines', 'fast')"
    ),
    "agentrl/fast.py": "import agentrl.remote.client",
    "agentrl/remote/__init__.py": "",
    "agentrl/remote/client.py": "",
    "agentrl/viewer/__init__.py": "",
    "agentrl/viewer/page/run.js": "draw()",
    "envs/lake.py": "",
    "examples/lake.yaml": "env: {name: frozen, size: 4}",
    "docs/oracles.md": "A table.",
    "pyproject.toml": "",
    "tests/conftest.py": "import pytest\n@pytest.fixture\ndef page():\n    import agentrl.viewer",
    "tests/test_tasks.py": "from agentrl import Task",
    "tests/test_flow.py": "from agentrl.flow import now",
    "tests/test_run.py": "from agentrl.run import run",
    "tests/test_script.py": 'SCRIPT = "from agentrl.run import run"',
    "tests/test_page.py": "def test_it(page): ...",
    "tests/test_example.py": 'PATH = ROOT / "examples" / "lake.yaml"',
    "tests/test_override.py": 'train("env.name=frozen")',
    "tests/test_oracles.py": 'PAGE = "docs/oracles.md"',
    "tests/test_pages.py": 'PAGES = DOCS.glob("*.md")',
}
TREE = Tree(
    FILES, {"fast": ["agentrl.fast"], "frozen": ["agentrl.envs.lake"]}, {"agentrl/envs": "envs"}
)
ALL = {name for name in FILES if name.startswith("tests/test_")}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("agentrl/tasks.py", "tasks"),  # a name that is imported lazily
        # An import in a function, and in a script that is a text.
        (
            "agentrl/flow.py",
            "flow run script",
        ),
        ("agentrl/remote/client.py", "run script"),  # by a plug-in's name
        ("agentrl/remote/__init__.py", "run script"),  # a package of what is imported
        ("agentrl/viewer/page/run.js", "page"),  # data of a package that a fixture imports
        ("envs/lake.py", "example override"),  # a config's text, and an override
        ("examples/lake.yaml", "example"),
        ("docs/oracles.md", "oracles pages"),  # by its name, and by a pattern
        ("tests/test_flow.py", "flow"),
        ("LICENSE", ""),
    ],
)
def test_a_change_reaches_what_depends_on_it(changed: str, tests: str) -> None:
    assert set(reached(TREE, [changed])) == {f"tests/test_{name}.py" for name in tests.split()}


@pytest.mark.parametrize(
    "changed",
    ["pyproject.toml", "tests/conftest.py", "agentrl/gone.py", "Makefile", "uv.lock", ".ci/run"],
)
def test_what_nothing_is_known_of_reaches_everything(changed: str) -> None:
    assert set(reached(TREE, ["agentrl/tasks.py", changed])) == ALL


def test_the_nearest_come_first() -> None:
    distances = reached(TREE, ["agentrl/remote/client.py", "agentrl/flow.py"])
    assert distances == {"tests/test_flow.py": 1, "tests/test_run.py": 2, "tests/test_script.py": 2}
    assert next(iter(distances)) == "tests/test_flow.py"


def test_near_files_run_first_and_none_after_one_that_hides_the_fixtures_of_folders() -> None:
    near = {
        "tests/test_a.py": 0,
        "tests/b/test_b.py": 2,
        "tests/c/test_c.py": 1,
        "tests/test_d.py": 1,
    }
    expected = ["tests/c/test_c.py", "tests/b/test_b.py", "tests/test_a.py", "tests/test_d.py"]
    assert in_order([*near], near, "one commit") == expected
    equal = dict.fromkeys((f"tests/e/test_{number}.py" for number in range(20)), 0)
    orders = {tuple(in_order([*equal], equal, commit)) for commit in ("one", "two", "two")}
    assert len(orders) == 2


def test_this_repository_is_understood() -> None:
    tree = tree_of(ROOT)
    assert "agentrl/flow/__init__.py" in dependencies(tree, "tests/flow/test_flow.py")
    assert "envs/frozen_lake.py" in dependencies(tree, "examples/frozen_lake.yaml")
    assert "agentrl/cluster/ray_cluster.py" in dependencies(tree, "tests/cluster/chaos.py")
    assert all(tree.module(name) for names in tree.plugins.values() for name in names)


PASSED = "[gw0] [ 50%] PASSED tests/test_a.py::test_a\n"
FAILED = "[gw1] [ 50%] FAILED tests/test_b.py::test_b\n"


@pytest.mark.parametrize(
    ("lines", "code", "wanted"),
    [
        ([PASSED], 0, 0),
        ([], 5, 0),  # nothing was collected
        ([PASSED], 2, 0),  # the time was up
        ([PASSED], -signal.SIGKILL, 0),
        ([PASSED, FAILED], 1, 1),
        ([PASSED, FAILED], 2, 1),  # it failed before
        (["ERROR tests/test_b.py - ImportError\n"], 2, 1),
        (["INTERNALERROR> Traceback\n"], 3, 1),
        ([], 4, 1),
    ],
)
def test_the_end_of_the_time_is_no_failure_and_a_failure_before_it_is_one(
    lines: list[str], code: int, wanted: int
) -> None:
    assert verdict(lines, code) == wanted


def test_properties_are_long_tests_too() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(r"^@given\(", text := path.read_text(), re.MULTILINE):
            assert LONG.search(text), path
