"""A plan says which other mesh of the trainer's ranks fits, and which is faster."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError
from agentrl.models.facts import PUBLISHED, model_facts
from agentrl.placement.devices import gpu_named
from agentrl.placement.inventory import Inventory
from agentrl.planner.meshes import MeshChoice, mesh_choice
from agentrl.planner.plan import Plan
from agentrl.planner.report import as_json, print_plan
from agentrl.planner.run_facts import model_of
from agentrl.planner.search import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_NODES = Inventory.uniform(gpu_named("H100"), 8, 2)
# Quick to simulate.
SMALL = ("rollout.groups_per_step=8", "rollout.group_size=4")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)


def config(name: str, *overrides: str) -> RunConfig:
    return load_config(EXAMPLES / f"{name}.yaml", overrides).config


def planned(name: str, *overrides: str) -> Plan:
    chosen = config(name, *overrides)
    return make_plan(chosen, TWO_NODES, model_of(chosen))


def as_overrides(settings: dict[str, int]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture(scope="module")
def mixture() -> Plan:
    """Of a mixture of experts whose trainer exchanges weights between two machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(EXAMPLES.parent)
        return planned("qwen3_30b_a3b", *SMALL, "placement=colocated")


def test_each_mesh_is_counted_as_if_it_were_written(mixture: Plan) -> None:
    choice = mixture.meshes
    assert choice is not None
    found = {tuple(option.settings.items()) for option in choice.others}
    assert len(found) == len(choice.others) > 20
    assert (("replicas", 2), ("expert_parallel", 8)) in found
    assert any(option.problems for option in choice.others)
    for option in choice.others[::8]:
        settings = {f"trainer.{axis}": n for axis, n in option.settings.items()}
        written = config(
            "qwen3_30b_a3b", *SMALL, "trainer.world_size=16", *as_overrides(settings),
            *as_overrides(dict(mixture.chosen)),
        )  # fmt: skip
        own = mesh_choice(written, mixture.facts, mixture.work, mixture.devices)
        assert isinstance(own, MeshChoice)
        assert own.written == option


def test_a_mesh_that_is_faster_is_as_fast_when_it_is_written(mixture: Plan) -> None:
    advice = mixture.advice
    assert advice is not None
    assert advice.mesh.settings["expert_parallel"] > 1
    assert advice.step.train < mixture.step.train / 2
    settings = as_json(mixture)["faster"]["settings"]
    again = planned("qwen3_30b_a3b", *SMALL, "placement=colocated", *as_overrides(settings))
    assert again.step == advice.step
    assert again.advice is None or again.advice.step.seconds > 0.9 * again.step.seconds
    said = io.StringIO()
    print_plan(mixture, Console(file=said, width=200))
    assert " ".join(as_overrides(settings)) in said.getvalue()
    assert "mesh of the trainer's 16 ranks" in said.getvalue()


def test_a_context_that_does_not_fit_one_rank_is_divided() -> None:
    long = (
        "rollout.budget={turns: 64}",
        "engine.max_context=131072",
        "model.hf_overrides={max_position_embeddings: 131072}",
    )
    with pytest.raises(ConfigError) as refusal:
        planned("qwen3_32b", *SMALL, *long)
    way = "trainer.world_size=16 trainer.context_parallel=4"
    assert f"  {way}\n" in str(refusal.value)
    plan = planned("qwen3_32b", *SMALL, *long, *way.split())
    assert plan.meshes is not None
    assert plan.meshes.written.settings == {"context_parallel": 4}


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel=16 divides .* heads, .* model has 40"):
        planned(
            "qwen3_32b", *SMALL, "model=Qwen/Qwen3-14B", "trainer.world_size=16",
            "trainer.context_parallel=16",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("Qwen3-30B-A3B", 30.53, 3.3), ("Qwen3-235B-A22B", 235.09, 22)],
)
def test_published_mixtures_have_their_sizes(name: str, billions: float, active: float) -> None:
    facts = model_facts(PUBLISHED / "Qwen" / name)
    assert facts.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert (facts.active + 2 * facts.embedding) / 1e9 == pytest.approx(active, rel=0.05)
