"""The reference pages follow the code, and every metric that a run writes has a meaning."""

import importlib.util
from pathlib import Path

import pytest

from agentrl.observe.meanings import MEANINGS, meaning_of

DOCS = Path(__file__).parents[1] / "docs"
spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


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
