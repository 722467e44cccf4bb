"""The page of plug-ins is true: it lists every kind, and what it shows works."""

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import CodingAgent, ConfigError, GenerateRequest, StalenessRule, plugins
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import check_env, check_staleness_rule
from agentrl.tokens.arrays import ints
from tests.conftest import Done

PAGE = Path(__file__).parents[1] / "docs" / "plug-ins.md"
BLOCK = re.compile(r"^```python\n(# plug-in: (\S+)\.py\n.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = {name: code for code, name in BLOCK.findall(PAGE.read_text())}


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all modules on the page, which can be imported."""
    for name, code in SHOWN.items():
        (tmp_path / f"{name}.py").write_text(code)
    # A scheme has no other name than its entry point's.
    metadata = tmp_path / "dice-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dice\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[agentrl.env_schemes]\ndice = dice:scheme\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in SHOWN:
        sys.modules.pop(name, None)


def load(kind: str, address: str) -> Any:
    return plugins.load(kind, address)


def test_every_kind_of_plug_in_is_listed() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(plugins.GROUPS)


@pytest.mark.usefixtures("shown")
def test_the_scheme_makes_environments_that_keep_the_contract() -> None:
    scheme = load("env_schemes", "dice:scheme")
    check_env(scheme("6"))
    with pytest.raises(ConfigError, match="dice:20"):
        scheme("one")


@pytest.mark.usefixtures("shown")
def test_the_wrapper_counts_down_and_ends_the_episode() -> None:
    wrapper = load("env_wrappers", "turns_left:TurnsLeft")
    lake = load("envs", "frozen_lake")()
    env = wrapper(wrapper.Config(turns=2, cost=0.25), lake)
    env.reset(seed=0, options={})
    first, second = env.step("up"), env.step("up")
    assert first[0].endswith("1 turns are left.")
    assert first[1:4] == (-0.25, False, False)
    assert second[3]


@pytest.mark.usefixtures("shown")
def test_the_staleness_rule_keeps_its_promises() -> None:
    rule = load("staleness_rules", "first_come:FirstCome")
    assert issubclass(rule, StalenessRule)
    check_staleness_rule(rule)


@pytest.mark.usefixtures("shown")
def test_the_preset_is_one() -> None:
    assert isinstance(load("coding_agents", "my_agent:MY_AGENT"), CodingAgent)


@pytest.mark.usefixtures("shown")
def test_the_engine_answers_with_the_end_of_the_prompt() -> None:
    made = load("engines", "parrot:Parrot")
    engine = made(made.Config())
    request = GenerateRequest("one", ints([5, 6, 7]), SamplingParams(max_tokens=2))
    completion = asyncio.run(engine.generate(request))
    assert completion.token_ids.tolist() == [6, 7]
    assert engine.stats().generated_tokens == 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "parrot:Parrot"])
def test_a_run_takes_them_together(engine: str, shown: Path, agentrl: Callable[..., Done]) -> None:
    (shown / "run.yaml").write_text(
        f"""\
steps: 2
env:
  name: dice:6
  wrappers: [{{name: "turns_left:TurnsLeft", turns: 2}}]
tasks: {{name: "alternating:Alternating", options: {{}}}}
model: tiny
engine: "{engine}"
rollout:
  groups_per_step: 2
  group_size: 2
  max_staleness: 1
  staleness_rule: "first_come:FirstCome"
  sampling: {{max_tokens: 8}}
trackers: ["csv_tracker:CsvTracker"]
evaluation: {{tasks: 0}}
run_dir: run
"""
    )
    ended = agentrl("train", "run.yaml", cwd=shown)
    assert ended.returncode == 0, ended.stderr
    rows = (shown / "run" / "metrics.csv").read_text().splitlines()
    assert {row.split(",")[0] for row in rows} == {"0", "1"}
