"""The reference pages follow the code, and every metric that a run writes has a meaning."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import agentrl.testing
from agentrl.observe.meanings import MEANINGS, meaning_of

DOCS = Path(__file__).parents[1] / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = script("generate")


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_of_reference_is_what_the_code_says(name: str) -> None:
    written = (DOCS / name).read_text()
    assert written == generate.PAGES[name](), "run `python docs/generate.py`"


def test_every_setting_has_a_meaning() -> None:
    rows = [line for line in generate.settings_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize(
    "name",
    [
        "reward/a-part",
        "reward/code/all_passed",
        "staleness/tokens/3",
        "critic/grad_norm",
        "critic/value",
        "loss",
    ],
)
def test_names_with_a_part_have_the_meaning_of_their_pattern(name: str) -> None:
    assert meaning_of(name)


@pytest.mark.parametrize(
    "name", ["lost", "reward/", "eval", "eval/agents/black", "staleness/tokens/1/2"]
)
def test_a_name_that_is_none_has_no_meaning(name: str) -> None:
    assert meaning_of(name) is None


def test_no_metric_is_in_two_topics() -> None:
    names = [name for topic in MEANINGS.values() for name in topic]
    assert len(names) == len(set(names))


def test_the_api_reference_has_every_public_name_with_its_meaning() -> None:
    page = script("api_reference").api_page()
    entries = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    public = {f"agentrl.{name}" for name in agentrl.__all__ if name != "__version__"}
    public |= {f"agentrl.testing.{name}" for name in agentrl.testing.__all__}
    assert public <= set(entries)
    assert [name for name in public if len(entries[name].split("```")[2].split()) < 3] == []
    assert "- `reset(" in entries["agentrl.Env"]
    assert "def group_mean(rewards_G" in entries["agentrl.group_mean"]
