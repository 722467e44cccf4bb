"""What a plan says of an update of weights is what a run moves."""

import asyncio
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from agentrl.config import RunConfig, load_config
from agentrl.engines.local import LocalEngine
from agentrl.engines.router import Router
from agentrl.errors import ConfigError
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.devices import GIB, gpu_named, host
from agentrl.placement.inventory import Inventory
from agentrl.planner.plan import Plan
from agentrl.planner.report import as_json, print_plan
from agentrl.planner.run_facts import model_of, sent_weights
from agentrl.planner.search import make_plan
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.weights.bundle import WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.moved import BytesMoved, Move, Parties, gather_moves
from agentrl.weights.publisher import Published, WeightPublisher
from agentrl.weights.transports.live import LiveShipment

H100 = gpu_named("H100")
SMALL = ("rollout.groups_per_step=8", "rollout.group_size=4")
LORA = "trainer.lora={rank: 3, targets: [q_proj, down_proj]}"
TWO_RANKS = ("weights.transport=stream", "trainer=fsdp", "trainer.world_size=2")
EXAMPLES = Path(__file__).parents[2] / "examples"

SHAPE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "dense": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "tied": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "mixture": lambda: Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=12, num_experts=3, num_experts_per_tok=2
    ),
}


def planned(config: RunConfig, inventory: Inventory) -> Plan:
    return make_plan(config, inventory, model_of(config))


def extra_bytes(published: Published) -> int:
    """What files, or buckets, have beside the weights."""
    shipment = published.weights
    if isinstance(shipment, LiveShipment):
        plan = shipment.lanes.plan
        return plan.size - 4 * sum(unit.numel for b in plan.buckets for unit in b.units)
    if not isinstance(shipment, WeightBundle):
        return 0
    # A header begins with its own length, in eight bytes.
    files = [(shipment.folder / name).read_bytes() for name in shipment.manifest.files]
    return sum(8 + int.from_bytes(file[:8], "little") for file in files)


async def published(config: RunConfig, folder: Path) -> tuple[float, int]:
    """The metric `weights/bytes` of an update, and what is not weights in it."""
    settings: Any = config.trainer.settings
    async with (
        LocalTrainer(settings, folder, total_steps=1) as trainer,
        LocalEngine(LocalEngine.Config(max_context=64), folder) as engine,
        WeightPublisher(engine, config=sent_weights(config).config) as publisher,
    ):
        made = await publisher.publish(trainer, 1)
        assert engine.policy_version == 1
        return made.metrics()["weights/bytes"], extra_bytes(made)


@pytest.mark.parametrize("transport", ["direct", "files", "handles", "stream"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "dense" else pytest.mark.long)
        for kind in (*CONFIGS, "adapters", "adapters of a mixture")
    ],
)
def test_the_bytes_of_a_plan_are_those_of_an_update(
    kind: str, transport: str, tmp_path: Path
) -> None:
    shape = {"adapters": "dense", "adapters of a mixture": "mixture"}.get(kind, kind)
    AutoModelForCausalLM.from_config(CONFIGS[shape]()).save_pretrained(tmp_path / "model")
    lora = {"adapters": [LORA], "adapters of a mixture": ["trainer.lora={rank: 3}"]}.get(kind, [])
    more = [f"model={tmp_path / 'model'}", f"weights.transport={transport}", "weights.bucket_mib=1"]
    more += ["weights.deadline=60"]
    config = load_config(EXAMPLES / "frozen_lake.yaml", [*SMALL, *more, *lora]).config
    plan = planned(config, Inventory.uniform(host(cores=2, memory=16 * GIB)))
    metric, beside = asyncio.run(published(config, tmp_path / "model"))
    assert plan.transport == transport
    assert plan.update.size == metric - beside
    assert (metric > 0) == (transport != "direct")
    assert plan.step.weights > 0


@pytest.mark.long
@pytest.mark.parametrize("transport", ["files", "handles", "stream"])
def test_the_bytes_of_a_plan_are_those_of_an_update_from_two_ranks_to_two_engines(
    transport: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["dense"]()).save_pretrained(tmp_path)
    more = [f"model={tmp_path}", f"weights.transport={transport}", "weights.bucket_mib=1"]
    more += ["trainer=fsdp", "trainer.world_size=2", "cluster.engines=2", "weights.deadline=120"]
    config = load_config(EXAMPLES / "frozen_lake.yaml", [*SMALL, *more]).config
    plan = planned(config, Inventory.uniform(host(cores=2, memory=16 * GIB)))

    async def update() -> tuple[float, int]:
        engines = [LocalEngine(LocalEngine.Config(max_context=64), tmp_path) for _ in range(2)]
        settings: Any = config.trainer.settings
        async with (
            FsdpTrainer(settings, tmp_path, total_steps=1) as trainer,
            Router(engines) as router,
            WeightPublisher(router, config=sent_weights(config).config) as publisher,
        ):
            made = await publisher.publish(trainer, 1)
            assert [engine.policy_version for engine in engines] == [1, 1]
            return made.metrics()["weights/bytes"], extra_bytes(made)

    metric, beside = asyncio.run(update())
    assert plan.transport == transport
    assert plan.update.size == metric - beside
    # Each rank gathers the other half, and both engines read everything.
    found = moves(plan.update)
    assert found["gather"].total == plan.update.size // 2
    read = {"files": "load", "handles": "copy", "stream": "send"}[transport]
    copies = 2 if transport == "handles" else 1  # what is copied is read and written
    assert found[read].total == copies * 2 * plan.update.size


def test_on_a_cpu_nothing_that_is_moved_overlaps() -> None:
    found = of("frozen_lake", Inventory.uniform(host(cores=2, memory=16 * GIB)), *TWO_RANKS)
    gather, send = found.update.phases[0]
    link = 0.7 * host(cores=2, memory=16 * GIB).link
    assert found.step.weights == pytest.approx((gather.largest + send.largest) / link)


def moves(moved: BytesMoved) -> Mapping[str, Move]:
    return {move.name: move for phase in moved.phases for move in phase}


def of(name: str, inventory: Inventory, *overrides: str) -> Plan:
    return planned(load_config(EXAMPLES / f"{name}.yaml", [*SMALL, *overrides]).config, inventory)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)


def test_roles_on_the_same_devices_share_memory_and_others_a_network() -> None:
    shared = of("qwen3_8b", Inventory.uniform(H100, 8))
    assert shared.transport == "handles"
    size = 2 * shared.facts.parameters
    assert shared.update.size == size
    found = moves(shared.update)
    # All ranks gather everything, and each writes an eighth, beside the next step.
    assert found["gather"].largest == int(size * 7 / 8)
    assert [(move.name, move.largest) for move in shared.update.beside] == [("write", size // 8)]
    readers = len(shared.devices.of("engine")) * shared.devices.tensor_parallel()
    assert found["copy"].total == 2 * readers * size
    apart = of("disaggregated_16gpu", Inventory.uniform(H100, 8, 2))
    assert apart.transport == "stream"
    assert moves(apart.update)["send"].largest == apart.update.size
    adapters = of("qwen3_8b", Inventory.uniform(H100, 8), "trainer.lora={rank: 8}")
    assert adapters.transport == "files"
    assert adapters.update.size == 4 * 8 * adapters.facts.ends_of()
    assert 0 < adapters.step.weights < shared.step.weights / 10


@pytest.mark.parametrize(
    ("parts", "machines", "gathered", "between"),
    [
        pytest.param(16, 2, 15 / 16, 1 / 2, id="one replica on two machines"),
        pytest.param(8, 2, 7 / 8, 0, id="a replica on each machine"),
        pytest.param(4, 2, 3 / 4, 0, id="two replicas on each machine"),
        pytest.param(8, 4, 7 / 8, 1 / 2, id="a replica on each two machines"),
    ],
)
def test_a_weight_is_gathered_within_a_replica(
    parts: int, machines: int, gathered: float, between: float
) -> None:
    ranks = [rank * machines // 16 for rank in range(16)]
    size = 1 << 30
    parties = Parties(size, 1 << 20, 1 << 20, 1024, ranks, parts, [0], 1, 1, ())
    moved = {move.name: move for move in gather_moves(parties)}
    assert moved.pop("gather").total == gathered * size
    assert sum(move.total for move in moved.values()) == between * size


def test_a_run_whose_cluster_assigns_no_devices_sends_files() -> None:
    one = Inventory.uniform(H100, 1)
    config = load_config(EXAMPLES / "frozen_lake.yaml", [*SMALL]).config
    assert planned(config, one).transport == "files"


def mute(config: WeightsConfig) -> object:
    """A transport that does not say what it moves."""
    return object()


def test_a_transport_that_does_not_say_what_it_moves_cannot_be_planned_with() -> None:
    with pytest.raises(ConfigError, match=f"{__name__}:mute does not say .* `bytes_moved`"):
        of("qwen3_8b", Inventory.uniform(H100, 8), f"weights.transport={__name__}:mute")


def test_what_an_update_holds_is_counted_where_it_is() -> None:
    plan = of("qwen3_8b", Inventory.uniform(H100, 8))
    size, embedding = 2 * plan.facts.parameters, 2 * plan.facts.embedding
    held = 2 * embedding + embedding
    assert plan.update.held == held  # a bucket is smaller than the embedding
    first, second = plan.loads[0].host_parts, plan.loads[1].host_parts
    on_way = held + size // 8  # with what each still writes
    assert first["weights on their way"] == second["weights on their way"] == on_way
    assert first["published weights"] == 2 * size
    assert "published weights" not in second
    on_disk = of("qwen3_8b", Inventory.uniform(H100, 8), "weights.transport=disk")
    assert "published weights" not in on_disk.loads[0].host_parts
    away = of("disaggregated_16gpu", Inventory.uniform(H100, 8, 2), "weights.transport=files")
    assert sum("published weights" in load.host_parts for load in away.loads) == 2


def test_a_plan_prints_what_an_update_moves() -> None:
    plan = of("qwen3_8b", Inventory.uniform(H100, 8))
    console = Console(record=True, width=400, file=io.StringIO())
    print_plan(plan, console)
    said = console.export_text()
    size = plan.update.size / GIB
    assert f"new weights: {size:,.2f} GiB by handles, {plan.step.weights:,.2f} s" in said
    for name in moves(plan.update):
        assert name in said
    found = as_json(plan)["update"]
    assert found["transport"] == "handles"
    assert found["bytes"] == plan.update.size
    assert found["phases"][0][0]["name"] == "gather"


def test_an_update_takes_as_long_as_the_slowest_of_what_happens_together() -> None:
    plan = of("qwen3_8b", Inventory.uniform(H100, 8))
    found = moves(plan.update)
    waiting = plan.update.waiting
    assert waiting > found["gather"].largest / (0.7 * H100.link)
    assert waiting > 0.005 * plan.update.size / 2**26
    assert plan.step.weights == pytest.approx(waiting)
    assert plan.update.beside[0].largest / 1.2e9 > waiting  # and is not waited for
    slow = Inventory.uniform(replace(H100, link=1e8), 8)
    assert of("qwen3_8b", slow, f"engine.tensor_parallel={tp(plan.devices)}").step.weights > 100


def tp(devices: DeviceMap) -> int:
    return max(2, devices.tensor_parallel())
